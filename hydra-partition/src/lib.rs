//! Partitioning of a model: the pilot pass and the partition plan.
//!
//! A model that is larger than a device is cut into shards, contiguous ranges of a chain's layers that are
//! promoted and demoted together. Cuts follow from the measured memory of layers: Algorithm 1 of "Hydra: A
//! System for Large Multi-Model Deep Learning" (Nagrecha and Kumar, arXiv 2110.08633).
//!
//! 1. [`PilotPartitioner::measure`] runs a real microbatch layer by layer on a device, forward and backward,
//!    through the functions that training uses, and returns a [`Profile`] of [`LayerCost`]s.
//! 2. [`choose_reserve`] sizes the double buffer that all tasks of a device share; with [`pipelined_reserve`] a model is
//!    cut into more shards than its size requires.
//! 3. [`PilotPartitioner::plan`] cuts greedily under the [`Rules`], or checks user-specified cuts.
//! 4. [`PilotPartitioner::verify`] runs every shard, and moves a layer to the next shard if one does not fit.
//!
//! Equal layers with a cost key ([`Forward::cost_key`](hydra_core::Forward::cost_key)) are measured once, and
//! shards of equal layers run once: the pilot pass of a model that repeats a block costs as much as that of
//! one with two blocks.
//!
//! The [`PartitionPlan`] is saved as JSON with the [`Fingerprint`] of everything it depends on, and reused if
//! the fingerprint matches. The device is behind the trait [`PilotDevice`], which the owner of compute
//! workers implements.
//!
//! Cutting is pure and does not require a device:
//!
//! ```
//! use hydra_partition::{LayerCost, Profile, Rules, choose_reserve, cut, min_device_memory_bytes};
//!
//! let layer = |name: &str| LayerCost {
//!     name: name.into(),
//!     param_bytes: 4 << 20,
//!     gradient_bytes: 4 << 20,
//!     input_bytes: 1 << 20,
//!     output_bytes: 1 << 20,
//!     saved_bytes: 8 << 20,
//!     peak_bytes: 13 << 20,
//!     ..LayerCost::default()
//! };
//! let layers = ["embed", "block", "head"].map(layer).to_vec();
//! let profile = Profile { layers, measured: true, ..Profile::default() };
//!
//! // The layer's parameters and input, its peak, the double buffer, and a margin of 3%.
//! let least = min_device_memory_bytes(&profile);
//! assert_eq!(least, (24u64 << 20) * 100 / 97);
//! let shards = |budget| {
//!     let reserve = choose_reserve(&[(&profile).into()], budget)?;
//!     cut(&profile, &Rules::new(budget, reserve, profile.measured))
//! };
//! assert_eq!(shards(least)?, [0..1, 1..2, 2..3]);
//! assert_eq!(shards(48 << 20)?, [0..2, 2..3]);
//! assert!(shards(least - 1).is_err());
//! # Ok::<(), hydra_partition::PartitionError>(())
//! ```
//!
//! Invariants: this crate never spawns a thread, never trains, writes no file except the plan that it is
//! asked to save, and uses no clock to decide a cut: equal costs and rules give equal plans.
#![forbid(unsafe_code)]

mod cost;
mod cut;
mod equal;
mod error;
mod fingerprint;
mod partitioner;
mod pilot;
mod plan;
#[cfg(test)]
mod toy;

pub use cost::{LayerCost, Profile, ShardMemory, TiedBuffer};
pub use cut::{
    Demand, Pipeline, Rules, check_cuts, choose_reserve, cut, margin, min_device_memory_bytes,
    pipelined_reserve, single_shard_bytes,
};
pub use error::PartitionError;
pub use fingerprint::Fingerprint;
pub use partitioner::{PilotPartitioner, PilotProgress};
pub use pilot::{InitialValues, PilotDevice, PilotValues};
pub use plan::{PLAN_SCHEMA, PartitionPlan, ShardPlan};
