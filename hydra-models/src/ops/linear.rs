//! The affine map of a sequence of vectors.

use burn::tensor::{Tensor, module};

/// `x @ weight + bias` for `x` of shape `[batch, tokens, in]`, a weight `[in, out]` and a bias `[out]`.
pub fn linear(x: Tensor<3>, weight: Tensor<2>, bias: Tensor<1>) -> Tensor<3> {
    let ([batch, tokens, inputs], [_, outputs]) = (x.dims(), weight.dims());
    // One matrix product over all tokens; left alone, Burn may run one for each item.
    let y = module::linear(x.reshape([batch * tokens, inputs]), weight, Some(bias));
    y.reshape([batch, tokens, outputs])
}
