//! The cached copies on simulated devices, and the models that find theirs there.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use crate::policy::Priority;
use crate::simulator::{ParamBufferCost, ShardCost};

/// A copy of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    /// The version of the masters that it is a copy of.
    pub version: u64,
    pub bytes: u64,
    /// When it was last used, as a count: the copy that was used longest ago has the least.
    pub used: u64,
}

/// What has a copy of its own on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    /// Of a model's shard what its task steps, or all of it where nothing of it is frozen.
    Own { model: u32, shard: u32 },
    /// A buffer of a model, by its number.
    ParamBuffer { model: u32, buffer: u64 },
    /// Frozen parameters, by their number.
    Frozen(u64),
}

/// Parameters of a shard that have a copy of their own, as a shard task reads them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub key: Key,
    pub version: u64,
    /// 0 where they are not stated.
    pub bytes: u64,
}

impl Part {
    /// The parts of a model's shard, which is read in this version.
    pub(crate) fn of(
        (model, shard): (usize, usize),
        cost: &ShardCost,
        version: u64,
    ) -> impl Iterator<Item = Self> + Clone {
        let (own, bytes) = (Key::Own { model: model as u32, shard: shard as u32 }, cost.own_bytes());
        let is_whole = cost.buffers.is_empty() && (cost.frozen.is_empty() || bytes > 0);
        let own = is_whole.then_some(Self { key: own, version, bytes });
        let buffer = move |of: &ParamBufferCost| {
            let key = Key::ParamBuffer { model: model as u32, buffer: of.id };
            Self { key, version, bytes: of.bytes }
        };
        let frozen = |of: &ParamBufferCost| Self { key: Key::Frozen(of.id), version: 0, bytes: of.bytes };
        own.into_iter().chain(cost.buffers.iter().map(buffer)).chain(cost.frozen.iter().map(frozen))
    }
}

/// The copies on one device. They are clean, so letting go of one moves nothing. Every question and every change takes a
/// time logarithmic in their number, but for a copy that needs the room of others: then each is rated once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copies {
    /// Bytes that they take, which may be more than a device could have.
    held: u128,
    copies: BTreeMap<Key, Copy>,
    clock: u64,
}

impl Copies {
    /// The bytes that copies take.
    pub(crate) fn held_bytes(&self) -> u64 {
        u64::try_from(self.held).unwrap_or(u64::MAX)
    }

    /// True if all of these are there, in their versions.
    pub(crate) fn has(&self, mut parts: impl Iterator<Item = Part>) -> bool {
        parts.all(|part| self.copies.get(&part.key).is_some_and(|copy| copy.version == part.version))
    }

    /// True if this part is there in its version, which makes it the most recently used copy.
    pub(crate) fn touch(&mut self, part: &Part) -> bool {
        let copy = self.copies.get_mut(&part.key).filter(|copy| copy.version == part.version);
        copy.map(|copy| {
            self.clock += 1;
            copy.used = self.clock;
        })
        .is_some()
    }

    /// Makes room for so many bytes in this much memory, for one copy where none is stated: those copies go that are worth least,
    /// those used longest ago among equal ones, but never one that stays, and each that goes is told. None goes, and it is false,
    /// where there would be no room even so.
    pub(crate) fn make_room(
        &mut self,
        bytes: u64,
        memory: Option<u64>,
        stays: impl Fn(Key) -> bool,
        worth: impl Fn(Key, &Copy) -> f64,
        mut goes: impl FnMut(Key),
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
            |(key, copy): (&Key, &Copy)| Rated { worth: worth(*key, copy), used: copy.used, key: *key };
        let mut least: BinaryHeap<Reverse<Rated>> = may_go().map(rated).map(Reverse).collect();
        while !self.fits(bytes, memory) {
            let Some(Reverse(Rated { key, .. })) = least.pop() else { return false };
            self.forget(key);
            goes(key);
        }
        true
    }

    /// Puts a copy there, for which there is room.
    pub(crate) fn insert(&mut self, part: &Part) {
        self.forget(part.key);
        self.held += u128::from(part.bytes);
        self.clock += 1;
        let copy = Copy { version: part.version, bytes: part.bytes, used: self.clock };
        self.copies.insert(part.key, copy);
    }

