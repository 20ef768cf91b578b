//! Sharded-LRTF: the default, the paper's version, and one for devices with a parameter cache.

use super::{Claimable, ModelIndex, ModelView, Policy, PolicyKind, Priority, Request};

/// Sharded longest-remaining-time-first, which holds a device back for the model that determines the
/// makespan.
///
/// A model computes at most one shard task at a time, so the makespan is at least its remaining time. Working
/// off the longest first keeps the remaining times balanced, and thereby the number of models that can still
/// fill the devices near the end of a run. Source: Nagrecha and Kumar, "Hydra: A System for Large Multi-Model
/// Deep Learning", arXiv 2110.08633, whose version is [`ShardedLrtfEager`].
///
/// At the end of a minibatch a model cannot be claimed until its master weights are final. If its device
/// commits to another model in the meantime, the model waits for a whole shard task, in every minibatch. This
/// is right while other models fill the time, and wrong for a model with more work left than an even share of
/// all work: the run cannot end before it. The device waits for such a model if it is also longer than every
/// claimable one. The length of the model includes its own waits for its optimizer and for promotions, which
/// nothing shortens.
///
/// A device also does not commit to a model if a longer one becomes claimable soon enough to be promoted
/// while the device computes ([`Request::soon`]): waiting for it is free. If [`Request`] names no model to
/// wait for, the choice is that of [`ShardedLrtfLocal`]: a model that is cached on the device precedes one
/// that is only slightly longer.
///
/// Equal times are ordered by submission. Times are compared by [`f64::total_cmp`], so not-a-number
/// is ordered too (a positive one before every number) and the choice is always defined.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShardedLrtf;

impl ShardedLrtf {
    /// The multiple of an even share of the work from which on a model is waited for. It is slightly less
    /// than 1, because estimates are inexact and shard tasks are indivisible. On drawn workloads all values
    /// from 0.8 to 1 perform about equally if costs are steady; if they drift, values above 0.9 wait too
    /// late.
    const SHARE: f64 = 0.9;
}

impl Policy for ShardedLrtf {
    fn name(&self) -> &'static str {
        PolicyKind::ShardedLrtf.name()
    }

    fn priority(&self, model: &ModelView) -> Priority {
        Priority::longest(model)
    }

    fn waits(&self) -> bool {
        true
    }

    fn pick(&mut self, request: &Request, from: &dyn Claimable) -> Option<ModelIndex> {
        let longest = from.first()?;
        let longer = |model: Option<ModelView>| model.is_some_and(|of| of.remaining_s > longest.remaining_s);
        let decides = request.awaited_s >= Self::SHARE * request.even_s;
        let waits = longer(request.soon) || (longer(request.awaited) && decides);
        (!waits).then(|| near(from, longest, ShardedLrtfLocal::TOLERANCE).model)
    }
}

/// Sharded longest-remaining-time-first as in the paper: the claimable model with the longest remaining time,
/// regardless of models that become claimable soon.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShardedLrtfEager;

impl Policy for ShardedLrtfEager {
    fn name(&self) -> &'static str {
        PolicyKind::ShardedLrtfEager.name()
    }

    fn priority(&self, model: &ModelView) -> Priority {
        Priority::longest(model)
    }
}

/// Sharded-LRTF that prefers a model that is cached on the device, within a tolerance.
///
/// Among the claimable models whose next shard is cached it takes the one with the longest remaining time, if
/// that is at least `1 - tolerance` times the longest of all. Otherwise it does the same among models that
/// are cached on no other device, because this device or none committed to them last. Otherwise it does what
/// [`ShardedLrtfEager`] does. The balance of the remaining times, which Sharded-LRTF maintains, is thus off
/// by at most the tolerance at every decision, and the deviation shrinks with the work left.
#[derive(Clone, Copy, Debug)]
pub struct ShardedLrtfLocal {
    tolerance: f64,
}

