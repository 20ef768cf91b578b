//! The minibatches after which a task is evaluated.

/// The minibatch counts after which a task is evaluated on the validation data while it trains. If there are
/// any, it is also evaluated after the last minibatch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evaluations {
    every: Option<usize>,
    /// Sorted, without duplicates.
    at: Vec<usize>,
}

impl Evaluations {
    /// The largest number of evaluations of a task.
    pub const MOST: usize = 1_000_000;

    /// Returns evaluations after every `every` minibatches, and after the minibatches in `at`.
    pub fn new(every: Option<usize>, mut at: Vec<usize>) -> Self {
        at.sort_unstable();
        at.dedup();
        Self { every, at }
    }

    /// The minibatches after which a task of `steps` minibatches is evaluated, in order.
    pub fn within(&self, steps: usize) -> Vec<usize> {
        let every = self.every.filter(|every| *every > 0).into_iter();
        let every = every.flat_map(|every| (every..=steps).step_by(every));
        let mut all: Vec<usize> = every.chain(self.at.iter().copied()).collect();
        // Evaluations at or after the last minibatch are merged into one.
        let any = self.every.is_some() || !self.at.is_empty();
        all.extend(Some(steps).filter(|_| any));
        all.retain(|after| (1..=steps).contains(after));
        all.sort();
        all.dedup();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluations_come_in_order_and_once_and_after_the_last_minibatch() {
        let within = |every, at: &[usize], steps| Evaluations::new(every, at.to_vec()).within(steps);
        assert_eq!(within(Some(4), &[5], 9), [4, 5, 8, 9]);
        assert_eq!(within(Some(3), &[9, 3, 0, 40], 9), [3, 6, 9]);
        assert_eq!(within(None, &[40], 12), [12]);
        assert_eq!(within(Some(20), &[], 12), [12]);
        assert_eq!((within(None, &[], 9), within(Some(1), &[1], 0)), (vec![], vec![]));
    }
}
