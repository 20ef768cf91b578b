//! Stage trees: trials whose settings are the same up to a step are one until they part.
//!
//! It may touch settings as functions of the step and the numbers of trials. It knows no loss and decides nothing.

mod hyperparam_schedule;
mod prefixes;

pub use hyperparam_schedule::{HyperparamSchedule, HyperparamSchedules, Whole};
pub use prefixes::{Branch, Edge, StageTree};
