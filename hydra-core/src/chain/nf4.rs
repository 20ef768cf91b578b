//! NF4, the 4-bit type of frozen matrices (Dettmers et al., "QLoRA", 2023), as bitsandbytes computes it.
//!
//! A matrix is quantized in blocks of [`BLOCK`] consecutive elements in row-major order, across the ends of rows. The scale
//! of a block is its largest magnitude. Each element is stored as an index into [`TABLE`], and its value is this entry
//! times the scale, rounded once to `f32`.
//!
//! In memory a block is [`BLOCK_BYTES`] bytes: the scale as `f32` in native byte order, and the indices, two in a byte: the
//! first of a pair is in the high half. The last block of a matrix can have fewer elements, and has as many
//! bytes.

use std::ops::Range;

/// The elements of a block.
pub const BLOCK: usize = 64;

/// The bytes of a block.
pub const BLOCK_BYTES: usize = size_of::<f32>() + BLOCK / 2;

/// The values that an index stands for, before the scale.
#[allow(clippy::excessive_precision, reason = "as in bitsandbytes")]
pub const TABLE: [f32; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

/// The midpoints between neighbours in [`TABLE`]: an element has the index of the number of midpoints below it.
const MIDPOINTS: [f32; 15] = {
    let mut midpoints = [0.0; 15];
    let mut i = 0;
    while i < midpoints.len() {
        midpoints[i] = (TABLE[i] + TABLE[i + 1]) / 2.0;
        i += 1;
    }
    midpoints
};

/// The least divisor of a block: blocks of zeros are divided by it.
const LEAST: f32 = 1e-38;

/// The bytes of the blocks of `elements` elements, which begin with a block.
pub fn bytes_of(elements: Range<usize>) -> Range<usize> {
    debug_assert!(elements.start.is_multiple_of(BLOCK));
    elements.start / BLOCK * BLOCK_BYTES..elements.end.div_ceil(BLOCK) * BLOCK_BYTES
}

/// The shape of a tensor of 32-bit words that holds the blocks of `elements` elements.
pub fn shape(elements: usize) -> [usize; 2] {
    [elements.div_ceil(BLOCK), BLOCK_BYTES / size_of::<u32>()]
}

/// Quantizes finite values to the blocks `out`.
///
/// # Panics
/// If there are not as many blocks as the values have.
pub fn quantize(values: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), bytes_of(0..values.len()).len(), "the blocks of {} values", values.len());
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || blocks(values, out).for_each(|(values, block)| quantize_block(values, block)),
    );
}

/// Quantizes values that blocks had, and returns whether the new blocks have the same values, to the bit. Blocks with a
/// scale below zero, which double quantization can give, are found too.
///
/// # Panics
/// Those of [`quantize`].
pub fn requantize(values: &[f32], out: &mut [u8]) -> bool {
    quantize(values, out);
    blocks(values, out).all(|(values, block)| {
        has_values(block, values) || {
            quantize_by(values, -largest(values), block);
            has_values(block, values)
        }
    })
}

/// The values of blocks, from the element `first` on.
///
/// # Panics
/// If the blocks have fewer elements.
pub fn dequantize(from: &[u8], first: usize, out: &mut [f32]) {
    let mut at = first;
    let mut out = out;
    while !out.is_empty() {
        let (block, inside) = (&from[at / BLOCK * BLOCK_BYTES..][..BLOCK_BYTES], at % BLOCK);
        let (now, rest) = out.split_at_mut(out.len().min(BLOCK - inside));
        let scale = scale(block);
        for (i, out) in (inside..).zip(now.iter_mut()) {
            *out = TABLE[index(block, i)] * scale;
        }
        (at, out) = (at + now.len(), rest);
    }
}

/// The scale of a block.
pub fn scale(block: &[u8]) -> f32 {
    let mut bytes = [0; size_of::<f32>()];
    bytes.copy_from_slice(&block[..size_of::<f32>()]);
    f32::from_ne_bytes(bytes)
}

/// The index of an element of a block.
#[inline(always)]
fn index(block: &[u8], element: usize) -> usize {
    let byte = block[size_of::<f32>() + element / 2];
    usize::from(if element.is_multiple_of(2) { byte >> 4 } else { byte & 0xF })
}

fn blocks<'a>(values: &'a [f32], out: &'a mut [u8]) -> impl Iterator<Item = (&'a [f32], &'a mut [u8])> {
    values.chunks(BLOCK).zip(out.chunks_exact_mut(BLOCK_BYTES))
}

#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()))
}

/// Returns whether a block has exactly these values.
fn has_values(block: &[u8], values: &[f32]) -> bool {
    let mut own = [0.0; BLOCK];
    let own = &mut own[..values.len()];
    dequantize(block, 0, own);
    own.iter().zip(values).all(|(own, value)| own.to_bits() == value.to_bits())
}

#[inline(always)]
fn quantize_block(values: &[f32], block: &mut [u8]) {
    let largest = largest(values);
    if values.len() == BLOCK {
        let factor = 1.0 / largest.max(LEAST);
        write_block(largest, values.iter().map(|x| x * factor), block);
    } else {
        // bitsandbytes divides the elements of an incomplete block.
        let divisor = largest.max(LEAST);
        write_block(divisor, values.iter().map(|x| x / divisor), block);
    }
}

