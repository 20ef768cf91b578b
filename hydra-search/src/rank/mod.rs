//! Ranking: trials by their losses, and decisions that no later loss can change.
//!
//! May touch: losses and the numbers of trials.
//! Never: depends on the order in which losses arrive.

mod loss;
mod rung;

pub use loss::{Loss, TrialId};
pub(crate) use rung::{Decisions, Rung};
