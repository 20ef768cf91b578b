//! Attention over concatenated queries, keys and values, with separate keys for each head.

use super::STATISTICS;
use super::group::{self, Element, Form, Group, Parts};
use super::positions::{self, TokenRange};
use crate::ops::autodiff::*;
use crate::ops::kernels::{Mat, MatMut};
use crate::ops::tensors::{flex, float_type, floats, one_type, owned};
use burn::tensor::{Int, Tensor};
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};
use hydra_core::{DropoutMask, FloatType, Pass};

/// The settings of attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// The number of heads; it divides the width.
    pub heads: usize,
    /// The factor on the scores.
    pub scale: f64,
    /// The dropout probability of attention weights in training.
    pub dropout: f64,
    /// The pass's dropout site; its elements are the weights `[batch, heads, query, key]`.
    pub site: u64,
}

/// Causal scaled dot-product attention (Vaswani et al., 2017): `qkv` of shape `[batch, tokens, 3 * width]` holds
/// queries, keys and values side by side; the result has shape `[batch, tokens, width]`.
///
/// # Panics
/// If the last dimension is not three times a multiple of the heads, or the elements are not `F32`, `BF16` or `F16`.
pub fn causal_attention(qkv: Tensor<3>, options: Attention, pass: &Pass) -> Tensor<3> {
    let options = checked(&qkv, options, pass);
    Tensor::from_dispatch(<Dispatch as AttentionOps>::causal_attention(qkv.into_dispatch(), options))
}

/// The same for rows that hold several examples, one after the other, which do not attend to each other: `positions`
/// `[batch, tokens]` count up from zero in each example. Without dropout, an example's output and gradients have the
/// same bits as in a row of its own.
///
/// # Panics
/// As above, and if the positions have another shape; on CPUs also if they do not count up.
pub fn causal_attention_within(
    qkv: Tensor<3>,
    positions: Tensor<2, Int>,
    options: Attention,
    pass: &Pass,
) -> Tensor<3> {
    let ([batch, tokens, _], options) = (qkv.dims(), checked(&qkv, options, pass));
    positions::check("causal_attention_within", &positions, [batch, tokens]);
    let (qkv, positions) = (qkv.into_dispatch(), positions.into_dispatch());
    Tensor::from_dispatch(<Dispatch as AttentionOps>::causal_attention_within(qkv, positions, options))
}

#[track_caller]
fn checked(qkv: &Tensor<3>, options: Attention, pass: &Pass) -> Options {
    let (heads, triple) = (options.heads, qkv.dims()[2]);
    assert!(
        heads > 0 && triple > 0 && triple.is_multiple_of(3 * heads),
        "attention of {heads} heads expects three times a multiple of them as last dimension, found {triple}"
    );
    one_type("causal_attention", [qkv.dtype()]);
    let mask = pass.site(options.site).dropout_mask(options.dropout);
    Options { heads, scale: options.scale as f32, mask }
}

/// The maximum number of elements that attention holds besides its input, output and their gradients: the statistics of
/// each row, and the scratch memory of all heads as if they were computed concurrently.
pub(crate) fn working_elements([batch, tokens, width]: [usize; 3], heads: usize) -> usize {
    batch * heads * (STATISTICS * tokens + group::scratch_elements(form(tokens, width / heads)))
}

fn form(tokens: usize, head_width: usize) -> Form {
    Form { tokens, head_width, count: 1, before: tokens, after: 0, turned: false }
}

/// The arguments of the kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(in crate::ops) heads: usize,
    pub(in crate::ops) scale: f32,
    pub(in crate::ops) mask: Option<DropoutMask>,
}

