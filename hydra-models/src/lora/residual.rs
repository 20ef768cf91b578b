//! Subtracts initial adapters from base weights (PiSSA, OLoRA).
//!
//! PiSSA initializes adapters with the part of a weight that belongs to its largest singular values, OLoRA with the
//! part in the span of its first columns. PEFT subtracts that part from the base weight whenever it creates such an
//! adapter, even when it loads one from files. The base is therefore a function of the original weight, the rank and
//! the scale. Everything is computed in `f64`, in the same order for any number of threads, and rounded once.

use hydra_core::Key;
use rayon::prelude::*;

/// Problems up to this size are solved completely; larger ones until the requested vectors converge.
const WHOLE: usize = 256;
/// The residual of a converged vector, relative to the largest eigenvalue.
const TOLERANCE: f64 = 1e-13;
/// Columns per parallel work item.
const COLUMNS: usize = 512;

/// A matrix of `f32`, row by row.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    values: &'a [f32],
    columns: usize,
}

impl Matrix<'_> {
    fn rows(&self) -> usize {
        self.values.len() / self.columns
    }

    /// The product with a vector.
    fn times(&self, x: &[f64]) -> Vec<f64> {
        let row = |row: &[f32]| row.iter().zip(x).map(|(a, x)| f64::from(*a) * x).sum();
        self.values.par_chunks(self.columns).map(row).collect()
    }

    /// The product of the transpose with a vector.
    fn transposed_times(&self, x: &[f64]) -> Vec<f64> {
        let mut out = vec![0.0; self.columns];
        out.par_chunks_mut(COLUMNS).enumerate().for_each(|(chunk, out)| {
            for (row, x) in self.values.chunks(self.columns).zip(x) {
                let part = &row[chunk * COLUMNS..][..out.len()];
                out.iter_mut().zip(part).for_each(|(out, a)| *out += f64::from(*a) * x);
            }
        });
        out
    }
}

/// Subtracts the part of a weight that belongs to its `rank` largest singular values. The result for a transposed
/// weight is the transposed result.
pub(super) fn take_largest(weight: &mut [f32], columns: usize, rank: usize) {
    let matrix = Matrix { values: weight, columns };
    let tall = columns <= matrix.rows();
    let square = |x: &[f64]| match tall {
        true => matrix.transposed_times(&matrix.times(x)),
        false => matrix.times(&matrix.transposed_times(x)),
    };
    let vectors = largest(columns.min(matrix.rows()), rank, square);
    match tall {
        true => take_right(weight, columns, &vectors),
        false => take_left(weight, columns, &vectors, 1.0),
    }
}

/// Subtracts `scale` times the part of a weight in the span of its first columns.
pub(super) fn take_first_columns(weight: &mut [f32], columns: usize, rank: usize, scale: f64) {
    let mut basis: Vec<Vec<f64>> = Vec::new();
    for column in 0..rank {
        let mut vector: Vec<f64> = weight.chunks(columns).map(|row| f64::from(row[column])).collect();
        let length = norm(&vector);
        orthogonalize(&mut vector, &basis);
        if normalize(&mut vector) > f64::EPSILON * length {
            basis.push(vector);
        }
    }
    take_left(weight, columns, &basis, scale);
}

/// Subtracts from each row its projection onto the span of these orthonormal vectors.
fn take_right(weight: &mut [f32], columns: usize, basis: &[Vec<f64>]) {
    weight.par_chunks_mut(columns).for_each(|row| {
        let values: Vec<f64> = row.iter().map(|a| f64::from(*a)).collect();
        let mut left = values.clone();
        for vector in basis {
            let share = dot(&values, vector);
            left.iter_mut().zip(vector).for_each(|(left, v)| *left -= share * v);
        }
        row.iter_mut().zip(left).for_each(|(out, left)| *out = left as f32);
    });
}

/// Subtracts from each column `scale` times its projection onto the span of these orthonormal vectors.
fn take_left(weight: &mut [f32], columns: usize, basis: &[Vec<f64>], scale: f64) {
    let matrix = Matrix { values: weight, columns };
    let shares: Vec<Vec<f64>> = basis.iter().map(|vector| matrix.transposed_times(vector)).collect();
    weight.par_chunks_mut(columns).enumerate().for_each(|(at, row)| {
        for (column, out) in row.iter_mut().enumerate() {
            let part: f64 = basis.iter().zip(&shares).map(|(vector, share)| vector[at] * share[column]).sum();
            *out = (f64::from(*out) - scale * part) as f32;
        }
    });
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm(a: &[f64]) -> f64 {
    dot(a, a).sqrt()
}

/// Scales a vector to length one and returns its previous length; a zero vector stays zero.
fn normalize(vector: &mut [f64]) -> f64 {
    let length = norm(vector);
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x /= length);
    }
    length
}

