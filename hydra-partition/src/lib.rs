//! Partitioning of a model: the pilot pass and the partition plan.
//!
//! A model larger than a device is cut into shards, contiguous ranges of a chain's layers that are promoted
//! and demoted together. Where to cut follows from what layers need, and that is measured: Algorithm 1 of
//! "Hydra: A System for Large Multi-Model Deep Learning" (Nagrecha and Kumar, arXiv 2110.08633).
//!
//! 1. [`PilotPartitioner::measure`] runs a real microbatch layer by layer on a device, forward and backward,
//!    through the same functions that train, and gives a [`Profile`] of [`LayerCost`]s.
//! 2. [`choose_reserve`] sizes the double buffer that all tasks of a device share.
//! 3. [`PilotPartitioner::plan`] cuts greedily under the [`Rules`], or checks cuts that were given by hand.
//! 4. [`PilotPartitioner::verify`] runs every shard and rolls a layer back where one does not fit.
//!
//! Layers that say what they compute ([`Forward::cost_key`](hydra_core::Forward::cost_key)) and are equal are measured once, and
//! shards of equal layers run once: of a model that repeats a block, a pilot pass runs as much as of one with two blocks.
//!
//! The [`PartitionPlan`] is saved as JSON with the [`Fingerprint`] of all it depends on, and used again
//! where that matches. The device is a port, [`PilotDevice`], that whoever owns compute workers implements.
//!
//! Cutting is pure, and can be used without any device:
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
//! // Parameters and input of a layer, what it holds at its peak, the double buffer, and 3% of margin.
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
//! Invariant: this crate never spawns a thread, never trains, never writes a file but the plan it is asked to
//! save, and never lets a clock decide a cut: the same costs and rules give the same plan.
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
    Demand, Rules, check_cuts, choose_reserve, cut, margin, min_device_memory_bytes, single_shard_bytes,
};
pub use error::PartitionError;
pub use fingerprint::Fingerprint;
pub use partitioner::{PilotPartitioner, PilotProgress};
pub use pilot::{InitialValues, PilotDevice};
pub use plan::{PLAN_SCHEMA, PartitionPlan, ShardPlan};
