//! Products with NF4 matrices ([`hydra_core::nf4`]), which are dequantized in panels of columns while a product packs
//! them. No sum extends over several columns, so a product has the bits of the product with the dequantized matrix, and
//! neither the width of panels nor threads change them.
//!
//! Elements are those of the other side's type: a value is rounded to `f32`, then once to 16 bits.

use super::{
    Mat, MatMut, Start, TILE, TURN_FROM, bf16, matmul_by_panels, panels, product_by, rows, threads_here,
    transpose_panel, transposes_in_registers, turned_cols, vectorized,
};
use half::f16;
use hydra_core::FloatType;
use hydra_core::nf4::{BLOCK, BLOCK_BYTES, TABLE, bytes_of, scale};
use rayon::prelude::*;
use std::ops::Range;

/// A quantized matrix `[rows, cols]`.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Nf4<'a> {
    blocks: &'a [u8],
    rows: usize,
    cols: usize,
}

/// Which matrix the right side of a product is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::ops) enum Side {
    /// The matrix.
    Plain,
    /// Its transpose.
    Transposed,
}

/// An element of a dequantized matrix.
trait Nf4Element: Copy + Default + Send + Sync {
    /// The elements of a block that stand for the indices.
    fn table(scale: f32, float: FloatType) -> [Self; 16];

    /// The elements of all indices of a block.
    fn expand(table: &[Self; 16], indices: &[u8; BLOCK / 2], out: &mut [Self; BLOCK]);
}

impl<'a> Nf4<'a> {
    /// The matrix with these blocks.
    #[track_caller]
    pub(in crate::ops) fn new(blocks: &'a [u8], rows: usize, cols: usize) -> Self {
        assert_eq!(blocks.len(), bytes_of(0..rows * cols).len(), "the blocks of a matrix [{rows}, {cols}]");
        Self { blocks, rows, cols }
    }

    /// The shape of the right side.
    fn shape(&self, side: Side) -> [usize; 2] {
        if side == Side::Plain { [self.rows, self.cols] } else { [self.cols, self.rows] }
    }

    /// Dequantizes a range of columns of the right side, as it lies in the matrix, into a reused vector, on one thread or on
    /// those of the current pool. Returns them as a matrix.
    fn columns<'b, T: Nf4Element>(
        &self,
        side: Side,
        cols: Range<usize>,
        float: FloatType,
        (out, threads): (&'b mut Vec<T>, usize),
    ) -> Mat<'b, T> {
        let (rows, columns) = if side == Side::Plain { (0..self.rows, cols) } else { (cols, 0..self.cols) };
        let width = columns.len();
        out.resize(rows.len() * width, T::default());
        let several = (PART / width.max(1)).max(1);
        let chunks = out.par_chunks_mut((several * width).max(1)).with_min_len(least(threads));
        chunks.enumerate().for_each(|(i, out)| {
            let first = rows.start + i * several;
            for (row, out) in (first..).zip(out.chunks_mut(width)) {
                dequantize(self.blocks, row * self.cols + columns.start, float, out);
            }
        });
        let matrix = Mat::new(out, rows.len(), width);
        if side == Side::Plain { matrix } else { matrix.t() }
    }

    /// The transpose of a range of rows, dequantized into a reused vector, on one thread or on those of the current pool: what
    /// [`columns`](Self::columns) of the transpose returns, with its own rows contiguous. Each tile is transposed while it is in
    /// cache.
    fn turned<'b>(
        &self,
        rows: Range<usize>,
        float: FloatType,
        (out, threads): (&'b mut Vec<f32>, usize),
    ) -> Mat<'b> {
        let width = rows.len();
        out.clear();
        out.reserve(self.cols * width);
        let room = &mut out.spare_capacity_mut()[..self.cols * width];
        let strips = room.par_chunks_mut((STRIP * width).max(1)).with_min_len(least(threads));
        strips.enumerate().for_each(|(i, out)| {
            let cols = i * STRIP..self.cols.min((i + 1) * STRIP);
            let (mut out, mut tile) = (MatMut::new(out, cols.len(), width), [0.0; TILE * STRIP]);
            for first in (0..width).step_by(TILE) {
                let high = TILE.min(width - first);
                let tile = &mut tile[..high * cols.len()];
                for (row, tile) in (rows.start + first..).zip(tile.chunks_mut(cols.len())) {
                    dequantize(self.blocks, row * self.cols + cols.start, float, tile);
                }
                transpose_panel(&mut out.cols(first..first + high), Mat::new(tile, high, cols.len()));
            }
        });
        // SAFETY: the chunks cover all elements, and each tile has written its own.
        unsafe { out.set_len(self.cols * width) };
        Mat::new(out, self.cols, width)
    }
}

