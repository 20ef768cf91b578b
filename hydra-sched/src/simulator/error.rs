//! Errors of workloads and simulations.

use thiserror::Error;

use crate::policy::{CostError, ModelIndex};

/// A workload that cannot be simulated.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum WorkloadError {
    /// The text is not JSON, or not of the format.
    #[error("this is not a workload: expected JSON as docs/scheduling.md describes it")]
    Json(#[from] serde_json::Error),
    /// There is nothing to schedule.
    #[error("the workload has no task; `tasks` needs at least one")]
    NoTasks,
    /// There is nowhere to run it.
    #[error("the workload has no device; `devices` needs at least one")]
    NoDevices,
    /// Two tasks have one name.
    #[error("two tasks are called `{name}`; give each its own name")]
    DuplicateName { name: String },
    /// A task trains nothing.
    #[error("task `{task}` has no minibatch; `minibatches` must be at least 1")]
    NoMinibatches { task: String },
    /// The workload is longer than anyone would wait for.
    #[error("the workload has {found} shard tasks, more than {most}: look for a slip in `minibatches`")]
    TooManyShardTasks { found: u64, most: u64 },
    /// A number is out of its range.
    #[error("{field} of {of} is {found}; it must be {expected}")]
    Value { of: String, field: &'static str, found: f64, expected: &'static str },
    /// The policy's estimates cannot be made of the costs.
    #[error("the costs of task `{task}` cannot be used")]
    Costs { task: String, source: CostError },
    /// A shard's size is given without the bandwidth that makes a time of it.
    #[error(
        "shard {shard} of task `{task}` has `bytes` and no `promote_s`, and device {device} has no \
         `link_bytes_per_s`: give one of the two"
    )]
    NoLink { task: String, shard: usize, device: usize },
    /// A device's memory is given, and a shard's size is not.
    #[error(
        "device {device} has `memory_bytes`, and shard {shard} of task `{task}` has no `bytes`: give them"
    )]
    NoBytes { task: String, shard: usize, device: usize },
    /// Parts of shards have copies of their own on a device whose memory is not given.
    #[error(
        "device {device} keeps copies, also of `images` and of what is `frozen`, and has no `memory_bytes`: give them"
    )]
    NoMemory { device: usize },
    /// A device cannot hold two of a shard.
    #[error(
        "device {device} has {memory} bytes, and shard {shard} of task `{task}` needs {needed}: room for itself and \
         for one as large that is prefetched. Cut smaller shards, or give more `memory_bytes`"
    )]
    Memory { task: String, shard: usize, device: usize, needed: u64, memory: u64 },
}

/// A simulation that has no result.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum SimulationError {
    /// The workload breaks a rule.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// The policy answered with a model that the device that asked cannot claim.
    #[error(
        "the policy `{policy}` answered decision {decision}, of device {device} at {at_s} s, with {}, which cannot be \
         claimed then; expected {}, or none to wait. `Policy::pick` must answer with one of the models that its \
         `Claimable` shows",
        named(*.found, .task.as_deref()),
        one_of(*.count, .claimable)
    )]
    NotClaimable {
        policy: &'static str,
        /// Its number; see [`Request::decision`](crate::Request::decision).
        decision: u64,
        device: usize,
        /// When, in seconds from the start of the run.
        at_s: f64,
        found: ModelIndex,
        /// The name of that task; `None` where the workload has no such task.
        task: Option<String>,
        count: usize,
        /// The first of them in submission order, eight at most.
        claimable: Vec<ModelIndex>,
    },
    /// The policy answered with no model although nothing is under way that it could wait for.
    #[error(
        "the policy `{policy}` holds back every device for ever: at {at_s} s, after {decisions} decisions, {left} of \
         {shard_tasks} shard tasks are left, nothing computes or is about to become claimable, and it took none where \
         {} was expected. `Policy::pick` may answer `None` only while `Request::awaited` or `Request::soon` names a \
         model, which they do for a policy whose `Policy::waits` is true",
        one_of(*.count, .claimable)
    )]
    Stuck {
        policy: &'static str,
        /// When, in seconds from the start of the run.
        at_s: f64,
        decisions: u64,
        left: u64,
        shard_tasks: u64,
        count: usize,
        /// The first of them in submission order, eight at most.
        claimable: Vec<ModelIndex>,
    },
}

/// A model with the name of its task.
fn named(ModelIndex(model): ModelIndex, task: Option<&str>) -> String {
    match task {
        Some(task) => format!("model {model} (task `{task}`)"),
        None => format!("model {model}, of which the workload has no task"),
    }
}

/// The models of which one is expected, the first ones by their indices.
fn one_of(count: usize, first: &[ModelIndex]) -> String {
    let shown: Vec<String> = first.iter().map(|model| model.0.to_string()).collect();
    let more = if count > first.len() { ", ..." } else { "" };
    format!("one of {count} (model {}{more})", shown.join(", "))
}
