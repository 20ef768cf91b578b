//! The program `hydra`.
#![forbid(unsafe_code)]

use hydra_spill::alloc::{self, CountingAllocator};
use mimalloc::MiMalloc;
use std::process::ExitCode;

/// Attributes every allocation to the logical device whose thread makes it.
#[global_allocator]
static ALLOCATOR: CountingAllocator<MiMalloc> = CountingAllocator::new(MiMalloc);

fn main() -> ExitCode {
    alloc::keep_freed_memory();
    hydra_bench::run(std::env::args_os())
}