    /// Lets go of a copy that a step made stale.
    pub(crate) fn forget(&mut self, key: Key) {
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

    /// A model with this place comes into the queue. `has` says which devices have its next shard, parts of which are frozen.
    pub(crate) fn enter_in_parts(&mut self, model: usize, place: Priority, has: impl Fn(usize) -> bool) {
        (0..self.devices.len()).filter(|device| has(*device)).for_each(|on| self.gain(on, model, place));
    }

    /// All that a model in the queue needs next is on a device.
    pub(crate) fn gain(&mut self, device: usize, model: usize, place: Priority) {
        if self.devices[device].insert(place) {
            self.on[model].push(device as u32);
        }
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

    fn own(model: u32, shard: u32) -> Key {
        Key::Own { model, shard }
    }

    fn part(key: Key, version: u64, bytes: u64) -> Part {
        Part { key, version, bytes }
    }

    fn touches(copies: &mut Copies, key: Key) -> bool {
        copies.touch(&part(key, 0, 0))
    }

    #[test]
    fn two_copies_fit_where_no_memory_is_stated() {
        let mut copies = Copies::default();
        copies.insert(&part(own(0, 0), 0, 10));
        assert!(copies.make_room(10, None, |_| true, used, |_| panic!("there is room")));
        copies.insert(&part(own(0, 1), 0, 10));
        assert!(touches(&mut copies, own(0, 0)) && touches(&mut copies, own(0, 1)));
        assert!(copies.make_room(10, None, |key| key == own(0, 0), used, |_| {}));
        copies.insert(&part(own(0, 2), 0, 10));
        assert!(touches(&mut copies, own(0, 0)), "what computes stays, though it was used longest ago");
        assert!(!touches(&mut copies, own(0, 1)));
    }

    #[test]
    fn memory_is_filled_and_what_is_worth_least_goes() {
        let gone = |worth: fn(Key, &Copy) -> f64| {
            let mut copies = Copies::default();
            let four = [own(0, 0), own(0, 1), Key::Frozen(2), own(0, 3)];
            four.iter().for_each(|key| copies.insert(&part(*key, 0, 25)));
            assert!(touches(&mut copies, four[0]));
            let mut gone = Vec::new();
            let computes = |key| key == own(0, 3);
            assert!(
                !copies.make_room(76, Some(100), computes, worth, |_| panic!("nothing goes for nothing"))
            );
            assert!(copies.make_room(30, Some(100), computes, worth, |key| gone.push(key)));
            copies.insert(&part(own(1, 0), 0, 30));
            let left = four.iter().filter(|key| copies.has([part(**key, 0, 25)].into_iter())).count();
            let new = copies.has([part(own(1, 0), 0, 30)].into_iter());
            assert_eq!((left, copies.held, new), (2, 80, true));
            gone
        };
        assert_eq!(gone(used), [own(0, 1), Key::Frozen(2)], "the least recently used ones");
        let last = |key: Key, _: &Copy| match key {
            Key::Own { shard, .. } => -f64::from(shard),
            Key::ParamBuffer { buffer: id, .. } | Key::Frozen(id) => -(id as f64),
        };
        assert_eq!(gone(last), [Key::Frozen(2), own(0, 1)], "not what computes");
        assert_eq!(gone(|_, _| f64::INFINITY), [own(0, 1), Key::Frozen(2)], "of equal ones the least recent");
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
            Part::of((1, 2), &cost, 3).map(|part| (part.key, part.version, part.bytes)).collect::<Vec<_>>()
        };
        assert_eq!(keys(None, vec![]), [(own(1, 2), 3, 0)]);
        assert_eq!(keys(Some(9), vec![part(7, 4)]), [(own(1, 2), 3, 5), (Key::Frozen(7), 0, 4)]);
        assert_eq!(keys(Some(9), vec![part(7, 9)]), [(Key::Frozen(7), 0, 9)], "nothing of it is stepped");
        let buffers = vec![part(0, 5), part(1, 1)];
        let cost =
            ShardCost { bytes: Some(10), frozen: vec![part(7, 4)], buffers, ..ShardCost::new(1.0, 1.0, 1.0) };
        let keys: Vec<_> = Part::of((1, 2), &cost, 3).map(|part| (part.key, part.version)).collect();
        let buffer = |buffer| Key::ParamBuffer { model: 1, buffer };
        assert_eq!(keys, [(buffer(0), 3), (buffer(1), 3), (Key::Frozen(7), 0)]);
    }
}
