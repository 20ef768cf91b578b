//! Causal attention: computes the scores of a group of heads at a time, between matrix products.
//!
//! Scores and their statistics are `f32`. The weights and the gradients of scores are factors of matrix products and
//! have the type of the other factor, because devices only multiply 16-bit floats of the same type.

use super::dropout::draws;
use super::kernels::attention as kernels;
use super::matmul::{product, transposed};
use super::tensors::{arg, dims, elements, float, floats, made_of, rows, units, whole, whole_ids, wide};
use crate::ops::attention::{AttentionKernels, AttentionOps, Options, STATISTICS, Saved};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use hydra_core::cube::from_server_error;
use std::ops::Range;

/// The maximum number of scores in memory at a time, unless a single head has more.
const SCORES: usize = 1 << 24;

/// Tokens of rows that attend to no others: whole rows, or neighbouring examples of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TokenSpan {
    /// The first token.
    first: usize,
    /// The number of tokens.
    pub(super) tokens: usize,
    /// The tokens of a row.
    row: usize,
    /// Whether the tokens are of several examples.
    several: bool,
}

impl TokenSpan {
    /// The spans of rows of this shape, given each token's position in its example if the rows hold several.
    ///
    /// A row is cut between examples, so that no scores of tokens far from each other are computed: into spans that are
    /// at most as long as its longest example. The scores of a head in a span are then at most those in a row of examples
    /// that all have the largest length, which a pilot pass measures; the heads whose scores are computed together are
    /// more for shorter spans. The positions are read back from the device.
    ///
    /// # Panics
    /// With the device's error if the positions were not computed or cannot be read.
    pub(super) fn all(positions: Option<&CubeTensor>, [batch, tokens]: [usize; 2]) -> Vec<Self> {
        let whole = || vec![Self { first: 0, tokens, row: tokens, several: positions.is_some() }];
        let Some(positions) = positions.filter(|_| batch == 1) else { return whole() };
        let read = positions.client.read_one(positions.handle.clone()).map_err(from_server_error);
        let read = read.unwrap_or_else(|error| std::panic::panic_any(error));
        Self::of_row(&bytemuck::pod_collect_to_vec::<u8, i32>(&read))
    }

    fn of_row(positions: &[i32]) -> Vec<Self> {
        let row = positions.len();
        let starts = (1..row).filter(|at| positions[*at] == 0).chain([row]);
        let examples: Vec<(usize, usize)> =
            starts.scan(0, |start, end| Some((std::mem::replace(start, end), end))).collect();
        let longest = examples.iter().map(|(start, end)| end - start).max().unwrap_or(row);
        let mut spans: Vec<Self> = Vec::new();
        for (start, end) in examples {
            match spans.last_mut() {
                Some(span) if end - span.first <= longest => {
                    *span = Self { tokens: end - span.first, several: true, ..*span }
                }
                _ => spans.push(Self { first: start, tokens: end - start, row, several: false }),
            }
        }
        spans
    }

    /// The argument of kernels for a group of heads.
    pub(super) fn of(self, group: &Range<usize>) -> kernels::SpanLaunch {
        kernels::SpanLaunch::new(group.start, self.tokens, self.first, self.row)
    }

    /// Masks keys of other examples for the queries of a group of heads, `heads` to a row, in unscaled scores `[heads,
    /// query, key]`, if the span has several examples.
    pub(super) fn hide_other_examples(
        self,
        scores: &CubeTensor,
        positions: Option<&CubeTensor>,
        group: &Range<usize>,
        heads: usize,
        scale: f32,
    ) {
        let Some(positions) = positions.filter(|_| self.several) else { return };
        kernels::hide_other_examples::launch(
            &scores.client,
            elements(scores, scores.meta.num_elements()),
            units(),
            arg(scores),
            arg(positions),
            self.of(group),
            heads,
            // Once it is scaled, its exponential is zero.
            if scale < 0.0 { f32::MAX } else { f32::MIN },
        );
    }
}

/// The shape of all heads.
#[derive(Clone, Copy)]
struct Shape {
    batch: usize,
    span: TokenSpan,
    head_width: usize,
    options: Options,
    /// Heads per group.
    size: usize,
}

impl Shape {
    /// Groups with at most `scores` scores, or of a single head.
    fn new(qkv: &CubeTensor, span: TokenSpan, options: Options, scores: usize) -> Self {
        let [batch, _, triple] = dims(qkv);
        let size = (scores / span.tokens.pow(2)).max(1);
        Self { batch, span, head_width: triple / 3 / options.heads, options, size }
    }

    /// The groups of heads, as ranges of `batch * heads`.
    fn groups(self) -> impl Iterator<Item = Range<usize>> {
        let all = self.batch * self.options.heads;
        (0..all).step_by(self.size).map(move |first| first..all.min(first + self.size))
    }

