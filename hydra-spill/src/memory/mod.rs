//! Memory of the host: budgets that count it, and buffers of floats and bytes in it.
//!
//! This module may use the heap, and notifies the counting allocator of reservations. It uses nothing else of
//! this crate, and does not depend on buffers, stores or links.

pub(crate) mod aligned;
mod budget;
mod floats;

pub use aligned::ELEMENT_ALIGN;
pub use budget::{Budget, BudgetError, Reservation};
pub use floats::{Floats, NarrowFloats, PinnedMemory};
