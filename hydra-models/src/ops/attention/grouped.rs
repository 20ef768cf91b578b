//! Grouped-query attention, with separate queries, keys and values.

use super::STATISTICS;
use super::group::{self, Element, Form, Group};
use super::positions::{self, TokenRange};
use super::rotary::{Rotary, Rotation};
use crate::ops::autodiff::*;
use crate::ops::kernels::{Mat, MatMut};
use crate::ops::tensors::{flex, float_type, floats, one_type, owned};
use burn::tensor::{Int, Tensor};
use burn_flex::FlexTensor;
use hydra_core::profile::{self, Part};
use hydra_core::{DropoutMask, FloatType, Pass};

/// The settings of grouped attention.
#[derive(Clone, Debug)]
pub struct GroupedAttention {
    /// The number of query heads.
    pub heads: usize,
    /// The number of key and value heads; it divides the number of query heads, and consecutive query heads share one.
    pub key_heads: usize,
    /// The factor on the scores.
    pub scale: f64,
    /// Whether a token attends only to itself and earlier tokens; if not, also to later ones.
    pub causal: bool,
    /// The maximum number of tokens, including itself, that a token attends to in a direction; `None` for all.
    pub window: Option<usize>,
    /// The rotary embedding of queries and keys, if any.
    pub rotary: Option<Rotary>,
    /// The dropout probability of attention weights in training.
    pub dropout: f64,
    /// The pass's dropout site; its elements are the weights `[batch, heads, query, key]`.
    pub site: u64,
}

/// Grouped-query attention (Ainslie et al., 2023) in which a token attends to itself and earlier tokens within the
/// window, or in both directions: queries are `[batch, tokens, heads * head width]`, keys and values `[batch, tokens, key
/// heads * head width]`, which are not copied for the heads that share them. The result has the shape of the queries.
///
/// # Panics
/// If shapes, heads, the rotary embedding's width or float types do not match, or the window is zero.
pub fn grouped_attention(
    queries: Tensor<3>,
    keys: Tensor<3>,
    values: Tensor<3>,
    attention: &GroupedAttention,
    pass: &Pass,
) -> Tensor<3> {
    check([&queries, &keys, &values], attention);
    let options = GroupedOptions::new(attention, queries.dims()[1], pass);
    let (queries, keys, values) = (queries.into_dispatch(), keys.into_dispatch(), values.into_dispatch());
    Tensor::from_dispatch(<Dispatch as GroupedOps>::grouped_attention(queries, keys, values, options))
}

/// The same for rows that hold several examples, one after the other, which do not attend to each other: `positions`
/// `[batch, tokens]` count up from zero in each example, and determine the rotation of queries and keys. Without
/// dropout, an example's output and gradients have the same bits as in a row of its own.
///
/// # Panics
/// As above, and if the positions have another shape; on CPUs also if they do not count up.
pub fn grouped_attention_within(
    queries: Tensor<3>,
    keys: Tensor<3>,
    values: Tensor<3>,
    positions: Tensor<2, Int>,
    attention: &GroupedAttention,
    pass: &Pass,
) -> Tensor<3> {
    check([&queries, &keys, &values], attention);
    let [batch, tokens, _] = queries.dims();
    positions::check("grouped_attention_within", &positions, [batch, tokens]);
    let options = GroupedOptions::new(attention, tokens, pass);
    let (queries, keys, values) = (queries.into_dispatch(), keys.into_dispatch(), values.into_dispatch());
    let positions = positions.into_dispatch();
    let out = <Dispatch as GroupedOps>::grouped_attention_within(queries, keys, values, positions, options);
    Tensor::from_dispatch(out)
}

#[track_caller]
fn check([queries, keys, values]: [&Tensor<3>; 3], attention: &GroupedAttention) {
    let GroupedAttention { heads, key_heads, window, rotary, .. } = attention;
    assert!(
        *key_heads > 0 && *heads > 0 && heads.is_multiple_of(*key_heads),
        "grouped_attention expects heads of keys that divide those of queries, found {key_heads} for {heads}"
    );
    let [batch, tokens, width] = queries.dims();
    assert!(
        width > 0 && width.is_multiple_of(*heads),
        "grouped_attention of {heads} heads expects queries a multiple of them wide, found {width}"
    );
    let (expected, found) = ([batch, tokens, width / heads * key_heads], [keys.dims(), values.dims()]);
    assert!(
        found == [expected; 2],
        "grouped_attention expects keys and values of shape {expected:?}, found {found:?}"
    );
    assert!(*window != Some(0), "grouped_attention expects a window of at least one token");
    let turned = rotary.as_ref().map_or(width / heads, Rotary::width);
    assert!(
        turned == width / heads,
        "grouped_attention expects a rotary embedding as wide as a head, {}; found {turned}",
        width / heads
    );
    one_type("grouped_attention", [queries.dtype(), keys.dtype(), values.dtype()]);
}