    /// The layout of the matrix of `parts` times all heads.
    fn layout(self, group: &Range<usize>, parts: usize) -> kernels::LayoutLaunch {
        let Self { span, head_width, options, .. } = self;
        kernels::LayoutLaunch::new(span.of(group), options.heads, head_width, parts, 1)
    }

    /// Copies a part of a group's heads out of the matrix of all heads: `[heads, tokens, head width]`.
    fn split(self, all: &CubeTensor, parts: usize, part: usize, group: &Range<usize>) -> CubeTensor {
        let (out, run) =
            (floats(all, [group.len(), self.span.tokens, self.head_width]), kernels::run(self.head_width));
        let (cubes, layout) = (elements(&out, out.meta.num_elements() / run), self.layout(group, parts));
        let (client, all, float) = (&out.client, arg(all), float(all));
        kernels::split_heads::launch(client, cubes, units(), all, arg(&out), layout, part, run, float);
        out
    }

    /// Writes a group's heads to a part of the matrix of all heads.
    fn merge(self, heads: CubeTensor, all: &CubeTensor, parts: usize, part: usize, group: &Range<usize>) {
        let run = kernels::run(self.head_width);
        let (cubes, layout) = (elements(&heads, heads.meta.num_elements() / run), self.layout(group, parts));
        let (client, heads, float) = (&all.client, arg(&heads), float(all));
        kernels::merge_heads::launch(client, cubes, units(), heads, arg(all), layout, part, run, float);
    }

    /// Computes the output of a group.
    fn forward(
        self,
        qkv: &CubeTensor,
        positions: Option<&CubeTensor>,
        output: &CubeTensor,
        statistics: &CubeTensor,
        group: Range<usize>,
    ) {
        let [queries, keys, values] = [0, 1, 2].map(|part| self.split(qkv, 3, part, &group));
        let scores = product(queries, transposed(keys), DType::F32);
        let Options { heads, scale, .. } = self.options;
        self.span.hide_other_examples(&scores, positions, &group, heads, scale);
        let (weights, room) = made_of(&scores, 0, output.dtype);
        kernels::attention_weights::launch(
            &scores.client,
            rows(&scores, group.len() * self.span.tokens),
            units(),
            arg(&scores),
            room,
            arg(statistics),
            self.span.of(&group),
            self.span.tokens,
            self.options.scale,
            draws(self.options.mask),
            true,
            self.options.mask.is_some(),
            float(output),
        );
        drop(scores);
        self.merge(product(weights, values, output.dtype), output, 1, 0, &group);
    }

    /// Computes the gradients of a group's queries, keys and values.
    fn backward(
        self,
        qkv: &CubeTensor,
        positions: Option<&CubeTensor>,
        statistics: &CubeTensor,
        d_output: &CubeTensor,
        d_qkv: &CubeTensor,
        group: Range<usize>,
    ) {
        let [queries, keys, values] = [0, 1, 2].map(|part| self.split(qkv, 3, part, &group));
        let d_output = self.split(d_output, 1, 0, &group);
        let scores = product(queries.clone(), transposed(keys.clone()), DType::F32);
        let Options { heads, scale, .. } = self.options;
        self.span.hide_other_examples(&scores, positions, &group, heads, scale);
        let gradients = product(d_output.clone(), transposed(values), DType::F32);
        let (weights, weights_room) = made_of(&scores, 0, qkv.dtype);
        let (d_scores, d_scores_room) = made_of(&gradients, 1, qkv.dtype);
        kernels::attention_weights_backward::launch(
            &scores.client,
            rows(&scores, group.len() * self.span.tokens),
            units(),
            arg(&scores),
            arg(&gradients),
            weights_room,
            d_scores_room,
            arg(statistics),
            self.span.of(&group),
            self.span.tokens,
            self.options.scale,
            draws(self.options.mask),
            true,
            self.options.mask.is_some(),
            float(qkv),
        );
        drop((scores, gradients));
        self.merge(product(d_scores.clone(), keys, qkv.dtype), d_qkv, 3, 0, &group);
        self.merge(product(transposed(d_scores), queries, qkv.dtype), d_qkv, 3, 1, &group);
        self.merge(product(transposed(weights), d_output, qkv.dtype), d_qkv, 3, 2, &group);
    }
}

/// The output and the statistics, in groups of at most `scores` scores.
fn forward(
    qkv: CubeTensor,
    positions: Option<CubeTensor>,
    options: Options,
    scores: usize,
) -> (CubeTensor, CubeTensor) {
    let ([qkv], positions) = (whole([qkv]), positions.map(whole_ids));
    let [batch, tokens, triple] = dims(&qkv);
    let output = floats(&qkv, [batch, tokens, triple / 3]);
    let statistics = wide(&qkv, [batch, options.heads, tokens, STATISTICS]);
    for span in TokenSpan::all(positions.as_ref(), [batch, tokens]) {
        let shape = Shape::new(&qkv, span, options, scores);
        for group in shape.groups() {
            shape.forward(&qkv, positions.as_ref(), &output, &statistics, group);
        }
    }
    (output, statistics)
}