/// Elements that a thread dequantizes at a time.
const PART: usize = 1 << 14;

/// Columns of a matrix that are dequantized for a tile to transpose: those of its rows are in the first cache.
const STRIP: usize = 256;

/// The least number of parts that a thread takes, if there are several threads or one.
fn least(threads: usize) -> usize {
    if threads == 1 { usize::MAX } else { 1 }
}

/// The elements of a matrix from `first` on.
fn dequantize<T: Nf4Element>(blocks: &[u8], first: usize, float: FloatType, out: &mut [T]) {
    let (mut at, mut out) = (first, out);
    while !out.is_empty() {
        let (block, inside) = (&blocks[at / BLOCK * BLOCK_BYTES..][..BLOCK_BYTES], at % BLOCK);
        let (now, rest) = out.split_at_mut(out.len().min(BLOCK - inside));
        let table = T::table(scale(block), float);
        let (_, indices) = block.split_at(size_of::<f32>());
        let indices: &[u8; BLOCK / 2] = indices.try_into().expect("a block has as many indices");
        match <&mut [T; BLOCK]>::try_from(&mut *now) {
            Ok(whole) => T::expand(&table, indices, whole),
            Err(_) => {
                for (i, out) in (inside..).zip(now.iter_mut()) {
                    let byte = indices[i / 2];
                    let index = if i.is_multiple_of(2) { byte >> 4 } else { byte & 0xF };
                    *out = table[usize::from(index)];
                }
            }
        }
        (at, out) = (at + now.len(), rest);
    }
}

impl Nf4Element for f32 {
    fn table(scale: f32, float: FloatType) -> [f32; 16] {
        let table = TABLE.map(|x| x * scale);
        if float == FloatType::F16 { table.map(|x| f16::from_f32(x).to_f32()) } else { table }
    }

    fn expand(table: &[f32; 16], indices: &[u8; BLOCK / 2], out: &mut [f32; BLOCK]) {
        #[cfg(target_arch = "x86_64")]
        if x86::has_f32() {
            // SAFETY: the processor has the instructions.
            return unsafe { x86::expand_f32(table, indices, out) };
        }
        expand(table, indices, out);
    }
}

impl Nf4Element for u16 {
    fn table(scale: f32, _: FloatType) -> [u16; 16] {
        let mut table = [0; 16];
        vectorized(
            #[inline(always)]
            || table.iter_mut().zip(TABLE).for_each(|(out, x)| *out = bf16::rounded(x * scale)),
        );
        table
    }

    fn expand(table: &[u16; 16], indices: &[u8; BLOCK / 2], out: &mut [u16; BLOCK]) {
        #[cfg(target_arch = "x86_64")]
        if x86::has_u16() {
            // SAFETY: the processor has the instructions.
            return unsafe { x86::expand_u16(table, indices, out) };
        }
        expand(table, indices, out);
    }
}

