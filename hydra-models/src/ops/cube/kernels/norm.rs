//! Normalizations, one row per cube.

use super::UNITS;
use super::sums::sum_units;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// The mean of a row that starts at `first`, and the inverse of its standard deviation.
#[cube]
fn moments<E: Float>(x: &[E], first: usize, width: usize, epsilon: f32) -> (f32, f32) {
    let mut sum = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < width {
        sum += f32::cast_from(x[first + i]);
        i += UNITS;
    }
    let mean = sum_units(sum) / width as f32;
    let mut squares = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < width {
        let centered = f32::cast_from(x[first + i]) - mean;
        squares += centered * centered;
        i += UNITS;
    }
    let variance = sum_units(squares) / width as f32;
    (mean, 1.0f32 / f32::sqrt(variance + epsilon))
}

/// The normalized rows of `x`, `[rows, width]`, times `weight`, plus `bias`.
#[cube(launch)]
pub(crate) fn norm_rows<E: Float>(
    x: &[E],
    weight: &[E],
    bias: &[E],
    y: &mut [E],
    width: usize,
    epsilon: f32,
    #[define(E)] _float: ElemType,
) {
    let first = CUBE_POS * width;
    if first >= y.len() {
        terminate!();
    }
    let (mean, inverse) = moments(x, first, width, epsilon);
    let mut i = UNIT_POS as usize;
    while i < width {
        let unit = (f32::cast_from(x[first + i]) - mean) * inverse;
        y[first + i] = E::cast_from(unit * f32::cast_from(weight[i]) + f32::cast_from(bias[i]));
        i += UNITS;
    }
}

/// The gradient of `x`, given that of the output, and the mean and inverse deviation of each row, `[rows, 2]`.
#[cube(launch)]
pub(crate) fn norm_rows_backward<E: Float>(
    x: &[E],
    weight: &[E],
    gradient: &[E],
    out: &mut [E],
    statistics: &mut [f32],
    width: usize,
    epsilon: f32,
    #[define(E)] _float: ElemType,
) {
    let first = CUBE_POS * width;
    if first >= out.len() {
        terminate!();
    }
    let (mean, inverse) = moments(x, first, width, epsilon);
    let mut along_one = 0.0f32;
    let mut along_x = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < width {
        let inner = f32::cast_from(gradient[first + i]) * f32::cast_from(weight[i]);
        along_one += inner;
        along_x += inner * (f32::cast_from(x[first + i]) - mean) * inverse;
        i += UNITS;
    }
    let along_one = sum_units(along_one) / width as f32;
    let along_x = sum_units(along_x) / width as f32;
    let mut i = UNIT_POS as usize;
    while i < width {
        let unit = (f32::cast_from(x[first + i]) - mean) * inverse;
        let inner = f32::cast_from(gradient[first + i]) * f32::cast_from(weight[i]);
        out[first + i] = E::cast_from(inverse * (inner - along_one - unit * along_x));
        i += UNITS;
    }
    if UNIT_POS == 0 {
        statistics[CUBE_POS * 2] = mean;
        statistics[CUBE_POS * 2 + 1] = inverse;
    }
}

/// The weight's gradient over every `part_rows` rows, `[parts, width]`, from the row values that the backward wrote:
/// one unit per element.
#[cube(launch)]
pub(crate) fn norm_weight_parts<E: Float>(
    x: &[E],
    gradient: &[E],
    statistics: &[f32],
    parts: &mut [f32],
    rows: usize,
    width: usize,
    part_rows: usize,
    #[define(E)] _float: ElemType,
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
            let at = row * width + column;
            let centered = f32::cast_from(x[at]) - statistics[row * 2];
            sum += f32::cast_from(gradient[at]) * centered * statistics[row * 2 + 1];
        }
        parts[ABSOLUTE_POS] = sum;
    }
}

/// One over the root mean square of a row that starts at `first`.
#[cube]
fn inverse_root<E: Float>(x: &[E], first: usize, width: usize, epsilon: f32) -> f32 {
    let mut squares = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < width {
        let value = f32::cast_from(x[first + i]);
        squares += value * value;
        i += UNITS;
    }
    1.0f32 / f32::sqrt(sum_units(squares) / width as f32 + epsilon)
}

/// The rows of `x` `[rows, width]` divided by their root mean square, times `weight`.
#[cube(launch)]
pub(crate) fn rms_rows<E: Float>(
    x: &[E],
    weight: &[E],
    y: &mut [E],
    width: usize,
    epsilon: f32,
    #[define(E)] _float: ElemType,
) {
    let first = CUBE_POS * width;
    if first >= y.len() {
        terminate!();
    }
    let inverse = inverse_root(x, first, width, epsilon);
    let mut i = UNIT_POS as usize;
    while i < width {
        y[first + i] = E::cast_from(f32::cast_from(x[first + i]) * inverse * f32::cast_from(weight[i]));
        i += UNITS;
    }
}

/// The gradient of `x`, given that of the output, and for [`norm_weight_parts`] zero and the inverse root of each row,
/// `[rows, 2]`.
#[cube(launch)]
pub(crate) fn rms_rows_backward<E: Float>(
    x: &[E],
    weight: &[E],
    gradient: &[E],
    out: &mut [E],
    statistics: &mut [f32],
    width: usize,
    epsilon: f32,
    #[define(E)] _float: ElemType,
) {
    let first = CUBE_POS * width;
    if first >= out.len() {
        terminate!();
    }
    let inverse = inverse_root(x, first, width, epsilon);
    let mut along = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < width {
        let inner = f32::cast_from(gradient[first + i]) * f32::cast_from(weight[i]);
        along += inner * f32::cast_from(x[first + i]) * inverse;
        i += UNITS;
    }
    let along = sum_units(along) / width as f32;
    let mut i = UNIT_POS as usize;
    while i < width {
        let unit = f32::cast_from(x[first + i]) * inverse;
        let inner = f32::cast_from(gradient[first + i]) * f32::cast_from(weight[i]);
        out[first + i] = E::cast_from(inverse * (inner - unit * along));
        i += UNITS;
    }
    if UNIT_POS == 0 {
        statistics[CUBE_POS * 2] = 0.0f32;
        statistics[CUBE_POS * 2 + 1] = inverse;
    }
}
