//! The optimizer: an actor that gathers gradients and steps masters, and the arithmetic of both.
//!
//! May touch: the protocol, the writer's jobs, and the store that it is given.
//! Never: knows devices but by what it steps on them, what an optimizer's formula is, or when a task is at rest.

mod actor;
mod arithmetic;
mod check;
#[cfg(feature = "cube")]
mod cube;
mod device_memory;
mod gradient;
mod host_memory;
mod on_device;

pub(crate) use actor::{Contribution, HostJob, HostOptimizer, MicroStep};
pub(crate) use arithmetic::{TaskStep, clip_factor, global_norm};
pub(crate) use check::Tried;
pub use check::{OptimizerCheck, RuleCheck};
pub(crate) use gradient::sum_of_squares;
pub(crate) use on_device::{DeviceStepper, compare};
