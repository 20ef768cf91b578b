//! The module `hydra_train._native`: what the Python package `hydra_train` calls of Rust.
//!
//! It is thin on purpose. What a Python user sees (keywords, runs, tasks, exceptions) is Python, in `python/hydra_train`; here
//! stand only what must be Rust: starting a command, and waiting for it with the interpreter's lock released and signals
//! heard.
//!
//! Invariant: this crate has no flag, no default and no words of its own; they are those of `hydra-bench`.
#![forbid(unsafe_code)]

mod errors;
mod running;

use hydra_spill::alloc::CountingAllocator;
use mimalloc::MiMalloc;
use pyo3::prelude::*;

/// Charges every block of Rust's to the logical device whose thread allocated it, as in the program. Python's objects are
/// none of these.
#[global_allocator]
static ALLOCATOR: CountingAllocator<MiMalloc> = CountingAllocator::new(MiMalloc);

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::running::{Events, Running, machine, report, spec, start};
    #[pymodule_export]
    use crate::{hint, keywords};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        hydra_spill::alloc::keep_freed_memory();
        module.add("version", env!("CARGO_PKG_VERSION"))
    }
}

/// The flags of a command: name, the form of the value or none, and what it is for.
#[pyfunction]
fn keywords(command: &str) -> Vec<(String, Option<String>, String)> {
    let keywords = hydra_bench::embedded::keywords(command);
    keywords.into_iter().map(|keyword| (keyword.name, keyword.value, keyword.help)).collect()
}

/// What a keyword that a command does not have is called there, and what to write in its place; none of a name that no other
/// program is known to have.
#[pyfunction]
fn hint(
    command: &str,
    keyword: &str,
    given: Vec<(String, Option<String>)>,
) -> Option<(Option<String>, String)> {
    hydra_bench::embedded::hint(command, keyword, &given).map(|hint| (hint.keyword, hint.says))
}
