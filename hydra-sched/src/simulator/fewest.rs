//! The minimum bytes that devices must promote for their reads, over all cache replacements.

use std::collections::BTreeMap;

use super::{DeviceCost, ShardCost, Simulation, Workload};

/// A shard task's read of its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// The task's index in the workload.
    pub task: usize,
    /// The shard.
    pub shard: usize,
    /// The version of the master weights: how often they were updated.
    pub version: u64,
    /// The bytes of the copy; 0 if the workload does not state them.
    pub bytes: u64,
    /// Whether the device was computing the previous shard task when it committed to this one, so that the
    /// copy that the previous one reads could not be evicted.
    pub overlaps_previous: bool,
}

impl Read {
    const fn copy(&self) -> (usize, usize, u64) {
        (self.task, self.shard, self.version)
    }
}

impl Simulation {
    /// Returns the minimum bytes that the devices could have promoted in this schedule with knowledge of all
    /// later reads, over all cache replacements. `None` if the schedule was not recorded, if a device's
    /// memory is not stated, or if parts of shards are cached separately.
    ///
    /// Each device has its cache memory plus the memory that it has for the working bytes of shard tasks. A
    /// copy is present while it is read and from the time at which its device commits to it, together with
    /// the copy that the device reads then; all other copies may be evicted. If all copies that a device
    /// reads have one size, the result is the minimum: the copy with the latest next read is evicted
    /// (Belady's MIN). Otherwise it is a lower bound, the minimum if parts of copies could be evicted: parts
    /// are evicted from the copy with the latest next read, which is the optimum of the linear program with
    /// fractional copies.
    pub fn fewest_bytes(&self, workload: &Workload) -> Option<u64> {
        let in_parts = workload.tasks.iter().flat_map(|task| &task.shards).any(ShardCost::is_in_parts);
        if in_parts || self.reads.len() != workload.devices.len() {
            return None;
        }
        let devices = self.reads.iter().zip(&workload.devices);
        let memory = |device: &DeviceCost| {
            let working = device.working_bytes.unwrap_or(0);
            device.memory_bytes.map(|memory| memory.saturating_add(working))
        };
        let fewest = devices.map(|(reads, device)| memory(device).map(|memory| fewest_bytes(reads, memory)));
        fewest.sum::<Option<u128>>().map(|bytes| u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

/// Returns the minimum bytes that a device with this much cache memory promotes for its sequence of reads.
fn fewest_bytes(reads: &[Read], memory: u64) -> u128 {
    let (memory, again) = (u128::from(memory), again(reads));
    // Whole copies take multiples of this unit, so only multiples of it are useful.
    let unit = u128::from(reads.iter().map(|read| read.bytes).fold(0, gcd).max(1));
    let (mut kept, mut promoted) = (Kept::default(), 0);
    for (index, read) in reads.iter().enumerate() {
        let bytes = u128::from(read.bytes);
        promoted += bytes - kept.take(Some(index));
        let computes =
            index.checked_sub(1).filter(|before| read.overlaps_previous && again[*before] != Some(index));
        let previous_bytes = computes.map_or(0, |before| u128::from(reads[before].bytes));
        let stays = computes.map_or(0, |before| kept.take(again[before]));
        kept.fit(memory.saturating_sub(bytes + previous_bytes) / unit * unit);
        if let Some(before) = computes {
            kept.put(again[before], stays);
        }
        kept.put(again[index], bytes);
    }
    promoted
}

/// Returns for each read the next one of the same copy.
fn again(reads: &[Read]) -> Vec<Option<usize>> {
    let mut later = BTreeMap::new();
    let next = |(index, read): (usize, &Read)| later.insert(read.copy(), index);
    let mut again: Vec<Option<usize>> = reads.iter().enumerate().rev().map(next).collect();
    again.reverse();
    again
}

/// Bytes that are kept for a later read, by its index.
#[derive(Default)]
struct Kept {
    bytes: BTreeMap<usize, u128>,
    held: u128,
}

impl Kept {
    fn put(&mut self, until: Option<usize>, bytes: u128) {
        if let Some(until) = until {
            self.bytes.insert(until, bytes);
            self.held += bytes;
        }
    }

    fn take(&mut self, until: Option<usize>) -> u128 {
        let bytes = until.and_then(|until| self.bytes.remove(&until)).unwrap_or(0);
        self.held -= bytes;
        bytes
    }

    /// Evicts the latest reads until at most this many bytes are left.
    fn fit(&mut self, limit: u128) {
        while let Some(mut last) = self.bytes.last_entry().filter(|_| self.held > limit) {
            let goes = (self.held - limit).min(*last.get());
            self.held -= goes;
            *last.get_mut() -= goes;
            if *last.get() == 0 {
                last.remove();
            }
        }
    }
}

const fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// The minimum bytes by trying every set of copies that could be kept after each read.
    fn tried(reads: &[Read], memory: u64) -> u128 {
        type Held = BTreeSet<(usize, usize, u64)>;
        let sizes: BTreeMap<_, _> = reads.iter().map(|read| (read.copy(), read.bytes)).collect();
        let mut states: BTreeMap<Held, u128> = BTreeMap::from([(Held::new(), 0)]);
        for (index, read) in reads.iter().enumerate() {
            let computes =
                index.checked_sub(1).filter(|_| read.overlaps_previous).map(|before| reads[before].copy());
            let mut after: BTreeMap<Held, u128> = BTreeMap::new();
            for (held, promoted) in &states {
                let missing = if held.contains(&read.copy()) { 0 } else { read.bytes };
                let others: Vec<_> = held.iter().copied().filter(|copy| *copy != read.copy()).collect();
                for choice in 0..1u32 << others.len() {
                    let stays = others.iter().enumerate().filter(|(bit, _)| choice >> bit & 1 == 1);
                    let next: Held = stays.map(|(_, copy)| *copy).chain([read.copy()]).collect();
                    let fits = next.iter().map(|copy| sizes[copy]).sum::<u64>() <= memory;
                    if fits && computes.is_none_or(|copy| next.contains(&copy)) {
                        let promoted = promoted + u128::from(missing);
                        let least = after.entry(next).or_insert(promoted);
                        *least = promoted.min(*least);
                    }
                }
            }
            states = after;
        }
        states.into_values().min().unwrap()
    }

    fn any_reads() -> impl Strategy<Value = Vec<(usize, bool)>> {
        prop::collection::vec((0..6usize, any::<bool>()), 1..14)
    }

    fn reads(of: &[(usize, bool)], bytes: &[u64]) -> Vec<Read> {
        let read = |&(shard, overlaps_previous)| Read {
            task: 0,
            shard,
            version: 0,
            bytes: bytes[shard],
            overlaps_previous,
        };
        of.iter().map(read).collect()
    }

    proptest! {
        #[test]
        fn of_equal_sizes_it_is_the_least_there_is(of in any_reads(), memory in 20..70u64) {
            let reads = reads(&of, &[10; 6]);
            prop_assert_eq!(fewest_bytes(&reads, memory), tried(&reads, memory));
        }

        #[test]
        fn of_others_it_is_a_lower_bound(of in any_reads(), bytes in prop::array::uniform6(1..10u64), memory in 18..40u64) {
            let reads = reads(&of, &bytes);
            let least = tried(&reads, memory);
            prop_assert!(fewest_bytes(&reads, memory) <= least);
            let all: BTreeMap<_, _> = reads.iter().map(|read| (read.shard, read.bytes)).collect();
            prop_assert!(fewest_bytes(&reads, memory) >= all.values().map(|bytes| u128::from(*bytes)).sum());
        }
    }

    /// Six shards in a cycle, with memory for four; a test of the simulator finds the same.
    #[test]
    fn a_circle_by_hand() {
        let of: Vec<(usize, bool)> = (0..18).map(|index| (index % 6, true)).collect();
        assert_eq!(fewest_bytes(&reads(&of, &[10; 6]), 40), 10 * (6 + 2 + 4));
        assert_eq!(fewest_bytes(&reads(&of, &[10; 6]), 60), 60);
        assert_eq!(fewest_bytes(&reads(&of, &[10; 6]), 20), 180);
        let versions: Vec<Read> =
            reads(&of, &[10; 6]).iter().zip(0..).map(|(read, version)| Read { version, ..*read }).collect();
        assert_eq!(fewest_bytes(&versions, 60), 180, "what is stepped is another copy");
    }
}
