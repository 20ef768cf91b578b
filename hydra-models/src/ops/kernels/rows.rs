//! Products with few rows, as in generation: every element of the right side is read once, from where it is, without packing.
//!
//! The order of an element's sum depends on the number of terms, the layout of the right side and the processor alone, so
//! the bits of a row depend neither on the other rows nor on threads.

#![expect(
    clippy::needless_range_loop,
    reason = "loops over constant indices of small arrays are unrolled, and the arrays are registers"
)]

use super::{Mat, MatMut, Start, Write, product_by};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;
use std::ops::Range;

/// The rows that a pass over the right side computes.
const ROWS: usize = 8;

/// Terms that are added to the sums of some columns while these are in registers.
const TERMS: usize = 32;

/// Vectors of columns whose sums are in registers.
const VECTORS: usize = 2;

/// Columns of the output in a part of the work.
const PART: usize = 256;

/// `a @ b`, row-major, on the threads of the current pool.
///
/// # Panics
/// As [`matmul`].
#[track_caller]
pub(in crate::ops) fn product(a: Mat<'_>, b: Mat<'_>) -> Vec<f32> {
    product_by(Start::Nothing, [a.rows, a.cols, b.cols], |out, write| matmul(out, write, a, b))
}

/// `out = a @ b`, or adds that to `out`, on the threads of the current pool.
///
/// # Panics
/// If shapes do not match, or the rows of `a` are not contiguous, or neither rows nor columns of `b` are.
#[track_caller]
pub(in crate::ops) fn matmul(out: &mut MatMut<'_>, write: Write, a: Mat<'_>, b: Mat<'_>) {
    assert!(
        out.rows == a.rows && out.cols == b.cols && a.cols == b.rows,
        "[{}, {}] @ [{}, {}] is no [{}, {}]",
        a.rows,
        a.cols,
        b.rows,
        b.cols,
        out.rows,
        out.cols
    );
    let starts = (0..out.cols).step_by(PART);
    let parts = starts.zip(out.blocks_of_cols(PART)).collect::<Vec<_>>();
    parts.into_par_iter().for_each(|(start, mut out)| {
        let b = b.cols(start..start + out.cols);
        for first in (0..a.rows).step_by(ROWS) {
            let rows = first..(first + ROWS).min(a.rows);
            let (a, mut out) = (a.rows(rows.clone()), out.rows(rows));
            by_count(&mut out, write, a, b);
        }
    });
}

/// Calls the product for this number of rows, so that the sums of all rows and of some columns are in registers.
fn by_count(out: &mut MatMut<'_>, write: Write, a: Mat<'_>, b: Mat<'_>) {
    match a.rows {
        0 => {}
        1 => product_of::<1, 4>(out, write, a, b),
        2 => product_of::<2, 4>(out, write, a, b),
        3 => product_of::<3, 4>(out, write, a, b),
        4 => product_of::<4, 4>(out, write, a, b),
        5 => product_of::<5, 4>(out, write, a, b),
        6 => product_of::<6, 3>(out, write, a, b),
        7 => product_of::<7, 3>(out, write, a, b),
        _ => product_of::<ROWS, 3>(out, write, a, b),
    }
}

/// The product of `R` rows, by `C` columns if these are contiguous.
fn product_of<const R: usize, const C: usize>(out: &mut MatMut<'_>, write: Write, a: Mat<'_>, b: Mat<'_>) {
    let rows: [&[f32]; R] = std::array::from_fn(|row| a.row(row));
    if b.is_turned() {
        return pulp::Arch::new().dispatch(Dots::<R, C> { out, write, rows, columns: b.t() });
    }
    if write == Write::Set {
        (0..R).for_each(|row| out.row(row).fill(0.0));
    }
    pulp::Arch::new().dispatch(RowSums { out, rows, b });
}

/// Writes the products of some rows and of columns that are contiguous, or adds them to the output.
struct Dots<'a, 'b, const R: usize, const C: usize> {
    out: &'a mut MatMut<'b>,
    write: Write,
    rows: [&'a [f32]; R],
    /// A row for each column of the right side.
    columns: Mat<'a>,
}

impl<const R: usize, const C: usize> WithSimd for Dots<'_, '_, R, C> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        assert!(
            self.rows.iter().all(|row| row.len() == self.columns.cols) && self.out.cols == self.columns.rows
        );
        let whole = self.out.cols - self.out.cols % C;
        for first in (0..whole).step_by(C) {
            self.columns_from::<S, C>(simd, first);
        }
        for last in whole..self.out.cols {
            self.columns_from::<S, 1>(simd, last);
        }
    }
}

