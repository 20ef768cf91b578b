//! Exactness: the results of a task are those of the plain loop, bit for bit, and those of other programs with the
//! same weights. Memory is measured for each device separately.

#[path = "../common/mod.rs"]
mod common;
mod copies;
mod counted;
mod devices;
mod early_stopping;
mod encodings;
mod floats;
mod in_place;
mod lengths;
mod metrics;
mod moments8;
mod nf4;
mod parity;
mod partial;
mod residence;
mod run_control;
mod same_bits;
mod shared;
mod states;
mod statistics;

use hydra_spill::alloc::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);
