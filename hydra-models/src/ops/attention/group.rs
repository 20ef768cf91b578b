//! Attention of the query heads that share a key and value head, on the CPU.

use super::positions::TokenRange;
use super::rotary::Rotation;
use super::{STATISTICS, narrow};
use crate::ops::kernels::{Mat, MatMut, Write, matmul_here, vectorized};
use crate::ops::math::{exp, max, sum, sum2};
use crate::ops::tensors::floats;
use burn_flex::FlexTensor;
use hydra_core::DropoutMask;
use rayon::prelude::*;
use std::ops::Range;

/// Queries per block: the weights of one block per computed head are in memory at a time.
pub(super) const BLOCK: usize = 32;

/// Elements of a cache line, and of the widest vector.
const LINE: usize = 16;

/// The blocks of queries.
pub(super) fn blocks(tokens: usize) -> impl DoubleEndedIterator<Item = Range<usize>> {
    (0..tokens.div_ceil(BLOCK)).map(move |i| i * BLOCK..tokens.min((i + 1) * BLOCK))
}

/// The form of the groups of an op.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub tokens: usize,
    pub head_width: usize,
    /// Query heads per group.
    pub count: usize,
    /// The number of keys before its own that a query attends to, at most.
    pub before: usize,
    /// The number of keys after its own that a query attends to, at most: none if attention is causal.
    pub after: usize,
    /// Whether queries and keys have rotary embeddings.
    pub turned: bool,
}

impl Form {
    /// The keys that the queries of a block attend to, from a whole cache line to the end of a pair of terms of `bf16`.
    pub(super) fn span(self, rows: &Range<usize>) -> Range<usize> {
        let end = self.seen(rows.end - 1).end.next_multiple_of(2);
        self.seen(rows.start).start / LINE * LINE..self.tokens.min(end)
    }

    /// The keys that a query attends to.
    fn seen(self, query: usize) -> Range<usize> {
        query.saturating_sub(self.before)..self.tokens.min(query.saturating_add(self.after).saturating_add(1))
    }

    /// The maximum length of a span.
    pub(super) fn longest(self) -> usize {
        self.tokens.min(self.before.saturating_add(self.after).saturating_add(BLOCK + LINE))
    }

    /// The queries of a block, of all heads.
    pub(super) fn rows(self) -> usize {
        self.count * self.tokens.min(BLOCK)
    }

    /// Whether the queries of a block are copied, to be rotated or stacked.
    pub(super) fn copies(self) -> bool {
        self.turned || self.count > 1
    }

    pub(super) fn copied(self) -> usize {
        if self.copies() { self.rows() * self.head_width } else { 0 }
    }

    /// Elements of the transposed keys, or of the transposed values.
    fn transposed(self) -> usize {
        self.head_width * padded(self.tokens)
    }

    /// Elements of the rotated keys.
    pub(super) fn turned_keys(self) -> usize {
        if self.turned { self.tokens * self.head_width } else { 0 }
    }
}

/// The query heads of one sequence that share a key and value head, with that head.
#[derive(Clone, Copy)]
pub(super) struct Group<'a, T = f32> {
    /// `[tokens, count * head width]`.
    pub queries: Mat<'a, T>,
    /// `[tokens, head width]`.
    pub keys: Mat<'a, T>,
    /// `[tokens, head width]`.
    pub values: Mat<'a, T>,
    pub form: Form,
    pub scale: f32,
    pub mask: Option<DropoutMask>,
    pub rotation: Option<&'a Rotation>,
    /// The index of the first head in `[batch, heads]`.
    pub number: usize,
    pub place: TokenRange<'a>,
}

/// The gradients of a group's queries, `[tokens, count * head width]`, and of its keys and values, each `[tokens, head
/// width]`; zero before.
pub(super) type Parts<'a> = [MatMut<'a>; 3];

