//! The events that a run tells while it goes on: the run log, progress bars and traces listen here.

use crate::admission::{Admission, AdmittedTask};
use crate::error::CommandError;
use crate::protocol::Evaluation;
use crate::stages::{EvaluationKind, TaskState};
use hydra_core::{DeviceId, TaskId};
use hydra_partition::PilotProgress;
use std::path::Path;

/// The place where something happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The compute worker of a device.
    Compute(DeviceId),
    /// The transfers of a device, uploads and downloads.
    Copy(DeviceId),
    /// The host optimizer.
    Optimizer,
}

/// The work on which a span of time was spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A forward shard task.
    Forward,
    /// A backward shard task (the last shard's forward is fused with it).
    Backward,
    /// An evaluation shard task.
    Evaluate,
    /// A promotion: the upload of a shard's parameters and inputs.
    Promote,
    /// A download of boundary activations or gradients.
    TakeDown,
    /// An optimizer step.
    Step,
}

/// A span of time on a track. Times are seconds since the run began.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The place.
    pub track: Track,
    /// The task.
    pub task: TaskId,
    /// The work.
    pub work: Work,
    /// The shard (the buffer for [`Work::Step`]).
    pub shard: usize,
    /// The minibatch, from zero.
    pub step: usize,
    /// Of a shard task: the microbatch, or the batch of its evaluation, from zero; zero of other work.
    pub microbatch_pass: usize,
    /// Its start.
    pub start_s: f64,
    /// Its end.
    pub end_s: f64,
}

/// The memory of one tier at one moment of a run.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TierMemory {
    /// `host memory`, `disk`, or the name of a device.
    pub name: String,
    /// The bytes that are reserved.
    pub reserved_bytes: u64,
    /// The most that were reserved at once since the moment before, or, at the first, until then.
    pub peak_bytes: u64,
    /// The tier's budget.
    pub budget_bytes: u64,
}

/// Something that happened. Names and steps are those of the task.
#[derive(Debug)]
pub enum RunEvent<'a> {
    /// The progress of the pilot pass, while tasks are admitted. The pass is made once for all tasks that share a model, and there is
    /// none where a saved plan is used.
    Pilot {
        /// The name of the first of these tasks.
        task: &'a str,
        /// The progress.
        progress: PilotProgress,
    },
    /// Every task was admitted; nothing has run yet.
    Admitted(&'a Admission),
    /// A task begins: its first masters are there. Where host memory has no room for all, some wait until others end.
    Began {
        /// The task.
        task: TaskId,
        /// Seconds since the run began.
        at_s: f64,
    },
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
        /// The kind of evaluation.
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
        /// The kind of evaluation.
        kind: EvaluationKind,
        /// Minibatches trained before it.
        step: usize,
        /// The result.
        result: Evaluation,
        /// Seconds since the run began.
        at_s: f64,
    },
    /// The memory of the run: before anything is computed, at the ends of minibatches and of batches of evaluations, but at
    /// most twice a second, and at the end.
    Memory {
        /// Host memory, the disk if masters live there, and the devices in their order.
        tiers: &'a [TierMemory],
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
    /// A task was added to the run, and begins when there is room for it.
    Submitted {
        /// The task.
        task: TaskId,
        /// Its needs.
        admitted: &'a AdmittedTask,
        /// The configuration that it was described with.
        config: &'a serde_json::Value,
        /// Seconds since the run began.
        at_s: f64,
    },
    /// A task is paused, and waits for a [command](crate::Command). One that begins with a checkpoint, and is to pause there, is
    /// paused before it has begun.
    Paused {
        /// The task.
        task: TaskId,
        /// Minibatches trained before.
        step: usize,
        /// Seconds since the run began.
        at_s: f64,
    },
    /// The state of a task was [saved](crate::Command::Save), and others can be forked from it.
    Saved {
        /// The task.
        task: TaskId,
        /// Minibatches trained before.
        step: usize,
        /// The file.
        file: &'a Path,
        /// Seconds since the run began.
        at_s: f64,
    },
    /// A command could not be carried out.
    Refused {
        /// The task's name in the command.
        task: &'a str,
        /// The reason.
        error: &'a CommandError,
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
        /// The error, in words.
        error: &'a str,
        /// Seconds since the run began.
        at_s: f64,
    },
    /// A task ended.
    Ended {
        /// The task.
        task: TaskId,
        /// The state in which it ended.
        state: TaskState,
        /// The failure, in words.
        error: Option<&'a str>,
        /// SHA-256 of its weights, and the directory that they were written to, as in its report.
        written: (Option<&'a str>, Option<&'a Path>),
        /// Seconds since the run began.
        at_s: f64,
    },
    /// The run was asked to stop; minibatches that have begun are finished.
    Stopping,
}

/// Listens to a run. Called on the orchestrator's thread: be quick.
pub trait Observer: Send {
    /// Hears that something happened.
    fn observe(&mut self, event: &RunEvent<'_>);
}

/// Listens to nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn observe(&mut self, _: &RunEvent<'_>) {}
}
