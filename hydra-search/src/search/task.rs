//! The training of one trial.

use crate::rank::{Loss, TrialId};
use crate::space::Configuration;
use std::collections::{BTreeMap, BTreeSet};

/// What is trained of a trial: from where it parts from another one.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) settings: Configuration,
    /// The steps at which the trial's loss may be wanted.
    pub(super) milestones: Vec<usize>,
    /// The steps at which the loss of this task may be wanted, for itself or for trials that are still the same.
    pub(super) stops: BTreeSet<usize>,
    /// The trials that part from here.
    pub(super) children: Vec<TrialId>,
    /// The furthest step that the trial's own loss was wanted at.
    pub(super) asked: usize,
    /// The furthest step that the task is needed at; where it parts from another one, until it is.
    pub(super) goal: usize,
    /// The furthest step that an action has sent it to; where it parts, until one has.
    pub(super) sent: usize,
    pub(super) phase: Phase,
    pub(super) results: BTreeMap<usize, Loss>,
    /// The minibatches it had when it failed.
    pub(super) failed: Option<usize>,
    /// True if the searcher has no use for the trial any more.
    pub(super) unwanted: bool,
}

/// Where a task stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No action has named it.
    Unborn,
    /// It is needed, and begins when its parent has been sent far enough.
    Called,
    /// It is trained up to where it was sent.
    Training,
    /// It is where it was sent.
    Idle,
    /// It is trained no further.
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
            phase: Phase::Unborn,
            results: BTreeMap::new(),
            failed: None,
            unwanted: false,
        }
    }

    /// The last step that the trial can be trained to.
    pub(super) fn end(&self) -> usize {
        self.milestones.last().copied().unwrap_or_default()
    }

    /// True if an action has begun it.
    pub(super) fn is_begun(&self) -> bool {
        !matches!(self.phase, Phase::Unborn | Phase::Called)
    }

    /// The loss at a step, as far as it is known; one that failed before has none.
    pub(super) fn loss(&self, step: usize) -> Option<Loss> {
        let lost = self.failed.is_some_and(|failed| failed < step);
        self.results.get(&step).copied().or(lost.then_some(Loss::Lost))
    }

    /// True if its loss at a step is known or will be, or can be wanted yet.
    pub(super) fn tells(&self, step: usize) -> bool {
        step > self.goal || self.stops.contains(&step)
    }

    /// Where it is sent next: to its next stop, or to its goal if that comes first.
    pub(super) fn next_stop(&self) -> usize {
        let next = self.stops.range(self.sent + 1..).next();
        next.copied().filter(|stop| *stop < self.goal).unwrap_or(self.goal)
    }
}
