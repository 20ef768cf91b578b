//! The shape of a task, in counts.

use super::{EvaluationKind, Stage};
use hydra_core::{Evaluations, Rounds};
use serde::Serialize;

/// The largest number of microbatch passes in one microbatch group: a promoted shard computes all of them before the
/// next shard does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MicrobatchGroup {
    /// Microbatches of a minibatch.
    pub microbatches: usize,
    /// Batches of an evaluation, before its rounds.
    pub batches: usize,
}

impl MicrobatchGroup {
    /// One microbatch pass after the other.
    pub(crate) const ONE: Self = Self { microbatches: 1, batches: 1 };
}

/// A round of an evaluation, in batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RoundBatches {
    /// The batches of this round.
    pub here: usize,
    /// The estimated batches of all later rounds.
    pub later: usize,
}

impl RoundBatches {
    /// Those of the current round of some data.
    pub fn of(data: &dyn Rounds) -> Self {
        Self { here: data.len(), later: data.later_items() }
    }

    /// Those of this round and of all later ones.
    pub fn all(&self) -> usize {
        self.here + self.later
    }
}

/// The parts of a task, in counts.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// Shards of the model.
    pub shards: usize,
    /// The shard with the first trained layer, where backward passes end.
    pub first_trained: usize,
    /// Minibatches to train.
    pub steps: usize,
    /// Minibatches of an epoch; the microbatches of a full minibatch and of the epoch's last one.
    pub epoch: usize,
    pub microbatches: usize,
    pub last_microbatches: usize,
    /// True if the loss reads a statistic of the outputs of the whole minibatch.
    pub reads_statistic: bool,
    /// The largest microbatch group in training and in evaluations; at least one.
    pub microbatch_group: MicrobatchGroup,
    /// Batches of the validation and the test data; zero without such data.
    pub validation: usize,
    pub test: usize,
    /// The batches of the first round of evaluations that go on in rounds: those on the validation data, but for the initial one.
    /// A task without other data has the rounds alone, as an evaluation of the test data.
    pub rounds: Option<RoundBatches>,
    pub initial_validation: bool,
    /// The largest number of microbatch groups in flight, each on its own device; at least one.
    pub replicas: usize,
    /// True if other tasks may compute batches of its initial evaluation, so that it takes one batch at a time.
    pub shared: bool,
    /// The times of evaluations on the validation data during training.
    pub evaluations: Evaluations,
}

impl Program {
    /// Microbatches of the minibatch `step`.
    pub(crate) fn microbatches_of(&self, step: usize) -> usize {
        if step % self.epoch == self.epoch - 1 { self.last_microbatches } else { self.microbatches }
    }

    /// The microbatches of the minibatch `step` that are evaluated before it is trained: all of them, or none.
    pub(crate) fn measured_of(&self, step: usize) -> usize {
        // The only microbatch knows the whole minibatch.
        Some(self.microbatches_of(step)).filter(|count| self.reads_statistic && *count > 1).unwrap_or(0)
    }

    /// The stage at which the minibatch `step` starts.
    pub(crate) fn minibatch_start(&self, step: usize) -> Stage {
        match self.measured_of(step) {
            0 => Stage::Train { microbatch: 0 },
            _ => Stage::Measure { microbatch: 0 },
        }
    }

    /// Batches of an evaluation, before its rounds.
    pub(crate) fn batches(&self, kind: EvaluationKind) -> usize {
        if kind == EvaluationKind::Test { self.test } else { self.validation }
    }

    /// Returns true if the batches of an evaluation are divided among tasks.
    pub(crate) fn shares(&self, kind: EvaluationKind) -> bool {
        self.shared && kind == EvaluationKind::Initial
    }

    /// The batches of the longest evaluation or first round.
    pub fn most_batches(&self) -> usize {
        self.validation.max(self.test).max(self.first_round().here)
    }

    /// The batches of the first round, if there are rounds.
    pub fn first_round(&self) -> RoundBatches {
        self.rounds.unwrap_or_default()
    }

    /// Returns true if an evaluation goes on in rounds after its batches.
    pub fn has_rounds(&self, kind: EvaluationKind) -> bool {
        let has = match kind {
            EvaluationKind::Initial => false,
            EvaluationKind::Periodic | EvaluationKind::Validation => true,
            EvaluationKind::Test => self.is_rounds_alone(),
        };
        has && self.rounds.is_some()
    }

    /// Returns true if the task has rounds and nothing else.
    pub(super) fn is_rounds_alone(&self) -> bool {
        self.rounds.is_some() && self.steps + self.validation + self.test == 0
    }

    /// Returns true if the weights are evaluated after `done` minibatches during training.
    pub(super) fn evaluates_after(&self, done: usize) -> bool {
        self.validation > 0 && self.evaluations.is_after(done, self.steps)
    }
}