/// The gradient of queries, keys and values, in groups of at most `scores` scores.
fn backward(
    saved: Saved<CubeTensor>,
    positions: Option<CubeTensor>,
    gradient: CubeTensor,
    options: Options,
    scores: usize,
) -> CubeTensor {
    let ([qkv, gradient], positions) = (whole([saved.qkv, gradient]), positions.map(whole_ids));
    let [batch, tokens, _] = dims(&qkv);
    let d_qkv = floats(&qkv, qkv.shape());
    for span in TokenSpan::all(positions.as_ref(), [batch, tokens]) {
        let shape = Shape::new(&qkv, span, options, scores);
        for group in shape.groups() {
            shape.backward(&qkv, positions.as_ref(), &saved.statistics, &gradient, &d_qkv, group);
        }
    }
    d_qkv
}

impl AttentionOps for Cube {
    fn causal_attention(qkv: FloatTensor<Self>, options: Options) -> FloatTensor<Self> {
        forward(qkv, None, options, SCORES).0
    }

    fn causal_attention_within(
        qkv: FloatTensor<Self>,
        positions: IntTensor<Self>,
        options: Options,
    ) -> FloatTensor<Self> {
        Self::attention_and_statistics(qkv, Some(positions), options).0
    }
}

impl AttentionKernels for Cube {
    fn attention_and_statistics(
        qkv: FloatTensor<Self>,
        positions: Option<IntTensor<Self>>,
        options: Options,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        forward(qkv, positions, options, SCORES)
    }

    fn attention_backward(
        saved: Saved<FloatTensor<Self>>,
        positions: Option<IntTensor<Self>>,
        gradient: FloatTensor<Self>,
        options: Options,
    ) -> FloatTensor<Self> {
        backward(saved, positions, gradient, options, SCORES)
    }
}

#[cfg(all(test, feature = "cube"))]
mod tests {
    use super::super::tests::{device, normal};
    use super::*;
    use crate::ops::testing::distance;
    use burn::tensor::Tensor;
    use hydra_core::{Activation, AnyTensor, Pass};

    fn numbers(tensor: CubeTensor) -> Vec<f32> {
        let shape = [tensor.meta.num_elements()];
        let tensor = Tensor::<1>::from_primitive::<Cube>(super::super::tensors::reshaped(tensor, shape));
        AnyTensor::from(tensor).into_host().as_f32().to_vec()
    }

    /// The output and the gradient, in groups of `scores` scores.
    fn run(qkv: CubeTensor, gradient: CubeTensor, scores: usize) -> [Vec<f32>; 2] {
        let pass = Pass::train(Pass::key_of(1, 2, 3), Activation::default());
        let options = Options { heads: 3, scale: 0.5, mask: pass.site(7).dropout_mask(0.2) };
        let (output, statistics) = forward(qkv.clone(), None, options, scores);
        let saved = Saved { qkv, output: output.clone(), statistics };
        [numbers(output), numbers(backward(saved, None, gradient, options, scores))]
    }

    #[test]
    fn rows_are_cut_between_examples() {
        let spans = |lengths: &[i32]| {
            let positions: Vec<i32> = lengths.iter().flat_map(|length| 0..*length).collect();
            TokenSpan::of_row(&positions)
                .iter()
                .map(|span| (span.first, span.tokens, span.several))
                .collect::<Vec<_>>()
        };
        assert_eq!(spans(&[5]), [(0, 5, false)]);
        assert_eq!(spans(&[5, 5]), [(0, 5, false), (5, 5, false)]);
        let ragged = [(0, 6, true), (6, 7, false), (13, 4, false), (17, 5, true)];
        assert_eq!(spans(&[1, 2, 3, 7, 4, 4, 1]), ragged);
        assert_eq!(spans(&[1, 1, 1]), [(0, 1, false), (1, 1, false), (2, 1, false)]);
    }

    #[test]
    fn groups_of_heads_are_put_together() {
        let Some(device) = device() else { return };
        let primitive = |t: Tensor<3>| t.try_into_primitive::<Cube>().expect("a tensor of CubeCL");
        let qkv = primitive(normal(&device, 1, [2, 21, 3 * 3 * 8], 1.0));
        let gradient = primitive(normal(&device, 2, [2, 21, 3 * 8], 1.0));
        let whole = run(qkv.clone(), gradient.clone(), SCORES);
        for heads in [1, 2, 4, 5] {
            let found = run(qkv.clone(), gradient.clone(), heads * 21 * 21);
            for (found, whole) in found.iter().zip(&whole) {
                assert!(distance(found, whole) < 1e-6, "groups of {heads}");
            }
        }
    }
}
