//! Linear layers, as Transformers' `Linear` and `Conv1D`.

use super::{Adapter, uninitialized};
use crate::lora::AdaptableMap;
use crate::ops::{self, Form};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use hydra_core::Pass;

/// A linear layer; its weight is laid out as in Transformers' files.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[out, in]`; or `[in, out]` in GPT-2, unless it is quantized.
    pub weight: Param<Tensor<2>>,
    /// `[out]`, if it has a bias.
    pub bias: Option<Param<Tensor<1>>>,
    /// The adapter that is trained while the layer is frozen.
    pub lora: Option<Adapter>,
    /// Whether the weight is quantized; its tensor on a device has its blocks.
    #[module(skip)]
    quantized: bool,
    /// Whether a weight that is not quantized is `[in, out]`.
    #[module(skip)]
    fan_in_fan_out: bool,
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
            fan_in_fan_out: false,
            shape: [outputs, inputs],
        }
    }

    /// A layer with a bias and a weight `[in, out]`, Transformers' `Conv1D`, without values.
    pub fn conv1d(inputs: usize, outputs: usize) -> Self {
        let weight = uninitialized([inputs, outputs]);
        Self { weight, fan_in_fan_out: true, ..Self::new(inputs, outputs, true) }
    }

    /// The number of outputs.
    pub fn outputs(&self) -> usize {
        self.shape[0]
    }

    /// The layer as an adaptable module.
    pub(crate) fn adaptable(&mut self, name: &'static str) -> AdaptableMap<'_> {
        let Self { weight, lora, quantized, shape: [outputs, inputs], .. } = self;
        AdaptableMap { name, adapter: lora, shape: [*inputs, *outputs], weight, quantized }
    }

    /// The layout of the weight.
    fn form(&self) -> Form {
        match self.fan_in_fan_out {
            _ if self.quantized => Form::Nf4(self.shape),
            true => Form::InOut,
            false => Form::OutIn,
        }
    }

    fn bias(&self) -> Option<Tensor<1>> {
        self.bias.as_ref().map(Param::val)
    }

    /// The bias of a [`conv1d`](Self::conv1d).
    fn own_bias(&self) -> Tensor<1> {
        self.bias().expect("a `Conv1D` has a bias")
    }

    /// The output for rows whose bits do not depend on each other.
    fn by_row(&self, x: Tensor<3>, form: Form) -> Tensor<3> {
        let y = ops::linear_by_row(x, self.weight.val(), form);
        self.bias().into_iter().fold(y, |y, bias| y + bias.unsqueeze())
    }

    /// Maps `[batch, tokens, in]` to `[batch, tokens, out]`.
    pub fn forward(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let map = |x| match self.form() {
            form if pass.is_by_row() => self.by_row(x, form),
            Form::Nf4(shape) => ops::linear_nf4(x, self.weight.val(), shape, self.bias()),
            Form::InOut => ops::linear(x, self.weight.val(), self.own_bias()),
            Form::OutIn => ops::linear_transposed(x, self.weight.val(), self.bias()),
        };
        Adapter::adapt(self.lora.as_ref(), x, pass, map)
    }

    /// Adds the output for `x` `[batch, tokens, in]` to a residual `[batch, tokens, out]`.
    pub fn forward_onto(&self, residual: Tensor<3>, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let map = |x| match self.form() {
            form if pass.is_by_row() => residual + self.by_row(x, form),
            Form::Nf4(shape) => ops::linear_nf4_onto(residual, x, self.weight.val(), shape, self.bias()),
            Form::InOut => ops::linear_onto(residual, x, self.weight.val(), self.own_bias()),
            Form::OutIn => ops::linear_transposed_onto(residual, x, self.weight.val(), self.bias()),
        };
        Adapter::adapt(self.lora.as_ref(), x, pass, map)
    }

    /// Adds the output for `x` to a residual after dropout with this probability at this site of the pass.
    pub(crate) fn dropped_onto(
        &self,
        residual: Tensor<3>,
        x: Tensor<3>,
        (site, probability): (u64, f64),
        pass: &Pass,
    ) -> Tensor<3> {
        match pass.site(site).dropout_mask(probability) {
            Some(mask) => ops::dropout_onto(residual, self.forward(x, pass), mask),
            None => self.forward_onto(residual, x, pass),
        }
    }
}
