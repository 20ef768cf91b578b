//! The parameter cache: copies that stay on a device after their shard task has ended, in otherwise unused
//! memory.
//!
//! A cached copy is clean, so it can be evicted at any time. The caller rates the copies, which determines
//! the eviction order; a copy that a shard task holds is not evicted.

use crate::{ParamBufferId, Reservation};
use hydra_core::DeviceBytes;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The bytes of a buffer in a device's memory, and the version that they are a copy of.
#[derive(Debug)]
pub(crate) struct BufferCopy {
    pub bytes: DeviceBytes,
    pub version: u64,
    /// Released after the bytes are freed, because fields are dropped in this order. `None` if another
    /// reservation covers them.
    reservation: Option<Reservation>,
}

impl BufferCopy {
    pub(crate) fn new(bytes: DeviceBytes, version: u64, reservation: Option<Reservation>) -> Arc<Self> {
        Arc::new(Self { bytes, version, reservation })
    }

    pub(crate) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The bytes that evicting the copy releases.
    fn reserved_bytes(&self) -> u64 {
        self.reservation.as_ref().map_or(0, Reservation::bytes)
    }
}

/// Cached copies that a claimed shard task will read: they are not evicted until this is dropped.
#[derive(Debug, Default)]
#[must_use = "the copies can go when this is dropped"]
pub struct HeldCopies {
    pub(crate) buffers: BTreeMap<usize, Arc<BufferCopy>>,
}

impl HeldCopies {
    /// The bytes of all of them.
    pub fn bytes(&self) -> u64 {
        self.buffers.values().map(|copy| copy.len()).sum()
    }
}

/// The cached copies of one device.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    cached: Mutex<BTreeMap<ParamBufferId, Cached>>,
}

#[derive(Debug)]
struct Cached {
    copy: Arc<BufferCopy>,
    worth: f64,
}

impl Cached {
    /// Returns whether a shard task holds it.
    fn is_held(&self) -> bool {
        Arc::strong_count(&self.copy) > 1
    }
}

impl Copies {
    /// Adds a copy to the cache and replaces one of another version.
    pub(crate) fn insert(&self, id: ParamBufferId, copy: Arc<BufferCopy>) {
        // The most recently read copy is worth most, until the next rating.
        let _gone = self.lock().insert(id, Cached { copy, worth: f64::INFINITY });
    }

    /// Returns the copy of this version of a buffer, which is not evicted while the caller holds it.
    pub(crate) fn hold(&self, id: ParamBufferId, version: u64) -> Option<Arc<BufferCopy>> {
        let cached = self.lock();
        cached.get(&id).filter(|of| of.copy.version == version).map(|of| of.copy.clone())
    }

    /// Returns the bytes of this version of a buffer, if it is cached.
    pub(crate) fn bytes(&self, id: ParamBufferId, version: u64) -> Option<u64> {
        self.lock().get(&id).filter(|of| of.copy.version == version).map(|of| of.copy.len())
    }

    /// Sets the worth of each copy, and evicts those that are worth nothing.
    pub(crate) fn rate(&self, worth: impl Fn(ParamBufferId) -> f64) {
        let mut cached = self.lock();
        cached.iter_mut().for_each(|(id, of)| of.worth = worth(*id));
        let worthless: Vec<ParamBufferId> =
            cached.iter().filter(|(_, of)| of.worth <= 0.0).map(|(id, _)| *id).collect();
        let _gone: Vec<_> = worthless.iter().filter_map(|id| cached.remove(id)).collect();
        drop(cached);
    }

    /// Evicts the copies that match.
    pub(crate) fn forget(&self, is_one: impl Fn(&ParamBufferId) -> bool) {
        let mut cached = self.lock();
        let ids: Vec<ParamBufferId> = cached.keys().copied().filter(is_one).collect();
        let _gone: Vec<_> = ids.iter().filter_map(|id| cached.remove(id)).collect();
        drop(cached);
    }

    /// Evicts copies that are not held, in ascending order of worth, until at least this many bytes are
    /// freed; none if all of them together have fewer.
    pub(crate) fn evict(&self, bytes: u64) {
        let mut cached = self.lock();
        let mut free: Vec<(f64, ParamBufferId, u64)> = cached
            .iter()
            .filter(|(_, of)| !of.is_held())
            .map(|(id, of)| (of.worth, *id, of.copy.reserved_bytes()))
            .collect();
        if free.iter().map(|(.., size)| size).sum::<u64>() < bytes {
            return;
        }
        free.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut freed = 0;
        let goes = free.iter().take_while(|(.., size)| {
            let goes = freed < bytes;
            freed += size;
            goes
        });
        let _gone: Vec<_> = goes.filter_map(|(_, id, _)| cached.remove(id)).collect();
        // The memory is freed, and its reservation released, after the lock is released.
        drop(cached);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ParamBufferId, Cached>> {
        // No change can panic halfway, so a poisoned lock is still consistent.
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
