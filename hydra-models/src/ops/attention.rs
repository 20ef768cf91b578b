//! Causal self-attention over queries, keys and values that one map made, as one operation.
//!
//! Weights are computed for a block of queries at a time and are gone after it; for the backward they are
//! computed again from two numbers of each row (Dao et al., "FlashAttention", 2022): the largest score and the
//! inverse of the sum of the exponentials. Both in one, as log-sum-exp, would not do where scores are so large
//! that it rounds the sum away.

use super::autodiff::*;
use super::kernels::{Mat, MatMut, Write, matmul_here, vectorized};
use super::math::{exp, max, sum, sum2};
use super::tensors::{flex, float_type, floats, one_type, owned};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};
use hydra_core::{DropoutMask, FloatType, Pass};
use rayon::prelude::*;
use std::ops::Range;

/// How attention is computed.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// The number of heads; it divides the width.
    pub heads: usize,
    /// The factor on the scores.
    pub scale: f64,
    /// The probability with which an attention weight is dropped while training.
    pub dropout: f64,
    /// The pass's site for that dropout, whose elements are the weights `[batch, heads, query, key]`.
    pub site: u64,
}

/// Scaled dot-product attention (Vaswani et al., 2017) in which a token sees itself and what came before:
/// `qkv` of shape `[batch, tokens, 3 * width]` holds queries, keys and values side by side, the result has
/// shape `[batch, tokens, width]`.
///
/// # Panics
/// If the last dimension is not three times a multiple of the heads, or the elements are no `F32`, `BF16` or `F16`.
pub fn causal_attention(qkv: Tensor<3>, options: Attention, pass: &Pass) -> Tensor<3> {
    let (heads, triple) = (options.heads, qkv.dims()[2]);
    assert!(
        heads > 0 && triple > 0 && triple.is_multiple_of(3 * heads),
        "attention of {heads} heads expects three times a multiple of them as last dimension, found {triple}"
    );
    one_type("causal_attention", [qkv.dtype()]);
    let mask = pass.site(options.site).dropout_mask(options.dropout);
    let options = Options { heads, scale: options.scale as f32, mask };
    Tensor::from_dispatch(<Dispatch as AttentionOps>::causal_attention(qkv.into_dispatch(), options))
}

/// The most elements that attention has at hand beside its input and output and their gradients: what is
/// saved for each row, and the scratch memory of each head, were all of them computed at once.
pub(crate) fn working_elements([batch, tokens, width]: [usize; 3], heads: usize) -> usize {
    batch * heads * (STATISTICS * tokens + Scratch::elements(tokens, width / heads))
}

/// The arguments of the kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(super) heads: usize,
    pub(super) scale: f32,
    pub(super) mask: Option<DropoutMask>,
}

/// Attention as an op of the backends.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait AttentionOps: Backend {
    /// The output for queries, keys and values side by side.
    fn causal_attention(qkv: FloatTensor<Self>, options: Options) -> FloatTensor<Self>;
}

/// The operations that a backend must compute for it to be differentiable.
pub(crate) trait AttentionKernels: AttentionOps {
    /// The output, and the statistics of each row of scores, `[batch, heads, tokens, 2]`: the largest, and
    /// one over the sum of `e^(score - largest)`; those are `F32`.
    fn attention_and_statistics(
        qkv: FloatTensor<Self>,
        options: Options,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The gradient with respect to `qkv` for that of the output.
    fn attention_backward(
        saved: Saved<FloatTensor<Self>>,
        gradient: FloatTensor<Self>,
        options: Options,
    ) -> FloatTensor<Self>;
}

/// The tensors of the forward that the backward needs.
#[derive(Clone, Debug)]
pub(crate) struct Saved<T> {
    pub(super) qkv: T,
    pub(super) output: T,
    pub(super) statistics: T,
}

/// Numbers that are saved for each row of scores.
pub(super) const STATISTICS: usize = 2;

/// Queries whose weights are in memory at a time, for each head that is being computed.
const BLOCK: usize = 32;

/// Elements of a cache line, and of the widest vector.
const LINE: usize = 16;

/// The blocks of queries.
fn blocks(tokens: usize) -> impl DoubleEndedIterator<Item = Range<usize>> {
    (0..tokens.div_ceil(BLOCK)).map(move |i| i * BLOCK..tokens.min((i + 1) * BLOCK))
}

/// One head of one sequence.
#[derive(Clone, Copy)]
struct Head<'a> {
    // Each of `[tokens, head width]`.
    queries: Mat<'a>,
    keys: Mat<'a>,
    values: Mat<'a>,
    tokens: usize,
    scale: f32,
    mask: Option<DropoutMask>,
    /// The head's number in `[batch, heads]`.
    number: usize,
}

