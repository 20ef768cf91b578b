//! Random numbers as functions of a key, without shared state.

/// Scales sixty-four random bits to `0..bound`, by the high half of the product; 0 if `bound` is 0.
pub(crate) fn below(bits: u64, bound: usize) -> usize {
    ((u128::from(bits) * bound as u128) >> 64) as usize
}

/// Returns a number in `[0, 1)` from the upper 53 of sixty-four random bits.
pub(crate) fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// The output of Sebastiano Vigna's splitmix64 generator (public domain) in state `x`.
fn splitmix64(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Returns sixty-four random bits for a key of several words.
pub(crate) fn keyed(seed: u64, words: &[u64]) -> u64 {
    words.iter().fold(splitmix64(seed), |bits, word| splitmix64(bits ^ word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix64_gives_the_reference_sequence() {
        const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
        assert_eq!(splitmix64(0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(splitmix64(1_234_567), 6_457_827_717_110_365_317);
        assert_eq!(splitmix64(STEP.wrapping_add(1_234_567)), 3_203_168_211_198_807_973);
    }

    #[test]
    fn the_draw_is_scaled_to_the_whole_range() {
        assert_eq!(below(0, 5), 0);
        assert_eq!(below(u64::MAX, 5), 4);
        assert_eq!(below(u64::MAX / 2, 2), 0);
        assert_eq!(below(u64::MAX / 2 + 1, 2), 1);
        assert_eq!(below(u64::MAX, 0), 0);
        assert_eq!(unit(0), 0.0);
        assert!(unit(u64::MAX) < 1.0);
    }

    #[test]
    fn every_word_of_a_key_matters() {
        let draws =
            [keyed(1, &[2, 3]), keyed(1, &[3, 2]), keyed(2, &[2, 3]), keyed(1, &[2]), keyed(1, &[2, 4])];
        for (i, a) in draws.iter().enumerate() {
            assert!(draws[i + 1..].iter().all(|b| a != b), "draw {i} is repeated");
        }
    }
}
