//! The choice of who runs next: scheduling policies as pure functions of a view, and a laboratory for them.
//!
//! Hydra interleaves the shard tasks of many models on few devices. Whenever a device needs its next shard task, the
//! models that may be claimed are put into a [`View`], and a [`Policy`] answers with one of them. Nothing else is
//! asked of a policy, so the real run, a simulation and a test use the same code.
//!
//! The laboratory takes a [`Workload`] of stated or measured costs and says how long a policy takes for it
//! ([`simulate()`]), what no schedule can beat ([`LowerBounds`]), what the best one is for a small case
//! ([`exact()`]), and what other ways to train the same models would cost ([`compare()`]).
//!
//! Two rooms, of which the first imports nothing of the second:
//!
//! | room | file | what it holds |
//! | --- | --- | --- |
//! | `policy` | `view` | [`View`], [`Request`], [`ModelView`], [`ModelIndex`]: what a policy sees |
//! | | `port`, `kind` | the [`Policy`] trait, and [`PolicyKind`], the policies by name |
//! | | `claimable` | [`Claimable`] and [`Priority`]: what can be claimed, in a policy's order |
//! | | `lrtf` | [`ShardedLrtf`], the default, and its variants |
//! | | `baseline` | [`Fifo`], [`Srtf`], [`Random`], [`RoundRobin`], which it is compared with |
//! | | `microbatch_pass` | [`ShardTaskKind`] and the order of the shard tasks in one microbatch pass |
//! | | `remaining` | [`CostModel`] and [`WorkLeft`]: the one formula for remaining time |
//! | | `copy_worth` | [`CopyUse`]: the one formula for what a copy on a device is worth |
//! | `simulator` | `workload` | [`Workload`]: tasks and devices as costs, from and to JSON |
//! | | `simulate` | [`simulate()`]: the discrete-event simulator |
//! | | `queue` | [`Queue`], which keeps thousands of models in a policy's order |
//! | | `bound` | [`LowerBounds`] |
//! | | `exact`, `milp` | [`exact()`]: the shortest makespan of small cases; the same by general solvers (features `milp` and `highs`) |
//! | | `fewest` | [`Simulation::fewest_bytes`]: the least that any choice of copies could promote |
//! | | `strategy` | [`Strategy`] and [`compare()`]: model, pipeline, data and task parallelism beside SHARP |
//! | | `draw` | [`Draw`]: workloads at random |
//! | | `conformance` | the suite that every policy has to pass, those of other crates too (feature `conformance`) |
//!
//! # Example
//! Two models wait for one device. The second has less work in each minibatch and more
//! minibatches to go, so its remaining time is longer and Sharded-LRTF takes it.
//!
//! ```
//! use hydra_sched::{CostModel, ModelIndex, ModelView, PolicyKind, Request, ShardTaskKind, View, WorkLeft};
//!
//! // Seconds of each shard's forward, backward and evaluation, as a partition plan gives them.
//! let two_shards = CostModel::new(vec![1.0, 1.0], vec![2.0, 3.0], vec![1.0, 1.0])?;
//! let mut one_shard = CostModel::new(vec![0.5], vec![2.0], vec![0.5])?;
//!
//! // The first stands before the backward of shard 0; the second is between two minibatches.
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
//! A policy of one's own is an implementation of [`Policy`], which has an example that runs. With the feature
//! `conformance`, which is off by default, `hydra_sched::conformance::run` holds it to the rules that the simulator
//! and the engine rely on.
//!
//! Invariant: this crate never spawns a thread, never reads a clock, never does I/O, never draws
//! from a global random generator and knows nothing of tensors; the same views in the same order
//! give the same choices, and the order of the models within a view never matters. Files and clocks
//! are the caller's: workloads come and go as text, and results are tables and lists of spans.

#![forbid(unsafe_code)]

mod policy;
mod simulator;

pub use policy::{
    Claimable, CopyUse, CostError, CostModel, Fifo, ModelIndex, ModelView, Policy, PolicyError, PolicyKind,
    Priority, Random, Request, RoundRobin, ShardTaskKind, ShardedLrtf, ShardedLrtfEager, ShardedLrtfLocal,
    Srtf, View, WorkLeft, group_length,
};
#[cfg(feature = "conformance")]
pub use simulator::conformance;
#[cfg(feature = "highs")]
pub use simulator::highs_makespan_s;
#[cfg(feature = "milp")]
pub use simulator::milp_makespan_s;
pub use simulator::{
    DeviceCost, DoesNotFit, Draw, Epoch, EvaluationCost, Exact, LowerBounds, Occupation, Outcome,
    ParamBufferCost, PowerModel, Queue, Read, Replacement, Row, ShardCost, ShardTimes, Simulation,
    SimulationError, SimulationOptions, Span, Strategy, TaskCost, Variation, WorkingBytes, Workload,
    WorkloadError, compare, exact, replay, simulate, without_transfers,
};
