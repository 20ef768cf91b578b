//! GPT-2's linear layers.

use crate::lora::AdaptableMap;
use crate::ops::{self, Form};
use crate::parts::{Adapter, uninitialized};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use hydra_core::Pass;

/// A linear layer with a transposed weight, Transformers' `Conv1D`.
#[derive(Module, Debug)]
pub struct Affine {
    /// `[in, out]`, or `[out, in]` if it is quantized.
    pub weight: Param<Tensor<2>>,
    /// `[out]`.
    pub bias: Param<Tensor<1>>,
    /// The adapter that is trained while the layer is frozen.
    pub lora: Option<Adapter>,
    /// Whether the weight is quantized; its tensor on a device has its blocks.
    #[module(skip)]
    quantized: bool,
    /// The inputs and outputs.
    #[module(skip)]
    shape: [usize; 2],
}

impl Affine {
    /// A layer without values.
    pub fn new(inputs: usize, outputs: usize) -> Self {
        Self {
            weight: uninitialized([inputs, outputs]),
            bias: uninitialized([outputs]),
            lora: None,
            quantized: false,
            shape: [inputs, outputs],
        }
    }

    /// The layer as an adaptable module.
    pub(crate) fn adaptable(&mut self, name: &'static str) -> AdaptableMap<'_> {
        let Self { weight, lora, quantized, shape, .. } = self;
        AdaptableMap { name, adapter: lora, shape: *shape, weight, quantized }
    }

    /// The outputs and inputs, as of a quantized weight.
    fn turned(&self) -> [usize; 2] {
        let [inputs, outputs] = self.shape;
        [outputs, inputs]
    }

    /// The same for rows whose bits do not depend on each other.
    fn by_row(&self, x: Tensor<3>) -> Tensor<3> {
        let form = if self.quantized { Form::Nf4(self.turned()) } else { Form::InOut };
        ops::linear_by_row(x, self.weight.val(), form) + self.bias.val().unsqueeze()
    }

    /// Maps `[batch, tokens, in]` to `[batch, tokens, out]`.
    pub fn forward(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let map = |x| match self.quantized {
            _ if pass.is_by_row() => self.by_row(x),
            true => ops::linear_nf4(x, self.weight.val(), self.turned(), Some(self.bias.val())),
            false => ops::linear(x, self.weight.val(), self.bias.val()),
        };
        Adapter::adapt(self.lora.as_ref(), x, pass, map)
    }

    /// Adds the output for `[batch, tokens, in]` to a residual `[batch, tokens, out]`.
    pub fn forward_onto(&self, residual: Tensor<3>, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let map = |x| match self.quantized {
            _ if pass.is_by_row() => residual + self.by_row(x),
            true => {
                ops::linear_nf4_onto(residual, x, self.weight.val(), self.turned(), Some(self.bias.val()))
            }
            false => ops::linear_onto(residual, x, self.weight.val(), self.bias.val()),
        };
        Adapter::adapt(self.lora.as_ref(), x, pass, map)
    }
}
