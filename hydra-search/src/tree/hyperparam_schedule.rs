//! Hyperparameter schedules: the settings of a trial as a function of the step.

use crate::space::Configuration;

/// The settings of a trial at every step, as consecutive pieces. Two trials whose schedules are equal up to a step
/// have the same weights, moments and losses there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HyperparamSchedule {
    /// The exclusive end of each piece, and the text that determines training within it. Ends increase, neighbours
    /// differ.
    pieces: Vec<(usize, String)>,
}

impl HyperparamSchedule {
    /// An empty schedule.
    pub fn new() -> Self {
        Self::default()
    }

    /// Continues this schedule up to step `end` (exclusive) with `what`: a text that names everything that a step
    /// depends on, such as seed, data, batch size, optimizer and the learning rate's formula. Equal texts must mean
    /// equal steps. A piece that ends no later than the schedule adds nothing.
    ///
    /// A schedule that depends on the whole length (linear, cosine) is one piece with that length in its text; a
    /// constant phase is one piece until it ends.
    #[must_use]
    pub fn then(mut self, end: usize, what: impl Into<String>) -> Self {
        let what = what.into();
        match self.pieces.last_mut() {
            Some((last, _)) if *last >= end => {}
            Some((last, same)) if *same == what => *last = end,
            None if end == 0 => {}
            _ => self.pieces.push((end, what)),
        }
        self
    }

    /// The number of its steps.
    pub fn len(&self) -> usize {
        self.pieces.last().map_or(0, |(end, _)| *end)
    }

    /// True if it has no step.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The number of leading steps that two schedules share.
    pub fn shared(&self, other: &Self) -> usize {
        let mut shared = 0;
        for ((end, what), (other_end, other_what)) in self.pieces.iter().zip(&other.pieces) {
            if what != other_what {
                break;
            }
            shared = *end.min(other_end);
            if end != other_end {
                // The longer one continues with this piece, the shorter one with another piece or not at all.
                break;
            }
        }
        shared
    }

    /// The text of the first step.
    pub(super) fn first(&self) -> Option<&str> {
        self.pieces.first().map(|(_, what)| what.as_str())
    }
}

/// Maps configurations to hyperparameter schedules. The driver of a search implements it.
pub trait HyperparamSchedules: Send {
    /// The schedule of a configuration, up to the largest number of steps.
    fn schedule(&self, settings: &Configuration) -> HyperparamSchedule;
}

/// Schedules of one piece with all settings: only equal configurations share training.
#[derive(Clone, Copy, Debug)]
pub struct Whole {
    /// The largest number of minibatches of a trial.
    pub steps: usize,
}

impl HyperparamSchedules for Whole {
    fn schedule(&self, settings: &Configuration) -> HyperparamSchedule {
        HyperparamSchedule::new().then(self.steps, settings.identity())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_share_what_is_equal_from_the_beginning() {
        let flat = |rate: &str| HyperparamSchedule::new().then(1_000, rate);
        let decays =
            |at: usize| HyperparamSchedule::new().then(at, "0.1").then(1_000, format!("decay from {at}"));
        assert_eq!(flat("0.1").shared(&flat("0.1")), 1_000);
        assert_eq!(flat("0.1").shared(&flat("0.2")), 0);
        assert_eq!(decays(800).shared(&decays(900)), 800);
        assert_eq!(decays(800).shared(&flat("0.1")), 800);
        assert_eq!(decays(800).shared(&decays(800)), 1_000);
        let short = HyperparamSchedule::new().then(300, "0.1");
        assert_eq!((short.shared(&flat("0.1")), flat("0.1").shared(&short)), (300, 300));
        assert_eq!(HyperparamSchedule::new().shared(&flat("0.1")), 0);
    }

    #[test]
    fn pieces_that_say_the_same_are_one() {
        let cut =
            HyperparamSchedule::new().then(10, "a").then(20, "a").then(20, "b").then(5, "c").then(30, "b");
        assert_eq!(cut, HyperparamSchedule::new().then(20, "a").then(30, "b"));
        assert_eq!(cut.len(), 30);
        assert!(HyperparamSchedule::new().then(0, "a").is_empty());
    }
}