/// The gradients of a head's queries, keys and values, each `[tokens, head width]`.
type Parts<'a> = [MatMut<'a>; 3];

/// Sums of each row that a head's backward has.
struct Known<'a> {
    output: Mat<'a>,
    d_output: Mat<'a>,
    statistics: &'a [[f32; STATISTICS]],
}

/// Memory of one worker, reused from block to block and from head to head.
struct Scratch {
    /// `[queries of a block, keys up to its last]`.
    weights: Vec<f32>,
    /// Likewise, in the backward only.
    gradients: Vec<f32>,
    factors: Vec<f32>,
    /// `[head width, tokens]`, so that matrix products read them as they lie for each block.
    keys: Vec<f32>,
    /// Likewise, in the backward only.
    values: Vec<f32>,
}

impl Scratch {
    /// For the backward, which needs more than the forward.
    fn elements(tokens: usize, head_width: usize) -> usize {
        (2 * tokens.min(BLOCK) + 1) * tokens + 2 * head_width * padded(tokens)
    }

    fn forward(tokens: usize, head_width: usize) -> Self {
        Self {
            weights: vec![0.0; tokens.min(BLOCK) * tokens],
            gradients: Vec::new(),
            factors: vec![0.0; tokens],
            keys: vec![0.0; head_width * padded(tokens)],
            values: Vec::new(),
        }
    }

    fn backward(tokens: usize, head_width: usize) -> Self {
        let gradients = vec![0.0; tokens.min(BLOCK) * tokens];
        Self {
            gradients,
            values: vec![0.0; head_width * padded(tokens)],
            ..Self::forward(tokens, head_width)
        }
    }
}

/// Elements from one row of transposed keys to the next: an odd number of cache lines, because rows that lie
/// a power of two apart would push one another out of the cache.
fn padded(tokens: usize) -> usize {
    (tokens.div_ceil(LINE) | 1) * LINE
}

/// Writes `[tokens, head width]` as `[head width, padded tokens]`.
fn transpose(from: Mat<'_>, tokens: usize, out: &mut [f32]) {
    let stride = padded(tokens);
    for token in 0..tokens {
        for (out, &x) in out.chunks_exact_mut(stride).zip(from.row(token)) {
            out[token] = x;
        }
    }
}

/// The first `end` columns of what [`transpose`] wrote.
fn up_to(end: usize, transposed: &[f32], tokens: usize) -> Mat<'_> {
    let stride = padded(tokens);
    Mat::new(transposed, transposed.len() / stride, stride).cols(0..end)
}

/// The heads of a batch in the order `[batch, heads]`.
fn heads<'a>(qkv: &'a [f32], [_, tokens, triple]: [usize; 3], options: Options) -> Vec<Head<'a>> {
    let Options { heads, scale, mask } = options;
    let head_width = triple / 3 / heads;
    let sequences = qkv.chunks(tokens * triple).map(|data| Mat::new(data, tokens, triple)).enumerate();
    let head = |sequence: usize, data: Mat<'a>, head: usize| {
        let part = |part: usize| {
            let first = (part * heads + head) * head_width;
            data.cols(first..first + head_width)
        };
        let (queries, keys, values) = (part(0), part(1), part(2));
        Head { queries, keys, values, tokens, scale, mask, number: sequence * heads + head }
    };
    sequences.flat_map(|(sequence, data)| (0..heads).map(move |i| head(sequence, data, i))).collect()
}

