//! Grouped-query attention: computes the scores of some heads at a time, between matrix products.
//!
//! Queries and keys are rotated in memory, and keys and values are copied for the heads that share them, for the heads
//! whose scores are in memory.

use super::attention::TokenSpan;
use super::dropout::draws;
use super::kernels::attention as kernels;
use super::matmul::{product, transposed};
use super::tensors::{arg, dims, elements, float, floats, made_of, rows, units, whole, whole_ids, wide};
use crate::ops::attention::{GroupedKernels, GroupedOps, GroupedOptions, GroupedSaved, Rotation, STATISTICS};
use crate::ops::embedding::EmbeddingOps;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, TensorData};
use burn_cubecl::tensor::CubeTensor;
use std::ops::Range;

/// The maximum number of scores in memory at a time, unless the heads that share keys have more.
const SCORES: usize = 1 << 24;

/// The shape of all heads.
struct Heads<'a> {
    batch: usize,
    tokens: usize,
    head_width: usize,
    options: &'a GroupedOptions,
    /// Each token's position in its example `[batch, tokens]`, if rows hold several.
    positions: Option<CubeTensor>,
    /// Query heads that share keys.
    shared: usize,
}

/// Heads of some tokens, whose scores are in memory at the same time.
struct HeadGroup {
    span: TokenSpan,
    heads: Range<usize>,
}

impl HeadGroup {
    /// The argument of kernels.
    fn launch(&self) -> kernels::SpanLaunch {
        self.span.of(&self.heads)
    }

    /// The rows of its scores.
    fn rows(&self) -> usize {
        self.heads.len() * self.span.tokens
    }
}

impl<'a> Heads<'a> {
    fn new(queries: &CubeTensor, positions: Option<CubeTensor>, options: &'a GroupedOptions) -> Self {
        let [batch, tokens, width] = dims(queries);
        let shared = options.heads / options.key_heads;
        let positions = positions.map(whole_ids);
        Self { batch, tokens, head_width: width / options.heads, options, positions, shared }
    }

    /// What is computed at the same time: tokens, and ranges of `batch * heads` with whole groups of heads that share keys.
    fn groups(&self) -> impl Iterator<Item = HeadGroup> + use<> {
        let (all, shared) = (self.batch * self.options.heads, self.shared);
        let spans = TokenSpan::all(self.positions.as_ref(), [self.batch, self.tokens]);
        spans.into_iter().flat_map(move |span| {
            let size = (SCORES / span.tokens.pow(2) / shared).max(1) * shared;
            (0..all).step_by(size).map(move |first| HeadGroup { span, heads: first..all.min(first + size) })
        })
    }

    fn layout(&self, group: &HeadGroup, shared: usize) -> kernels::LayoutLaunch {
        let Self { head_width, options, .. } = self;
        kernels::LayoutLaunch::new(group.launch(), options.heads, *head_width, 1, shared)
    }

    /// Copies the heads of a group out of the matrix of all heads; `shared` of them use one: `[heads, tokens, head
    /// width]`.
    fn split(&self, all: &CubeTensor, group: &HeadGroup, shared: usize) -> CubeTensor {
        let (out, run) = (
            floats(all, [group.heads.len(), group.span.tokens, self.head_width]),
            kernels::run(self.head_width),
        );
        let (cubes, layout) = (elements(&out, out.meta.num_elements() / run), self.layout(group, shared));
        let (client, all, float) = (&out.client, arg(all), float(all));
        kernels::split_heads::launch(client, cubes, units(), all, arg(&out), layout, 0, run, float);
        out
    }

    /// Queries, keys and values of a group.
    fn inputs(&self, inputs: &[CubeTensor; 3], group: &HeadGroup) -> [CubeTensor; 3] {
        let [queries, keys, values] = inputs;
        let shared = |all| self.split(all, group, self.shared);
        [self.split(queries, group, 1), shared(keys), shared(values)]
    }

    /// Writes a group's heads to the matrix of all heads.
    fn merge(&self, heads: CubeTensor, all: &CubeTensor, group: &HeadGroup) {
        let run = kernels::run(self.head_width);
        let (cubes, layout) = (elements(&heads, heads.meta.num_elements() / run), self.layout(group, 1));
        let (client, heads, float) = (&all.client, arg(&heads), float(all));
        kernels::merge_heads::launch(client, cubes, units(), heads, arg(all), layout, 0, run, float);
    }

    /// Writes the sums of heads that share one to the matrix of all heads.
    fn merge_shared(&self, heads: CubeTensor, all: &CubeTensor, group: &HeadGroup) {
        let (cubes, layout) = (elements(&heads, heads.meta.num_elements()), self.layout(group, self.shared));
        let (client, heads, float) = (&all.client, arg(&heads), float(all));
        kernels::merge_shared_heads::launch(client, cubes, units(), heads, arg(all), layout, float);
    }

    fn hide_other_examples(&self, scores: &CubeTensor, group: &HeadGroup) {
        let GroupedOptions { heads, scale, .. } = *self.options;
        group.span.hide_other_examples(scores, self.positions.as_ref(), &group.heads, heads, scale);
    }

