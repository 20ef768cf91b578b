//! The head of an image classifier.

use super::{Linear, Norm, initial};
use crate::lora::{Adaptable, AdaptableMap, adapter_elements};
use burn::module::Module;
use burn::tensor::{DType, Tensor};
use hydra_core::{Activation, Forward, Init, Pass};

/// The vector of an image that its classifier reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImagePooling {
    /// The class token, the first of `[items, patches, width]`.
    ClassToken,
    /// The mean over all positions of `[items, height, width, channels]`.
    ChannelsLast,
    /// The mean over all positions of `[items, channels, height, width]`.
    ChannelsFirst,
}

impl ImagePooling {
    /// The vectors, `[items, 1, channels]`. Means are rounded once.
    fn of(self, x: Activation) -> Tensor<3> {
        if self == Self::ClassToken {
            return x.into_float().narrow(1, 0, 1);
        }
        let x = x.into_float::<4>();
        let ([items, a, b, c], stored) = (x.dims(), x.dtype());
        let mean = match self {
            Self::ChannelsFirst => {
                let mean = x.reshape([items, a, b * c]).cast(DType::F32).mean_dim(2);
                mean.reshape([items, 1, a])
            }
            _ => x.reshape([items, a * b, c]).cast(DType::F32).mean_dim(1),
        };
        mean.cast(stored)
    }

    /// The maximum number of elements held for each element of an input of this rank.
    fn elements(self, rank: usize) -> Option<usize> {
        match (self, rank) {
            (Self::ClassToken, 3) => Some(2),
            (Self::ChannelsLast | Self::ChannelsFirst, 4) => Some(4),
            _ => None,
        }
    }
}

/// The pooling, the final normalization, if the model has it, and the classifier. Computes logits `[items, classes]`.
#[derive(Module, Debug)]
pub struct ImageHead {
    /// The final normalization.
    pub layernorm: Option<Norm>,
    /// The classifier, `[classes, channels]`.
    pub classifier: Linear,
    #[module(skip)]
    pooling: ImagePooling,
    /// The standard deviation of initial weights; PyTorch's uniform distribution if absent.
    #[module(skip)]
    deviation: Option<f64>,
}

impl ImageHead {
    /// A head without a normalization and without values, from vectors of `width`.
    pub(crate) fn new(pooling: ImagePooling, width: usize, classes: usize) -> Self {
        Self { layernorm: None, classifier: Linear::new(width, classes, true), pooling, deviation: None }
    }

    /// The head with a normalization of this epsilon, and with initial weights of this standard deviation.
    pub(crate) fn normalized(self, epsilon: f64, deviation: f64) -> Self {
        let [_, width] = self.classifier.weight.lazy_shape().dims();
        Self { layernorm: Some(Norm::new(width, epsilon)), deviation: Some(deviation), ..self }
    }
}

impl Adaptable for ImageHead {
    fn maps(&mut self) -> Vec<AdaptableMap<'_>> {
        vec![self.classifier.adaptable("classifier")]
    }
}

impl Forward for ImageHead {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let pooled = Norm::optional(self.layernorm.as_ref(), self.pooling.of(x));
        Activation::of(self.classifier.forward(pooled, pass).squeeze_dim::<2>(1))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        let [_, width] = self.classifier.weight.lazy_shape().dims();
        match self.deviation {
            Some(deviation) => initial(name, shape, deviation),
            None => Init::Uniform(1.0 / (width as f64).sqrt()),
        }
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let input = inputs.first()?;
        let [classes, width] = self.classifier.weight.lazy_shape().dims();
        let read = self.pooling.elements(input.len())? * input.iter().product::<usize>();
        let each = 8 * (width + classes) + adapter_elements(self);
        Some(((read + input[0] * each + 128 * width) * size_of::<f32>()) as u64)
    }
}
