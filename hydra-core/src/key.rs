//! Counter-based random numbers: a function of a key and an index.
//!
//! The same key gives the same numbers on every thread and in every order, so a recomputed forward draws the
//! same dropout mask and a resumed run has the same data order.

/// A key of the counter-based generator. Keys are derived by folding words into other keys.
///
/// The mixing function is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable
/// pseudorandom number generators", OOPSLA 2014), applied to key and counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(u64);

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Key {
    /// The root key of a seed.
    pub const fn new(seed: u64) -> Self {
        Self(mix(seed.wrapping_add(GOLDEN)))
    }

    /// Derives a key for `word`; different words give unrelated keys.
    pub const fn fold(self, word: u64) -> Self {
        Self(mix(self.0 ^ mix(word.wrapping_mul(GOLDEN).wrapping_add(0xD1B5_4A32_D192_ED03))))
    }

    /// The key as a number, for generators elsewhere that must draw the same values.
    pub(crate) const fn number(self) -> u64 {
        self.0
    }

    /// 64 random bits for the element at `index`.
    #[inline]
    pub const fn bits(self, index: u64) -> u64 {
        mix(self.0.wrapping_add(index.wrapping_mul(GOLDEN)))
    }

    /// A uniform number in `[0, 1)` with 53 random bits for the element at `index`.
    #[inline]
    pub fn uniform(self, index: u64) -> f64 {
        (self.bits(index) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// A standard normal number for the element at `index` (Box and Muller, 1958).
    pub fn normal(self, index: u64) -> f64 {
        let u = 1.0 - self.uniform(index.wrapping_mul(2));
        let v = self.uniform(index.wrapping_mul(2).wrapping_add(1));
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    /// Returns a permutation of `0..len` (Fisher and Yates).
    pub fn permutation(self, len: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..len).collect();
        for i in (1..len).rev() {
            let j = (self.bits(i as u64) % (i as u64 + 1)) as usize;
            order.swap(i, j);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_different_words_differ() {
        let root = Key::new(0);
        let mut seen: Vec<u64> = (0..1000).map(|w| root.fold(w).bits(0)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 1000);
        assert_ne!(root.fold(1).fold(2), root.fold(2).fold(1));
    }

    #[test]
    fn normal_numbers_have_mean_zero_and_variance_one() {
        let key = Key::new(3);
        let n = 20_000;
        let draws: Vec<f64> = (0..n).map(|i| key.normal(i)).collect();
        let mean = draws.iter().sum::<f64>() / n as f64;
        let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.03, "{mean}");
        assert!((variance - 1.0).abs() < 0.05, "{variance}");
    }

    #[test]
    fn a_permutation_holds_every_index_once() {
        let mut order = Key::new(1).permutation(257);
        assert_ne!(order, (0..257).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..257).collect::<Vec<_>>());
    }
}
