//! `hydra check`: checks a device against the requirements of training, item by item, with figures and a verdict for each.
//!
//! The module opens devices, runs the engine on them, and uses `terminal`, the synthetic tokens of `session` and the memory figures of
//! `machine`. It never reads flags, and items are independent of each other.

mod copies;
pub(crate) mod found;
pub(crate) mod items;
mod kernels;
mod memory;
mod optimizer;
mod precision;
pub(crate) mod subject;
mod training;
