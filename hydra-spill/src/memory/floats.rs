//! Floats of the host, in ordinary memory or in memory that a card copies from by itself.

use hydra_core::FloatType;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// Page-locked floats, from which a card copies by itself. Whoever locks pages implements it.
pub trait PinnedMemory: DerefMut<Target = [f32]> + fmt::Debug + Send + Sync {}

/// Floats of the host, in ordinary memory or in memory that a card copies from by itself.
#[derive(Debug)]
pub enum Floats {
    /// Ordinary memory.
    Heap(Vec<f32>),
    /// Page-locked memory.
    Pinned(Box<dyn PinnedMemory>),
}

impl Default for Floats {
    fn default() -> Self {
        Self::Heap(Vec::new())
    }
}

impl From<Vec<f32>> for Floats {
    fn from(values: Vec<f32>) -> Self {
        Self::Heap(values)
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Heap(values) => values,
            Self::Pinned(values) => values,
        }
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Heap(values) => values,
            Self::Pinned(values) => values,
        }
    }
}

/// A clone is in ordinary memory.
impl Clone for Floats {
    fn clone(&self) -> Self {
        Self::Heap(self.to_vec())
    }
}

impl AsRef<[u8]> for Floats {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

impl PartialEq for Floats {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

/// Floats of 16 bits, two to each of the [`Floats`] that they lie in.
#[derive(Clone, Debug, PartialEq)]
pub struct NarrowFloats {
    pub(crate) float: FloatType,
    len: usize,
    packed: Floats,
}

impl NarrowFloats {
    /// `values` rounded to `float`; `pin` gives the floats that they are packed in a place.
    ///
    /// # Panics
    /// If `float` is `f32`.
    pub fn of(values: &[f32], float: FloatType, pin: impl FnOnce(Vec<f32>) -> Floats) -> Self {
        let packed = pin(vec![0.0; values.len().div_ceil(2)]);
        let mut narrow = Self { float, len: values.len(), packed };
        float.narrow(values, &mut narrow);
        narrow
    }

    /// So many zeros.
    pub(crate) fn zeros(len: usize, float: FloatType) -> Self {
        Self { float, len, packed: vec![0.0; len.div_ceil(2)].into() }
    }

    /// Their type.
    pub fn float_type(&self) -> FloatType {
        self.float
    }
}

impl Deref for NarrowFloats {
    type Target = [u16];

    fn deref(&self) -> &[u16] {
        &bytemuck::cast_slice(&self.packed)[..self.len]
    }
}

impl DerefMut for NarrowFloats {
    fn deref_mut(&mut self) -> &mut [u16] {
        &mut bytemuck::cast_slice_mut(&mut self.packed)[..self.len]
    }
}

impl AsRef<[u8]> for NarrowFloats {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}
