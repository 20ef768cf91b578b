//! Linear layers, as Transformers' `Linear`.

use super::{Adapter, uninitialized};
use crate::lora::AdaptableMap;
use crate::ops;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use hydra_core::Pass;

/// A linear layer; its weight is laid out as in Transformers' files.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: Param<Tensor<2>>,
    /// `[out]`, if it has a bias.
    pub bias: Option<Param<Tensor<1>>>,
    /// The adapter that is trained while the layer is frozen.
    pub lora: Option<Adapter>,
}

impl Linear {
    /// A layer without values.
    pub fn new(inputs: usize, outputs: usize, bias: bool) -> Self {
        Self {
            weight: uninitialized([outputs, inputs]),
            bias: bias.then(|| uninitialized([outputs])),
            lora: None,
        }
    }

    fn bias(&self) -> Option<Tensor<1>> {
        self.bias.as_ref().map(Param::val)
    }

    /// The layer as an adaptable module.
    pub(crate) fn adaptable(&mut self, name: &'static str) -> AdaptableMap<'_> {
        let [outputs, inputs] = self.weight.lazy_shape().dims();
        AdaptableMap { name, adapter: &mut self.lora, shape: [inputs, outputs] }
    }

    /// Maps `[batch, tokens, in]` to `[batch, tokens, out]`.
    pub fn forward(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let map = |x| ops::linear_transposed(x, self.weight.val(), self.bias());
        Adapter::adapt(self.lora.as_ref(), x, pass, map)
    }

    /// Adds the output for `x` `[batch, tokens, in]` to a residual `[batch, tokens, out]`.
    pub fn forward_onto(&self, residual: Tensor<3>, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let map = |x| ops::linear_transposed_onto(residual, x, self.weight.val(), self.bias());
        Adapter::adapt(self.lora.as_ref(), x, pass, map)
    }
}