/// Quantizes values by a scale that need not be their largest magnitude.
fn quantize_by(values: &[f32], scale: f32, block: &mut [u8]) {
    write_block(scale, values.iter().map(|x| if scale == 0.0 { 0.0 } else { x / scale }), block);
}

#[inline(always)]
fn write_block(scale: f32, scaled: impl Iterator<Item = f32>, block: &mut [u8]) {
    // Elements that are not there have the index of zero.
    let mut indices = [7u8; BLOCK];
    for (index, x) in indices.iter_mut().zip(scaled) {
        let x = x.clamp(-1.0, 1.0);
        *index = MIDPOINTS.iter().map(|midpoint| u8::from(x > *midpoint)).sum();
    }
    let (first, packed) = block.split_at_mut(size_of::<f32>());
    first.copy_from_slice(&scale.to_ne_bytes());
    for (out, pair) in packed.iter_mut().zip(indices.chunks_exact(2)) {
        *out = pair[0] << 4 | pair[1];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Key;

    fn normal(seed: u64, len: usize) -> Vec<f32> {
        let key = Key::new(seed);
        (0..len as u64).map(|i| key.normal(i) as f32 * 0.02).collect()
    }

    fn quantized(values: &[f32]) -> Vec<u8> {
        let mut out = vec![0; bytes_of(0..values.len()).len()];
        quantize(values, &mut out);
        out
    }

    fn read(blocks: &[u8], first: usize, len: usize) -> Vec<f32> {
        let mut out = vec![0.0; len];
        dequantize(blocks, first, &mut out);
        out
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    /// `quantize_4bit(torch.tensor([(i * 37 % 101 - 50) / 64 for i in range(70)]), quant_type="nf4")` of bitsandbytes 0.50.2.
    #[test]
    fn blocks_are_those_of_bitsandbytes() {
        let values: Vec<f32> = (0..70).map(|i| (i * 37 % 101 - 50) as f32 / 64.0).collect();
        let blocks = quantized(&values);
        let first = [
            0x04, 0xC1, 0x6E, 0x29, 0xF3, 0xB0, 0x5D, 0x17, 0xE2, 0x9F, 0x3C, 0x05, 0xD1, 0x8E, 0x2A, 0xF4,
            0xC1, 0x6E, 0x18, 0xE3, 0xB0, 0x5D, 0x17, 0xE2, 0x9F, 0x3B, 0x05, 0xD1, 0x8E, 0x2A, 0xF4, 0xC1,
        ];
        let packed = |block: usize| &blocks[block * BLOCK_BYTES + 4..][..BLOCK / 2];
        assert_eq!([scale(&blocks), scale(&blocks[BLOCK_BYTES..])], [0.78125, 0.65625]);
        assert_eq!(packed(0), first);
        assert_eq!(packed(1)[..3], [0x6E, 0x18, 0xF2]);
        assert!(packed(1)[3..].iter().all(|byte| *byte == 0x77));
    }

    #[test]
    fn a_value_at_a_midpoint_has_the_lower_index() {
        let mut values = vec![0.0; BLOCK];
        values[0] = 1.0;
        values[1..16].copy_from_slice(&MIDPOINTS);
        for (i, midpoint) in MIDPOINTS.iter().enumerate() {
            values[16 + i] = f32::from_bits(midpoint.to_bits() + if *midpoint > 0.0 { 1 } else { 0 });
        }
        let block = quantized(&values);
        let found: Vec<usize> = (1..16).map(|i| index(&block, i)).collect();
        assert_eq!(found, (0..15).collect::<Vec<_>>());
        let above: Vec<usize> = (16..31).map(|i| index(&block, i)).collect();
        let expected = MIDPOINTS.iter().enumerate().map(|(i, midpoint)| i + usize::from(*midpoint > 0.0));
        assert_eq!(above, expected.collect::<Vec<_>>());
    }

    #[test]
    fn values_of_blocks_quantize_to_themselves() {
        for len in [64, 70, 640, 1000] {
            let blocks = quantized(&normal(1, len));
            let values = read(&blocks, 0, len);
            let mut again = vec![0; blocks.len()];
            assert!(requantize(&values, &mut again));
            assert_eq!(again, blocks);
            assert!(!requantize(&normal(1, len), &mut again), "other values are no values of blocks");
        }
        let zeros = quantized(&[0.0; BLOCK]);
        assert_eq!((scale(&zeros), bits(&read(&zeros, 0, BLOCK))), (0.0, vec![0; BLOCK]));
        let mut again = vec![0; BLOCK_BYTES];
        assert!(requantize(&[0.0; BLOCK], &mut again) && again == zeros);
    }

    #[test]
    fn scales_below_zero_are_found() {
        let mut block = quantized(&normal(2, BLOCK));
        let negative = (-scale(&block)).to_ne_bytes();
        block[..4].copy_from_slice(&negative);
        let values = read(&block, 0, BLOCK);
        let mut again = vec![0; BLOCK_BYTES];
        assert!(requantize(&values, &mut again));
        assert_eq!(bits(&read(&again, 0, BLOCK)), bits(&values));
    }

    #[test]
    fn any_range_of_elements_is_read() {
        let blocks = quantized(&normal(3, 300));
        let all = read(&blocks, 0, 300);
        for (first, len) in [(0, 1), (63, 2), (64, 64), (5, 200), (299, 1), (10, 0)] {
            assert_eq!(read(&blocks, first, len), all[first..first + len]);
        }
    }
}
