//! The ops on CubeCL devices: custom kernels between Burn's matrix products.
//!
//! All compute in `f32` for any stored float type and round results once; the factors of a matrix product have the
//! stored type too. Nothing but the positions of rows of several examples is read back: conditions that panic on the CPU, an out-of-range id or a loss without a
//! target, make the result NaN here.

mod attention;
mod batch_norm;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
mod cuda;
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
mod segments;
mod swiglu;
mod tensors;

#[cfg(all(test, feature = "cube"))]
mod tests;

pub use matmul::products_library;
pub use tensors::supports;
