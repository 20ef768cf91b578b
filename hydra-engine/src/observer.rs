//! The events that a run reports: the run log, progress bars and traces observe them.
//!
//! A *task* trains or evaluates one model. Each minibatch is divided into microbatches, and the model into shards.
//! The engine schedules *shard tasks*: one forward, backward or evaluation pass of one microbatch through one shard.
//! All shard tasks of one microbatch form its *microbatch pass*; a *microbatch group* runs several of these shard by
//! shard, so that one promotion of a shard serves all of them. With several *replicas*, several devices work on
//! different microbatch groups of one task.

use crate::admission::{Admission, AdmittedTask};
use crate::error::CommandError;
use crate::protocol::Evaluation;
use crate::protocol::TaskState;
use hydra_core::{DeviceId, TaskId};
use hydra_partition::PilotProgress;
use hydra_sched::program::EvaluationKind;
use std::path::Path;

/// The part of a run that spent the time of a [`Span`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The compute worker of a device.
    Compute(DeviceId),
    /// The transfers of a device, uploads and downloads.
    Copy(DeviceId),
    /// The host optimizer.
    Optimizer,
}

/// The work that a span of time was spent on.
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

/// A span of time on a track. Times are seconds since the run started.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The track.
    pub track: Track,
    /// The task.
    pub task: TaskId,
    /// The work.
    pub work: Work,
    /// The shard (the buffer for [`Work::Step`]).
    pub shard: usize,
    /// The minibatch, from zero.
    pub step: usize,
    /// The microbatch, or the batch of an evaluation, from zero; zero for work other than shard tasks.
    pub microbatch_pass: usize,
    /// Its start.
    pub start_s: f64,
    /// Its end.
    pub end_s: f64,
}

/// The memory of one tier (host, disk or device) at one moment of a run.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TierMemory {
    /// `host memory`, `disk`, or the name of a device.
    pub name: String,
    /// Reserved bytes.
    pub reserved_bytes: u64,
    /// The peak of reserved bytes since the previous event, or since the start.
    pub peak_bytes: u64,
    /// The tier's budget in bytes.
    pub budget_bytes: u64,
}

/// An event of a run. Names and steps are those of the task.
#[derive(Debug)]
pub enum RunEvent<'a> {
    /// The progress of the pilot pass during admission. It runs once for all tasks that share a model, and not at all
    /// if a saved plan is used.
    Pilot {
        /// The name of the first of these tasks.
        task: &'a str,
        /// The progress.
        progress: PilotProgress,
    },
    /// All tasks are admitted; nothing has run yet.
    Admitted(&'a Admission),
    /// A task started: its initial weights are loaded. If host memory does not fit all tasks, some are queued until
    /// others end.
    Began {
        /// The task.
        task: TaskId,
        /// Seconds since the run started.
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
        /// Seconds since the run started.
        at_s: f64,
    },
    /// A task finished a batch of an evaluation, but not the last one.
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
        /// Seconds since the run started.
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
        /// Seconds since the run started.
        at_s: f64,
    },
    /// The memory of the run: before the first shard task, at the ends of minibatches and evaluation batches (at most
    /// twice a second), and at the end.
    Memory {
        /// Host memory, the disk if it holds master weights, and the devices in order.
        tiers: &'a [TierMemory],
        /// Seconds since the run started.
        at_s: f64,
    },
    /// A task started from its checkpoint; a finished one ends immediately.
    Resumed {
        /// The task.
        task: TaskId,
        /// Minibatches trained before.
        step: usize,
        /// Minibatches in all.
        steps: usize,
        /// Seconds since the run started.
        at_s: f64,
    },
    /// A task was added to the run; it starts when host memory allows.
    Submitted {
        /// The task.
        task: TaskId,
        /// Its admission: plan and memory.
        admitted: &'a AdmittedTask,
        /// The configuration for the report.
        config: &'a serde_json::Value,
        /// Seconds since the run started.
        at_s: f64,
    },
    /// A task is paused, and waits for a [command](crate::Command). A task resumed from a checkpoint that pauses at
    /// that point is paused before its weights are loaded.
    Paused {
        /// The task.
        task: TaskId,
        /// Minibatches trained before.
        step: usize,
        /// Seconds since the run started.
        at_s: f64,
    },
    /// The state of a task was [saved](crate::Command::Save); other tasks can be forked from it.
    Saved {
        /// The task.
        task: TaskId,
        /// Minibatches trained before.
        step: usize,
        /// The file.
        file: &'a Path,
        /// Seconds since the run started.
        at_s: f64,
    },
    /// A command was refused.
    Refused {
        /// The task's name in the command.
        task: &'a str,
        /// The reason.
        error: &'a CommandError,
        /// Seconds since the run started.
        at_s: f64,
    },
    /// A task's checkpoint was written.
    Checkpointed {
        /// The task.
        task: TaskId,
        /// Minibatches trained before it.
        step: usize,
        /// The size of the file in bytes.
        bytes: u64,
        /// Seconds that the task waited for it.
        seconds: f64,
        /// Seconds since the run started.
        at_s: f64,
    },
    /// A task's checkpoint could not be written. The task continues, and an earlier checkpoint stays valid.
    CheckpointFailed {
        /// The task.
        task: TaskId,
        /// Minibatches trained before it.
        step: usize,
        /// The error message.
        error: &'a str,
        /// Seconds since the run started.
        at_s: f64,
    },
    /// A task ended.
    Ended {
        /// The task.
        task: TaskId,
        /// The state in which it ended.
        state: TaskState,
        /// The error message of a failed task.
        error: Option<&'a str>,
        /// SHA-256 of its weights, and the directory with its model, as in its report.
        written: (Option<&'a str>, Option<&'a Path>),
        /// Seconds since the run started.
        at_s: f64,
    },
    /// A stop of the run was requested; current minibatches are finished.
    Stopping,
}

/// Observes a run. It is called on the orchestrator's thread and must return quickly.
pub trait Observer: Send {
    /// Receives an event.
    fn observe(&mut self, event: &RunEvent<'_>);
}

/// Ignores all events.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn observe(&mut self, _: &RunEvent<'_>) {}
}