/// The parts of each head of one sequence, `[tokens, 3 * width]`.
fn parts(sequence: &mut [f32], tokens: usize, head_width: usize) -> impl Iterator<Item = Parts<'_>> {
    let width = sequence.len() / tokens;
    let mut queries = MatMut::new(sequence, tokens, width).split_cols(head_width);
    let values = queries.split_off(queries.len() / 3 * 2);
    let keys = queries.split_off(queries.len() / 2);
    queries.into_iter().zip(keys).zip(values).map(|((queries, keys), values)| [queries, keys, values])
}

impl Head<'_> {
    /// The head's columns of `[batch, tokens, heads * head width]`.
    fn own_columns<'a>(&self, data: &'a [f32], heads: usize, width: usize) -> Mat<'a> {
        let (sequence, head, head_width) = (self.number / heads, self.number % heads, width / heads);
        let data = &data[sequence * self.tokens * width..][..self.tokens * width];
        Mat::new(data, self.tokens, width).cols(head * head_width..(head + 1) * head_width)
    }

    /// The scaled scores of a block of queries with the keys up to its last.
    fn scores(&self, rows: &Range<usize>, keys: &[f32], out: &mut [f32]) {
        let (queries, keys) = (self.queries.rows(rows.clone()), up_to(rows.end, keys, self.tokens));
        let mut out = MatMut::new(out, rows.len(), rows.end);
        matmul_here(&mut out, Write::Set, self.scale, queries, keys);
    }

    /// The factors of dropout for a query's weights with `keys` keys.
    fn factors<'a>(&self, query: usize, keys: usize, factors: &'a mut [f32]) -> Option<&'a [f32]> {
        let (mask, factors) = (self.mask?, &mut factors[..vectors(query, keys)]);
        let row = (self.number * self.tokens + query) as u64;
        mask.fill(row * self.tokens as u64, factors);
        Some(factors)
    }

    /// Writes the output and the rows' statistics.
    fn forward(&self, out: &mut MatMut<'_>, statistics: &mut [[f32; STATISTICS]], scratch: &mut Scratch) {
        transpose(self.keys, self.tokens, &mut scratch.keys);
        for rows in blocks(self.tokens) {
            let (len, end) = (rows.len(), rows.end);
            let statistics = &mut statistics[rows.clone()];
            let weights = &mut scratch.weights[..len * end];
            self.scores(&rows, &scratch.keys, weights);
            for (i, weights) in weights.chunks_exact_mut(end).enumerate() {
                let query = rows.start + i;
                let factors = self.factors(query, end, &mut scratch.factors);
                statistics[i] = vectorized(
                    #[inline(always)]
                    || exponentials(weights, query, factors),
                );
            }
            let mut out = out.rows(rows);
            let weights = Mat::new(weights, len, end);
            matmul_here(&mut out, Write::Set, 1.0, weights, self.values.rows(0..end));
            for (i, [_, inverse]) in statistics.iter().enumerate() {
                out.row(i).iter_mut().for_each(|x| *x *= inverse);
            }
        }
    }

    /// Writes the gradients of queries, keys and values.
    fn backward(&self, d: &mut Parts<'_>, known: Known<'_>, scratch: &mut Scratch) {
        let [d_queries, d_keys, d_values] = d;
        transpose(self.keys, self.tokens, &mut scratch.keys);
        transpose(self.values, self.tokens, &mut scratch.values);
        // The last block sees every key, so what it sets the others add to.
        for rows in blocks(self.tokens).rev() {
            let (len, end) = (rows.len(), rows.end);
            let write = if end == self.tokens { Write::Set } else { Write::Add };
            self.weights_and_gradients(&rows, &known, scratch);
            let weights = Mat::new(&scratch.weights[..len * end], len, end);
            let gradients = Mat::new(&scratch.gradients[..len * end], len, end);
            let (queries, keys) = (self.queries.rows(rows.clone()), self.keys.rows(0..end));
            let d_output = known.d_output.rows(rows.clone());
            matmul_here(&mut d_values.rows(0..end), write, 1.0, weights.t(), d_output);
            matmul_here(&mut d_queries.rows(rows), Write::Set, self.scale, gradients, keys);
            matmul_here(&mut d_keys.rows(0..end), write, self.scale, gradients.t(), queries);
        }
    }

    /// Leaves a block's weights after dropout and the gradients of its scores in the scratch memory.
    fn weights_and_gradients(&self, rows: &Range<usize>, known: &Known<'_>, scratch: &mut Scratch) {
        let (len, end) = (rows.len(), rows.end);
        let (weights, gradients) = (&mut scratch.weights[..len * end], &mut scratch.gradients[..len * end]);
        self.scores(rows, &scratch.keys, weights);
        let values = up_to(end, &scratch.values, self.tokens);
        let d_output = known.d_output.rows(rows.clone());
        matmul_here(&mut MatMut::new(gradients, len, end), Write::Set, 1.0, d_output, values);
        let both = weights.chunks_exact_mut(end).zip(gradients.chunks_exact_mut(end));
        for (query, (weights, gradients)) in rows.clone().zip(both) {
            let factors = self.factors(query, end, &mut scratch.factors);
            let row = (known.output.row(query), known.d_output.row(query), known.statistics[query]);
            vectorized(
                #[inline(always)]
                || weights_and_gradients(weights, gradients, query, factors, row),
            );
        }
    }
}

