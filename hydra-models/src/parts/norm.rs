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
    /// `[width]`.
    pub bias: Param<Tensor<1>>,
    /// The epsilon added to the variance.
    pub epsilon: f64,
}

impl Norm {
    /// A layer without values.
    pub fn new(width: usize, epsilon: f64) -> Self {
        Self { weight: uninitialized([width]), bias: uninitialized([width]), epsilon }
    }

    /// Normalizes the last dimension of `[batch, tokens, width]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        ops::layer_norm(x, self.weight.val(), self.bias.val(), self.epsilon)
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
