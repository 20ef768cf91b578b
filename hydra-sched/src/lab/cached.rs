//! The cached copies on simulated devices, and the models that find theirs there.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use crate::policy::Priority;

/// A copy of one shard's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    /// The version of the masters that it is a copy of.
    pub version: u64,
    pub bytes: u64,
    /// When it was last used, as a count: the copy that was used longest ago has the least.
    pub used: u64,
}

/// A model's shard.
pub(crate) type Key = (u32, u32);

/// The copies on one device. They are clean, so letting go of one moves nothing. Every question and every change takes a
/// time logarithmic in their number, but for a copy that needs the room of others: then each is rated once.
#[derive(Clone, Debug)]
pub(crate) struct Copies {
    /// Bytes that the device has for them; `None` where no memory is stated: room for two copies of any size.
    memory: Option<u64>,
    /// Bytes that they take, which may be more than a device could have.
    held: u128,
    copies: BTreeMap<Key, Copy>,
    clock: u64,
}

impl Copies {
    pub(crate) fn new(memory: Option<u64>) -> Self {
        Self { memory, held: 0, copies: BTreeMap::new(), clock: 0 }
    }

    /// True if this version of the shard is there.
    pub(crate) fn has(&self, model: u32, shard: u32, version: u64) -> bool {
        self.copies.get(&(model, shard)).is_some_and(|copy| copy.version == version)
    }

    /// True if this version of the shard is there, which makes it the most recently used copy.
    pub(crate) fn touch(&mut self, model: u32, shard: u32, version: u64) -> bool {
        let copy = self.copies.get_mut(&(model, shard)).filter(|copy| copy.version == version);
        copy.map(|copy| {
            self.clock += 1;
            copy.used = self.clock;
        })
        .is_some()
    }

    /// Puts a copy in the place of those that are worth least, those used longest ago among equal ones, but never of the
    /// one that computes. Each that goes, of other shards, is told.
    pub(crate) fn insert(
        &mut self,
        key: Key,
        (version, bytes): (u64, u64),
        computes: Option<Key>,
        worth: impl Fn(Key, &Copy) -> f64,
        mut goes: impl FnMut(u32, u32),
    ) {
        self.forget(key.0, key.1);
        if !self.fits(bytes) {
            let rated =
                |(key, copy): (&Key, &Copy)| Rated { worth: worth(*key, copy), used: copy.used, key: *key };
            let mut least: BinaryHeap<Reverse<Rated>> = self
                .copies
                .iter()
                .filter(|(key, _)| Some(**key) != computes)
                .map(rated)
                .map(Reverse)
                .collect();
            while !self.fits(bytes) {
                let Some(Reverse(Rated { key: (model, shard), .. })) = least.pop() else { break };
                self.forget(model, shard);
                goes(model, shard);
            }
        }
        self.held += u128::from(bytes);
        self.clock += 1;
        self.copies.insert(key, Copy { version, bytes, used: self.clock });
    }

    /// Lets go of a copy that a step made stale.
    pub(crate) fn forget(&mut self, model: u32, shard: u32) {
        if let Some(copy) = self.copies.remove(&(model, shard)) {
            self.held -= u128::from(copy.bytes);
        }
    }

    fn fits(&self, bytes: u64) -> bool {
        match self.memory {
            None => self.copies.len() < 2,
            Some(memory) => self.held + u128::from(bytes) <= u128::from(memory),
        }
    }
}

/// A copy in the order in which copies go.
struct Rated {
    worth: f64,
    used: u64,
    key: Key,
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

/// For each device, the places in the policy's order of the models in the queue that find the parameters of their next
/// shard task there. It is updated with every model that comes or goes and every copy that goes, so that a
/// question looks at nothing else. A copy comes only for a model that has just left the queue.
#[derive(Clone, Debug)]
pub(crate) struct Cached {
    devices: Vec<BTreeSet<Priority>>,
    /// Per model in the queue: the devices on which it is.
    on: Vec<Vec<u32>>,
    /// Per model: the latest version of a copy that came to a device, and all devices to which one of that came; before it
    /// the same of the first version, in which frozen shards stay for ever. No other device has any of these.
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

    /// A copy of this version comes to a device.
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

    /// A model with this place comes into the queue. `has` says which devices have its next shard in this version.
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

    /// A model with this place leaves the queue.
    pub(crate) fn leave(&mut self, model: usize, place: &Priority) {
        for device in self.on[model].drain(..) {
            self.devices[device as usize].remove(place);
        }
    }

    /// The copy that a model in the queue needs next goes from a device.
    pub(crate) fn lose(&mut self, device: usize, model: usize, place: &Priority) {
        if self.devices[device].remove(place) {
            self.on[model].retain(|on| *on != device as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(_: Key, copy: &Copy) -> f64 {
        copy.used as f64
    }

    #[test]
    fn two_copies_fit_where_no_memory_is_stated() {
        let mut copies = Copies::new(None);
        copies.insert((0, 0), (0, 10), None, used, |_, _| {});
        copies.insert((0, 1), (0, 10), Some((0, 0)), used, |_, _| {});
        assert!(copies.touch(0, 0, 0) && copies.touch(0, 1, 0));
        copies.insert((0, 2), (0, 10), Some((0, 0)), used, |_, _| {});
        assert!(copies.touch(0, 0, 0), "what computes stays, though it was used longest ago");
        assert!(!copies.touch(0, 1, 0));
    }

    #[test]
    fn memory_is_filled_and_what_is_worth_least_goes() {
        let gone = |worth: fn(Key, &Copy) -> f64| {
            let mut copies = Copies::new(Some(100));
            (0..4).for_each(|shard| copies.insert((0, shard), (0, 25), None, worth, |_, _| {}));
            assert!(copies.touch(0, 0, 0));
            let mut gone = Vec::new();
            copies.insert((1, 0), (0, 30), Some((0, 3)), worth, |model, shard| gone.push((model, shard)));
            let left: Vec<u32> = (0..4).filter(|shard| copies.has(0, *shard, 0)).collect();
            assert_eq!((left.len(), copies.held, copies.has(1, 0, 0)), (2, 80, true));
            gone
        };
        assert_eq!(gone(used), [(0, 1), (0, 2)], "the least recently used ones");
        assert_eq!(gone(|(_, shard), _| -f64::from(shard)), [(0, 2), (0, 1)], "not what computes");
        assert_eq!(gone(|_, _| f64::INFINITY), [(0, 1), (0, 2)], "of equal ones the least recently used");
    }

    #[test]
    fn another_version_is_not_there() {
        let mut copies = Copies::new(None);
        copies.insert((0, 0), (4, 1), None, used, |_, _| {});
        assert!(!copies.touch(0, 0, 5));
        copies.insert((0, 0), (5, 1), None, used, |_, _| {});
        assert_eq!((copies.has(0, 0, 4), copies.held), (false, 1));
        copies.forget(0, 0);
        assert_eq!((copies.has(0, 0, 5), copies.held), (false, 0));
    }
}
