//! Reference implementations in Burn's own operations: slow and unchunked; the kernels are tested against them.

use super::{Attention, GroupedAttention, Rotary};
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Bool, FloatDType, Int, Tensor, TensorData, activation, module};
use hydra_core::Pass;

/// The mean loss of [`head_loss`](super::head_loss), with all logits in memory at the same time.
pub fn head_loss(hidden: Tensor<2>, table: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let real = targets.clone().greater_equal_elem(0).float();
    let targets = targets.clamp_min(0).unsqueeze_dim(1);
    let log_probabilities = activation::log_softmax(hidden.matmul(table.transpose()), 1);
    let losses = log_probabilities.gather(1, targets).squeeze_dim::<1>(1).neg();
    (losses * real.clone()).sum() / real.sum()
}

/// The log-sum-exp of each row of `logits`, `[rows, columns]`, and its logit in the column that `columns` `[rows]` holds, or 0 if that
/// is negative: each `F32` of shape `[rows]`.
pub fn log_sums(logits: Tensor<2>, columns: Tensor<1, Int>) -> [Tensor<1>; 2] {
    let ([rows, _], none) = (logits.dims(), columns.clone().lower_elem(0));
    let logits = logits.cast(FloatDType::F32);
    let largest = logits.clone().max_dim(1).detach();
    let sums = (logits.clone() - largest.clone()).exp().sum_dim(1).log() + largest;
    let own = logits.gather(1, columns.clamp_min(0).reshape([rows, 1]));
    [sums.reshape([rows]), own.reshape([rows]).mask_fill(none, 0.0)]
}

/// [`layer_norm`](super::layer_norm): the last dimension shifted and scaled to mean zero and variance one.
pub fn layer_norm(x: Tensor<3>, weight: Tensor<1>, bias: Tensor<1>, epsilon: f64) -> Tensor<3> {
    let centered = x.clone() - x.mean_dim(2);
    let variance = centered.clone().powi_scalar(2).mean_dim(2);
    centered / (variance + epsilon).sqrt() * weight.unsqueeze() + bias.unsqueeze()
}

/// [`rms_norm`](super::rms_norm): rows as wide as the weight, divided by the root of their mean square.
pub fn rms_norm(x: Tensor<3>, weight: Tensor<1>, epsilon: f64) -> Tensor<3> {
    let (shape, [width]) = (x.dims(), weight.dims());
    let rows = x.reshape([-1, width as i32]);
    let mean = rows.clone().powi_scalar(2).mean_dim(1);
    (rows / (mean + epsilon).sqrt() * weight.unsqueeze()).reshape(shape)
}

/// [`swiglu`](super::swiglu()): `gate / (1 + e^-gate) * up`.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    gate.clone() * activation::sigmoid(gate) * up
}

/// [`depthwise`](super::depthwise()), channels first: Burn's convolution with one group per channel.
pub fn depthwise(x: Tensor<4>, weight: Tensor<4>, bias: Tensor<1>) -> Tensor<4> {
    let [channels, _, side, _] = weight.dims();
    let options = ConvOptions::new([1, 1], [side / 2, side / 2], [1, 1], channels);
    let y = module::conv2d(x.permute([0, 3, 1, 2]), weight, Some(bias), options);
    y.permute([0, 2, 3, 1])
}

/// [`gelu_tanh`](super::gelu_tanh): `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let cube = x.clone() * x.clone() * x.clone();
    let inner = (x.clone() + cube * 0.044715) * (2.0 / std::f64::consts::PI).sqrt();
    x * (inner.tanh() + 1.0) * 0.5
}

/// [`causal_attention`](super::causal_attention), with all scores and weights in memory.
pub fn causal_attention(qkv: Tensor<3>, options: Attention, pass: &Pass) -> Tensor<3> {
    causal(qkv, None, options, pass)
}

/// [`causal_attention_within`](super::causal_attention_within), likewise.
pub fn causal_attention_within(
    qkv: Tensor<3>,
    positions: Tensor<2, Int>,
    options: Attention,
    pass: &Pass,
) -> Tensor<3> {
    causal(qkv, Some(positions), options, pass)
}

fn causal(qkv: Tensor<3>, positions: Option<Tensor<2, Int>>, options: Attention, pass: &Pass) -> Tensor<3> {
    let [batch, tokens, triple] = qkv.dims();
    let (width, heads) = (triple / 3, options.heads);
    let part = |i: usize| {
        let part = qkv.clone().narrow(2, i * width, width);
        part.reshape([batch, tokens, heads, width / heads]).swap_dims(1, 2)
    };
    // [batch, heads, query, key]
    let scores = part(0).matmul(part(1).swap_dims(2, 3));
    let apart = positions.as_ref().map(others);
    let weights = windowed_softmax(scores, options.scale, (true, tokens), apart);
    let weights = pass.site(options.site).dropout(weights, options.dropout);
    weights.matmul(part(2)).swap_dims(1, 2).reshape([batch, tokens, width])
}

