//! The fewest bytes that devices could promote for what they read, whatever copies they let go of.

use std::collections::BTreeMap;

use super::{DeviceCost, ShardCost, Simulation, Workload};

/// A shard task's reading of its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// The task's index in the workload.
    pub task: usize,
    /// The shard.
    pub shard: usize,
    /// The version of the masters: how often they were stepped.
    pub version: u64,
    /// The bytes of the copy; 0 where the workload does not say them.
    pub bytes: u64,
    /// The device computed the shard task before it when it committed to this one, so that the copy which that reads could
    /// not go.
    pub beside: bool,
}

impl Read {
    const fn copy(&self) -> (usize, usize, u64) {
        (self.task, self.shard, self.version)
    }
}

impl Simulation {
    /// The fewest bytes that the devices could have promoted in this schedule, given all that is read later: no choice of
    /// which copy goes does with fewer. `None` if the schedule was not recorded, if a device's memory is not stated, or if parts
    /// of shards have copies of their own.
    ///
    /// Each device has its memory for copies, and all that it has for what shard tasks take beside them. What is read is there
    /// while it is read and before, from the time at which its device commits to it, beside what the device computes then;
    /// everything else that is there may go. Where all copies
    /// that a device reads are of one size, this is the least that there is: the copy goes that is read again last (Belady's
    /// MIN). Where they are not, it is a lower bound, what could be done if parts of copies could go: the parts go from the copy that
    /// is read again last, which is the optimum of the linear program that keeps parts.
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

/// The fewest bytes that a device with so much memory for copies promotes for what it reads, one after the other.
fn fewest_bytes(reads: &[Read], memory: u64) -> u128 {
    let (memory, again) = (u128::from(memory), again(reads));
    // Whole copies take a multiple of this, so no room but a multiple of it is of use.
    let unit = u128::from(reads.iter().map(|read| read.bytes).fold(0, gcd).max(1));
    let (mut kept, mut promoted) = (Kept::default(), 0);
    for (index, read) in reads.iter().enumerate() {
        let bytes = u128::from(read.bytes);
        promoted += bytes - kept.take(Some(index));
        let computes = index.checked_sub(1).filter(|before| read.beside && again[*before] != Some(index));
        let beside = computes.map_or(0, |before| u128::from(reads[before].bytes));
        let stays = computes.map_or(0, |before| kept.take(again[before]));
        kept.fit(memory.saturating_sub(bytes + beside) / unit * unit);
        if let Some(before) = computes {
            kept.put(again[before], stays);
        }
        kept.put(again[index], bytes);
    }
    promoted
}

/// Per read, the next one of the same copy.
fn again(reads: &[Read]) -> Vec<Option<usize>> {
    let mut later = BTreeMap::new();
    let next = |(index, read): (usize, &Read)| later.insert(read.copy(), index);
    let mut again: Vec<Option<usize>> = reads.iter().enumerate().rev().map(next).collect();
    again.reverse();
    again
}

/// Bytes that stay for a later read, by its index.
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

    /// Lets go of what is read last, until no more is left than that.
    fn fit(&mut self, room: u128) {
        while let Some(mut last) = self.bytes.last_entry().filter(|_| self.held > room) {
            let goes = (self.held - room).min(*last.get());
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

    /// The fewest bytes by trying every set of copies that could stay after each read.
    fn tried(reads: &[Read], memory: u64) -> u128 {
        type Held = BTreeSet<(usize, usize, u64)>;
        let sizes: BTreeMap<_, _> = reads.iter().map(|read| (read.copy(), read.bytes)).collect();
        let mut states: BTreeMap<Held, u128> = BTreeMap::from([(Held::new(), 0)]);
        for (index, read) in reads.iter().enumerate() {
            let computes = index.checked_sub(1).filter(|_| read.beside).map(|before| reads[before].copy());
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
        let read = |&(shard, beside)| Read { task: 0, shard, version: 0, bytes: bytes[shard], beside };
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

    /// Six shards in a circle, with room for four: see the test of the simulator that finds the same.
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
