//! A rung: the best of its entrants advance.

use super::{Loss, TrialId};
use std::collections::{BTreeMap, BTreeSet};

/// New decisions: the trials that advance, and those that are dropped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Decisions {
    pub(crate) advanced: Vec<TrialId>,
    pub(crate) dropped: Vec<TrialId>,
}

/// A rung with a known number of entrants; the best `keep` advance.
///
/// A decision is made when no later loss can change it: a trial advances as soon as fewer than `keep` entrants can
/// still be better, and is dropped once `keep` are. So decisions depend on the known losses only, not on their order,
/// and once all losses are known they agree with sorting. A loss that is not finite is dropped immediately, even if
/// fewer than `keep` advance then.
#[derive(Clone, Debug)]
pub(crate) struct Rung {
    keep: usize,
    /// Entrants with unknown losses: each may still be better than all others.
    open: usize,
    ranked: BTreeSet<(Loss, TrialId)>,
    losses: BTreeMap<TrialId, Loss>,
    decided: BTreeSet<TrialId>,
}

impl Rung {
    pub(crate) fn new(entrants: usize, keep: usize) -> Self {
        let (ranked, losses, decided) = Default::default();
        Self { keep, open: entrants, ranked, losses, decided }
    }

    /// Records the loss of an entrant.
    pub(crate) fn take_loss(&mut self, trial: TrialId, loss: Loss) -> Decisions {
        assert!(self.open > 0 && !self.losses.contains_key(&trial), "an entrant has one loss");
        self.open = self.open.saturating_sub(1);
        self.ranked.insert((loss, trial));
        self.losses.insert(trial, loss);
        self.decide()
    }

    /// Reduces the number of expected entrants by one.
    pub(crate) fn one_fewer(&mut self) -> Decisions {
        self.open = self.open.saturating_sub(1);
        self.decide()
    }

    /// The largest number that can still advance, including those that did.
    pub(crate) fn most(&self) -> usize {
        let numbers = self.losses.values().filter(|loss| !loss.is_lost()).count();
        self.keep.min(numbers + self.open)
    }

    /// True if the losses of all entrants are known.
    pub(crate) fn is_complete(&self) -> bool {
        self.open == 0
    }

    /// The entrants with finite losses, best first.
    pub(crate) fn ranking(&self) -> impl Iterator<Item = TrialId> {
        self.ranked.iter().filter(|(loss, _)| !loss.is_lost()).map(|(_, trial)| *trial)
    }

    fn decide(&mut self) -> Decisions {
        let mut decisions = Decisions::default();
        for (better, (loss, trial)) in self.ranked.iter().enumerate() {
            let dropped = better >= self.keep || loss.is_lost();
            let advanced = !dropped && better + self.open < self.keep;
            if (dropped || advanced) && self.decided.insert(*trial) {
                let into = if advanced { &mut decisions.advanced } else { &mut decisions.dropped };
                into.push(*trial);
            }
        }
        decisions
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids(of: &[usize]) -> Vec<TrialId> {
        of.iter().copied().map(TrialId).collect()
    }

    #[test]
    fn decisions_wait_until_they_are_certain() {
        let mut rung = Rung::new(5, 2);
        let mut tell = |trial, value| {
            let told = rung.take_loss(TrialId(trial), Loss::of(value));
            (told.advanced, told.dropped)
        };
        assert_eq!(tell(4, 1.0), (vec![], vec![]));
        assert_eq!(tell(0, 3.0), (vec![], vec![]));
        assert_eq!(tell(1, 2.0), (vec![], ids(&[0])), "two are better in any case");
        assert_eq!(tell(2, f64::NAN), (ids(&[4]), ids(&[2])), "one can still be better");
        assert_eq!(tell(3, 2.0), (ids(&[1]), ids(&[3])), "a tie goes to the lower number");
    }

    #[test]
    fn who_does_not_come_can_be_no_better() {
        let mut rung = Rung::new(3, 2);
        assert!(rung.take_loss(TrialId(0), Loss::of(1.0)).advanced.is_empty());
        assert_eq!((rung.most(), rung.is_complete()), (2, false));
        assert_eq!(rung.one_fewer().advanced, ids(&[0]));
        rung.take_loss(TrialId(1), Loss::Lost);
        assert_eq!((rung.most(), rung.is_complete()), (1, true));
        assert_eq!(rung.ranking().collect::<Vec<_>>(), ids(&[0]));
    }

    proptest! {
        /// After every prefix of every order, decisions agree with the complete sorted list.
        #[test]
        fn certain_decisions_are_those_of_the_sorted_list(
            losses in proptest::collection::vec(prop_oneof![4 => 0..6i32, 1 => Just(-1)], 1..20),
            keep in 0usize..8,
            order in any::<u64>(),
        ) {
            let loss = |value: &i32| Loss::of(if *value < 0 { f64::NAN } else { f64::from(*value) });
            let mut sorted: Vec<_> = losses.iter().map(loss).zip((0..).map(TrialId)).collect();
            let mut arrival: Vec<_> = sorted.clone();
            arrival.sort_by_key(|(_, trial)| crate::key::Key::new(order).bits(trial.0 as u64));
            sorted.sort_unstable();
            let best: BTreeSet<_> =
                sorted.iter().take(keep).filter(|(loss, _)| !loss.is_lost()).map(|(_, trial)| *trial).collect();
            let mut rung = Rung::new(losses.len(), keep);
            let mut seen = BTreeSet::new();
            for (loss, trial) in arrival {
                let told = rung.take_loss(trial, loss);
                prop_assert!(told.advanced.iter().all(|trial| best.contains(trial)));
                prop_assert!(told.dropped.iter().all(|trial| !best.contains(trial)));
                prop_assert!(told.advanced.iter().chain(&told.dropped).all(|trial| seen.insert(*trial)));
            }
            prop_assert_eq!(seen.len(), losses.len(), "all are decided in the end");
        }
    }
}
