//! Persistence: checkpoints that resume to the same bits, and master weights on the disk.

#[path = "../common/mod.rs"]
mod common;
mod disk;
mod killed;
mod resume;

use hydra_spill::alloc::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);
