//! What a task is made of, in counts.

use super::EvaluationKind;
use hydra_core::Evaluations;
use serde::Serialize;

/// The microbatch passes that are made in one microbatch group, at most: a promoted shard has its turn for all of them before the next shard has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MicrobatchGroup {
    /// Microbatches of a minibatch.
    pub microbatches: usize,
    /// Batches of an evaluation.
    pub batches: usize,
}

impl MicrobatchGroup {
    /// One microbatch pass after the other.
    pub(crate) const ONE: Self = Self { microbatches: 1, batches: 1 };
}

/// The parts of a task, in counts.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// Shards of the model.
    pub shards: usize,
    /// The shard that holds the first trained layer: backward passes end there.
    pub first_trained: usize,
    /// Minibatches to train.
    pub steps: usize,
    /// Minibatches of an epoch, and the microbatches of a full and of the epoch's last one.
    pub epoch: usize,
    pub microbatches: usize,
    pub last_microbatches: usize,
    /// The most microbatches, and the most batches of an evaluation, that a microbatch group has; at least one.
    pub microbatch_group: MicrobatchGroup,
    /// Batches of the validation and the test data; zero where there is none.
    pub validation: usize,
    pub test: usize,
    pub initial_validation: bool,
    /// The most microbatch groups that are under way at once, each on a device of its own; at least one.
    pub replicas: usize,
    /// True if other tasks may compute batches of its first evaluation, so that it is told which ones to evaluate.
    pub shared: bool,
    /// On the validation data, while it trains.
    pub evaluations: Evaluations,
}

impl Program {
    /// Microbatches of the minibatch `step`.
    pub(crate) fn microbatches_of(&self, step: usize) -> usize {
        if step % self.epoch == self.epoch - 1 { self.last_microbatches } else { self.microbatches }
    }

    /// Batches of an evaluation.
    pub(crate) fn batches(&self, kind: EvaluationKind) -> usize {
        if kind == EvaluationKind::Test { self.test } else { self.validation }
    }

    /// Returns true if the batches of an evaluation are divided among tasks.
    pub(crate) fn shares(&self, kind: EvaluationKind) -> bool {
        self.shared && kind == EvaluationKind::Initial
    }

    /// Returns true if the weights are evaluated after `done` minibatches, while training.
    pub(super) fn evaluates_after(&self, done: usize) -> bool {
        self.validation > 0 && self.evaluations.is_after(done, self.steps)
    }
}
