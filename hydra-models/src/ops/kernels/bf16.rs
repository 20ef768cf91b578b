//! Products of `bf16` matrices with sums in `f32`: the arithmetic of the instruction `vdpbf16ps`, or its emulation.
//!
//! An element of a product is one chain of fused multiply-adds in `f32` onto its addend, or onto zero. Terms are taken
//! in pairs, in ascending order; in each pair the odd term comes first. Every step rounds to nearest, ties to even. A
//! subnormal number counts as zero of its sign, as an operand, and as a result, which is rounded to 24 bits before. A
//! product with an odd number of terms has a last term of zeros. Neither tiles nor threads change this order, because they
//! divide rows and columns alone, and a chain that continues in memory has the same bits. The bits of a NaN are not defined.
//!
//! Matrices are `Mat`s of the numbers' bits. A panel holds columns of a matrix for the kernels: for each pair of its rows,
//! the two elements of each column side by side.

use super::{Keep, Mat, MatMut, SPREAD_FROM, Start, Write, threads_here, vectorized};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::OnceLock;

/// Rows of a tile, whose sums are in registers.
const ROWS: usize = 6;

/// Sums of one register.
const LANES: usize = 16;

/// Columns of a tile.
const COLS: usize = 64;

/// Rows that take one panel of columns after the other.
const GROUP: usize = 8 * ROWS;

/// Pairs of terms after which sums are written to memory: a panel of this many fits in a processor's cache.
const PAIRS: usize = 1024;

/// What computes products of `bf16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// `vdpbf16ps`.
    Instruction,
    /// The same arithmetic in other instructions.
    Emulation,
}

/// The path of this process: the instruction, if the processor has it and it computes what the emulation does.
fn path() -> Path {
    #[cfg(test)]
    if testing::EMULATED.load(std::sync::atomic::Ordering::Relaxed) {
        return Path::Emulation;
    }
    static PATH: OnceLock<Path> = OnceLock::new();
    *PATH.get_or_init(|| if has_instruction() && agree() { Path::Instruction } else { Path::Emulation })
}

/// Whether products of `bf16` use the processor's instruction.
pub(in crate::ops) fn uses_instruction() -> bool {
    path() == Path::Instruction
}

fn has_instruction() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512bf16")
        && std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Numbers that a test of the instruction combines: zeros, the limits of subnormal and normal numbers, ties of
/// rounding, infinities, one that is no number.
const EDGES: [u16; 16] = [
    0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x8080, 0x1F81, 0x2001, 0x3F80, 0xBF81, 0x3F7F, 0x4049, 0x7F7F,
    0xFF00, 0x7F80, 0x7FC0,
];

/// Returns whether the instruction and the emulation compute the same bits from fixed numbers: half of them from
/// [`EDGES`], half of them of any magnitude.
fn agree() -> bool {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut draw = |edges: bool| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bits = (state >> 48) as u16;
        if edges { EDGES[usize::from(bits) % EDGES.len()] } else { bits }
    };
    let same = |a: [u16; 2], b: [u32; LANES], sums: [f32; LANES]| {
        let on = |path: Path| {
            let mut out = sums;
            let right = Columns { first: b.as_ptr(), pair: LANES };
            let left = Rows { first: a.as_ptr(), row: 2, pair: 2, odd: false };
            // SAFETY: a pair of one row, and of as many columns as a register has. The processor has the instruction.
            unsafe {
                add_products(path, left, right, 1, &mut MatMut::new(&mut out, 1, LANES), Write::Add, 1.0);
            }
            out.map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() })
        };
        on(Path::Instruction) == on(Path::Emulation)
    };
    // Sums next to the smallest normal number, of products of 2^-75 and some 2^-75.
    let near = std::array::from_fn(|i| pair([0x9A00 - 16 * i as u16, 0]));
    same([0x1A00, 0], near, [f32::MIN_POSITIVE; LANES])
        && (0..1024).all(|round| {
            let edges = round % 2 == 0;
            let a = std::array::from_fn(|_| draw(edges));
            let b = std::array::from_fn(|_| pair([draw(edges), draw(edges)]));
            same(a, b, std::array::from_fn(|_| f32::from_bits(pair([draw(edges), draw(edges)]))))
        })
}

/// Rows of the left side of a product.
#[derive(Clone, Copy)]
struct Rows {
    first: *const u16,
    /// Elements from a row to the next.
    row: usize,
    /// Elements from a pair of terms to the next.
    pair: usize,
    /// Whether the last pair has its even term alone.
    odd: bool,
}

impl Rows {
    /// # Safety
    /// As many rows and pairs must follow.
    unsafe fn from(self, row: usize, pair: usize) -> Self {
        // SAFETY: the caller's promise.
        Self { first: unsafe { self.first.add(row * self.row + pair * self.pair) }, ..self }
    }
}

/// Columns of the right side of a product, in a panel.
#[derive(Clone, Copy)]
struct Columns {
    first: *const u32,
    /// Columns from a pair of terms to the next.
    pair: usize,
}

impl Columns {
    /// # Safety
    /// As many pairs must follow.
    unsafe fn from(self, pair: usize) -> Self {
        // SAFETY: the caller's promise.
        Self { first: unsafe { self.first.add(pair * self.pair) }, ..self }
    }
}

/// A part of a product whose sums fit in registers.
struct Tile {
    left: Rows,
    right: Columns,
    pairs: usize,
    out: *mut f32,
    out_row: usize,
    rows: usize,
    cols: usize,
    write: Write,
    factor: f32,
}

impl Tile {
    /// Writes or adds the product.
    ///
    /// # Safety
    /// `left` must hold `rows` and `right` whole registers of `cols`, both of them `pairs`; `out` must be good for
    /// writing the tile. The processor must have the path's instructions.
    unsafe fn run(&self, path: Path) {
        match path {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise.
            Path::Instruction => unsafe { x86::run(self) },
            _ => vectorized(
                #[inline(always)]
                || {
                    // SAFETY: likewise.
                    unsafe {
                        let least = self.last_bit_of_rows();
                        for col in (0..self.cols).step_by(LANES) {
                            match self.rows {
                                1 => self.emulate::<1>(col, least),
                                2 => self.emulate::<2>(col, least),
                                3 => self.emulate::<3>(col, least),
                                4 => self.emulate::<4>(col, least),
                                5 => self.emulate::<5>(col, least),
                                _ => self.emulate::<ROWS>(col, least),
                            }
                        }
                    }
                },
            ),
        }
    }

