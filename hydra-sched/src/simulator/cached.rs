//! The parameter cache of simulated devices, and the models that are cached there.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use crate::policy::Priority;
use crate::simulator::{ParamBufferCost, ShardCost};

/// A copy of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    /// The version of the master weights that it is a copy of.
    pub version: u64,
    pub bytes: u64,
    /// The time of its last use, as a count: the least recently used copy has the smallest.
    pub used: u64,
}

/// A unit of caching on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CacheKey {
    /// The trained part of a model's shard, or all of it if no part is frozen.
    Own { model: u32, shard: u32 },
    /// A buffer of a model, by its id.
    ParamBuffer { model: u32, buffer: u64 },
    /// Frozen parameters, by their id.
    Frozen(u64),
}

/// A unit of caching in a shard, as a shard task reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedPart {
    pub key: CacheKey,
    pub version: u64,
    /// 0 if not stated.
    pub bytes: u64,
}

impl CachedPart {
    /// Returns the parts of a model's shard, which is read in this version.
    pub(crate) fn of(
        (model, shard): (usize, usize),
        cost: &ShardCost,
        version: u64,
    ) -> impl Iterator<Item = Self> + Clone {
        let (own, bytes) = (CacheKey::Own { model: model as u32, shard: shard as u32 }, cost.own_bytes());
        let is_whole = cost.buffers.is_empty() && (cost.frozen.is_empty() || bytes > 0);
        let own = is_whole.then_some(Self { key: own, version, bytes });
        let buffer = move |of: &ParamBufferCost| {
            let key = CacheKey::ParamBuffer { model: model as u32, buffer: of.id };
            Self { key, version, bytes: of.bytes }
        };
        let frozen =
            |of: &ParamBufferCost| Self { key: CacheKey::Frozen(of.id), version: 0, bytes: of.bytes };
        own.into_iter().chain(cost.buffers.iter().map(buffer)).chain(cost.frozen.iter().map(frozen))
    }
}

/// The cached copies on one device. They are clean, so evicting one moves nothing. All operations take
/// logarithmic time in their number, except evictions for a copy, which rate each copy once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copies {
    /// The total bytes, which may exceed the memory of any device.
    held: u128,
    copies: BTreeMap<CacheKey, Copy>,
    clock: u64,
}

impl Copies {
    /// The bytes of all copies.
    pub(crate) fn held_bytes(&self) -> u64 {
        u64::try_from(self.held).unwrap_or(u64::MAX)
    }

    /// Returns whether all of these parts are cached in their versions.
    pub(crate) fn has(&self, mut parts: impl Iterator<Item = CachedPart>) -> bool {
        parts.all(|part| self.copies.get(&part.key).is_some_and(|copy| copy.version == part.version))
    }

    /// Returns whether this part is cached in its version, and if so marks it as the most recently used.
    pub(crate) fn touch(&mut self, part: &CachedPart) -> bool {
        let copy = self.copies.get_mut(&part.key).filter(|copy| copy.version == part.version);
        copy.map(|copy| {
            self.clock += 1;
            copy.used = self.clock;
        })
        .is_some()
    }

    /// Frees this many bytes of the given memory, or space for one copy if no memory is stated. Evicts copies
    /// in ascending order of worth, and the least recently used first among equal ones, but none that
    /// `stays`; calls `gone` for each. If that would not suffice, evicts nothing and returns false.
    pub(crate) fn evict_for(
        &mut self,
        bytes: u64,
        memory: Option<u64>,
        stays: impl Fn(CacheKey) -> bool,
        worth: impl Fn(CacheKey, &Copy) -> f64,
        mut goes: impl FnMut(CacheKey),
    ) -> bool {
        if self.fits(bytes, memory) {
            return true;
        }
        let may_go = || self.copies.iter().filter(|(key, _)| !stays(**key));
        let freed: u128 = may_go().map(|(_, copy)| u128::from(copy.bytes)).sum();
        let most = memory.map(u128::from);
        if most.is_some_and(|most| self.held - freed + u128::from(bytes) > most) {
            return false;
        }
        let rated =
            |(key, copy): (&CacheKey, &Copy)| Rated { worth: worth(*key, copy), used: copy.used, key: *key };
        let mut least: BinaryHeap<Reverse<Rated>> = may_go().map(rated).map(Reverse).collect();
        while !self.fits(bytes, memory) {
            let Some(Reverse(Rated { key, .. })) = least.pop() else { return false };
            self.forget(key);
            goes(key);
        }
        true
    }