/// [`grouped_attention`](super::grouped_attention), with all scores and weights in memory, and keys and values copied
/// for each query head.
pub fn grouped_attention(
    queries: Tensor<3>,
    keys: Tensor<3>,
    values: Tensor<3>,
    attention: &GroupedAttention,
    pass: &Pass,
) -> Tensor<3> {
    grouped([queries, keys, values], None, attention, pass)
}

/// [`grouped_attention_within`](super::grouped_attention_within), likewise.
pub fn grouped_attention_within(
    queries: Tensor<3>,
    keys: Tensor<3>,
    values: Tensor<3>,
    positions: Tensor<2, Int>,
    attention: &GroupedAttention,
    pass: &Pass,
) -> Tensor<3> {
    grouped([queries, keys, values], Some(positions), attention, pass)
}

fn grouped(
    [queries, keys, values]: [Tensor<3>; 3],
    positions: Option<Tensor<2, Int>>,
    attention: &GroupedAttention,
    pass: &Pass,
) -> Tensor<3> {
    let ([batch, tokens, width], GroupedAttention { heads, key_heads, .. }) = (queries.dims(), attention);
    let (head_width, count) = (width / heads, heads / key_heads);
    // [batch, heads, tokens, head width]
    let split = |x: Tensor<3>, heads: usize| x.reshape([batch, tokens, heads, head_width]).swap_dims(1, 2);
    let turned = |x: Tensor<4>| match &attention.rotary {
        Some(rotary) => turned(x, rotary, positions.as_ref()),
        None => x,
    };
    let shared = |x: Tensor<4>| {
        let copies = x.unsqueeze_dim::<5>(2).repeat_dim(2, count);
        copies.reshape([batch, *heads, tokens, head_width])
    };
    let (queries, keys) = (turned(split(queries, *heads)), shared(turned(split(keys, *key_heads))));
    let scores = queries.matmul(keys.swap_dims(2, 3));
    let (scale, apart) = (attention.scale, positions.as_ref().map(others));
    let seen = (attention.causal, attention.window.unwrap_or(tokens));
    let weights = windowed_softmax(scores, scale, seen, apart);
    let weights = pass.site(attention.site).dropout(weights, attention.dropout);
    weights.matmul(shared(split(values, *key_heads))).swap_dims(1, 2).reshape([batch, tokens, width])
}

/// `x * cosines + rotate_half(x) * sines`, as in Transformers, for `[batch, heads, tokens, head width]`.
fn turned(x: Tensor<4>, rotary: &Rotary, positions: Option<&Tensor<2, Int>>) -> Tensor<4> {
    let [batch, _, tokens, width] = x.dims();
    let angles = TensorData::new(rotary.rotation(tokens).first(tokens).to_vec(), [tokens, width]);
    let angles = Tensor::<2>::from_data(angles, &x.device());
    let angles = match positions {
        Some(at) => angles.select(0, at.clone().reshape([-1])).reshape([batch, 1, tokens, width]),
        None => angles.unsqueeze::<4>(),
    };
    let half = |x: &Tensor<4>, i: usize| x.clone().narrow(3, i * width / 2, width / 2);
    let [cosines, sines] = [0, 1].map(|i| half(&angles, i));
    let (a, b) = (half(&x, 0), half(&x, 1));
    let first = a.clone() * cosines.clone() - b.clone() * sines.clone();
    Tensor::cat(vec![first, b * cosines + a * sines], 3)
}

/// Mask of queries and keys `[batch, 1, query, key]` of different examples.
fn others(positions: &Tensor<2, Int>) -> Tensor<4, Bool> {
    let tokens = Tensor::<1, Int>::arange(0..positions.dims()[1] as i64, &positions.device());
    let begins = tokens.unsqueeze::<2>() - positions.clone();
    let apart = begins.clone().unsqueeze_dim::<3>(2) - begins.unsqueeze_dim::<3>(1);
    apart.not_equal_elem(0).unsqueeze_dim(1)
}

/// The softmax of scaled scores over the `window` keys up to the query's own, and from there on if attention is not
/// `causal`; other and masked keys are minus infinity.
fn windowed_softmax(
    scores: Tensor<4>,
    scale: f64,
    (causal, window): (bool, usize),
    apart: Option<Tensor<4, Bool>>,
) -> Tensor<4> {
    let shape @ [_, _, tokens, _] = scores.dims();
    let reach = window.min(tokens) as i64 - 1;
    let before = Tensor::<2>::ones([tokens, tokens], &scores.device()).tril(if causal { 0 } else { reach });
    let seen = before.triu(-reach);
    let mask = seen.equal_elem(0.0);
    let scores = (scores * scale).mask_fill(mask.unsqueeze(), f32::NEG_INFINITY);
    let scores = match apart {
        Some(apart) => scores.mask_fill(apart.expand(shape), f32::NEG_INFINITY),
        None => scores,
    };
    activation::softmax(scores, 3)
}

/// [`embedding`](super::embedding()): Burn's lookup, plus the first rows of the positions.
pub fn embedding(tokens: Tensor<2>, positions: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    let [_, length] = ids.dims();
    module::embedding(tokens, ids) + positions.narrow(0, 0, length).unsqueeze()
}