/// The maximum number of elements that attention holds besides its inputs, output and their gradients, for queries of
/// this shape: the statistics of each row, and the scratch memory of all groups as if they were computed concurrently.
pub(crate) fn working_elements([batch, tokens, width]: [usize; 3], attention: &GroupedAttention) -> usize {
    let GroupedAttention { heads, key_heads, causal, window, rotary, .. } = attention;
    let (head_width, count) = (width / heads, heads / key_heads);
    let (before, after) = keys_around(*causal, window.map_or(tokens, |window| window.min(tokens)));
    let form = Form { tokens, head_width, count, before, after, turned: rotary.is_some() };
    batch * (heads * STATISTICS * tokens + key_heads * group::scratch_elements(form))
}

/// The number of keys before and after its own that a query attends to, of this window.
fn keys_around(causal: bool, window: usize) -> (usize, usize) {
    let before = window.saturating_sub(1);
    (before, if causal { 0 } else { before })
}

/// The arguments of the kernels.
#[derive(Clone, Debug)]
pub(crate) struct GroupedOptions {
    pub(in crate::ops) heads: usize,
    pub(in crate::ops) key_heads: usize,
    pub(in crate::ops) scale: f32,
    pub(in crate::ops) causal: bool,
    /// At most the number of tokens.
    pub(in crate::ops) window: usize,
    pub(in crate::ops) rotation: Option<Rotation>,
    pub(in crate::ops) mask: Option<DropoutMask>,
}

/// Attention as a backend op.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait GroupedOps: Backend {
    /// The output for queries, keys and values.
    fn grouped_attention(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        options: GroupedOptions,
    ) -> FloatTensor<Self>;

    /// The same for rows of several examples with these positions.
    fn grouped_attention_within(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        positions: IntTensor<Self>,
        options: GroupedOptions,
    ) -> FloatTensor<Self>;
}

/// The saved forward tensors of the backward.
#[derive(Clone, Debug)]
pub(crate) struct GroupedSaved<T> {
    /// Queries, keys and values.
    pub(in crate::ops) inputs: [T; 3],
    pub(in crate::ops) output: T,
    pub(in crate::ops) statistics: T,
}

/// The operations that a differentiable backend provides.
pub(crate) trait GroupedKernels: GroupedOps {
    /// The output, and the statistics of each row of scores, `[batch, heads, tokens, 2]`, as `F32`: the largest score,
    /// and one over the sum of `e^(score - largest)`.
    fn grouped_and_statistics(
        inputs: [FloatTensor<Self>; 3],
        positions: Option<IntTensor<Self>>,
        options: GroupedOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The gradients of queries, keys and values, given that of the output.
    fn grouped_backward(
        saved: GroupedSaved<FloatTensor<Self>>,
        positions: Option<IntTensor<Self>>,
        gradient: FloatTensor<Self>,
        options: GroupedOptions,
    ) -> [FloatTensor<Self>; 3];
}

impl GroupedOptions {
    fn new(attention: &GroupedAttention, tokens: usize, pass: &Pass) -> Self {
        Self {
            heads: attention.heads,
            key_heads: attention.key_heads,
            scale: attention.scale as f32,
            causal: attention.causal,
            window: attention.window.map_or(tokens, |window| window.min(tokens)),
            rotation: attention.rotary.as_ref().map(|rotary| rotary.rotation(tokens)),
            mask: pass.site(attention.site).dropout_mask(attention.dropout),
        }
    }

    fn form(&self, [_, tokens, width]: [usize; 3]) -> Form {
        let Self { heads, key_heads, causal, window, rotation, .. } = self;
        let (head_width, count, turned) = (width / heads, heads / key_heads, rotation.is_some());
        let (before, after) = keys_around(*causal, *window);
        Form { tokens, head_width, count, before, after, turned }
    }