impl ShardedLrtfLocal {
    /// The tolerance of [`PolicyKind::ShardedLrtfLocal`]. A smaller one lets models move between devices,
    /// which promotes their parameters again; a larger one promotes less, and balances the remaining times
    /// less.
    pub const TOLERANCE: f64 = 0.1;

    /// Returns the policy with this tolerance, as a fraction of the longest remaining time. It is clamped to
    /// `0 ..= 1`; not-a-number counts as 0.
    pub const fn new(tolerance: f64) -> Self {
        // `f64::max` returns the number if the other is not-a-number.
        Self { tolerance: tolerance.max(0.0).min(1.0) }
    }
}

impl Default for ShardedLrtfLocal {
    fn default() -> Self {
        Self::new(Self::TOLERANCE)
    }
}

impl Policy for ShardedLrtfLocal {
    fn name(&self) -> &'static str {
        PolicyKind::ShardedLrtfLocal.name()
    }

    fn priority(&self, model: &ModelView) -> Priority {
        Priority::longest(model)
    }

    fn pick(&mut self, _: &Request, from: &dyn Claimable) -> Option<ModelIndex> {
        Some(near(from, from.first()?, self.tolerance).model)
    }
}

/// Returns the longest model whose next shard is cached, if its remaining time is within `tolerance` of the
/// longest of all; else the longest model that no other device committed to last, within the same tolerance;
/// else the longest of all. It weighs saved promotions against balanced remaining times. A model that stays
/// on a device later finds its parameters cached, and the worth of its copies is known.
fn near(from: &dyn Claimable, longest: ModelView, tolerance: f64) -> ModelView {
    let least = longest.remaining_s * (1.0 - tolerance);
    let near = |model: &ModelView| model.remaining_s >= least;
    from.first_cached().filter(near).or_else(|| from.first_here().filter(near)).unwrap_or(longest)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::View;
    use crate::policy::cases::{any_models, models, view_of};

    #[test]
    fn takes_the_longest_and_breaks_ties_by_submission() {
        let claimable = models(&[(3.0, 0), (7.0, 5), (7.0, 4), (6.9, 1)]);
        assert_eq!(ShardedLrtfEager.choose(&view_of(&claimable)), Some(ModelIndex(2)));
    }

    #[test]
    fn a_time_that_is_not_a_number_is_ordered_too() {
        for others in [[0.0, 1.0], [f64::INFINITY, 2.0], [f64::NAN, 3.0]] {
            let claimable = models(&[(others[0], 1), (f64::NAN, 0), (others[1], 2)]);
            assert_eq!(ShardedLrtfEager.choose(&view_of(&claimable)), Some(ModelIndex(1)));
        }
    }

    #[test]
    fn the_local_one_prefers_what_is_cached_within_the_tolerance() {
        let mut claimable = models(&[(10.0, 0), (9.5, 1), (9.8, 2), (8.0, 3)]);
        let choose = |claimable: &[ModelView], tolerance| {
            ShardedLrtfLocal::new(tolerance).choose(&view_of(claimable)).unwrap().0
        };
        assert_eq!(choose(&claimable, 0.5), 0, "nothing is cached");
        claimable[1].cached = true;
        claimable[3].cached = true;
        assert_eq!(choose(&claimable, 0.5), 1, "the longest of the cached ones");
        assert_eq!(choose(&claimable, 0.05), 1);
        assert_eq!(choose(&claimable, 0.04), 0, "too far from the longest");
        assert_eq!(choose(&claimable, f64::NAN), 0);
        claimable[0].cached = true;
        assert_eq!(choose(&claimable, 0.5), 0);
    }

    #[test]
    fn the_default_prefers_what_is_cached_where_that_costs_little() {
        let mut claimable = models(&[(100.0, 0), (90.5, 1), (89.5, 2)]);
        claimable[2].cached = true;
        assert_eq!(ShardedLrtf.choose(&view_of(&claimable)), Some(ModelIndex(0)));
        claimable[1].cached = true;
        assert_eq!(ShardedLrtf.choose(&view_of(&claimable)), Some(ModelIndex(1)));
    }

    #[test]
    fn a_model_goes_on_where_its_copies_are() {
        let mut claimable = models(&[(100.0, 0), (95.0, 1), (91.0, 2), (89.0, 3)]);
        claimable.iter_mut().for_each(|model| model.ran_on = Some(1));
        claimable[3].ran_on = Some(0);
        assert_eq!(ShardedLrtf.choose(&view_of(&claimable)), Some(ModelIndex(0)), "too far from the longest");
        claimable[2].ran_on = Some(0);
        assert_eq!(ShardedLrtf.choose(&view_of(&claimable)), Some(ModelIndex(2)));
        claimable[1].ran_on = None;
        assert_eq!(ShardedLrtf.choose(&view_of(&claimable)), Some(ModelIndex(1)), "it has copies nowhere");
        claimable[1].ran_on = Some(1);
        claimable[1].cached = true;
        assert_eq!(
            ShardedLrtf.choose(&view_of(&claimable)),
            Some(ModelIndex(1)),
            "nothing is promoted at all"
        );
        assert_eq!(ShardedLrtfEager.choose(&view_of(&claimable)), Some(ModelIndex(0)));
    }

    #[test]
    fn the_default_waits_only_for_the_model_that_decides() {
        let claimable = models(&[(5.0, 0), (4.0, 1)]);
        let ask = |awaited_s: f64, even_s: f64| {
            let awaited = Some(models(&[(awaited_s, 0)])[0]);
            let request = Request { awaited, awaited_s, even_s, ..Request::new(0, 2, 0) };
            ShardedLrtf.choose(&View { request, claimable: &claimable })
        };
        assert_eq!(ask(9.0, 8.0), None);
        assert_eq!(ask(9.0, 12.0), Some(ModelIndex(0)), "others fill the time");
        assert_eq!(ask(7.7, 8.0), None, "nearly the longest");
        assert_eq!(ask(4.5, 3.0), Some(ModelIndex(0)), "another one is longer");
        assert_eq!(ShardedLrtf.choose(&view_of(&claimable)), Some(ModelIndex(0)));
        let ask_soon = |soon_s: f64| {
            let request = Request { soon: Some(models(&[(soon_s, 2)])[0]), ..Request::new(0, 2, 0) };
            ShardedLrtf.choose(&View { request, claimable: &claimable })
        };
        assert_eq!(ask_soon(5.5), None, "a longer one comes in time");
        assert_eq!(ask_soon(5.0), Some(ModelIndex(0)));
    }

    proptest! {
        /// Without tolerance only an equal one may be preferred; with one, no more than it is given up.
        #[test]
        fn the_local_one_gives_up_no_more_than_its_tolerance(
            mut claimable in any_models(1..20),
            tolerance in 0.0..1.0f64,
        ) {
            for model in &mut claimable {
                model.remaining_s = if model.remaining_s.is_finite() { model.remaining_s.abs() } else { 1.0 };
            }
            let of = |chosen: ModelIndex| claimable.iter().find(|m| m.model == chosen).unwrap();
            let longest = of(ShardedLrtfEager.choose(&view_of(&claimable)).unwrap());
            let chosen = of(ShardedLrtfLocal::new(tolerance).choose(&view_of(&claimable)).unwrap());
            prop_assert!(chosen.remaining_s >= longest.remaining_s * (1.0 - tolerance));
            prop_assert!(chosen == longest || chosen.cached || chosen.ran_on.is_none_or(|on| on == 0));
        }

        #[test]
        fn picks_the_maximum(claimable in any_models(1..20)) {
            let chosen = ShardedLrtfEager.choose(&view_of(&claimable)).unwrap();
            let chosen = claimable.iter().find(|m| m.model == chosen).unwrap();
            for other in &claimable {
                let order = chosen.remaining_s.total_cmp(&other.remaining_s);
                prop_assert!(order.is_ge());
                prop_assert!(order.is_gt() || chosen.submitted <= other.submitted);
            }
        }
    }
}
