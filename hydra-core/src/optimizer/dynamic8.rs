//! The 8-bit type of optimizer moments (Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022), as
//! bitsandbytes computes it.
//!
//! A moment is quantized in blocks of [`BLOCK`] consecutive elements of a parameter. The scale of a block is its largest
//! magnitude. Each element is stored as an index into a [`DynamicMap`], and its value is this entry times the scale, rounded
//! once to `f32`. The first moment has the signed map and the second one the unsigned map.
//!
//! In memory a block is the scale as `f32` in native byte order, followed by the indices. The last block of a parameter can
//! have fewer elements, and has as many indices. Zeroed bytes are zeros.

/// The elements of a block.
pub const BLOCK: usize = 256;

/// The bytes of a block.
pub const BLOCK_BYTES: usize = SCALE_BYTES + BLOCK;

const SCALE_BYTES: usize = size_of::<f32>();

/// The number of values of 8 bits.
const VALUES: usize = 256;

/// The widths that a search for one of [`VALUES`] values halves.
const HALVES: [u32; 8] = [128, 64, 32, 16, 8, 4, 2, 1];

/// The powers of ten of a map: the k-th one has `2^k` values of each sign, and twice as many without signs.
const DECADES: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// The values that an index stands for, before the scale: `create_dynamic_map` of bitsandbytes, to the bit.
#[derive(Debug)]
pub struct DynamicMap {
    values: [f32; VALUES],
    /// The midpoints between neighbours in `values`, and infinity: an element has the index of the number of midpoints
    /// below it.
    midpoints: [f32; VALUES],
    /// The index of zero.
    zero: u8,
}

/// The map of values of both signs.
pub static SIGNED: DynamicMap = DynamicMap::new(true);

/// The map of values that are not negative.
pub static UNSIGNED: DynamicMap = DynamicMap::new(false);

impl DynamicMap {
    const fn new(signed: bool) -> Self {
        let mut values = [0.0; VALUES];
        let zero = if signed { VALUES / 2 - 1 } else { 0 };
        let (mut at, mut decade) = (zero + 1, 0);
        while decade < DECADES.len() {
            let means = if signed { 1 << decade } else { 2 << decade };
            let mut mean = 0;
            while mean < means {
                let middle = (boundary(means, mean) + boundary(means, mean + 1)) / 2.0;
                values[at] = DECADES[decade] * middle;
                if signed {
                    values[2 * zero - at] = -values[at];
                }
                (at, mean) = (at + 1, mean + 1);
            }
            decade += 1;
        }
        values[VALUES - 1] = 1.0;
        let mut midpoints = [f32::INFINITY; VALUES];
        let mut i = 0;
        while i + 1 < VALUES {
            midpoints[i] = (values[i] + values[i + 1]) / 2.0;
            i += 1;
        }
        Self { values, midpoints, zero: zero as u8 }
    }

    /// The values, in ascending order.
    pub fn values(&self) -> &[f32; VALUES] {
        &self.values
    }

    /// Quantizes as many values as the block has.
    #[inline(always)]
    fn quantize_block(&self, values: &[f32], block: &mut [u8]) {
        let (scale, indices) = block.split_at_mut(SCALE_BYTES);
        let largest = values.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
        scale.copy_from_slice(&largest.to_ne_bytes());
        if largest == 0.0 {
            return indices.fill(0);
        }
        let (mut scaled, mut at) = ([0.0; BLOCK], [0_u32; BLOCK]);
        scaled.iter_mut().zip(values).for_each(|(scaled, x)| *scaled = x / largest);
        for half in HALVES {
            for (at, x) in at.iter_mut().zip(&scaled) {
                let is_above = self.midpoints[(*at + half - 1) as usize % VALUES] < *x;
                *at += if is_above { half } else { 0 };
            }
        }
        let zero = u32::from(self.zero);
        for ((index, at), x) in indices.iter_mut().zip(at).zip(values) {
            // A value below zero stays below zero.
            *index = (at - u32::from(*x < 0.0 && at == zero && zero > 0)) as u8;
        }
    }

    /// The values of as many elements of a block as `out` has.
    #[inline(always)]
    fn dequantize_block(&self, block: &[u8], out: &mut [f32]) {
        let (scale, indices) = block.split_at(SCALE_BYTES);
        let scale = f32::from_ne_bytes([scale[0], scale[1], scale[2], scale[3]]);
        out.iter_mut().zip(indices).for_each(|(out, index)| *out = self.values[usize::from(*index)] * scale);
    }
}

/// The boundary `index` of `intervals` equal ones from 0.1 to 1: `torch.linspace`, which fuses the product and the sum.
const fn boundary(intervals: usize, index: usize) -> f32 {
    let step = (1.0_f32 - 0.1_f32) / intervals as f32;
    match index < intervals.div_ceil(2) {
        true => (0.1_f32 as f64 + step as f64 * index as f64) as f32,
        false => (1.0 - step as f64 * (intervals - index) as f64) as f32,
    }
}

/// The bytes before an element of a parameter.
pub(super) fn bytes_before(element: usize) -> usize {
    let rest = element % BLOCK;
    element / BLOCK * BLOCK_BYTES + if rest > 0 { SCALE_BYTES + rest } else { 0 }
}

/// The elements of blocks of this many bytes.
pub(super) fn elements_of(bytes: usize) -> usize {
    bytes / BLOCK_BYTES * BLOCK + (bytes % BLOCK_BYTES).saturating_sub(SCALE_BYTES)
}

/// The bytes of the block at this index.
#[inline(always)]
fn block(bytes: &mut [u8], index: usize) -> &mut [u8] {
    let end = bytes.len().min((index + 1) * BLOCK_BYTES);
    &mut bytes[index * BLOCK_BYTES..end]
}

/// Reads the block at this index; `out` has as many elements.
#[inline(always)]
pub(super) fn read_block(map: &DynamicMap, bytes: &mut [u8], index: usize, out: &mut [f32]) {
    map.dequantize_block(block(bytes, index), out);
}

/// Writes the block at this index, of as many values.
#[inline(always)]
pub(super) fn write_block(map: &DynamicMap, bytes: &mut [u8], index: usize, values: &[f32]) {
    map.quantize_block(values, block(bytes, index));
}
