//! The activation of GPT-2, elementwise.

use crate::ops::gelu::{CUBIC, TWICE_ROOT};
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// The sigmoid of twice the tanh approximation's argument.
#[cube]
fn sigmoid_of_twice(x: f32) -> f32 {
    1.0f32 / (1.0f32 + f32::exp(-TWICE_ROOT * (x + CUBIC * x * x * x)))
}

/// The activation of each element.
#[cube(launch)]
pub(crate) fn gelu<E: Float>(x: &[E], y: &mut [E], #[define(E)] _float: ElemType) {
    if ABSOLUTE_POS < y.len() {
        let value = f32::cast_from(x[ABSOLUTE_POS]);
        y[ABSOLUTE_POS] = E::cast_from(value * sigmoid_of_twice(value));
    }
}

/// The gradient of `x` for that of the output.
#[cube(launch)]
pub(crate) fn gelu_backward<E: Float>(x: &[E], gradient: &[E], out: &mut [E], #[define(E)] _float: ElemType) {
    if ABSOLUTE_POS < out.len() {
        let value = f32::cast_from(x[ABSOLUTE_POS]);
        let s = sigmoid_of_twice(value);
        let inner = TWICE_ROOT * (1.0f32 + 3.0f32 * CUBIC * value * value);
        // At the far ends the product of nothing and infinity is nothing.
        let mut slope = s;
        let rest = s * (1.0f32 - s);
        if rest > 0.0f32 {
            slope += value * rest * inner;
        }
        out[ABSOLUTE_POS] = E::cast_from(f32::cast_from(gradient[ABSOLUTE_POS]) * slope);
    }
}
