//! Training all trials to the end.

use super::draws::Distinct;
use super::{Action, Repeat, Searcher};
use crate::rank::{Loss, TrialId};
use crate::space::Configuration;

/// Trains all trials to the end. Grid and random search differ only in the trials.
#[derive(Clone, Debug)]
pub(super) struct Full {
    actions: Vec<Action>,
    steps: usize,
    distinct: Distinct,
}

impl Full {
    /// The distinct ones of these configurations, trained for `steps` minibatches each.
    pub(super) fn new(draws: impl IntoIterator<Item = Configuration>, steps: usize) -> Self {
        let mut distinct = Distinct::default();
        let trials = distinct.take_all(draws.into_iter().enumerate(), 0);
        let start = |(trial, settings)| Action::Start { trial, settings, until: steps };
        Self { actions: (0..).map(TrialId).zip(trials).map(start).collect(), steps, distinct }
    }
}

impl Searcher for Full {
    fn take_loss(&mut self, _: TrialId, _: usize, _: Loss) {}

    fn next(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    fn milestones(&self, _: TrialId) -> Vec<usize> {
        vec![self.steps]
    }

    fn repeats(&self) -> &[Repeat] {
        self.distinct.repeats()
    }
}
