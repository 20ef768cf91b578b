//! The visible state of a search.

use crate::rank::{Loss, TrialId};
use crate::space::Configuration;
use crate::tree::Branch;
use std::collections::BTreeMap;

/// The result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The trial with the smallest loss among those trained furthest; `None` if all trials failed.
    /// [`TrialView::task`] is the trial whose task has its weights.
    pub best: Option<TrialId>,
}

/// The state of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrialState {
    /// It is being trained, or waits for memory or its parent; its loss is requested after `until`.
    Training {
        /// Minibatches from its start.
        until: usize,
    },
    /// It is still equal to the trial that it will be forked from, and is not trained itself.
    Shared,
    /// It waits for the losses of other trials.
    Waiting,
    /// It was stopped.
    Stopped,
    /// It was trained to its end.
    Finished,
    /// It failed.
    Failed,
}

/// A trial.
#[derive(Clone, Debug, PartialEq)]
pub struct TrialView<'a> {
    /// Its number.
    pub trial: TrialId,
    /// Its settings.
    pub settings: &'a Configuration,
    /// The point at which it diverges, or will diverge, from another trial.
    pub branch: Option<Branch>,
    /// The trial that it equals from start to end, because another bracket drew the same configuration.
    pub same_as: Option<TrialId>,
    /// The trial whose task was trained to this one's last loss and has its weights: itself, or the one that it still
    /// equals.
    pub task: TrialId,
    /// True if it was started, and is trained itself from where it diverges.
    pub begun: bool,
    /// The minibatches, from its start, that its own task was requested to train.
    pub until: usize,
    /// Its losses by step, including those of the trial that it was equal to.
    pub losses: &'a BTreeMap<usize, Loss>,
    /// Its state.
    pub standing: TrialState,
}

/// Minibatches of a search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Requested so far: the edges of the stage tree.
    pub trained: usize,
    /// The minibatches of the same trials without sharing.
    pub apart: usize,
}
