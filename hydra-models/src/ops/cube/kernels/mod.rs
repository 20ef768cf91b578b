//! The kernels, in CubeCL's language: each is compiled for the device it is launched on.
//!
//! All of them are launched with their accesses checked, so none needs `unsafe`. A row is one cube's, and its
//! sums are made by [`UNITS`] units in one order; what is summed over rows is summed by one unit in the rows'
//! order. No result depends on the schedule of a device, and none on the number of its units.

pub(super) mod activation;
pub(super) mod attention;
pub(super) mod dropout;
pub(super) mod embedding;
pub(super) mod head;
pub(super) mod norm;
pub(super) mod sums;

/// Units of a cube.
pub(super) const UNITS: usize = 256;

/// Halvings after which one of [`UNITS`] numbers is left.
const HALVINGS: usize = UNITS.ilog2() as usize;
