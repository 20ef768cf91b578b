//! The activation functions of GPT-2 and Llama, elementwise.

use crate::ops::gelu::{CUBIC, TWICE_ROOT};
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// The sigmoid of twice the argument of the tanh approximation.
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

/// The gradient of `x`, given that of the output.
#[cube(launch)]
pub(crate) fn gelu_backward<E: Float>(x: &[E], gradient: &[E], out: &mut [E], #[define(E)] _float: ElemType) {
    if ABSOLUTE_POS < out.len() {
        let value = f32::cast_from(x[ABSOLUTE_POS]);
        let s = sigmoid_of_twice(value);
        let inner = TWICE_ROOT * (1.0f32 + 3.0f32 * CUBIC * value * value);
        // For large |x| the product of zero and infinity is set to zero.
        let mut slope = s;
        let rest = s * (1.0f32 - s);
        if rest > 0.0f32 {
            slope += value * rest * inner;
        }
        out[ABSOLUTE_POS] = E::cast_from(f32::cast_from(gradient[ABSOLUTE_POS]) * slope);
    }
}

#[cube]
fn sigmoid(x: f32) -> f32 {
    1.0f32 / (1.0f32 + f32::exp(-x))
}

/// `x / (1 + e^-x)`, zero for very negative `x`.
#[cube]
fn silu(x: f32) -> f32 {
    let s = sigmoid(x);
    let mut y = 0.0f32;
    if s > 0.0f32 {
        y = x * s;
    }
    y
}

/// The gated activation of each element.
#[cube(launch)]
pub(crate) fn swiglu<E: Float>(gate: &[E], up: &[E], y: &mut [E], #[define(E)] _float: ElemType) {
    if ABSOLUTE_POS < y.len() {
        let value = silu(f32::cast_from(gate[ABSOLUTE_POS]));
        y[ABSOLUTE_POS] = E::cast_from(value * f32::cast_from(up[ABSOLUTE_POS]));
    }
}

/// The gradients of gate and up, given that of the output.
#[cube(launch)]
pub(crate) fn swiglu_backward<E: Float>(
    gate: &[E],
    up: &[E],
    gradient: &[E],
    d_gate: &mut [E],
    d_up: &mut [E],
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < d_gate.len() {
        let x = f32::cast_from(gate[ABSOLUTE_POS]);
        let g = f32::cast_from(gradient[ABSOLUTE_POS]);
        let s = sigmoid(x);
        let mut slope = s;
        let rest = s * (1.0f32 - s);
        if rest > 0.0f32 {
            slope += x * rest;
        }
        d_gate[ABSOLUTE_POS] = E::cast_from(g * f32::cast_from(up[ABSOLUTE_POS]) * slope);
        d_up[ABSOLUTE_POS] = E::cast_from(g * silu(x));
    }
}
