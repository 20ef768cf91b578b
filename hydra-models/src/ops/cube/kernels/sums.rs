//! Sums within a cube, sums over rows, and rows added to rows.

use super::{HALVINGS, UNITS};
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// The sum of one number of each unit of the cube, the same in all of them.
#[cube]
pub(super) fn sum_units(x: f32) -> f32 {
    let mut parts = Shared::<[f32]>::new_slice(UNITS);
    let unit = UNIT_POS as usize;
    parts[unit] = x;
    sync_cube();
    #[unroll]
    for i in 0..HALVINGS {
        let half = comptime!(UNITS >> (i + 1));
        if unit < half {
            let other = parts[unit + half];
            parts[unit] += other;
        }
        sync_cube();
    }
    parts[0]
}

/// The largest of one number of each unit of the cube, the same in all of them.
#[cube]
pub(super) fn max_units(x: f32) -> f32 {
    let mut parts = Shared::<[f32]>::new_slice(UNITS);
    let unit = UNIT_POS as usize;
    parts[unit] = x;
    sync_cube();
    #[unroll]
    for i in 0..HALVINGS {
        let half = comptime!(UNITS >> (i + 1));
        if unit < half {
            let other = parts[unit + half];
            if other > parts[unit] {
                parts[unit] = other;
            }
        }
        sync_cube();
    }
    parts[0]
}

/// The sums of every `part_rows` rows of `x`, `[rows, width]`, into `parts`, `[parts, width]`: one unit for
/// each number.
#[cube(launch)]
pub(crate) fn sum_parts<X: Float, P: Float>(
    x: &[X],
    parts: &mut [P],
    rows: usize,
    width: usize,
    part_rows: usize,
    #[define(X, P)] _floats: [ElemType; 2],
) {
    if ABSOLUTE_POS < parts.len() {
        let (part, column) = (ABSOLUTE_POS / width, ABSOLUTE_POS % width);
        let first = part * part_rows;
        let mut end = first + part_rows;
        if end > rows {
            end = rows;
        }
        let mut sum = 0.0f32;
        for row in first..end {
            sum += f32::cast_from(x[row * width + column]);
        }
        parts[ABSOLUTE_POS] = P::cast_from(sum);
    }
}

/// Each row of `x`, `[rows, width]`, plus the row `bias`.
#[cube(launch)]
pub(crate) fn add_row<E: Float>(
    x: &[f32],
    bias: &[E],
    y: &mut [E],
    width: usize,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < y.len() {
        y[ABSOLUTE_POS] = E::cast_from(x[ABSOLUTE_POS] + f32::cast_from(bias[ABSOLUTE_POS % width]));
    }
}

/// Each row of `x`, `[rows, width]`, plus the row `bias` and the same row of `residual`.
#[cube(launch)]
pub(crate) fn add_row_and_residual<E: Float>(
    x: &[f32],
    bias: &[E],
    residual: &[E],
    y: &mut [E],
    width: usize,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < y.len() {
        let bias = f32::cast_from(bias[ABSOLUTE_POS % width]);
        let terms = f32::cast_from(residual[ABSOLUTE_POS]) + bias;
        y[ABSOLUTE_POS] = E::cast_from(x[ABSOLUTE_POS] + terms);
    }
}

/// Adds `x` to `y`.
#[cube(launch)]
pub(crate) fn add_to(y: &mut [f32], x: &[f32]) {
    if ABSOLUTE_POS < y.len() {
        y[ABSOLUTE_POS] += x[ABSOLUTE_POS];
    }
}

/// Rounds all of `x` into `y`, starting at element `start`.
#[cube(launch)]
pub(crate) fn copy_to<E: Float>(x: &[f32], y: &mut [E], start: usize, #[define(E)] _float: ElemType) {
    if ABSOLUTE_POS < x.len() {
        y[start + ABSOLUTE_POS] = E::cast_from(x[ABSOLUTE_POS]);
    }
}

/// Writes the sums of the rows of `parts` and of `rest`, which has the length of one row, into `y`, starting at element
/// `start`.
#[cube(launch)]
pub(crate) fn sum_to<E: Float>(
    parts: &[f32],
    rest: &[f32],
    y: &mut [E],
    start: usize,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < rest.len() {
        let mut sum = 0.0f32;
        let mut i = ABSOLUTE_POS;
        while i < parts.len() {
            sum += parts[i];
            i += rest.len();
        }
        y[start + ABSOLUTE_POS] = E::cast_from(sum + rest[ABSOLUTE_POS]);
    }
}

/// Copies `y.len()` elements of `x`, starting at element `start`.
#[cube(launch)]
pub(crate) fn copy_from<E: Float>(x: &[E], y: &mut [E], start: usize, #[define(E)] _float: ElemType) {
    if ABSOLUTE_POS < y.len() {
        y[ABSOLUTE_POS] = x[start + ABSOLUTE_POS];
    }
}

/// `x` times the only element of `factor`.
#[cube(launch)]
pub(crate) fn scale<E: Float>(x: &[E], factor: &[f32], y: &mut [E], #[define(E)] _float: ElemType) {
    if ABSOLUTE_POS < y.len() {
        y[ABSOLUTE_POS] = E::cast_from(f32::cast_from(x[ABSOLUTE_POS]) * factor[0]);
    }
}

/// The sum of the `values` of each segment: one cube for each. `segments` holds the number of each value's segment, or a
/// negative number. The sums are `absent` if a number is too large.
#[cube(launch)]
pub(crate) fn segment_sums(values: &[f32], segments: &[i32], out: &mut [f32], absent: f32) {
    let segment = CUBE_POS;
    if segment >= out.len() {
        terminate!();
    }
    let mut sum = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < values.len() {
        let of = segments[i];
        if of >= 0i32 {
            if of as usize == segment {
                sum += values[i];
            }
            if of as usize >= out.len() {
                sum = absent;
            }
        }
        i += UNITS;
    }
    let sum = sum_units(sum);
    if UNIT_POS == 0 {
        out[segment] = sum;
    }
}

/// The number of each value's segment, or zero if it has none: one unit for each value.
#[cube(launch)]
pub(crate) fn spread(sums: &[f32], segments: &[i32], out: &mut [f32]) {
    if ABSOLUTE_POS < out.len() {
        let segment = segments[ABSOLUTE_POS];
        let mut sum = 0.0f32;
        if segment >= 0i32 && (segment as usize) < sums.len() {
            sum = sums[segment as usize];
        }
        out[ABSOLUTE_POS] = sum;
    }
}
