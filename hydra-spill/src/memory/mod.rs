//! Memory of the host: budgets that count it, and buffers of floats and bytes in it.
//!
//! It may touch the heap, and tells the counting allocator what is reserved; nothing else of this crate. It never knows of buffers, stores or links.

pub(crate) mod aligned;
mod budget;
mod floats;

pub use aligned::ELEMENT_ALIGN;
pub use budget::{Budget, BudgetError, Reservation};
pub use floats::{Floats, NarrowFloats, PinnedMemory};
