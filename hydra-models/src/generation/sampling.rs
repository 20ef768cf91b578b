//! How a token is chosen from logits.

use crate::ops::log_sum_exp;
use hydra_core::Key;

/// How the next token is chosen. The processors are those of Transformers, applied in its order: the repetition penalty, then,
/// unless decoding is greedy, the temperature, the `top_k` and the `top_p` largest, and a draw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The divisor of logits; 0 chooses the most likely token (greedy decoding).
    pub temperature: f64,
    /// The number of most likely tokens that remain; 0 for all.
    pub top_k: usize,
    /// The probability that the remaining most likely tokens have together, at least; 1 for all.
    pub top_p: f64,
    /// The divisor of positive logits of tokens that the sequence already has, and the factor on negative ones; 1 for none.
    pub repetition_penalty: f64,
    /// The seed of the draws.
    pub seed: u64,
}

impl Default for Sampling {
    /// Greedy decoding.
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// Returns whether the most likely token is chosen.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// The key of the draws for a sample of a prompt.
    pub(super) fn key(&self, prompt: &[u32], sample: usize) -> Key {
        let key = Key::new(self.seed).fold(0x6765_6E65).fold(sample as u64);
        prompt.iter().fold(key, |key, id| key.fold(u64::from(*id)))
    }

    /// Chooses the token after `ids`, given its logits and the key of the sequence. Also returns the logarithm of the
    /// probability that the model gives the token, before all processors.
    pub(super) fn choose(&self, logits: &[f32], ids: &[u32], key: Key) -> (u32, f64) {
        let token = match self.repetition_penalty == 1.0 && self.is_greedy() {
            true => most_likely(logits),
            false => self.processed(logits.to_vec(), ids, key),
        };
        (token as u32, f64::from(logits[token]) - log_sum_exp(logits))
    }

    fn processed(&self, mut logits: Vec<f32>, ids: &[u32], key: Key) -> usize {
        if self.repetition_penalty != 1.0 {
            let penalty = self.repetition_penalty as f32;
            let mut seen = ids.to_vec();
            seen.sort_unstable();
            seen.dedup();
            for id in seen {
                if let Some(logit) = logits.get_mut(id as usize) {
                    let penalized = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
                    *logit = penalized.clamp(f32::MIN, f32::MAX);
                }
            }
        }
        if self.is_greedy() {
            return most_likely(&logits);
        }
        // From the most to the least likely token, equal ones by their numbers.
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        if self.top_k > 0 && self.top_k < order.len() {
            let least = logits[order[self.top_k - 1]];
            order.retain(|token| logits[*token] >= least);
        }
        let Some(largest) = order.first().map(|token| f64::from(logits[*token])) else {
            return most_likely(&logits);
        };
        let weight = |token: &usize| ((f64::from(logits[*token]) - largest) / self.temperature).exp();
        let weights: Vec<f64> = order.iter().map(weight).collect();
        let all: f64 = weights.iter().sum();
        let mut before = 0.0;
        let begins_within = |weight: &&f64| {
            let begins = before < self.top_p * all;
            before += **weight;
            begins
        };
        let count = weights.iter().take_while(begins_within).count().max(1);
        let kept: f64 = weights[..count].iter().sum();
        let drawn = key.fold(ids.len() as u64).uniform(0) * kept;
        let mut sum = 0.0;
        let chosen = weights[..count].iter().position(|weight| {
            sum += weight;
            sum > drawn
        });
        order[chosen.unwrap_or(count - 1)]
    }
}

/// The first of the most likely tokens.
fn most_likely(logits: &[f32]) -> usize {
    let first = (0, f32::NEG_INFINITY);
    let larger = |best: (usize, f32), (at, x): (usize, &f32)| if *x > best.1 { (at, *x) } else { best };
    logits.iter().enumerate().fold(first, larger).0
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, -2.0, 3.0, 0.5];

    /// How often each token is drawn.
    fn counts(sampling: Sampling) -> [usize; 5] {
        let mut counts = [0; 5];
        for sample in 0..4000 {
            let key = sampling.key(&[7, 8], sample);
            counts[sampling.choose(&LOGITS, &[7, 8], key).0 as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_decoding_takes_the_first_of_the_most_likely() {
        let (token, logprob) = Sampling::default().choose(&LOGITS, &[], Key::new(1));
        let sum: f64 = LOGITS.iter().map(|x| f64::from(*x).exp()).sum();
        assert!(token == 1 && (logprob - (3.0 - sum.ln())).abs() < 1e-6, "{logprob}");
    }

    #[test]
    fn a_repetition_penalty_makes_seen_tokens_less_likely() {
        let penalized = Sampling { repetition_penalty: 4.0, ..Sampling::default() };
        assert_eq!(penalized.choose(&LOGITS, &[1, 1, 9], Key::new(1)).0, 3);
        assert_eq!(penalized.choose(&LOGITS, &[1, 3], Key::new(1)).0, 0);
        // A negative logit is multiplied.
        assert_eq!(penalized.choose(&[-1.0, -2.0], &[0], Key::new(1)).0, 1);
    }

    #[test]
    fn draws_follow_the_probabilities_of_the_tokens_that_remain() {
        let all = Sampling { temperature: 1.0, seed: 3, ..Sampling::default() };
        let powers = LOGITS.map(|x| f64::from(x).exp());
        let sum: f64 = powers.iter().sum();
        for (count, power) in counts(all).into_iter().zip(powers) {
            let (expected, found) = (power / sum, count as f64 / 4000.0);
            assert!((found - expected).abs() < 0.03, "{found} is not {expected}");
        }
        // The third is as likely as the second most likely token.
        let k = counts(Sampling { top_k: 1, ..all });
        assert!(k[1] > 1800 && k[3] > 1800 && k[1] + k[3] == 4000, "{k:?}");
        let p = counts(Sampling { top_p: 0.4, ..all });
        assert_eq!(p[1], 4000, "the first of the most likely has 0.44");
        let p = counts(Sampling { top_p: 0.9, ..all });
        assert!(p[2] + p[4] == 0 && p[0] > 0, "{p:?}");
        for temperature in [0.05, 1e-300] {
            let cold = counts(Sampling { temperature, ..all });
            assert_eq!(cold[1] + cold[3], 4000);
        }
        let not_finite = all.choose(&[f32::NAN; 3], &[], Key::new(1));
        assert!(not_finite.0 == 0 && not_finite.1.is_nan());
    }

    #[test]
    fn a_draw_is_a_function_of_seed_prompt_sample_and_position() {
        let sampling = Sampling { temperature: 2.0, seed: 5, ..Sampling::default() };
        let drawn = |sampling: Sampling, prompt: &[u32], sample: usize| -> Vec<u32> {
            let key = sampling.key(prompt, sample);
            (2..40).map(|length| sampling.choose(&LOGITS, &vec![0; length], key).0).collect()
        };
        let one = drawn(sampling, &[1, 2], 0);
        assert_eq!(one, drawn(sampling, &[1, 2], 0));
        for other in [
            drawn(sampling, &[1, 2], 1),
            drawn(sampling, &[2, 1], 0),
            drawn(Sampling { seed: 6, ..sampling }, &[1, 2], 0),
        ] {
            assert_ne!(one, other);
        }
    }
}
