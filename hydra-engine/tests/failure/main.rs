//! Failure: layers, data, links, disks and devices that break in the middle of a run, each a fake that breaks at a known
//! point. The task that is hit ends with the reason and with what it had; the others do not notice.

mod claimed_after;
#[path = "../common/mod.rs"]
mod common;
mod failing_disk;
mod failing_link;
mod nothing_lost;

use hydra_spill::alloc::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);
