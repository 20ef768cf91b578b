//! GPT-2's linear layers.

use crate::lora::AdaptableMap;
use crate::ops;
use crate::parts::{Adapter, uninitialized};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use hydra_core::Pass;

/// A linear layer with a transposed weight, Transformers' `Conv1D`.
#[derive(Module, Debug)]
pub struct Affine {
    /// `[in, out]`.
    pub weight: Param<Tensor<2>>,
    /// `[out]`.
    pub bias: Param<Tensor<1>>,
    /// The adapter that is trained while the layer is frozen.
    pub lora: Option<Adapter>,
}

impl Affine {
    /// A layer without values.
    pub fn new(inputs: usize, outputs: usize) -> Self {
        Self { weight: uninitialized([inputs, outputs]), bias: uninitialized([outputs]), lora: None }
    }

    /// The layer as an adaptable module.
    pub(crate) fn adaptable(&mut self, name: &'static str) -> AdaptableMap<'_> {
        AdaptableMap { name, shape: self.weight.lazy_shape().dims(), adapter: &mut self.lora }
    }

    /// Maps `[batch, tokens, in]` to `[batch, tokens, out]`.
    pub fn forward(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let map = |x| ops::linear(x, self.weight.val(), self.bias.val());
        Adapter::adapt(self.lora.as_ref(), x, pass, map)
    }

    /// Adds the output for `[batch, tokens, in]` to a residual `[batch, tokens, out]`.
    pub fn forward_onto(&self, residual: Tensor<3>, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let map = |x| ops::linear_onto(residual, x, self.weight.val(), self.bias.val());
        Adapter::adapt(self.lora.as_ref(), x, pass, map)
    }
}
