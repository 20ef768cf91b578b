//! The last layer: pooling and logits.

use super::ConvNextConfig;
use super::layers::init;
use crate::ops;
use crate::parts::{Linear, Norm, before_last};
use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use hydra_core::{Activation, AnyTensor, Chain, DeviceBytes, Forward, Init, Pass};

/// Global average pooling, the final normalization and the classifier. Computes logits `[items, classes]` from
/// `[items, height, width, channels]`.
#[derive(Module, Debug)]
pub struct Head {
    /// The final normalization.
    pub layernorm: Norm,
    /// The classifier, `[classes, channels]`.
    pub classifier: Linear,
    /// The standard deviation of initial weights.
    pub deviation: f64,
}

impl Head {
    /// The layer without values.
    pub fn new(config: &ConvNextConfig) -> Self {
        let width = config.hidden_sizes[config.num_stages - 1];
        Self {
            layernorm: Norm::new(width, config.layer_norm_eps),
            classifier: Linear::new(width, config.labels.count(), true),
            deviation: config.initializer_range,
        }
    }
}

/// The mean over all positions, `[items, 1, channels]`, rounded once.
fn pooled(x: Tensor<4>) -> Tensor<3> {
    let ([items, height, width, channels], stored) = (x.dims(), x.dtype());
    let mean = x.reshape([items, height * width, channels]).cast(DType::F32).mean_dim(1);
    mean.cast(stored)
}

impl Forward for Head {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let mean = self.layernorm.forward(pooled(x.into_float()));
        Activation::of(self.classifier.forward(mean, pass).squeeze_dim::<2>(1))
    }

    fn init(&self, name: &str, _: &[usize]) -> Init {
        init(name, self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [items, height, width, channels] = *inputs.first()?.as_slice() else { return None };
        let [classes, _] = self.classifier.weight.lazy_shape().dims();
        let elements =
            4 * items * height * width * channels + 8 * items * (channels + classes) + 128 * channels;
        Some((elements * size_of::<f32>()) as u64)
    }
}

/// The logits `[items, classes]` of a ConvNeXt for images `[items, channels, side, side]`, on the plain `device`.
/// Layers are promoted one after the other from the bytes that `buffer` returns.
///
/// # Panics
/// If `chain` is not the chain of `config`, or the images do not fit it.
pub fn logits(
    config: &ConvNextConfig,
    chain: &Chain,
    buffer: &dyn Fn(usize) -> DeviceBytes,
    images: AnyTensor,
    device: &Device,
) -> Tensor<2> {
    let (x, [norm, norm_bias, weight, bias]) =
        before_last(chain, buffer, (images.into(), Activation::default()), device);
    let mean = ops::layer_norm(pooled(x), norm.into_float(), norm_bias.into_float(), config.layer_norm_eps);
    ops::linear_transposed(mean, weight.into_float(), Some(bias.into_float())).squeeze_dim(1)
}