/// The saved forward values of a group's backward.
pub(super) struct ForwardValues<'a, T = f32> {
    /// `[tokens, count * head width]`.
    pub output: Mat<'a, T>,
    /// Likewise.
    pub d_output: Mat<'a, T>,
    /// For each head, for each row.
    pub statistics: &'a [[f32; STATISTICS]],
}

/// The elements of queries, keys and values, which determine how a group is computed.
pub(super) trait Element: Copy + Sync {
    /// Scratch memory of a worker, reused across blocks and groups.
    type Scratch;

    /// The elements of a tensor.
    fn of(tensor: &FlexTensor) -> &[Self];

    /// The scratch memory of the forward.
    fn for_forward(form: Form) -> Self::Scratch;

    /// That of the backward.
    fn for_backward(form: Form) -> Self::Scratch;

    /// Writes the output of a group of a single example, and the statistics of its rows.
    fn forward(
        group: &Group<'_, Self>,
        out: &mut MatMut<'_>,
        statistics: &mut [[f32; STATISTICS]],
        scratch: &mut Self::Scratch,
    );

    /// Writes the gradients of queries, keys and values of a group of a single example.
    fn backward(
        group: &Group<'_, Self>,
        d: &mut Parts<'_>,
        known: &ForwardValues<'_, Self>,
        scratch: &mut Self::Scratch,
    );
}

impl Element for f32 {
    type Scratch = Scratch;

    fn of(tensor: &FlexTensor) -> &[f32] {
        floats(tensor)
    }

    fn for_forward(form: Form) -> Scratch {
        Scratch::forward(form)
    }

    fn for_backward(form: Form) -> Scratch {
        Scratch::backward(form)
    }

    fn forward(
        group: &Group<'_>,
        out: &mut MatMut<'_>,
        statistics: &mut [[f32; STATISTICS]],
        scratch: &mut Scratch,
    ) {
        group.forward_alone(out, statistics, scratch);
    }

    fn backward(group: &Group<'_>, d: &mut Parts<'_>, known: &ForwardValues<'_>, scratch: &mut Scratch) {
        group.backward_alone(d, known, scratch);
    }
}

/// Scratch memory of a worker, reused across blocks and groups.
pub(super) struct Scratch {
    /// `[queries of a block, keys of its span]`, stacked by head.
    weights: Vec<f32>,
    /// Likewise, in the backward only.
    gradients: Vec<f32>,
    factors: Vec<f32>,
    /// `[head width, tokens]`, rotated, so that the matrix products of each block read them in place.
    keys: Vec<f32>,
    /// `[head width, tokens]`, in the backward only.
    values: Vec<f32>,
    /// The untransposed keys, `[tokens, head width]`, if they are rotated.
    turned_keys: Vec<f32>,
    /// The queries of a block, `[queries of a block, head width]`, if they are copied.
    queries: Vec<f32>,
    /// Likewise the gradients of their outputs, in the backward only.
    d_outputs: Vec<f32>,
}

/// The scratch elements of the backward, which exceed those of the forward, for any element type.
pub(super) fn scratch_elements(form: Form) -> usize {
    let keys = 2 * form.transposed() + form.turned_keys();
    let of_f32 = 2 * form.rows() * form.longest() + form.tokens + keys + 2 * form.copied();
    of_f32.max(narrow::scratch_elements(form))
}

impl Scratch {
    fn forward(form: Form) -> Self {
        Self {
            weights: vec![0.0; form.rows() * form.longest()],
            gradients: Vec::new(),
            factors: vec![0.0; form.tokens],
            keys: vec![0.0; form.transposed()],
            values: Vec::new(),
            turned_keys: vec![0.0; form.turned_keys()],
            queries: vec![0.0; form.copied()],
            d_outputs: Vec::new(),
        }
    }

    fn backward(form: Form) -> Self {
        Self {
            gradients: vec![0.0; form.rows() * form.longest()],
            values: vec![0.0; form.transposed()],
            d_outputs: vec![0.0; form.copied()],
            ..Self::forward(form)
        }
    }
}