    /// The columns of a register from `col` on, of `R` rows, whose [`Tile::last_bit_of_rows`] is `least`.
    ///
    /// # Safety
    /// As [`Tile::run`].
    #[inline(always)]
    unsafe fn emulate<const R: usize>(&self, col: usize, least: i32) {
        let cols = LANES.min(self.cols - col);
        let mut start = [[0f32; LANES]; R];
        if self.write == Write::Add && self.factor == 1.0 {
            for (row, start) in start.iter_mut().enumerate() {
                // SAFETY: a part of a row of the tile.
                let out = unsafe { std::slice::from_raw_parts(self.out.add(row * self.out_row + col), cols) };
                start[..cols].copy_from_slice(out);
                *start = start.map(flushed);
            }
        }
        let mut sums = start;
        // SAFETY: the caller's promise.
        unsafe {
            if self.is_far_from_subnormal(col, least, &start) {
                self.add_pairs(col, &mut sums, |x| x, |sum, a, b| (a.mul_add(b, sum), true));
            } else if !self.add_pairs(col, &mut sums, flushed, fast_step) {
                sums = start;
                self.add_pairs(col, &mut sums, flushed, |sum, a, b| (step(sum, a, b), true));
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (at, sum) in sums[..cols].iter().enumerate() {
                // SAFETY: an element of the tile. What is set may not be initialized, so it is written and not read.
                unsafe {
                    let out = self.out.add(row * self.out_row + col + at);
                    out.write(match self.write {
                        _ if self.factor == 1.0 => *sum,
                        Write::Set => sum * self.factor,
                        Write::Add => out.read() + sum * self.factor,
                    });
                }
            }
        }
    }

    /// The least exponent of the last bit of an element of the rows.
    ///
    /// # Safety
    /// As [`Tile::run`].
    #[inline(always)]
    unsafe fn last_bit_of_rows(&self) -> i32 {
        let mut least = LARGE;
        for (row, pair) in (0..self.rows).flat_map(|row| (0..self.pairs).map(move |pair| (row, pair))) {
            // SAFETY: within the rows.
            let a = unsafe { self.left.from(row, pair).first.cast::<[u16; 2]>().read() };
            least = a.into_iter().fold(least, |least, a| least.min(last_bit(u32::from(a) << 16, 7)));
        }
        least
    }

    /// Whether no factor is subnormal, and no sum can be: it is a multiple of the last bit of a product or a start.
    ///
    /// # Safety
    /// As [`Tile::run`].
    #[inline(always)]
    unsafe fn is_far_from_subnormal(&self, col: usize, rows: i32, start: &[[f32; LANES]]) -> bool {
        const SMALLEST: i32 = f32::MIN_EXP - 1;
        let (mut columns, mut starts) = ([LARGE; LANES], [LARGE; LANES]);
        for pair in 0..self.pairs {
            // SAFETY: within the panel.
            let b = unsafe { &*self.right.from(pair).first.add(col).cast::<[u32; LANES]>() };
            for (least, b) in columns.iter_mut().zip(b) {
                *least = (*least).min(last_bit(b << 16, 7)).min(last_bit(b & 0xFFFF_0000, 7));
            }
        }
        for start in start {
            starts
                .iter_mut()
                .zip(start)
                .for_each(|(least, x)| *least = (*least).min(last_bit(x.to_bits(), 23)));
        }
        let [columns, starts] = [columns, starts].map(|all| all.into_iter().fold(LARGE, i32::min));
        rows.min(columns) > SMALLEST - 7 && (rows + columns).min(starts) > SMALLEST
    }

    /// Continues chains by all pairs of terms; returns whether all steps were exact.
    ///
    /// # Safety
    /// As [`Tile::run`].
    #[inline(always)]
    unsafe fn add_pairs<const R: usize>(
        &self,
        col: usize,
        sums: &mut [[f32; LANES]; R],
        factor: impl Fn(f32) -> f32,
        step: impl Fn(f32, f32, f32) -> (f32, bool),
    ) -> bool {
        let mut exact = [true; LANES];
        for pair in 0..self.pairs {
            // SAFETY: within the panel.
            let b = unsafe { &*self.right.from(pair).first.add(col).cast::<[u32; LANES]>() };
            let even = b.map(|bits| factor(f32::from_bits(bits << 16)));
            let odd = b.map(|bits| factor(f32::from_bits(bits & 0xFFFF_0000)));
            for (row, sums) in sums.iter_mut().enumerate() {
                // SAFETY: within the rows.
                let a = unsafe {
                    let a = self.left.from(row, pair).first;
                    [*a, *a.add(1)].map(|a| factor(wide(a)))
                };
                for l in 0..LANES {
                    let (sum, first) = step(sums[l], a[1], odd[l]);
                    let (sum, second) = step(sum, a[0], even[l]);
                    sums[l] = sum;
                    exact[l] &= first & second;
                }
            }
        }
        exact.into_iter().all(|exact| exact)
    }
}

/// An exponent above all others.
const LARGE: i32 = 1 << 16;

/// The exponent of the last bit of a number whose mantissa has `mantissa` bits after the first; [`LARGE`] for zero, and one
/// less than that of normal numbers for subnormal ones.
#[inline(always)]
fn last_bit(number: u32, mantissa: i32) -> i32 {
    let exponent = (number >> 23 & 0xFF) as i32 - 127 - mantissa;
    if number & 0x7FFF_FFFF == 0 { LARGE } else { exponent }
}

/// The number, or zero of its sign if it is subnormal.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    let (bits, exponent) = (x.to_bits(), 0x7F80_0000);
    f32::from_bits(bits & if bits & exponent == 0 { 0x8000_0000 } else { u32::MAX })
}