    /// The groups of a batch in the order `[batch, key heads]`, for queries of this shape.
    fn groups<'a, T: Element>(
        &'a self,
        inputs: [&'a [T]; 3],
        shape: [usize; 3],
        positions: Option<&'a [i64]>,
    ) -> Vec<Group<'a, T>> {
        let (form, [batch, tokens, _]) = (self.form(shape), shape);
        let group = |sequence: usize, head: usize| {
            let part = |i: usize, width: usize| {
                let all = width * self.key_heads;
                let data = &inputs[i][sequence * tokens * all..][..tokens * all];
                Mat::new(data, tokens, all).cols(head * width..(head + 1) * width)
            };
            let [keys, values] = [1, 2].map(|i| part(i, form.head_width));
            Group {
                queries: part(0, form.count * form.head_width),
                keys,
                values,
                form,
                scale: self.scale,
                mask: self.mask,
                rotation: self.rotation.as_ref(),
                number: sequence * self.heads + head * form.count,
                place: TokenRange::whole(positions, sequence, tokens),
            }
        };
        (0..batch)
            .flat_map(|i| (0..self.key_heads).map(move |head| (i, head)))
            .map(|(i, h)| group(i, h))
            .collect()
    }
}

/// The matrices of all heads of `[batch, tokens, heads * width]`.
fn split(data: &mut [f32], tokens: usize, heads: usize, width: usize) -> impl Iterator<Item = MatMut<'_>> {
    let sequences = data.chunks_mut(tokens * heads * width);
    sequences.flat_map(move |data| MatMut::new(data, tokens, heads * width).split_cols(width))
}

fn forward(
    inputs: [FlexTensor; 3],
    positions: Option<FlexTensor>,
    options: &GroupedOptions,
) -> (FlexTensor, FlexTensor) {
    match float_type(&inputs[0]) {
        FloatType::Bf16 => {
            let inputs = inputs.map(|input| input.to_contiguous());
            forward_of::<u16>(inputs, positions, options, FloatType::Bf16)
        }
        float => forward_of::<f32>(inputs.map(owned), positions, options, float),
    }
}

/// The same, computed with these elements; the result is rounded to `float`.
fn forward_of<T: Element>(
    inputs: [FlexTensor; 3],
    positions: Option<FlexTensor>,
    options: &GroupedOptions,
    float: FloatType,
) -> (FlexTensor, FlexTensor) {
    let shape: [usize; 3] = inputs[0].shape().dims();
    let [batch, tokens, _] = shape;
    let positions = positions.map(|positions| positions::read(positions, tokens));
    let groups = options.groups(inputs.each_ref().map(T::of), shape, positions.as_deref());
    let (output, statistics) = group::forward(&groups, shape);
    let statistics = flex(statistics, [batch, options.heads, tokens, STATISTICS], FloatType::F32);
    (flex(output, shape, float), statistics)
}

fn backward(
    saved: GroupedSaved<FlexTensor>,
    positions: Option<FlexTensor>,
    gradient: FlexTensor,
    options: &GroupedOptions,
) -> [FlexTensor; 3] {
    let GroupedSaved { inputs, output, statistics } = saved;
    let (float, known) = (float_type(&gradient), [output, gradient]);
    match float {
        FloatType::Bf16 => {
            let inputs = inputs.map(|input| input.to_contiguous());
            let known = known.map(|known| known.to_contiguous());
            backward_of::<u16>(inputs, known, &statistics, positions, options)
        }
        _ => backward_of::<f32>(inputs.map(owned), known.map(owned), &statistics, positions, options),
    }
    .map(|(d, shape)| flex(d, shape, float))
}

