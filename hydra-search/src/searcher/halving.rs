//! Successive halving.

use super::bracket::{Bracket, halvings};
use super::draws::{Distinct, Draws};
use super::{Action, Repeat, Searcher, rungs};
use crate::rank::{Loss, TrialId};

/// Successive halving with synchronous rungs: the best `1/eta` of the trials at a rung advances (Jamieson and
/// Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016, section 3).
/// Each decision is made as soon as it is certain.
#[derive(Clone, Debug)]
pub(super) struct Halving {
    bracket: Bracket,
    distinct: Distinct,
}

impl Halving {
    /// `trials` draws, on as many rungs as leave at least one trial for the last and `first_rung` minibatches for the
    /// first.
    pub(super) fn new(draws: &Draws, trials: usize, steps: usize, eta: usize, first_rung: usize) -> Self {
        let mut distinct = Distinct::default();
        let settings = distinct.take_all((0..trials).map(|number| (number, draws.draw(number))), 0);
        let plan = rungs(settings.len(), steps, eta, halvings(settings.len(), steps, eta, first_rung));
        Self { bracket: Bracket::new(0, settings, plan), distinct }
    }
}

impl Searcher for Halving {
    fn take_loss(&mut self, trial: TrialId, step: usize, loss: Loss) {
        self.bracket.take_loss(trial, step, loss);
    }

    fn next(&mut self) -> Vec<Action> {
        self.bracket.next()
    }

    fn milestones(&self, _: TrialId) -> Vec<usize> {
        self.bracket.milestones()
    }

    fn repeats(&self) -> &[Repeat] {
        self.distinct.repeats()
    }
}
