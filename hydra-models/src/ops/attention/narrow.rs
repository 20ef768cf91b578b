//! Attention of `bf16` on the CPU: products have factors of `bf16`, and everything else is in `f32`.
//!
//! Rotated queries and keys, weights and the gradients of scores are rounded before they are multiplied.

use super::STATISTICS;
use super::group::{self, Element, Form, ForwardValues, Group, Parts, blocks};
use crate::ops::kernels::bf16::{Panels, halves, matmul_here, packed_rows, round_in_place, rounded, wide};
use crate::ops::kernels::{Mat, MatMut, Write, vectorized};
use crate::ops::tensors::bits;
use burn_flex::FlexTensor;
use std::ops::Range;

/// Scratch memory of a worker, reused across blocks and groups.
pub(super) struct NarrowScratch {
    /// `[queries of a block, keys of its span]`, stacked by head; rounded in place.
    weights: Vec<f32>,
    /// Likewise, in the backward only.
    gradients: Vec<f32>,
    factors: Vec<f32>,
    /// Two vectors of a head.
    vectors: Vec<f32>,
    /// The rotated keys, `[tokens, head width]`, if they are rotated.
    turned_keys: Vec<u16>,
    /// The queries of a block, `[queries of a block, head width]`, if they are copied.
    queries: Vec<u16>,
    /// Likewise the gradients of their outputs, in the backward only.
    d_outputs: Vec<u16>,
    panels: PackedSides,
    packed: Vec<u32>,
}

/// The right sides of products.
#[derive(Default)]
struct PackedSides {
    /// `[head width, tokens]`.
    turned_keys: Panels,
    /// `[tokens, head width]`; in the backward `[head width, tokens]`.
    values: Panels,
    /// `[tokens, head width]`, in the backward only, as are those below.
    keys: Panels,
    /// `[queries of a block, head width]`.
    queries: Panels,
    /// Likewise.
    d_outputs: Panels,
}

/// The scratch memory of the backward, which exceeds that of the forward, in elements of `f32`.
pub(super) fn scratch_elements(form: Form) -> usize {
    let Form { tokens, head_width, .. } = form;
    let narrow = form.turned_keys() + 2 * form.copied();
    let panels = 2 * Panels::room(head_width, tokens)
        + Panels::room(tokens, head_width)
        + 2 * Panels::room(form.rows(), head_width);
    let packed = packed_rows(form.rows().max(form.longest()).max(head_width));
    2 * form.rows() * form.longest() + tokens + 2 * head_width + narrow.div_ceil(2) + panels + packed
}

impl Element for u16 {
    type Scratch = NarrowScratch;

    fn of(tensor: &FlexTensor) -> &[u16] {
        bits(tensor)
    }

    fn for_forward(form: Form) -> NarrowScratch {
        NarrowScratch {
            weights: vec![0.0; form.rows() * form.longest()],
            gradients: Vec::new(),
            factors: vec![0.0; form.tokens],
            vectors: vec![0.0; 2 * form.head_width],
            turned_keys: vec![0; form.turned_keys()],
            queries: vec![0; form.copied()],
            d_outputs: Vec::new(),
            panels: PackedSides::default(),
            packed: Vec::new(),
        }
    }

    fn for_backward(form: Form) -> NarrowScratch {
        let (gradients, d_outputs) = (vec![0.0; form.rows() * form.longest()], vec![0; form.copied()]);
        NarrowScratch { gradients, d_outputs, ..Self::for_forward(form) }
    }

