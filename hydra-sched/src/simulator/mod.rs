//! The simulator: workloads as costs, simulations of policies, and lower bounds.
//!
//! This module may use `policy` and `program`, which it runs as the engine does, and workloads as text. It
//! decides nothing in a real run, and opens no files: the caller passes text.

mod bound;
mod cached;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod draw;
mod error;
mod exact;
mod fewest;
mod progress;
mod queue;
mod simulate;
mod strategy;
mod sum;
mod workload;

pub use bound::LowerBounds;
pub use draw::Draw;
pub use error::{SimulationError, WorkloadError};
pub use exact::{Exact, exact, without_transfers};
pub use fewest::Read;
pub use queue::Queue;
pub use simulate::{Occupation, ScheduleSpan, ShardTimes, Simulation, SimulationOptions, replay, simulate};
pub use strategy::{DoesNotFit, PowerModel, Row, Strategy, StrategyOutcome, compare};
pub use workload::{
    DeviceCost, Epoch, EvaluationCost, ParamBufferCost, Replacement, ShardCost, TaskCost, Variation,
    WorkingBytes, Workload,
};
