//! The minibatches after which a task is evaluated.

use std::ops::RangeInclusive;

/// The minibatch counts after which a task is evaluated on the validation data while it trains. If there are
/// any, it is also evaluated after the last minibatch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evaluations {
    every: Option<usize>,
    /// Sorted, without duplicates.
    at: Vec<usize>,
}

impl Evaluations {
    /// Returns evaluations after every `every` minibatches, and after the minibatches in `at`.
    pub fn new(every: Option<usize>, mut at: Vec<usize>) -> Self {
        at.sort_unstable();
        at.dedup();
        Self { every, at }
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.every.is_none() && self.at.is_empty()
    }

    /// Returns whether there is an evaluation after `done` of `steps` minibatches.
    pub fn is_after(&self, done: usize, steps: usize) -> bool {
        let every = || self.every.is_some_and(|every| done.is_multiple_of(every));
        let due = || done == steps || every() || self.at.binary_search(&done).is_ok();
        done > 0 && !self.is_empty() && due()
    }

    /// The number of evaluations that remain after `done` of `steps` minibatches.
    pub fn left(&self, done: usize, steps: usize) -> usize {
        if self.is_empty() || done >= steps {
            return 0;
        }
        // Evaluations at or after the last minibatch are merged into one.
        let (last, every) = (steps - 1, |step: usize| self.every.map_or(0, |every| step / every));
        let others = self
            .within(done + 1..=last)
            .filter(|at| self.every.is_none_or(|every| !at.is_multiple_of(every)));
        every(last) - every(done) + others.count() + 1
    }

    /// The evaluations before the last of `steps` minibatches, in order.
    pub fn before(&self, steps: usize) -> impl Iterator<Item = usize> {
        (1..steps).filter(move |done| self.is_after(*done, steps))
    }

    fn within(&self, range: RangeInclusive<usize>) -> impl Iterator<Item = usize> {
        self.at.iter().copied().filter(move |at| range.contains(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_what_comes() {
        for every in [None, Some(1), Some(3), Some(20)] {
            for at in [vec![], vec![1], vec![9, 3, 4, 3], vec![12], vec![40]] {
                let evaluations = Evaluations::new(every, at);
                for steps in [0, 1, 9, 12] {
                    for done in 0..=steps {
                        let come = (done + 1..=steps).filter(|step| evaluations.is_after(*step, steps));
                        assert_eq!(
                            evaluations.left(done, steps),
                            come.count(),
                            "{evaluations:?} {done} {steps}"
                        );
                    }
                }
            }
        }
        let evaluations = Evaluations::new(Some(4), vec![5]);
        assert_eq!(evaluations.before(9).collect::<Vec<_>>(), [4, 5, 8]);
        assert!(evaluations.is_after(9, 9) && !evaluations.is_after(0, 9));
        assert!(!Evaluations::default().is_after(9, 9));
    }
}
