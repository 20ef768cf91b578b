//! The module `hydra_train._native`: the Rust part of the Python package `hydra_train`.
//!
//! The module is a thin binding. The Python API (keywords, runs, tasks, exceptions) is Python code in `python/hydra_train`. Only
//! the parts that need Rust are here: starting a command, waiting for it with the GIL released and signals handled, and calling
//! modules of PyTorch as layers.
//!
//! Invariant: this crate defines no flag and no default; those are in `hydra-run` and `hydra-bench`.
#![forbid(unsafe_code)]

mod errors;
mod running;
mod torch;

use hydra_spill::alloc::CountingAllocator;
use mimalloc::MiMalloc;
use pyo3::prelude::*;

/// Charges every Rust allocation to the logical device of the allocating thread, as in the command line program. Python objects
/// are not included.
#[global_allocator]
static ALLOCATOR: CountingAllocator<MiMalloc> = CountingAllocator::new(MiMalloc);

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::running::{Events, Running, machine, merged_report, report, spec, start};
    #[pymodule_export]
    use crate::torch::Memory;
    #[pymodule_export]
    use crate::{hint, keywords, renamed};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        hydra_spill::alloc::keep_freed_memory();
        module.add("version", env!("CARGO_PKG_VERSION"))
    }
}

/// Returns the keywords of a command: name, form of the value if it has one, and help text.
#[pyfunction]
fn keywords(command: &str) -> Vec<(String, Option<String>, String)> {
    let keywords = hydra_bench::embedded::keywords(command);
    keywords.into_iter().map(|keyword| (keyword.name, keyword.value, keyword.help)).collect()
}

/// Returns the equivalent of a keyword of another library, and what to write instead; `None` for an unknown name.
#[pyfunction]
fn hint(
    command: &str,
    keyword: &str,
    given: Vec<(String, Option<String>)>,
) -> Option<(Option<String>, String)> {
    hydra_bench::embedded::hint(command, keyword, &given).map(|hint| (hint.keyword, hint.says))
}

/// Returns the current name of a renamed keyword, and a deprecation note; `None` for any other keyword.
#[pyfunction]
fn renamed(command: &str, keyword: &str) -> Option<(String, String)> {
    hydra_bench::embedded::renamed(command, keyword)
}
