//! Matrix products on slices, and loops compiled for the processor's vector instructions.
//!
//! The only module of this crate with `unsafe` code: matrices are pointers with strides whose bounds are checked at
//! construction, so that several threads can write columns of one buffer.

pub(super) mod bf16;
pub(super) mod nf4;
pub(super) mod rows;

use super::math::ELEMENTS;
use gemm::Parallelism;
use rayon::prelude::*;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Products with fewer multiplications run on the calling thread.
const SPREAD_FROM: usize = 1 << 18;

/// Runs `f` compiled for the widest vectors of the current processor.
///
/// This applies only to code inlined into `f`, so a body of some length is a `for` loop: the closure of a `for_each` may stay a
/// function of its own, compiled for any processor. Operations are neither contracted nor reordered, so the result has the
/// same bits as `f` itself.
#[inline]
pub(super) fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// A read-only matrix with arbitrary row and column strides: of floats, or of the bits of 16-bit floats.
#[derive(Clone, Copy)]
pub(super) struct Mat<'a, T = f32> {
    first: *const T,
    rows: usize,
    cols: usize,
    /// Elements from one row to the next.
    row_stride: usize,
    /// Elements from one column to the next.
    col_stride: usize,
    data: PhantomData<&'a [T]>,
}

// SAFETY: a `Mat` stands for a shared borrow of elements, which threads may share and send if they may the elements.
unsafe impl<T: Sync> Send for Mat<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mat<'_, T> {}

impl<'a, T: Copy> Mat<'a, T> {
    /// The `[rows, cols]` in row-major `data`.
    #[track_caller]
    pub(super) fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "a matrix [{rows}, {cols}] has as many elements");
        Self { first: data.as_ptr(), rows, cols, row_stride: cols, col_stride: 1, data: PhantomData }
    }

    /// A range of columns.
    #[track_caller]
    pub(super) fn cols(self, cols: Range<usize>) -> Self {
        assert!(cols.start <= cols.end && cols.end <= self.cols, "columns {cols:?} of {}", self.cols);
        let skipped = if self.rows == 0 || cols.is_empty() { 0 } else { cols.start * self.col_stride };
        // SAFETY: an element of the first row, or the first of all.
        let first = unsafe { self.first.add(skipped) };
        Self { first, cols: cols.len(), ..self }
    }

    /// A range of rows.
    #[track_caller]
    pub(super) fn rows(self, rows: Range<usize>) -> Self {
        self.t().cols(rows).t()
    }

    /// The transpose.
    pub(super) fn t(self) -> Self {
        let Self { rows, cols, row_stride, col_stride, .. } = self;
        Self { rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride, ..self }
    }

    /// Returns whether columns instead of rows are contiguous.
    fn is_turned(&self) -> bool {
        self.row_stride == 1 && self.col_stride > 1
    }

    /// A row, which must be contiguous.
    #[track_caller]
    pub(super) fn row(&self, row: usize) -> &'a [T] {
        assert!(row < self.rows && self.col_stride == 1);
        // SAFETY: the row is within the data, which is borrowed for 'a.
        unsafe { std::slice::from_raw_parts(self.first.add(row * self.row_stride), self.cols) }
    }
}

/// A writable matrix whose rows are contiguous and do not overlap.
pub(super) struct MatMut<'a, T = f32> {
    first: *mut T,
    rows: usize,
    cols: usize,
    row_stride: usize,
    data: PhantomData<&'a mut [T]>,
}

// SAFETY: a `MatMut` stands for an exclusive borrow of its own elements.
unsafe impl<T: Send> Send for MatMut<'_, T> {}

