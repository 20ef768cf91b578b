//! The port of the searchers.

use super::Repeat;
use crate::rank::{Loss, TrialId};
use crate::space::Configuration;
use serde::{Deserialize, Serialize};

/// What is to be done with a trial. All steps are numbers of minibatches from the trial's beginning, those of its parents
/// included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "kebab-case")]
pub enum Action {
    /// Train a trial from the beginning, and report its loss after `until`; here and below, that it is there, where no loss is
    /// [compared](crate::Search::compares).
    Start {
        /// The trial, a new one.
        trial: TrialId,
        /// Its settings.
        settings: Configuration,
        /// Where its loss is wanted.
        until: usize,
    },
    /// Train a trial on from where it waits, and report its loss after `until`.
    Continue {
        /// The trial.
        trial: TrialId,
        /// Where its loss is wanted.
        until: usize,
    },
    /// Begin a trial with the weights, the moments and the place in the data that `parent` had after `at`, train it with
    /// settings of its own from there, and report its loss after `until`. A schedule is that of the new settings, evaluated
    /// from `at` on.
    ///
    /// The parent may not be there yet; then it has been told to go at least as far. If it fails before, a `Stop` of this
    /// trial follows, and its loss is wanted no more.
    Fork {
        /// The trial, a new one.
        trial: TrialId,
        /// The trial whose state it begins with.
        parent: TrialId,
        /// Where.
        at: usize,
        /// Its settings, all of them.
        settings: Configuration,
        /// Where its loss is wanted.
        until: usize,
    },
    /// Train a trial no further: what it holds can go, but for what [`held`](crate::Search::held) names. One that has failed
    /// needs no such word.
    Stop {
        /// The trial, which waits for another action, or for its parent.
        trial: TrialId,
    },
}

impl Action {
    /// The trial that does it.
    pub fn trial(&self) -> TrialId {
        match self {
            Self::Start { trial, .. }
            | Self::Continue { trial, .. }
            | Self::Fork { trial, .. }
            | Self::Stop { trial } => *trial,
        }
    }
}

/// Decides which trials there are and how far each is trained.
///
/// A searcher is a state machine: it is told losses, and asked for actions. It has neither clock nor threads, and what it
/// answers in all depends on what it was told in all, never on the order: a fast device must not make another trial win.
/// Where a decision needs losses that are not there yet, it waits for them, and decides as soon as no loss to come can
/// change it. So a search that was interrupted is what it was when the same losses are told again.
///
/// Trials are numbered from zero in the order of the actions that begin them.
///
/// # Example
/// A searcher of one's own: of two trials the better one after ten minibatches goes on.
///
/// ```
/// use hydra_search::{Action, Configuration, Loss, Search, Searcher, TrialId, Whole};
///
/// struct Duel {
///     ranked: Vec<(Loss, TrialId)>,
///     actions: Vec<Action>,
/// }
///
/// impl Duel {
///     fn new() -> Self {
///         let rate = |trial: usize| Configuration::new().with("lr", [0.1, 0.2][trial]);
///         let start = |trial| Action::Start { trial: TrialId(trial), settings: rate(trial), until: 10 };
///         Self { ranked: Vec::new(), actions: (0..2).map(start).collect() }
///     }
/// }
///
/// impl Searcher for Duel {
///     fn told(&mut self, trial: TrialId, step: usize, loss: Loss) {
///         if step == 10 {
///             self.ranked.push((loss, trial));
///             self.ranked.sort_unstable();
///             if let [(_, best), (_, other)] = self.ranked[..] {
///                 self.actions.push(Action::Continue { trial: best, until: 30 });
///                 self.actions.push(Action::Stop { trial: other });
///             }
///         }
///     }
///
///     fn next(&mut self) -> Vec<Action> {
///         std::mem::take(&mut self.actions)
///     }
///
///     fn milestones(&self, _: TrialId) -> Vec<usize> {
///         vec![10, 30]
///     }
/// }
///
/// let mut search = Search::own(Box::new(Duel::new()), Box::new(Whole { steps: 30 }));
/// assert_eq!(search.actions().len(), 2);
/// search.report(TrialId(1), 10, 2.0)?;
/// search.report(TrialId(0), 10, 3.0)?;
/// assert_eq!(search.actions()[0], Action::Continue { trial: TrialId(1), until: 30 });
/// search.report(TrialId(1), 30, 1.0)?;
/// assert_eq!(search.outcome().unwrap().best, Some(TrialId(1)));
/// # Ok::<(), hydra_search::ReportError>(())
/// ```
pub trait Searcher: Send {
    /// Takes the loss of a trial after `step` minibatches, where an earlier action wanted it.
    fn told(&mut self, trial: TrialId, step: usize, loss: Loss);

    /// The next actions, or none until more is told. It is asked at first, and after everything that it was told, until
    /// there are none. Trials that begin in one answer can share whatever is the same of them; one that begins later shares
    /// what the others have not passed by then, so answers are cut the same way however the losses arrived.
    fn next(&mut self) -> Vec<Action>;

    /// The steps at which the loss of a trial may be wanted, from the first to the last it can be trained to.
    fn milestones(&self, trial: TrialId) -> Vec<usize>;

    /// The states, as trials and numbers of minibatches, from which an action to come may fork.
    fn states(&self) -> Vec<(TrialId, usize)> {
        Vec::new()
    }

    /// The draws so far that were equal to an earlier one, and are one trial with it.
    fn repeats(&self) -> &[Repeat] {
        &[]
    }
}