    /// Computes the output of a group.
    fn forward(
        &self,
        inputs: &[CubeTensor; 3],
        output: &CubeTensor,
        statistics: &CubeTensor,
        group: &HeadGroup,
    ) {
        let [queries, keys, values] = self.inputs(inputs, group);
        let scores = product(queries, transposed(keys), DType::F32);
        self.hide_other_examples(&scores, group);
        let (weights, room) = made_of(&scores, 0, output.dtype);
        kernels::attention_weights::launch(
            &scores.client,
            rows(&scores, group.rows()),
            units(),
            arg(&scores),
            room,
            arg(statistics),
            group.launch(),
            self.options.window,
            self.options.scale,
            draws(self.options.mask),
            self.options.causal,
            self.options.mask.is_some(),
            float(output),
        );
        drop(scores);
        self.merge(product(weights, values, output.dtype), output, group);
    }

    /// Computes the gradients of a group's queries, keys and values.
    fn backward(
        &self,
        inputs: &[CubeTensor; 3],
        statistics: &CubeTensor,
        d_output: &CubeTensor,
        [d_queries, d_keys, d_values]: [&CubeTensor; 3],
        group: &HeadGroup,
    ) {
        let [queries, keys, values] = self.inputs(inputs, group);
        let d_output = self.split(d_output, group, 1);
        let dtype = queries.dtype;
        let scores = product(queries.clone(), transposed(keys.clone()), DType::F32);
        self.hide_other_examples(&scores, group);
        let gradients = product(d_output.clone(), transposed(values), DType::F32);
        let (weights, weights_room) = made_of(&scores, 0, dtype);
        let (d_scores, d_scores_room) = made_of(&gradients, 1, dtype);
        kernels::attention_weights_backward::launch(
            &scores.client,
            rows(&scores, group.rows()),
            units(),
            arg(&scores),
            arg(&gradients),
            weights_room,
            d_scores_room,
            arg(statistics),
            group.launch(),
            self.options.window,
            self.options.scale,
            draws(self.options.mask),
            self.options.causal,
            self.options.mask.is_some(),
            float(&queries),
        );
        drop((scores, gradients));
        self.merge(product(d_scores.clone(), keys, dtype), d_queries, group);
        self.merge_shared(product(transposed(d_scores), queries, dtype), d_keys, group);
        self.merge_shared(product(transposed(weights), d_output, dtype), d_values, group);
    }

    /// The angles of all positions, or of each token of the batch if rows hold several examples, and their number; on
    /// the device of `like`.
    fn angles(&self, rotation: &Rotation, like: &CubeTensor) -> (CubeTensor, usize) {
        let angles = rotation.first(self.tokens).to_vec();
        let angles = TensorData::new(angles, [self.tokens, self.head_width]);
        let [angles] = whole([Cube::float_from_data(angles, &like.device)]);
        match &self.positions {
            Some(positions) => (Cube::lookup(angles, positions.clone()), self.batch * self.tokens),
            None => (angles, self.tokens),
        }
    }

    /// Rotates `[batch, tokens, heads * head width]` by its positions, or back.
    fn turned(&self, x: CubeTensor, heads: usize, sign: f32) -> CubeTensor {
        let Some(rotation) = &self.options.rotation else { return x };
        let (y, (angles, places)) = (floats(&x, x.shape()), self.angles(rotation, &x));
        kernels::turn_heads::launch(
            &y.client,
            elements(&y, y.meta.num_elements() / 2),
            units(),
            arg(&x),
            arg(&angles),
            arg(&y),
            places,
            heads,
            self.head_width,
            sign,
            float(&y),
        );
        y
    }

    /// Rotated queries and keys, and the values.
    fn turned_inputs(&self, [queries, keys, values]: [CubeTensor; 3]) -> [CubeTensor; 3] {
        let GroupedOptions { heads, key_heads, .. } = *self.options;
        [self.turned(queries, heads, 1.0), self.turned(keys, key_heads, 1.0), values]
    }
}

impl GroupedOps for Cube {
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

impl GroupedKernels for Cube {
    fn grouped_and_statistics(
        inputs: [FloatTensor<Self>; 3],
        positions: Option<IntTensor<Self>>,
        options: GroupedOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let inputs = whole(inputs);
        let heads = Heads::new(&inputs[0], positions, &options);
        let output = floats(&inputs[0], inputs[0].shape());
        let statistics = wide(&output, [heads.batch, options.heads, heads.tokens, STATISTICS]);
        let inputs = heads.turned_inputs(inputs);
        for group in heads.groups() {
            heads.forward(&inputs, &output, &statistics, &group);
        }
        (output, statistics)
    }

    fn grouped_backward(
        saved: GroupedSaved<FloatTensor<Self>>,
        positions: Option<IntTensor<Self>>,
        gradient: FloatTensor<Self>,
        options: GroupedOptions,
    ) -> [FloatTensor<Self>; 3] {
        let [queries, keys, values, gradient] = {
            let [queries, keys, values] = saved.inputs;
            whole([queries, keys, values, gradient])
        };
        let heads = Heads::new(&queries, positions, &options);
        let [d_queries, d_keys, d_values] = [&queries, &keys, &values].map(|like| floats(like, like.shape()));
        let inputs = heads.turned_inputs([queries, keys, values]);
        for group in heads.groups() {
            let gradients = [&d_queries, &d_keys, &d_values];
            heads.backward(&inputs, &saved.statistics, &gradient, gradients, &group);
        }
        let (all, shared) = (options.heads, options.key_heads);
        [heads.turned(d_queries, all, -1.0), heads.turned(d_keys, shared, -1.0), d_values]
    }
}
