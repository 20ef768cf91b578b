//! Scheduling policies as pure functions of a view, and a simulator for them.
//!
//! Hydra interleaves the shard tasks of many models on few devices. Whenever a device needs its next shard
//! task, the claimable models are listed in a [`View`], and a [`Policy`] chooses one of them. A policy has no
//! other interface, so real runs, simulations and tests use the same code.
//!
//! The simulator takes a [`Workload`] of stated or measured costs and computes the makespan of a policy
//! ([`simulate()`]), lower bounds for all schedules ([`LowerBounds`]), the optimum of a small case
//! ([`exact()`]), and the cost of other ways to train the same models ([`compare()`]).
//!
//! There are three modules; each imports only those before it:
//!
//! | module | file | contents |
//! | --- | --- | --- |
//! | `policy` | `view` | [`View`], [`Request`], [`ModelView`], [`ModelIndex`]: the input of a policy |
//! | | `port`, `kind` | the [`Policy`] trait, and [`PolicyKind`], the policies by name |
//! | | `claimable` | [`Claimable`] and [`Priority`]: the claimable models, in a policy's order |
//! | | `lrtf` | [`ShardedLrtf`], the default, and its variants |
//! | | `baseline` | [`Fifo`], [`Srtf`], [`Random`], [`RoundRobin`], the baselines |
//! | | `microbatch_pass` | [`ShardTaskKind`] and the order of the shard tasks in one microbatch pass |
//! | | `remaining` | [`CostModel`] and [`WorkLeft`]: the formula for remaining time |
//! | | `copy_worth` | [`CopyUse`]: the formula for the worth of a cached copy |
//! | `program` | `shape` | [`Program`](program::Program): the passes of a task over its data, in counts |
//! | | `cursor` | [`Cursor`](program::Cursor): the position of a task in its program, and its next shard tasks |
//! | `simulator` | `workload` | [`Workload`]: tasks and devices as costs, from and to JSON |
//! | | `simulate` | [`simulate()`]: the discrete-event simulator |
//! | | `queue` | [`Queue`], which keeps thousands of models in a policy's order |
//! | | `bound` | [`LowerBounds`] |
//! | | `exact` | [`exact()`]: the shortest makespan of small cases |
//! | | `fewest` | [`Simulation::fewest_bytes`]: the minimum promoted bytes of any cache replacement |
//! | | `strategy` | [`Strategy`] and [`compare()`]: model, pipeline, data and task parallelism compared with SHARP |
//! | | `draw` | [`Draw`]: random workloads |
//! | | `conformance` | the test suite for policies, also those of other crates (feature `conformance`) |
//!
//! # Example
//! Two models wait for one device. The second has less work in each minibatch and more minibatches to go, so
//! its remaining time is longer and Sharded-LRTF takes it.
//!
//! ```
//! use hydra_sched::{CostModel, ModelIndex, ModelView, PolicyKind, Request, ShardTaskKind, View, WorkLeft};
//!
//! // Seconds of each shard's forward, backward and evaluation, from a partition plan.
//! let two_shards = CostModel::new(vec![1.0, 1.0], vec![2.0, 3.0], vec![1.0, 1.0])?;
//! let mut one_shard = CostModel::new(vec![0.5], vec![2.0], vec![0.5])?;
//!
//! // The first is before the backward of shard 0; the second is between two minibatches.
//! let position = Some((ShardTaskKind::Backward, 0));
//! let first = WorkLeft { microbatch_passes: 1, evaluations: 0, position, ..WorkLeft::default() };
//! let second = WorkLeft { microbatch_passes: 5, evaluations: 2, position: None, ..WorkLeft::default() };
//! assert_eq!(two_shards.remaining_s(&first), 2.0 + (1.0 + 3.0 + 2.0));
//! assert_eq!(one_shard.remaining_s(&second), 5.0 * 2.0 + 2.0 * 0.5);
//!
//! // A finished shard task corrects the estimate: the backward took 3 seconds, not 2.
//! one_shard.observe(ShardTaskKind::Backward, 0, 3.0);
//! assert_eq!(one_shard.remaining_s(&second), 5.0 * 3.0 + 2.0 * 0.5);
//!
//! let claimable: Vec<ModelView> = [two_shards.remaining_s(&first), one_shard.remaining_s(&second)]
//!     .into_iter()
//!     .enumerate()
//!     .map(|(index, remaining_s)| ModelView {
//!         model: ModelIndex(index),
//!         remaining_s,
//!         submitted: index as u64,
//!         next_shard: 0,
//!         cached: false,
//!         continues: false,
//!         ran_on: None,
//!     })
//!     .collect();
//! let view = View { request: Request::new(0, 1, 0), claimable: &claimable };
//!
//! let mut policy = "sharded-lrtf".parse::<PolicyKind>()?.build(0);
//! assert_eq!(policy.choose(&view), Some(ModelIndex(1)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A workload in JSON, simulated:
//!
//! ```
//! use hydra_sched::{PolicyKind, SimulationOptions, Workload, simulate};
//!
//! let workload = Workload::from_json(r#"{
//!     "tasks": [
//!         {"name": "a", "minibatches": 3, "shards": [{"forward_s": 1, "backward_s": 2, "promote_s": 0.5},
//!                                                    {"forward_s": 1, "backward_s": 3, "promote_s": 0.5}]},
//!         {"name": "b", "minibatches": 4, "shards": [{"forward_s": 1, "backward_s": 3, "promote_s": 0.5}]}
//!     ],
//!     "devices": 1
//! }"#)?;
//! let mut policy = PolicyKind::default().build(0);
//! let result = simulate(&workload, &mut *policy, SimulationOptions::default())?;
//! assert_eq!(result.shard_tasks, 3 * 3 + 4);
//! assert!(result.makespan_s >= result.bounds.best_s());
//! # Ok::<(), hydra_sched::SimulationError>(())
//! ```
//!
//! A custom policy is an implementation of [`Policy`], whose documentation has a complete example. With the
//! feature `conformance`, which is off by default, `hydra_sched::conformance::run` checks it against the
//! rules that the simulator and the engine rely on.
//!
//! Invariants: this crate never spawns a thread, never reads a clock, never does I/O, never draws from a
//! global random generator and does not use tensors; the same views in the same order give the same choices,
//! and the order of the models within a view never matters. Files and clocks belong to the caller: workloads
//! are passed as text, and results are tables and lists of spans.

#![forbid(unsafe_code)]

mod policy;
pub mod program;
mod simulator;

pub use policy::{
    Claimable, CopyUse, CostError, CostModel, Fifo, ModelIndex, ModelView, Policy, PolicyError, PolicyKind,
    Priority, Random, Request, RoundRobin, ShardTaskKind, ShardedLrtf, ShardedLrtfEager, ShardedLrtfLocal,
    Srtf, View, WorkLeft,
};
#[cfg(feature = "conformance")]
pub use simulator::conformance;
pub use simulator::{
    DeviceCost, DoesNotFit, Draw, Epoch, EvaluationCost, Exact, LowerBounds, Occupation, ParamBufferCost,
    PowerModel, Queue, Read, Replacement, Row, ScheduleSpan, ShardCost, ShardTimes, Simulation,
    SimulationError, SimulationOptions, Strategy, StrategyOutcome, TaskCost, Variation, WorkingBytes,
    Workload, WorkloadError, compare, exact, replay, simulate, without_transfers,
};