impl<'a, T> MatMut<'a, T> {
    /// The `[rows, cols]` in row-major `data`.
    #[track_caller]
    pub(super) fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "a matrix [{rows}, {cols}] has as many elements");
        Self { first: data.as_mut_ptr(), rows, cols, row_stride: cols, data: PhantomData }
    }

    /// Splits it into blocks of `width` columns, from the left.
    #[track_caller]
    pub(super) fn split_cols(self, width: usize) -> Vec<MatMut<'a, T>> {
        assert!(width > 0 && self.cols.is_multiple_of(width), "{} columns in blocks of {width}", self.cols);
        let block = |start| {
            // SAFETY: the block starts within the first row (the matrix has rows, or nothing is read).
            let first = if self.rows == 0 { self.first } else { unsafe { self.first.add(start) } };
            MatMut { first, cols: width, data: PhantomData, ..self }
        };
        (0..self.cols).step_by(width).map(block).collect()
    }

    /// The number of rows.
    pub(super) fn len_rows(&self) -> usize {
        self.rows
    }

    /// Splits it into blocks of `width` columns, from the left; the last one may be narrower.
    fn blocks_of_cols(&mut self, width: usize) -> Vec<MatMut<'_, T>> {
        let block = |start: usize| start..self.cols.min(start + width);
        let blocks: Vec<_> = (0..self.cols).step_by(width).map(block).collect();
        self.apart(&blocks)
    }

    /// Mutable views of ranges of columns, which ascend and do not overlap.
    #[track_caller]
    fn apart(&mut self, ranges: &[Range<usize>]) -> Vec<MatMut<'_, T>> {
        let ends = ranges.iter().scan(0, |end, range| Some(std::mem::replace(end, range.end)));
        let fits = |(range, end): (&Range<usize>, usize)| end <= range.start && range.end <= self.cols;
        assert!(ranges.iter().zip(ends).all(fits), "columns {ranges:?} of {}", self.cols);
        let view = |range: &Range<usize>| {
            let skipped = if self.rows == 0 || range.is_empty() { 0 } else { range.start };
            // SAFETY: an element of the first row, or the first of all.
            let first = unsafe { self.first.add(skipped) };
            MatMut { first, cols: range.len(), data: PhantomData, ..*self }
        };
        ranges.iter().map(view).collect()
    }

    /// A mutable view of a range of columns.
    #[track_caller]
    pub(super) fn cols(&mut self, cols: Range<usize>) -> MatMut<'_, T> {
        assert!(cols.start <= cols.end && cols.end <= self.cols, "columns {cols:?} of {}", self.cols);
        let skipped = if self.rows == 0 || cols.is_empty() { 0 } else { cols.start };
        // SAFETY: an element of the first row, or the first of all.
        let first = unsafe { self.first.add(skipped) };
        MatMut { first, cols: cols.len(), data: PhantomData, ..*self }
    }

    /// A mutable view of a range of rows.
    #[track_caller]
    pub(super) fn rows(&mut self, rows: Range<usize>) -> MatMut<'_, T> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let skipped = if rows.is_empty() { 0 } else { rows.start * self.row_stride };
        // SAFETY: the first element of a row that exists, or the first of all.
        let first = unsafe { self.first.add(skipped) };
        MatMut { first, rows: rows.len(), data: PhantomData, ..*self }
    }

    /// A row.
    #[track_caller]
    pub(super) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows);
        // SAFETY: the row is within the data, which is borrowed exclusively; rows do not overlap.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(row * self.row_stride), self.cols) }
    }
}

/// How a product treats the content of the output.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Write {
    /// Overwrites it.
    Set,
    /// Adds to it.
    Add,
}

/// `out = factor * a @ b`, or adds that to `out`, on the threads of the current pool.
///
/// The order of every sum depends on the shapes and the processor alone.
///
/// # Panics
/// If shapes do not match.
#[track_caller]
pub(super) fn matmul(out: &mut MatMut<'_>, write: Write, factor: f32, a: Mat<'_>, b: Mat<'_>) {
    if out.rows < TURN_FROM || b.rows == 0 || !b.is_turned() || !transposes_in_registers() {
        let threads = if spreads(out, a) { Parallelism::Rayon(0) } else { Parallelism::None };
        return matmul_on(out, write, factor, a, b, threads);
    }
    assert_eq!(out.cols, b.cols, "a product has as many columns as its right side");
    matmul_by_panels((out, write, factor), a, b.rows, |turned, cols, threads| {
        transpose_into(turned, b.cols(cols.clone()).t(), threads);
        Mat::new(turned, b.rows, cols.len())
    });
}

/// Whether a product runs on several threads.
fn spreads(out: &MatMut<'_>, a: Mat<'_>) -> bool {
    out.rows * out.cols * a.cols >= SPREAD_FROM
}

