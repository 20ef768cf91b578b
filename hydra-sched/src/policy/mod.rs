//! The policy interface, the policies, their inputs, and the remaining time, shared by runs and simulations.
//!
//! This module uses only its arguments. It imports nothing of the simulator, keeps no copy of a run's state,
//! reads no clock and uses no shared random generator.

mod baseline;
#[cfg(any(test, feature = "conformance"))]
pub(crate) mod cases;
pub(crate) mod claimable;
mod copy_worth;
mod error;
mod kind;
mod lrtf;
mod microbatch_pass;
mod port;
pub(crate) mod random;
mod remaining;
mod view;

pub use baseline::{Fifo, Random, RoundRobin, Srtf};
pub use claimable::{Claimable, Priority};
pub use copy_worth::CopyUse;
pub use error::{CostError, PolicyError};
pub use kind::PolicyKind;
pub use lrtf::{ShardedLrtf, ShardedLrtfEager, ShardedLrtfLocal};
pub use microbatch_pass::ShardTaskKind;
pub(crate) use microbatch_pass::group_length;
pub use port::Policy;
pub use remaining::{CostModel, WorkLeft};
pub use view::{ModelIndex, ModelView, Request, View};
