//! The errors of a run, and the guard that turns panics into errors.
//!
//! May touch: the errors of the crates below.
//! Never: imports from other modules of the engine.

mod checkpoint;
mod command;

pub use checkpoint::CheckpointError;
pub use command::CommandError;

pub(crate) use hydra_core::with_causes;
use hydra_core::{ByteSize, CoreError, DatasetError, FloatType, WeightError};
use hydra_partition::PartitionError;
use hydra_spill::SpillError;
use std::path::PathBuf;
use std::sync::Arc;

/// The reason why a run was refused or a task failed.
///
/// Each message names the subject, what was requested, what was available, and a remedy.
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
    /// A model cannot be cut into shards that fit.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// Memory could not be reserved, or data could not be moved.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// The times of a plan are not valid estimates.
    #[error(transparent)]
    Costs(#[from] hydra_sched::CostError),
    /// A checkpoint could not be written or used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The chain of an evaluation in rounds is not one of the task's model.
    #[error(
        "the chain `{rounds}` of an evaluation in rounds has other layers or parameters than the chain `{chain}`: build both from one model"
    )]
    OtherParameters {
        /// The task's chain.
        chain: String,
        /// The chain of its rounds.
        rounds: String,
    },
    /// No device was given.
    #[error("no device was given: a run needs at least one")]
    NoDevice,
    /// A device is not available.
    #[error("device `{device}`: {problem}")]
    Device {
        /// The device.
        device: String,
        /// The problem, and what to do.
        problem: String,
    },
    /// An optimizer was placed on the device and cannot step there.
    #[error(
        "the optimizer of task `{task}` cannot step on the device: {problem}; place it on the host, or let the run choose"
    )]
    OptimizerPlacement {
        /// The task.
        task: String,
        /// The obstacle.
        problem: String,
    },
    /// Devices of different kinds, on which the bits of a result would differ.
    #[error(
        "the devices `{first}` and `{other}` are of different kinds: results depend on the kind, so all devices of a run \
         must be of one kind"
    )]
    MixedDevices {
        /// The first device.
        first: String,
        /// One of another kind.
        other: String,
    },
    /// An objective that does not give the figures of its metrics.
    #[error(
        "expected {expected} {what} from the objective, found {found}: `Objective::measure` gives as many sums for every batch, and `Objective::values` a value for each metric"
    )]
    Figures {
        /// The figures.
        what: &'static str,
        /// The number that was expected.
        expected: usize,
        /// The number that there is.
        found: usize,
    },
    /// A weight source that does not give the place of each parameter in a file.
    #[error(
        "expected the places of {expected} parameters of buffer {buffer} in files from the weight source, found {found}"
    )]
    Spans {
        /// The buffer.
        buffer: usize,
        /// The number of parameters.
        expected: usize,
        /// The number of places.
        found: usize,
    },
    /// Nothing was submitted.
    #[error("no task was submitted: a run needs at least one")]
    NoTask,
    /// A dataset without items.
    #[error("dataset `{dataset}` has no items; expected at least one")]
    EmptyDataset {
        /// The task.
        task: String,
        /// The dataset.
        dataset: String,
    },
    /// Two tasks with the same name.
    #[error("two tasks are called `{name}`; names must differ, because results are written under them")]
    DuplicateTask {
        /// The name.
        name: String,
    },
    /// Two tasks with the same checkpoint file.
    #[error(
        "the tasks `{first}` and `{second}` both write checkpoints to `{path}`: give each task its own file"
    )]
    SameCheckpoint {
        /// The first task.
        first: String,
        /// The other.
        second: String,
        /// The file.
        path: PathBuf,
    },
    /// Two tasks with the same output directory.
    #[error("the tasks `{first}` and `{second}` both write into `{path}`: give each task its own directory")]
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
    /// The host memory budget is too small for the run.
    #[error(
        "the run needs at least {} ({needed} B) of host memory: {} for master weights and optimizer state of {tasks} \
         tasks, {}{} for one model within a minibatch; the budget is {}",
        ByteSize(*needed).at_least(), ByteSize(*masters), to_work(*working), ByteSize(*active), ByteSize(*budget)
    )]
    HostMemory {
        /// The smallest budget that would suffice, in bytes.
        needed: u64,
        /// Bytes of master weights and optimizer state that must be in host memory.
        masters: u64,
        /// Bytes of working memory for master weights that are on the disk, stored in another type than `f32`, or read in
        /// place; `None` if there are none.
        working: Option<u64>,
        /// Bytes of one model within a minibatch.
        active: u64,
        /// Tasks submitted.
        tasks: usize,
        /// The budget.
        budget: u64,
    },
    /// A frozen parameter has other values than another task has read from the same source.
    #[error(
        "the values of `{param}` from {origin} have changed since another task of this run read them: restore them, or \
         store the new values under another name"
    )]
    Changed {
        /// The parameter.
        param: String,
        /// The file or other source of the values.
        origin: String,
    },
    /// A frozen parameter that is read in place has other values than in the checkpoint that a task continues from.
    #[error(
        "the values of `{param}` in `{}` differ from those in the checkpoint `{}`: restore the file, or let frozen weights \
         be in host memory (--frozen-weights memory)",
        file.display(), checkpoint.display()
    )]
    BaseDiffers {
        /// The parameter.
        param: String,
        /// The file that it is read from.
        file: PathBuf,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// A frozen parameter has a value that is not of the type in which its weight source holds it.
    #[error(
        "`{param}` has a value that is no {float}, although its weight source states that all of them are: correct \
         `WeightSource::float_type`, or restore the file"
    )]
    NotExact {
        /// The parameter.
        param: String,
        /// The type that the source states.
        float: FloatType,
    },
    /// A matrix cannot be quantized, or has values other than those of its blocks.
    #[error("`{param}` has values that cannot be stored in NF4, expected {expected}: restore the file")]
    NotQuantized {
        /// The parameter.
        param: String,
        /// What the values have to be.
        expected: &'static str,
    },
    /// The disk budget is too small for the master weights that do not fit in host memory.
    #[error(
        "the run needs at least {} on the disk `{}` for master weights and optimizer state that do not fit in host \
         memory of {}; the disk budget is {}",
        ByteSize(*needed).at_least(), dir.display(), ByteSize(*host), ByteSize(*budget)
    )]
    DiskMemory {
        /// The directory.
        dir: PathBuf,
        /// Bytes of master weights and optimizer state that must be on the disk.
        needed: u64,
        /// The disk's budget.
        budget: u64,
        /// The host's budget.
        host: u64,
    },
    /// A trained model could not be written.
    #[error("the trained model could not be written{}", in_checkpoint(checkpoint.as_ref()))]
    NotWritten {
        /// The checkpoint with the trained weights, or the error of writing it; `None` if the task has none.
        checkpoint: Option<Result<PathBuf, Box<EngineError>>>,
        /// The cause.
        #[source]
        source: Box<EngineError>,
    },
    /// Trained weights are not finite.
    #[error(
        "the trained weights of `{param}` are not finite: lower the learning rate, add warmup or clip the gradient"
    )]
    NotFinite {
        /// The parameter.
        param: String,
    },
    /// A loss is not finite.
    #[error("the loss{} is {loss} {}", on(dataset.as_deref()), when(*step, dataset.is_some()))]
    BadLoss {
        /// The loss.
        loss: f32,
        /// The minibatch, from zero; for an evaluation, the number of minibatches trained before it.
        step: usize,
        /// The dataset of the evaluation; `None` in training.
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
    /// A stop was requested before there was a result.
    #[error("stopped before there was a result")]
    Stopped,
    /// A task that the caller depends on failed.
    #[error("task `{task}` failed")]
    Failed {
        /// The task.
        task: String,
        /// The cause.
        #[source]
        source: Arc<EngineError>,
    },
    /// User code other than a layer panicked.
    #[error("{what} failed: {message}")]
    Panicked {
        /// The operation.
        what: &'static str,
        /// The panic's message.
        message: String,
    },
    /// The run cannot continue: nothing runs, nothing is pending and nothing can be claimed.
    #[error(
        "the run cannot continue: the task needs {} of host memory to start a minibatch, and {} are free",
        ByteSize(*needed).at_least(), ByteSize(*available)
    )]
    NoProgress {
        /// Free bytes of host memory.
        available: u64,
        /// Bytes of host memory of the task within a minibatch.
        needed: u64,
    },
    /// A microbatch group that is empty or larger than a minibatch.
    #[error(
        "a microbatch group must have from 1 to {accumulate} microbatches (those of a minibatch), got {microbatch_group}"
    )]
    MicrobatchGroup {
        /// The requested microbatches.
        microbatch_group: usize,
        /// The microbatches of a minibatch.
        accumulate: usize,
    },
    /// The items of a dataset differ in shape from those of the training data.
    #[error(
        "dataset `{dataset}` has items of shapes {found:?}, expected {expected:?} as in the training data"
    )]
    ItemShapes {
        /// The dataset.
        dataset: String,
        /// The shapes of a training item's tensors.
        expected: Vec<Vec<usize>>,
        /// The shapes of an item of the dataset.
        found: Vec<Vec<usize>>,
    },
    /// A gradient for a buffer that the layer does not use.
    #[error("layer {layer} returned a gradient for parameter buffer {buffer}, which it does not use")]
    StrayGradient {
        /// The layer's index.
        layer: usize,
        /// The buffer's index.
        buffer: usize,
    },
    /// A device has failed and computes no more.
    #[error("the device `{device}` has failed and is not used any more in this run")]
    DeviceLost {
        /// The device's name.
        device: String,
        /// The failure.
        #[source]
        source: Box<EngineError>,
    },
    /// All devices of the run have failed.
    #[error("no device is left: all devices of the run have failed")]
    NoDeviceLeft,
    /// A worker thread could not be started, or ended early.
    #[error("worker `{worker}` {problem}")]
    Worker {
        /// The thread's name.
        worker: String,
        /// The problem.
        problem: String,
    },
}

