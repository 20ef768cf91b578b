//! Failure: layers, data, links, disks and devices that fail during a run, each a fake that fails at a known point.
//! The affected task ends with the reason and with its progress; the others are not affected.

mod claimed_after;
#[path = "../common/mod.rs"]
mod common;
mod failing_disk;
mod failing_link;
mod nothing_lost;

use hydra_spill::alloc::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);
