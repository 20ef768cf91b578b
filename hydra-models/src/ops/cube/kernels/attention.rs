//! Kernels between the matrix products of attention.
//!
//! A group is a range of heads in the order `[batch, heads]`, starting at `first_head`.

use super::UNITS;
use super::dropout::{Draws, factor_at, widened};
use super::sums::{max_units, sum_units};
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// The heads of a group from `first_head` on, and the tokens whose scores are computed: `tokens` of each row of
/// `row_tokens`, from `first_token` on.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Span {
    first_head: usize,
    tokens: usize,
    first_token: usize,
    row_tokens: usize,
}

/// The layout of a matrix `[batch, row tokens, parts, heads, head width]` of `parts` times all heads.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Layout {
    span: Span,
    heads: usize,
    head_width: usize,
    parts: usize,
    /// Heads of a group that share one head of the matrix; one if each has its own.
    shared: usize,
}

/// The index in the matrix of all heads of element `at` of a group's `[heads, tokens, head width]`.
#[cube]
fn whole(layout: &Layout, part: usize, at: usize) -> usize {
    let column = at % layout.head_width;
    let row = at / layout.head_width;
    let token = layout.span.first_token + row % layout.span.tokens;
    let number = layout.span.first_head + row / layout.span.tokens;
    let (sequence, head) = (number / layout.heads, number % layout.heads);
    let vector = (sequence * layout.span.row_tokens + token) * layout.parts + part;
    (vector * (layout.heads / layout.shared) + head / layout.shared) * layout.head_width + column
}

/// The most elements that a unit copies: their place takes longer to compute than a copy.
const RUN: usize = 8;

/// The elements of a head's vector that a unit copies, which divide the head's width.
pub(crate) fn run(head_width: usize) -> usize {
    if head_width.is_multiple_of(RUN) { RUN } else { 1 }
}

/// Copies a part of a group's heads out of the matrix of all heads, `run` elements per unit.
#[cube(launch)]
#[allow(clippy::manual_memcpy)]
pub(crate) fn split_heads<E: Float>(
    all: &[E],
    out: &mut [E],
    layout: Layout,
    part: usize,
    #[comptime] run: usize,
    #[define(E)] _float: ElemType,
) {
    let to = ABSOLUTE_POS * run;
    if to < out.len() {
        let from = whole(&layout, part, to);
        #[unroll]
        for i in 0..run {
            out[to + i] = all[from + i];
        }
    }
}

/// Copies a group's heads into a part of the matrix of all heads, `run` elements per unit.
#[cube(launch)]
#[allow(clippy::manual_memcpy)]
pub(crate) fn merge_heads<E: Float>(
    group: &[E],
    all: &mut [E],
    layout: Layout,
    part: usize,
    #[comptime] run: usize,
    #[define(E)] _float: ElemType,
) {
    let from = ABSOLUTE_POS * run;
    if from < group.len() {
        let to = whole(&layout, part, from);
        #[unroll]
        for i in 0..run {
            all[to + i] = group[from + i];
        }
    }
}

/// Sums the heads of a group that share one, in order, into the matrix of all heads: one unit per element of that.
#[cube(launch)]
pub(crate) fn merge_shared_heads<E: Float>(
    group: &[E],
    all: &mut [E],
    layout: Layout,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < group.len() / layout.shared {
        let size = layout.span.tokens * layout.head_width;
        let (head, place) = (ABSOLUTE_POS / size, ABSOLUTE_POS % size);
        let first = head * layout.shared * size + place;
        let mut sum = 0.0f32;
        for i in 0..layout.shared {
            sum += f32::cast_from(group[first + i * size]);
        }
        all[whole(&layout, 0usize, first)] = E::cast_from(sum);
    }
}

/// Rotates the heads of `[batch, tokens, heads, head width]` by the angles of their positions, given as the cosines and
/// then the sines of all pairs; rotates back if `sign` is minus one. One unit per pair.
#[cube(launch)]
pub(crate) fn turn_heads<E: Float>(
    x: &[E],
    angles: &[f32],
    y: &mut [E],
    tokens: usize,
    heads: usize,
    head_width: usize,
    sign: f32,
    #[define(E)] _float: ElemType,
) {
    let half = head_width / 2usize;
    if ABSOLUTE_POS < x.len() / 2usize {
        let (vector, pair) = (ABSOLUTE_POS / half, ABSOLUTE_POS % half);
        let angle = (vector / heads % tokens) * head_width + pair;
        let (cosine, sine) = (angles[angle], sign * angles[angle + half]);
        let at = vector * head_width + pair;
        let (a, b) = (f32::cast_from(x[at]), f32::cast_from(x[at + half]));
        y[at] = E::cast_from(a * cosine - b * sine);
        y[at + half] = E::cast_from(b * cosine + a * sine);
    }
}

