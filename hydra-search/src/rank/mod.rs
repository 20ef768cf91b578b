//! Who is better: trials by their losses, and decisions that no later loss can change.
//!
//! It may touch losses and the numbers of trials. It never asks which loss came first.

mod loss;
mod rung;

pub use loss::{Loss, TrialId};
pub(crate) use rung::{Decisions, Rung};
