//! The host memory of tasks that run at the same time: whether one more task fits.

use super::host_memory::with_largest;
use super::shared::SharedBuffer;
use std::collections::BTreeSet;

/// The host memory that one task takes while it runs.
pub(crate) struct HostShare {
    /// Bytes of its own masters.
    pub own: u64,
    /// Masters that other tasks may share.
    pub shared: Vec<SharedBuffer>,
    /// Bytes within a minibatch.
    pub active: u64,
}

/// The host memory of tasks that run at the same time: their own masters, those that they share, each counted once, and
/// the largest models within a minibatch, one for each device.
pub(crate) struct RunningTasks {
    own: u64,
    shared: BTreeSet<SharedBuffer>,
    /// The bytes of the largest models within a minibatch, largest first.
    active: Vec<u64>,
    devices: usize,
}

impl RunningTasks {
    pub(crate) fn new(tasks: impl Iterator<Item = HostShare>, devices: usize) -> Self {
        let mut running = Self { own: 0, shared: BTreeSet::new(), active: Vec::new(), devices };
        for HostShare { own, shared, active } in tasks {
            running.own = running.own.saturating_add(own);
            running.shared.extend(shared);
            running.active.push(active);
        }
        running.active.sort_unstable_by(|a, b| b.cmp(a));
        running.active.truncate(devices);
        running
    }

    /// Bytes of these tasks and one more.
    pub(crate) fn bytes_with(&self, one: &HostShare) -> u64 {
        let brought = one.shared.iter().filter(|buffer| !self.shared.contains(buffer));
        let shared = self.shared.iter().chain(brought).map(|buffer| buffer.bytes);
        let masters = shared.fold(self.own.saturating_add(one.own), u64::saturating_add);
        let mut active = self.active.clone();
        active.insert(active.partition_point(|bytes| *bytes >= one.active), one.active);
        with_largest(masters, &active, self.devices)
    }
}
