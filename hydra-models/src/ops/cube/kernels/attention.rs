//! Kernels between the matrix products of attention.
//!
//! A group is a run of heads in the order `[batch, heads]`, the first of which is `first_head`.

use super::UNITS;
use super::dropout::{Draws, factor_at, widened};
use super::sums::{max_units, sum_units};
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// How a matrix of `parts` times all heads, `[batch, tokens, parts, heads, head width]`, is laid out.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Layout {
    first_head: usize,
    heads: usize,
    tokens: usize,
    head_width: usize,
    parts: usize,
}

/// The index in all heads' matrix of the element at `at` of a group's `[heads, tokens, head width]`.
#[cube]
fn whole(layout: &Layout, part: usize, at: usize) -> usize {
    let column = at % layout.head_width;
    let row = at / layout.head_width;
    let token = row % layout.tokens;
    let number = layout.first_head + row / layout.tokens;
    let (sequence, head) = (number / layout.heads, number % layout.heads);
    let vector = (sequence * layout.tokens + token) * layout.parts + part;
    (vector * layout.heads + head) * layout.head_width + column
}

/// Copies a part of a group's heads out of the matrix of all.
#[cube(launch)]
pub(crate) fn split_heads<E: Float>(
    all: &[E],
    out: &mut [E],
    layout: Layout,
    part: usize,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < out.len() {
        out[ABSOLUTE_POS] = all[whole(&layout, part, ABSOLUTE_POS)];
    }
}

/// Copies a group's heads to a part of the matrix of all.
#[cube(launch)]
pub(crate) fn merge_heads<E: Float>(
    group: &[E],
    all: &mut [E],
    layout: Layout,
    part: usize,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < group.len() {
        all[whole(&layout, part, ABSOLUTE_POS)] = group[ABSOLUTE_POS];
    }
}

/// Of a group's scores, `[heads, query, key]`, the weights after dropout, zero for later keys, which may be
/// written over the scores, and the statistics of each row: the largest scaled score and one over the sum of
/// `e^(score - largest)`.
#[cube(launch)]
pub(crate) fn attention_weights<E: Float>(
    scores: &[f32],
    weights: &mut [E],
    statistics: &mut [f32],
    tokens: usize,
    first_head: usize,
    scale: f32,
    draws: Draws,
    #[comptime] drops: bool,
    #[define(E)] _float: ElemType,
) {
    let start = CUBE_POS * tokens;
    if start >= scores.len() {
        terminate!();
    }
    let query = CUBE_POS % tokens;
    let row = first_head * tokens + CUBE_POS;
    let mut largest = scores[start] * scale;
    let mut key = UNIT_POS as usize;
    while key <= query {
        let score = scores[start + key] * scale;
        if score > largest {
            largest = score;
        }
        key += UNITS;
    }
    let largest = max_units(largest);
    let mut sum = 0.0f32;
    let mut key = UNIT_POS as usize;
    while key <= query {
        sum += f32::exp(scores[start + key] * scale - largest);
        key += UNITS;
    }
    let inverse = 1.0f32 / sum_units(sum);
    let first = widened(row as u32, tokens as u32);
    let mut key = UNIT_POS as usize;
    while key < tokens {
        let mut weight = 0.0f32;
        if key <= query {
            weight = f32::exp(scores[start + key] * scale - largest) * inverse;
            if drops {
                weight *= factor_at(&draws, &first, key as u32);
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

/// Of a group's scores the weights after dropout, as [`attention_weights`] has them, and of the gradients of
/// those the gradients of the scores before they were scaled; each may be written over what it is made of.
#[cube(launch)]
pub(crate) fn attention_weights_backward<E: Float>(
    scores: &[f32],
    gradients: &[f32],
    weights: &mut [E],
    d_scores: &mut [E],
    statistics: &[f32],
    tokens: usize,
    first_head: usize,
    scale: f32,
    draws: Draws,
    #[comptime] drops: bool,
    #[define(E)] _float: ElemType,
) {
    let start = CUBE_POS * tokens;
    if start >= scores.len() {
        terminate!();
    }
    let query = CUBE_POS % tokens;
    let row = first_head * tokens + CUBE_POS;
    let (largest, inverse) = (statistics[row * 2], statistics[row * 2 + 1]);
    let first = widened(row as u32, tokens as u32);
    let mut mean = 0.0f32;
    let mut key = UNIT_POS as usize;
    while key <= query {
        let weight = f32::exp(scores[start + key] * scale - largest) * inverse;
        let mut gradient = gradients[start + key];
        if drops {
            gradient *= factor_at(&draws, &first, key as u32);
        }
        mean += weight * gradient;
        key += UNITS;
    }
    let mean = sum_units(mean);
    let mut key = UNIT_POS as usize;
    while key < tokens {
        let mut weight = 0.0f32;
        let mut gradient = 0.0f32;
        if key <= query {
            weight = f32::exp(scores[start + key] * scale - largest) * inverse;
            let mut factor = 1.0f32;
            if drops {
                factor = factor_at(&draws, &first, key as u32);
            }
            gradient = weight * (gradients[start + key] * factor - mean) * scale;
            weight *= factor;
        }
        weights[start + key] = E::cast_from(weight);
        d_scores[start + key] = E::cast_from(gradient);
        key += UNITS;
    }
}