/// [`matmul`] with a right side of `terms` rows that is made in panels of columns: `right` writes the columns of a range into a
/// reused vector, on this number of threads. If there are enough columns, each thread makes the panels of its own, and waits for
/// no other thread until the end; otherwise all of them compute a panel together.
#[track_caller]
fn matmul_by_panels(
    (out, write, factor): (&mut MatMut<'_>, Write, f32),
    a: Mat<'_>,
    terms: usize,
    right: impl for<'p> Fn(&'p mut Vec<f32>, Range<usize>, usize) -> Mat<'p> + Sync,
) {
    let threads = threads_here();
    if threads == 1 || out.cols < threads * TURNED || !spreads(out, a) {
        let (spread, mut panel) = (spreads(out, a), Vec::new());
        let parallelism = if spread { Parallelism::Rayon(0) } else { Parallelism::None };
        for cols in panels(out.cols, turned_cols(terms, threads)) {
            let right = right(&mut panel, cols.clone(), threads);
            matmul_on(&mut out.cols(cols), write, factor, a, right, parallelism);
        }
        return;
    }
    let width = own_cols(terms, threads);
    let cols = out.cols;
    let start = |thread| if thread == threads { cols } else { thread * cols / threads / TILE * TILE };
    let own: Vec<_> = (0..threads).map(|thread| start(thread)..start(thread + 1)).collect();
    out.apart(&own).into_par_iter().zip(&own).for_each(|(mut out, own)| {
        let mut panel = Vec::new();
        for cols in panels(own.len(), width) {
            let right = right(&mut panel, own.start + cols.start..own.start + cols.end, 1);
            matmul_on(&mut out.cols(cols), write, factor, a, right, Parallelism::None);
        }
    });
}

/// The number of columns with `rows` rows that a thread transposes at a time, if each has its own columns.
fn own_cols(rows: usize, threads: usize) -> usize {
    (MOST_TURNED / (threads * rows).max(1) / NARROW * NARROW).clamp(NARROW, TURNED)
}

/// The number of threads in the current pool. It determines how much is transposed at a time, but no sum, because no
/// sum extends over several columns.
#[expect(clippy::disallowed_methods, reason = "the assignment of columns to threads affects no sum")]
fn threads_here() -> usize {
    rayon::current_num_threads()
}

/// The number of rows of a product from which a transposed right-hand side is transposed in memory first: packing it
/// takes longer than that.
const TURN_FROM: usize = 128;

/// Columns of a right-hand side that each thread transposes at a time: they are still in cache when the product packs
/// them.
const TURNED: usize = 192;

/// The least number of columns that a thread transposes at a time: those of one tile of a product.
const NARROW: usize = 64;

/// Maximum elements that are transposed at a time if they exceed [`TURNED`] columns.
const MOST_TURNED: usize = 1 << 22;

/// The number of columns with `rows` rows that are transposed at a time, a multiple of [`TURNED`].
fn turned_cols(rows: usize, threads: usize) -> usize {
    TURNED * threads.min(MOST_TURNED / (TURNED * rows).max(1)).max(1)
}

/// Panels of `width` columns, the last up to twice as wide: no panel is so narrow that its products use other
/// instructions.
fn panels(cols: usize, width: usize) -> impl Iterator<Item = Range<usize>> {
    let panels = (cols / width).max(1);
    (0..panels).map(move |i| i * width..if i + 1 == panels { cols } else { (i + 1) * width })
}

/// [`matmul`] on the calling thread.
#[track_caller]
pub(super) fn matmul_here(out: &mut MatMut<'_>, write: Write, factor: f32, a: Mat<'_>, b: Mat<'_>) {
    matmul_on(out, write, factor, a, b, Parallelism::None);
}

#[track_caller]
fn matmul_on(out: &mut MatMut<'_>, write: Write, factor: f32, a: Mat<'_>, b: Mat<'_>, threads: Parallelism) {
    let (m, n, k) = (out.rows, out.cols, a.cols);
    assert!(
        a.rows == m && b.cols == n && b.rows == k,
        "[{}, {k}] @ [{}, {}] is no [{m}, {n}]",
        a.rows,
        b.rows,
        b.cols
    );
    if m == 0 || n == 0 {
        return;
    }
    let stride = |s: usize| s as isize;
    // SAFETY: the three matrices were made from slices that hold all their elements; the output is borrowed
    // exclusively, so it overlaps neither of the others.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.first,
            1,
            stride(out.row_stride),
            write == Write::Add,
            a.first,
            stride(a.col_stride),
            stride(a.row_stride),
            b.first,
            stride(b.col_stride),
            stride(b.row_stride),
            1.0,
            factor,
            false,
            false,
            false,
            threads,
        );
    }
}

