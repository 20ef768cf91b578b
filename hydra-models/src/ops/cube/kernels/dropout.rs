//! Dropout factors: those of `hydra_core::DropoutMask`, from the same draws.
//!
//! The generator uses 64-bit words, which not every device supports: here they are pairs of 32 bits, lower half first.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
const FIRST: u64 = 0xBF58_476D_1CE4_E5B9;
const SECOND: u64 = 0x94D0_49BB_1331_11EB;

/// A 64-bit number.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Word {
    low: u32,
    high: u32,
}

/// A mask as a kernel argument.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Draws {
    /// The generator's key.
    key_low: u32,
    key_high: u32,
    /// Draws below this are dropped.
    dropped: u32,
    /// The factor of kept elements.
    keep: f32,
}

#[cube]
fn add(a: &Word, b: &Word) -> Word {
    let low = a.low + b.low;
    let mut high = a.high + b.high;
    if low < a.low {
        high += 1u32;
    }
    Word { low, high }
}

#[cube]
fn mul(a: Word, #[comptime] b: u64) -> Word {
    let low = comptime!(b as u32);
    let high = comptime!((b >> 32) as u32);
    Word { low: a.low * low, high: u32::mul_hi(a.low, low) + a.low * high + a.high * low }
}

/// `z ^ (z >> by)`, for a shift by 1 to 31 bits.
#[cube]
fn fold(z: Word, #[comptime] by: u32) -> Word {
    let rest = comptime!(32 - by);
    Word { low: z.low ^ ((z.low >> by) | (z.high << rest)), high: z.high ^ (z.high >> by) }
}

/// The 64-bit product of two 32-bit numbers.
#[cube]
pub(super) fn widened(a: u32, b: u32) -> Word {
    Word { low: a * b, high: u32::mul_hi(a, b) }
}

/// The factor of the element at `first + offset`.
#[cube]
pub(super) fn factor_at(draws: &Draws, first: &Word, offset: u32) -> f32 {
    let index = add(first, &Word { low: offset, high: 0u32 });
    let counter = Word { low: (index.low >> 1u32) | (index.high << 31u32), high: index.high >> 1u32 };
    let z = add(&Word { low: draws.key_low, high: draws.key_high }, &mul(counter, GOLDEN));
    let z = mul(fold(z, 30u32), FIRST);
    let z = mul(fold(z, 27u32), SECOND);
    let z = fold(z, 31u32);
    let mut draw = z.low;
    if index.low % 2u32 == 1u32 {
        draw = z.high;
    }
    let mut factor = draws.keep;
    if draw < draws.dropped {
        factor = 0.0f32;
    }
    factor
}

/// The factor of the element at `index`, which has at most 32 bits because buffers have 32-bit addresses.
#[cube]
fn factor(draws: &Draws, index: usize) -> f32 {
    factor_at(draws, &Word { low: index as u32, high: 0u32 }, 0u32)
}

/// `x` times its factors.
#[cube(launch)]
pub(crate) fn drop_out<E: Float>(x: &[E], y: &mut [E], draws: Draws, #[define(E)] _float: ElemType) {
    if ABSOLUTE_POS < y.len() {
        y[ABSOLUTE_POS] = E::cast_from(f32::cast_from(x[ABSOLUTE_POS]) * factor(&draws, ABSOLUTE_POS));
    }
}

/// `residual` plus `x` times its factors.
#[cube(launch)]
pub(crate) fn drop_out_onto<E: Float>(
    residual: &[E],
    x: &[E],
    y: &mut [E],
    draws: Draws,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < y.len() {
        let term = f32::cast_from(x[ABSOLUTE_POS]) * factor(&draws, ABSOLUTE_POS);
        y[ABSOLUTE_POS] = E::cast_from(f32::cast_from(residual[ABSOLUTE_POS]) + term);
    }
}
