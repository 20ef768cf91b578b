//! A discrete-event simulation of a run, with the policies that real runs use.
//!
//! Virtual time jumps from event to event: a shard task ends, a promotion ends, a model arrives or
//! its optimizer is done. The rules are those of the engine.
//!
//! - A model has at most one shard task computing, and its shard tasks run in order: microbatch group by microbatch group, each shard task for
//!   all microbatches of the microbatch group before that of the next shard.
//! - When a shard task starts, its device commits to the next one and promotes that one's
//!   parameters into its one buffer slot. Without prefetching it commits when it is free.
//! - A shard task can be committed to when the masters it reads are final: after the backward of
//!   the previous minibatch and the optimizer's step. What follows on a shard task in its microbatch pass can be
//!   committed to while that computes, on the same device.
//! - The host has one optimizer for all models. It takes their shards one after another, in the order in which
//!   their gradients are there; a step of no time waits for none before it.
//! - A promotion takes the link for its time, in the order of commitments. A copy that is still on
//!   the device in the right version is not promoted again; buffers of shards have copies of their own, which are
//!   there for every shard task that reads them.
//! - The output of a shard task is downloaded to the host, and then its gradients, in the time that the workload says, after
//!   what its device downloads already. Before that only the device that made the output can go on with the model, which may
//!   take it over, and the masters are not stepped. Gradients that add up over the first microbatch group of a minibatch go down as one sum.
//! - Where a device says what it has for shard tasks beside parameters, copies go for what computes; it commits to a shard task only
//!   when there is room for its parameters, and starts it when there is room for the rest.
//! - Where the workload says what the host has room for, a model that is between two minibatches, or microbatch passes of an evaluation, can
//!   be committed to only if there is room for it beside those that are within one; it has its room until its masters are final,
//!   and its masters have theirs until it has ended.
//! - Where devices share processors, a shard task begins when there is one for each of its device's threads, in the order in
//!   which shard tasks could begin but for that. The host optimizer waits for none: while it steps, all threads share evenly.
//! - Between commitment and promotion lies the device's latency. Nothing else takes time.

use self::run::Run;
use super::{LowerBounds, Read, SimulationError, Workload};
use crate::policy::{Policy, ShardTaskKind};

mod run;
#[cfg(test)]
mod tests;
mod times;

pub use times::ShardTimes;

/// Options of a simulation, beside what the workload says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulationOptions {
    /// Devices commit to their next shard task when the current one starts, and promote its parameters meanwhile.
    pub prefetch: bool,
    /// Record every shard task and promotion in [`Simulation::spans`] and [`Simulation::reads`]. Without it the memory that a
    /// simulation uses grows with the models, devices and shards, and not with the shard tasks.
    pub record: bool,
}

impl Default for SimulationOptions {
    fn default() -> Self {
        Self { prefetch: true, record: false }
    }
}

/// An occupation of a device or its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupation {
    /// A shard task computed.
    Compute(ShardTaskKind),
    /// Parameters were promoted: those that were not there, of so many bytes, which are 0 where the workload does not say them.
    Promote {
        /// The bytes.
        bytes: u64,
    },
}

/// One bar of a Gantt chart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The device, or the device whose buffer a promotion filled.
    pub device: usize,
    /// The task's index in the workload.
    pub task: usize,
    /// The minibatch.
    pub minibatch: u64,
    /// The shard.
    pub shard: usize,
    /// The occupation.
    pub what: Occupation,
    /// Start in seconds from the start of the run.
    pub start_s: f64,
    /// End in seconds from the start of the run.
    pub end_s: f64,
}

/// The result of a simulated run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Simulation {
    /// The policy's name.
    pub policy: &'static str,
    /// From the start of the run to the end of the last shard task, in seconds.
    pub makespan_s: f64,
    /// When the first shard task started, in seconds from the start of the run.
    pub first_start_s: f64,
    /// No schedule is shorter; see [`LowerBounds`].
    pub bounds: LowerBounds,
    /// Seconds of compute, per device.
    pub busy_s: Vec<f64>,
    /// The most bytes that were on a device that keeps copies, per device: copies of parameters, what its shard task took
    /// beside them, inputs and sums, and what was still on its way down when a shard task ended. 0 for one that keeps none, and
    /// of what has no size.
    pub peak_bytes: Vec<u64>,
    /// Shard tasks that ran.
    pub shard_tasks: u64,
    /// Promotions that took a link, and those that a copy on the device saved.
    pub promotions: u64,
    /// Shard tasks whose parameters were still on the device.
    pub promotions_saved: u64,
    /// Bytes of the parameters that were promoted; `None` where the size of one of them is not known.
    pub promoted_bytes: Option<u64>,
    /// Seconds in which a device had committed to a shard task and waited for its parameters or for memory.
    pub promotion_wait_s: f64,
    /// The number of times that the policy was asked with something to choose from, the times at which it took nothing included.
    pub decisions: u64,
    /// When each task was over, in seconds from the start of the run.
    pub finished_s: Vec<f64>,
    /// Every shard task and promotion in order of their starts, if they were recorded.
    pub spans: Vec<Span>,
    /// Per device: what its shard tasks read, in the order in which it committed to them, if that was recorded.
    pub reads: Vec<Vec<Read>>,
}

impl Simulation {
    /// Each device's share of the makespan in which it computed.
    pub fn utilization(&self) -> Vec<f64> {
        let share = |busy: &f64| if self.makespan_s > 0.0 { busy / self.makespan_s } else { 0.0 };
        self.busy_s.iter().map(share).collect()
    }

    /// The makespan over the best lower bound; 1 when both are 0, and infinite when only the bound is.
    pub fn gap(&self) -> f64 {
        let bound = self.bounds.best_s();
        if bound > 0.0 || self.makespan_s > 0.0 { self.makespan_s / bound } else { 1.0 }
    }
}

/// Runs a workload under a policy. The same workload, policy and options give the same result, bit for bit.
///
/// # Errors
/// [`SimulationError::Workload`] when the workload breaks a rule of [`Workload::check`];
/// [`SimulationError::NotClaimable`] when the policy answers with a model that it was not shown, and
/// [`SimulationError::Stuck`] when it answers with none while nothing is under way that it could wait for.
pub fn simulate(
    workload: &Workload,
    policy: &mut dyn Policy,
    options: SimulationOptions,
) -> Result<Simulation, SimulationError> {
    replay(workload, &ShardTimes::default(), policy, options)
}

/// Runs a workload whose shard tasks take what these times say, or else what the workload states, of which the bounds are too.
///
/// # Errors
/// Those of [`simulate`].
pub fn replay(
    workload: &Workload,
    times: &ShardTimes,
    policy: &mut dyn Policy,
    options: SimulationOptions,
) -> Result<Simulation, SimulationError> {
    workload.check()?;
    let bounds = LowerBounds::of_valid(workload, options.prefetch);
    let mut run = Run::new((workload, times), policy, options)?;
    run.work()?;
    Ok(run.result(bounds))
}