/// Orthogonalizes a vector against orthonormal ones, twice to remove rounding errors.
fn orthogonalize(vector: &mut [f64], basis: &[Vec<f64>]) {
    for _ in 0..2 {
        for other in basis {
            let share = dot(vector, other);
            vector.iter_mut().zip(other).for_each(|(x, y)| *x -= share * y);
        }
    }
}

/// The eigenvectors of the largest eigenvalues of a symmetric positive semidefinite map of `size` dimensions, by
/// Lanczos iteration with full reorthogonalization (Golub and Van Loan, "Matrix Computations", section 10.3).
fn largest(size: usize, count: usize, map: impl Fn(&[f64]) -> Vec<f64>) -> Vec<Vec<f64>> {
    let mut basis: Vec<Vec<f64>> = Vec::new();
    let (mut diagonal, mut beside) = (Vec::new(), Vec::new());
    let mut next = drawn(size, &basis);
    let mut enough = if size <= WHOLE { size } else { (4 * count + 64).min(size) };
    loop {
        let mut product = map(&next);
        diagonal.push(dot(&product, &next));
        basis.push(next);
        orthogonalize(&mut product, &basis);
        let last = normalize(&mut product);
        let scale = diagonal.iter().fold(0.0, |most: f64, x: &f64| most.max(x.abs()));
        let ended = last <= f64::EPSILON * scale;
        beside.push(if ended { 0.0 } else { last });
        if basis.len() >= enough {
            let (values, vectors) = tridiagonal(&diagonal, &beside);
            let mut order: Vec<usize> = (0..values.len()).collect();
            order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
            order.truncate(count);
            let missing = |at: &usize| last * vectors[*at].last().map_or(0.0, |x| x.abs());
            if basis.len() == size || order.iter().map(missing).all(|rest| rest <= TOLERANCE * scale) {
                return order.iter().map(|at| combined(&basis, &vectors[*at])).collect();
            }
            enough = (enough + enough / 2).min(size);
        }
        // After exhausting an invariant subspace, the iteration continues in its orthogonal complement.
        next = if ended { drawn(size, &basis) } else { product };
    }
}

/// A deterministic vector orthogonal to these.
fn drawn(size: usize, basis: &[Vec<f64>]) -> Vec<f64> {
    let key = Key::new(0).fold(basis.len() as u64);
    let mut vector: Vec<f64> = (0..size as u64).map(|i| key.normal(i)).collect();
    orthogonalize(&mut vector, basis);
    normalize(&mut vector);
    vector
}

fn combined(basis: &[Vec<f64>], shares: &[f64]) -> Vec<f64> {
    let mut out = vec![0.0; basis[0].len()];
    for (vector, share) in basis.iter().zip(shares) {
        out.iter_mut().zip(vector).for_each(|(out, x)| *out += share * x);
    }
    normalize(&mut out);
    out
}

/// The eigenvalues and eigenvectors of a symmetric tridiagonal matrix, by the implicit QL method (Press et al., "Numerical
/// Recipes", section 11.4).
fn tridiagonal(diagonal: &[f64], beside: &[f64]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let n = diagonal.len();
    let (mut d, mut e) = (diagonal.to_vec(), beside.to_vec());
    e[n - 1] = 0.0;
    let mut vectors: Vec<Vec<f64>> =
        (0..n).map(|at| (0..n).map(|i| f64::from(u8::from(i == at))).collect()).collect();
    for l in 0..n {
        loop {
            let small = |m: &usize| e[*m].abs() <= f64::EPSILON * (d[*m].abs() + d[*m + 1].abs());
            let m = (l..n - 1).find(small).unwrap_or(n - 1);
            if m == l {
                break;
            }
            turn(&mut d, &mut e, &mut vectors, l, m);
        }
    }
    (d, vectors)
}