/// The same, computed with these elements of the inputs, the output and its gradient; values and shapes.
fn backward_of<T: Element>(
    inputs: [FlexTensor; 3],
    [output, gradient]: [FlexTensor; 2],
    statistics: &FlexTensor,
    positions: Option<FlexTensor>,
    options: &GroupedOptions,
) -> [(Vec<f32>, [usize; 3]); 3] {
    let shape: [usize; 3] = inputs[0].shape().dims();
    let form = options.form(shape);
    let shapes: [[usize; 3]; 3] = inputs.each_ref().map(|input| input.shape().dims());
    let mut d = shapes.map(|shape| vec![0.0; shape.iter().product()]);
    if !d[0].is_empty() {
        let positions = positions.map(|positions| positions::read(positions, form.tokens));
        let groups = options.groups(inputs.each_ref().map(T::of), shape, positions.as_deref());
        let [queries, keys, values] = &mut d;
        let parts = |data, width| split(data, form.tokens, options.key_heads, width);
        let queries = parts(queries, form.count * form.head_width);
        let (keys, values) = (parts(keys, form.head_width), parts(values, form.head_width));
        let parts = queries.zip(keys).zip(values).map(|((q, k), v)| [q, k, v]);
        let known = [T::of(&output), T::of(&gradient)];
        group::backward(&groups, parts.collect(), known, floats(statistics), shape[2]);
    }
    let [queries, keys, values] = d;
    [(queries, shapes[0]), (keys, shapes[1]), (values, shapes[2])]
}

impl GroupedOps for Flex {
    fn grouped_attention(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        options: GroupedOptions,
    ) -> FloatTensor<Self> {
        Self::grouped_and_statistics([queries, keys, values], None, options).0
    }

    fn grouped_attention_within(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        positions: IntTensor<Self>,
        options: GroupedOptions,
    ) -> FloatTensor<Self> {
        Self::grouped_and_statistics([queries, keys, values], Some(positions), options).0
    }
}

impl GroupedKernels for Flex {
    fn grouped_and_statistics(
        inputs: [FloatTensor<Self>; 3],
        positions: Option<IntTensor<Self>>,
        options: GroupedOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        profile::time(Part::Attention, || forward(inputs, positions, &options))
    }

    fn grouped_backward(
        saved: GroupedSaved<FloatTensor<Self>>,
        positions: Option<IntTensor<Self>>,
        gradient: FloatTensor<Self>,
        options: GroupedOptions,
    ) -> [FloatTensor<Self>; 3] {
        profile::time(Part::Attention, || backward(saved, positions, gradient, &options))
    }
}

#[derive(Debug)]
struct GroupedBackward;

impl<B: GroupedKernels> Backward<B, 3> for GroupedBackward {
    type State = (GroupedSaved<FloatTensor<B>>, Option<IntTensor<B>>, GroupedOptions);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (nodes, (saved, positions, options)) = (parents(&ops), ops.state);
        register::<B, 3>(grads, nodes, B::grouped_backward(saved, positions, gradient, options).map(Some));
    }
}

/// Attention whose gradients are tracked if any input is.
fn tracked<B: GroupedKernels, C: CheckpointStrategy>(
    inputs: [FloatTensor<Autodiff<B, C>>; 3],
    positions: Option<IntTensor<B>>,
    options: GroupedOptions,
) -> FloatTensor<Autodiff<B, C>> {
    let nodes = inputs.each_ref().map(|input| input.node());
    let inputs = inputs.map(|input| input.into_primitive());
    match GroupedBackward.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let (output, statistics) =
                B::grouped_and_statistics(inputs.clone(), positions.clone(), options.clone());
            let saved = GroupedSaved { inputs, output: output.clone(), statistics };
            prep.finish((saved, positions, options), output)
        }
        OpsKind::UnTracked(prep) => prep.finish(B::grouped_and_statistics(inputs, positions, options).0),
    }
}

impl<B: GroupedKernels, C: CheckpointStrategy> GroupedOps for Autodiff<B, C> {
    fn grouped_attention(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        options: GroupedOptions,
    ) -> FloatTensor<Self> {
        tracked::<B, C>([queries, keys, values], None, options)
    }

    fn grouped_attention_within(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        positions: IntTensor<Self>,
        options: GroupedOptions,
    ) -> FloatTensor<Self> {
        tracked::<B, C>([queries, keys, values], Some(positions), options)
    }
}