/// The row stride of transposed keys: an odd number of cache lines, because rows at power-of-two distances would evict
/// each other from the cache.
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

/// The columns of a span in the output of [`transpose`].
fn spanned<'a>(span: &Range<usize>, transposed: &'a [f32], tokens: usize) -> Mat<'a> {
    let stride = padded(tokens);
    Mat::new(transposed, transposed.len() / stride, stride).cols(span.clone())
}

impl<T: Element> Group<'_, T> {
    /// The group of a range of tokens that attend only to each other.
    fn of(&self, tokens: Range<usize>) -> Self {
        let [queries, keys, values] =
            [self.queries, self.keys, self.values].map(|all| all.rows(tokens.clone()));
        let form = Form { tokens: tokens.len(), ..self.form };
        let place = self.place.alone(tokens.start);
        Self { queries, keys, values, form, place, ..*self }
    }

    /// The columns of a head of the group.
    pub(super) fn head(&self, head: usize) -> Range<usize> {
        head * self.form.head_width..(head + 1) * self.form.head_width
    }

    /// The index of a head's query in `[heads of the group, all tokens of the sequence]`.
    pub(super) fn row(&self, head: usize, query: usize) -> usize {
        head * self.place.length + self.place.first + query
    }

    /// The group's columns of `[batch, tokens, heads * head width]`.
    fn own_columns<'a, E: Copy>(&self, data: &'a [E], width: usize) -> Mat<'a, E> {
        let Form { tokens, head_width, count, .. } = self.form;
        let heads = width / head_width;
        let (sequence, head) = (self.number / heads, self.number % heads);
        let data = &data[sequence * tokens * width..][..tokens * width];
        Mat::new(data, tokens, width).cols(head * head_width..(head + count) * head_width)
    }

    pub(super) fn turn(&self, row: &mut [f32], position: usize) {
        if let Some(rotation) = self.rotation {
            vectorized(
                #[inline(always)]
                || rotation.turn(row, position),
            );
        }
    }

    /// The dropout factors of a query's weights in a span.
    pub(super) fn factors<'a>(
        &self,
        (head, query): (usize, usize),
        span: &Range<usize>,
        factors: &'a mut [f32],
    ) -> Option<&'a [f32]> {
        let (mask, TokenRange { first, length, .. }) = (self.mask?, self.place);
        let factors = &mut factors[..vectors(self.seen(query, span).end, span.len())];
        let row = (self.number * length + self.row(head, query)) as u64;
        mask.fill(row * length as u64 + (first + span.start) as u64, factors);
        Some(factors)
    }

    /// The keys of a span that a query attends to.
    pub(super) fn seen(&self, query: usize, span: &Range<usize>) -> Range<usize> {
        let seen = self.form.seen(query);
        seen.start - span.start..seen.end - span.start
    }

    /// Writes the output and the rows' statistics, example by example.
    fn forward(&self, out: &mut MatMut<'_>, statistics: &mut [[f32; STATISTICS]], scratch: &mut T::Scratch) {
        for example in self.place.examples() {
            T::forward(&self.of(example.clone()), &mut out.rows(example), statistics, scratch);
        }
    }

    /// Writes the gradients of queries, keys and values, example by example.
    fn backward(&self, d: &mut Parts<'_>, known: &ForwardValues<'_, T>, scratch: &mut T::Scratch) {
        for example in self.place.examples() {
            let mut d = d.each_mut().map(|all| all.rows(example.clone()));
            let [output, d_output] = [known.output, known.d_output].map(|all| all.rows(example.clone()));
            let known = ForwardValues { output, d_output, ..*known };
            T::backward(&self.of(example), &mut d, &known, scratch);
        }
    }

    /// Rotates the gradients of rotated queries and keys back.
    pub(super) fn turn_back(&self, d_queries: &mut MatMut<'_>, d_keys: &mut MatMut<'_>) {
        let Some(rotation) = self.rotation else { return };
        for token in 0..self.form.tokens {
            let queries = d_queries.row(token).chunks_exact_mut(self.form.head_width);
            vectorized(
                #[inline(always)]
                || {
                    for row in queries {
                        rotation.turn_back(row, token);
                    }
                },
            );
            rotation.turn_back(d_keys.row(token), token);
        }
    }
}

