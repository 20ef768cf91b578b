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

/// The lowest bits of `f32`, which differ within an interval of [`DynamicMap::below`].
const IGNORED_BITS: u32 = 16;

/// The bits of the end of the first interval but for [`IGNORED_BITS`]: 2^-23, which is below every midpoint.
const FIRST: u32 = (127 - 23) << (23 - IGNORED_BITS);

/// The intervals up to 1: 128 for each power of two.
const INTERVALS: usize = 23 * 128 + 1;

/// The powers of ten of a map: the k-th one has `2^k` values of each sign, and twice as many without signs.
const DECADES: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// The values that an index stands for, before the scale: `create_dynamic_map` of bitsandbytes, to the bit.
#[derive(Debug)]
pub struct DynamicMap {
    values: [f32; VALUES],
    /// The midpoints between neighbours among the values that are not negative, and infinity: the index of an element differs
    /// from that of zero by the number of midpoints below its magnitude.
    midpoints: [f32; VALUES],
    /// The number of midpoints below each interval of magnitudes. An interval has one midpoint at most.
    below: [u32; INTERVALS],
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
        while zero + i + 1 < VALUES {
            midpoints[i] = (values[zero + i] + values[zero + i + 1]) / 2.0;
            i += 1;
        }
        Self { values, midpoints, below: below(&midpoints), zero: zero as u8 }
    }

    /// The values, in ascending order.
    pub fn values(&self) -> &[f32; VALUES] {
        &self.values
    }

    /// Quantizes as many values as the block has.
    #[inline(always)]
    fn quantize_block(&self, values: &[f32], block: &mut [u8]) {
        let (scale, indices) = block.split_at_mut(SCALE_BYTES);
        let largest = largest(values);
        scale.copy_from_slice(&largest.to_ne_bytes());
        if largest == 0.0 {
            return indices.fill(0);
        }
        let mut scaled = [0.0; BLOCK];
        for (scaled, x) in scaled.iter_mut().zip(values) {
            *scaled = x / largest;
        }
        indices.copy_from_slice(&self.indices(&scaled)[..values.len()]);
    }

    /// The indices of the nearest values, for magnitudes up to 1.
    ///
    /// Each loop looks one thing up without a branch, so that it is compiled to vector instructions.
    #[inline(always)]
    fn indices(&self, x: &[f32; BLOCK]) -> [u8; BLOCK] {
        let mut steps = [0_u32; BLOCK];
        for (steps, x) in steps.iter_mut().zip(x) {
            let interval = (x.abs().to_bits() >> IGNORED_BITS).saturating_sub(FIRST);
            *steps = self.below[interval.min(INTERVALS as u32 - 1) as usize];
        }
        for (steps, x) in steps.iter_mut().zip(x) {
            // It is an index already; the compiler sees it by the remainder.
            let midpoint = self.midpoints[*steps as usize % VALUES];
            *steps = steps.wrapping_add(u32::from(midpoint < x.abs()));
        }
        let (zero, mut indices) = (u32::from(self.zero), [0; BLOCK]);
        for ((index, steps), x) in indices.iter_mut().zip(steps).zip(x) {
            // A value below zero stays below zero.
            let (down, up) = (zero.wrapping_sub(steps.max(1).min(zero)), zero.wrapping_add(steps));
            *index = (if *x < 0.0 { down } else { up }) as u8;
        }
        indices
    }

    /// The values of as many elements of a block as `out` has.
    #[inline(always)]
    fn dequantize_block(&self, block: &[u8], out: &mut [f32]) {
        let (scale, indices) = block.split_at(SCALE_BYTES);
        let scale = f32::from_ne_bytes([scale[0], scale[1], scale[2], scale[3]]);
        for (out, index) in out.iter_mut().zip(indices) {
            *out = self.values[usize::from(*index)] * scale;
        }
    }
}

/// The largest magnitude. Any order of comparisons gives it, so vector instructions can compare 16 at a time.
#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    let mut largest = [0.0_f32; 16];
    for values in values.chunks(largest.len()) {
        for (so_far, x) in largest.iter_mut().zip(values) {
            *so_far = so_far.max(x.abs());
        }
    }
    largest.into_iter().fold(0.0, f32::max)
}

/// The number of midpoints below each interval.
const fn below(midpoints: &[f32; VALUES]) -> [u32; INTERVALS] {
    let mut below = [0; INTERVALS];
    let (mut interval, mut count) = (1, 0);
    while interval < INTERVALS {
        let start = f32::from_bits((FIRST + interval as u32) << IGNORED_BITS);
        while midpoints[count] < start {
            count += 1;
        }
        below[interval] = count as u32;
        interval += 1;
    }
    below
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Key;

    fn index(map: &DynamicMap, x: f32) -> usize {
        usize::from(map.indices(&[x; BLOCK])[BLOCK - 1])
    }

    #[test]
    fn the_index_is_that_of_the_nearest_value() {
        let counted = |map: &DynamicMap, x: f32| {
            let zero = usize::from(map.zero);
            let is_below = |i: usize| (map.values[i] + map.values[i + 1]) / 2.0 < x.abs();
            let steps = (zero..VALUES - 1).filter(|i| is_below(*i)).count();
            if x < 0.0 { zero - steps.clamp(1, zero) } else { zero + steps }
        };
        for (map, sign) in [(&SIGNED, 1.0), (&SIGNED, -1.0), (&UNSIGNED, 1.0)] {
            let all = map.midpoints.iter().chain(&map.values).filter(|x| x.is_finite()).map(|x| x.abs());
            let near =
                all.flat_map(|x| [-1, 0, 1].map(|by| f32::from_bits(x.to_bits().saturating_add_signed(by))));
            let drawn = (0..20_000).map(|i| 10_f32.powf(-8.0 * Key::new(3).uniform(i) as f32));
            for x in near.chain(drawn).chain([0.0, 1e-30]).filter(|x| *x <= 1.0) {
                assert_eq!(index(map, sign * x), counted(map, sign * x), "{}", sign * x);
            }
            // Every value is its own nearest one.
            for (at, value) in map.values.iter().enumerate() {
                assert_eq!(index(map, *value), at, "{value}");
            }
        }
    }
}