impl<const R: usize, const C: usize> Dots<'_, '_, R, C> {
    /// Those of `N` columns from `first` on.
    #[inline(always)]
    fn columns_from<S: Simd, const N: usize>(&mut self, simd: S, first: usize) {
        let terms = self.columns.cols;
        let columns: [&[f32]; N] = std::array::from_fn(|c| self.columns.row(first + c));
        let vectors = terms / S::F32_LANES;
        let mut sums = [[simd.splat_f32s(0.0); N]; R];
        for at in 0..vectors {
            // SAFETY: rows and columns have `terms` elements, which are at least as many as those of `vectors` vectors;
            // a vector has the size of its lanes and any bits are floats.
            let load = |from: &[f32]| unsafe {
                from.as_ptr().add(at * S::F32_LANES).cast::<S::f32s>().read_unaligned()
            };
            let mut column = [simd.splat_f32s(0.0); N];
            for c in 0..N {
                column[c] = load(columns[c]);
            }
            for r in 0..R {
                let x = load(self.rows[r]);
                for c in 0..N {
                    sums[r][c] = simd.mul_add_f32s(x, column[c], sums[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..N {
                let rest = vectors * S::F32_LANES..terms;
                let tail = self.rows[r][rest.clone()].iter().zip(&columns[c][rest]);
                let sum = tail.fold(simd.reduce_sum_f32s(sums[r][c]), |sum, (x, y)| sum + x * y);
                let out = &mut self.out.row(r)[first + c];
                *out = if self.write == Write::Set { sum } else { *out + sum };
            }
        }
    }
}

/// Adds the products of some rows and a matrix with contiguous rows to the output.
struct RowSums<'a, 'b, const R: usize> {
    out: &'a mut MatMut<'b>,
    rows: [&'a [f32]; R],
    b: Mat<'a>,
}

impl<const R: usize> WithSimd for RowSums<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let (rows, cols) = (self.b.rows, self.b.cols);
        assert!(self.rows.iter().all(|row| row.len() == rows) && self.out.cols == cols && self.out.rows == R);
        let vectors = cols / S::F32_LANES;
        let whole = vectors - vectors % VECTORS;
        for first in (0..rows).step_by(TERMS) {
            let terms = first..(first + TERMS).min(rows);
            for at in (0..whole).step_by(VECTORS) {
                self.add_terms::<S, VECTORS>(simd, terms.clone(), at);
            }
            for at in whole..vectors {
                self.add_terms::<S, 1>(simd, terms.clone(), at);
            }
            for (r, term) in (0..R).flat_map(|r| terms.clone().map(move |term| (r, term))) {
                let x = self.rows[r][term];
                let tail = self.out.row(r).iter_mut().zip(self.b.row(term)).skip(vectors * S::F32_LANES);
                tail.for_each(|(sum, y)| *sum = x.mul_add(*y, *sum));
            }
        }
    }
}

impl<const R: usize> RowSums<'_, '_, R> {
    /// Adds the products of some terms to `V` vectors of columns from the vector `at` on, which must exist.
    #[inline(always)]
    fn add_terms<S: Simd, const V: usize>(&mut self, simd: S, terms: Range<usize>, at: usize) {
        let (rows, b) = (self.rows, self.b);
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        for r in 0..R {
            let out = &S::as_simd_f32s(self.out.row(r)).0[at..at + V];
            sums[r].copy_from_slice(out);
        }
        for term in terms {
            let row = &S::as_simd_f32s(b.row(term)).0[at..at + V];
            for r in 0..R {
                // SAFETY: a row has as many elements as `b` has rows.
                let x = simd.splat_f32s(unsafe { *rows[r].get_unchecked(term) });
                for v in 0..V {
                    sums[r][v] = simd.mul_add_f32s(x, row[v], sums[r][v]);
                }
            }
        }
        for r in 0..R {
            let out = &mut S::as_mut_simd_f32s(self.out.row(r)).0[at..at + V];
            out.copy_from_slice(&sums[r]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::with_threads;
    use super::*;

    fn numbers(seed: u64, len: usize) -> Vec<f32> {
        let key = hydra_core::Key::new(seed);
        (0..len).map(|i| key.normal(i as u64) as f32).collect()
    }

    fn product(a: Mat<'_>, b: Mat<'_>, start: Option<f32>) -> Vec<f32> {
        let mut out = vec![start.unwrap_or(f32::NAN); a.rows * b.cols];
        let write = if start.is_some() { Write::Add } else { Write::Set };
        matmul(&mut MatMut::new(&mut out, a.rows, b.cols), write, a, b);
        out
    }

    #[test]
    fn products_are_exact_in_both_layouts() {
        for (m, k, n) in [(1, 1, 1), (3, 70, 5), (8, 576, 300), (9, 35, 257), (20, 130, 513)] {
            let (a, b) = (numbers(1, m * k), numbers(2, k * n));
            for turned in [false, true] {
                let right = if turned { Mat::new(&b, n, k).t() } else { Mat::new(&b, k, n) };
                let at = |l: usize, j: usize| f64::from(if turned { b[j * k + l] } else { b[l * n + j] });
                for start in [None, Some(1.5)] {
                    let found = product(Mat::new(&a, m, k), right, start);
                    for (i, found) in found.iter().enumerate() {
                        let terms = (0..k).map(|l| f64::from(a[i / n * k + l]) * at(l, i % n));
                        let expected = f64::from(start.unwrap_or(0.0)) + terms.sum::<f64>();
                        assert!((f64::from(*found) - expected).abs() < 1e-3, "{found} is not {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_bits_of_a_row_depend_neither_on_other_rows_nor_on_threads() {
        for (k, n) in [(65, 129), (576, 700), (100, 513)] {
            let (a, b) = (numbers(1, 21 * k), numbers(2, k * n));
            for turned in [false, true] {
                let right = if turned { Mat::new(&b, n, k).t() } else { Mat::new(&b, k, n) };
                let left = Mat::new(&a, 21, k);
                let all = with_threads(3, || product(left, right, None));
                for row in 0..21 {
                    let one = with_threads(1, || product(left.rows(row..row + 1), right, None));
                    assert_eq!(one, all[row * n..(row + 1) * n], "row {row}, {k}, {n}, {turned}");
                }
            }
        }
    }
}