impl Group<'_> {
    /// Writes the keys transposed, and also untransposed if they are rotated.
    fn write_keys(&self, keys: &mut [f32], turned_keys: &mut [f32]) {
        let Form { tokens, head_width, .. } = self.form;
        for (token, row) in turned_keys.chunks_exact_mut(head_width).enumerate() {
            row.copy_from_slice(self.keys.row(token));
            self.turn(row, token);
        }
        transpose(self.keys(turned_keys), tokens, keys);
    }

    /// The keys, rotated if they have rotary embeddings.
    fn keys<'a>(&'a self, turned_keys: &'a [f32]) -> Mat<'a> {
        match self.rotation {
            Some(_) => Mat::new(turned_keys, self.form.tokens, self.form.head_width),
            None => self.keys,
        }
    }

    /// The rows of a block of `[tokens, count * head width]`, stacked by head: a matrix `[queries of a block, head
    /// width]`.
    fn stacked<'a>(
        &self,
        from: Mat<'a>,
        rows: &Range<usize>,
        turned: bool,
        scratch: &'a mut [f32],
    ) -> Mat<'a> {
        let Form { head_width, count, .. } = self.form;
        if !self.form.copies() {
            return from.rows(rows.clone());
        }
        let scratch = &mut scratch[..count * rows.len() * head_width];
        for (i, out) in scratch.chunks_exact_mut(head_width).enumerate() {
            let (head, query) = (i / rows.len(), rows.start + i % rows.len());
            out.copy_from_slice(&from.row(query)[self.head(head)]);
            if turned {
                self.turn(out, query);
            }
        }
        Mat::new(scratch, count * rows.len(), head_width)
    }

    /// Writes the output and the rows' statistics of a single example.
    fn forward_alone(
        &self,
        out: &mut MatMut<'_>,
        statistics: &mut [[f32; STATISTICS]],
        scratch: &mut Scratch,
    ) {
        let Form { tokens, count, .. } = self.form;
        let Scratch { weights, factors, keys, turned_keys, queries, .. } = scratch;
        let (keys, turned_keys) =
            (&mut keys[..self.form.transposed()], &mut turned_keys[..self.form.turned_keys()]);
        self.write_keys(keys, turned_keys);
        for rows in blocks(tokens) {
            let (span, len) = (self.form.span(&rows), rows.len());
            let weights = &mut weights[..count * len * span.len()];
            let mut scores = MatMut::new(weights, count * len, span.len());
            let queries = self.stacked(self.queries, &rows, true, queries);
            matmul_here(&mut scores, Write::Set, self.scale, queries, spanned(&span, keys, tokens));
            for (i, weights) in weights.chunks_exact_mut(span.len()).enumerate() {
                let (head, query) = (i / len, rows.start + i % len);
                let (factors, seen) = (self.factors((head, query), &span, factors), self.seen(query, &span));
                statistics[self.row(head, query)] = vectorized(
                    #[inline(always)]
                    || exponentials(weights, seen, factors),
                );
            }
            let (weights, mut out) = (Mat::new(weights, count * len, span.len()), out.rows(rows.clone()));
            for head in 0..count {
                let (weights, mut out) =
                    (weights.rows(head * len..(head + 1) * len), out.cols(self.head(head)));
                matmul_here(&mut out, Write::Set, 1.0, weights, self.values.rows(span.clone()));
                for (i, query) in rows.clone().enumerate() {
                    let [_, inverse] = statistics[self.row(head, query)];
                    out.row(i).iter_mut().for_each(|x| *x *= inverse);
                }
            }
        }
    }

    /// Writes the gradients of queries, keys and values of a single example.
    fn backward_alone(&self, d: &mut Parts<'_>, known: &ForwardValues<'_>, scratch: &mut Scratch) {
        let Form { tokens, count, .. } = self.form;
        let Scratch { weights, gradients, factors, keys, values, turned_keys, queries, d_outputs } = scratch;
        let (keys, values) = (&mut keys[..self.form.transposed()], &mut values[..self.form.transposed()]);
        let turned_keys = &mut turned_keys[..self.form.turned_keys()];
        self.write_keys(keys, turned_keys);
        transpose(self.values, tokens, values);
        let [d_queries, d_keys, d_values] = d;
        // The last block attends to every key, unless there is a window, so it sets the gradients that the others add
        // to; they are zero before.
        for rows in blocks(tokens).rev() {
            let (span, len) = (self.form.span(&rows), rows.len());
            let first = rows.end == tokens && span == (0..tokens);
            let write = if first { Write::Set } else { Write::Add };
            let (weights, gradients) =
                (&mut weights[..count * len * span.len()], &mut gradients[..count * len * span.len()]);
            let queries = self.stacked(self.queries, &rows, true, queries);
            let d_output = self.stacked(known.d_output, &rows, false, d_outputs);
            for (out, factor, left, right) in
                [(&mut *weights, self.scale, queries, &*keys), (&mut *gradients, 1.0, d_output, &*values)]
            {
                let mut out = MatMut::new(out, count * len, span.len());
                matmul_here(&mut out, Write::Set, factor, left, spanned(&span, right, tokens));
            }
            self.weights_and_gradients(&rows, [weights, gradients], known, factors);
            let (weights, gradients) =
                (Mat::new(weights, count * len, span.len()), Mat::new(gradients, count * len, span.len()));
            matmul_here(&mut d_values.rows(span.clone()), write, 1.0, weights.t(), d_output);
            for head in 0..count {
                let (mut d_queries, keys) = (d_queries.rows(rows.clone()), self.keys(turned_keys));
                let (mut own, of_head) = (d_queries.cols(self.head(head)), head * len..(head + 1) * len);
                let keys = keys.rows(span.clone());
                matmul_here(&mut own, Write::Set, self.scale, gradients.rows(of_head), keys);
            }
            matmul_here(&mut d_keys.rows(span), write, self.scale, gradients.t(), queries);
        }
        self.turn_back(d_queries, d_keys);
    }

    /// Replaces a block's scores with the weights after dropout, and the gradients of its weights with those of the
    /// scores.
    fn weights_and_gradients(
        &self,
        rows: &Range<usize>,
        [weights, gradients]: [&mut [f32]; 2],
        known: &ForwardValues<'_>,
        factors: &mut [f32],
    ) {
        let (span, len) = (self.form.span(rows), rows.len());
        let both = weights.chunks_exact_mut(span.len()).zip(gradients.chunks_exact_mut(span.len()));
        for (i, (weights, gradients)) in both.enumerate() {
            let (head, query) = (i / len, rows.start + i % len);
            let (factors, seen) = (self.factors((head, query), &span, factors), self.seen(query, &span));
            let [output, d_output] = [known.output, known.d_output].map(|m| &m.row(query)[self.head(head)]);
            let row = (output, d_output, known.statistics[self.row(head, query)]);
            vectorized(
                #[inline(always)]
                || weights_and_gradients(weights, gradients, seen, factors, row),
            );
        }
    }
}

