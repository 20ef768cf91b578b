//! Sharded-LRTF, the policy of the paper and the default.

use crate::{ModelIndex, Policy, PolicyKind, View};

/// Sharded longest-remaining-time-first: the next shard task of the model with the longest
/// remaining time.
///
/// A model computes at most one shard task at a time, so the makespan is at least its whole
/// remaining time. Working off the longest first keeps the remaining times level, and with it the
/// number of models that can still fill the devices near the end of a run. Source: Nagrecha and
/// Kumar, "Hydra: A System for Large Multi-Model Deep Learning", arXiv 2110.08633.
///
/// Equal times go to the model submitted first. Times are compared by [`f64::total_cmp`], so that
/// a time that is not a number has its place in the order (a positive one before every number)
/// and the choice stays defined.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShardedLrtf;

impl Policy for ShardedLrtf {
    fn name(&self) -> &'static str {
        PolicyKind::ShardedLrtf.name()
    }

    fn choose(&mut self, view: &View<'_>) -> Option<ModelIndex> {
        view.claimable
            .iter()
            .min_by(|a, b| b.remaining_s.total_cmp(&a.remaining_s).then_with(|| a.by_submission(b)))
            .map(|longest| longest.model)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::conformance::{any_models, models, view_of};

    #[test]
    fn takes_the_longest_and_breaks_ties_by_submission() {
        let claimable = models(&[(3.0, 0), (7.0, 5), (7.0, 4), (6.9, 1)]);
        assert_eq!(ShardedLrtf.choose(&view_of(&claimable)), Some(ModelIndex(2)));
    }

    #[test]
    fn a_time_that_is_not_a_number_is_ordered_too() {
        for others in [[0.0, 1.0], [f64::INFINITY, 2.0], [f64::NAN, 3.0]] {
            let claimable = models(&[(others[0], 1), (f64::NAN, 0), (others[1], 2)]);
            assert_eq!(ShardedLrtf.choose(&view_of(&claimable)), Some(ModelIndex(1)));
        }
    }

    proptest! {
        #[test]
        fn picks_the_maximum(claimable in any_models(1..20)) {
            let chosen = ShardedLrtf.choose(&view_of(&claimable)).unwrap();
            let chosen = claimable.iter().find(|m| m.model == chosen).unwrap();
            for other in &claimable {
                let order = chosen.remaining_s.total_cmp(&other.remaining_s);
                prop_assert!(order.is_ge());
                prop_assert!(order.is_gt() || chosen.submitted <= other.submitted);
            }
        }
    }
}