#[cfg(test)]
mod tests {
    use super::super::group::BLOCK;
    use super::super::rotary::RotaryScaling;
    use super::*;
    use crate::ops::kernels::bf16::testing::{emulated, native};
    use crate::ops::{causal_attention, reference, testing::*};
    use hydra_core::Activation;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug)]
    struct Case {
        batch: usize,
        tokens: usize,
        heads: usize,
        key_heads: usize,
        head_width: usize,
        causal: bool,
        window: Option<usize>,
        turned: bool,
        dropout: f64,
        floats: Floats,
    }

    const CASE: Case = Case {
        batch: 2,
        tokens: 1,
        heads: 6,
        key_heads: 2,
        head_width: 8,
        causal: true,
        window: None,
        turned: true,
        dropout: 0.0,
        floats: Floats::F32,
    };

    fn pass() -> Pass {
        Pass::train(Pass::key_of(1, 2, 3), Activation::default())
    }

    type Attend = fn(Tensor<3>, Tensor<3>, Tensor<3>, &GroupedAttention, &Pass) -> Tensor<3>;

    impl Case {
        fn options(self) -> GroupedAttention {
            let Self { heads, key_heads, causal, window, dropout, head_width, .. } = self;
            let rotary = self.turned.then(|| Rotary::new(head_width, 50.0, RotaryScaling::Default));
            GroupedAttention { heads, key_heads, scale: 0.5, causal, window, rotary, dropout, site: 7 }
        }

        /// Queries, keys and values.
        fn inputs(self) -> [Tensor<3>; 3] {
            let Self { batch, tokens, heads, key_heads, head_width, .. } = self;
            let input = |(seed, heads)| self.floats.leaf(normal(seed, [batch, tokens, heads * head_width]));
            [(1, heads), (2, key_heads), (3, key_heads)].map(input)
        }

        fn upstream(self) -> Tensor<3> {
            self.floats.of(normal(4, [self.batch, self.tokens, self.heads * self.head_width]))
        }

        /// The output, and the gradients of queries, keys and values for a gradient of normal numbers.
        fn run(self, attend: Attend) -> [Vec<f32>; 4] {
            let [queries, keys, values_] = self.inputs();
            let out = attend(queries.clone(), keys.clone(), values_.clone(), &self.options(), &pass());
            let found = values(&out);
            let grads = (out * self.upstream()).sum().backward();
            let [queries, keys, values_] = [queries, keys, values_].map(|leaf| gradient(&leaf, &grads));
            [found, queries, keys, values_]
        }

        fn assert_near(self, found: &[Vec<f32>; 4], expected: &[Vec<f32>; 4], bound: f64) {
            self.assert_near_terms(found, expected, bound, 0.0);
        }

        /// The same, but a gradient that is smaller than this part of the values' gradient is compared with the part: its
        /// terms cancel, and have their rounding.
        fn assert_near_terms(self, found: &[Vec<f32>; 4], expected: &[Vec<f32>; 4], bound: f64, part: f64) {
            // If a query attends to one key alone, no gradient depends on the direction of either.
            let alone = self.tokens == 1 || self.window == Some(1);
            let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let least = part * norm(&expected[3]);
            for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
                if alone && (i == 1 || i == 2) {
                    assert!(found.iter().all(|x| x.abs() < 1e-5), "{self:?}, {i}: {found:?}");
                    continue;
                }
                let size = norm(expected);
                let error = distance(found, expected) * if size < least { size / least } else { 1.0 };
                assert!(error < bound, "{self:?}, {i}: {error}");
            }
        }

        /// The same in `f64`, with loops.
        fn exact(self) -> [Vec<f32>; 4] {
            let wide = |t: &Tensor<3>| values(t).into_iter().map(f64::from).collect::<Vec<_>>();
            let [mut queries, mut keys, values_] = self.inputs().each_ref().map(wide);
            self.turn_all(&mut queries, self.heads, 1.0);
            self.turn_all(&mut keys, self.key_heads, 1.0);
            let upstream = wide(&self.upstream());
            let mut out = [&queries, &queries, &keys, &keys].map(|like| vec![0.0; like.len()]);
            for sequence in 0..self.batch {
                for (head, query) in (0..self.heads).flat_map(|h| (0..self.tokens).map(move |q| (h, q))) {
                    self.exact_row([sequence, head, query], [&queries, &keys, &values_, &upstream], &mut out);
                }
            }
            let [_, d_queries, d_keys, _] = &mut out;
            self.turn_all(d_queries, self.heads, -1.0);
            self.turn_all(d_keys, self.key_heads, -1.0);
            out.map(|values| values.into_iter().map(|x| x as f32).collect())
        }

        /// Rotates `[batch, tokens, heads * head width]`, or rotates it back.
        fn turn_all(self, data: &mut [f64], heads: usize, sign: f64) {
            if !self.turned {
                return;
            }
            let half = self.head_width / 2;
            for (i, row) in data.chunks_mut(self.head_width).enumerate() {
                let token = i / heads % self.tokens;
                for pair in 0..half {
                    let angle = token as f64 * 50f64.powf(-(pair as f64) / half as f64);
                    let (sine, cosine) = (sign * angle).sin_cos();
                    let (a, b) = (row[pair], row[pair + half]);
                    (row[pair], row[pair + half]) = (a * cosine - b * sine, b * cosine + a * sine);
                }
            }
        }

        fn exact_row(
            self,
            [sequence, head, query]: [usize; 3],
            [queries, keys, values_, upstream]: [&[f64]; 4],
            [out, d_queries, d_keys, d_values]: &mut [Vec<f64>; 4],
        ) {
            let Self { tokens, heads, key_heads, head_width, dropout, .. } = self;
            let own = ((sequence * tokens + query) * heads + head) * head_width;
            let at = |key| ((sequence * tokens + key) * key_heads + head / (heads / key_heads)) * head_width;
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let vector = |of: &[f64], start: usize| of[start..start + head_width].to_vec();
            let reach = self.window.unwrap_or(tokens) - 1;
            let last = if self.causal { query } else { query.saturating_add(reach).min(tokens - 1) };
            let first = query.saturating_sub(reach);
            let score = |key| 0.5 * dot(&vector(queries, own), &vector(keys, at(key)));
            let scores: Vec<f64> = (first..=last).map(score).collect();
            let sum: f64 = scores.iter().map(|s| s.exp()).sum();
            let weights: Vec<f64> = scores.iter().map(|s| s.exp() / sum).collect();
            let mask = pass().site(7).dropout_mask(dropout);
            let row = (((sequence * heads + head) * tokens + query) * tokens) as u64;
            let factor = |key: usize| mask.map_or(1.0, |mask| f64::from(mask.factor(row + key as u64)));
            let g = vector(upstream, own);
            let for_weight = |key| dot(&g, &vector(values_, at(key))) * factor(key);
            let mean: f64 = (first..=last).map(|key| weights[key - first] * for_weight(key)).sum();
            for key in first..=last {
                let weight = weights[key - first];
                let for_score = weight * (for_weight(key) - mean) * 0.5;
                for i in 0..head_width {
                    out[own + i] += weight * factor(key) * values_[at(key) + i];
                    d_queries[own + i] += for_score * keys[at(key) + i];
                    d_keys[at(key) + i] += for_score * queries[own + i];
                    d_values[at(key) + i] += weight * factor(key) * g[i];
                }
            }
        }
    }

    #[test]
    fn values_and_gradients_equal_the_exact_ones_and_the_reference() {
        for tokens in [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5] {
            for (heads, key_heads, window) in
                [(1, 1, None), (6, 2, None), (4, 1, Some(1)), (6, 3, Some(BLOCK - 1)), (3, 3, Some(50))]
            {
                for (turned, dropout) in [(true, 0.0), (false, 0.0), (true, 0.25)] {
                    for causal in [true, false] {
                        let case = Case { tokens, heads, key_heads, causal, window, turned, dropout, ..CASE };
                        let found = case.run(grouped_attention);
                        case.assert_near(&found, &case.exact(), 3e-6);
                        case.assert_near(&found, &case.run(reference::grouped_attention), 3e-6);
                    }
                }
            }
        }
    }

    #[test]
    fn gradients_whose_terms_cancel_equal_the_exact_ones() {
        let sizes = Case { batch: 1, tokens: 2, heads: 2, key_heads: 1, head_width: 10, ..CASE };
        let case = Case { causal: true, window: None, turned: false, dropout: 0.3, ..sizes };
        case.assert_near_terms(&case.run(grouped_attention), &case.exact(), 1e-5, 1.0 / 16.0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn any_sizes_equal_the_exact_ones(
            batch in 1usize..4, tokens in 1usize..150, key_heads in 1usize..4, count in 1usize..4,
            pairs in 1usize..10, window in 1usize..200, causal: bool, slides: bool, turned: bool, drops: bool,
        ) {
            let (window, dropout) = (slides.then_some(window), if drops { 0.3 } else { 0.0 });
            let (heads, head_width) = (key_heads * count, 2 * pairs);
            let floats = Floats::F32;
            let case =
                Case { batch, tokens, heads, key_heads, head_width, causal, window, turned, dropout, floats };
            case.assert_near_terms(&case.run(grouped_attention), &case.exact(), 1e-5, 1.0 / 16.0);
        }
    }

    /// The same through the joint operation on concatenated queries, keys and values.
    fn joint(
        queries: Tensor<3>,
        keys: Tensor<3>,
        values: Tensor<3>,
        attention: &GroupedAttention,
        pass: &Pass,
    ) -> Tensor<3> {
        let GroupedAttention { heads, scale, dropout, site, .. } = *attention;
        let options = super::super::Attention { heads, scale, dropout, site };
        causal_attention(Tensor::cat(vec![queries, keys, values], 2), options, pass)
    }

    #[test]
    fn heads_of_their_own_that_nothing_turns_have_the_bits_of_the_joint_operation() {
        for (tokens, dropout) in [(3, 0.0), (BLOCK + 9, 0.2)] {
            let case = Case { tokens, dropout, key_heads: 6, turned: false, ..CASE };
            assert_eq!(case.run(grouped_attention), case.run(joint));
        }
    }

    #[test]
    fn a_window_that_reaches_everything_has_the_bits_of_none() {
        for causal in [true, false] {
            let run = |window| Case { tokens: 2 * BLOCK + 7, causal, window, ..CASE }.run(grouped_attention);
            assert_eq!(run(Some(2 * BLOCK + 7)), run(None));
            assert_eq!(run(Some(usize::MAX)), run(None));
            assert_ne!(run(Some(2 * BLOCK)), run(None));
        }
    }

    #[test]
    fn bf16_is_close_to_the_exact_values_and_the_emulation_has_its_bits() {
        for (tokens, causal, window, dropout) in [
            (1, true, None, 0.0),
            (BLOCK - 1, true, Some(9), 0.1),
            (3 * BLOCK + 5, true, None, 0.25),
            (4 * BLOCK, true, Some(40), 0.0),
            (3 * BLOCK + 5, false, Some(9), 0.1),
            // Spans end within pairs of terms.
            (4 * BLOCK, false, Some(40), 0.0),
        ] {
            let case = Case { tokens, causal, window, dropout, floats: Floats::Bf16, ..CASE };
            let (found, exact) = (native(|| case.run(grouped_attention)), case.exact());
            // Weights, the output, rotated queries and keys and the gradients of scores are rounded.
            for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
                if i == 0 || i == 3 || tokens > 1 {
                    assert_within(4.0 * ROUNDING, &format!("attention of {tokens}, {i}"), found, exact);
                }
            }
            assert_eq!(emulated(|| case.run(grouped_attention)), found);
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_tracking() {
        for (causal, floats) in [(false, Floats::F32), (true, Floats::F32), (true, Floats::Bf16)] {
            let window = Some(40);
            let case = Case { tokens: 2 * BLOCK + 7, causal, window, dropout: 0.1, floats, ..CASE };
            let one = with_threads(1, || case.run(grouped_attention));
            for threads in [2, 3] {
                assert_eq!(one, with_threads(threads, || case.run(grouped_attention)));
            }
            let [queries, keys, values_] = case.inputs().map(untracked);
            assert_eq!(values(&grouped_attention(queries, keys, values_, &case.options(), &pass())), one[0]);
        }
    }

    /// Lengths of the examples of rows.
    const ROWS: [[usize; 4]; 2] = [[1, BLOCK + 5, BLOCK, 9], [2, 2, 2 * BLOCK + 1, 10]];

    const PACKED: Case = Case { tokens: 2 * BLOCK + 15, ..CASE };

    fn within(
        queries: Tensor<3>,
        keys: Tensor<3>,
        values: Tensor<3>,
        attention: &GroupedAttention,
        pass: &Pass,
    ) -> Tensor<3> {
        grouped_attention_within(queries, keys, values, positions(&ROWS), attention, pass)
    }

    #[test]
    fn an_example_has_the_bits_of_a_row_of_its_own() {
        for (causal, window, floats) in [
            (true, None, Floats::F32),
            (true, Some(20), Floats::F32),
            (true, None, Floats::Bf16),
            (false, None, Floats::F32),
            (false, Some(20), Floats::F32),
            (false, Some(9), Floats::Bf16),
        ] {
            let case = Case { causal, window, floats, ..PACKED };
            let packed = case.run(within);
            let alone = |row: usize, tokens: &std::ops::Range<usize>| {
                let part = |all: Tensor<3>| all.slice([row..row + 1, tokens.clone()]);
                let inputs = case.inputs().map(|input| part(input).detach().require_grad());
                let [queries, keys, of_keys] = inputs.clone();
                let out = grouped_attention(queries, keys, of_keys, &case.options(), &pass());
                let found = values(&out);
                let grads = (out * part(case.upstream())).sum().backward();
                let [queries, keys, of_keys] = inputs.each_ref().map(|input| gradient(input, &grads));
                [found, queries, keys, of_keys]
            };
            for (row, tokens) in examples(&ROWS) {
                for (packed, alone) in packed.iter().zip(alone(row, &tokens)) {
                    let width = alone.len() / tokens.len();
                    let first = (row * case.tokens + tokens.start) * width;
                    assert_eq!(packed[first..][..alone.len()], alone, "{case:?}, {tokens:?} of {row}");
                }
            }
        }
    }

    #[test]
    fn packed_rows_equal_the_reference_with_dropout_on_any_threads() {
        for (causal, window, dropout) in [
            (true, None, 0.0),
            (true, Some(20), 0.3),
            (true, Some(1000), 0.1),
            (false, None, 0.2),
            (false, Some(20), 0.3),
        ] {
            let case = Case { causal, window, dropout, ..PACKED };
            let found = with_threads(1, || case.run(within));
            assert_eq!(found, with_threads(3, || case.run(within)));
            let slow = case.run(|queries, keys, values, attention, pass| {
                reference::grouped_attention_within(queries, keys, values, positions(&ROWS), attention, pass)
            });
            case.assert_near(&found, &slow, 3e-6);
        }
    }

    #[test]
    fn a_token_sees_its_window_and_nothing_else() {
        for causal in [true, false] {
            assert_sees_its_window(Case { batch: 1, tokens: 2 * BLOCK, causal, window: Some(5), ..CASE });
        }
    }

    fn assert_sees_its_window(case: Case) {
        let attend = |changed: usize| {
            let [queries, keys, values_] = case.inputs();
            let width = keys.dims()[2];
            let moved = |x: Tensor<3>| {
                let other = normal(9, [1, 1, width]);
                x.slice_assign([0..1, changed..changed + 1, 0..width], other)
            };
            values(&grouped_attention(queries, moved(keys), moved(values_), &case.options(), &pass()))
        };
        let width = case.heads * case.head_width;
        let row = |out: &[f32], token: usize| out[token * width..][..width].to_vec();
        for changed in [0, 3, BLOCK - 1, BLOCK, 2 * BLOCK - 1] {
            let (a, b) = (case.run(grouped_attention)[0].clone(), attend(changed));
            for token in 0..case.tokens {
                let first = if case.causal { changed } else { changed.saturating_sub(4) };
                let sees = (first..changed + 5).contains(&token);
                assert_eq!(row(&a, token) != row(&b, token), sees, "{token} of {changed}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let refusal = |keys: usize, change: fn(&mut GroupedAttention)| {
            let mut options = Case { tokens: 3, ..CASE }.options();
            change(&mut options);
            let attend = || {
                let keys = || normal(2, [2, 3, keys]);
                grouped_attention(normal(1, [2, 3, 48]), keys(), keys(), &options, &pass())
            };
            let panic =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(attend)).expect_err("a refusal");
            hydra_core::panic_message(&*panic)
        };
        for (refusal, expected) in [
            (refusal(16, |o| o.key_heads = 4), "heads of keys that divide those of queries, found 4 for 6"),
            (refusal(16, |o| o.heads = 10), "of 10 heads expects queries a multiple of them wide, found 48"),
            (refusal(24, |_| {}), "keys and values of shape [2, 3, 16], found [[2, 3, 24], [2, 3, 24]]"),
            (refusal(16, |o| o.window = Some(0)), "a window of at least one token"),
            (
                refusal(16, |o| o.rotary = Some(Rotary::new(6, 1e4, RotaryScaling::Default))),
                "as wide as a head, 8; found 6",
            ),
        ] {
            assert!(refusal.contains(expected), "{refusal}");
        }
    }
}
