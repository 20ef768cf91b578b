//! The scheduler's laboratory: workloads of stated costs, and policies that are simulated and timed on them.
//! It may touch `hydra-sched`, `settings`, `terminal` and the picture of a schedule.
//! It never trains anything and never asks the engine.

pub(crate) mod measure;
pub(crate) mod workload;

pub(crate) use measure::{Measured, gantt, largest, mean, measure};
pub(crate) use workload::{LabArgs, load};
