//! Low-rank adapters of maps.

use super::hollow;
use crate::lora::Lora;
use crate::ops;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use hydra_core::{Init, Pass};

/// One of the two matrices of an adapter.
#[derive(Module, Debug)]
pub struct Factor {
    /// `[out, in]`.
    pub weight: Param<Tensor<2>>,
}

impl Factor {
    fn new(shape: [usize; 2]) -> Self {
        Self { weight: hollow(shape) }
    }
}

/// What is added to a frozen map: `(alpha / rank) B A x` (Hu et al., 2021, section 4.1).
#[derive(Module, Debug)]
pub struct Adapter {
    /// `A`, `[rank, in]`.
    pub a: Factor,
    /// `B`, `[out, rank]`.
    pub b: Factor,
    #[module(skip)]
    options: Options,
}

#[derive(Clone, Copy, Debug)]
struct Options {
    scale: f64,
    dropout: f64,
    /// The pass's site for the dropout of what goes in.
    site: u64,
}

impl Adapter {
    /// An adapter without values of a map of `inputs` to `outputs`.
    pub(crate) fn new([inputs, outputs]: [usize; 2], lora: &Lora, site: u64) -> Self {
        let options = Options { scale: lora.scale(), dropout: lora.dropout, site };
        Self { a: Factor::new([lora.rank, inputs]), b: Factor::new([outputs, lora.rank]), options }
    }

    /// What a map makes of `x`, with what its adapter adds, if it has one.
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

    /// Adds to `y`, `[batch, tokens, out]`, what belongs to `x`, `[batch, tokens, in]`.
    pub fn forward_onto(&self, y: Tensor<3>, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let Options { scale, dropout, site } = self.options;
        let inner =
            ops::linear_transposed(ops::dropout(x, dropout, pass.site(site)), self.a.weight.val(), None);
        ops::linear_transposed_onto(y, inner.mul_scalar(scale), self.b.weight.val(), None)
    }

    /// The most elements at hand beside input and output, for each token.
    pub(crate) fn working_elements(&self) -> usize {
        let [rank, inputs] = self.a.weight.lazy_shape().dims();
        4 * rank + if self.options.dropout > 0.0 { 2 * inputs } else { 0 }
    }

    /// The first values of a parameter whose name within the layer ends in that of an adapter's: as PEFT draws them, `A`
    /// uniformly in plus or minus one over the root of its width (Kaiming's with `a` of root five), `B` zero.
    pub(crate) fn init(name: &str, shape: &[usize]) -> Option<Init> {
        if name.ends_with(".lora.a.weight") {
            return Some(Init::Uniform(1.0 / (shape[1] as f64).sqrt()));
        }
        name.ends_with(".lora.b.weight").then_some(Init::Zeros)
    }
}
