//! The training of one trial.

use crate::rank::{Loss, TrialId};
use crate::space::Configuration;
use std::collections::{BTreeMap, BTreeSet};

/// The training of a trial from the step at which it diverges from another one.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) settings: Configuration,
    /// The steps at which the trial's loss may be requested.
    pub(super) milestones: Vec<usize>,
    /// The steps at which a loss of this task may be requested, for itself or for trials that are still equal.
    pub(super) stops: BTreeSet<usize>,
    /// The trials that diverge from this one.
    pub(super) children: Vec<TrialId>,
    /// The last step at which the trial's own loss was requested.
    pub(super) asked: usize,
    /// The last step that is needed of the task; initially the step at which it diverges.
    pub(super) goal: usize,
    /// The last step of an action; initially the step at which it diverges.
    pub(super) sent: usize,
    pub(super) phase: Phase,
    pub(super) results: BTreeMap<usize, Loss>,
    /// The minibatches it had when it failed.
    pub(super) failed: Option<usize>,
    /// True if the searcher has released the trial.
    pub(super) unwanted: bool,
}

/// The state of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No action has started it.
    Unstarted,
    /// It is needed, and starts when its parent has been sent far enough.
    Needed,
    /// It is being trained up to the step of its last action.
    Training,
    /// It has reached the step of its last action.
    Idle,
    /// It is not trained further.
    Stopped,
}

impl Task {
    pub(super) fn new(settings: Configuration, milestones: Vec<usize>, from: usize) -> Self {
        Self {
            settings,
            milestones,
            stops: BTreeSet::new(),
            children: Vec::new(),
            asked: 0,
            goal: from,
            sent: from,
            phase: Phase::Unstarted,
            results: BTreeMap::new(),
            failed: None,
            unwanted: false,
        }
    }

    /// The last step that the trial can be trained to.
    pub(super) fn end(&self) -> usize {
        self.milestones.last().copied().unwrap_or_default()
    }

    /// True if an action has started it.
    pub(super) fn is_begun(&self) -> bool {
        !matches!(self.phase, Phase::Unstarted | Phase::Needed)
    }

    /// The loss at a step, if known; [`Loss::Lost`] if it failed before.
    pub(super) fn loss(&self, step: usize) -> Option<Loss> {
        let lost = self.failed.is_some_and(|failed| failed < step);
        self.results.get(&step).copied().or(lost.then_some(Loss::Lost))
    }

    /// True if its loss at a step is known, requested, or can still be requested.
    pub(super) fn can_report(&self, step: usize) -> bool {
        step > self.goal || self.stops.contains(&step)
    }

    /// The step of its next action: its next stop, or its goal if that comes first.
    pub(super) fn next_stop(&self) -> usize {
        let next = self.stops.range(self.sent + 1..).next();
        next.copied().filter(|stop| *stop < self.goal).unwrap_or(self.goal)
    }
}