/// Attention as a backend op.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait AttentionOps: Backend {
    /// The output for concatenated queries, keys and values.
    fn causal_attention(qkv: FloatTensor<Self>, options: Options) -> FloatTensor<Self>;

    /// The same for rows of several examples with these positions.
    fn causal_attention_within(
        qkv: FloatTensor<Self>,
        positions: IntTensor<Self>,
        options: Options,
    ) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait AttentionKernels: AttentionOps {
    /// The output, and the statistics of each row of scores, `[batch, heads, tokens, 2]`, as `F32`: the largest score,
    /// and one over the sum of `e^(score - largest)`.
    fn attention_and_statistics(
        qkv: FloatTensor<Self>,
        positions: Option<IntTensor<Self>>,
        options: Options,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The gradient of `qkv`, given that of the output.
    fn attention_backward(
        saved: Saved<FloatTensor<Self>>,
        positions: Option<IntTensor<Self>>,
        gradient: FloatTensor<Self>,
        options: Options,
    ) -> FloatTensor<Self>;
}

/// The saved forward tensors of the backward.
#[derive(Clone, Debug)]
pub(crate) struct Saved<T> {
    pub(in crate::ops) qkv: T,
    pub(in crate::ops) output: T,
    pub(in crate::ops) statistics: T,
}

/// The heads of a batch in the order `[batch, heads]`.
fn heads<'a, T: Element>(
    qkv: &'a [T],
    [_, tokens, triple]: [usize; 3],
    positions: Option<&'a [i64]>,
    options: Options,
) -> Vec<Group<'a, T>> {
    let Options { heads, scale, mask } = options;
    let head_width = triple / 3 / heads;
    let sequences = qkv.chunks(tokens * triple).map(|data| Mat::new(data, tokens, triple)).enumerate();
    let head = |sequence: usize, data: Mat<'a, T>, head: usize| {
        let part = |part: usize| {
            let first = (part * heads + head) * head_width;
            data.cols(first..first + head_width)
        };
        let (queries, keys, values) = (part(0), part(1), part(2));
        let (form, number) = (form(tokens, head_width), sequence * heads + head);
        let place = TokenRange::whole(positions, sequence, tokens);
        Group { queries, keys, values, form, scale, mask, rotation: None, number, place }
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

fn forward(qkv: FlexTensor, positions: Option<FlexTensor>, options: Options) -> (FlexTensor, FlexTensor) {
    match float_type(&qkv) {
        FloatType::Bf16 => forward_of::<u16>(qkv.to_contiguous(), positions, options, FloatType::Bf16),
        float => forward_of::<f32>(owned(qkv), positions, options, float),
    }
}

/// The same, computed with these elements; the result is rounded to `float`.
fn forward_of<T: Element>(
    qkv: FlexTensor,
    positions: Option<FlexTensor>,
    options: Options,
    float: FloatType,
) -> (FlexTensor, FlexTensor) {
    let [batch, tokens, triple] = qkv.shape().dims();
    let positions = positions.map(|positions| positions::read(positions, tokens));
    let groups = heads(T::of(&qkv), [batch, tokens, triple], positions.as_deref(), options);
    let shape = [batch, tokens, triple / 3];
    let (output, statistics) = group::forward(&groups, shape);
    let statistics = flex(statistics, [batch, options.heads, tokens, STATISTICS], FloatType::F32);
    (flex(output, shape, float), statistics)
}

fn backward(
    saved: Saved<FlexTensor>,
    positions: Option<FlexTensor>,
    gradient: FlexTensor,
    options: Options,
) -> FlexTensor {
    let Saved { qkv, output, statistics } = saved;
    let (float, all) = (float_type(&qkv), [qkv, output, gradient]);
    match float {
        FloatType::Bf16 => {
            let all = all.map(|tensor| tensor.to_contiguous());
            backward_of::<u16>(all, &statistics, positions, options, float)
        }
        _ => backward_of::<f32>(all.map(owned), &statistics, positions, options, float),
    }
}

