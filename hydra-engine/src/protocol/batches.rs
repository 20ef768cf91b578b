//! The batches of a microbatch group: the items to read, and the batches that were read.

use super::HeadroomAhead;
use crate::error::{EngineError, guarded};
use hydra_core::{Batch, Dataset, DatasetError, FloatType, gather};
use hydra_sched::program::MicrobatchPass;
use std::sync::Arc;

/// The items that a microbatch group reads.
pub(crate) struct Reading {
    pub data: Arc<dyn Dataset>,
    /// The items of each microbatch.
    pub parts: Vec<Vec<usize>>,
    pub float: FloatType,
}

impl Reading {
    /// Reads the batches, one for each microbatch. A panic of the dataset becomes an error.
    pub(crate) fn batches(&self) -> Result<Vec<Batch>, EngineError> {
        let batch =
            |part: &Vec<usize>| Ok::<_, DatasetError>(gather(self.data.as_ref(), part)?.in_type(self.float));
        guarded("reading a batch", || Ok(self.parts.iter().map(batch).collect::<Result<_, _>>()?))
    }
}

/// Batches that were read ahead, or the error, with their host memory. The error counts only when the batches are
/// used.
pub(crate) struct Loaded {
    pub of: MicrobatchPass,
    pub batches: Result<Vec<Batch>, EngineError>,
    /// Dropped after the batches: fields are dropped in declaration order.
    pub _memory: HeadroomAhead,
}
