//! The batches of a microbatch pass: what is to be read, and what was.

use super::HeadroomAhead;
use crate::error::{EngineError, guarded};
use crate::stages::MicrobatchPass;
use hydra_core::{Batch, Dataset, DatasetError, FloatType, gather};
use std::sync::Arc;

/// The items that a microbatch pass reads.
pub(crate) struct Reading {
    pub data: Arc<dyn Dataset>,
    /// The items of each microbatch.
    pub parts: Vec<Vec<usize>>,
    pub float: FloatType,
}

impl Reading {
    /// The batches, one a microbatch; the dataset's panics are errors too.
    pub(crate) fn batches(&self) -> Result<Vec<Batch>, EngineError> {
        let batch =
            |part: &Vec<usize>| Ok::<_, DatasetError>(gather(self.data.as_ref(), part)?.in_type(self.float));
        guarded("reading a batch", || Ok(self.parts.iter().map(batch).collect::<Result<_, _>>()?))
    }
}

/// Batches that were read ahead, with their host memory. An error counts only when they are needed.
pub(crate) struct Loaded {
    pub of: MicrobatchPass,
    pub batches: Result<Vec<Batch>, EngineError>,
    /// Released after the batches are freed, for fields are dropped in this order.
    pub _room: HeadroomAhead,
}
