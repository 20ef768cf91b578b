//! The last layer: logits.

use super::VitConfig;
use crate::lora::{Adaptable, AdaptableMap, adapter_elements};
use crate::ops;
use crate::parts::{Adapter, Linear, Norm, before_last};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use hydra_core::{Activation, AnyTensor, Chain, DeviceBytes, Forward, Init, Pass};

/// The final normalization of the class token, and the classifier. Computes logits `[items,
/// classes]` from `[items, patches, width]`.
#[derive(Module, Debug)]
pub struct Head {
    /// The final normalization.
    pub layernorm: Norm,
    /// The classifier, `[classes, width]`.
    pub classifier: Linear,
    /// The standard deviation of initial weights.
    pub deviation: f64,
}

impl Head {
    /// The layer without values.
    pub fn new(config: &VitConfig) -> Self {
        Self {
            layernorm: Norm::new(config.hidden_size, config.layer_norm_eps),
            classifier: Linear::new(config.hidden_size, config.labels.count(), true),
            deviation: config.initializer_range,
        }
    }

    /// The logits `[items, classes]`.
    fn logits(&self, x: Tensor<3>, pass: &Pass) -> Tensor<2> {
        // The logits depend on the class token alone.
        let token = x.narrow(1, 0, 1);
        self.classifier.forward(self.layernorm.forward(token), pass).squeeze_dim(1)
    }
}

impl Adaptable for Head {
    fn maps(&mut self) -> Vec<AdaptableMap<'_>> {
        vec![self.classifier.adaptable("classifier")]
    }
}

impl Forward for Head {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        Activation::of(self.logits(x.into_float(), pass))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        if let Some(init) = Adapter::init(name, shape) {
            return init;
        }
        match name {
            _ if name.ends_with("bias") => Init::Zeros,
            _ if name.starts_with("layernorm") => Init::Ones,
            _ => Init::Normal(self.deviation),
        }
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [items, patches, width] = *inputs.first()?.as_slice() else { return None };
        let [classes, _] = self.classifier.weight.lazy_shape().dims();
        let elements = 2 * items * patches * width + 8 * items * (width + classes) + 128 * width;
        let elements = elements + items * adapter_elements(self);
        Some((elements * size_of::<f32>()) as u64)
    }
}

/// The logits `[items, classes]` of a vision transformer for images `[items, channels, side, side]`, without dropout,
/// on the plain `device`. Layers are promoted one after the other from the bytes that `buffer` returns.
///
/// # Panics
/// If `chain` is not the chain of `config`, or the images do not fit it.
pub fn logits(
    config: &VitConfig,
    chain: &Chain,
    buffer: &dyn Fn(usize) -> DeviceBytes,
    images: AnyTensor,
    device: &Device,
) -> Tensor<2> {
    let (x, [norm, norm_bias, weight, bias]) =
        before_last(chain, buffer, (images.into(), Activation::default()), device);
    let token = x.narrow(1, 0, 1);
    let token = ops::layer_norm(token, norm.into_float(), norm_bias.into_float(), config.layer_norm_eps);
    ops::linear_transposed(token, weight.into_float(), Some(bias.into_float())).squeeze_dim(1)
}
