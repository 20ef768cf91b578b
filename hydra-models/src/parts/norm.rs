//! Normalization layers.

use super::uninitialized;
use crate::ops;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// A layer normalization.
#[derive(Module, Debug)]
pub struct Norm {
    /// `[width]`.
    pub weight: Param<Tensor<1>>,
    /// `[width]`, if it has a bias.
    pub bias: Option<Param<Tensor<1>>>,
    /// The epsilon added to the variance.
    pub epsilon: f64,
}

impl Norm {
    /// A layer with a bias, without values.
    pub fn new(width: usize, epsilon: f64) -> Self {
        Self { bias: Some(uninitialized([width])), ..Self::without_bias(width, epsilon) }
    }

    /// A layer without a bias and without values.
    pub fn without_bias(width: usize, epsilon: f64) -> Self {
        Self { weight: uninitialized([width]), bias: None, epsilon }
    }

    /// Normalizes the last dimension of `[batch, tokens, width]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let weight = self.weight.val();
        let bias = self.bias.as_ref().map_or_else(|| weight.zeros_like(), Param::val);
        ops::layer_norm(x, weight, bias, self.epsilon)
    }
}

/// A root-mean-square normalization.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// `[width]`.
    pub weight: Param<Tensor<1>>,
    /// The epsilon added to the mean square.
    pub epsilon: f64,
}

impl RmsNorm {
    /// A layer without values.
    pub fn new(width: usize, epsilon: f64) -> Self {
        Self { weight: uninitialized([width]), epsilon }
    }

    /// Normalizes the last dimension of `[batch, tokens, width]`; if that is a multiple of the weight's width, each
    /// part of that width separately.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        ops::rms_norm(x, self.weight.val(), self.epsilon)
    }
}
