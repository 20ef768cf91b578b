//! The last layer: pooling and logits.

use super::ResNetConfig;
use crate::ops;
use crate::parts::{Linear, before_last};
use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use hydra_core::{Activation, AnyTensor, Chain, DeviceBytes, Forward, Init, Pass};

/// Global average pooling and the classifier. Computes logits `[items, classes]` from `[items, channels, height, width]`.
#[derive(Module, Debug)]
pub struct Head {
    /// The classifier, `[classes, channels]`.
    pub classifier: Linear,
}

impl Head {
    /// The layer without values.
    pub fn new(config: &ResNetConfig) -> Self {
        let width = config.hidden_sizes.last().copied().unwrap_or(1);
        Self { classifier: Linear::new(width, config.labels.count(), true) }
    }
}

/// The mean over all positions, `[items, 1, channels]`, rounded once.
fn pooled(x: Tensor<4>) -> Tensor<3> {
    let ([items, channels, height, width], stored) = (x.dims(), x.dtype());
    let mean = x.reshape([items, channels, height * width]).cast(DType::F32).mean_dim(2);
    mean.reshape([items, 1, channels]).cast(stored)
}

impl Forward for Head {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        Activation::of(self.classifier.forward(pooled(x.into_float()), pass).squeeze_dim::<2>(1))
    }

    fn init(&self, _: &str, _: &[usize]) -> Init {
        let [_, inputs] = self.classifier.weight.lazy_shape().dims();
        Init::Uniform(1.0 / (inputs as f64).sqrt())
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [items, channels, height, width] = *inputs.first()?.as_slice() else { return None };
        let [classes, _] = self.classifier.weight.lazy_shape().dims();
        let elements = 4 * items * height * width * channels + 8 * items * (channels + classes);
        Some(((elements + 128 * channels) * size_of::<f32>()) as u64)
    }
}

/// The logits `[items, classes]` of a ResNet for images `[items, channels, side, side]`, by its running statistics, on the plain
/// `device`. Layers are promoted one after the other from the bytes that `buffer` returns.
///
/// # Panics
/// If the images do not fit `chain`.
pub fn logits(
    chain: &Chain,
    buffer: &dyn Fn(usize) -> DeviceBytes,
    images: AnyTensor,
    device: &Device,
) -> Tensor<2> {
    let (x, [weight, bias]) = before_last(chain, buffer, (images.into(), Activation::default()), device);
    ops::linear_transposed(pooled(x), weight.into_float(), Some(bias.into_float())).squeeze_dim(1)
}