/// A step of a chain, for factors and a sum that are not subnormal.
fn step(sum: f32, a: f32, b: f32) -> f32 {
    const UP: f32 = 18_446_744_073_709_551_616.0;
    let next = a.mul_add(b, sum);
    // What is rounded up to the smallest normal number is subnormal if it is smaller with all bits.
    let subnormal =
        next.abs() == f32::MIN_POSITIVE && (a * UP).mul_add(b, sum * UP).abs() < f32::MIN_POSITIVE * UP;
    if subnormal { 0f32.copysign(next) } else { flushed(next) }
}

/// The same, and false if only [`step`] knows the result.
#[inline(always)]
fn fast_step(sum: f32, a: f32, b: f32) -> (f32, bool) {
    let next = a.mul_add(b, sum);
    (flushed(next), next.abs() != f32::MIN_POSITIVE)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{COLS, Columns, LANES, ROWS, Rows, Tile, Write};
    use std::arch::x86_64::*;

    type Kernel = unsafe fn(&Tile);

    /// The kernels by rows and by registers of columns, both less one.
    const KERNELS: [[Kernel; COLS / LANES]; ROWS] = {
        macro_rules! rows {
            ($($rows:literal)*) => { [$([tile::<$rows, 1>, tile::<$rows, 2>, tile::<$rows, 3>, tile::<$rows, 4>]),*] };
        }
        rows!(1 2 3 4 5 6)
    };

    /// # Safety
    /// As [`Tile::run`].
    pub(super) unsafe fn run(tile: &Tile) {
        // SAFETY: the caller's promise.
        unsafe { KERNELS[tile.rows - 1][(tile.cols - 1) / LANES](tile) }
    }

    /// # Safety
    /// As [`Tile::run`], for a tile of `R` rows and `V` registers of columns.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn tile<const R: usize, const V: usize>(tile: &Tile) {
        let Tile { left, right, pairs, out, out_row, cols, write, factor, .. } = *tile;
        let mask = |v: usize| u16::MAX >> (LANES - LANES.min(cols - v * LANES));
        // SAFETY: the caller's promise; of the last register, the columns of the tile alone.
        let load =
            |r: usize, v: usize| unsafe { _mm512_maskz_loadu_ps(mask(v), out.add(r * out_row + v * LANES)) };
        let mut sums = [[_mm512_setzero_ps(); V]; R];
        if write == Write::Add && factor == 1.0 {
            sums = std::array::from_fn(|r| std::array::from_fn(|v| load(r, v)));
        }
        let (Rows { first: mut a, row, pair: a_pair, .. }, Columns { first: mut b, pair: b_pair }) =
            (left, right);
        for _ in 0..pairs {
            // SAFETY: the caller's promise.
            let columns: [__m512i; V] =
                std::array::from_fn(|v| unsafe { _mm512_loadu_si512(b.add(v * LANES).cast()) });
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: likewise.
                let terms = _mm512_set1_epi32(unsafe { a.add(r * row).cast::<i32>().read_unaligned() });
                for (sum, columns) in sums.iter_mut().zip(&columns) {
                    *sum = _mm512_dpbf16_ps(*sum, bits(terms), bits(*columns));
                }
            }
            (a, b) = (a.wrapping_add(a_pair), b.wrapping_add(b_pair));
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                let scaled = || _mm512_mul_ps(sum, _mm512_set1_ps(factor));
                let sum = match write {
                    _ if factor == 1.0 => sum,
                    Write::Set => scaled(),
                    Write::Add => _mm512_add_ps(load(r, v), scaled()),
                };
                // SAFETY: as for loads.
                unsafe { _mm512_mask_storeu_ps(out.add(r * out_row + v * LANES), mask(v), sum) };
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn bits(pairs: __m512i) -> __m512bh {
        // SAFETY: both are 512 bits.
        unsafe { std::mem::transmute(pairs) }
    }
}

/// Writes or adds `factor * left @ right`, tile by tile, for at most [`COLS`] columns.
///
/// # Safety
/// `left` must hold the output's rows and `right` whole registers of its columns, both of them `pairs`. The processor must
/// have the path's instructions.
unsafe fn add_products(
    path: Path,
    left: Rows,
    right: Columns,
    pairs: usize,
    out: &mut MatMut<'_>,
    write: Write,
    factor: f32,
) {
    assert!(out.cols <= COLS, "{} columns of a panel", out.cols);
    let whole = pairs - usize::from(left.odd);
    // A factor applies to whole sums.
    let most = if factor == 1.0 { PAIRS } else { pairs };
    let blocks = (0..whole).step_by(most.max(1)).map(|pair| pair..whole.min(pair + most));
    for pairs in blocks.chain(left.odd.then_some(whole..pairs)) {
        for row in (0..out.rows).step_by(ROWS) {
            let rows = ROWS.min(out.rows - row);
            let mut last = [0; ROWS];
            // SAFETY: the caller's promise.
            unsafe {
                let (mut left, right) = (left.from(row, pairs.start), right.from(pairs.start));
                if left.odd && pairs.start == whole {
                    (0..rows).for_each(|row| last[row] = pair([*left.from(row, 0).first, 0]));
                    left = Rows { first: last.as_ptr().cast(), row: 2, pair: 2, odd: false };
                }
                let write = if pairs.start > 0 { Write::Add } else { write };
                let (to, out_row, cols) = (out.first.add(row * out.row_stride), out.row_stride, out.cols);
                Tile { left, right, pairs: pairs.len(), out: to, out_row, rows, cols, write, factor }
                    .run(path);
            }
        }
    }
}

/// A matrix in panels of [`COLS`] columns.
#[derive(Default)]
pub(in crate::ops) struct Panels {
    elements: Vec<u32>,
    rows: usize,
    cols: usize,
}

/// Columns of a panel of `cols` columns, in whole registers.
fn padded(cols: usize) -> usize {
    cols.next_multiple_of(LANES)
}