/// The keys up to the query in whole vectors, as far as there are keys.
#[inline(always)]
fn vectors(query: usize, keys: usize) -> usize {
    (query + 1).next_multiple_of(LINE).min(keys)
}

/// Turns the scores of a query into `e^(score - largest)` after dropout, zero for later keys. Returns the
/// row's statistics.
#[inline(always)]
fn exponentials(scores: &mut [f32], query: usize, factors: Option<&[f32]>) -> [f32; STATISTICS] {
    let (near, far) = scores.split_at_mut(vectors(query, scores.len()));
    near[query + 1..].fill(f32::NEG_INFINITY);
    let largest = max(near);
    near.iter_mut().for_each(|x| *x = exp(*x - largest));
    near[query + 1..].fill(0.0);
    far.fill(0.0);
    let total = sum(near, |x| x);
    if let Some(factors) = factors {
        near.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
    }
    [largest, (1.0 / total) as f32]
}

/// Turns the scores of a query into its weights after dropout, and the gradients of those into the
/// gradients of the scores; zero for later keys.
#[inline(always)]
fn weights_and_gradients(
    scores: &mut [f32],
    gradients: &mut [f32],
    query: usize,
    factors: Option<&[f32]>,
    (output, d_output, [largest, inverse]): (&[f32], &[f32], [f32; STATISTICS]),
) {
    let near = vectors(query, scores.len());
    // The mean of the weights' gradients, by the weights.
    let mean = sum2(output, d_output, |a, b| a * b) as f32;
    let both = scores[..near].iter_mut().zip(&mut gradients[..near]);
    match factors {
        None => both.for_each(|(x, g)| {
            *x = exp(*x - largest) * inverse;
            *g = *x * (*g - mean);
        }),
        Some(factors) => both.zip(factors).for_each(|((x, g), factor)| {
            let weight = exp(*x - largest) * inverse;
            *x = weight * factor;
            *g = weight * (*g * factor - mean);
        }),
    }
    scores[query + 1..].fill(0.0);
    gradients[query + 1..].fill(0.0);
}

