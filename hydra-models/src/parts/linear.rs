//! Linear layers, as Transformers' `Linear`.

use super::{Adapter, uninitialized};
use crate::lora::AdaptableMap;
use crate::ops::{self, Form};
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
    /// Whether the weight is quantized; its tensor on a device has its blocks.
    #[module(skip)]
    quantized: bool,
    /// The outputs and inputs.
    #[module(skip)]
    shape: [usize; 2],
}

impl Linear {
    /// A layer without values.
    pub fn new(inputs: usize, outputs: usize, bias: bool) -> Self {
        Self {
            weight: uninitialized([outputs, inputs]),
            bias: bias.then(|| uninitialized([outputs])),
            lora: None,
            quantized: false,
            shape: [outputs, inputs],
        }
    }

    fn bias(&self) -> Option<Tensor<1>> {
        self.bias.as_ref().map(Param::val)
    }

    /// The layer as an adaptable module.
    pub(crate) fn adaptable(&mut self, name: &'static str) -> AdaptableMap<'_> {
        let Self { weight, lora, quantized, shape: [outputs, inputs], .. } = self;
        AdaptableMap { name, adapter: lora, shape: [*inputs, *outputs], weight, quantized }
    }

    /// The same for rows whose bits do not depend on each other.
    fn by_row(&self, x: Tensor<3>) -> Tensor<3> {
        let form = if self.quantized { Form::Nf4(self.shape) } else { Form::OutIn };
        let y = ops::linear_by_row(x, self.weight.val(), form);
        self.bias().into_iter().fold(y, |y, bias| y + bias.unsqueeze())
    }

    /// Maps `[batch, tokens, in]` to `[batch, tokens, out]`.
    pub fn forward(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let map = |x| match self.quantized {
            _ if pass.is_by_row() => self.by_row(x),
            true => ops::linear_nf4(x, self.weight.val(), self.shape, self.bias()),
            false => ops::linear_transposed(x, self.weight.val(), self.bias()),
        };
        Adapter::adapt(self.lora.as_ref(), x, pass, map)
    }

    /// Adds the output for `x` `[batch, tokens, in]` to a residual `[batch, tokens, out]`.
    pub fn forward_onto(&self, residual: Tensor<3>, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let map = |x| match self.quantized {
            _ if pass.is_by_row() => residual + self.by_row(x),
            true => ops::linear_nf4_onto(residual, x, self.weight.val(), self.shape, self.bias()),
            false => ops::linear_transposed_onto(residual, x, self.weight.val(), self.bias()),
        };
        Adapter::adapt(self.lora.as_ref(), x, pass, map)
    }
}
