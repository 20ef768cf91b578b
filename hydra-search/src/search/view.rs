//! What can be seen of a search.

use crate::rank::{Loss, TrialId};
use crate::space::Configuration;
use crate::tree::Branch;
use std::collections::BTreeMap;

/// How a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The trial with the least loss among those that were trained furthest; `None` if every trial is lost. Whose task has
    /// its weights is in [`TrialView::task`].
    pub best: Option<TrialId>,
}

/// Where a trial stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is trained, or waits for room or for the trial that it is forked from; its loss is wanted after `until`.
    Training {
        /// Minibatches from its beginning.
        until: usize,
    },
    /// It is still the same as the trial that it is to be forked from, and is not trained itself.
    Shared,
    /// It waits for the losses of others.
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
    /// Where it parts, or would part, from another trial.
    pub branch: Option<Branch>,
    /// The trial that it is equal to from its beginning to its end, and never parts from: one that another bracket drew.
    pub same_as: Option<TrialId>,
    /// The trial whose task was trained to where this one has its last loss, and has its weights: itself, or the one that it
    /// is still the same as.
    pub task: TrialId,
    /// True if it was begun, and is trained itself from where it parts.
    pub begun: bool,
    /// The minibatches, from its beginning, up to which it was told to be trained itself.
    pub until: usize,
    /// Its losses by step, those of the trial that it was the same as included.
    pub losses: &'a BTreeMap<usize, Loss>,
    /// Where it stands.
    pub standing: Standing,
}

/// Minibatches of a search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Those that were asked for so far: the edges of the stage tree.
    pub trained: usize,
    /// Those that the same trials would have taken, each by itself.
    pub apart: usize,
}