/// The side of the tiles that are transposed in registers.
const TILE: usize = 16;

/// Transposes a row-major matrix into a reused vector, on this number of threads.
fn transpose_into(out: &mut Vec<f32>, x: Mat<'_>, threads: usize) {
    assert_eq!(x.col_stride, 1, "rows have their elements side by side");
    let (rows, cols) = (x.rows, x.cols);
    out.clear();
    out.reserve(rows * cols);
    let room = &mut out.spare_capacity_mut()[..rows * cols];
    // A part for each thread, of whole tiles; every element is written once.
    let part = cols.div_ceil(threads).next_multiple_of(TILE);
    room.par_chunks_mut((part * rows).max(1)).enumerate().for_each(|(i, out)| {
        let cols = i * part..cols.min((i + 1) * part);
        transpose_panel(&mut MatMut::new(out, cols.len(), rows), x.cols(cols));
    });
    // SAFETY: each panel has written all its elements.
    unsafe { out.set_len(rows * cols) };
}

/// Writes every element of `out`, the transpose of `x`.
fn transpose_panel(out: &mut MatMut<'_, MaybeUninit<f32>>, x: Mat<'_>) {
    assert_eq!([out.rows, out.cols], [x.cols, x.rows], "a transpose has as many elements");
    let whole = |n: usize| if transposes_in_registers() { n / TILE * TILE } else { 0 };
    let (rows, cols) = (whole(x.rows), whole(x.cols));
    transpose_tiles(out, x, rows, cols);
    for (i, j) in (0..x.rows).flat_map(|i| (if i < rows { cols } else { 0 }..x.cols).map(move |j| (i, j))) {
        out.row(j)[i].write(x.row(i)[j]);
    }
}

