//! A map-style dataset of PyTorch as a dataset.

use super::{Held, described, taken};
use hydra_core::{Batch, Dataset, DatasetError, HostActivation};
use hydra_models::data::Content;
use pyo3::prelude::*;

/// A dataset of Python.
pub(super) struct TorchData {
    /// The `_Data` of Python.
    python: Held,
    name: String,
    digest: String,
    items: usize,
    /// The mean size of an item as a part of the largest one.
    mean_part: f64,
}

impl TorchData {
    pub(super) fn new(python: Bound<'_, PyAny>) -> PyResult<Self> {
        let name = python.getattr("name")?.extract()?;
        let digest = python.getattr("digest")?.extract()?;
        let items = python.getattr("items")?.extract()?;
        let mean_part = python.getattr("mean_part")?.extract()?;
        Ok(Self { python: Held::new(python), name, digest, items, mean_part })
    }

    /// The batch of `items` items that a method of Python returns.
    fn read(
        &self,
        items: usize,
        call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<Py<PyAny>>,
    ) -> Result<Batch, DatasetError> {
        let batch = Python::attach(|py| {
            let read = || {
                let found = call(&self.python.bind(py)?)?;
                let (inputs, targets, loss_targets): (Bound<'_, PyAny>, Bound<'_, PyAny>, usize) =
                    found.extract(py)?;
                let of = |parts| Ok::<_, PyErr>(HostActivation { parts: taken(parts)? });
                let (inputs, targets) = (of(&inputs)?, of(&targets)?);
                Ok(Batch { inputs, targets, items, loss_targets, units: items })
            };
            read().map_err(|error: PyErr| described(py, &error))
        });
        batch.map_err(|error| DatasetError::Read { dataset: self.name.clone(), source: error.into() })
    }
}

impl Dataset for TorchData {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> usize {
        self.items
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        self.read(items.len(), |data| Ok(data.call_method1("batch", (items.to_vec(),))?.unbind()))
    }

    fn largest(&self, items: usize) -> Result<Batch, DatasetError> {
        let items = items.min(self.items);
        self.read(items, |data| Ok(data.call_method1("largest", (items,))?.unbind()))
    }

    fn mean_part(&self) -> f64 {
        self.mean_part
    }
}

impl Content for TorchData {
    fn content(&self, to: &mut dyn FnMut(&[u8])) -> Result<(), DatasetError> {
        to(self.digest.as_bytes());
        Ok(())
    }

    fn units(&self) -> usize {
        self.items
    }
}
