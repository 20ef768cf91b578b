//! A mask of dropout as every device wants it.

use hydra_core::{DropoutMask, Key, Pass};

/// The mask of dropout at one site of one pass: as the host fills it in, and the numbers from which a device
/// draws the same factors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mask {
    host: DropoutMask,
    key: Key,
    probability: f64,
}

impl Mask {
    /// The mask at `site`; `None` where the pass drops nothing.
    pub fn of(pass: &Pass, probability: f64, site: u64) -> Option<Self> {
        let host = pass.dropout_mask(probability, site)?;
        Some(Self { host, key: pass.key(site), probability })
    }

    /// The mask as the host fills it in.
    pub(super) fn on_host(self) -> DropoutMask {
        self.host
    }
}

#[cfg(feature = "cube")]
impl Mask {
    /// The generator's key, the number below which draws of 32 bits are dropped, and the factor of the others.
    pub(super) fn numbers(self) -> (u64, u64, f32) {
        let dropped = (self.probability * (1u64 << 32) as f64) as u64;
        (unmixed(self.key.bits(0)), dropped, (1.0 / (1.0 - self.probability)) as f32)
    }
}

/// The word whose SplitMix64 finalizer is `z`: a key, from its first bits.
#[cfg(feature = "cube")]
fn unmixed(z: u64) -> u64 {
    // The finalizer multiplies by the inverses of these.
    let z = (z ^ (z >> 31) ^ (z >> 62)).wrapping_mul(0x3196_42B2_D24D_8EC3);
    let z = (z ^ (z >> 27) ^ (z >> 54)).wrapping_mul(0x96DE_1B17_3F11_9089);
    z ^ (z >> 30) ^ (z >> 60)
}

#[cfg(all(test, feature = "cube"))]
mod tests {
    use super::*;
    use hydra_core::Activation;

    /// The factor of an element by the numbers that a device is told.
    fn factor((key, dropped, keep): (u64, u64, f32), index: u64) -> f32 {
        let mut z = key.wrapping_add((index >> 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let draw = ((z ^ (z >> 31)) >> (32 * (index & 1))) & 0xFFFF_FFFF;
        if draw < dropped { 0.0 } else { keep }
    }

    #[test]
    fn the_numbers_give_the_factors_of_the_host() {
        for seed in 0..20 {
            let pass = Pass::train(Pass::key_of(seed, 2, 3), Activation::default()).for_layer(seed as usize);
            for probability in [1e-9, 0.1, 0.5, 0.999, 1.0] {
                let mask = Mask::of(&pass, probability, seed).expect("a training pass drops");
                for index in (0..200).chain((1 << 40)..(1 << 40) + 200) {
                    assert_eq!(factor(mask.numbers(), index), mask.on_host().factor(index));
                }
            }
        }
    }
}