/// One sweep of rotations from `m` down to `l`.
fn turn(d: &mut [f64], e: &mut [f64], vectors: &mut [Vec<f64>], l: usize, m: usize) {
    let g = (d[l + 1] - d[l]) / (2.0 * e[l]);
    let mut g = d[m] - d[l] + e[l] / (g + g.hypot(1.0).copysign(g));
    let (mut s, mut c, mut p) = (1.0, 1.0, 0.0);
    for i in (l..m).rev() {
        let (f, b) = (s * e[i], c * e[i]);
        let r = f.hypot(g);
        e[i + 1] = r;
        if r == 0.0 {
            d[i + 1] -= p;
            e[m] = 0.0;
            return;
        }
        (s, c) = (f / r, g / r);
        g = d[i + 1] - p;
        let r = (d[i] - g) * s + 2.0 * c * b;
        p = s * r;
        d[i + 1] = g + p;
        g = c * r - b;
        let (low, high) = vectors.split_at_mut(i + 1);
        for (a, b) in low[i].iter_mut().zip(&mut high[0]) {
            (*a, *b) = (c * *a - s * *b, s * *a + c * *b);
        }
    }
    d[l] -= p;
    e[l] = g;
    e[m] = 0.0;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(seed: u64, rows: usize, columns: usize) -> Vec<f32> {
        let key = Key::new(seed);
        (0..(rows * columns) as u64).map(|i| key.normal(i) as f32).collect()
    }

    /// A sum of outer products of left and right vectors with these singular values.
    fn with_values(rows: usize, columns: usize, values: &[f64]) -> Vec<f32> {
        let basis = |seed: u64, size: usize| {
            let mut basis: Vec<Vec<f64>> = Vec::new();
            for at in 0..values.len() as u64 {
                let mut vector: Vec<f64> =
                    (0..size as u64).map(|i| Key::new(seed).fold(at).normal(i)).collect();
                orthogonalize(&mut vector, &basis);
                normalize(&mut vector);
                basis.push(vector);
            }
            basis
        };
        let (left, right) = (basis(1, rows), basis(2, columns));
        let element = |i: usize| {
            let parts = left.iter().zip(&right).zip(values);
            parts.map(|((l, r), value)| value * l[i / columns] * r[i % columns]).sum::<f64>() as f32
        };
        (0..rows * columns).map(element).collect()
    }

    fn distance(a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn what_is_left_has_the_smaller_singular_values() {
        for (rows, columns) in [(12, 7), (7, 12), (9, 9), (400, 300), (300, 400)] {
            let values = [5.0, 4.0, 4.0, 1.5, 1.0, 0.5];
            let mut weight = with_values(rows, columns, &values);
            take_largest(&mut weight, columns, 4);
            let expected = with_values(rows, columns, &[0.0, 0.0, 0.0, 0.0, 1.0, 0.5]);
            assert!(distance(&weight, &expected) < 1e-6, "{rows} by {columns}");
        }
    }

    #[test]
    fn a_weight_and_its_transpose_lose_the_same() {
        let (mut weight, mut turned) = (random(3, 20, 31), vec![0.0; 20 * 31]);
        (0..20 * 31).for_each(|i| turned[i % 31 * 20 + i / 31] = weight[i]);
        take_largest(&mut weight, 31, 5);
        take_largest(&mut turned, 20, 5);
        let back: Vec<f32> = (0..20 * 31).map(|i| turned[i % 31 * 20 + i / 31]).collect();
        assert!(distance(&weight, &back) < 1e-6);
    }

    #[test]
    fn what_is_left_does_not_depend_on_threads() {
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut weight = random(4, 700, 600);
            pool.install(|| take_largest(&mut weight, 600, 8));
            weight
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn weights_without_values_lose_none() {
        for rank in [1, 3] {
            let mut zero = vec![0.0; 24];
            take_largest(&mut zero, 4, rank);
            take_first_columns(&mut zero, 4, rank, 2.0);
            assert_eq!(zero, [0.0; 24]);
        }
    }

    #[test]
    fn the_span_of_all_columns_is_everything() {
        let weight = random(5, 9, 4);
        let (mut one, mut half) = (weight.clone(), weight.clone());
        take_first_columns(&mut one, 4, 4, 1.0);
        take_first_columns(&mut half, 4, 2, 0.5);
        assert!(one.iter().all(|x| x.abs() < 1e-6));
        for (row, expected) in half.chunks(4).zip(weight.chunks(4)) {
            assert!((row[0] - 0.5 * expected[0]).abs() < 1e-6 && (row[1] - 0.5 * expected[1]).abs() < 1e-6);
        }
    }
}
