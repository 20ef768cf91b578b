//! The inverse DCT of a block, as libjpeg-turbo's accurate version computes it in 16-bit SIMD.

/// The zigzag order, padded for indices past the end in damaged files.
pub(super) const ORDER: [u8; 80] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7,
    14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39,
    46, 53, 60, 61, 54, 47, 55, 62, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
];

/// Fractional bits of the constants, and of the first pass's results.
const BITS: u32 = 13;
const KEPT: u32 = 2;

/// The 64 samples of a block; `None` if the coefficients exceed those of any image.
pub(super) fn samples(block: &[i16], quantizer: &[u16; 64]) -> Option<[u8; 64]> {
    let mut rows = [0_i32; 64];
    for column in 0..8 {
        let value = |row: usize| i32::from(block[8 * row + column]) * i32::from(quantizer[8 * row + column]);
        let values = pass(std::array::from_fn(value), BITS - KEPT)?;
        for (row, value) in values.into_iter().enumerate() {
            rows[8 * row + column] = value;
        }
    }
    let mut samples = [0; 64];
    for (row, out) in rows.as_chunks::<8>().0.iter().zip(samples.as_chunks_mut::<8>().0) {
        *out = pass(*row, BITS + KEPT + 3)?.map(|value| (value.clamp(-128, 127) + 128) as u8);
    }
    Some(samples)
}

/// A one-dimensional pass over eight values, rounded by `shift` bits (Loeffler, Ligtenberg and Moschytz, 1989); `None`
/// if libjpeg-turbo's 16 bits would overflow.
fn pass(x: [i32; 8], shift: u32) -> Option<[i32; 8]> {
    let largest = i32::from(i16::MAX);
    let fits = |value: i32| (-largest..=largest).contains(&value);
    let sums = [x[0] + x[4], x[0] - x[4], x[7] + x[3], x[5] + x[1]];
    if !x.into_iter().chain(sums).all(fits) {
        return None;
    }
    let z1 = (x[2] + x[6]) * 4433;
    let (even2, even3) = (z1 - x[6] * 15137, z1 + x[2] * 6270);
    let (even0, even1) = (sums[0] << BITS, sums[1] << BITS);
    let even = [even0 + even3, even1 + even2, even1 - even2, even0 - even3];
    let z5 = (sums[2] + sums[3]) * 9633;
    let (z1, z2) = ((x[7] + x[1]) * -7373, (x[5] + x[3]) * -20995);
    let (z3, z4) = (z5 - sums[2] * 16069, z5 - sums[3] * 3196);
    let odd = [x[1] * 12299 + z1 + z4, x[3] * 25172 + z2 + z3, x[5] * 16819 + z2 + z4, x[7] * 2446 + z1 + z3];
    let round = |value: i32| value.wrapping_add(1 << (shift - 1)) >> shift;
    let values = std::array::from_fn(|at| match at {
        0..4 => round(even[at].wrapping_add(odd[at])),
        _ => round(even[7 - at].wrapping_sub(odd[7 - at])),
    });
    values.into_iter().all(fits).then_some(values)
}