/// The end of the keys that a query attends to, rounded up to whole vectors within the span.
#[inline(always)]
fn vectors(seen: usize, keys: usize) -> usize {
    seen.next_multiple_of(LINE).min(keys)
}

/// Replaces a query's scores with `e^(score - largest)` after dropout, zero for keys that it does not attend to.
/// Returns the row's statistics.
#[inline(always)]
pub(super) fn exponentials(
    scores: &mut [f32],
    seen: Range<usize>,
    factors: Option<&[f32]>,
) -> [f32; STATISTICS] {
    let (near, far) = scores.split_at_mut(vectors(seen.end, scores.len()));
    near[..seen.start].fill(f32::NEG_INFINITY);
    near[seen.end..].fill(f32::NEG_INFINITY);
    let largest = max(near);
    for x in near.iter_mut() {
        *x = exp(*x - largest);
    }
    near[..seen.start].fill(0.0);
    near[seen.end..].fill(0.0);
    far.fill(0.0);
    let total = sum(near, |x| x);
    if let Some(factors) = factors {
        near.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
    }
    [largest, (1.0 / total) as f32]
}

/// Replaces a query's scores with its weights after dropout, and the weights' gradients with those of the scores; zero
/// for keys that it does not attend to.
#[inline(always)]
pub(super) fn weights_and_gradients(
    scores: &mut [f32],
    gradients: &mut [f32],
    seen: Range<usize>,
    factors: Option<&[f32]>,
    (output, d_output, [largest, inverse]): (&[f32], &[f32], [f32; STATISTICS]),
) {
    let near = vectors(seen.end, scores.len());
    // The mean of the weights' gradients, weighted by the weights.
    let mean = sum2(output, d_output, |a, b| a * b) as f32;
    let both = scores[..near].iter_mut().zip(&mut gradients[..near]);
    match factors {
        None => {
            for (x, g) in both {
                *x = exp(*x - largest) * inverse;
                *g = *x * (*g - mean);
            }
        }
        Some(factors) => {
            for ((x, g), factor) in both.zip(factors) {
                let weight = exp(*x - largest) * inverse;
                *x = weight * factor;
                *g = weight * (*g * factor - mean);
            }
        }
    }
    for row in [scores, gradients] {
        row[..seen.start].fill(0.0);
        row[seen.end..].fill(0.0);
    }
}

