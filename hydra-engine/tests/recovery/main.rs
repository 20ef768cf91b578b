//! Recovery: checkpoints that resume to the same bits, master weights on the disk, and layers, data, links, disks and
//! devices that fail during a run, each a fake that fails at a known point. The affected task ends with the reason and
//! with its progress; the others are not affected.

mod claimed_after;
#[path = "../common/mod.rs"]
mod common;
mod disk;
mod failing_disk;
mod failing_link;
mod killed;
mod nothing_lost;
mod resume;

use hydra_spill::alloc::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);
