//! The port through which memory on a device is measured.

use crate::DeviceId;

/// Measures the memory that is in use on a logical device.
///
/// The port lives here so that the partitioner, which measures, and the spill manager, which owns the allocators, stay
/// strangers. A CPU device is measured by a counting allocator, a GPU by its driver or its framework's pool.
pub trait MemoryProbe: Send + Sync {
    /// Returns whether the figures are measured. A probe that answers `false` always reads zero, and whoever
    /// asks falls back to costs computed from shapes.
    fn measures(&self) -> bool;

    /// Bytes in use on the device now.
    fn in_use(&self, device: DeviceId) -> u64;

    /// The most bytes in use at once since the last [`reset_peak`](Self::reset_peak).
    fn peak(&self, device: DeviceId) -> u64;

    /// Starts a new peak at what is in use now.
    fn reset_peak(&self, device: DeviceId);

    /// Gives memory back that is kept for later, if more than `most` bytes are in use or kept. Called between
    /// shard tasks. Where nothing is kept there is nothing to do.
    fn trim(&self, _device: DeviceId, _most: u64) {}
}
