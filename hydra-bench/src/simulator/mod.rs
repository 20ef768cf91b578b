//! The scheduler's laboratory: workloads of stated costs, and policies that are simulated and timed on them.
//! It may touch `hydra-sched`, `settings`, `terminal` and the plot of a schedule.
//! It never trains anything and never asks the engine.

pub(crate) mod copies;
pub(crate) mod measure;
pub(crate) mod workload;

pub(crate) use copies::{CopiesRow, compare_copies};
pub(crate) use measure::{Measured, gantt, largest, mean, measure};
pub(crate) use workload::{SimulatorArgs, load};

/// A workload whose devices differ and whose times vary.
#[cfg(test)]
const UNEQUAL: &str = r#"{
    "tasks": [{"name": "a", "minibatches": 2, "shards": [{"forward_s": 1, "backward_s": 2, "promote_s": 0.5}]}],
    "devices": [{"speed": 2}, {"speed": 1}],
    "variation": {"seed": 3, "relative": 0.1}
}"#;
