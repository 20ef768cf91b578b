//! Persistence: checkpoints from which a run goes on to the same bits, and masters that live on the disk meanwhile.

#[path = "../common/mod.rs"]
mod common;
mod disk;
mod killed;
mod resume;

use hydra_spill::alloc::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);
