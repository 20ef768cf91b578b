//! The report of a run; `docs/report.md` documents the JSON.
//!
//! Besides its results, a report states how the work was divided. Each model is cut into shards, and each *shard
//! task* is one forward, backward or evaluation pass of one microbatch through one shard.

use crate::admission::{Placement, Skipped};
use crate::error::EngineError;
use crate::protocol::Evaluation;
use crate::protocol::TaskState;
use hydra_sched::Workload;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// The version of the report's format.
pub const REPORT_SCHEMA: u32 = 1;

/// The outcome of one task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TaskReport {
    /// The task's name.
    pub name: String,
    /// The configuration for the report, as submitted.
    pub config: serde_json::Value,
    /// The state in which it ended.
    pub state: TaskState,
    /// The error message.
    pub error: Option<String>,
    /// The error as a value. It is not serialized.
    #[serde(skip)]
    pub failure: Option<Arc<EngineError>>,
    /// The shards of its model, and the storage of its master weights.
    #[serde(flatten)]
    pub plan: PlanReport,
    /// What it was trained on.
    #[serde(flatten)]
    pub trained: Trained,
    /// The mean loss of each minibatch, before its update.
    pub losses: Vec<f64>,
    /// Validations before and during training.
    #[serde(flatten)]
    pub validations: Validations,
    /// Validation of the final weights.
    pub validation: Option<Evaluation>,
    /// Test of the final weights.
    pub test: Option<Evaluation>,
    /// SHA-256 over the SHA-256 of each parameter's `f32` bytes (little-endian), in chain order; a tied parameter counts once.
    pub weights_sha256: Option<String>,
    /// The directory with the written model.
    pub model_dir: Option<PathBuf>,
    /// Its checkpoints.
    #[serde(flatten)]
    pub checkpoints: CheckpointReport,
    /// The times of this run.
    #[serde(flatten)]
    pub times: TaskTimes,
}

/// The training of a task so far.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Trained {
    /// Minibatches trained.
    pub steps: usize,
    /// The unit of `units`: tokens, images, items.
    #[serde(default)]
    pub unit: String,
    /// The units that this run trained.
    #[serde(default)]
    pub units: u64,
}

/// The shards of a task's model, and the storage of its master weights.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PlanReport {
    /// Parameters of the model.
    pub parameters: u64,
    /// The number of shards.
    pub shards: usize,
    /// The first layer of each shard but the first.
    pub cut_points: Vec<usize>,
    /// Bytes of its master weights, optimizer state and best weights on the disk.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Where its optimizer stepped, and why.
    #[serde(default)]
    pub optimizer: Placement,
}

/// Validations before and during training.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Validations {
    /// Validation before training.
    pub initial_validation: Option<Evaluation>,
    /// The tasks that computed it, if other tasks took part: tasks with equal initial weights evaluate them once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub initial_validation_by: Vec<String>,
    /// Validations during training: minibatches trained, and the result.
    pub evaluations: Vec<(usize, Evaluation)>,
    /// Minibatches after which the final weights were reached, if the final weights are the best ones.
    pub best_step: Option<usize>,
    /// True if early stopping ([`hydra_core::TrainSpec::patience`]) ended it.
    #[serde(default)]
    pub stopped_early: bool,
}

/// The checkpoints of a task.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CheckpointReport {
    /// Minibatches trained by earlier runs, if this one resumed a checkpoint.
    #[serde(default)]
    pub resumed_at: Option<usize>,
    /// The error of its last checkpoint, if it could not be written.
    #[serde(default)]
    pub checkpoint_error: Option<String>,
}

/// The seconds of a task in this run.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct TaskTimes {
    /// Seconds of compute of its shard tasks.
    pub compute_s: f64,
    /// Seconds in which only the optimizer of the task ran.
    pub optimizer_stall_s: f64,
}

