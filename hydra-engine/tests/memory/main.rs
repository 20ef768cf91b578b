//! Memory: budgets hold to the byte and what ends leaves nothing behind. These tests read memory of the whole process,
//! so one runs at a time.

#[path = "../common/mod.rs"]
mod common;
mod tight;

#[global_allocator]
static ALLOCATOR: hydra_spill::alloc::CountingAllocator =
    hydra_spill::alloc::CountingAllocator::new(std::alloc::System);