    fn forward(
        group: &Group<'_, u16>,
        out: &mut MatMut<'_>,
        statistics: &mut [[f32; STATISTICS]],
        scratch: &mut NarrowScratch,
    ) {
        let Form { tokens, count, .. } = group.form;
        let NarrowScratch { weights, factors, vectors, turned_keys, queries, panels, packed, .. } = scratch;
        let keys = group.turned_keys(&mut turned_keys[..group.form.turned_keys()], vectors);
        panels.turned_keys.pack(keys.t());
        panels.values.pack(group.values);
        for rows in blocks(tokens) {
            let (span, len) = (group.form.span(&rows), rows.len());
            let weights = &mut weights[..count * len * span.len()];
            let mut scores = MatMut::new(weights, count * len, span.len());
            let queries = group.stacked(group.queries, (&rows, true), queries, vectors);
            let keys = panels.turned_keys.whole().cols(span.clone());
            matmul_here(&mut scores, Write::Set, group.scale, queries, keys, packed);
            for (i, weights) in weights.chunks_exact_mut(span.len()).enumerate() {
                let (head, query) = (i / len, rows.start + i % len);
                let (factors, seen) =
                    (group.factors((head, query), &span, factors), group.seen(query, &span));
                statistics[group.row(head, query)] = vectorized(
                    #[inline(always)]
                    || {
                        let statistics = group::exponentials(weights, seen, factors);
                        round_in_place(weights);
                        statistics
                    },
                );
            }
            let (weights, mut out) = (halves(weights, count * len, span.len()), out.rows(rows.clone()));
            for head in 0..count {
                let (weights, mut out) =
                    (weights.rows(head * len..(head + 1) * len), out.cols(group.head(head)));
                let values = panels.values.whole().rows(span.clone());
                matmul_here(&mut out, Write::Set, 1.0, weights, values, packed);
                for (i, query) in rows.clone().enumerate() {
                    let [_, inverse] = statistics[group.row(head, query)];
                    out.row(i).iter_mut().for_each(|x| *x *= inverse);
                }
            }
        }
    }

    fn backward(
        group: &Group<'_, u16>,
        d: &mut Parts<'_>,
        known: &ForwardValues<'_, u16>,
        scratch: &mut NarrowScratch,
    ) {
        let Form { tokens, count, .. } = group.form;
        let NarrowScratch {
            weights,
            gradients,
            factors,
            vectors,
            turned_keys,
            queries,
            d_outputs,
            panels,
            packed,
        } = scratch;
        let keys = group.turned_keys(&mut turned_keys[..group.form.turned_keys()], vectors);
        panels.turned_keys.pack(keys.t());
        panels.values.pack(group.values.t());
        panels.keys.pack(keys);
        let [d_queries, d_keys, d_values] = d;
        // As for `f32`.
        for rows in blocks(tokens).rev() {
            let (span, len) = (group.form.span(&rows), rows.len());
            let first = rows.end == tokens && span == (0..tokens);
            let write = if first { Write::Set } else { Write::Add };
            let size = count * len * span.len();
            let (weights, gradients) = (&mut weights[..size], &mut gradients[..size]);
            let queries = group.stacked(group.queries, (&rows, true), queries, vectors);
            let d_output = group.stacked(known.d_output, (&rows, false), d_outputs, vectors);
            for (out, factor, left, right) in [
                (&mut *weights, group.scale, queries, &panels.turned_keys),
                (&mut *gradients, 1.0, d_output, &panels.values),
            ] {
                let (mut out, right) = (MatMut::new(out, count * len, span.len()), right.whole());
                matmul_here(&mut out, Write::Set, factor, left, right.cols(span.clone()), packed);
            }
            group.weights_and_gradients(&rows, [weights, gradients], known, (factors, vectors));
            let [weights, gradients] = [weights, gradients].map(|all| halves(all, count * len, span.len()));
            panels.queries.pack(queries);
            panels.d_outputs.pack(d_output);
            let whole = panels.d_outputs.whole();
            matmul_here(&mut d_values.rows(span.clone()), write, 1.0, weights.t(), whole, packed);
            for head in 0..count {
                let (of_head, keys) = (head * len..(head + 1) * len, panels.keys.whole().rows(span.clone()));
                let mut own = d_queries.rows(rows.clone());
                let mut own = own.cols(group.head(head));
                matmul_here(&mut own, Write::Set, group.scale, gradients.rows(of_head), keys, packed);
            }
            let queries = panels.queries.whole();
            matmul_here(&mut d_keys.rows(span), write, group.scale, gradients.t(), queries, packed);
        }
        group.turn_back(d_queries, d_keys);
    }
}