/// The output `[batch, tokens, width]` of all groups, in head order, and the statistics of all rows.
pub(super) fn forward<T: Element>(
    groups: &[Group<'_, T>],
    [batch, tokens, width]: [usize; 3],
) -> (Vec<f32>, Vec<f32>) {
    let mut output = vec![0.0; batch * tokens * width];
    let Some(form) = groups.first().map(|group| group.form).filter(|_| !output.is_empty()) else {
        return (output, Vec::new());
    };
    let mut statistics = vec![0.0; batch * (width / form.head_width) * tokens * STATISTICS];
    let outputs = output.chunks_mut(tokens * width);
    let columns = form.count * form.head_width;
    let outputs: Vec<MatMut<'_>> =
        outputs.flat_map(|data| MatMut::new(data, tokens, width).split_cols(columns)).collect();
    let rows = statistics.as_chunks_mut().0.par_chunks_mut(form.count * tokens);
    groups.par_iter().zip(outputs).zip(rows).for_each_init(
        || T::for_forward(form),
        |scratch, ((group, mut output), statistics)| group.forward(&mut output, statistics, scratch),
    );
    (output, statistics)
}

/// Writes the gradients of all groups into `parts`, given an output `[batch, tokens, width]`, its gradient and the
/// statistics of all rows.
pub(super) fn backward<T: Element>(
    groups: &[Group<'_, T>],
    parts: Vec<Parts<'_>>,
    [output, d_output]: [&[T]; 2],
    statistics: &[f32],
    width: usize,
) {
    let Some(form) = groups.first().map(|group| group.form) else { return };
    let rows = statistics.as_chunks().0.par_chunks(form.count * form.tokens);
    groups.par_iter().zip(parts).zip(rows).for_each_init(
        || T::for_backward(form),
        |scratch, ((group, mut parts), statistics)| {
            let [output, d_output] = [output, d_output].map(|data| group.own_columns(data, width));
            group.backward(&mut parts, &ForwardValues { output, d_output, statistics }, scratch);
        },
    );
}