/// The work of a device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DeviceReport {
    /// The device's name, such as `cpu:0`.
    pub name: String,
    /// Its compute threads.
    pub threads: usize,
    /// Its memory budget.
    pub budget_bytes: u64,
    /// The peak of used bytes: measured if the allocator counts, otherwise reserved.
    pub peak_bytes: u64,
    /// True if `peak_bytes` was measured.
    pub peak_measured: bool,
    /// The peak of bytes used beyond those reserved at that moment, if the allocator counts and promotions are
    /// copies. Half of the budget's margin is left free for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreserved_bytes: Option<u64>,
    /// Seconds of compute.
    pub compute_s: f64,
    /// Seconds of transfers, in both directions.
    pub copy_s: f64,
    /// Seconds in which it waited for the promotion or the memory of a claimed shard task.
    pub stall_s: f64,
    /// `compute_s` divided by the makespan.
    pub utilization: f64,
    /// Shard tasks run.
    pub shard_tasks: u64,
}

/// Bytes that moved between the host and all devices.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Transfers {
    /// Bytes that were uploaded: parameters, boundary activations and gradients.
    pub promoted_bytes: u64,
    /// Bytes of parameters among them.
    #[serde(default)]
    pub parameter_bytes: u64,
    /// Bytes of parameters that shard tasks found in their device's parameter cache.
    #[serde(default)]
    pub cached_bytes: u64,
    /// Bytes that were downloaded: boundary activations and gradients. Demoting parameters moves none.
    pub demoted_bytes: u64,
    /// Bytes read from the disk: master weights that were promoted, evaluated, stepped or saved.
    #[serde(default)]
    pub disk_read_bytes: u64,
    /// Bytes written to the disk: initial weights, and master weights that were stepped or restored.
    #[serde(default)]
    pub disk_written_bytes: u64,
}

/// The results of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunReport {
    /// [`REPORT_SCHEMA`].
    pub schema: u32,
    /// Seconds from the start of the first shard task to the end of the last.
    pub makespan_s: f64,
    /// A lower bound on the makespan of these shard tasks: the larger of total compute divided by the number of
    /// devices and the longest task, including optimizer time that it cannot hide.
    pub lower_bound_s: f64,
    /// The makespan that the simulator predicts from [`RunReport::workload`] and the measured shard tasks, under the
    /// same policy; it shows how well the simulator models the run. `None` if a task was not trained from start to
    /// end.
    #[serde(default)]
    pub replay_s: Option<f64>,
    /// Trained tokens (or items) per second of the makespan.
    pub tokens_per_s: f64,
    /// The policy's name.
    pub policy: String,
    /// True if shard tasks were prefetched.
    pub prefetch: bool,
    /// The tasks, in the order of submission.
    pub tasks: Vec<TaskReport>,
    /// Tasks that cannot fit, which the run skipped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(alias = "left_out")]
    pub skipped: Vec<Skipped>,
    /// The devices.
    pub devices: Vec<DeviceReport>,
    /// The bytes that moved.
    pub transfers: Transfers,
    /// Host memory that the run was admitted with, for master weights, gradients, boundary activations and batches.
    pub host_admitted_bytes: u64,
    /// The host budget.
    pub host_budget_bytes: u64,
    /// The peak of reserved host memory. It includes memory set aside for work on master weights on the disk.
    #[serde(default)]
    pub host_peak_bytes: u64,
    /// The trained tasks with their mean measured costs, for [`hydra_sched::simulate`]. If the number of microbatches
    /// varies in a way that a workload cannot express, each microbatch is listed as a minibatch. It is not
    /// serialized.
    #[serde(skip)]
    pub workload: Option<Workload>,
}

impl RunReport {
    /// Returns true if every task ended as [`TaskState::Done`], and none was skipped.
    pub fn all_done(&self) -> bool {
        self.skipped.is_empty() && self.tasks.iter().all(|task| task.state == TaskState::Done)
    }
}