impl Group<'_, u16> {
    /// The keys, rotated and rounded if they have rotary embeddings.
    fn turned_keys<'a>(&'a self, turned: &'a mut [u16], vectors: &mut [f32]) -> Mat<'a, u16> {
        let Form { tokens, head_width, .. } = self.form;
        if self.rotation.is_none() {
            return self.keys;
        }
        for (token, out) in turned.chunks_exact_mut(head_width).enumerate() {
            self.turn_rounded(self.keys.row(token), token, out, vectors);
        }
        Mat::new(turned, tokens, head_width)
    }

    /// Rotates the vector of a token and rounds it.
    fn turn_rounded(&self, from: &[u16], token: usize, out: &mut [u16], vectors: &mut [f32]) {
        let (vector, Some(rotation)) = (&mut vectors[..from.len()], self.rotation) else { return };
        vectorized(
            #[inline(always)]
            || {
                vector.iter_mut().zip(from).for_each(|(x, from)| *x = wide(*from));
                rotation.turn(vector, token);
                out.iter_mut().zip(&*vector).for_each(|(out, x)| *out = rounded(*x));
            },
        );
    }

    /// The rows of a block of `[tokens, count * head width]`, stacked by head: a matrix `[queries of a block, head
    /// width]`.
    fn stacked<'a>(
        &self,
        from: Mat<'a, u16>,
        (rows, turned): (&Range<usize>, bool),
        scratch: &'a mut [u16],
        vectors: &mut [f32],
    ) -> Mat<'a, u16> {
        let Form { head_width, count, .. } = self.form;
        if !self.form.copies() {
            return from.rows(rows.clone());
        }
        let scratch = &mut scratch[..count * rows.len() * head_width];
        for (i, out) in scratch.chunks_exact_mut(head_width).enumerate() {
            let (head, query) = (i / rows.len(), rows.start + i % rows.len());
            let from = &from.row(query)[self.head(head)];
            if turned && self.rotation.is_some() {
                self.turn_rounded(from, query, out, vectors);
            } else {
                out.copy_from_slice(from);
            }
        }
        Mat::new(scratch, count * rows.len(), head_width)
    }

    /// Replaces a block's scores with the weights after dropout, and the gradients of its weights with those of the
    /// scores; rounds both in place.
    fn weights_and_gradients(
        &self,
        rows: &Range<usize>,
        [weights, gradients]: [&mut [f32]; 2],
        known: &ForwardValues<'_, u16>,
        (factors, vectors): (&mut [f32], &mut [f32]),
    ) {
        let (span, len) = (self.form.span(rows), rows.len());
        let (output, d_output) = vectors.split_at_mut(self.form.head_width);
        let both = weights.chunks_exact_mut(span.len()).zip(gradients.chunks_exact_mut(span.len()));
        for (i, (weights, gradients)) in both.enumerate() {
            let (head, query) = (i / len, rows.start + i % len);
            let (factors, seen) = (self.factors((head, query), &span, factors), self.seen(query, &span));
            let from = [known.output, known.d_output].map(|m| &m.row(query)[self.head(head)]);
            let statistics = known.statistics[self.row(head, query)];
            vectorized(
                #[inline(always)]
                || {
                    for (out, from) in [&mut *output, &mut *d_output].into_iter().zip(from) {
                        out.iter_mut().zip(from).for_each(|(out, x)| *out = wide(*x));
                    }
                    let row = (&*output, &*d_output, statistics);
                    group::weights_and_gradients(weights, gradients, seen, factors, row);
                    round_in_place(weights);
                    round_in_place(gradients);
                },
            );
        }
    }
}