fn expand<T: Copy>(table: &[T; 16], indices: &[u8; BLOCK / 2], out: &mut [T; BLOCK]) {
    for (pair, byte) in out.chunks_exact_mut(2).zip(indices) {
        (pair[0], pair[1]) = (table[usize::from(byte >> 4)], table[usize::from(byte & 0xF)]);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::BLOCK;
    use std::arch::x86_64::*;

    pub(super) fn has_f32() -> bool {
        std::arch::is_x86_feature_detected!("avx512f")
    }

    pub(super) fn has_u16() -> bool {
        has_f32() && std::arch::is_x86_feature_detected!("avx512bw")
    }

    /// The indices of 16 bytes, one a byte.
    #[target_feature(enable = "avx512f")]
    fn split(bytes: &[u8]) -> [__m128i; 2] {
        let bytes: &[u8; 16] = bytes.try_into().expect("sixteen bytes");
        // SAFETY: an unaligned load of the array.
        let bytes = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
        let low = _mm_set1_epi8(0xF);
        let (even, odd) = (_mm_and_si128(_mm_srli_epi16::<4>(bytes), low), _mm_and_si128(bytes, low));
        [_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)]
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn expand_f32(table: &[f32; 16], indices: &[u8; BLOCK / 2], out: &mut [f32; BLOCK]) {
        // SAFETY: a load of the whole table.
        let table = unsafe { _mm512_loadu_ps(table.as_ptr()) };
        let indices = indices.chunks_exact(16).flat_map(|bytes| split(bytes));
        for (out, indices) in out.chunks_exact_mut(16).zip(indices) {
            let values = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(indices), table);
            // SAFETY: a store to all sixteen elements.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), values) };
        }
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn expand_u16(table: &[u16; 16], indices: &[u8; BLOCK / 2], out: &mut [u16; BLOCK]) {
        // SAFETY: a load of the whole table.
        let table = _mm512_castsi256_si512(unsafe { _mm256_loadu_si256(table.as_ptr().cast()) });
        for (out, bytes) in out.chunks_exact_mut(32).zip(indices.chunks_exact(16)) {
            let [first, second] = split(bytes);
            let both = _mm256_set_m128i(second, first);
            let values = _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(both), table);
            // SAFETY: a store to all 32 elements.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), values) };
        }
    }
}

/// `start + a @ b`, row-major, on the threads of the current pool, for a right side `b` whose elements are rounded to
/// `float`.
///
/// # Panics
/// If shapes do not match.
#[track_caller]
pub(in crate::ops) fn product(
    start: Start<'_>,
    a: Mat<'_>,
    (b, side): (Nf4<'_>, Side),
    float: FloatType,
) -> Vec<f32> {
    let [terms, cols] = b.shape(side);
    let turns = side == Side::Transposed && a.rows >= TURN_FROM && transposes_in_registers();
    product_by(start, [a.rows, terms, cols], |out, write| {
        matmul_by_panels((out, write, 1.0), a, terms, |panel, cols, threads| match turns {
            true => b.turned(cols, float, (panel, threads)),
            false => b.columns(side, cols, float, (panel, threads)),
        });
    })
}

/// `a @ b`, where the bits of a row do not depend on other rows.
///
/// # Panics
/// If shapes do not match.
#[track_caller]
pub(in crate::ops) fn product_by_row(a: Mat<'_>, (b, side): (Nf4<'_>, Side), float: FloatType) -> Vec<f32> {
    let [terms, cols] = b.shape(side);
    let mut panel = Vec::new();
    product_by(Start::Nothing, [a.rows, terms, cols], |out, write| {
        for cols in panels(cols, turned_cols(terms, threads_here())) {
            let right = b.columns(side, cols.clone(), float, (&mut panel, threads_here()));
            rows::matmul(&mut out.cols(cols), write, a, right);
        }
    })
}

