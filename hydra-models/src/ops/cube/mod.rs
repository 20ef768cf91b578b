//! The ops on CubeCL's devices: kernels of ours between Burn's matrix products.
//!
//! All of them compute in `f32`, whatever type of float their tensors are stored in, and round what they give once;
//! the factors of a matrix product have that type too. Nothing is read back: what would stop a pass on the CPU, an
//! id beyond its table or a loss without a target, makes the result no number here.

mod attention;
mod depthwise;
mod dropout;
mod embedding;
mod gelu;
mod grouped;
mod head;
mod kernels;
mod linear;
mod matmul;
mod norm;
mod rms_norm;
mod swiglu;
mod tensors;

#[cfg(all(test, feature = "cube"))]
mod tests;

pub use tensors::supports;
