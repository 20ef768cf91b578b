//! A discrete-event simulation of a run, with the policies of real runs.
//!
//! Virtual time advances from event to event: a shard task ends, a promotion ends, a model arrives or
//! its optimizer step ends. The rules are those of the engine:
//!
//! - A model computes at most one shard task per replica, and its shard tasks run in order: one microbatch
//!   group after another, and each shard task for all microbatches of the group before that of the next
//!   shard.
//! - When a shard task starts, its device commits to the next one and promotes that one's parameters into its
//!   single prefetch slot. Without prefetching it commits when it is idle.
//! - A shard task can be committed to when the master weights that it reads are final: after the backward of
//!   the previous minibatch and the optimizer's step. The successor of a shard task in its microbatch pass
//!   can be committed to while the shard task computes, on the same device.
//! - The host has one optimizer for all models. It updates their shards in the order in which their gradients
//!   arrive; a step of zero duration does not wait for earlier ones.
//! - A promotion occupies the link for its duration, in the order of commitments. A copy that is still cached
//!   on the device in the right version is not promoted again; buffers of shards are cached separately, and
//!   serve every shard task that reads them.
//! - The output of a shard task is downloaded to the host, and then its gradients, for the durations in the
//!   workload, after earlier downloads of the device. Until then only the device that computed the output can
//!   continue with the model, which keeps the output, and the master weights are not updated. Gradients that
//!   are accumulated over the first microbatch group of a minibatch are downloaded once.
//! - If a device states its working memory, cached copies are evicted for computations; it commits to a shard
//!   task only when its parameters fit, and starts it when its working bytes fit.
//! - If the workload states the host's memory, a model that is between two minibatches, or microbatch passes
//!   of an evaluation, can be committed to only if it fits in addition to the models that are within one. It
//!   keeps its memory until its master weights are final, and its master weights keep theirs until it has
//!   ended.
//! - If devices share processors, a shard task starts when there is one for each of its device's threads, in
//!   the order in which shard tasks become ready. The host optimizer never waits for one: during its steps,
//!   all threads share the processors evenly.
//! - Between commitment and promotion is the device's latency. Nothing else takes time.

use self::run::SimulatedRun;
use super::{LowerBounds, Read, SimulationError, Workload};
use crate::policy::{Policy, ShardTaskKind};

mod run;
#[cfg(test)]
mod tests;
mod times;

pub use times::ShardTimes;

/// Options of a simulation in addition to the workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulationOptions {
    /// Whether devices commit to their next shard task when the current one starts, and promote its
    /// parameters meanwhile.
    pub prefetch: bool,
    /// Whether to record every shard task and promotion in [`Simulation::spans`] and [`Simulation::reads`].
    /// Otherwise the memory of a simulation grows with the models, devices and shards, but not with the shard
    /// tasks.
    pub record: bool,
}

impl Default for SimulationOptions {
    fn default() -> Self {
        Self { prefetch: true, record: false }
    }
}

/// The use of a device or its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupation {
    /// A shard task computed.
    Compute(ShardTaskKind),
    /// Missing parameters were promoted; 0 bytes if the workload does not state them.
    Promote {
        /// The bytes.
        bytes: u64,
    },
}

/// One bar of a Gantt chart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScheduleSpan {
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
    /// The start in seconds from the start of the run.
    pub start_s: f64,
    /// The end in seconds from the start of the run.
    pub end_s: f64,
}

/// The result of a simulated run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Simulation {
    /// The policy's name.
    pub policy: &'static str,
    /// The end of the last shard task, in seconds from the start of the run.
    pub makespan_s: f64,
    /// The start of the first shard task, in seconds from the start of the run.
    pub first_start_s: f64,
    /// Lower bounds on the makespan of every schedule; see [`LowerBounds`].
    pub bounds: LowerBounds,
    /// Seconds of compute, per device.
    pub busy_s: Vec<f64>,
    /// The peak bytes on each device with a parameter cache: copies of parameters, the working bytes of its
    /// shard task, inputs, accumulated gradients, and downloads in progress when a shard task ended. 0 for a
    /// device without a cache, and if sizes are not stated.
    pub peak_bytes: Vec<u64>,
    /// The number of shard tasks that ran.
    pub shard_tasks: u64,
    /// The number of promotions that used a link.
    pub promotions: u64,
    /// The number of shard tasks whose parameters were still cached on the device.
    pub promotions_saved: u64,
    /// The bytes of the promoted parameters; `None` if any size is not stated.
    pub promoted_bytes: Option<u64>,
    /// The seconds in which a device had committed to a shard task and waited for its parameters or for
    /// memory.
    pub promotion_wait_s: f64,
    /// The number of decisions of the policy with at least one claimable model, including those that held the
    /// device back.
    pub decisions: u64,
    /// The end of each task, in seconds from the start of the run.
    pub finished_s: Vec<f64>,
    /// Every shard task and promotion in the order of their starts, if recorded.
    pub spans: Vec<ScheduleSpan>,
    /// Per device: the reads of its shard tasks, in the order of its commitments, if recorded.
    pub reads: Vec<Vec<Read>>,
}

impl Simulation {
    /// Returns the fraction of the makespan in which each device computed.
    pub fn utilization(&self) -> Vec<f64> {
        let share = |busy: &f64| if self.makespan_s > 0.0 { busy / self.makespan_s } else { 0.0 };
        self.busy_s.iter().map(share).collect()
    }

    /// Returns the makespan divided by the best lower bound; 1 if both are 0, and infinite if only the bound
    /// is.
    pub fn gap(&self) -> f64 {
        let bound = self.bounds.best_s();
        if bound > 0.0 || self.makespan_s > 0.0 { self.makespan_s / bound } else { 1.0 }
    }
}

/// Simulates a workload under a policy. Equal workloads, policies and options give bitwise equal results.
///
/// # Errors
/// [`SimulationError::Workload`] if the workload violates a rule of [`Workload::check`];
/// [`SimulationError::NotClaimable`] if the policy chooses a model that is not claimable, and
/// [`SimulationError::Stuck`] if it chooses none while there is nothing in progress to wait for.
pub fn simulate(
    workload: &Workload,
    policy: &mut dyn Policy,
    options: SimulationOptions,
) -> Result<Simulation, SimulationError> {
    replay(workload, &ShardTimes::default(), policy, options)
}

/// Simulates a workload whose shard tasks take the given times, or else the stated ones, which also determine
/// the bounds.
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
    let mut run = SimulatedRun::new((workload, times), policy, options)?;
    run.work()?;
    Ok(run.result(bounds))
}