/// The same in `bf16`, rounded once to nearest.
///
/// # Panics
/// If shapes do not match.
#[track_caller]
pub(in crate::ops) fn product_bf16(
    start: Start<'_, u16>,
    a: Mat<'_, u16>,
    (b, side): (Nf4<'_>, Side),
) -> Vec<u16> {
    let [terms, cols] = b.shape(side);
    let (mut out, mut panel) = (vec![0; a.rows * cols], Vec::new());
    let mut whole = MatMut::new(&mut out, a.rows, cols);
    for cols in panels(cols, turned_cols(terms, threads_here())) {
        let right = b.columns(side, cols.clone(), FloatType::Bf16, (&mut panel, threads_here()));
        bf16::product_columns(&mut whole, cols, start, a, right);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::with_threads;
    use super::super::{Mat, Start, bf16, product as plain};
    use super::*;
    use hydra_core::{Key, nf4};

    fn normal(seed: u64, len: usize) -> Vec<f32> {
        let key = Key::new(seed);
        (0..len as u64).map(|i| key.normal(i) as f32).collect()
    }

    /// The blocks of a matrix, and the values that they have.
    fn quantized(len: usize) -> (Vec<u8>, Vec<f32>) {
        let (mut blocks, mut values) = (vec![0; bytes_of(0..len).len()], normal(1, len));
        nf4::quantize(&values, &mut blocks);
        nf4::dequantize(&blocks, 0, &mut values);
        (blocks, values)
    }

    /// Rows, terms, columns: with whole blocks in a row, and with blocks that cross the ends of rows.
    const SHAPES: [[usize; 3]; 4] = [[1, 3, 5], [7, 64, 128], [150, 100, 500], [130, 131, 70]];

    #[test]
    fn products_are_those_with_the_dequantized_matrix() {
        for [rows, terms, cols] in SHAPES {
            let (blocks, values) = quantized(terms * cols);
            let (left, added) = (normal(2, rows * terms), normal(3, rows * cols));
            let a = Mat::new(&left, rows, terms);
            let sides = [
                (Nf4::new(&blocks, terms, cols), Side::Plain, Mat::new(&values, terms, cols)),
                (Nf4::new(&blocks, cols, terms), Side::Transposed, Mat::new(&values, cols, terms).t()),
            ];
            for (b, side, right) in sides {
                let starts =
                    [Start::Nothing, Start::Rows(&added[..cols]), Start::Sum(&added, &added[..cols])];
                for start in starts {
                    let expected = plain(start, a, right);
                    for threads in [1, 3] {
                        let found = with_threads(threads, || product(start, a, (b, side), FloatType::F32));
                        assert_eq!(found, expected, "{rows} {terms} {cols}");
                    }
                }
            }
        }
    }

    #[test]
    fn those_of_bf16_round_the_values_once() {
        let round = |values: &[f32]| values.iter().map(|x| bf16::rounded(*x)).collect::<Vec<u16>>();
        for [rows, terms, cols] in SHAPES {
            let (blocks, values) = quantized(terms * cols);
            let (left, added) = (round(&normal(2, rows * terms)), round(&normal(3, rows * cols)));
            let (a, values) = (Mat::new(&left, rows, terms), round(&values));
            let sides = [
                (Nf4::new(&blocks, terms, cols), Side::Plain, Mat::new(&values, terms, cols)),
                (Nf4::new(&blocks, cols, terms), Side::Transposed, Mat::new(&values, cols, terms).t()),
            ];
            for (b, side, right) in sides {
                for start in [Start::Nothing, Start::Matrix(&added), Start::Sum(&added, &added[..cols])] {
                    let expected = bf16::product(start, a, right);
                    for threads in [1, 3] {
                        let found = with_threads(threads, || product_bf16(start, a, (b, side)));
                        assert_eq!(found, expected, "{rows} {terms} {cols}");
                    }
                }
            }
        }
    }

    #[test]
    fn vectors_expand_as_loops_do() {
        let indices: [u8; BLOCK / 2] = std::array::from_fn(|i| (i * 37 + 11) as u8);
        let (mut found, mut expected) = ([0.0; BLOCK], [0.0; BLOCK]);
        let table = f32::table(0.3, FloatType::F32);
        f32::expand(&table, &indices, &mut found);
        expand(&table, &indices, &mut expected);
        assert_eq!(found, expected);
        let (mut found, mut expected) = ([0; BLOCK], [0; BLOCK]);
        let table = u16::table(0.3, FloatType::Bf16);
        u16::expand(&table, &indices, &mut found);
        expand(&table, &indices, &mut expected);
        assert_eq!(found, expected);
        let f16 = f32::table(0.3, FloatType::F16);
        assert!(f16.iter().zip(TABLE).all(|(x, own)| *x == f16::from_f32(own * 0.3).to_f32()));
    }
}
