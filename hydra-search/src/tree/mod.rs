//! Stage trees: trials with equal settings up to a step are one trial until they diverge.
//!
//! May touch: settings as functions of the step, and the numbers of trials.
//! Never: uses losses, or decides anything.

mod hyperparam_schedule;
mod prefixes;

pub use hyperparam_schedule::{HyperparamSchedule, HyperparamSchedules, Whole};
pub use prefixes::{Branch, Edge, StageTree};
