//! Embedding tables.

use super::uninitialized;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// A table of vectors, one for each token or position.
#[derive(Module, Debug)]
pub struct Table {
    /// `[rows, width]`.
    pub weight: Param<Tensor<2>>,
}

impl Table {
    /// A table without values.
    pub fn new(rows: usize, width: usize) -> Self {
        Self { weight: uninitialized([rows, width]) }
    }

    /// The same parameter: layers that hold it share it.
    pub fn tied(&self) -> Self {
        Self { weight: self.weight.clone() }
    }
}