fn forward(qkv: FlexTensor, options: Options) -> (FlexTensor, FlexTensor) {
    let float = float_type(&qkv);
    let qkv = owned(qkv);
    let shape: [usize; 3] = qkv.shape().dims();
    let ([batch, tokens, triple], count) = (shape, options.heads);
    let (width, head_width) = (triple / 3, triple / 3 / count);
    let mut output = vec![0.0; batch * tokens * width];
    let mut statistics = vec![0.0; batch * count * tokens * STATISTICS];
    if !output.is_empty() {
        let heads = heads(floats(&qkv), shape, options).into_par_iter();
        let outputs = output.chunks_mut(tokens * width);
        let outputs: Vec<MatMut<'_>> =
            outputs.flat_map(|data| MatMut::new(data, tokens, width).split_cols(head_width)).collect();
        let rows = statistics.as_chunks_mut().0.par_chunks_mut(tokens);
        heads.zip(outputs).zip(rows).for_each_init(
            || Scratch::forward(tokens, head_width),
            |scratch, ((head, mut output), statistics)| head.forward(&mut output, statistics, scratch),
        );
    }
    let statistics = flex(statistics, [batch, count, tokens, STATISTICS], FloatType::F32);
    (flex(output, [batch, tokens, width], float), statistics)
}

fn backward(saved: Saved<FlexTensor>, gradient: FlexTensor, options: Options) -> FlexTensor {
    let float = float_type(&saved.qkv);
    let (qkv, output, gradient) = (owned(saved.qkv), owned(saved.output), owned(gradient));
    let shape: [usize; 3] = qkv.shape().dims();
    let ([_, tokens, triple], count) = (shape, options.heads);
    let (width, head_width) = (triple / 3, triple / 3 / count);
    let mut d_qkv = vec![0.0; shape.iter().product()];
    if !d_qkv.is_empty() {
        let heads = heads(floats(&qkv), shape, options).into_par_iter();
        let parts = d_qkv.chunks_mut(tokens * triple).flat_map(|data| parts(data, tokens, head_width));
        let parts: Vec<Parts<'_>> = parts.collect();
        let rows = floats(&saved.statistics).as_chunks().0.par_chunks(tokens);
        let of_output = [floats(&output), floats(&gradient)];
        heads.zip(parts).zip(rows).for_each_init(
            || Scratch::backward(tokens, head_width),
            |scratch, ((head, mut parts), statistics)| {
                let [output, d_output] = of_output.map(|data| head.own_columns(data, count, width));
                head.backward(&mut parts, Known { output, d_output, statistics }, scratch);
            },
        );
    }
    flex(d_qkv, shape, float)
}

impl AttentionOps for Flex {
    fn causal_attention(qkv: FloatTensor<Self>, options: Options) -> FloatTensor<Self> {
        Self::attention_and_statistics(qkv, options).0
    }
}

impl AttentionKernels for Flex {
    fn attention_and_statistics(
        qkv: FloatTensor<Self>,
        options: Options,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        profile::time(Part::Attention, || forward(qkv, options))
    }

    fn attention_backward(
        saved: Saved<FloatTensor<Self>>,
        gradient: FloatTensor<Self>,
        options: Options,
    ) -> FloatTensor<Self> {
        profile::time(Part::Attention, || backward(saved, gradient, options))
    }
}

#[derive(Debug)]
struct AttentionBackward;

impl<B: AttentionKernels> Backward<B, 1> for AttentionBackward {
    type State = (Saved<FloatTensor<B>>, Options);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (saved, options) = ops.state;
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::attention_backward(saved, gradient, options));
        }
    }
}

