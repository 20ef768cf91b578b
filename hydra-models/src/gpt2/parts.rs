//! The parameters of GPT-2's modules, with the fields' names as in Hugging Face transformers.

use crate::ops;
use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, Shape, Tensor};

/// A parameter with a shape and no memory; a chain gives it values when it promotes the layer.
pub(crate) fn hollow<const D: usize>(shape: [usize; D]) -> Param<Tensor<D>> {
    let absent = |_: &Device, _: bool| panic!("a parameter was read before its layer was promoted");
    Param::uninitialized(ParamId::new(), absent, Device::flex(), true, Shape::from(shape))
}

/// A table of vectors, one for each token or position.
#[derive(Module, Debug)]
pub struct Table {
    /// `[rows, width]`.
    pub weight: Param<Tensor<2>>,
}

impl Table {
    /// A table without values.
    pub fn new(rows: usize, width: usize) -> Self {
        Self { weight: hollow([rows, width]) }
    }
}

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

/// A layer normalization.
#[derive(Module, Debug)]
pub struct Norm {
    /// `[width]`.
    pub weight: Param<Tensor<1>>,
    /// `[width]`.
    pub bias: Param<Tensor<1>>,
    /// The number that is added to the variance.
    pub epsilon: f64,
}

impl Norm {
    /// A normalization without values.
    pub fn new(width: usize, epsilon: f64) -> Self {
        Self { weight: hollow([width]), bias: hollow([width]), epsilon }
    }

    /// Normalizes the last dimension of `[batch, tokens, width]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        ops::layer_norm(x, self.weight.val(), self.bias.val(), self.epsilon)
    }
}