    /// Inserts a copy, for which there must be space.
    pub(crate) fn insert(&mut self, part: &CachedPart) {
        self.forget(part.key);
        self.held += u128::from(part.bytes);
        self.clock += 1;
        let copy = Copy { version: part.version, bytes: part.bytes, used: self.clock };
        self.copies.insert(part.key, copy);
    }

    /// Removes a copy that a step made stale.
    pub(crate) fn forget(&mut self, key: CacheKey) {
        if let Some(copy) = self.copies.remove(&key) {
            self.held -= u128::from(copy.bytes);
        }
    }

    fn fits(&self, bytes: u64, memory: Option<u64>) -> bool {
        match memory {
            None => self.copies.len() < 2,
            Some(memory) => self.held + u128::from(bytes) <= u128::from(memory),
        }
    }
}

/// A copy in the eviction order.
struct Rated {
    worth: f64,
    used: u64,
    key: CacheKey,
}

impl Ord for Rated {
    fn cmp(&self, other: &Self) -> Ordering {
        self.worth.total_cmp(&other.worth).then(self.used.cmp(&other.used))
    }
}

impl PartialOrd for Rated {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Rated {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Rated {}

/// For each device, the positions in the policy's order of the queued models whose next shard is cached
/// there. It is updated for every model that enters or leaves and every copy that is evicted, so queries read
/// nothing else. A copy is inserted only for a model that has just left the queue.
#[derive(Clone, Debug)]
pub(crate) struct Cached {
    devices: Vec<BTreeSet<Priority>>,
    /// Per queued model: the devices where its next shard is cached.
    on: Vec<Vec<u32>>,
    /// Per model: the latest version of a copy that came to a device, and all devices that received one;
    /// before it the same for the first version, which frozen shards keep forever. No other device has any of
    /// these.
    came: Vec<[(u64, Vec<u32>); 2]>,
}

impl Cached {
    pub(crate) fn new(devices: usize, models: usize) -> Self {
        Self {
            devices: vec![BTreeSet::new(); devices],
            on: vec![Vec::new(); models],
            came: vec![[(0, Vec::new()), (0, Vec::new())]; models],
        }
    }

    /// Records that a device receives a copy of this version.
    pub(crate) fn comes(&mut self, device: usize, model: usize, version: u64) {
        let (last, devices) = &mut self.came[model][usize::from(version > 0)];
        if *last != version {
            *last = version;
            devices.clear();
        }
        if !devices.contains(&(device as u32)) {
            devices.push(device as u32);
        }
    }

    pub(crate) fn of(&self, device: usize) -> &BTreeSet<Priority> {
        &self.devices[device]
    }

    /// Records that a model with this position enters the queue. `has` returns whether a device has its next
    /// shard, which has frozen parts.
    pub(crate) fn enter_in_parts(&mut self, model: usize, place: Priority, has: impl Fn(usize) -> bool) {
        (0..self.devices.len()).filter(|device| has(*device)).for_each(|on| self.gain(on, model, place));
    }

    /// Records that everything that a queued model needs next is now on a device.
    pub(crate) fn gain(&mut self, device: usize, model: usize, place: Priority) {
        if self.devices[device].insert(place) {
            self.on[model].push(device as u32);
        }
    }

    /// Records that a model with this position enters the queue. `has` returns whether a device has its next
    /// shard in this version.
    pub(crate) fn enter(&mut self, model: usize, version: u64, place: Priority, has: impl Fn(usize) -> bool) {
        let (last, devices) = &self.came[model][usize::from(version > 0)];
        if *last != version {
            return;
        }
        for &device in devices {
            if has(device as usize) && self.devices[device as usize].insert(place) {
                self.on[model].push(device);
            }
        }
    }

    /// Records that a model with this position leaves the queue.
    pub(crate) fn leave(&mut self, model: usize, place: &Priority) {
        for device in self.on[model].drain(..) {
            self.devices[device as usize].remove(place);
        }
    }

