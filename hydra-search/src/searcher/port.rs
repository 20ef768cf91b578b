//! The trait of the searchers.

use super::Repeat;
use crate::rank::{Loss, TrialId};
use crate::space::Configuration;
use serde::{Deserialize, Serialize};

/// An action on a trial. All steps are numbers of minibatches from the trial's start, including those of its parents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "kebab-case")]
pub enum Action {
    /// Train a trial from the start, and report its loss after `until`. In this and all actions: report only that it
    /// got there if its loss is not [compared](crate::Search::compares) at that step.
    Start {
        /// The trial, a new one.
        trial: TrialId,
        /// Its settings.
        settings: Configuration,
        /// The step at which its loss is requested.
        until: usize,
    },
    /// Continue a waiting trial, and report its loss after `until`.
    Continue {
        /// The trial.
        trial: TrialId,
        /// The step at which its loss is requested.
        until: usize,
    },
    /// Start a trial with the weights, the moments and the position in the data that `parent` had after `at`, train
    /// it with its own settings from there, and report its loss after `until`. Its schedule is that of the new
    /// settings, evaluated from `at` on.
    ///
    /// The parent may not have reached `at` yet, but was requested to. If it fails before, a `Stop` of this trial
    /// follows, and its loss is not requested any more.
    Fork {
        /// The trial, a new one.
        trial: TrialId,
        /// The trial whose state it starts with.
        parent: TrialId,
        /// The minibatches of the parent.
        at: usize,
        /// All of its settings.
        settings: Configuration,
        /// The step at which its loss is requested.
        until: usize,
    },
    /// Stop training a trial: its states can be dropped, except those in [`held`](crate::Search::held). Failed trials
    /// get no such action.
    Stop {
        /// The trial, which waits for another action, or for its parent.
        trial: TrialId,
    },
}

impl Action {
    /// The trial of the action.
    pub fn trial(&self) -> TrialId {
        match self {
            Self::Start { trial, .. }
            | Self::Continue { trial, .. }
            | Self::Fork { trial, .. }
            | Self::Stop { trial } => *trial,
        }
    }
}

/// Decides the trials of a search and how far each is trained.
///
/// A searcher is a state machine that receives losses and returns actions. It has neither clock nor threads, and its
/// actions depend on the set of losses, not on their order: a fast device must not make another trial win. A decision
/// that needs missing losses waits for them, and is made as soon as no later loss can change it. So an interrupted
/// search is restored by replaying its losses.
///
/// Trials are numbered from zero in the order of the actions that start them.
///
/// # Example
/// A custom searcher: the better of two trials after ten minibatches continues.
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
///     fn take_loss(&mut self, trial: TrialId, step: usize, loss: Loss) {
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
    /// Takes the loss of a trial after `step` minibatches, as an earlier action requested.
    fn take_loss(&mut self, trial: TrialId, step: usize, loss: Loss);

    /// The next actions; empty if none are possible before the next loss. It is called at the start and after every
    /// batch of losses, until it returns none. Trials that start in one call can share equal prefixes; a later one
    /// shares only what the others have not passed, so calls must group actions in the same way for every order of
    /// losses.
    fn next(&mut self) -> Vec<Action>;

    /// The steps at which the loss of a trial may be requested, up to the last one it can be trained to.
    fn milestones(&self, trial: TrialId) -> Vec<usize>;

    /// The states, as trials and numbers of minibatches, that a later action may fork from.
    fn states(&self) -> Vec<(TrialId, usize)> {
        Vec::new()
    }

    /// The draws so far that were equal to an earlier trial.
    fn repeats(&self) -> &[Repeat] {
        &[]
    }
}
