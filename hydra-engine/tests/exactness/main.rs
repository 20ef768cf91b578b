//! Exactness: what a task comes to is what the plain loop comes to, bit for bit, and what others compute from the same
//! weights. Devices are measured, each by itself.

#[path = "../common/mod.rs"]
mod common;
mod copies;
mod counted;
mod devices;
mod early_stopping;
mod floats;
mod lengths;
mod metrics;
mod parity;
mod residence;
mod run_control;
mod same_bits;
mod shared;

use hydra_spill::alloc::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);
