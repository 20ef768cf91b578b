//! What a task does, in counts, and its next shard tasks: one state machine for runs and simulations.
//!
//! A [`Program`] is a list of passes over the data: evaluations, minibatches with evaluations in between, and
//! evaluations. A [`Cursor`] steps through it, microbatch group by microbatch group, in one or more replicas.
//!
//! May touch: the order of shard tasks in a microbatch pass and the formula for remaining time, of `policy`.
//! Never: handles tensors, threads, clocks or results.

mod cursor;
mod in_flight;
mod shape;

pub use cursor::Cursor;
pub use in_flight::{InFlight, UnderWay};
pub use shape::{EvaluationPoints, MicrobatchGroup, Microbatches, Program, RoundBatches};

use crate::policy::ShardTaskKind;
use serde::{Deserialize, Serialize};

/// The dataset and the time of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EvaluationKind {
    /// Validation data before training.
    Initial,
    /// Validation data during training.
    Periodic,
    /// Validation data after training.
    Validation,
    /// Test data after training.
    Test,
}

/// The current work of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Waiting for a batch of a shared initial evaluation, or for its result.
    Shared,
    /// Evaluating a batch.
    Evaluate {
        /// The evaluation.
        kind: EvaluationKind,
        /// The batch, of the evaluation or of the current round.
        batch: usize,
        /// Whether it is in the rounds of the evaluation.
        rounds: bool,
    },
    /// Evaluating a microbatch of the current minibatch before training, for a statistic of the outputs of the whole
    /// minibatch.
    Measure {
        /// The microbatch.
        microbatch: usize,
    },
    /// Training a microbatch of the current minibatch.
    Train {
        /// The microbatch.
        microbatch: usize,
    },
    /// Waiting for the results of an evaluation's batches or of a round, which decide whether there is another round.
    Round {
        /// The evaluation.
        kind: EvaluationKind,
    },
    /// Waiting until the best weights are restored.
    Restore,
    /// Waiting until the model is hashed and written.
    Write,
    /// Over.
    Finished,
}

impl Stage {
    /// The index of the microbatch or the batch; zero in other stages.
    pub fn microbatch_pass(&self) -> usize {
        match self {
            Self::Evaluate { batch: microbatch_pass, .. }
            | Self::Measure { microbatch: microbatch_pass }
            | Self::Train { microbatch: microbatch_pass } => *microbatch_pass,
            Self::Shared | Self::Round { .. } | Self::Restore | Self::Write | Self::Finished => 0,
        }
    }
}

/// One unit of scheduling: one pass of one microbatch or evaluation batch through one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardTask {
    /// The stage, with its microbatch or batch.
    pub stage: Stage,
    /// The kind.
    pub kind: ShardTaskKind,
    /// The shard.
    pub shard: usize,
    /// Minibatches trained before it: the version that its parameters must have.
    pub step: usize,
}

impl ShardTask {
    /// The index of its microbatch or batch.
    pub fn microbatch_pass(&self) -> usize {
        self.stage.microbatch_pass()
    }

    /// Returns whether `next` is the same shard task of the next microbatch.
    pub fn is_microbatch_before(&self, next: &Self) -> bool {
        (self.kind, self.shard, self.step) == (next.kind, next.shard, next.step)
            && matches!(next.stage, Stage::Train { .. })
            && self.microbatch_pass() + 1 == next.microbatch_pass()
    }

    /// Returns whether both belong to one minibatch or one evaluation.
    pub fn same_minibatch(&self, other: &Self) -> bool {
        MicrobatchPass::of(self).same_minibatch(&MicrobatchPass::of(other))
    }
}

/// A minibatch, or a microbatch group of an evaluation, identified by its first shard task. Its batches are read
/// together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicrobatchPass {
    /// The stage of its first shard task.
    pub stage: Stage,
    /// Minibatches trained before it.
    pub step: usize,
}

impl MicrobatchPass {
    /// The one that a shard task belongs to.
    pub fn of(task: &ShardTask) -> Self {
        Self { stage: task.stage, step: task.step }
    }

    /// Returns whether both belong to one minibatch or one evaluation.
    pub fn same_minibatch(&self, other: &Self) -> bool {
        let same = match (self.stage, other.stage) {
            (
                Stage::Evaluate { kind, rounds, .. },
                Stage::Evaluate { kind: other, rounds: in_rounds, .. },
            ) => (kind, rounds) == (other, in_rounds),
            (Stage::Measure { .. } | Stage::Train { .. }, Stage::Measure { .. } | Stage::Train { .. }) => {
                true
            }
            _ => false,
        };
        same && self.step == other.step
    }
}
