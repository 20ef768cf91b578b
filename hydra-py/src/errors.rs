//! Converts failures to Python exceptions. Their classes are in `hydra_train._errors`.

use hydra_run::embedded::{Failure, Kind};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Returns the exception of a failure, or the error of constructing it.
pub(crate) fn exception(py: Python<'_>, failure: &Failure) -> PyErr {
    construct(py, failure).unwrap_or_else(|error| error)
}

fn construct(py: Python<'_>, failure: &Failure) -> PyResult<PyErr> {
    let name = match failure.kind {
        Kind::Usage => "UsageError",
        Kind::Memory => "MemoryRefused",
        Kind::Stopped => "Stopped",
        Kind::Failed => "HydraError",
    };
    let class = py.import("hydra_train._errors")?.getattr(name)?;
    let fields = PyDict::new(py);
    fields.set_item("causes", &failure.causes)?;
    if failure.kind == Kind::Usage {
        fields.set_item("keyword", &failure.keyword)?;
    }
    if let (Kind::Memory, Some((needed, available))) = (failure.kind, failure.memory) {
        fields.set_item("needed_bytes", needed)?;
        fields.set_item("available_bytes", available)?;
    }
    Ok(PyErr::from_value(class.call((&failure.message,), Some(&fields))?))
}
