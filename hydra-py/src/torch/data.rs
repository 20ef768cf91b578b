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
}

impl TorchData {
    pub(super) fn new(python: Bound<'_, PyAny>) -> PyResult<Self> {
        let name = python.getattr("name")?.extract()?;
        let digest = python.getattr("digest")?.extract()?;
        let items = python.getattr("items")?.extract()?;
        Ok(Self { python: Held::new(python), name, digest, items })
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
        let batch = Python::attach(|py| {
            let read = || {
                let found = self.python.bind(py)?.call_method1("batch", (items.to_vec(),))?;
                let (inputs, targets, loss_targets): (Bound<'_, PyAny>, Bound<'_, PyAny>, usize) =
                    found.extract()?;
                let of = |parts| Ok::<_, PyErr>(HostActivation { parts: taken(parts)? });
                let (inputs, targets) = (of(&inputs)?, of(&targets)?);
                Ok(Batch { inputs, targets, items: items.len(), loss_targets, units: items.len() })
            };
            read().map_err(|error: PyErr| described(py, &error))
        });
        batch.map_err(|error| DatasetError::Read { dataset: self.name.clone(), source: error.into() })
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