/// The same, computed with these elements of `qkv`, output and its gradient; the result is rounded to `float`.
fn backward_of<T: Element>(
    [qkv, output, gradient]: [FlexTensor; 3],
    statistics: &FlexTensor,
    positions: Option<FlexTensor>,
    options: Options,
    float: FloatType,
) -> FlexTensor {
    let shape: [usize; 3] = qkv.shape().dims();
    let [_, tokens, triple] = shape;
    let mut d_qkv = vec![0.0; shape.iter().product()];
    if !d_qkv.is_empty() {
        let positions = positions.map(|positions| positions::read(positions, tokens));
        let groups = heads(T::of(&qkv), shape, positions.as_deref(), options);
        let head_width = triple / 3 / options.heads;
        let parts = d_qkv.chunks_mut(tokens * triple).flat_map(|data| parts(data, tokens, head_width));
        let known = [T::of(&output), T::of(&gradient)];
        group::backward(&groups, parts.collect(), known, floats(statistics), triple / 3);
    }
    flex(d_qkv, shape, float)
}

impl AttentionOps for Flex {
    fn causal_attention(qkv: FloatTensor<Self>, options: Options) -> FloatTensor<Self> {
        Self::attention_and_statistics(qkv, None, options).0
    }

    fn causal_attention_within(
        qkv: FloatTensor<Self>,
        positions: IntTensor<Self>,
        options: Options,
    ) -> FloatTensor<Self> {
        Self::attention_and_statistics(qkv, Some(positions), options).0
    }
}

impl AttentionKernels for Flex {
    fn attention_and_statistics(
        qkv: FloatTensor<Self>,
        positions: Option<IntTensor<Self>>,
        options: Options,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        profile::time(Part::Attention, || forward(qkv, positions, options))
    }

    fn attention_backward(
        saved: Saved<FloatTensor<Self>>,
        positions: Option<IntTensor<Self>>,
        gradient: FloatTensor<Self>,
        options: Options,
    ) -> FloatTensor<Self> {
        profile::time(Part::Attention, || backward(saved, positions, gradient, options))
    }
}

#[derive(Debug)]
struct AttentionBackward;

impl<B: AttentionKernels> Backward<B, 1> for AttentionBackward {
    type State = (Saved<FloatTensor<B>>, Option<IntTensor<B>>, Options);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (saved, positions, options) = ops.state;
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::attention_backward(saved, positions, gradient, options));
        }
    }
}

/// Attention whose gradient is tracked if the input is.
fn tracked<B: AttentionKernels, C: CheckpointStrategy>(
    qkv: FloatTensor<Autodiff<B, C>>,
    positions: Option<IntTensor<B>>,
    options: Options,
) -> FloatTensor<Autodiff<B, C>> {
    match AttentionBackward.prepare::<C>([qkv.node()]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let qkv = qkv.into_primitive();
            let (output, statistics) = B::attention_and_statistics(qkv.clone(), positions.clone(), options);
            prep.finish((Saved { qkv, output: output.clone(), statistics }, positions, options), output)
        }
        OpsKind::UnTracked(prep) => {
            prep.finish(B::attention_and_statistics(qkv.into_primitive(), positions, options).0)
        }
    }
}

impl<B: AttentionKernels, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn causal_attention(qkv: FloatTensor<Self>, options: Options) -> FloatTensor<Self> {
        tracked::<B, C>(qkv, None, options)
    }

    fn causal_attention_within(
        qkv: FloatTensor<Self>,
        positions: IntTensor<Self>,
        options: Options,
    ) -> FloatTensor<Self> {
        tracked::<B, C>(qkv, Some(positions), options)
    }
}

