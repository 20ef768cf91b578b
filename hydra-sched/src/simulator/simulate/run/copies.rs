//! Insertion and eviction of cached copies on a device.

use super::{Active, Claim, Offers, SimulatedRun};
use crate::policy::{CopyUse, ModelIndex};
use crate::simulator::cached::{CacheKey, CachedPart, Copy};
use crate::simulator::{DeviceCost, Replacement};

impl SimulatedRun<'_> {
    /// Caches a copy of a part that a model's shard task reads on the device, evicting others, if it is not
    /// there.
    pub(super) fn cache(&mut self, device: usize, (model, shard): (usize, usize), part: &CachedPart) {
        if self.devices[device].copies.has([*part].into_iter()) {
            return;
        }
        self.devices[device].copies.forget(part.key);
        self.evict_for(device, part.bytes, Some((model, shard)));
        self.devices[device].copies.insert(part);
        match part.key {
            CacheKey::Own { .. } => self.offers.cached.comes(device, model, part.version),
            CacheKey::ParamBuffer { .. } | CacheKey::Frozen(_) => self.find_with(device, part.key),
        }
    }

    /// Evicts copies from a device for this many bytes, but none that the device's current or committed shard
    /// task, or this model's shard, reads; returns whether the bytes are then free.
    pub(super) fn evict_for(&mut self, device: usize, bytes: u64, reads: Option<(usize, usize)>) -> bool {
        let memory = self.copy_bytes(device);
        let Self { models, devices, offers: Offers { queue, cached, .. }, readers, workload, .. } = self;
        let is_of = |(model, shard): (usize, usize), key| {
            CachedPart::of((model, shard), &workload.tasks[model].shards[shard], 0)
                .any(|part| part.key == key)
        };
        let state = &devices[device];
        let of = |claim: &Claim| (claim.model, claim.task.shard);
        let active = state.active.as_ref().map(|Active { claim, .. }| of(claim));
        let read = [active, state.next.as_ref().map(of), reads];
        let stays = |key| read.iter().flatten().any(|shard| is_of(*shard, key));
        let readers = |key: CacheKey| readers.get(&key).map_or(&[][..], Vec::as_slice);
        let worth = |key: CacheKey, copy: &Copy| {
            if workload.devices[device].replacement == Replacement::LeastRecent {
                return copy.used as f64;
            }
            let of = |(model, shard): (usize, usize), version| {
                let state = &models[model];
                let devices = if state.in_flight.ran_elsewhere(device) { workload.devices.len() } else { 1 };
                let next_use_s = state.until_read_s(shard, version);
                // If no memory is stated, each copy takes one of two slots.
                let bytes = workload.devices[device].memory_bytes.map_or(1, |_| copy.bytes.max(1));
                let cost_s = workload.promote_part_s(device, model, shard, copy.bytes);
                CopyUse { next_use_s, cost_per_byte: cost_s / bytes as f64, devices }.worth()
            };
            let version = (!matches!(key, CacheKey::Frozen(_))).then_some(copy.version);
            readers(key).iter().map(|reader| of(*reader, version)).fold(0.0, f64::max)
        };
        let waits_for = |(model, shard): (usize, usize)| {
            let index = ModelIndex(model);
            queue.get(index).filter(|view| view.next_shard == shard).and_then(|_| queue.place(index).copied())
        };
        let goes = |key: CacheKey| {
            for reader in readers(key) {
                waits_for(*reader).iter().for_each(|place| cached.lose(device, reader.0, place));
            }
        };
        devices[device].copies.evict_for(bytes, memory, stays, worth, goes)
    }

    /// Records the queued models that have all their next parameters on a device, now that this copy is
    /// there.
    fn find_with(&mut self, device: usize, key: CacheKey) {
        let waits = |(model, shard): &&(usize, usize)| {
            let view = self.offers.queue.get(ModelIndex(*model)).filter(|view| view.next_shard == *shard);
            view.is_some() && self.has_next(device, *model, *shard)
        };
        let readers = self.readers.get(&key).into_iter().flatten();
        let found: Vec<usize> = readers.filter(waits).map(|(model, _)| *model).collect();
        for model in found {
            if let Some(place) = self.offers.queue.place(ModelIndex(model)).copied() {
                self.offers.cached.gain(device, model, place);
            }
        }
    }

    /// Removes the copies on a device that the step of a model's shard makes stale: those that no earlier
    /// shard reads, whose backward comes later.
    pub(super) fn forget_stepped(&mut self, device: usize, model: usize, shard: usize) {
        let cost = &self.workload.tasks[model].shards[shard];
        let steps =
            |key: CacheKey| !matches!(key, CacheKey::Frozen(_)) && self.readers[&key][0] == (model, shard);
        let stale: Vec<CacheKey> =
            CachedPart::of((model, shard), cost, 0).map(|part| part.key).filter(|key| steps(*key)).collect();
        stale.into_iter().for_each(|key| self.devices[device].copies.forget(key));
    }

    /// Removes the copies of a model that has ended, on devices where they take memory from computations.
    pub(super) fn forget_ended(&mut self, model: usize) {
        if self.models[model].next().is_some() || !self.models[model].in_flight.is_idle() {
            return;
        }
        let shards = self.workload.tasks[model].shards.iter().enumerate();
        let parts = shards.flat_map(|(shard, cost)| CachedPart::of((model, shard), cost, 0));
        let own: Vec<CacheKey> =
            parts.map(|part| part.key).filter(|key| !matches!(key, CacheKey::Frozen(_))).collect();
        let waits = |of: &DeviceCost| of.working_bytes.is_some();
        let devices = self.devices.iter_mut().zip(&self.workload.devices).filter(|(_, of)| waits(of));
        for (device, _) in devices {
            own.iter().for_each(|key| device.copies.forget(*key));
        }
    }
}