/// Returns whether the processor has the required vectors. Without them, `gemm` packs faster than loops transpose.
fn transposes_in_registers() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Transposes the first `rows` and `cols`, multiples of [`TILE`]; returns without effect if the processor lacks the
/// vectors.
#[cfg(target_arch = "x86_64")]
fn transpose_tiles(out: &mut MatMut<'_, MaybeUninit<f32>>, x: Mat<'_>, rows: usize, cols: usize) {
    assert!(rows == 0 || transposes_in_registers());
    assert!(rows <= x.rows.min(out.cols) && cols <= x.cols.min(out.rows) && x.col_stride == 1);
    assert!(rows.is_multiple_of(TILE) && cols.is_multiple_of(TILE));
    // Along the rows, in memory order.
    for (i, j) in (0..rows).step_by(TILE).flat_map(|i| (0..cols).step_by(TILE).map(move |j| (i, j))) {
        // SAFETY: the processor has the instructions; the tile lies within the matrix and its transpose.
        unsafe {
            let from = x.first.add(i * x.row_stride + j);
            let to = out.first.add(j * out.row_stride + i).cast::<f32>();
            transpose_tile(from, x.row_stride, to, out.row_stride);
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn transpose_tiles(_: &mut MatMut<'_, MaybeUninit<f32>>, _: Mat<'_>, _: usize, _: usize) {}

/// Transposes one tile in registers: pairs of rows are interleaved, then pairs of pairs, then quarters.
///
/// # Safety
/// `from` must be good for reading [`TILE`] rows of as many floats, `from_stride` apart, and `to` for writing
/// them, `to_stride` apart.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn transpose_tile(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
    use std::arch::x86_64::*;
    // SAFETY: the caller's promise.
    let r: [__m512; TILE] = std::array::from_fn(|i| unsafe { _mm512_loadu_ps(from.add(i * from_stride)) });
    let mut u = r;
    for g in (0..TILE).step_by(4) {
        let pair = |lo: __m512, hi: __m512| (_mm512_castps_pd(lo), _mm512_castps_pd(hi));
        let (a, b) = pair(_mm512_unpacklo_ps(r[g], r[g + 1]), _mm512_unpacklo_ps(r[g + 2], r[g + 3]));
        let (c, d) = pair(_mm512_unpackhi_ps(r[g], r[g + 1]), _mm512_unpackhi_ps(r[g + 2], r[g + 3]));
        u[g] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        u[g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        u[g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
        u[g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
    }
    for c in 0..4 {
        let even = |a, b| _mm512_shuffle_f32x4::<0x88>(a, b);
        let odd = |a, b| _mm512_shuffle_f32x4::<0xdd>(a, b);
        let (x0, x1) = (even(u[c], u[4 + c]), even(u[8 + c], u[12 + c]));
        let (x2, x3) = (odd(u[c], u[4 + c]), odd(u[8 + c], u[12 + c]));
        for (lane, column) in [even(x0, x1), even(x2, x3), odd(x0, x1), odd(x2, x3)].into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { _mm512_storeu_ps(to.add((4 * lane + c) * to_stride), column) };
        }
    }
}

/// The addend of a product.
#[derive(Clone, Copy)]
pub(super) enum Start<'a, T = f32> {
    /// None.
    Nothing,
    /// One row, added to every row.
    Rows(&'a [T]),
    /// A matrix of the product's shape.
    Matrix(&'a [T]),
    /// A matrix of the product's shape, and a row added to every row.
    Sum(&'a [T], &'a [T]),
}

/// `start + a @ b`, row-major, on the threads of the current pool.
///
/// # Panics
/// If shapes do not match.
#[track_caller]
pub(super) fn product(start: Start<'_>, a: Mat<'_>, b: Mat<'_>) -> Vec<f32> {
    product_by(start, [a.rows, a.cols, b.cols], |out, write| matmul(out, write, 1.0, a, b))
}

/// The start plus a product of this shape, `[rows, terms, columns]`, that `matmul` writes, or adds to what is there.
#[track_caller]
fn product_by(start: Start<'_>, shape: [usize; 3], matmul: impl FnOnce(&mut MatMut<'_>, Write)) -> Vec<f32> {
    let [rows, _, cols] = shape;
    let (mut out, keep) = match start {
        Start::Nothing => (Vec::new(), Keep::Nothing),
        Start::Rows(row) => (filled_rows(rows, cols, |_, out| _ = out.write_copy_of_slice(row)), Keep::Sum),
        Start::Matrix(sum) => {
            assert!(sum.len() == rows * cols, "a product [{rows}, {cols}] is added to");
            (sum.to_vec(), Keep::Sum)
        }
        Start::Sum(sum, row) => {
            assert!(sum.len() == rows * cols && row.len() == cols, "a product [{rows}, {cols}] is added to");
            let add = |i: usize, out: &mut [MaybeUninit<f32>]| {
                let sums = sum[i * cols..(i + 1) * cols].iter().zip(row);
                out.iter_mut().zip(sums).for_each(|(out, (a, b))| _ = out.write(a + b));
            };
            (filled_rows(rows, cols, add), Keep::Sum)
        }
    };
    write_into(&mut out, keep, shape, matmul);
    out
}

/// How [`product_into`] treats the content of the vector.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// Replaces it with the product.
    Nothing,
    /// Adds the product to it, element by element.
    Sum,
}

/// `a @ b`, row-major, into a reused vector, on the threads of the current pool.
///
/// # Panics
/// If shapes do not match.
#[track_caller]
pub(super) fn product_into(out: &mut Vec<f32>, keep: Keep, a: Mat<'_>, b: Mat<'_>) {
    write_into(out, keep, [a.rows, a.cols, b.cols], |out, write| matmul(out, write, 1.0, a, b));
}

/// Makes room for a product of this shape, `[rows, terms, columns]`, that `matmul` writes, or adds to what is there.
#[track_caller]
fn write_into(
    out: &mut Vec<f32>,
    keep: Keep,
    [rows, terms, cols]: [usize; 3],
    matmul: impl FnOnce(&mut MatMut<'_>, Write),
) {
    assert!(terms > 0, "a product sums over at least one element");
    if keep == Keep::Sum {
        return matmul(&mut MatMut::new(out, rows, cols), Write::Add);
    }
    out.clear();
    out.reserve(rows * cols);
    let first = out.spare_capacity_mut().as_mut_ptr().cast();
    let mut new = MatMut { first, rows, cols, row_stride: cols, data: PhantomData };
    matmul(&mut new, Write::Set);
    // SAFETY: the capacity suffices for the product, all its elements were written, and none was read before.
    unsafe { out.set_len(rows * cols) };
}

/// `[rows, cols]` elements; `write` must write every element of its row.
fn filled_rows(rows: usize, cols: usize, write: impl Fn(usize, &mut [MaybeUninit<f32>]) + Sync) -> Vec<f32> {
    let mut out = Vec::with_capacity(rows * cols);
    let several = (ELEMENTS / cols.max(1)).max(1);
    out.spare_capacity_mut()[..rows * cols].par_chunks_mut(several * cols.max(1)).enumerate().for_each(
        |(i, part)| {
            let rows = part.chunks_mut(cols.max(1)).enumerate();
            vectorized(
                #[inline(always)]
                || {
                    for (j, row) in rows {
                        write(i * several + j, row);
                    }
                },
            );
        },
    );
    // SAFETY: every row was written whole, as the callers above do: by a copy that checks its length, or
    // element by element over rows of a checked length.
    unsafe { out.set_len(rows * cols) };
    out
}

/// `f` of each element, on the threads of the current pool.
pub(super) fn map<T: Copy + Sync, U: Copy + Send>(x: &[T], f: impl Fn(T) -> U + Sync) -> Vec<U> {
    let mut out = Vec::with_capacity(x.len());
    let parts = out.spare_capacity_mut()[..x.len()].par_chunks_mut(ELEMENTS);
    parts.zip(x.par_chunks(ELEMENTS)).for_each(|(out, x)| {
        vectorized(
            #[inline(always)]
            || {
                for (out, &x) in out.iter_mut().zip(x) {
                    out.write(f(x));
                }
            },
        );
    });
    // SAFETY: the chunks cover all elements, and each was written.
    unsafe { out.set_len(x.len()) };
    out
}

/// `f` of the elements of two slices of the same length, on the threads of the current pool.
#[track_caller]
pub(super) fn map2(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32 + Sync) -> Vec<f32> {
    assert_eq!(x.len(), y.len(), "elements of two slices of one length");
    let mut out = Vec::with_capacity(x.len());
    let parts = out.spare_capacity_mut()[..x.len()].par_chunks_mut(ELEMENTS);
    parts.zip(x.par_chunks(ELEMENTS).zip(y.par_chunks(ELEMENTS))).for_each(|(out, (x, y))| {
        vectorized(
            #[inline(always)]
            || {
                for (out, (&x, &y)) in out.iter_mut().zip(x.iter().zip(y)) {
                    out.write(f(x, y));
                }
            },
        );
    });
    // SAFETY: the chunks cover all elements, and each was written.
    unsafe { out.set_len(x.len()) };
    out
}

/// Rows summed by one thread.
const ROWS: usize = 64;

/// The sum of the rows, each element widened by `wide`, in blocks of a fixed number of rows that are then summed in
/// order.
pub(super) fn sum_rows<T: Copy + Sync>(x: Mat<'_, T>, wide: impl Fn(T) -> f32 + Sync) -> Vec<f32> {
    let starts: Vec<usize> = (0..x.rows).step_by(ROWS).collect();
    let part = |&start: &usize| {
        let mut sum = vec![0f32; x.cols];
        vectorized(
            #[inline(always)]
            || {
                for i in start..(start + ROWS).min(x.rows) {
                    sum.iter_mut().zip(x.row(i)).for_each(|(sum, x)| *sum += wide(*x));
                }
            },
        );
        sum
    };
    let parts: Vec<Vec<f32>> = starts.par_iter().map(part).collect();
    let mut total = vec![0f32; x.cols];
    for part in &parts {
        total.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::super::testing::with_threads;
    use super::*;
    use proptest::prelude::*;

    fn numbers(seed: u64, len: usize) -> Vec<f32> {
        let key = hydra_core::Key::new(seed);
        (0..len).map(|i| key.normal(i as u64) as f32).collect()
    }

    fn exact(a: &[f32], b: &[f32], [m, k, n]: [usize; 3]) -> Vec<f64> {
        let at = |i: usize, j: usize| {
            (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(b[l * n + j])).sum::<f64>()
        };
        (0..m * n).map(|x| at(x / n, x % n)).collect()
    }

    fn transposed(a: &[f32], rows: usize, cols: usize) -> Vec<f32> {
        (0..rows * cols).map(|i| a[(i % rows) * cols + i / rows]).collect()
    }

    fn assert_near(found: &[f32], expected: &[f64], terms: usize) {
        for (found, expected) in found.iter().zip(expected) {
            let error = (f64::from(*found) - expected).abs();
            assert!(error <= 1e-5 * (terms as f64).sqrt().max(1.0), "{found} is not {expected}");
        }
    }

    proptest! {
        #[test]
        fn products_are_exact_for_any_shape_and_order(
            m in 1usize..40, k in 1usize..40, n in 1usize..40, a_t: bool, b_t: bool,
        ) {
            let (a, b) = (numbers(1, m * k), numbers(2, k * n));
            let expected = exact(&a, &b, [m, k, n]);
            let (turned_a, turned_b) = (transposed(&a, m, k), transposed(&b, k, n));
            let left = if a_t { Mat::new(&turned_a, k, m).t() } else { Mat::new(&a, m, k) };
            let right = if b_t { Mat::new(&turned_b, n, k).t() } else { Mat::new(&b, k, n) };
            let mut out = vec![f32::NAN; m * n];
            matmul(&mut MatMut::new(&mut out, m, n), Write::Set, 1.0, left, right);
            assert_near(&out, &expected, k);
            matmul(&mut MatMut::new(&mut out, m, n), Write::Add, -2.0, left, right);
            let negative: Vec<f64> = expected.iter().map(|x| -x).collect();
            assert_near(&out, &negative, 4 * k);
        }
    }

    #[test]
    fn a_transpose_has_every_element_in_its_place() {
        for (rows, cols) in [(1, 1), (16, 16), (15, 17), (48, 200), (33, 31), (130, 64)] {
            let data = numbers(1, rows * cols);
            let mut out = vec![f32::NAN; 3];
            transpose_into(&mut out, Mat::new(&data, rows, cols), threads_here());
            assert_eq!(out, transposed(&data, rows, cols), "{rows}, {cols}");
        }
    }

    #[test]
    fn large_products_with_a_transposed_right_side_are_exact() {
        // More columns than are transposed at a time, by one thread and by three; one is left over.
        let (m, k, n) = (TURN_FROM + 3, 700, 6 * TURNED + 1);
        let (a, b) = (numbers(1, m * k), numbers(2, k * n));
        let turned = transposed(&b, k, n);
        let right = Mat::new(&turned, n, k).t();
        let product = || {
            let mut out = vec![1.0; m * n];
            matmul(&mut MatMut::new(&mut out, m, n), Write::Add, 1.0, Mat::new(&a, m, k), right);
            out
        };
        let out = with_threads(1, product);
        for i in (0..m * n).step_by(997) {
            let (row, col) = (i / n, i % n);
            let terms = (0..k).map(|l| f64::from(a[row * k + l]) * f64::from(b[l * n + col]));
            let expected = 1.0 + terms.sum::<f64>();
            assert!(
                (f64::from(out[i]) - expected).abs() < 1e-3,
                "{row}, {col}: {} is not {expected}",
                out[i]
            );
        }
        assert_eq!(out, with_threads(3, product));
    }

    #[test]
    fn many_threads_transpose_no_more_than_there_is_room_for() {
        assert_eq!([1, 2, 64].map(|threads| turned_cols(768, threads)), [192, 384, 28 * 192]);
        assert_eq!((turned_cols(4096, 64), turned_cols(1 << 20, 64)), (5 * 192, 192));
        assert_eq!(
            [(768, 2), (4096, 64), (14336, 2)].map(|(rows, threads)| own_cols(rows, threads)),
            [192, 64, 128]
        );
    }

    #[test]
    fn panels_have_every_column_and_none_is_narrow() {
        let ends = |cols| panels(cols, 192).map(|cols| [cols.start, cols.end]).collect::<Vec<_>>();
        assert_eq!([1, 192, 383].map(ends), [[[0, 1]], [[0, 192]], [[0, 383]]]);
        assert_eq!(ends(385), [[0, 192], [192, 385]]);
        assert_eq!(ends(600), [[0, 192], [192, 384], [384, 600]]);
    }

    #[test]
    fn blocks_of_columns_and_rows_are_their_own() {
        let data = numbers(1, 6 * 10);
        let whole = Mat::new(&data, 6, 10);
        let block = whole.cols(4..7).rows(1..6);
        assert_eq!(block.row(2), &data[3 * 10 + 4..3 * 10 + 7]);
        assert_eq!(whole.t().rows(4..5).t().rows, 6);
        let mut out = vec![0.0; 6 * 10];
        for (i, mut block) in MatMut::new(&mut out, 6, 10).split_cols(5).into_iter().enumerate() {
            block.rows(2..4).row(1).fill(i as f32 + 1.0);
            assert_eq!(block.row(3), [i as f32 + 1.0; 5]);
        }
        let expected: Vec<f32> =
            (0..60).map(|i| if i / 10 == 3 { (i % 10 / 5 + 1) as f32 } else { 0.0 }).collect();
        assert_eq!(out, expected);
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        let (m, k, n) = (301, 257, 193);
        let (a, b) = (numbers(1, m * k), numbers(2, k * n));
        let product = || {
            let mut out = vec![0.0; m * n];
            let (a, b) = (Mat::new(&a, m, k), Mat::new(&b, k, n));
            matmul(&mut MatMut::new(&mut out, m, n), Write::Set, 1.0, a, b);
            out
        };
        let one = with_threads(1, product);
        assert_eq!(one, with_threads(3, product));
        assert_eq!(one, with_threads(2, product));
    }

    #[test]
    fn the_bits_of_a_row_do_not_depend_on_how_many_there_are() {
        // Products larger than those that `counted` excludes.
        for (k, n) in [(65, 129), (576, 700), (700, 65), (5000, 96), (130, 2 * TURNED + 1)] {
            let rows = 300;
            let (a, b) = (numbers(1, rows * k), numbers(2, k * n));
            for turned in [false, true] {
                let right = if turned { Mat::new(&b, n, k).t() } else { Mat::new(&b, k, n) };
                let product = |rows: Range<usize>| {
                    let mut out = vec![f32::NAN; rows.len() * n];
                    let left = Mat::new(&a, 300, k).rows(rows.clone());
                    matmul(&mut MatMut::new(&mut out, rows.len(), n), Write::Set, 1.0, left, right);
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let all = product(0..rows);
                for some in [0..4, 7..20, 3..67, 1..128, 150..279, 44..300] {
                    let expected = &all[some.start * n..some.end * n];
                    assert!(product(some.clone()) == expected, "{some:?} of [{rows}, {k}] @ [{k}, {n}]");
                }
            }
        }
    }

    /// As on a processor without wide vectors.
    #[test]
    fn row_loops_have_the_same_bits_without_wide_vectors() {
        use super::super::math::{exp, exp_in_place, max, sums};
        #[inline(always)]
        fn loops(row: &mut [f32]) -> Vec<u64> {
            let largest = max(row);
            let spread = sums(row, row, |a, b| [a * b + 0.1, exp(a) * b]);
            let sum = exp_in_place(row, largest);
            row.iter_mut().for_each(|x| *x = *x * 3.1 + exp(*x * 0.7) * *x);
            let bits = row.iter().map(|x| u64::from(x.to_bits()));
            bits.chain(spread.map(f64::to_bits)).chain([sum.to_bits()]).collect()
        }
        for n in [1, 15, 16, 17, 33, 1023, 1024, 1025, 5000] {
            let (mut wide, mut plain) = (numbers(7, n), numbers(7, n));
            let found = vectorized(
                #[inline(always)]
                || loops(&mut wide),
            );
            assert_eq!(found, loops(std::hint::black_box(&mut plain)), "{n} elements");
        }
    }

    #[test]
    #[should_panic(expected = "[2, 3] @ [2, 2] is no [2, 2]")]
    fn shapes_that_do_not_fit_are_named() {
        let data = [0.0; 6];
        let mut out = [0.0; 4];
        let (a, b) = (Mat::new(&data, 2, 3), Mat::new(&data[..4], 2, 2));
        matmul(&mut MatMut::new(&mut out, 2, 2), Write::Set, 1.0, a, b);
    }

    #[test]
    #[should_panic(expected = "columns 2..5 of 3")]
    fn columns_beyond_the_matrix_are_named() {
        let _ = Mat::new(&[0.0; 6], 2, 3).cols(2..5);
    }
}