impl<B: AttentionKernels, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn causal_attention(qkv: FloatTensor<Self>, options: Options) -> FloatTensor<Self> {
        match AttentionBackward.prepare::<C>([qkv.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let qkv = qkv.into_primitive();
                let (output, statistics) = B::attention_and_statistics(qkv.clone(), options);
                prep.finish((Saved { qkv, output: output.clone(), statistics }, options), output)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::causal_attention(qkv.into_primitive(), options)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{reference, testing::*};
    use super::*;
    use burn::tensor::{Device, TensorData};
    use hydra_core::Activation;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug)]
    struct Case {
        batch: usize,
        tokens: usize,
        heads: usize,
        head_width: usize,
        scale: f64,
        dropout: f64,
        /// The deviation of queries, keys and values.
        size: f32,
        /// True if all queries and keys are equal, of elements that are `size`.
        alike: bool,
        floats: Floats,
    }

    const CASE: Case = Case {
        batch: 2,
        tokens: 1,
        heads: 3,
        head_width: 5,
        scale: 0.5,
        dropout: 0.0,
        size: 1.0,
        alike: false,
        floats: Floats::F32,
    };

    fn pass() -> Pass {
        Pass::train(Pass::key_of(1, 2, 3), Activation::default())
    }

    impl Case {
        fn width(self) -> usize {
            self.heads * self.head_width
        }

        fn options(self) -> Attention {
            let Self { heads, scale, dropout, .. } = self;
            Attention { heads, scale, dropout, site: 7 }
        }

        fn qkv(self) -> Tensor<3> {
            let width = self.width();
            let normal: Tensor<3> = normal(1, [self.batch, self.tokens, 3 * width]);
            let qkv = if self.alike {
                let same = normal.clone().narrow(2, 0, 2 * width).zeros_like().add_scalar(self.size);
                Tensor::cat(vec![same, normal.narrow(2, 2 * width, width)], 2)
            } else {
                normal.mul_scalar(self.size)
            };
            self.floats.leaf(qkv)
        }

        fn upstream(self) -> Tensor<3> {
            self.floats.of(normal(2, [self.batch, self.tokens, self.width()]))
        }

        /// The output, and the gradient for a gradient of normal numbers.
        fn run(self, attention: impl Fn(Tensor<3>, Attention, &Pass) -> Tensor<3>) -> [Vec<f32>; 2] {
            let qkv = self.qkv();
            let out = attention(qkv.clone(), self.options(), &pass());
            let found = values(&out);
            let grads = (out * self.upstream()).sum().backward();
            [found, gradient(&qkv, &grads)]
        }

        /// The same in `f64`, with loops.
        fn exact(self) -> [Vec<f32>; 2] {
            let wide = |t: Tensor<3>| values(&t).into_iter().map(f64::from).collect::<Vec<_>>();
            let (qkv, upstream) = (wide(self.qkv()), wide(self.upstream()));
            let (mut out, mut d_qkv) = (vec![0.0; upstream.len()], vec![0.0; qkv.len()]);
            for (sequence, head) in (0..self.batch).flat_map(|b| (0..self.heads).map(move |h| (b, h))) {
                for query in 0..self.tokens {
                    self.exact_row([sequence, head, query], (&qkv, &upstream), (&mut out, &mut d_qkv));
                }
            }
            [out, d_qkv].map(|values| values.into_iter().map(|x| x as f32).collect())
        }

