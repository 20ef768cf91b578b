//! The policies that Sharded-LRTF is compared with.

use crate::{ModelIndex, ModelView, Policy, PolicyKind, View};

/// First in, first out: the claimable model that was submitted first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fifo;

impl Policy for Fifo {
    fn name(&self) -> &'static str {
        PolicyKind::Fifo.name()
    }

    fn choose(&mut self, view: &View<'_>) -> Option<ModelIndex> {
        view.claimable.iter().min_by(|a, b| a.by_submission(b)).map(|first| first.model)
    }
}

/// Shortest remaining time first; equal times go to the model submitted first.
///
/// It finishes single models early and leaves the long ones for the end, where too few models are
/// left to fill the devices: the opposite of [`ShardedLrtf`](crate::ShardedLrtf).
#[derive(Clone, Copy, Debug, Default)]
pub struct Srtf;

impl Policy for Srtf {
    fn name(&self) -> &'static str {
        PolicyKind::Srtf.name()
    }

    fn choose(&mut self, view: &View<'_>) -> Option<ModelIndex> {
        view.claimable
            .iter()
            .min_by(|a, b| a.remaining_s.total_cmp(&b.remaining_s).then_with(|| a.by_submission(b)))
            .map(|shortest| shortest.model)
    }
}

/// Uniformly at random among the claimable models.
///
/// The draw is a function of the seed, the decision's number and the device. There is no state, so
/// a decision taken twice gives the same answer, and a replay may begin anywhere.
#[derive(Clone, Copy, Debug)]
pub struct Random {
    seed: u64,
}

impl Random {
    /// The policy that draws from `seed`.
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Sixty-four random bits for one decision of one device.
    fn draw(&self, view: &View<'_>) -> u64 {
        let decision = splitmix64(splitmix64(self.seed) ^ view.decision);
        splitmix64(decision ^ view.device as u64)
    }
}

impl Policy for Random {
    fn name(&self) -> &'static str {
        PolicyKind::Random.name()
    }

    fn choose(&mut self, view: &View<'_>) -> Option<ModelIndex> {
        // The draw is a rank in submission order, not a place in the view.
        let mut models: Vec<&ModelView> = view.claimable.iter().collect();
        models.sort_unstable_by(|a, b| a.by_submission(b));
        let rank = below(self.draw(view), models.len());
        models.get(rank).map(|model| model.model)
    }
}

/// Scales sixty-four random bits to `0..bound`, by the high half of the product; 0 for no bound.
fn below(bits: u64, bound: usize) -> usize {
    ((u128::from(bits) * bound as u128) >> 64) as usize
}

/// The output of Sebastiano Vigna's splitmix64 generator (public domain) in state `x`.
fn splitmix64(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::conformance::{any_models, models, view_of};

    #[test]
    fn fifo_takes_the_first_submitted() {
        let claimable = models(&[(3.0, 4), (7.0, 1), (1.0, 2)]);
        assert_eq!(Fifo.choose(&view_of(&claimable)), Some(ModelIndex(1)));
    }

    #[test]
    fn srtf_takes_the_shortest_and_breaks_ties_by_submission() {
        let claimable = models(&[(3.0, 0), (f64::NAN, 1), (2.0, 5), (2.0, 4)]);
        assert_eq!(Srtf.choose(&view_of(&claimable)), Some(ModelIndex(3)));
    }

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
    }

    /// How often each of four models is chosen over 4000 decisions of each of two devices.
    fn choices(seed: u64) -> [u32; 4] {
        let claimable = models(&[(1.0, 0), (1.0, 1), (1.0, 2), (1.0, 3)]);
        let mut counts = [0; 4];
        for decision in 0..4000 {
            for device in 0..2 {
                let view = View { device, devices: 2, decision, claimable: &claimable };
                counts[Random::new(seed).choose(&view).unwrap().0] += 1;
            }
        }
        counts
    }

    #[test]
    fn random_is_uniform_over_decisions() {
        // The standard deviation of a count is 39; the draws are fixed by the seeds.
        for seed in 0..4 {
            for count in choices(seed) {
                assert!(count.abs_diff(2000) < 200, "seed {seed}: a model has {count} of 8000");
            }
        }
    }

    #[test]
    fn seed_decision_and_device_each_change_the_draw() {
        let at = |seed, decision, device| {
            Random::new(seed).draw(&View { device, devices: 9, decision, claimable: &[] })
        };
        let draws = [at(7, 3, 1), at(8, 3, 1), at(7, 4, 1), at(7, 3, 2), at(7, 1, 3), at(3, 7, 1)];
        for (i, a) in draws.iter().enumerate() {
            assert!(draws[i + 1..].iter().all(|b| a != b), "draw {i} is repeated");
        }
    }

    proptest! {
        #[test]
        fn srtf_picks_the_minimum(claimable in any_models(1..20)) {
            let chosen = Srtf.choose(&view_of(&claimable)).unwrap();
            let chosen = claimable.iter().find(|m| m.model == chosen).unwrap();
            for other in &claimable {
                let order = chosen.remaining_s.total_cmp(&other.remaining_s);
                prop_assert!(order.is_le());
                prop_assert!(order.is_lt() || chosen.submitted <= other.submitted);
            }
        }
    }
}
