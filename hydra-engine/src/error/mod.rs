//! The errors of a run, and the guard that makes errors of panics.
//!
//! May touch: the errors of the crates below.
//! Never: imports anything of the engine.

mod checkpoint;
mod command;

pub use checkpoint::CheckpointError;
pub use command::CommandError;

pub(crate) use hydra_core::with_causes;
use hydra_core::{ByteSize, CoreError, DatasetError, WeightError};
use hydra_partition::PartitionError;
use hydra_spill::SpillError;
use std::path::PathBuf;
use std::sync::Arc;

/// The reasons for which a run was refused or a task set aside.
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
    /// A checkpoint could not be written or used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// No device was given.
    #[error("no device: a run needs at least one")]
    NoDevice,
    /// A device cannot be had.
    #[error("device `{device}`: {problem}")]
    Device {
        /// The device.
        device: String,
        /// The problem, and what to do.
        problem: String,
    },
    /// An optimizer was to step on the device and cannot.
    #[error(
        "the optimizer of task `{task}` cannot step on the device: {problem}; let it step on the host, or leave the choice to the run"
    )]
    OptimizerPlacement {
        /// The task.
        task: String,
        /// The obstacle.
        problem: String,
    },
    /// Devices on which one task would not have the same bits.
    #[error(
        "devices of one run are of one kind, for a task's results depend on it: `{first}` and `{other}` are not"
    )]
    MixedDevices {
        /// The first device.
        first: String,
        /// One of another kind.
        other: String,
    },
    /// Nothing was submitted.
    #[error("no task was submitted")]
    NoTask,
    /// A dataset without items.
    #[error("dataset `{dataset}` has no items")]
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
    /// Two tasks with one file for checkpoints.
    #[error("the tasks `{first}` and `{second}` are both kept in `{path}`: give each a file of its own")]
    SameCheckpoint {
        /// The first task.
        first: String,
        /// The other.
        second: String,
        /// The file.
        path: PathBuf,
    },
    /// Two tasks whose models would be written into one directory.
    #[error("the tasks `{first}` and `{second}` both write into `{path}`: give each a directory of its own")]
    SameOutput {
        /// The first task.
        first: String,
        /// The other.
        second: String,
        /// The directory.
        path: PathBuf,
    },
    /// A task could not be admitted.
    #[error("task `{task}` was refused")]
    Task {
        /// The task.
        task: String,
        /// The cause.
        #[source]
        source: Box<EngineError>,
    },
    /// The host has too little memory for the run.
    #[error(
        "the run needs at least {} ({needed} B) of host memory ({} for masters and optimizer state of {tasks} tasks, \
         {}{} for one model within a minibatch), the budget is {}",
        ByteSize(*needed).at_least(), ByteSize(*masters), for_disk(*working), ByteSize(*active), ByteSize(*budget)
    )]
    HostMemory {
        /// Bytes needed at least.
        needed: u64,
        /// Bytes of masters and optimizer state that cannot live elsewhere.
        masters: u64,
        /// Bytes for those that live on the disk, where they are used; `None` without a disk.
        working: Option<u64>,
        /// Bytes of one model within a minibatch.
        active: u64,
        /// Tasks submitted.
        tasks: usize,
        /// The budget.
        budget: u64,
    },
    /// A frozen parameter does not have the values that another task has read from the same place.
    #[error(
        "the values of `{param}` from {origin} are others than those that another task of this run has read: what has \
         changed must be put back, or read under another name"
    )]
    Changed {
        /// The parameter.
        param: String,
        /// The file, or what else the values come from.
        origin: String,
    },
    /// The disk is to take fewer masters than host memory leaves to it.
    #[error(
        "host memory of {} leaves {} of masters and optimizer state to the disk `{}`, of which the run may have \
         {}",
        ByteSize(*host), ByteSize(*needed).at_least(), dir.display(), ByteSize(*budget)
    )]
    DiskMemory {
        /// The directory.
        dir: PathBuf,
        /// Bytes of masters that have to live there.
        needed: u64,
        /// The disk's budget.
        budget: u64,
        /// The host's budget.
        host: u64,
    },
    /// A trained model could not be written.
    #[error("the trained model could not be written{}", in_checkpoint(checkpoint.as_ref()))]
    NotWritten {
        /// The task's checkpoint, which has the trained masters, or why it has not; nothing if it has no checkpoint.
        checkpoint: Option<Result<PathBuf, Box<EngineError>>>,
        /// The cause.
        #[source]
        source: Box<EngineError>,
    },
    /// Trained weights are no numbers.
    #[error(
        "the trained weights of `{param}` are not finite: lower the learning rate, add warmup or clip the gradient"
    )]
    NotFinite {
        /// The parameter.
        param: String,
    },
    /// A loss is not a number.
    #[error("the loss{} is {loss} {}", on(dataset.as_deref()), when(*step, dataset.is_some()))]
    BadLoss {
        /// The loss.
        loss: f32,
        /// The minibatch, from zero, or how many were trained before an evaluation.
        step: usize,
        /// The dataset that was evaluated; `None` while training.
        dataset: Option<String>,
    },
    /// A layer panicked.
    #[error("{layers} failed in {work} of step {step}: {message}")]
    Layer {
        /// The layers of the shard, by their names.
        layers: String,
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
    #[error("task `{task}` failed")]
    Failed {
        /// The task.
        task: String,
        /// The cause.
        #[source]
        source: Arc<EngineError>,
    },
    /// Code that the task brought along panicked outside of its layers.
    #[error("{what} failed: {message}")]
    Panicked {
        /// The work that was being done.
        what: &'static str,
        /// The panic's message.
        message: String,
    },
    /// The run cannot go on: nothing runs, nothing is awaited and nothing can be claimed.
    #[error(
        "nothing can go on: {} of host memory are free and the task needs {} to enter a minibatch",
        ByteSize(*available), ByteSize(*needed).at_least()
    )]
    NoProgress {
        /// Host bytes that are free.
        available: u64,
        /// Host bytes that the task needs within a minibatch.
        needed: u64,
    },
    /// A microbatch group is to have as many microbatches as no minibatch has.
    #[error(
        "a visit of {microbatch_group} microbatches, where a minibatch has {accumulate}; give from 1 to {accumulate}, or none"
    )]
    MicrobatchGroup {
        /// The microbatches of the microbatch group.
        microbatch_group: usize,
        /// The microbatches of a minibatch.
        accumulate: usize,
    },
    /// Items of a dataset differ in shape from those of the training data.
    #[error(
        "dataset `{dataset}` has items of shapes {found:?}, the training data of shapes {expected:?}; they must agree"
    )]
    ItemShapes {
        /// The dataset.
        dataset: String,
        /// The shapes of a training item's tensors.
        expected: Vec<Vec<usize>>,
        /// The shapes of an item of the dataset.
        found: Vec<Vec<usize>>,
    },
    /// A gradient arrived for a layer that does not have the parameter.
    #[error("layer {layer} gave a gradient for image {buffer}, which it does not name")]
    StrayGradient {
        /// The layer's index.
        layer: usize,
        /// The buffer's index.
        buffer: usize,
    },
    /// A device does not compute any more.
    #[error("the device `{device}` computes nothing any more, and is left out of the run")]
    DeviceLost {
        /// The device's name.
        device: String,
        /// The failure there.
        #[source]
        source: Box<EngineError>,
    },
    /// No device of the run computes any more.
    #[error("no device is left: each of them failed and computes nothing any more")]
    NoDeviceLeft,
    /// A worker thread could not be started or ended early.
    #[error("worker `{worker}` {problem}")]
    Worker {
        /// The thread's name.
        worker: String,
        /// The problem.
        problem: String,
    },
}