        fn exact_row(
            self,
            [sequence, head, query]: [usize; 3],
            (qkv, upstream): (&[f64], &[f64]),
            (out, d_qkv): (&mut [f64], &mut [f64]),
        ) {
            let Self { tokens, heads, head_width, scale, dropout, .. } = self;
            let width = self.width();
            let at = |token, part| (sequence * tokens + token) * 3 * width + part * width + head * head_width;
            let from = (sequence * tokens + query) * width + head * head_width;
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let vector = |start: usize| &qkv[start..start + head_width];
            let scores: Vec<f64> =
                (0..=query).map(|key| scale * dot(vector(at(query, 0)), vector(at(key, 1)))).collect();
            let largest = scores.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
            let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp() / sum).collect();
            let first = (((sequence * heads + head) * tokens + query) * tokens) as u64;
            let mask = pass().site(7).dropout_mask(dropout);
            let factor = |key: usize| mask.map_or(1.0, |mask| f64::from(mask.factor(first + key as u64)));
            let g = &upstream[from..from + head_width];
            let for_weight = |key: usize| dot(g, vector(at(key, 2))) * factor(key);
            let mean: f64 = (0..=query).map(|key| weights[key] * for_weight(key)).sum();
            for key in 0..=query {
                let for_score = weights[key] * (for_weight(key) - mean) * scale;
                for i in 0..head_width {
                    out[from + i] += weights[key] * factor(key) * qkv[at(key, 2) + i];
                    d_qkv[at(query, 0) + i] += for_score * qkv[at(key, 1) + i];
                    d_qkv[at(key, 1) + i] += for_score * qkv[at(query, 0) + i];
                    d_qkv[at(key, 2) + i] += weights[key] * factor(key) * g[i];
                }
            }
        }

