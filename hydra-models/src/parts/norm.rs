//! Normalization layers.

use super::uninitialized;
use crate::ops;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// A layer normalization or a root-mean-square normalization.
#[derive(Module, Debug)]
pub struct Norm {
    /// `[width]`.
    pub weight: Param<Tensor<1>>,
    /// `[width]`, if it has a bias.
    pub bias: Option<Param<Tensor<1>>>,
    /// The epsilon added to the variance or the mean square.
    pub epsilon: f64,
    /// Whether it is a root-mean-square normalization, which has no bias.
    #[module(skip)]
    is_rms: bool,
}

impl Norm {
    /// A layer normalization with a bias, without values.
    pub fn new(width: usize, epsilon: f64) -> Self {
        Self { bias: Some(uninitialized([width])), ..Self::without_bias(width, epsilon) }
    }

    /// A layer normalization without a bias and without values.
    pub fn without_bias(width: usize, epsilon: f64) -> Self {
        Self { weight: uninitialized([width]), bias: None, epsilon, is_rms: false }
    }

    /// A root-mean-square normalization without values.
    pub fn rms(width: usize, epsilon: f64) -> Self {
        Self { is_rms: true, ..Self::without_bias(width, epsilon) }
    }

    /// Normalizes with a layer that a model may not have.
    pub(crate) fn optional(norm: Option<&Self>, x: Tensor<3>) -> Tensor<3> {
        match norm {
            Some(norm) => norm.forward(x),
            None => x,
        }
    }

    /// Normalizes the last dimension of `[batch, tokens, width]`. A root-mean-square normalization normalizes each part of its width
    /// separately if the last dimension is a multiple of that.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let weight = self.weight.val();
        if self.is_rms {
            return ops::rms_norm(x, weight, self.epsilon);
        }
        let bias = self.bias.as_ref().map_or_else(|| weight.zeros_like(), Param::val);
        ops::layer_norm(x, weight, bias, self.epsilon)
    }
}
