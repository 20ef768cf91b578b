//! Values of matrices in NF4 (`hydra_core::nf4`).

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use hydra_core::nf4::{BLOCK, BLOCK_BYTES, TABLE};

/// The elements whose indices share a word.
pub(crate) const PER_WORD: usize = 8;

/// The values that an index stands for.
const ENTRIES: usize = TABLE.len();

/// The words of a block: its scale, and the indices of its elements.
const WORDS: usize = BLOCK_BYTES / size_of::<u32>();

/// Writes the values of `blocks`, one unit for every [`PER_WORD`] elements.
#[cube(launch)]
#[allow(clippy::needless_range_loop)]
pub(crate) fn dequantize<E: Float>(blocks: &[u32], out: &mut [E], #[define(E)] _float: ElemType) {
    let first = ABSOLUTE_POS * PER_WORD;
    if first < out.len() {
        let (block, inside) = (first / BLOCK, first % BLOCK);
        let scale = f32::from_bits(blocks[block * WORDS]);
        let word = blocks[block * WORDS + 1 + inside / PER_WORD];
        #[unroll]
        for i in 0..PER_WORD {
            // The first of a pair is in the high half of its byte.
            let shift = comptime!((i / 2 * 8 + (1 - i % 2) * 4) as u32);
            let index = (word >> shift) & 15u32;
            let mut value = 0.0f32;
            #[unroll]
            for k in 0..ENTRIES {
                let entry = comptime!(TABLE[k]);
                if index == comptime!(k as u32) {
                    value = f32::new(entry);
                }
            }
            if first + i < out.len() {
                out[first + i] = E::cast_from(value * scale);
            }
        }
    }
}
