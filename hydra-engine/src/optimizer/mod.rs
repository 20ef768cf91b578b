//! The optimizer: an actor that gathers gradients and steps masters, and the arithmetic of both.
//!
//! May touch: the protocol, the writer's jobs, and the store that it is given.
//! Never: knows devices but by what it steps there, or when a task is at rest.

mod actor;
mod arithmetic;
mod check;
#[cfg(feature = "cube")]
mod cube;
mod gradient;
mod on_device;

pub(crate) use actor::{Contribution, HostJob, HostOptimizer, MicroStep};
pub(crate) use arithmetic::{Update, clip_factor, global_norm};
pub use check::{OptimizerCheck, RuleCheck};
pub(crate) use check::{Tried, compare};
pub(crate) use gradient::sum_of_squares;
pub(crate) use on_device::DeviceStepper;
