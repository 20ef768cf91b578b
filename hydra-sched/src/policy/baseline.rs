//! The baseline policies.

use super::random::{below, keyed};
use super::{Claimable, ModelIndex, ModelView, Policy, PolicyKind, Priority, Request};

/// First in, first out: the claimable model that was submitted first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fifo;

impl Policy for Fifo {
    fn name(&self) -> &'static str {
        PolicyKind::Fifo.name()
    }
}

/// Shortest remaining time first; equal times go to the model submitted first.
///
/// It finishes single models early and leaves the long ones for the end, when too few models remain
/// to fill the devices: the opposite of [`ShardedLrtf`](crate::ShardedLrtf).
#[derive(Clone, Copy, Debug, Default)]
pub struct Srtf;

impl Policy for Srtf {
    fn name(&self) -> &'static str {
        PolicyKind::Srtf.name()
    }

    fn priority(&self, model: &ModelView) -> Priority {
        Priority::shortest(model)
    }
}

/// A uniformly random claimable model.
///
/// The draw is a function of the seed, the decision's number and the device. There is no state, so a repeated
/// decision gives the same answer, and a replay may begin anywhere.
#[derive(Clone, Copy, Debug)]
pub struct Random {
    seed: u64,
}

impl Random {
    /// Returns the policy that draws from `seed`.
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Returns sixty-four random bits for one decision of one device.
    fn draw(&self, request: &Request) -> u64 {
        keyed(self.seed, &[request.decision, request.device as u64])
    }
}

impl Policy for Random {
    fn name(&self) -> &'static str {
        PolicyKind::Random.name()
    }

    fn pick(&mut self, request: &Request, from: &dyn Claimable) -> Option<ModelIndex> {
        // The draw is a rank in submission order, not a position in the view.
        let rank = below(self.draw(request), from.count());
        from.nth_submitted(rank).map(|model| model.model)
    }
}

/// Round robin: the claimable models in cyclic submission order.
///
/// It remembers the last chosen model, on any device, and takes the next claimable one after it. It balances
/// the number of shard tasks that the models have run, not their remaining time.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundRobin {
    last: Option<(u64, ModelIndex)>,
}

impl Policy for RoundRobin {
    fn name(&self) -> &'static str {
        PolicyKind::RoundRobin.name()
    }

    fn pick(&mut self, _: &Request, from: &dyn Claimable) -> Option<ModelIndex> {
        let later = self.last.and_then(|last| from.submitted_after(last));
        let next = later.or_else(|| from.nth_submitted(0))?;
        self.last = Some((next.submitted, next.model));
        Some(next.model)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::View;
    use crate::policy::cases::{any_models, models, view_of};

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

    /// How often each of four models is chosen in 4000 decisions of each of two devices.
    fn choices(seed: u64) -> [u32; 4] {
        let claimable = models(&[(1.0, 0), (1.0, 1), (1.0, 2), (1.0, 3)]);
        let mut counts = [0; 4];
        for decision in 0..4000 {
            for device in 0..2 {
                let view = View { request: Request::new(device, 2, decision), claimable: &claimable };
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
    fn round_robin_gives_everyone_a_turn_before_anyone_a_second() {
        let all = models(&[(9.0, 0), (1.0, 1), (1.0, 2)]);
        let mut policy = RoundRobin::default();
        let mut turn = |claimable: &[ModelView]| policy.choose(&view_of(claimable)).unwrap().0;
        assert_eq!([turn(&all), turn(&all), turn(&all), turn(&all)], [0, 1, 2, 0]);
        // Model 1 cannot be claimed at that time, and is chosen after the one that replaced it.
        assert_eq!([turn(&all[2..]), turn(&all), turn(&all[1..])], [2, 0, 1]);
        assert_eq!(policy.choose(&view_of(&[])), None);
    }

    #[test]
    fn seed_decision_and_device_each_change_the_draw() {
        let at = |seed, decision, device| Random::new(seed).draw(&Request::new(device, 9, decision));
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
