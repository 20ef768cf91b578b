//! The formulas of [`hydra_core::optimizer`] as kernels in CubeCL's language, with one unit for each element.
//!
//! They are launched with checked accesses, so none needs `unsafe`. The fused operations are those of the host's
//! formulas, and no compiler can contract the remaining ones. Gradients are of the generic type, and are widened
//! before any arithmetic.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// AdamW in place. `rate` is the step size, negated. The gradient is scaled by `factor` if it is clipped.
#[cube(launch)]
pub(super) fn adamw<G: Float>(
    params: &mut [f32],
    grads: &[G],
    m: &mut [f32],
    v: &mut [f32],
    shrink: f32,
    beta1: f32,
    beta2: f32,
    rest1: f32,
    rest2: f32,
    rate: f32,
    root2: f32,
    eps: f32,
    factor: f32,
    #[comptime] clipped: bool,
    #[define(G)] _float: ElemType,
) {
    if ABSOLUTE_POS < params.len() {
        let mut g = f32::cast_from(grads[ABSOLUTE_POS]);
        if clipped {
            g *= factor;
        }
        let first = fma(beta1, m[ABSOLUTE_POS], rest1 * g);
        let second = fma(beta2, v[ABSOLUTE_POS], rest2 * (g * g));
        let p = params[ABSOLUTE_POS];
        m[ABSOLUTE_POS] = first;
        v[ABSOLUTE_POS] = second;
        params[ABSOLUTE_POS] = fma(rate, first / (f32::sqrt(second) / root2 + eps), p * shrink);
    }
}

/// SGD with momentum in place; the momentum of the `first` step is its gradient. `rate` is negated.
#[cube(launch)]
pub(super) fn sgd_with_momentum<G: Float>(
    params: &mut [f32],
    grads: &[G],
    buffer: &mut [f32],
    rate: f32,
    decay: f32,
    momentum: f32,
    factor: f32,
    #[comptime] clipped: bool,
    #[comptime] first: bool,
    #[define(G)] _float: ElemType,
) {
    if ABSOLUTE_POS < params.len() {
        let mut g = f32::cast_from(grads[ABSOLUTE_POS]);
        if clipped {
            g *= factor;
        }
        let p = params[ABSOLUTE_POS];
        let mut next = fma(decay, p, g);
        if comptime!(!first) {
            next = fma(momentum, buffer[ABSOLUTE_POS], next);
        }
        buffer[ABSOLUTE_POS] = next;
        params[ABSOLUTE_POS] = fma(rate, next, p);
    }
}

/// SGD without momentum in place. `rate` is negated.
#[cube(launch)]
pub(super) fn sgd<G: Float>(
    params: &mut [f32],
    grads: &[G],
    rate: f32,
    decay: f32,
    factor: f32,
    #[comptime] clipped: bool,
    #[define(G)] _float: ElemType,
) {
    if ABSOLUTE_POS < params.len() {
        let mut g = f32::cast_from(grads[ABSOLUTE_POS]);
        if clipped {
            g *= factor;
        }
        let p = params[ABSOLUTE_POS];
        params[ABSOLUTE_POS] = fma(rate, fma(decay, p, g), p);
    }
}

/// The sum of two.
#[cube(launch)]
pub(super) fn sum<A: Float, B: Float>(
    a: &[A],
    b: &[B],
    out: &mut [f32],
    #[define(A)] _of_a: ElemType,
    #[define(B)] _of_b: ElemType,
) {
    if ABSOLUTE_POS < out.len() {
        out[ABSOLUTE_POS] = f32::cast_from(a[ABSOLUTE_POS]) + f32::cast_from(b[ABSOLUTE_POS]);
    }
}

/// Adds `part` to `total`.
#[cube(launch)]
pub(super) fn add<G: Float>(total: &mut [f32], part: &[G], #[define(G)] _float: ElemType) {
    if ABSOLUTE_POS < total.len() {
        total[ABSOLUTE_POS] += f32::cast_from(part[ABSOLUTE_POS]);
    }
}

/// Values rounded to a narrower type: to nearest, ties to even, on a device that rounds as the host.
#[cube(launch)]
pub(super) fn round<N: Float>(values: &[f32], out: &mut [N], #[define(N)] _float: ElemType) {
    if ABSOLUTE_POS < out.len() {
        out[ABSOLUTE_POS] = N::cast_from(values[ABSOLUTE_POS]);
    }
}

/// Sets every element.
#[cube(launch)]
pub(super) fn fill(out: &mut [f32], value: f32) {
    if ABSOLUTE_POS < out.len() {
        out[ABSOLUTE_POS] = value;
    }
}
