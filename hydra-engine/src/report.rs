//! The report of a run; `docs/report.md` documents the JSON.

use crate::admission::{Placement, Skipped};
use crate::error::EngineError;
use crate::protocol::Evaluation;
use crate::stages::TaskState;
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
    /// The configuration that the submitter described it with.
    pub config: serde_json::Value,
    /// The state in which it ended.
    pub state: TaskState,
    /// The failure, in words.
    pub error: Option<String>,
    /// The failure, for programs. It is not written with the report.
    #[serde(skip)]
    pub failure: Option<Arc<EngineError>>,
    /// The division of its model, and the homes of its masters.
    #[serde(flatten)]
    pub plan: PlanReport,
    /// Minibatches trained.
    pub steps: usize,
    /// The name of what was trained on: tokens, images, items.
    #[serde(default)]
    pub unit: String,
    /// How much of it this run trained.
    #[serde(default)]
    pub units: u64,
    /// The mean loss of each minibatch, before its update.
    pub losses: Vec<f64>,
    /// Validations before and during training.
    #[serde(flatten)]
    pub validations: Validations,
    /// Validation of the final weights.
    pub validation: Option<Evaluation>,
    /// Test of the final weights.
    pub test: Option<Evaluation>,
    /// SHA-256 over the parameters' bytes in chain order, a tied one once, without alignment gaps.
    pub weights_sha256: Option<String>,
    /// The directory to which the model was written.
    pub model_dir: Option<PathBuf>,
    /// Its checkpoints.
    #[serde(flatten)]
    pub checkpoints: CheckpointReport,
    /// The times of this run.
    #[serde(flatten)]
    pub times: TaskTimes,
}

/// The division of a task's model, and the homes of its masters.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PlanReport {
    /// Parameters of the model.
    pub parameters: u64,
    /// The number of shards.
    pub shards: usize,
    /// The layers at which shards end and the next begin.
    pub cut_points: Vec<usize>,
    /// Bytes of its masters, optimizer state and best weights that lived on the disk.
    #[serde(default)]
    pub disk_bytes: u64,
    /// The place where its optimizer stepped, and why.
    #[serde(default)]
    pub optimizer: Placement,
}

/// Validations before and during training.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Validations {
    /// Validation before training.
    pub initial_validation: Option<Evaluation>,
    /// The tasks that computed it, if it was not this one alone: tasks that begin with equal weights evaluate them once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub initial_validation_by: Vec<String>,
    /// Validations during training: minibatches done and the result.
    pub evaluations: Vec<(usize, Evaluation)>,
    /// Minibatches after which the final weights were reached, if the best ones are the final ones.
    pub best_step: Option<usize>,
    /// True if it ended before its length, out of patience ([`hydra_core::TrainSpec::patience`]).
    #[serde(default)]
    pub stopped_early: bool,
}

/// The checkpoints of a task.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CheckpointReport {
    /// Minibatches that an earlier run trained, if this one went on from a checkpoint.
    #[serde(default)]
    pub resumed_at: Option<usize>,
    /// The reason for which its last checkpoint could not be written, if it could not.
    #[serde(default)]
    pub checkpoint_error: Option<String>,
}

/// The seconds of a task in this run.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct TaskTimes {
    /// Seconds of compute of its shard tasks.
    pub compute_s: f64,
    /// Seconds in which nothing of the task ran but its optimizer.
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
    /// The most that was in use at once: measured where the allocator counts, reserved otherwise.
    pub peak_bytes: u64,
    /// True if `peak_bytes` was measured.
    pub peak_measured: bool,
    /// The most that was in use at once beyond what was reserved at that moment, where the allocator counts and promotions are
    /// copies. Half of the margin of the budget is left free for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreserved_bytes: Option<u64>,
    /// Seconds of compute.
    pub compute_s: f64,
    /// Seconds of transfers, in both directions.
    pub copy_s: f64,
    /// Seconds in which it waited for the promotion, or for memory, of a shard task it had claimed.
    pub stall_s: f64,
    /// `compute_s` over the makespan.
    pub utilization: f64,
    /// Shard tasks run.
    pub shard_tasks: u64,
}

/// Bytes that moved between the host and all devices.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Transfers {
    /// Bytes that were uploaded: parameters, boundary activations and gradients.
    pub promoted_bytes: u64,
    /// The parameters among them.
    #[serde(default)]
    pub parameter_bytes: u64,
    /// Bytes of parameters that shard tasks found on their device, where they had stayed since an earlier one.
    #[serde(default)]
    pub cached_bytes: u64,
    /// Bytes that were downloaded: boundary activations and gradients. Demoting parameters moves none.
    pub demoted_bytes: u64,
    /// Bytes that were read of the disk: what was promoted or evaluated of masters there, and what was stepped or saved.
    #[serde(default)]
    pub disk_read_bytes: u64,
    /// Bytes that were written to the disk: the first masters, and what was stepped or restored.
    #[serde(default)]
    pub disk_written_bytes: u64,
}

/// The results of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunReport {
    /// [`REPORT_SCHEMA`].
    pub schema: u32,
    /// Seconds from the first shard task's start to the last one's end.
    pub makespan_s: f64,
    /// No schedule of the same shard tasks could be shorter: the larger of all compute over the number of
    /// devices and the longest task with the optimizer time it could not hide.
    pub lower_bound_s: f64,
    /// The makespan that the simulator predicts from [`RunReport::workload`] and what each shard task took, under the same policy:
    /// how well its rules are those of the run. `None` where a task was not trained from its beginning to its end.
    #[serde(default)]
    pub replay_s: Option<f64>,
    /// Trained tokens (or items) a second over the makespan.
    pub tokens_per_s: f64,
    /// The policy's name.
    pub policy: String,
    /// True if shard tasks were prefetched.
    pub prefetch: bool,
    /// The tasks, in the order of submission.
    pub tasks: Vec<TaskReport>,
    /// Tasks that can never fit, without which the run went on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(alias = "left_out")]
    pub skipped: Vec<Skipped>,
    /// The devices.
    pub devices: Vec<DeviceReport>,
    /// The bytes that moved.
    pub transfers: Transfers,
    /// The host memory that the run was admitted with, for masters, gradients, boundary activations and batches.
    pub host_admitted_bytes: u64,
    /// The host budget.
    pub host_budget_bytes: u64,
    /// The most of what was admitted that was reserved at once. It includes what was set aside for work on masters on the disk.
    #[serde(default)]
    pub host_peak_bytes: u64,
    /// The run as its mean measured costs, for [`hydra_sched::simulate`], of each task that trained. Where minibatches have
    /// numbers of microbatches that no workload says, a microbatch stands as a minibatch. It is not serialized with the
    /// report.
    #[serde(skip)]
    pub workload: Option<Workload>,
}

impl RunReport {
    /// Returns true if every task ended as [`TaskState::Done`], and none was left out.
    pub fn all_done(&self) -> bool {
        self.skipped.is_empty() && self.tasks.iter().all(|task| task.state == TaskState::Done)
    }
}
