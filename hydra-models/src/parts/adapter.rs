//! Low-rank adapters of linear layers.

use super::uninitialized;
use crate::ops::{self, Form};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use hydra_core::{Init, Pass};

/// One of the two matrices of an adapter.
#[derive(Module, Debug)]
pub struct Factor {
    /// `[out, in]`.
    pub weight: Param<Tensor<2>>,
    /// `[out]`, if it has a bias.
    pub bias: Option<Param<Tensor<1>>>,
}

impl Factor {
    fn new(shape: [usize; 2], bias: bool) -> Self {
        Self { weight: uninitialized(shape), bias: bias.then(|| uninitialized([shape[0]])) }
    }
}

/// Adds `scale * (B A x)` to a frozen linear layer; the scale is `alpha / rank` (Hu et al., 2021, section 4.1).
#[derive(Module, Debug)]
pub struct Adapter {
    /// `A`, `[rank, in]`.
    pub a: Factor,
    /// `B`, `[out, rank]`.
    pub b: Factor,
    #[module(skip)]
    options: AdapterOptions,
}

/// The settings of an adapter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdapterOptions {
    /// The factor on the product.
    pub scale: f64,
    /// The dropout probability of the input.
    pub dropout: f64,
    /// The pass's dropout site.
    pub site: u64,
}

impl Adapter {
    /// An adapter without values for a layer from `inputs` to `outputs`, optionally with a bias.
    pub(crate) fn new(
        [inputs, outputs]: [usize; 2],
        rank: usize,
        bias: bool,
        options: AdapterOptions,
    ) -> Self {
        Self { a: Factor::new([rank, inputs], false), b: Factor::new([outputs, rank], bias), options }
    }

    /// The adapter with `B` frozen.
    pub(crate) fn with_frozen_b(self) -> Self {
        Self { b: self.b.no_grad(), ..self }
    }

    /// Adds the adapter's output, if there is one, to a layer's output for `x`.
    pub(crate) fn adapt(
        adapter: Option<&Self>,
        x: Tensor<3>,
        pass: &Pass,
        map: impl FnOnce(Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        let Some(adapter) = adapter else { return map(x) };
        let [x, adapted] = ops::fork(x);
        adapter.forward_onto(map(x), adapted, pass)
    }

    /// Adds the adapter's output for `x` `[batch, tokens, in]` to `y` `[batch, tokens, out]`.
    pub fn forward_onto(&self, y: Tensor<3>, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let AdapterOptions { scale, dropout, site } = self.options;
        if pass.is_by_row() {
            let inner = ops::linear_by_row(x, self.a.weight.val(), Form::OutIn);
            let outer = ops::linear_by_row(inner.mul_scalar(scale), self.b.weight.val(), Form::OutIn);
            let bias = self.b.bias.as_ref().map(|bias| bias.val().mul_scalar(scale).unsqueeze());
            return bias.into_iter().fold(y + outer, |y, bias| y + bias);
        }
        let inner =
            ops::linear_transposed(ops::dropout(x, dropout, pass.site(site)), self.a.weight.val(), None);
        let bias = self.b.bias.as_ref().map(|bias| bias.val().mul_scalar(scale));
        ops::linear_transposed_onto(y, inner.mul_scalar(scale), self.b.weight.val(), bias)
    }

    /// The maximum number of elements per token held besides input and output.
    pub(crate) fn working_elements(&self) -> usize {
        let [rank, inputs] = self.a.weight.lazy_shape().dims();
        4 * rank + if self.options.dropout > 0.0 { 2 * inputs } else { 0 }
    }

    /// PEFT's initialization of an adapter parameter, recognized by the end of its name within the layer: `A` uniform
    /// in plus or minus one over the root of its width (Kaiming with `a` of root five), `B` and its bias zero.
    pub(crate) fn init(name: &str, shape: &[usize]) -> Option<Init> {
        if name.ends_with(".lora.a.weight") {
            return Some(Init::Uniform(1.0 / (shape[1] as f64).sqrt()));
        }
        name.contains(".lora.b.").then_some(Init::Zeros)
    }
}
