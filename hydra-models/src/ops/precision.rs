//! The precision of matrix products on CubeCL's devices; a CPU has one.

use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The numbers that matrix products of `f32` of this crate's ops multiply on CubeCL's devices; they add in
/// `f32`. Products of floats of 16 bits multiply those, which is exact, and add in `f32`, whatever is chosen.
/// Burn's own (those of the perceptron and the CNN) are not asked: on NVIDIA's cards they take TF32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// `f32`, as on the CPU.
    #[default]
    F32,
    /// TF32 with 10 bits of mantissa, where the device has units for it; `f32` elsewhere.
    Tf32,
}

static TF32: AtomicBool = AtomicBool::new(false);

/// Chooses the precision of the ops of this crate, in this process, from now on. To be called before anything is
/// trained: a recomputed forward has the bits of the first one only if nobody changed the precision in between.
pub fn set_precision(precision: Precision) {
    TF32.store(precision == Precision::Tf32, Relaxed);
}

/// The precision of matrix products.
#[cfg(feature = "cube")]
pub(super) fn precision() -> Precision {
    if TF32.load(Relaxed) { Precision::Tf32 } else { Precision::F32 }
}
