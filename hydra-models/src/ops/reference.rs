//! The same functions as compositions of Burn's own operations: slow, whole, and what the kernels are tested
//! against.

use burn::tensor::{Int, Tensor, activation};

/// The mean loss of [`head_loss`](super::head_loss), with all logits in memory at once.
pub fn head_loss(hidden: Tensor<2>, table: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let real = targets.clone().greater_equal_elem(0).float();
    let targets = targets.clamp_min(0).unsqueeze_dim(1);
    let log_probabilities = activation::log_softmax(hidden.matmul(table.transpose()), 1);
    let losses = log_probabilities.gather(1, targets).squeeze_dim::<1>(1).neg();
    (losses * real.clone()).sum() / real.sum()
}

/// [`layer_norm`](super::layer_norm): the last dimension moved and scaled to mean zero and variance one.
pub fn layer_norm(x: Tensor<3>, weight: Tensor<1>, bias: Tensor<1>, epsilon: f64) -> Tensor<3> {
    let centered = x.clone() - x.mean_dim(2);
    let variance = centered.clone().powi_scalar(2).mean_dim(2);
    centered / (variance + epsilon).sqrt() * weight.unsqueeze() + bias.unsqueeze()
}

/// [`gelu_tanh`](super::gelu_tanh): `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let cube = x.clone() * x.clone() * x.clone();
    let inner = (x.clone() + cube * 0.044715) * (2.0 / std::f64::consts::PI).sqrt();
    x * (inner.tanh() + 1.0) * 0.5
}

/// [`causal_softmax`](super::causal_softmax): the softmax of scaled scores whose upper triangle is minus
/// infinity.
pub fn causal_softmax(scores: Tensor<4>, scale: f64) -> Tensor<4> {
    let [_, _, tokens, _] = scores.dims();
    let mask = Tensor::<2>::ones([tokens, tokens], &scores.device()).tril(0).equal_elem(0.0);
    activation::softmax((scores * scale).mask_fill(mask.unsqueeze(), f32::NEG_INFINITY), 3)
}