        fn assert_near(self, found: &[Vec<f32>; 2], expected: &[Vec<f32>; 2], bound: f64) {
            for (found, expected) in found.iter().zip(expected) {
                let error = distance(found, expected);
                assert!(error < bound, "{self:?}: {error}");
            }
        }
    }

    #[test]
    fn values_and_gradients_equal_the_exact_ones_and_the_reference() {
        for tokens in [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5] {
            for (heads, head_width, scale, dropout) in
                [(1, 1, 1.0, 0.0), (3, 5, -0.75, 0.25), (2, 16, 0.25, 0.1)]
            {
                let case = Case { tokens, heads, head_width, scale, dropout, ..CASE };
                let found = case.run(causal_attention);
                case.assert_near(&found, &case.exact(), 2e-6);
                case.assert_near(&found, &case.run(reference::causal_attention), 2e-6);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn any_sizes_equal_the_exact_ones(
            batch in 1usize..4, tokens in 1usize..150, heads in 1usize..5, head_width in 1usize..20,
            scale in -4i32..5, drops: bool,
        ) {
            let (scale, dropout) = (f64::from(scale) * 0.25, if drops { 0.3 } else { 0.0 });
            let case = Case { batch, tokens, heads, head_width, scale, dropout, ..CASE };
            case.assert_near(&case.run(causal_attention), &case.exact(), 1e-5);
        }
    }

    #[test]
    fn bf16_is_rounded_once_forward_and_once_back() {
        for (tokens, dropout) in [(1, 0.0), (BLOCK - 1, 0.1), (3 * BLOCK + 5, 0.25), (3 * BLOCK, 0.0)] {
            let case = |floats| Case { tokens, dropout, floats, head_width: 16, ..CASE };
            let (found, exact) = (case(Floats::Bf16).run(causal_attention), case(Floats::Bf16).exact());
            assert_rounded(&found[0], &case(Floats::Widened).run(causal_attention)[0]);
            assert_within(ROUNDING, &format!("attention of {tokens}"), &found[0], &exact[0]);
            // The backward reads the output after it was rounded.
            let what = format!("gradient of attention of {tokens}");
            assert_within(2.0 * ROUNDING, &what, &found[1], &exact[1]);
        }
    }

    #[test]
    fn scores_may_be_as_far_apart_as_numbers_are() {
        for (size, scale) in [(100.0, 1.0), (100.0, -1.0), (1e15, 1.0), (1e-20, 1e-3)] {
            let case = Case { tokens: BLOCK + 9, size, scale, ..CASE };
            let found = case.run(causal_attention);
            assert!(found.iter().flatten().all(|x| x.is_finite()), "{case:?}");
            // Nearly always one key takes it all, whatever the rounding of the scores.
            let error = distance(&found[0], &case.exact()[0]);
            assert!(error < 1e-2, "{case:?}: {error}");
        }
    }

    #[test]
    fn equal_scores_share_however_large_they_are() {
        for size in [1.0, 1000.0] {
            let case = Case { tokens: BLOCK + 9, size, alike: true, ..CASE };
            case.assert_near(&case.run(causal_attention), &case.exact(), 2e-6);
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_tracking() {
        for (dropout, floats) in [(0.0, Floats::F32), (0.1, Floats::F32), (0.1, Floats::Bf16)] {
            let case = Case { tokens: 2 * BLOCK + 7, dropout, floats, ..CASE };
            let one = with_threads(1, || case.run(causal_attention));
            assert_eq!(one, with_threads(2, || case.run(causal_attention)));
            assert_eq!(one, with_threads(3, || case.run(causal_attention)));
            assert_eq!(values(&causal_attention(untracked(case.qkv()), case.options(), &pass())), one[0]);
        }
    }

    #[test]
    fn a_score_that_is_no_number_shows() {
        let case = Case { batch: 1, tokens: BLOCK + 3, ..CASE };
        let (width, head_width) = (case.width(), case.head_width);
        // With the first element of the first head's query (part 0) or key (part 1) of a token no number.
        let run = |part: usize, token: usize| {
            let mut data = values(&case.qkv());
            data[token * 3 * width + part * width] = f32::NAN;
            let data = TensorData::new(data, [1, case.tokens, 3 * width]);
            let qkv = Tensor::from_data(data, &Device::flex().autodiff());
            values(&causal_attention(qkv, case.options(), &pass()))
        };
        for token in [0, 5, BLOCK + 1] {
            for (i, (of_query, of_key)) in run(0, token).iter().zip(run(1, token)).enumerate() {
                let (row, first_head) = (i / width, i % width < head_width);
                assert_eq!(of_query.is_nan(), first_head && row == token, "{token}, {i}");
                assert_eq!(of_key.is_nan(), first_head && row >= token, "{token}, {i}");
            }
        }
    }

    fn attend(qkv: Tensor<3>, dropout: f64, pass: &Pass) -> Vec<f32> {
        values(&causal_attention(qkv, Attention { heads: 2, scale: 0.5, dropout, site: 0 }, pass))
    }

    #[test]
    fn a_token_does_not_see_what_comes_after() {
        let qkv = normal(1, [1, 6, 24]);
        let changed = Tensor::cat(vec![qkv.clone().narrow(1, 0, 4), normal(2, [1, 2, 24])], 1);
        let (a, b) = (attend(qkv, 0.0, &pass()), attend(changed, 0.0, &pass()));
        assert_eq!(a[..4 * 8], b[..4 * 8]);
        assert_ne!(a[4 * 8..], b[4 * 8..]);
    }

    #[test]
    fn the_first_token_takes_its_own_value() {
        let qkv = normal(1, [1, 3, 24]);
        let own = values(&qkv.clone().narrow(2, 16, 8).narrow(1, 0, 1));
        assert_eq!(attend(qkv, 0.0, &pass())[..8], own);
    }

    #[test]
    fn dropout_follows_the_pass() {
        let qkv = || normal(1, [2, 6, 24]);
        let dropped = attend(qkv(), 0.5, &pass());
        assert_eq!(dropped, attend(qkv(), 0.5, &pass()));
        assert_ne!(dropped, attend(qkv(), 0.0, &pass()));
        let evaluate = Pass::evaluate(Activation::default());
        assert_eq!(attend(qkv(), 0.5, &evaluate), attend(qkv(), 0.0, &pass()));
    }

    #[test]
    #[should_panic(expected = "attention of 5 heads expects three times a multiple of them")]
    fn heads_that_do_not_divide_the_width_are_named() {
        let options = Attention { heads: 5, scale: 1.0, dropout: 0.0, site: 0 };
        causal_attention(normal(1, [1, 2, 24]), options, &pass());
    }
}
