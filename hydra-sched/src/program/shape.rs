//! The shape of a task, in counts.

use super::{EvaluationKind, ShardTask, Stage};
use crate::policy::{ShardTaskKind, group_length};
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
    pub const ONE: Self = Self { microbatches: 1, batches: 1 };
}

/// A round of an evaluation, in batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundBatches {
    /// The batches of this round.
    pub here: usize,
    /// The estimated batches of all later rounds.
    pub later: usize,
}

impl RoundBatches {
    /// Those of this round and of all later ones.
    pub fn all(&self) -> usize {
        self.here + self.later
    }
}

/// The microbatches of a task's minibatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Microbatches {
    /// Those of a full minibatch.
    pub each: usize,
    /// Those of the last minibatch of an epoch.
    pub last: usize,
    /// The minibatches of an epoch; at least one.
    pub epoch: usize,
}

impl Microbatches {
    /// Those of the minibatch `step`.
    pub const fn of(self, step: usize) -> usize {
        if step % self.epoch == self.epoch - 1 { self.last } else { self.each }
    }

    /// Those that are measured before they are trained, for a statistic of the whole minibatch. The only microbatch of a
    /// minibatch knows it.
    const fn measured(self) -> Self {
        const fn several(count: usize) -> usize {
            if count > 1 { count } else { 0 }
        }
        Self { each: several(self.each), last: several(self.last), epoch: self.epoch }
    }

    /// Those of the first `steps` minibatches.
    pub fn before(self, steps: usize) -> u64 {
        let fewer = (steps / self.epoch) as u128 * self.each.saturating_sub(self.last) as u128;
        u64::try_from(steps as u128 * self.each as u128 - fewer).unwrap_or(u64::MAX)
    }
}

/// The evaluations on the validation data during training.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvaluationPoints(Vec<EvaluationPoint>);

/// An evaluation after a number of minibatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EvaluationPoint {
    after: usize,
    batches: usize,
    /// The batches of this evaluation and of all later ones.
    rest: u64,
}

impl EvaluationPoints {
    /// Returns evaluations of `(after, batches)`: the minibatches before each, in ascending order, and its batches.
    pub fn new(points: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let point = |(after, batches)| EvaluationPoint { after, batches, rest: 0 };
        let mut points: Vec<_> = points.into_iter().map(point).filter(|of| of.batches > 0).collect();
        let mut rest = 0;
        for of in points.iter_mut().rev() {
            rest += of.batches as u64;
            of.rest = rest;
        }
        Self(points)
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The minibatches before each evaluation and its batches, in order.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize)> {
        self.0.iter().map(|of| (of.after, of.batches))
    }

    /// The batches of the evaluation after `step` minibatches; 0 if there is none.
    pub fn batches_after(&self, step: usize) -> usize {
        self.0.binary_search_by_key(&step, |of| of.after).map_or(0, |at| self.0[at].batches)
    }

    /// The evaluations after more than `step` minibatches, and their batches.
    pub fn later(&self, step: usize) -> (usize, u64) {
        let later = &self.0[self.0.partition_point(|of| of.after <= step)..];
        (later.len(), later.first().map_or(0, |of| of.rest))
    }
}

/// The passes of a task over its data, in counts.
#[derive(Clone, Debug)]
pub struct Program {
    /// Shards of the model.
    pub shards: usize,
    /// The shard with the first trained layer, where backward passes end.
    pub first_trained: usize,
    /// Minibatches to train.
    pub steps: usize,
    /// The microbatches of minibatches.
    pub microbatches: Microbatches,
    /// Whether the loss reads a statistic of the outputs of the whole minibatch.
    pub reads_statistic: bool,
    /// The largest microbatch group in training and in evaluations; at least one.
    pub microbatch_group: MicrobatchGroup,
    /// Batches of the validation data; zero without such data.
    pub validation: usize,
    /// Batches of the test data; zero without such data.
    pub test: usize,
    /// The batches of the first round of evaluations that go on in rounds: those on the validation data, but for the initial one.
    /// A task without other data has the rounds alone, as an evaluation of the test data.
    pub rounds: Option<RoundBatches>,
    /// Whether there is an evaluation on the validation data before training.
    pub initial_validation: bool,
    /// The largest number of microbatch groups in flight, each on its own device; at least one.
    pub replicas: usize,
    /// Whether other tasks may compute batches of its initial evaluation, so that it takes one batch at a time.
    pub shared: bool,
    /// The evaluations on the validation data during training, which replace the one after it.
    pub evaluations: EvaluationPoints,
}

