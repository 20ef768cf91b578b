//! What a run tells while it goes on: the run log, progress bars and traces listen here.

use crate::admission::Admission;
use crate::protocol::Evaluation;
use crate::stages::{EvaluationKind, TaskState};
use hydra_core::{DeviceId, TaskId};
use hydra_partition::PilotProgress;

/// Where something happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The compute worker of a device.
    Compute(DeviceId),
    /// The copies of a device, up and down.
    Copy(DeviceId),
    /// The host optimizer.
    Optimizer,
}

/// What a span of time was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A forward shard task.
    Forward,
    /// A backward shard task (the last shard's forward is fused with it).
    Backward,
    /// An evaluation shard task.
    Evaluate,
    /// Bringing a shard's parameters and inputs up.
    Promote,
    /// Taking boundary activations or gradients down.
    TakeDown,
    /// An optimizer step.
    Step,
}

/// A span of time on a track. Times are seconds since the run began.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Where.
    pub track: Track,
    /// For which task.
    pub task: TaskId,
    /// On what.
    pub work: Work,
    /// Of which shard (the image for [`Work::Step`]).
    pub shard: usize,
    /// In which minibatch.
    pub step: usize,
    /// From.
    pub start_s: f64,
    /// To.
    pub end_s: f64,
}

/// Something that happened. Names and steps are those of the task.
#[derive(Debug)]
pub enum RunEvent<'a> {
    /// How far the pilot pass is, while tasks are admitted. It is made once for all tasks that share a model, and there is
    /// none where a saved plan is used.
    Pilot {
        /// The name of the first of these tasks.
        task: &'a str,
        /// How far it is.
        progress: PilotProgress,
    },
    /// Every task was admitted; nothing has run yet.
    Admitted(&'a Admission),
    /// A span ended.
    Span(Span),
    /// A task finished a minibatch.
    Minibatch {
        /// The task.
        task: TaskId,
        /// The minibatch, from zero.
        step: usize,
        /// Minibatches in all.
        steps: usize,
        /// The mean loss before the update.
        loss: f64,
        /// The learning rate of the update.
        rate: f64,
        /// Tokens (or items) in it.
        units: usize,
        /// Seconds since the run began.
        at_s: f64,
    },
    /// A task finished a batch of an evaluation, and there are more.
    Evaluating {
        /// The task.
        task: TaskId,
        /// Which.
        kind: EvaluationKind,
        /// The batch, from zero.
        batch: usize,
        /// Batches in all.
        batches: usize,
        /// Tokens (or items) in it.
        units: usize,
        /// Seconds since the run began.
        at_s: f64,
    },
    /// A task finished an evaluation.
    Evaluated {
        /// The task.
        task: TaskId,
        /// Which.
        kind: EvaluationKind,
        /// Minibatches trained before it.
        step: usize,
        /// The result.
        result: Evaluation,
        /// Seconds since the run began.
        at_s: f64,
    },
    /// A task begins where its checkpoint says; one that is finished ends at once.
    Resumed {
        /// The task.
        task: TaskId,
        /// Minibatches trained before.
        step: usize,
        /// Minibatches in all.
        steps: usize,
        /// Seconds since the run began.
        at_s: f64,
    },
    /// A task's checkpoint is on the disk.
    Checkpointed {
        /// The task.
        task: TaskId,
        /// Minibatches trained before it.
        step: usize,
        /// The file's bytes.
        bytes: u64,
        /// Seconds that the task waited for it.
        seconds: f64,
        /// Seconds since the run began.
        at_s: f64,
    },
    /// A task's checkpoint could not be written. The task goes on, and an earlier checkpoint is still there.
    CheckpointFailed {
        /// The task.
        task: TaskId,
        /// Minibatches trained before it.
        step: usize,
        /// Why.
        error: &'a str,
        /// Seconds since the run began.
        at_s: f64,
    },
    /// A task ended.
    Ended {
        /// The task.
        task: TaskId,
        /// How.
        state: TaskState,
        /// Why, if it failed.
        error: Option<&'a str>,
        /// Seconds since the run began.
        at_s: f64,
    },
    /// The run was asked to stop; minibatches that have begun are finished.
    Stopping,
}

/// Listens to a run. Called on the orchestrator's thread: be quick.
pub trait Observer: Send {
    /// Something happened.
    fn observe(&mut self, event: &RunEvent<'_>);
}

/// Listens to nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn observe(&mut self, _: &RunEvent<'_>) {}
}
