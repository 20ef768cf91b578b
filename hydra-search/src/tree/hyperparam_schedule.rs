//! A schedule: what a trial is trained with, as a function of the step.

use crate::space::Configuration;

/// What a trial is trained with at every step, as pieces one after the other. Two trials whose schedules are the same up to a
/// step have the same weights, moments and losses there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HyperparamSchedule {
    /// Where each piece ends, exclusive, and what decides the training within it. Ends rise, neighbours differ.
    pieces: Vec<(usize, String)>,
}

impl HyperparamSchedule {
    /// A schedule with nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// This schedule, continued up to step `end` (exclusive) with `what`: a text that has all that a step depends on, such
    /// as seed, data, batch size, optimizer and the learning rate's formula. Where texts are equal, steps are. A piece that
    /// ends no later than the schedule adds nothing.
    ///
    /// A schedule that depends on the whole length (linear, cosine) is one piece with that length in its text; one that is
    /// constant for a while is a piece until it changes.
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

    /// True if there is no step.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The number of steps from the beginning that two schedules share.
    pub fn shared(&self, other: &Self) -> usize {
        let mut shared = 0;
        for ((end, what), (other_end, other_what)) in self.pieces.iter().zip(&other.pieces) {
            if what != other_what {
                break;
            }
            shared = *end.min(other_end);
            if end != other_end {
                // The longer of the two goes on with this piece, the shorter with another one or not at all.
                break;
            }
        }
        shared
    }

    /// What the first step depends on.
    pub(super) fn first(&self) -> Option<&str> {
        self.pieces.first().map(|(_, what)| what.as_str())
    }
}

/// Says what each configuration of a search is trained with, step by step. The search knows no schedule; whoever drives
/// it does.
pub trait HyperparamSchedules: Send {
    /// The schedule of a configuration, of as many steps as it would be trained at most.
    fn schedule(&self, settings: &Configuration) -> HyperparamSchedule;
}

/// Schedules of one piece that has all settings: only equal configurations share anything.
#[derive(Clone, Copy, Debug)]
pub struct Whole {
    /// Minibatches that a trial is trained at most.
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
