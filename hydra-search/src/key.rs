//! Random numbers as functions of a key and an index, without shared state.
//!
//! The mixing function is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
//! generators", OOPSLA 2014), applied to key and index.

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A key that determines random numbers. Keys are derived by folding words into them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(u64);

impl Key {
    /// The root key of a seed.
    pub(crate) const fn new(seed: u64) -> Self {
        Self(mix(seed.wrapping_add(GOLDEN)))
    }

    /// Derives the key for `word`.
    pub(crate) const fn fold(self, word: u64) -> Self {
        Self(mix(self.0 ^ mix(word.wrapping_mul(GOLDEN).wrapping_add(0xD1B5_4A32_D192_ED03))))
    }

    /// Derives the key for a name (FNV-1a), so that a draw does not depend on other draws.
    pub(crate) fn fold_name(self, name: &str) -> Self {
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        self.fold(name.bytes().fold(0xCBF2_9CE4_8422_2325, step))
    }

    /// 64 random bits for the element at `index`.
    pub(crate) const fn bits(self, index: u64) -> u64 {
        mix(self.0.wrapping_add(index.wrapping_mul(GOLDEN)))
    }

    /// A uniform number in `[0, 1)` with 53 random bits for the element at `index`.
    pub(crate) fn unit(self, index: u64) -> f64 {
        (self.bits(index) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// A uniform number in `0..bound` for the element at `index`, from the high half of the product; 0 if `bound` is
    /// 0.
    pub(crate) fn below(self, index: u64, bound: u64) -> u64 {
        ((u128::from(self.bits(index)) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_of_a_key_matters() {
        let root = Key::new(1);
        let keys = [root, Key::new(2), root.fold(1), root.fold(1).fold(2), root.fold(2).fold(1)];
        let named = ["", "lr", "rl", "batch"].map(|name| root.fold_name(name));
        let mut drawn: Vec<u64> = keys.iter().chain(&named).map(|key| key.bits(0)).collect();
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len(), keys.len() + named.len());
    }

    #[test]
    fn numbers_fill_their_range() {
        let key = Key::new(3);
        let units: Vec<f64> = (0..10_000).map(|index| key.unit(index)).collect();
        assert!(units.iter().all(|unit| (0.0..1.0).contains(unit)));
        assert!((units.iter().sum::<f64>() / 1e4 - 0.5).abs() < 0.01);
        let mut seen = [0; 5];
        (0..1_000).for_each(|index| seen[key.below(index, 5) as usize] += 1);
        assert!(seen.iter().all(|count| *count > 150), "{seen:?}");
        assert_eq!(key.below(0, 0), 0);
    }
}