/// Writes `hidden` over the scores `[heads, query, key]` of a group whose keys are not of the query's example; `positions`
/// are those of the tokens `[batch, row tokens]`. One unit per score.
#[cube(launch)]
pub(crate) fn hide_other_examples(
    scores: &mut [f32],
    positions: &[i32],
    span: Span,
    heads: usize,
    hidden: f32,
) {
    if ABSOLUTE_POS < scores.len() {
        let (row, key) = (ABSOLUTE_POS / span.tokens, ABSOLUTE_POS % span.tokens);
        let query = row % span.tokens;
        let sequence = (span.first_head + row / span.tokens) / heads;
        let first = sequence * span.row_tokens + span.first_token;
        // Tokens of one example have the same distance from their positions.
        let position = positions[first + query] as usize;
        let other = positions[first + key] as usize;
        if key + position != query + other {
            scores[ABSOLUTE_POS] = hidden;
        }
    }
}

/// The first key that a query attends to within a window, and the end of its keys.
#[cube]
fn keys_seen(query: usize, tokens: usize, window: usize, #[comptime] causal: bool) -> (usize, usize) {
    let mut first = 0usize;
    let mut end = query + 1;
    if end > window {
        first = end - window;
    }
    if !causal {
        end = query + window;
        if end > tokens {
            end = tokens;
        }
    }
    (first, end)
}

/// Computes the weights after dropout from a group's scores `[heads, query, key]`, zero for keys that a query does not
/// attend to, optionally in place, and the statistics of each row: the largest scaled score and one over the sum of
/// `e^(score - largest)`.
#[cube(launch)]
pub(crate) fn attention_weights<E: Float>(
    scores: &[f32],
    weights: &mut [E],
    statistics: &mut [f32],
    span: Span,
    window: usize,
    scale: f32,
    draws: Draws,
    #[comptime] causal: bool,
    #[comptime] drops: bool,
    #[define(E)] _float: ElemType,
) {
    let tokens = span.tokens;
    let start = CUBE_POS * tokens;
    if start >= scores.len() {
        terminate!();
    }
    let query = CUBE_POS % tokens;
    let (seen, end) = keys_seen(query, tokens, window, causal);
    let row = (span.first_head + CUBE_POS / tokens) * span.row_tokens + span.first_token + query;
    let mut largest = scores[start + query] * scale;
    let mut key = seen + UNIT_POS as usize;
    while key < end {
        let score = scores[start + key] * scale;
        if score > largest {
            largest = score;
        }
        key += UNITS;
    }
    let largest = max_units(largest);
    let mut sum = 0.0f32;
    let mut key = seen + UNIT_POS as usize;
    while key < end {
        sum += f32::exp(scores[start + key] * scale - largest);
        key += UNITS;
    }
    let inverse = 1.0f32 / sum_units(sum);
    let first = widened(row as u32, span.row_tokens as u32);
    let mut key = UNIT_POS as usize;
    while key < tokens {
        let mut weight = 0.0f32;
        if key < end && key >= seen {
            weight = f32::exp(scores[start + key] * scale - largest) * inverse;
            if drops {
                weight *= factor_at(&draws, &first, (span.first_token + key) as u32);
            }
        }
        weights[start + key] = E::cast_from(weight);
        key += UNITS;
    }
    if UNIT_POS == 0 {
        statistics[row * 2] = largest;
        statistics[row * 2 + 1] = inverse;
    }
}

/// Computes the weights after dropout from a group's scores, as [`attention_weights`] does, and the gradients of the
/// unscaled scores from those of the weights; both optionally in place.
#[cube(launch)]
pub(crate) fn attention_weights_backward<E: Float>(
    scores: &[f32],
    gradients: &[f32],
    weights: &mut [E],
    d_scores: &mut [E],
    statistics: &[f32],
    span: Span,
    window: usize,
    scale: f32,
    draws: Draws,
    #[comptime] causal: bool,
    #[comptime] drops: bool,
    #[define(E)] _float: ElemType,
) {
    let tokens = span.tokens;
    let start = CUBE_POS * tokens;
    if start >= scores.len() {
        terminate!();
    }
    let query = CUBE_POS % tokens;
    let (seen, end) = keys_seen(query, tokens, window, causal);
    let row = (span.first_head + CUBE_POS / tokens) * span.row_tokens + span.first_token + query;
    let (largest, inverse) = (statistics[row * 2], statistics[row * 2 + 1]);
    let first = widened(row as u32, span.row_tokens as u32);
    let mut mean = 0.0f32;
    let mut key = seen + UNIT_POS as usize;
    while key < end {
        let weight = f32::exp(scores[start + key] * scale - largest) * inverse;
        let mut gradient = gradients[start + key];
        if drops {
            gradient *= factor_at(&draws, &first, (span.first_token + key) as u32);
        }
        mean += weight * gradient;
        key += UNITS;
    }
    let mean = sum_units(mean);
    let mut key = UNIT_POS as usize;
    while key < tokens {
        let mut weight = 0.0f32;
        let mut gradient = 0.0f32;
        if key < end && key >= seen {
            weight = f32::exp(scores[start + key] * scale - largest) * inverse;
            let mut factor = 1.0f32;
            if drops {
                factor = factor_at(&draws, &first, (span.first_token + key) as u32);
            }
            gradient = weight * (gradients[start + key] * factor - mean) * scale;
            weight *= factor;
        }
        weights[start + key] = E::cast_from(weight);
        d_scores[start + key] = E::cast_from(gradient);
        key += UNITS;
    }
}