impl Panels {
    /// Room for matrices of this shape, in elements of `f32`.
    pub(in crate::ops) fn room(rows: usize, cols: usize) -> usize {
        rows.div_ceil(2) * padded(cols)
    }

    /// Replaces the content with a matrix, on the calling thread.
    pub(in crate::ops) fn pack(&mut self, matrix: Mat<'_, u16>) {
        self.panels(matrix).for_each(|(panel, columns)| pack(panel, columns));
    }

    /// The same on the threads of the current pool.
    fn spread(&mut self, matrix: Mat<'_, u16>) {
        let panels: Vec<_> = self.panels(matrix).collect();
        panels.into_par_iter().for_each(|(panel, columns)| pack(panel, columns));
    }

    /// The panels, not yet written, and their columns.
    fn panels<'a>(&'a mut self, matrix: Mat<'a, u16>) -> impl Iterator<Item = (&'a mut [u32], Mat<'a, u16>)> {
        (self.rows, self.cols) = (matrix.rows, matrix.cols);
        let pairs = matrix.rows.div_ceil(2);
        self.elements.resize(pairs * padded(matrix.cols), 0);
        let panels = self.elements.chunks_mut((pairs * COLS).max(1)).enumerate();
        panels.map(move |(i, panel)| (panel, matrix.cols(i * COLS..matrix.cols.min((i + 1) * COLS))))
    }

    /// The matrix.
    pub(in crate::ops) fn whole(&self) -> Block<'_> {
        Block { panels: self, rows: 0..self.rows, cols: 0..self.cols }
    }

    /// Columns from this one on, of one panel, from this row on.
    fn at(&self, row: usize, col: usize) -> Columns {
        let (first, inside) = (col / COLS * COLS, col % COLS);
        let pair = padded(self.cols - first).min(COLS);
        let elements = &self.elements[self.rows.div_ceil(2) * first..];
        Columns { first: elements[row / 2 * pair + inside..].as_ptr(), pair }
    }
}

/// A block of a matrix in panels.
#[derive(Clone)]
pub(in crate::ops) struct Block<'a> {
    panels: &'a Panels,
    rows: Range<usize>,
    cols: Range<usize>,
}

impl Block<'_> {
    /// A range of columns that starts at a whole register.
    #[track_caller]
    pub(in crate::ops) fn cols(self, cols: Range<usize>) -> Self {
        let (first, end) = (self.cols.start + cols.start, self.cols.start + cols.end);
        assert!(end <= self.cols.end && first.is_multiple_of(LANES), "columns {cols:?} of {:?}", self.cols);
        Self { cols: first..end, ..self }
    }

    /// A range of rows that starts at a whole pair, and ends at one or at the end of the matrix.
    #[track_caller]
    pub(in crate::ops) fn rows(self, rows: Range<usize>) -> Self {
        let (first, end) = (self.rows.start + rows.start, self.rows.start + rows.end);
        let ends = end.is_multiple_of(2) || end == self.panels.rows;
        assert!(end <= self.rows.end && first.is_multiple_of(2) && ends, "rows {rows:?} of {:?}", self.rows);
        Self { rows: first..end, ..self }
    }

    /// The columns within each panel, counted from the block's first.
    fn panels(&self) -> impl Iterator<Item = Range<usize>> {
        let (first, end) = (self.cols.start, self.cols.end);
        let start = move |panel: usize| first.max(panel * COLS) - first;
        (first / COLS..end.div_ceil(COLS)).map(move |i| start(i)..end.min((i + 1) * COLS) - first)
    }

    /// The columns of a panel.
    fn at(&self, col: usize) -> Columns {
        self.panels.at(self.rows.start, self.cols.start + col)
    }
}

/// Writes a matrix of at most as many columns as the panel has.
fn pack(panel: &mut [u32], x: Mat<'_, u16>) {
    let pairs = x.rows.div_ceil(2);
    let Some(width) = panel.len().checked_div(pairs) else { return };
    assert!(x.cols <= width && panel.len() == pairs * width, "{} columns in a panel of {width}", x.cols);
    if x.col_stride == 1 {
        vectorized(
            #[inline(always)]
            || pack_rows(panel, width, x),
        );
    } else {
        pack_columns(panel, width, x.t());
    }
}

fn pair([even, odd]: [u16; 2]) -> u32 {
    u32::from(even) | u32::from(odd) << 16
}

#[inline(always)]
fn pack_rows(panel: &mut [u32], width: usize, x: Mat<'_, u16>) {
    for (i, out) in panel.chunks_exact_mut(width).enumerate() {
        let (out, rest) = out.split_at_mut(x.cols);
        rest.fill(0);
        let even = x.row(2 * i);
        if 2 * i + 1 < x.rows {
            let both = even.iter().zip(x.row(2 * i + 1));
            out.iter_mut().zip(both).for_each(|(out, (even, odd))| *out = pair([*even, *odd]));
        } else {
            out.iter_mut().zip(even).for_each(|(out, even)| *out = pair([*even, 0]));
        }
    }
}

/// Packs the transpose of `x`.
fn pack_columns(panel: &mut [u32], width: usize, x: Mat<'_, u16>) {
    let (tiled, pairs) = (pack_tiles(panel, width, x), x.cols.div_ceil(2));
    for col in 0..width {
        if col >= x.rows {
            (0..pairs).for_each(|pair| panel[pair * width + col] = 0);
            continue;
        }
        let (row, first) = (x.row(col), if col < tiled.0 { tiled.1 } else { 0 });
        for (i, elements) in row.chunks(2).enumerate().skip(first) {
            panel[i * width + col] = pair([elements[0], elements.get(1).copied().unwrap_or(0)]);
        }
    }
}

