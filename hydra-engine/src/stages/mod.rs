//! The stages of a task: its current work and its next shard tasks.
//!
//! May touch: nothing of the engine but the shape of a task, in counts.
//! Never: handles tensors, threads, clocks or results.

mod cursor;
mod program;

pub(crate) use cursor::Cursor;
pub use program::MicrobatchGroup;
pub(crate) use program::{Program, RoundBatches};

use hydra_sched::ShardTaskKind;
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

/// The state in which a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// Trained to the end.
    Done,
    /// Ended with an error.
    Failed,
    /// Stopped at the end of a minibatch because the run was interrupted.
    Stopped,
}

/// The current work of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Waiting for a batch of a shared initial evaluation, or for its result.
    Shared,
    /// Evaluating batch `batch`, in `rounds` of the current round.
    Evaluate { kind: EvaluationKind, batch: usize, rounds: bool },
    /// Evaluating microbatch `microbatch` of the current minibatch, before training, for the objective's
    /// [statistic](hydra_core::Objective::statistic).
    Measure { microbatch: usize },
    /// Training microbatch `microbatch` of the current minibatch.
    Train { microbatch: usize },
    /// Waiting for the results of an evaluation's batches or of a round, which decide whether there is another round.
    Round { kind: EvaluationKind },
    /// Waiting until the best weights are restored.
    Restore,
    /// Waiting until the model is hashed and written.
    Write,
    /// Over.
    Finished,
}

impl Stage {
    /// The index of the microbatch or the batch; zero in other stages.
    pub(crate) fn microbatch_pass(&self) -> usize {
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
pub(crate) struct ShardTask {
    pub stage: Stage,
    pub kind: ShardTaskKind,
    pub shard: usize,
    /// Minibatches trained before it: the version that its parameters must have.
    pub step: usize,
}

impl ShardTask {
    /// Returns whether `next` is the same shard task of the next microbatch.
    pub(crate) fn is_microbatch_before(&self, next: &Self) -> bool {
        (self.kind, self.shard, self.step) == (next.kind, next.shard, next.step)
            && matches!(next.stage, Stage::Train { .. })
            && self.stage.microbatch_pass() + 1 == next.stage.microbatch_pass()
    }
}

/// A shard task that a device can claim, and the replica of its microbatch group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Next {
    pub replica: usize,
    pub what: ShardTask,
}

/// A minibatch, or a microbatch group of an evaluation, identified by its first shard task. Its batches are read
/// together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MicrobatchPass {
    pub stage: Stage,
    /// Minibatches trained before it.
    pub step: usize,
}

impl MicrobatchPass {
    /// The one that a shard task belongs to.
    pub(crate) fn of(task: &ShardTask) -> Self {
        Self { stage: task.stage, step: task.step }
    }

    /// Returns whether both belong to one minibatch or one evaluation.
    pub(crate) fn same_minibatch(&self, other: &Self) -> bool {
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
