//! Memory: budgets hold to the byte, and ended work leaves nothing behind. These tests measure the whole process, so
//! one runs at a time.

mod backtraces;
#[path = "../common/mod.rs"]
mod common;
mod drawn;
mod equal;
mod leak;
mod tight;

use hydra_spill::alloc::CountingAllocator;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);

/// Held by each test while it runs.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
