//! Vectorizable row arithmetic with an order of sums that no thread count changes.

/// The number of partial sums; element `i` of a block is added to sum `i % LANES`.
const LANES: usize = 16;

/// Partial sums are in `f32` within a block and in `f64` across blocks.
const BLOCK: usize = 1024;

/// Elements that one thread handles at a time in elementwise kernels.
pub(super) const ELEMENTS: usize = 1 << 14;

/// `e^x` within two units in the last place for `x` in -87..=88; `x` is clamped to that range, and NaN stays NaN.
///
/// Range reduction and polynomial of Cephes' `expf` (Moshier, 1992), without branches or calls, so that loops
/// vectorize.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding this leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let n = shifted - ROUND;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut y = 1.987_569_1e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        y = y * r + c;
    }
    let y = y * r * r + r + 1.0;
    y * f32::from_bits((exponent.wrapping_add(127) as u32) << 23)
}

/// The largest element that is not NaN; minus infinity if there is none.
#[inline(always)]
pub(super) fn max(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    rest.iter().chain(&lanes).copied().fold(f32::NEG_INFINITY, larger)
}

/// The `N` sums of `f(a, b)` over two rows of the same length.
#[inline(always)]
pub(super) fn sums<const N: usize>(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> [f32; N]) -> [f64; N] {
    let mut totals = [0.0; N];
    for (a, b) in a.chunks(BLOCK).zip(b.chunks(BLOCK)) {
        let mut lanes = [[0f32; LANES]; N];
        let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
        let (rest_a, rest_b) = (a.remainder(), b.remainder());
        for (a, b) in a.zip(b) {
            for l in 0..LANES {
                let terms = f(a[l], b[l]);
                for n in 0..N {
                    lanes[n][l] += terms[n];
                }
            }
        }
        for (l, (&a, &b)) in rest_a.iter().zip(rest_b).enumerate() {
            let terms = f(a, b);
            for n in 0..N {
                lanes[n][l] += terms[n];
            }
        }
        for (total, lanes) in totals.iter_mut().zip(lanes) {
            *total += lanes.iter().map(|&x| f64::from(x)).sum::<f64>();
        }
    }
    totals
}

/// The sum of `f(a, b)` over two rows of the same length.
#[inline(always)]
pub(super) fn sum2(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f64 {
    let [total] = sums(a, b, |a, b| [f(a, b)]);
    total
}

/// The sum of `f(x)` over a row.
#[inline(always)]
pub(super) fn sum(row: &[f32], f: impl Fn(f32) -> f32) -> f64 {
    sum2(row, row, |x, _| f(x))
}

/// Replaces each element `x` by `e^(x - shift)` and returns the sum.
#[inline(always)]
pub(super) fn exp_in_place(row: &mut [f32], shift: f32) -> f64 {
    for x in row.iter_mut() {
        *x = exp(*x - shift);
    }
    sum(row, |x| x)
}

/// The logarithm of the sum of the exponentials of a row.
pub(crate) fn log_sum_exp(row: &[f32]) -> f64 {
    super::kernels::vectorized(
        #[inline(always)]
        || {
            let largest = max(row);
            f64::from(largest) + sum(row, |x| exp(x - largest)).ln()
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut x = -86.9f32;
        while x < 87.9 {
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2.0 * f64::from(f32::EPSILON), "e^{x}: {error}");
            x += 0.001_7;
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(-1e30) < 1e-37 && exp(1e30).is_finite() && exp(f32::NAN).is_nan());
    }

    #[test]
    fn sums_and_maxima_take_every_element() {
        for n in [1, 15, 16, 17, 1023, 1025, 5000] {
            let row: Vec<f32> = (0..n).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
            let exact: f64 = row.iter().map(|&x| f64::from(x)).sum();
            assert_eq!(sum(&row, |x| x), exact);
            assert_eq!(max(&row), row.iter().copied().fold(f32::MIN, f32::max));
        }
    }
}
