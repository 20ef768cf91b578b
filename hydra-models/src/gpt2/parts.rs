//! The maps of GPT-2's modules.

use crate::ops;
use crate::parts::hollow;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// An affine map, which transformers calls `Conv1D`.
#[derive(Module, Debug)]
pub struct Affine {
    /// `[in, out]`.
    pub weight: Param<Tensor<2>>,
    /// `[out]`.
    pub bias: Param<Tensor<1>>,
}

impl Affine {
    /// A map without values.
    pub fn new(inputs: usize, outputs: usize) -> Self {
        Self { weight: hollow([inputs, outputs]), bias: hollow([outputs]) }
    }

    /// Maps `[batch, tokens, in]` to `[batch, tokens, out]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        ops::linear(x, self.weight.val(), self.bias.val())
    }

    /// Adds the map of `[batch, tokens, in]` to a residual `[batch, tokens, out]`.
    pub fn forward_onto(&self, residual: Tensor<3>, x: Tensor<3>) -> Tensor<3> {
        ops::linear_onto(residual, x, self.weight.val(), self.bias.val())
    }
}
