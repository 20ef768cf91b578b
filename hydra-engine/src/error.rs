//! What can go wrong in a run.

use hydra_core::{ByteSize, CoreError, DatasetError, WeightError};
use hydra_partition::PartitionError;
use hydra_spill::SpillError;

/// Why a run was refused or a task set aside.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A chain or a spec is invalid.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// Data could not be read.
    #[error(transparent)]
    Data(#[from] DatasetError),
    /// Weights could not be read or written.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// A model could not be cut, or does not fit.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// Memory was refused or bytes could not be moved.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// A plan's times are not usable as estimates.
    #[error(transparent)]
    Costs(#[from] hydra_sched::CostError),
    /// No device was given.
    #[error("no device: a run needs at least one")]
    NoDevice,
    /// Nothing was submitted.
    #[error("no task was submitted")]
    NoTask,
    /// A dataset without items.
    #[error("task `{task}`: dataset `{dataset}` has no items")]
    EmptyDataset {
        /// The task.
        task: String,
        /// The dataset.
        dataset: String,
    },
    /// Two tasks of one name.
    #[error("two tasks are called `{name}`; names must differ, because results are written under them")]
    DuplicateTask {
        /// The name.
        name: String,
    },
    /// A task could not be admitted.
    #[error("task `{task}` was refused")]
    Task {
        /// The task.
        task: String,
        /// Why.
        #[source]
        source: Box<EngineError>,
    },
    /// The host has too little memory for the run.
    #[error(
        "the run needs at least {} of host memory ({} for masters and optimizer state of {tasks} tasks, {} for \
         one model within a minibatch), the budget is {}: train fewer tasks at once, a smaller model, or give \
         more host memory",
        ByteSize(*needed), ByteSize(*masters), ByteSize(*active), ByteSize(*budget)
    )]
    HostMemory {
        /// Bytes needed at least.
        needed: u64,
        /// Bytes of masters and optimizer state.
        masters: u64,
        /// Bytes of one model within a minibatch.
        active: u64,
        /// Tasks submitted.
        tasks: usize,
        /// The budget.
        budget: u64,
    },
    /// A loss is not a number.
    #[error("the loss is {loss} at step {step}: lower the learning rate, add warmup or clip the gradient")]
    BadLoss {
        /// The loss.
        loss: f32,
        /// The minibatch, from zero.
        step: usize,
    },
    /// A layer panicked.
    #[error("layers {first}..{end} failed in {work} of step {step}: {message}")]
    Layer {
        /// The first layer of the shard.
        first: usize,
        /// One past its last layer.
        end: usize,
        /// The kind of shard task.
        work: &'static str,
        /// The minibatch, from zero.
        step: usize,
        /// The panic's message.
        message: String,
    },
    /// The run was asked to stop before there was a result.
    #[error("stopped before there was a result")]
    Stopped,
    /// A task that had to succeed failed.
    #[error("task `{task}` failed: {message}")]
    Failed {
        /// The task.
        task: String,
        /// Why, with its causes.
        message: String,
    },
    /// A worker thread could not be started or ended early.
    #[error("worker `{worker}` {problem}")]
    Worker {
        /// The thread's name.
        worker: String,
        /// What happened.
        problem: String,
    },
}
