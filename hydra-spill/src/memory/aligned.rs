//! Bytes that are aligned for every tensor.

#[cfg(feature = "cube")]
use bytes::Bytes;
use std::collections::TryReserveError;

/// The alignment, in bytes, of the copies that [`DeviceLink::upload`](crate::DeviceLink::upload) and
/// [`DeviceLink::download`](crate::DeviceLink::download) return.
pub const ALIGN: usize = 64;

/// The minimum alignment, in bytes, of all their results: enough for every element type.
pub const ELEMENT_ALIGN: usize = 16;

/// Allocates memory for `len` bytes and for the shift that aligns them.
pub(crate) fn allocate(len: usize) -> Result<Vec<u8>, TryReserveError> {
    let mut storage = Vec::new();
    storage.try_reserve_exact(len.saturating_add(ALIGN - 1))?;
    Ok(storage)
}

/// Returns these bytes aligned to [`ALIGN`].
#[cfg(feature = "cube")]
pub(crate) fn at_alignment(bytes: Bytes) -> Result<Bytes, TryReserveError> {
    match bytes.as_ptr().addr().is_multiple_of(ALIGN) {
        true => Ok(bytes),
        false => Ok(Bytes::from_owner(AlignedBytes::fill(allocate(bytes.len())?, &bytes))),
    }
}

/// Bytes that are aligned to [`ALIGN`], which a `Vec<u8>` does not guarantee.
#[derive(Debug)]
pub(crate) struct AlignedBytes {
    storage: Vec<u8>,
    start: usize,
}

impl AlignedBytes {
    /// Copies `bytes` into storage allocated by [`allocate`], so that it is not reallocated. Only the shift
    /// is zeroed, the rest is written once.
    pub(crate) fn fill(mut storage: Vec<u8>, bytes: &[u8]) -> Self {
        let start = storage.as_ptr().addr().wrapping_neg() % ALIGN;
        storage.clear();
        storage.resize(start, 0);
        storage.extend_from_slice(bytes);
        Self { storage, start }
    }

    /// Returns `len` zeros.
    pub(crate) fn zeros(len: usize) -> Result<Self, TryReserveError> {
        let mut storage = allocate(len)?;
        let start = storage.as_ptr().addr().wrapping_neg() % ALIGN;
        storage.resize(start + len, 0);
        Ok(Self { storage, start })
    }
}

impl AsMut<[u8]> for AlignedBytes {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.storage[self.start..]
    }
}

impl AsRef<[u8]> for AlignedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.storage[self.start..]
    }
}