fn to_work(working: Option<u64>) -> String {
    working.map_or_else(String::new, |bytes| {
        format!("{} of working memory to read and write them, ", ByteSize(bytes))
    })
}

fn in_checkpoint(checkpoint: Option<&Result<PathBuf, Box<EngineError>>>) -> String {
    match checkpoint {
        None => String::new(),
        Some(Ok(file)) => {
            format!("; its weights are in `{}`: fix the cause and resume the task", file.display())
        }
        Some(Err(error)) => {
            format!(", and its weights could not be saved in a checkpoint ({})", with_causes(error))
        }
    }
}

/// Wraps an error in one that names the refused task.
pub(crate) fn refused(task: &str) -> impl FnOnce(EngineError) -> EngineError {
    move |source| EngineError::Task { task: task.to_owned(), source: Box::new(source) }
}

fn on(dataset: Option<&str>) -> String {
    dataset.map_or_else(String::new, |name| format!(" on dataset `{name}`"))
}

/// The time of a loss that is not finite, and a remedy.
fn when(step: usize, evaluated: bool) -> String {
    match (step, evaluated) {
        (0, true) => "before training: check the dataset and the initial weights".to_owned(),
        (_, true) => format!(
            "after {step} minibatches: check the dataset; if the training diverged, lower the learning rate, add \
             warmup or clip the gradient"
        ),
        (0, false) => "at step 0, before any update: check the data and the initial weights".to_owned(),
        (_, false) => {
            format!("at step {step}: lower the learning rate, add warmup or clip the gradient")
        }
    }
}

/// Runs user code of a task; a panic in it becomes an error of the task.
pub(crate) fn guarded<T>(
    what: &'static str,
    run: impl FnOnce() -> Result<T, EngineError>,
) -> Result<T, EngineError> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        Err(EngineError::Panicked { what, message: hydra_core::panic_message(panic.as_ref()) })
    })
}
