//! Depthwise convolutions: one unit per element.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// The convolution of `x` `[items, height, width, channels]` with `weight` `[channels, side, side]`, in the order of
/// the kernel's taps; plus `bias` if `with_bias` is 1. Kernels are rotated by 180 degrees if `turned` is 1.
#[cube(launch)]
pub(crate) fn depthwise<E: Float>(
    x: &[E],
    weight: &[E],
    bias: &[E],
    y: &mut [E],
    height: usize,
    width: usize,
    channels: usize,
    side: usize,
    with_bias: usize,
    turned: usize,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < y.len() {
        let channel = ABSOLUTE_POS % channels;
        let place = ABSOLUTE_POS / channels;
        let column = place % width;
        let row = place / width % height;
        let first = (place / width / height) * height;
        let around = side / 2usize;
        let taps = side * side;
        let mut sum = 0.0f32;
        if with_bias == 1usize {
            sum = f32::cast_from(bias[channel]);
        }
        for tap in 0..taps {
            let source_row = row + tap / side;
            let source_column = column + tap % side;
            if source_row >= around
                && source_row < height + around
                && source_column >= around
                && source_column < width + around
            {
                let source = (first + source_row - around) * width + source_column - around;
                let mut weight_at = tap;
                if turned == 1usize {
                    weight_at = taps - 1usize - tap;
                }
                sum += f32::cast_from(x[source * channels + channel])
                    * f32::cast_from(weight[channel * taps + weight_at]);
            }
        }
        y[ABSOLUTE_POS] = E::cast_from(sum);
    }
}

/// The gradient of the kernels over every `part_rows` image rows, `[parts, channels, side, side]`, given that of the
/// output.
#[cube(launch)]
pub(crate) fn depthwise_weight_parts<E: Float>(
    x: &[E],
    gradient: &[E],
    parts: &mut [f32],
    rows: usize,
    height: usize,
    width: usize,
    channels: usize,
    side: usize,
    part_rows: usize,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < parts.len() {
        let taps = side * side;
        let around = side / 2usize;
        let tap = ABSOLUTE_POS % taps;
        let channel = ABSOLUTE_POS / taps % channels;
        let begin = (ABSOLUTE_POS / taps / channels) * part_rows;
        let mut end = begin + part_rows;
        if end > rows {
            end = rows;
        }
        let mut sum = 0.0f32;
        for line in begin..end {
            let row = line % height + tap / side;
            if row >= around && row < height + around {
                let source_line = line - line % height + row - around;
                for column in 0..width {
                    let source_column = column + tap % side;
                    if source_column >= around && source_column < width + around {
                        let source = source_line * width + source_column - around;
                        sum += f32::cast_from(x[source * channels + channel])
                            * f32::cast_from(gradient[(line * width + column) * channels + channel]);
                    }
                }
            }
        }
        parts[ABSOLUTE_POS] = sum;
    }
}
