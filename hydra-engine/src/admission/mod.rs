//! Admission: whether a run fits, what it needs, and where everything of it lives, known before it starts.
//!
//! May touch: devices, for their pilot passes; tasks as they were submitted; memory as numbers.
//! Never: trains, starts a thread of a run, or changes what it was given.

mod admit;
mod disk;
mod division;
mod gradients;
mod host_memory;
mod identities;
mod placement;

pub(crate) use admit::{Plans, admit};
pub(crate) use disk::{DiskSpec, DiskTier};
pub(crate) use division::{best_bytes, groups, stored_bytes};
pub(crate) use gradients::GradientBytes;
pub(crate) use host_memory::HostMemory;
pub(crate) use identities::Identities;
pub(crate) use placement::waiting;
pub use placement::{OptimizerPlacement, Place, Placement};

use hydra_partition::PartitionPlan;
use serde::Serialize;
use std::sync::Arc;

/// One admitted task. Its plan is not serialized with it; plans are saved in files of their own.
#[derive(Clone, Debug, Serialize)]
pub struct AdmittedTask {
    /// The task's name.
    pub name: String,
    /// Parameters of the model.
    pub parameters: u64,
    /// Minibatches it will train.
    pub steps: usize,
    /// Items of its training data.
    pub items: usize,
    /// Tokens (or items) it will train on.
    pub units: u64,
    /// What `units` counts.
    pub unit: String,
    /// How it is cut.
    #[serde(skip)]
    pub plan: Arc<PartitionPlan>,
    /// Bytes of masters and optimizer state, for the whole run, wherever they live.
    pub master_bytes: u64,
    /// How many of them live on the disk.
    pub disk_bytes: u64,
    /// Whether each image lives on the disk; nothing where none does.
    #[serde(skip)]
    pub(crate) on_disk: Vec<bool>,
    /// Host bytes of gradients and boundary activations while it is within a minibatch.
    pub active_bytes: u64,
    /// How many of them are for the batches of a minibatch.
    #[serde(skip)]
    pub(crate) batch_bytes: u64,
    /// How many of them are for gradients that the optimizer may step with as they come.
    #[serde(skip)]
    pub(crate) gradient_bytes: u64,
    /// Estimated seconds of compute.
    pub estimated_s: f64,
    /// Where its optimizer steps.
    pub optimizer: Placement,
}

/// What a run needs: it either fits, or is refused before anything trains.
#[derive(Clone, Debug, Serialize)]
pub struct Admission {
    /// The tasks.
    pub tasks: Vec<AdmittedTask>,
    /// The devices' names and budgets.
    pub devices: Vec<(String, u64)>,
    /// The double-buffer reserve of each device.
    pub reserve_bytes: u64,
    /// The host budget.
    pub host_budget_bytes: u64,
    /// Host bytes that the run uses at most.
    pub host_admitted_bytes: u64,
    /// Host bytes of these that are for batches that are read ahead: what the rest leaves of the budget, up to the batches
    /// of a minibatch of every task.
    pub host_ahead_bytes: u64,
    /// Host bytes of these that are for what lives on the disk, where it is used.
    pub host_working_bytes: u64,
    /// Bytes of masters and optimizer state on the disk.
    pub disk_bytes: u64,
    /// The budget of the disk, where there is one.
    pub disk_budget_bytes: Option<u64>,
    /// How many models may be within a minibatch at once. When a task has ended, what its masters took may be room for
    /// more.
    pub active_models: usize,
    /// Estimated seconds of the run: all compute over the devices, or the longest task.
    pub estimated_s: f64,
}