fn for_disk(working: Option<u64>) -> String {
    working.map_or_else(String::new, |bytes| format!("{} for work on those on the disk, ", ByteSize(bytes)))
}

fn in_checkpoint(checkpoint: Option<&Result<PathBuf, Box<EngineError>>>) -> String {
    match checkpoint {
        None => String::new(),
        Some(Ok(file)) => {
            format!("; its weights are in `{}`: mend the cause and resume the task", file.display())
        }
        Some(Err(error)) => format!(", and its weights could not be kept ({})", with_causes(error)),
    }
}

/// Names the task that an error refuses.
pub(crate) fn refused(task: &str) -> impl FnOnce(EngineError) -> EngineError {
    move |source| EngineError::Task { task: task.to_owned(), source: Box::new(source) }
}

fn on(dataset: Option<&str>) -> String {
    dataset.map_or_else(String::new, |name| format!(" on dataset `{name}`"))
}

/// The time at which a loss was no number, and what may help.
fn when(step: usize, evaluated: bool) -> String {
    match (step, evaluated) {
        (0, true) => "before anything was trained: look at the dataset and at the first weights".to_owned(),
        (_, true) => format!(
            "after {step} minibatches: look at the dataset; if the training diverged, lower the learning rate, add \
             warmup or clip the gradient"
        ),
        (0, false) => {
            "at step 0, before anything was trained: look at the data and at the first weights".to_owned()
        }
        (_, false) => {
            format!("at step {step}: lower the learning rate, add warmup or clip the gradient")
        }
    }
}

/// Runs code that a task brought along; a panic in it becomes an error of the task.
pub(crate) fn guarded<T>(
    what: &'static str,
    run: impl FnOnce() -> Result<T, EngineError>,
) -> Result<T, EngineError> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        Err(EngineError::Panicked { what, message: hydra_core::panic_message(panic.as_ref()) })
    })
}