/// Transposes pairs of elements in registers; returns the number of rows and pairs done.
#[cfg(target_arch = "x86_64")]
fn pack_tiles(panel: &mut [u32], width: usize, x: Mat<'_, u16>) -> (usize, usize) {
    use super::{TILE, transpose_tile, transposes_in_registers};
    if !transposes_in_registers() || x.col_stride != 1 || !x.row_stride.is_multiple_of(2) {
        return (0, 0);
    }
    let (rows, pairs) = (x.rows / TILE * TILE, x.cols / 2 / TILE * TILE);
    assert!(rows <= width && pairs * width <= panel.len());
    for (row, pair) in (0..rows).step_by(TILE).flat_map(|r| (0..pairs).step_by(TILE).map(move |p| (r, p))) {
        // SAFETY: the processor has the instructions; the tile lies within the matrix and the panel.
        unsafe {
            let from = x.first.add(row * x.row_stride + 2 * pair).cast();
            let to = panel.as_mut_ptr().add(pair * width + row).cast();
            transpose_tile(from, x.row_stride / 2, to, width);
        }
    }
    (rows, pairs)
}

#[cfg(not(target_arch = "x86_64"))]
fn pack_tiles(_: &mut [u32], _: usize, _: Mat<'_, u16>) -> (usize, usize) {
    (0, 0)
}

/// The rows of a left side, in place if the terms of a pair are neighbours, else packed. An odd number of terms is packed
/// too if the product has a factor, because its last pair extends sums that were written.
fn left(a: Mat<'_, u16>, factor: f32, scratch: &mut Vec<u32>) -> Rows {
    let odd = !a.cols.is_multiple_of(2);
    if a.col_stride == 1 && (!odd || factor == 1.0) {
        return Rows { first: a.first, row: a.row_stride, pair: 2, odd };
    }
    let width = padded(a.rows);
    scratch.resize(a.cols.div_ceil(2) * width, 0);
    pack(scratch, a.t());
    Rows { first: scratch.as_ptr().cast(), row: 2, pair: 2 * width, odd: false }
}

/// `out = factor * a @ b`, or adds that to `out`, on the calling thread; a left side that is not read in place is packed
/// into `scratch`, at most [`packed_rows`] elements.
///
/// # Panics
/// If shapes do not match.
#[track_caller]
pub(in crate::ops) fn matmul_here(
    out: &mut MatMut<'_>,
    write: Write,
    factor: f32,
    a: Mat<'_, u16>,
    b: Block<'_>,
    scratch: &mut Vec<u32>,
) {
    check([out.rows, out.cols], a, [b.rows.len(), b.cols.len()]);
    let (path, pairs) = (path(), a.cols.div_ceil(2));
    for rows in (0..a.rows).step_by(GROUP).map(|row| row..a.rows.min(row + GROUP)) {
        let (left, mut out) = (left(a.rows(rows.clone()), factor, scratch), out.rows(rows));
        for cols in b.panels() {
            let right = b.at(cols.start);
            // SAFETY: the shapes match, and panels hold whole registers.
            unsafe { add_products(path, left, right, pairs, &mut out.cols(cols), write, factor) };
        }
    }
}

/// Maximum elements of the rows that [`matmul_here`] packs at a time, for sums of this many terms.
pub(in crate::ops) fn packed_rows(terms: usize) -> usize {
    terms.div_ceil(2) * GROUP
}

#[track_caller]
fn check([rows, cols]: [usize; 2], a: Mat<'_, u16>, [b_rows, b_cols]: [usize; 2]) {
    assert!(
        a.rows == rows && b_cols == cols && a.cols == b_rows,
        "[{}, {}] @ [{b_rows}, {b_cols}] is no [{rows}, {cols}]",
        a.rows,
        a.cols
    );
}

/// `out = a @ b`, or continues the chains of `out` with it, on the threads of the current pool.
///
/// # Panics
/// If shapes do not match.
#[track_caller]
pub(in crate::ops) fn matmul(out: &mut MatMut<'_>, write: Write, a: Mat<'_, u16>, b: Mat<'_, u16>) {
    let (path, pairs, rows) = (path(), a.cols.div_ceil(2), out.rows);
    spread(out.rows(0..rows), a, b, |left, right, mut out, _| {
        // SAFETY: `spread` passes rows and columns of the output's shape.
        unsafe { add_products(path, left, right, pairs, &mut out, write, 1.0) };
    });
}

/// `a @ b`, row-major and not rounded, into a reused vector, whose chains it can continue, on the threads of the current
/// pool.
///
/// # Panics
/// If shapes do not match.
#[track_caller]
pub(in crate::ops) fn product_into(out: &mut Vec<f32>, keep: Keep, a: Mat<'_, u16>, b: Mat<'_, u16>) {
    super::write_into(out, keep, [a.rows, a.cols, b.cols], |out, write| matmul(out, write, a, b));
}

/// `start + a @ b`, row-major, rounded once to nearest, on the threads of the current pool.
///
/// # Panics
/// If shapes do not match.
#[track_caller]
pub(in crate::ops) fn product(start: Start<'_, u16>, a: Mat<'_, u16>, b: Mat<'_, u16>) -> Vec<u16> {
    let mut out = vec![0u16; a.rows * b.cols];
    product_columns(&mut MatMut::new(&mut out, a.rows, b.cols), 0..b.cols, start, a, b);
    out
}

/// The columns `of` a product, whose right side has only these, into the product `out`.
///
/// # Panics
/// If shapes do not match.
#[track_caller]
pub(super) fn product_columns(
    out: &mut MatMut<'_, u16>,
    of: Range<usize>,
    start: Start<'_, u16>,
    a: Mat<'_, u16>,
    b: Mat<'_, u16>,
) {
    let (rows, cols) = (out.rows, out.cols);
    assert!(a.cols > 0, "a product sums over at least one element");
    let (matrix, row) = match start {
        Start::Nothing => (None, None),
        Start::Rows(row) => (None, Some(row)),
        Start::Matrix(sum) => (Some(sum), None),
        Start::Sum(sum, row) => (Some(sum), Some(row)),
    };
    let fits = matrix.is_none_or(|sum| sum.len() == rows * cols) && row.is_none_or(|row| row.len() == cols);
    assert!(fits, "a product [{rows}, {cols}] is added to");
    let (path, pairs) = (path(), a.cols.div_ceil(2));
    spread(out.cols(of.clone()), a, b, |left, right, mut out, (first_row, first_col)| {
        let first_col = of.start + first_col;
        let mut sums = [0f32; GROUP * COLS];
        let sums = &mut sums[..out.rows * out.cols];
        let part = |row: usize| (first_row + row) * cols + first_col;
        vectorized(
            #[inline(always)]
            || {
                for (i, sums) in sums.chunks_exact_mut(out.cols).enumerate() {
                    let matrix = matrix.map(|sum| &sum[part(i)..]);
                    begin(sums, matrix, row.map(|row| &row[first_col..]));
                }
            },
        );
        // SAFETY: `spread` passes rows and columns of the output's shape.
        unsafe {
            let mut sums = MatMut::new(sums, out.rows, out.cols);
            add_products(path, left, right, pairs, &mut sums, Write::Add, 1.0);
        }
        let width = out.cols;
        vectorized(
            #[inline(always)]
            || {
                for (i, sums) in sums.chunks_exact(width).enumerate() {
                    out.row(i).iter_mut().zip(sums).for_each(|(out, x)| *out = rounded(*x));
                }
            },
        );
    });
}

