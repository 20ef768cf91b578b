//! The precision of matrix products.

use super::kernels::bf16;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The precision in which this crate's ops multiply `f32` matrices on CubeCL devices; sums are in `f32`. Products of
/// 16-bit floats are always exact with sums in `f32`. This does not affect Burn's own products (in the perceptron and
/// the CNN), which use TF32 on NVIDIA cards. A CPU always uses `f32`, and [`bf16_products`] for `bf16`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// `f32`, as on the CPU.
    #[default]
    F32,
    /// TF32 with a 10-bit mantissa if the device supports it, else `f32`.
    Tf32,
}

static TF32: AtomicBool = AtomicBool::new(false);

/// Sets the precision of this crate's ops in this process. Call it before any training: a recomputed forward has the
/// bits of the first one only if the precision does not change in between.
pub fn set_precision(precision: Precision) {
    TF32.store(precision == Precision::Tf32, Relaxed);
}

/// What computes this crate's products of `bf16` matrices on the CPU: `AVX-512 BF16`, the processor's instruction, or
/// `emulated`, if it has none or one that computes other bits. Both compute the same bits.
pub fn bf16_products() -> &'static str {
    if bf16::uses_instruction() { "AVX-512 BF16" } else { "emulated" }
}

/// The precision of matrix products.
#[cfg(feature = "cube")]
pub(super) fn precision() -> Precision {
    if TF32.load(Relaxed) { Precision::Tf32 } else { Precision::F32 }
}
