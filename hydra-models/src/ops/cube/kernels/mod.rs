//! The kernels, in CubeCL's language: each is compiled for the device that it is launched on.
//!
//! All are launched with checked accesses, so none needs `unsafe`. A row belongs to one cube, whose [`UNITS`] units sum
//! it in a fixed order; sums over rows are made by one unit in row order. No result depends on a device's schedule or
//! its number of units.
//!
//! `E` is the float type that tensors are stored in. Kernels widen inputs to `f32`, which is exact, and round outputs
//! once, to nearest; both are no-ops if `E` is `f32`.

pub(super) mod activation;
pub(super) mod attention;
pub(super) mod depthwise;
pub(super) mod dropout;
pub(super) mod embedding;
pub(super) mod head;
pub(super) mod nf4;
pub(super) mod norm;
pub(super) mod sums;

/// Units per cube.
pub(super) const UNITS: usize = 256;

/// The number of halvings that reduce [`UNITS`] numbers to one.
const HALVINGS: usize = UNITS.ilog2() as usize;