/// Writes the start of chains: the sum of the parts of a matrix and of a row that are there.
#[inline(always)]
fn begin(sums: &mut [f32], matrix: Option<&[u16]>, row: Option<&[u16]>) {
    match (matrix, row) {
        (None, None) => {}
        (Some(x), None) | (None, Some(x)) => {
            sums.iter_mut().zip(x).for_each(|(sum, x)| *sum = wide(*x));
        }
        (Some(x), Some(y)) => {
            sums.iter_mut().zip(x.iter().zip(y)).for_each(|(sum, (x, y))| *sum = wide(*x) + wide(*y));
        }
    }
}

/// The value of a `bf16`.
#[inline(always)]
pub(in crate::ops) fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest `bf16`.
#[inline(always)]
pub(in crate::ops) fn rounded(x: f32) -> u16 {
    bf16::from_f32(x).to_bits()
}

/// Rounds the rows of a matrix of `cols` columns in place; [`halves`] reads them.
#[inline(always)]
pub(in crate::ops) fn round_in_place(row: &mut [f32]) {
    const PART: usize = 256;
    let mut part = [0; PART];
    for start in (0..row.len()).step_by(PART) {
        let from = &row[start..row.len().min(start + PART)];
        let part = &mut part[..from.len()];
        part.iter_mut().zip(from).for_each(|(out, x)| *out = rounded(*x));
        // Up to here all elements were read.
        bytemuck::cast_slice_mut(row)[start..start + part.len()].copy_from_slice(part);
    }
}

/// The `[rows, cols]` whose rows [`round_in_place`] has rounded.
#[track_caller]
pub(in crate::ops) fn halves(data: &[f32], rows: usize, cols: usize) -> Mat<'_, u16> {
    Mat::new(bytemuck::cast_slice(data), rows, 2 * cols).cols(0..cols)
}

/// Panels that each thread takes at least, so that all have as much to do.
const PANELS: usize = 8;

