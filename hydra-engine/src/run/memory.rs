//! Reservations of host memory and disk space during a run.

use crate::admission::{Admission, DiskTier, SharedBuffer};
use crate::error::EngineError;
use crate::observer::TierMemory;
use crate::protocol::HostHeadroom;
use crate::task::TaskInfo;
use hydra_core::ByteSize;
use hydra_spill::{Budget, DeviceResidentStore, Hashes, ParamBufferId, Reservation, SharedStore, SpillError};
use std::collections::BTreeMap;
use std::iter;
use std::sync::Arc;

/// Reserved memory for the masters of a task that starts.
pub(super) struct MastersMemory {
    /// For masters in host memory.
    pub host: Reservation,
    /// For masters on the disk.
    pub disk: Option<Reservation>,
    /// Host memory through which masters pass on their way to the disk or a device.
    pub passing: Reservation,
    /// Host memory for reading shared masters that are compared with the stored ones.
    pub compared: Reservation,
    /// The hashes of the shared buffers that are stored and need not be compared, by buffer.
    pub stored: BTreeMap<usize, Hashes>,
}

/// The memory that a run was admitted with, and the stores of the parameter buffers in it.
pub(super) struct RunMemory {
    pub store: Arc<SharedStore>,
    pub device_resident: Arc<DeviceResidentStore>,
    /// Buffers of ended tasks, to be discarded.
    pub to_discard: Vec<ParamBufferId>,
    /// Ids under which ended tasks used shared buffers. They are kept until queued tasks had a chance to take the
    /// buffers over.
    pub shared_to_discard: Vec<ParamBufferId>,
    /// The admitted part of the host budget.
    pub host: HostHeadroom,
    pub budget: ByteSize,
    pub admitted: u64,
    /// Bytes of `host` for masters and for models within a minibatch.
    pub for_tasks: u64,
    pub disk: DiskTier,
    /// The host memory for working on the disk, reserved once for all its users.
    _working: Reservation,
}

impl RunMemory {
    pub(super) fn new(
        admission: &Admission,
        disk: DiskTier,
        store: Arc<SharedStore>,
        device_resident: Arc<DeviceResidentStore>,
    ) -> Result<Self, EngineError> {
        let host = HostHeadroom::new(admission.host_admitted_bytes, admission.host_ahead_bytes);
        let working = host.reserve(disk.working.capacity() + disk.writing, disk.working.name());
        let _working = working.map_err(SpillError::from)?;
        Ok(Self {
            store,
            device_resident,
            to_discard: Vec::new(),
            shared_to_discard: Vec::new(),
            for_tasks: host.available(),
            host,
            budget: ByteSize(admission.host_budget_bytes),
            admitted: admission.host_admitted_bytes,
            disk,
            _working,
        })
    }

    /// The hashes of a task's shared buffers that are stored, and whose files are as they were when they were read: they are not
    /// read again.
    pub(super) fn stored(&self, info: &TaskInfo) -> BTreeMap<usize, Hashes> {
        // A checkpoint may have other values than its files have now.
        let read = info.shared_names().filter(|_| info.task.start.weights().is_none());
        let there = read.filter(|(_, shared)| self.store.has_names(shared.id));
        let hashes = |(name, shared): (ParamBufferId, SharedBuffer)| {
            let hashes = self.store.hashes_from(shared.id, &info.files(name.buffer))?;
            Some((name.buffer, hashes))
        };
        there.filter_map(hashes).collect()
    }

    /// The bytes of a task's largest shared buffer that others have brought, other than those that are `stored`: the task reads its
    /// own copy to compare it.
    pub(super) fn compared_bytes(&self, info: &TaskInfo, stored: &BTreeMap<usize, Hashes>) -> u64 {
        let there = info.shared_names().filter(|(_, shared)| self.store.has_names(shared.id));
        let read = there.map(|(id, _)| id.buffer).filter(|buffer| !stored.contains_key(buffer));
        read.map(|buffer| info.compared_bytes(buffer)).max().unwrap_or(0)
    }

    /// Reserves memory for the masters of a task, if it is free. A shared buffer gets its memory in the store from the
    /// first task that brings it. If nothing else uses the disk (`idle`), masters for the disk pass through its
    /// working memory.
    pub(super) fn for_masters(&mut self, info: &TaskInfo, idle: bool) -> Option<MastersMemory> {
        let (name, working) = (info.name(), &self.disk.working);
        let brings = |shared: &SharedBuffer| !self.store.has_names(shared.id);
        let storage = &info.admitted.storage;
        let brought: u64 = storage.shared_in_memory().filter(brings).map(|shared| shared.bytes).sum();
        let mut host = self.host.try_reserve(storage.memory_bytes() + brought, name)?;
        let stored = self.stored(info);
        let passing = match info.most_passing(|buffer| !stored.contains_key(&buffer)) {
            Some(_) if idle => working.try_reserve(working.capacity(), name)?,
            most => self.host.try_reserve(most.unwrap_or(0), name)?,
        };
        let compared = self.host.try_reserve(self.compared_bytes(info, &stored), name)?;
        for (name, shared) in info.shared_names() {
            // Space on the disk was reserved when the run started.
            let reservation = brings(&shared).then(|| host.split(shared.bytes));
            self.store.join(name, shared.id, reservation);
        }
        Some(MastersMemory { host, disk: self.disk.take_space(info.id), passing, compared, stored })
    }

    /// Gives shared buffers on the disk their space, and registers the tasks that use them until they end.
    pub(super) fn share_on_disk<'a>(&mut self, tasks: impl Iterator<Item = &'a TaskInfo>) {
        for info in tasks {
            for (name, shared) in info.shared_names().filter(|(name, _)| info.lives_on_disk(name.buffer)) {
                self.store.join(name, shared.id, self.disk.take_shared_space(shared.id));
            }
        }
    }

    /// The tiers host, disk and devices, each with its peak reservation since the last call.
    pub(super) fn tiers<'a>(&self, devices: impl Iterator<Item = &'a Budget>) -> Vec<TierMemory> {
        let tier = |name: &str, budget: &Budget, budget_bytes| TierMemory {
            name: name.to_owned(),
            reserved_bytes: budget.used(),
            peak_bytes: budget.take_recent_peak(),
            budget_bytes,
        };
        let host = tier("host memory", self.host.budget(), self.budget.bytes());
        let disk = self.disk.budget.as_ref().map(|disk| tier("disk", disk, disk.capacity()));
        let devices = devices.map(|device| tier(device.name(), device, device.capacity()));
        iter::once(host).chain(disk).chain(devices).collect()
    }
}
