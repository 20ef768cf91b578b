//! `hydra simulate`: simulates and times scheduling policies on workloads with stated costs.
//!
//! The module uses `hydra-sched`, `settings`, `terminal` and the plot of a schedule. It never trains, and never uses the engine.

pub(crate) mod copies;
pub(crate) mod measure;
pub(crate) mod workload;

pub(crate) use copies::{CopiesRow, compare_copies};
pub(crate) use measure::{Measured, gantt, largest, mean, measure};
pub(crate) use workload::{SimulatorArgs, load};

/// A workload with unequal devices and varying times.
#[cfg(test)]
const UNEQUAL: &str = r#"{
    "tasks": [{"name": "a", "minibatches": 2, "shards": [{"forward_s": 1, "backward_s": 2, "promote_s": 0.5}]}],
    "devices": [{"speed": 2}, {"speed": 1}],
    "variation": {"seed": 3, "relative": 0.1}
}"#;