/// Calls `each` with at most [`GROUP`] rows of `a`, at most [`COLS`] columns of `b`, the block of the output of that shape,
/// and the place of its first element; on the threads of the current pool. Packs columns once for all rows if those are
/// read in place, else all columns, and rows once.
#[track_caller]
fn spread<T: Send>(
    out: MatMut<'_, T>,
    a: Mat<'_, u16>,
    b: Mat<'_, u16>,
    each: impl Fn(Rows, Columns, MatMut<'_, T>, (usize, usize)) + Sync,
) {
    check([out.rows, out.cols], a, [b.rows, b.cols]);
    if out.rows == 0 || out.cols == 0 {
        return;
    }
    let alone = out.rows * out.cols * a.cols < SPREAD_FROM;
    let groups = |rows: usize| (0..rows).step_by(GROUP).map(move |row| row..rows.min(row + GROUP));
    if a.col_stride == 1 {
        let several = (PANELS * threads_here()).div_ceil(out.cols.div_ceil(COLS));
        let rows = out.rows.div_ceil(several).next_multiple_of(GROUP);
        let task = |panel: &mut Panels, ((row, col), mut out): ((usize, usize), MatMut<'_, T>)| {
            panel.pack(b.cols(col..col + out.cols));
            for rows in groups(out.rows) {
                let from = row + rows.start;
                let left = left(a.rows(from..from + rows.len()), 1.0, &mut Vec::new());
                each(left, panel.at(0, 0), out.rows(rows), (from, col));
            }
        };
        return run(out.blocks(rows, COLS), alone, Panels::default, task);
    }
    let mut panels = Panels::default();
    if alone {
        panels.pack(b)
    } else {
        panels.spread(b)
    }
    let (panels, cols) = (panels.whole(), out.cols);
    let task = |scratch: &mut Vec<u32>, ((row, _), mut out): ((usize, usize), MatMut<'_, T>)| {
        let left = left(a.rows(row..row + out.rows), 1.0, scratch);
        for cols in panels.panels() {
            each(left, panels.at(cols.start), out.cols(cols.clone()), (row, cols.start));
        }
    };
    run(out.blocks(GROUP, cols), alone, Vec::new, task);
}

/// Runs tasks on this thread, or on those of the current pool.
fn run<I: Send, S>(
    items: Vec<I>,
    alone: bool,
    scratch: impl Fn() -> S + Sync + Send,
    task: impl Fn(&mut S, I) + Sync + Send,
) {
    if alone {
        let mut scratch = scratch();
        return items.into_iter().for_each(|item| task(&mut scratch, item));
    }
    items.into_par_iter().for_each_init(scratch, task);
}

impl<'a, T> MatMut<'a, T> {
    /// Blocks of at most this many rows and columns, each with the place of its first element.
    fn blocks(self, rows: usize, cols: usize) -> Vec<((usize, usize), MatMut<'a, T>)> {
        let places = (0..self.cols)
            .step_by(cols)
            .flat_map(|col| (0..self.rows).step_by(rows).map(move |row| (row, col)));
        let block = |(row, col): (usize, usize)| {
            // SAFETY: an element of the matrix; blocks do not overlap.
            let first = unsafe { self.first.add(row * self.row_stride + col) };
            let (rows, cols) = (rows.min(self.rows - row), cols.min(self.cols - col));
            (
                (row, col),
                MatMut { first, rows, cols, row_stride: self.row_stride, data: std::marker::PhantomData },
            )
        };
        places.map(block).collect()
    }
}

#[cfg(test)]
pub(in crate::ops) mod testing {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::sync::{PoisonError, RwLock};

    /// Whether products are emulated, as they are for the process while the lock is held for writing.
    pub(super) static EMULATED: AtomicBool = AtomicBool::new(false);
    static PATHS: RwLock<()> = RwLock::new(());

    /// Runs `f` with the emulation, as are all products of the process in the meantime: it changes no bit.
    pub(in crate::ops) fn emulated<R>(f: impl FnOnce() -> R) -> R {
        struct Ends;
        impl Drop for Ends {
            fn drop(&mut self) {
                EMULATED.store(false, Relaxed);
            }
        }
        let _lock = PATHS.write().unwrap_or_else(PoisonError::into_inner);
        let _ends = Ends;
        EMULATED.store(true, Relaxed);
        f()
    }

    /// Runs `f` on the path of the process, while no test emulates.
    pub(in crate::ops) fn native<R>(f: impl FnOnce() -> R) -> R {
        let _lock = PATHS.read().unwrap_or_else(PoisonError::into_inner);
        f()
    }

    /// `start` and the products of `terms`, as the module defines them.
    pub(in crate::ops) fn chain(start: f32, terms: &[(f32, f32)]) -> f32 {
        let step = |sum: f32, (a, b): (f32, f32)| step(sum, flushed(a), flushed(b));
        terms.chunks(2).fold(flushed(start), |sum, pair| {
            let odd = pair.get(1).copied().unwrap_or((0.0, 0.0));
            step(step(sum, odd), pair[0])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::with_threads;
    use super::testing::{chain, emulated, native};
    use super::*;
    use hydra_core::Key;
    use proptest::prelude::*;

    fn numbers(seed: u64, len: usize) -> Vec<u16> {
        let key = Key::new(seed);
        (0..len).map(|i| rounded(key.normal(i as u64) as f32)).collect()
    }

    /// Numbers of every magnitude, few of them infinite or none.
    fn any(seed: u64, len: usize) -> Vec<u16> {
        let key = Key::new(seed);
        (0..len).map(|i| key.bits(i as u64) as u16).collect()
    }

    fn transposed(a: &[u16], rows: usize, cols: usize) -> Vec<u16> {
        (0..rows * cols).map(|i| a[(i % rows) * cols + i / rows]).collect()
    }

    /// Both sides of a product, each stored as it is or transposed.
    struct Sides {
        shape: [usize; 3],
        values: [Vec<u16>; 2],
        stored: [Vec<u16>; 2],
        turned: [bool; 2],
    }

    impl Sides {
        fn new(shape: [usize; 3], turned: [bool; 2], of: impl Fn(u64, usize) -> Vec<u16>) -> Self {
            let [m, k, n] = shape;
            let values = [of(1, m * k), of(2, k * n)];
            let stored = [(0, m, k), (1, k, n)].map(|(i, rows, cols): (usize, usize, usize)| {
                if turned[i] { transposed(&values[i], rows, cols) } else { values[i].clone() }
            });
            Self { shape, values, stored, turned }
        }

        fn mats(&self) -> [Mat<'_, u16>; 2] {
            let ([m, k, n], [a, b]) = (self.shape, &self.stored);
            let of = |data, rows, cols, turned| {
                if turned { Mat::new(data, cols, rows).t() } else { Mat::new(data, rows, cols) }
            };
            [of(a, m, k, self.turned[0]), of(b, k, n, self.turned[1])]
        }

        /// An element by the definition.
        fn element(&self, row: usize, col: usize, start: f32) -> f32 {
            let ([_, k, n], [a, b]) = (self.shape, &self.values);
            let terms: Vec<(f32, f32)> =
                (0..k).map(|l| (wide(a[row * k + l]), wide(b[l * n + col]))).collect();
            chain(start, &terms)
        }

        fn product(&self, start: Start<'_, u16>) -> Vec<u16> {
            let [a, b] = self.mats();
            product(start, a, b)
        }

        /// The product in `f32`, added to itself.
        fn twice(&self) -> Vec<f32> {
            let ([m, _, n], [a, b]) = (self.shape, self.mats());
            let mut out = vec![f32::NAN; m * n];
            matmul(&mut MatMut::new(&mut out, m, n), Write::Set, a, b);
            matmul(&mut MatMut::new(&mut out, m, n), Write::Add, a, b);
            out
        }
    }

    /// The bits, the same for all that are no numbers.
    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
    }

    fn values(bits: &[u16]) -> Vec<f32> {
        bits.iter().map(|x| wide(*x)).collect()
    }

    const TURNS: [[bool; 2]; 4] = [[false, false], [false, true], [true, false], [true, true]];

    proptest! {
        #[test]
        fn products_are_the_chains_of_the_definition_for_any_shape_order_and_addend(
            m in 1usize..60, k in 1usize..50, n in 1usize..140, turns in 0usize..4, matrix: bool, row: bool, wild: bool,
        ) {
            let sides = Sides::new([m, k, n], TURNS[turns], if wild { any } else { numbers });
            let (sum, bias) = (numbers(3, m * n), numbers(4, n));
            let start = match (matrix, row) {
                (false, false) => Start::Nothing,
                (true, false) => Start::Matrix(&sum),
                (false, true) => Start::Rows(&bias),
                (true, true) => Start::Sum(&sum, &bias),
            };
            let first = |i: usize| {
                let matrix = if matrix { wide(sum[i]) } else { 0.0 };
                if row { matrix + wide(bias[i % n]) } else { matrix }
            };
            let expected: Vec<u16> =
                (0..m * n).map(|i| rounded(sides.element(i / n, i % n, first(i)))).collect();
            let found = native(|| sides.product(start));
            assert_eq!(bits(&values(&found)), bits(&values(&expected)));
            assert_eq!(bits(&values(&emulated(|| sides.product(start)))), bits(&values(&expected)));
            let twice: Vec<f32> = (0..m * n)
                .map(|i| sides.element(i / n, i % n, sides.element(i / n, i % n, 0.0)))
                .collect();
            assert_eq!(bits(&native(|| sides.twice())), bits(&twice));
            assert_eq!(bits(&emulated(|| sides.twice())), bits(&twice));
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_on_blocks_of_terms() {
        // More terms than are summed in registers, and several groups and panels; some are left over.
        for (shape, turned) in
            [[2 * GROUP + 5, 2 * PAIRS + 70, 2 * COLS + 9], [7, 5 * PAIRS + 1, COLS]].into_iter().zip(TURNS)
        {
            let sides = Sides::new(shape, turned, numbers);
            let run = || (sides.product(Start::Nothing), sides.twice());
            let one = native(|| with_threads(1, run));
            assert!((2..4).all(|threads| with_threads(threads, run) == one), "{shape:?}");
            assert!(emulated(run) == one, "{shape:?}");
            let n = shape[2];
            for i in (0..one.0.len()).step_by(131) {
                let once = sides.element(i / n, i % n, 0.0);
                assert_eq!(one.0[i], rounded(once));
                assert_eq!(one.1[i], sides.element(i / n, i % n, once));
            }
        }
    }

    #[test]
    fn large_products_are_close_to_the_exact_ones_in_every_order() {
        let shape @ [m, k, n] = [130, 3000, 200];
        for turned in TURNS {
            let sides = Sides::new(shape, turned, numbers);
            let (found, [a, b]) = (sides.twice(), &sides.values);
            for i in (0..m * n).step_by(61) {
                let terms =
                    (0..k).map(|l| f64::from(wide(a[i / n * k + l])) * f64::from(wide(b[l * n + i % n])));
                let exact = 2.0 * terms.sum::<f64>();
                assert!((f64::from(found[i]) - exact).abs() < 1e-3, "{turned:?}, {i}: {} {exact}", found[i]);
            }
        }
    }

    #[test]
    fn blocks_of_packed_matrices_have_the_bits_of_their_own_products() {
        let (m, k, n) = (2 * GROUP + 1, 38, 3 * COLS + 5);
        for turned in TURNS {
            let sides = Sides::new([m, k, n], turned, numbers);
            let [a, b] = sides.mats();
            let (mut panels, mut scratch) = (Panels::default(), Vec::new());
            panels.pack(b);
            for (terms, cols) in [(0..k, 0..n), (4..k, 16..n - 3), (2..30, 80..96), (0..k - 2, 48..130)] {
                let part = panels.whole().rows(terms.clone()).cols(cols.clone());
                let left = a.cols(terms.clone());
                let mut run = |write: Write, factor: f32| {
                    let mut out = vec![0.25; m * cols.len()];
                    let mut to = MatMut::new(&mut out, m, cols.len());
                    matmul_here(&mut to, write, factor, left, part.clone(), &mut scratch);
                    out
                };
                let mut alone = vec![0.0; m * cols.len()];
                let right = b.rows(terms.clone()).cols(cols.clone());
                matmul(&mut MatMut::new(&mut alone, m, cols.len()), Write::Set, left, right);
                let scaled: Vec<f32> = alone.iter().map(|x| x * 0.3).collect();
                let added: Vec<f32> = scaled.iter().map(|x| 0.25 + x).collect();
                for path in 0..2 {
                    let all = || [run(Write::Set, 1.0), run(Write::Set, 0.3), run(Write::Add, 0.3)];
                    let found = if path == 0 { native(all) } else { emulated(all) };
                    assert!(found == [alone.clone(), scaled.clone(), added.clone()], "{turned:?}, {cols:?}");
                }
                assert!(scratch.len() <= packed_rows(k));
            }
        }
    }

    #[test]
    fn an_instruction_that_there_is_computes_as_defined() {
        assert!(!has_instruction() || agree());
        assert_eq!(chain(1.0, &[(2.0, 3.0), (4.0, 5.0), (6.0, 7.0)]), 69.0);
        // Large terms that cancel: the odd one of a pair comes first.
        assert_eq!(chain(1e8, &[(1.0, 1.0), (-1e8, 1.0)]), 1.0);
        assert_eq!(chain(1e8, &[(-1e8, 1.0), (1.0, 1.0)]), 0.0);
        let smallest = f32::MIN_POSITIVE;
        assert_eq!(chain(smallest / 2.0, &[(smallest / 2.0, 4.0), (0.0, 0.0)]), 0.0);
        assert_eq!(chain(0.0, &[(smallest, 0.75)]).to_bits(), 0);
        assert_eq!(chain(0.0, &[(smallest, -0.75)]).to_bits(), (-0.0f32).to_bits());
        // A sum below the smallest normal number by some 2^-150: by half of it, the tie rounds up to that number.
        for (part, expected) in [(0.0, smallest), (0.5, smallest), (0.75, 0.0), (1.0, 0.0), (1.5, 0.0)] {
            let factors = [-part * 2f32.powi(-75), 2f32.powi(-75)];
            assert_eq!(chain(smallest, &[(factors[0], factors[1])]), expected, "{part}");
            let [a, b, start] = [factors[0], factors[1], smallest].map(|x| [rounded(x)]);
            let run = || product(Start::Rows(&start), Mat::new(&a, 1, 1), Mat::new(&b, 1, 1));
            let both = [native(run), emulated(run)];
            assert_eq!(both, [(); 2].map(|()| vec![rounded(expected)]), "{part}");
        }
    }

    #[test]
    #[should_panic(expected = "[2, 3] @ [2, 2] is no [2, 2]")]
    fn shapes_that_do_not_fit_are_named() {
        let data = [0; 6];
        product(Start::Nothing, Mat::new(&data, 2, 3), Mat::new(&data[..4], 2, 2));
    }
}
