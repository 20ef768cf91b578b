//! The checklist of a device: whether it does what training needs, item by item, each with figures and a verdict.
//! It may open devices, run the engine on them, and touch `terminal`, the tokens of `session` and the memory in `machine`.
//! It never reads flags, and an item never looks at what another one found.

mod copies;
pub(crate) mod found;
pub(crate) mod items;
mod kernels;
mod memory;
mod optimizer;
mod precision;
pub(crate) mod subject;
mod training;
