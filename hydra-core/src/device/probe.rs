//! The interface for measuring device memory.

use crate::DeviceId;

/// Measures the memory in use on a logical device.
///
/// The trait is defined here so that the partitioner, which measures, does not depend on the spill manager,
/// which owns the allocators. A CPU device is measured by a counting allocator, a GPU by its driver or its
/// framework's pool.
pub trait MemoryProbe: Send + Sync {
    /// Returns whether the values are measured. A probe that returns `false` always reports zero, and callers
    /// use costs computed from shapes instead.
    fn measures(&self) -> bool;

    /// The bytes currently in use on the device.
    fn in_use(&self, device: DeviceId) -> u64;

    /// The peak number of bytes in use since the last [`reset_peak`](Self::reset_peak).
    fn peak(&self, device: DeviceId) -> u64;

    /// Resets the peak to the bytes currently in use.
    fn reset_peak(&self, device: DeviceId);

    /// Releases cached memory if more than `most` bytes are in use or cached. Called between shard tasks. The
    /// default does nothing.
    fn trim(&self, _device: DeviceId, _most: u64) {}
}
