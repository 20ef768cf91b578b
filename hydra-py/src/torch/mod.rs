//! `torch.nn.Module`s as the layers of a chain. The Python part is `hydra_train/torch`.
//!
//! A layer's forward and its backward are one call of Python each, with tensors of Rust's memory. PyTorch releases the GIL in
//! its kernels, so devices compute at the same time.

mod data;
mod layer;
mod memory;
mod model;

pub(crate) use memory::Memory;
pub(crate) use model::own_model;

use hydra_core::HostTensor;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// A Python object that is used and released on Rust's threads.
pub(crate) struct Held(Option<Py<PyAny>>);

impl Held {
    fn new(object: Bound<'_, PyAny>) -> Self {
        Self(Some(object.unbind()))
    }

    fn bind<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let held = self.0.as_ref().map(|object| object.bind(py).clone());
        // Not before the drop.
        held.ok_or_else(|| PyRuntimeError::new_err("the object was released"))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let object = self.0.take();
        // An interpreter that is shutting down releases everything itself.
        Python::try_attach(|_| drop(object));
    }
}

/// Returns an exception's type and message, and its traceback with those of its causes, as a text.
pub(crate) fn described(py: Python<'_>, error: &PyErr) -> String {
    let format = || -> PyResult<String> {
        let error = (error.get_type(py), error.value(py), error.traceback(py));
        let lines = py.import("traceback")?.call_method1("format_exception", error)?;
        Ok(lines.extract::<Vec<String>>()?.concat())
    };
    format!("{error}\n{}", format().unwrap_or_default()).trim_end().to_owned()
}

/// Returns tensors as objects of Python.
fn views(tensors: &[HostTensor]) -> Vec<Memory> {
    tensors.iter().cloned().map(Memory::view).collect()
}

/// Returns the tensors of a list of Python.
fn taken(list: &Bound<'_, PyAny>) -> PyResult<Vec<HostTensor>> {
    let list: Vec<PyRef<'_, Memory>> = list.extract()?;
    Ok(list.iter().map(|memory| memory.tensor()).collect())
}

/// Returns the tensors of a list of Python that has `None` in places.
fn taken_in_part(list: &Bound<'_, PyAny>) -> PyResult<Vec<Option<HostTensor>>> {
    let list: Vec<Option<PyRef<'_, Memory>>> = list.extract()?;
    Ok(list.iter().map(|memory| memory.as_ref().map(|memory| memory.tensor())).collect())
}
