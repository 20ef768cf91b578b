//! Maps that transformers calls `Linear`.

use super::hollow;
use crate::ops;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// A linear map, whose weight lies as in the files of transformers.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: Param<Tensor<2>>,
    /// `[out]`, where it has one.
    pub bias: Option<Param<Tensor<1>>>,
}

impl Linear {
    /// A map without values.
    pub fn new(inputs: usize, outputs: usize, bias: bool) -> Self {
        Self { weight: hollow([outputs, inputs]), bias: bias.then(|| hollow([outputs])) }
    }

    fn bias(&self) -> Option<Tensor<1>> {
        self.bias.as_ref().map(Param::val)
    }

    /// Maps `[batch, tokens, in]` to `[batch, tokens, out]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        ops::linear_transposed(x, self.weight.val(), self.bias())
    }

    /// Adds what `x`, `[batch, tokens, in]`, maps to onto a residual `[batch, tokens, out]`.
    pub fn forward_onto(&self, residual: Tensor<3>, x: Tensor<3>) -> Tensor<3> {
        ops::linear_transposed_onto(residual, x, self.weight.val(), self.bias())
    }
}
