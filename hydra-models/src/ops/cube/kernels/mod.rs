//! The kernels, in CubeCL's language: each is compiled for the device it is launched on.
//!
//! All of them are launched with their accesses checked, so none needs `unsafe`. A row is one cube's, and its
//! sums are made by [`UNITS`] units in one order; what is summed over rows is summed by one unit in the rows'
//! order. No result depends on the schedule of a device, and none on the number of its units.
//!
//! `E` is the type of float that tensors are stored in. What a kernel reads is widened to `f32`, which changes no
//! number, and what it writes is rounded once, to the nearest; where `E` is `f32` neither is anything.

pub(super) mod activation;
pub(super) mod attention;
pub(super) mod depthwise;
pub(super) mod dropout;
pub(super) mod embedding;
pub(super) mod head;
pub(super) mod norm;
pub(super) mod sums;

/// Units of a cube.
pub(super) const UNITS: usize = 256;

/// Halvings after which one of [`UNITS`] numbers is left.
const HALVINGS: usize = UNITS.ilog2() as usize;