#[cfg(test)]
mod tests {
    use super::group::BLOCK;
    use super::*;
    use crate::ops::kernels::bf16::testing::{emulated, native};
    use crate::ops::{reference, testing::*};
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
        /// The standard deviation of queries, keys and values.
        size: f32,
        /// Whether all elements of queries and keys are `size`.
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
    fn bf16_is_close_to_the_exact_values_and_the_emulation_has_its_bits() {
        for (tokens, dropout) in [(1, 0.0), (BLOCK - 1, 0.1), (3 * BLOCK + 5, 0.25), (3 * BLOCK, 0.0)] {
            let case = Case { tokens, dropout, floats: Floats::Bf16, head_width: 16, ..CASE };
            let (found, exact) = (native(|| case.run(causal_attention)), case.exact());
            // Weights, the output and the gradients of scores are rounded.
            for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
                let what = format!("attention of {tokens}, {i}");
                assert_within([2.0, 3.0][i] * ROUNDING, &what, found, exact);
            }
            assert_eq!(emulated(|| case.run(causal_attention)), found);
        }
    }

    #[test]
    fn scores_may_be_as_far_apart_as_numbers_are() {
        for (size, scale) in [(100.0, 1.0), (100.0, -1.0), (1e15, 1.0), (1e-20, 1e-3)] {
            let case = Case { tokens: BLOCK + 9, size, scale, ..CASE };
            let found = case.run(causal_attention);
            assert!(found.iter().flatten().all(|x| x.is_finite()), "{case:?}");
            // Nearly always one key has all the weight, regardless of the rounding of scores.
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

    /// Lengths of the examples of rows.
    const ROWS: [[usize; 4]; 2] = [[1, BLOCK + 5, BLOCK, 9], [2, 2, 2 * BLOCK + 1, 10]];

    const PACKED: Case = Case { tokens: 2 * BLOCK + 15, head_width: 8, ..CASE };

    #[test]
    fn an_example_has_the_bits_of_a_row_of_its_own() {
        for floats in [Floats::F32, Floats::Bf16] {
            let case = Case { floats, ..PACKED };
            let packed =
                case.run(|qkv, options, pass| causal_attention_within(qkv, positions(&ROWS), options, pass));
            let alone = |row: usize, tokens: &std::ops::Range<usize>| {
                let part = |all: Tensor<3>| all.slice([row..row + 1, tokens.clone()]);
                let qkv = part(case.qkv()).detach().require_grad();
                let out = causal_attention(qkv.clone(), case.options(), &pass());
                let found = values(&out);
                let grads = (out * part(case.upstream())).sum().backward();
                [found, gradient(&qkv, &grads)]
            };
            for (row, tokens) in examples(&ROWS) {
                for (packed, alone) in packed.iter().zip(alone(row, &tokens)) {
                    let width = alone.len() / tokens.len();
                    let first = (row * case.tokens + tokens.start) * width;
                    assert_eq!(packed[first..][..alone.len()], alone, "{floats:?}, {tokens:?} of {row}");
                }
            }
        }
    }

    #[test]
    fn packed_rows_equal_the_reference_with_dropout_on_any_threads() {
        for dropout in [0.0, 0.3] {
            let case = Case { dropout, ..PACKED };
            let run = || case.run(|qkv, o, pass| causal_attention_within(qkv, positions(&ROWS), o, pass));
            let found = with_threads(1, run);
            assert_eq!(found, with_threads(3, run));
            let slow =
                case.run(|qkv, o, pass| reference::causal_attention_within(qkv, positions(&ROWS), o, pass));
            case.assert_near(&found, &slow, 2e-6);
        }
    }

    #[test]
    fn positions_of_one_example_a_row_have_the_bits_of_none() {
        let case = Case { dropout: 0.2, ..PACKED };
        let rows = [[case.tokens]; 2];
        let found = case.run(|qkv, o, pass| causal_attention_within(qkv, positions(&rows), o, pass));
        assert_eq!(found, case.run(causal_attention));
    }

    #[test]
    #[should_panic(expected = "causal_attention_within expects positions of shape [2, 79], found [1, 3]")]
    fn positions_of_another_shape_are_named() {
        PACKED.run(|qkv, o, pass| causal_attention_within(qkv, positions(&[[2, 1]]), o, pass));
    }

    #[test]
    fn a_score_that_is_no_number_shows() {
        let case = Case { batch: 1, tokens: BLOCK + 3, ..CASE };
        let (width, head_width) = (case.width(), case.head_width);
        // With a NaN in the first head's query (part 0) or key (part 1) of a token.
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
