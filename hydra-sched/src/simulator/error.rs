//! Errors of workloads and simulations.

use thiserror::Error;

use crate::policy::{CostError, ModelIndex};

/// A workload that cannot be simulated.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum WorkloadError {
    /// The text is not JSON, or not in the format.
    #[error("not a workload: expected JSON as docs/scheduling.md describes it")]
    Json(#[from] serde_json::Error),
    /// There are no tasks.
    #[error("the workload has no task; `tasks` needs at least one")]
    NoTasks,
    /// There are no devices.
    #[error("the workload has no device; `devices` needs at least one")]
    NoDevices,
    /// Two tasks have the same name.
    #[error("two tasks are called `{name}`; give each its own name")]
    DuplicateName { name: String },
    /// A task has no minibatches.
    #[error("task `{task}` has no minibatch; `minibatches` must be at least 1")]
    NoMinibatches { task: String },
    /// The workload is too long to simulate.
    #[error("the workload has {found} shard tasks, more than {most}: check `minibatches`")]
    TooManyShardTasks { found: u64, most: u64 },
    /// A number is out of its range.
    #[error("{field} of {of} is {found}; it must be {expected}")]
    Value { of: String, field: &'static str, found: f64, expected: &'static str },
    /// The costs do not form valid estimates for the policy.
    #[error("the costs of task `{task}` cannot be used")]
    Costs { task: String, source: CostError },
    /// A shard's size is given without the bandwidth that converts it to a time.
    #[error(
        "shard {shard} of task `{task}` has `bytes` and no `promote_s`, and device {device} has no \
         `link_bytes_per_s`: give one of the two"
    )]
    NoLink { task: String, shard: usize, device: usize },
    /// A device's memory is given, but a shard's size is not.
    #[error(
        "device {device} has `memory_bytes`, but shard {shard} of task `{task}` has no `bytes`: give them"
    )]
    NoBytes { task: String, shard: usize, device: usize },
    /// A device caches parts of shards without a stated memory.
    #[error(
        "device {device} keeps copies, also of `buffers` and `frozen` parts, but has no `memory_bytes`: give them"
    )]
    NoMemory { device: usize },
    /// A device cannot hold two copies of a shard.
    #[error(
        "device {device} has {memory} bytes, but shard {shard} of task `{task}` needs {needed}, for itself and \
         for a prefetched shard of the same size. Cut smaller shards, or increase `memory_bytes`"
    )]
    Memory { task: String, shard: usize, device: usize, needed: u64, memory: u64 },
}

/// A failed simulation.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum SimulationError {
    /// The workload violates a rule.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// The policy chose a model that the requesting device cannot claim.
    #[error(
        "the policy `{policy}` answered decision {decision}, of device {device} at {at_s} s, with {}, which is not \
         claimable at that time; expected {}, or none to wait. `Policy::pick` must return one of the models that its \
         `Claimable` shows",
        named(*.found, .task.as_deref()),
        one_of(*.count, .claimable)
    )]
    NotClaimable {
        policy: &'static str,
        /// The decision's number; see [`Request::decision`](crate::Request::decision).
        decision: u64,
        device: usize,
        /// The time in seconds from the start of the run.
        at_s: f64,
        found: ModelIndex,
        /// The name of that task; `None` if the workload has no such task.
        task: Option<String>,
        count: usize,
        /// The first of them in submission order, at most eight.
        claimable: Vec<ModelIndex>,
    },
    /// The policy chose no model although there is nothing in progress to wait for.
    #[error(
        "the policy `{policy}` holds back every device forever: at {at_s} s, after {decisions} decisions, {left} of \
         {shard_tasks} shard tasks are left, nothing computes or is about to become claimable, and it chose none where \
         {} was expected. `Policy::pick` may return `None` only while `Request::awaited` or `Request::soon` names a \
         model, which they do for a policy whose `Policy::waits` is true",
        one_of(*.count, .claimable)
    )]
    Stuck {
        policy: &'static str,
        /// The time in seconds from the start of the run.
        at_s: f64,
        decisions: u64,
        left: u64,
        shard_tasks: u64,
        count: usize,
        /// The first of them in submission order, at most eight.
        claimable: Vec<ModelIndex>,
    },
}

/// Formats a model with the name of its task.
fn named(ModelIndex(model): ModelIndex, task: Option<&str>) -> String {
    match task {
        Some(task) => format!("model {model} (task `{task}`)"),
        None => format!("model {model}, which is not in the workload"),
    }
}

/// Formats the expected models, the first ones by index.
fn one_of(count: usize, first: &[ModelIndex]) -> String {
    let shown: Vec<String> = first.iter().map(|model| model.0.to_string()).collect();
    let more = if count > first.len() { ", ..." } else { "" };
    format!("one of {count} (model {}{more})", shown.join(", "))
}