    /// Records that the copy that a queued model needs next is evicted from a device.
    pub(crate) fn lose(&mut self, device: usize, model: usize, place: &Priority) {
        if self.devices[device].remove(place) {
            self.on[model].retain(|on| *on != device as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(_: CacheKey, copy: &Copy) -> f64 {
        copy.used as f64
    }

    fn own(model: u32, shard: u32) -> CacheKey {
        CacheKey::Own { model, shard }
    }

    fn part(key: CacheKey, version: u64, bytes: u64) -> CachedPart {
        CachedPart { key, version, bytes }
    }

    fn touches(copies: &mut Copies, key: CacheKey) -> bool {
        copies.touch(&part(key, 0, 0))
    }

    #[test]
    fn two_copies_fit_where_no_memory_is_stated() {
        let mut copies = Copies::default();
        copies.insert(&part(own(0, 0), 0, 10));
        assert!(copies.evict_for(10, None, |_| true, used, |_| panic!("it fits")));
        copies.insert(&part(own(0, 1), 0, 10));
        assert!(touches(&mut copies, own(0, 0)) && touches(&mut copies, own(0, 1)));
        assert!(copies.evict_for(10, None, |key| key == own(0, 0), used, |_| {}));
        copies.insert(&part(own(0, 2), 0, 10));
        assert!(touches(&mut copies, own(0, 0)), "what computes stays, though it was used longest ago");
        assert!(!touches(&mut copies, own(0, 1)));
    }

    #[test]
    fn memory_is_filled_and_what_is_worth_least_goes() {
        let gone = |worth: fn(CacheKey, &Copy) -> f64| {
            let mut copies = Copies::default();
            let four = [own(0, 0), own(0, 1), CacheKey::Frozen(2), own(0, 3)];
            four.iter().for_each(|key| copies.insert(&part(*key, 0, 25)));
            assert!(touches(&mut copies, four[0]));
            let mut gone = Vec::new();
            let computes = |key| key == own(0, 3);
            assert!(
                !copies.evict_for(76, Some(100), computes, worth, |_| panic!("nothing goes for nothing"))
            );
            assert!(copies.evict_for(30, Some(100), computes, worth, |key| gone.push(key)));
            copies.insert(&part(own(1, 0), 0, 30));
            let left = four.iter().filter(|key| copies.has([part(**key, 0, 25)].into_iter())).count();
            let new = copies.has([part(own(1, 0), 0, 30)].into_iter());
            assert_eq!((left, copies.held, new), (2, 80, true));
            gone
        };
        assert_eq!(gone(used), [own(0, 1), CacheKey::Frozen(2)], "the least recently used ones");
        let last = |key: CacheKey, _: &Copy| match key {
            CacheKey::Own { shard, .. } => -f64::from(shard),
            CacheKey::ParamBuffer { buffer: id, .. } | CacheKey::Frozen(id) => -(id as f64),
        };
        assert_eq!(gone(last), [CacheKey::Frozen(2), own(0, 1)], "not what computes");
        assert_eq!(
            gone(|_, _| f64::INFINITY),
            [own(0, 1), CacheKey::Frozen(2)],
            "of equal ones the least recent"
        );
    }

    #[test]
    fn another_version_is_not_there() {
        let mut copies = Copies::default();
        let at = |version| part(own(0, 0), version, 1);
        copies.insert(&at(4));
        assert!(!copies.touch(&at(5)));
        copies.insert(&at(5));
        assert_eq!((copies.has([at(4)].into_iter()), copies.held), (false, 1));
        copies.forget(own(0, 0));
        assert_eq!((copies.has([at(5)].into_iter()), copies.held), (false, 0));
    }

    #[test]
    fn a_shard_has_its_own_part_and_frozen_ones() {
        let part = |id, bytes| ParamBufferCost { id, bytes };
        let keys = |bytes, frozen| {
            let cost = ShardCost { bytes, frozen, ..ShardCost::new(1.0, 1.0, 1.0) };
            CachedPart::of((1, 2), &cost, 3)
                .map(|part| (part.key, part.version, part.bytes))
                .collect::<Vec<_>>()
        };
        assert_eq!(keys(None, vec![]), [(own(1, 2), 3, 0)]);
        assert_eq!(keys(Some(9), vec![part(7, 4)]), [(own(1, 2), 3, 5), (CacheKey::Frozen(7), 0, 4)]);
        assert_eq!(
            keys(Some(9), vec![part(7, 9)]),
            [(CacheKey::Frozen(7), 0, 9)],
            "nothing of it is stepped"
        );
        let buffers = vec![part(0, 5), part(1, 1)];
        let cost =
            ShardCost { bytes: Some(10), frozen: vec![part(7, 4)], buffers, ..ShardCost::new(1.0, 1.0, 1.0) };
        let keys: Vec<_> = CachedPart::of((1, 2), &cost, 3).map(|part| (part.key, part.version)).collect();
        let buffer = |buffer| CacheKey::ParamBuffer { model: 1, buffer };
        assert_eq!(keys, [(buffer(0), 3), (buffer(1), 3), (CacheKey::Frozen(7), 0)]);
    }
}