impl Program {
    /// The microbatches of the minibatch `step` that are evaluated before it is trained: all of them, or none.
    pub fn measured_of(&self, step: usize) -> usize {
        if self.reads_statistic { self.microbatches.measured().of(step) } else { 0 }
    }

    /// The stage at which the minibatch `step` starts.
    pub fn minibatch_start(&self, step: usize) -> Stage {
        match self.measured_of(step) {
            0 => Stage::Train { microbatch: 0 },
            _ => Stage::Measure { microbatch: 0 },
        }
    }

    /// Batches of an evaluation after `step` minibatches, before its rounds.
    pub fn batches(&self, kind: EvaluationKind, step: usize) -> usize {
        match kind {
            EvaluationKind::Test => self.test,
            EvaluationKind::Initial | EvaluationKind::Validation => self.validation,
            // A checkpoint may name an evaluation that this task does not have.
            EvaluationKind::Periodic => match self.evaluations.batches_after(step) {
                0 => self.validation,
                batches => batches,
            },
        }
    }

    /// Batches of the evaluations after training that are not after the last minibatch during training.
    pub fn final_batches(&self) -> usize {
        if self.evaluations.is_empty() { self.validation + self.test } else { self.test }
    }

    /// Returns true if the batches of an evaluation are divided among tasks.
    pub fn shares(&self, kind: EvaluationKind) -> bool {
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

    /// The microbatches in each microbatch group of the minibatch `step`, but for the last group.
    pub fn minibatch_group(&self, step: usize) -> usize {
        let (most, usual) = (self.microbatch_group.microbatches, self.microbatches.each);
        group_length(most, self.replicas, usual, self.microbatches.of(step))
    }

    /// The batches in each microbatch group of an evaluation of this many batches, but for the last group.
    pub(super) fn evaluation_group(&self, batches: usize) -> usize {
        group_length(self.microbatch_group.batches, self.replicas, batches, batches)
    }

    /// The first shard task of a microbatch pass at this stage.
    pub(super) fn pass_start(&self, stage: Stage) -> (ShardTaskKind, usize) {
        match stage {
            Stage::Train { .. } => ShardTaskKind::training_start(self.shards),
            _ => ShardTaskKind::evaluation_start(),
        }
    }

    /// Returns whether a shard task is the first of its microbatch pass, which reads no output of another.
    pub fn begins_pass(&self, task: &ShardTask) -> bool {
        (task.kind, task.shard) == self.pass_start(task.stage)
    }

    /// The shard task of the same microbatch pass that reads the output of this one; `None` at the end of the pass.
    pub fn following(&self, kind: ShardTaskKind, shard: usize) -> Option<(ShardTaskKind, usize)> {
        let over = kind == ShardTaskKind::Backward && shard == self.first_trained;
        kind.following(shard, self.shards).filter(|_| !over)
    }

    /// How often a shard's master weights were stepped in the first `step` minibatches.
    pub fn version(&self, shard: usize, step: usize) -> usize {
        if shard < self.first_trained { 0 } else { step }
    }

    /// The microbatches of the minibatches from `step` on.
    pub(super) fn microbatches_from(&self, step: usize) -> u64 {
        self.sum_from(self.microbatches, step)
    }

    /// Those of them that are measured before they are trained.
    pub(super) fn measured_from(&self, step: usize) -> u64 {
        if self.reads_statistic { self.sum_from(self.microbatches.measured(), step) } else { 0 }
    }

    fn sum_from(&self, microbatches: Microbatches, step: usize) -> u64 {
        microbatches.before(self.steps) - microbatches.before(step.min(self.steps))
    }
}
