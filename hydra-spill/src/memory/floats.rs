//! Floats on the host, in ordinary or page-locked memory.

use hydra_core::FloatType;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// Page-locked floats, which a card copies directly. The owner of the page-locked pool implements it.
pub trait PinnedMemory: DerefMut<Target = [f32]> + fmt::Debug + Send + Sync {}

/// Floats on the host, in ordinary or page-locked memory.
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

/// 16-bit floats, packed two to each of the underlying [`Floats`].
#[derive(Clone, Debug, PartialEq)]
pub struct NarrowFloats {
    pub(crate) float: FloatType,
    len: usize,
    packed: Floats,
}

impl NarrowFloats {
    /// Rounds `values` to `float`; `pin` moves the underlying floats to the desired memory.
    ///
    /// # Panics
    /// If `float` is `f32`.
    pub fn of(values: &[f32], float: FloatType, pin: impl FnOnce(Vec<f32>) -> Floats) -> Self {
        let mut narrow = Self::new(values.len(), float, pin);
        float.narrow(values, &mut narrow);
        narrow
    }

    /// Returns `len` zeros; `pin` moves the underlying floats to the desired memory.
    pub fn new(len: usize, float: FloatType, pin: impl FnOnce(Vec<f32>) -> Floats) -> Self {
        Self { float, len, packed: pin(vec![0.0; len.div_ceil(2)]) }
    }

    /// The floats of type `float` that these bytes are.
    ///
    /// # Panics
    /// If their number is odd.
    pub(crate) fn from_bytes(bytes: &[u8], float: FloatType) -> Self {
        let mut narrow = Self::zeros(bytes.len() / size_of::<u16>(), float);
        bytemuck::cast_slice_mut::<u16, u8>(&mut narrow).copy_from_slice(bytes);
        narrow
    }

    /// Returns `len` zeros.
    pub(crate) fn zeros(len: usize, float: FloatType) -> Self {
        Self::new(len, float, Floats::from)
    }

    /// The float type.
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
