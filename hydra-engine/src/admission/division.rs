//! Divides masters between host memory and the disk: a pure function of their sizes.
//!
//! Using masters on the disk takes host memory. All of it is reserved before the run starts, so that no reservation
//! can be refused in the middle. The most that is in use at the same time is
//!
//! - for each device, or each microbatch group in flight if those are fewer, the reads of its promotions: one that is
//!   copied (on a zero-copy link, one that is computed on) and the next one;
//! - one piece of a buffer at the optimizer, which steps, saves and restores one after the other;
//! - a piece of the parameters of one buffer at the writer, which hashes, writes and saves one after the other; the whole
//!   buffer if a task's own writer reads whole buffers. This memory is separate because code of a task may keep hold of
//!   what it reads there; a read that does not fit then fails for that task alone.
//!
//! Initial weights pass through the first two before anything is promoted or stepped: whole parameters, and moments
//! in pieces.
//!
//! The snapshot of a buffer's best parameters is stored with the buffer and counts as part of its masters here.

use hydra_spill::ParamBufferId;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The buffers of a task and their sizes.
#[derive(Clone, Debug)]
pub(crate) struct StoredBuffers {
    /// The bytes that the store holds of each buffer.
    pub masters: Vec<u64>,
    /// The bytes of each buffer that a promotion reads.
    pub promoted: Vec<u64>,
    /// The bytes of each buffer's initial parameters.
    pub first: Vec<u64>,
    /// The bytes of each buffer that the optimizer has in memory at the same time.
    pub stepped: Vec<u64>,
    /// The bytes of each buffer that the writer has in memory at the same time.
    pub written: Vec<u64>,
    /// Whether the initial values of each buffer pass through host memory as `f32` as a whole, although it is stored in a
    /// narrower type.
    pub narrowed: Vec<bool>,
    /// Whether what the writer reads of each buffer takes memory: it is stored in a narrower type alone, or read in place.
    pub narrow: Vec<bool>,
    /// The bytes of each buffer that is read in place; the store holds none of it.
    pub in_place: Vec<u64>,
    /// The buffers that each shard reads.
    pub shards: Vec<Vec<usize>>,
    /// For each buffer, the stored buffer that it shares with other tasks; a shared buffer is stored in one place.
    pub shared: Vec<Option<ParamBufferId>>,
    /// The microbatch groups that can be in flight, each on its own device.
    pub replicas: usize,
    /// True if the masters may be on the disk.
    pub may_leave: bool,
}

impl StoredBuffers {
    /// The largest of `bytes` among the buffers on the disk.
    fn largest(bytes: &[u64], on_disk: &[bool]) -> u64 {
        bytes.iter().zip(on_disk).filter(|(_, on_disk)| **on_disk).map(|(bytes, _)| *bytes).max().unwrap_or(0)
    }

    /// Index, bytes and shared id of each buffer.
    fn buffers(&self) -> impl Iterator<Item = (usize, u64, Option<ParamBufferId>)> {
        let buffers = self.masters.iter().zip(&self.shared).enumerate();
        buffers.map(|(buffer, (bytes, shared))| (buffer, *bytes, *shared))
    }

    /// The buffers shared with other tasks, with the bytes that reading a copy to compare takes.
    pub(super) fn shared(&self) -> impl Iterator<Item = (ParamBufferId, u64)> {
        self.buffers().filter_map(|(buffer, bytes, shared)| Some((shared?, bytes.max(self.first[buffer]))))
    }

    /// The bytes of the unshared buffers.
    pub(super) fn own_bytes(&self) -> u64 {
        self.buffers().filter(|(.., shared)| shared.is_none()).map(|(_, bytes, _)| bytes).sum()
    }

    /// The bytes of the unshared buffers on the disk.
    pub(super) fn own_disk_bytes(&self, on_disk: &[bool]) -> u64 {
        let own = self.buffers().filter(|(buffer, _, shared)| shared.is_none() && on_disk[*buffer]);
        own.map(|(_, bytes, _)| bytes).sum()
    }

    /// The most bytes that one promotion reads from the disk.
    fn promotion(&self, on_disk: &[bool]) -> u64 {
        let read = |shard: &Vec<usize>| -> u64 {
            shard.iter().filter(|buffer| on_disk[**buffer]).map(|buffer| self.promoted[*buffer]).sum()
        };
        self.shards.iter().map(read).max().unwrap_or(0)
    }

    /// The bytes of the largest buffer that is read in place.
    fn largest_in_place(&self) -> u64 {
        self.in_place.iter().copied().max().unwrap_or(0)
    }
}

/// The bytes of all buffers for which `counts` holds of their task and index; shared buffers count once.
fn bytes_once(tasks: &[&StoredBuffers], counts: impl Fn(usize, usize) -> bool) -> u64 {
    let mut seen = BTreeSet::new();
    let buffers =
        tasks.iter().enumerate().flat_map(|(task, of)| of.buffers().map(move |buffer| (task, buffer)));
    let counted = buffers.filter(|(task, (buffer, ..))| counts(*task, *buffer));
    let once = counted.filter(|(_, (.., shared))| shared.is_none_or(|id| seen.insert(id)));
    once.map(|(_, (_, bytes, _))| bytes).sum()
}

/// The bytes of all shared buffers, each counted once.
pub(super) fn shared_bytes(tasks: &[&StoredBuffers]) -> u64 {
    bytes_once(tasks, |task, buffer| tasks[task].shared[buffer].is_some())
}

/// The bytes of the largest buffer that two tasks share: a task that starts after the first one reads its own copy to
/// compare it with the stored one.
pub(super) fn compared_bytes(tasks: &[&StoredBuffers]) -> u64 {
    let mut seen = BTreeSet::new();
    let shared = tasks.iter().flat_map(|task| task.shared());
    shared.filter(|(id, _)| !seen.insert(*id)).map(|(_, bytes)| bytes).max().unwrap_or(0)
}

/// Which masters are in host memory and which are on the disk.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Division {
    /// For each task and buffer, whether it is on the disk.
    pub on_disk: Vec<Vec<bool>>,
    /// Bytes of masters in host memory.
    pub in_memory: u64,
    /// Bytes of masters on the disk.
    pub disk: u64,
    /// Bytes of host memory through which masters on the disk are used.
    pub working: u64,
}

/// The promotions that may read from the disk at the same time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Promoters {
    pub devices: usize,
    /// Promotions of one device whose reads are in host memory at the same time.
    pub each: usize,
    /// Whether buffers that are read in place pass through host memory, one at a time for each device.
    pub stages: bool,
}

impl Division {
    pub(super) fn of(tasks: &[&StoredBuffers], on_disk: Vec<Vec<bool>>, promoters: Promoters) -> Self {
        let all = bytes_once(tasks, |_, _| true);
        let with_disk = || tasks.iter().zip(&on_disk);
        let promotion = with_disk().map(|(task, on_disk)| task.promotion(on_disk)).max().unwrap_or(0);
        let largest = |bytes: fn(&StoredBuffers) -> &[u64]| {
            with_disk().map(|(task, on_disk)| StoredBuffers::largest(bytes(task), on_disk)).max().unwrap_or(0)
        };
        let disk = bytes_once(tasks, |task, buffer| on_disk[task][buffer]);
        // A microbatch group runs on one device at a time.
        let microbatch_groups = tasks.iter().filter(|task| task.may_leave).map(|task| task.replicas).sum();
        let devices = promoters.devices.min(microbatch_groups);
        let promotions = (devices * promoters.each) as u64 * promotion;
        let most = |of: fn(&StoredBuffers) -> u64| tasks.iter().map(|task| of(task)).max().unwrap_or(0);
        let narrowed = most(|task| StoredBuffers::largest(&task.first, &task.narrowed));
        let widened = most(|task| StoredBuffers::largest(&task.written, &task.narrow));
        let in_place = tasks.iter().map(|task| task.largest_in_place()).max().unwrap_or(0);
        let staged = if promoters.stages { promoters.devices as u64 * in_place } else { 0 };
        let promotions = (promotions + staged).max(largest(|task| &task.first)).max(narrowed);
        let working = promotions + largest(|task| &task.stepped) + largest(|task| &task.written).max(widened);
        Self { in_memory: all - disk, disk, working, on_disk }
    }

    /// Bytes of host memory that the division takes.
    pub(crate) fn needed(&self) -> u64 {
        self.in_memory + self.working
    }
}

/// Keeps as many masters in `available` bytes of host memory as fit: tasks in order, buffers in chain order.
///
/// A buffer on the disk takes host memory where it is used, which may be more than its size, so it can be better to
/// keep the largest buffers in memory than the first ones. Each size is tried as the limit for buffers that may go to
/// the disk, and the division with the fewest bytes on the disk is taken.
///
/// # Errors
/// The division that takes the least host memory, if that is more than `available`.
pub(crate) fn divide(
    tasks: &[&StoredBuffers],
    available: u64,
    promoters: Promoters,
) -> Result<Division, Division> {
    let may_leave = tasks.iter().filter(|task| task.may_leave);
    let sizes: BTreeSet<u64> = may_leave.flat_map(|task| &task.masters).copied().collect();
    let limits = sizes.into_iter().chain(std::iter::once(0)).rev();
    let divisions: Vec<Division> =
        limits.map(|limit| with_limit(tasks, limit, available, promoters)).collect();
    let fits = divisions.iter().filter(|division| division.needed() <= available);
    match fits.min_by_key(|division| division.disk) {
        Some(division) => Ok(division.clone()),
        None => Err(divisions.into_iter().min_by_key(Division::needed).unwrap_or_default()),
    }
}

/// Keeps buffers larger than `limit` in host memory, and of the others those that fit next to the largest working
/// memory.
fn with_limit(tasks: &[&StoredBuffers], limit: u64, available: u64, promoters: Promoters) -> Division {
    let leaves = |task: &&StoredBuffers| {
        task.masters.iter().map(|bytes| task.may_leave && *bytes <= limit).collect::<Vec<_>>()
    };
    let mut on_disk: Vec<Vec<bool>> = tasks.iter().map(leaves).collect();
    let most = Division::of(tasks, on_disk.clone(), promoters);
    let mut left = available.saturating_sub(most.needed());
    let mut placed: BTreeMap<ParamBufferId, bool> = BTreeMap::new();
    for (task, on_disk) in tasks.iter().zip(&mut on_disk) {
        for ((_, bytes, shared), on_disk) in task.buffers().zip(on_disk).filter(|(_, on_disk)| **on_disk) {
            match shared.and_then(|shared| placed.get(&shared)) {
                Some(on_disk_too) => *on_disk = *on_disk_too,
                None if bytes <= left => (left, *on_disk) = (left - bytes, false),
                None => {}
            }
            placed.extend(shared.map(|shared| (shared, *on_disk)));
        }
    }
    Division::of(tasks, on_disk, promoters)
}

/// Groups of consecutive buffers that are created together when a task starts. Buffers with `None` stay in host
/// memory, and their group has no limit; buffers with `Some(limit)` only pass through it, and their group has at most
/// `limit` bytes of masters unless it is a single buffer.
pub(crate) fn groups(passing: &[Option<u64>], masters: &[u64]) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut bytes = 0;
    for (buffer, limit) in passing.iter().enumerate() {
        bytes += masters[buffer];
        match groups.last_mut() {
            Some(group) if passing[group.start] == *limit && limit.is_none_or(|limit| bytes <= limit) => {
                group.end += 1;
            }
            _ => {
                bytes = masters[buffer];
                groups.push(buffer..buffer + 1);
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A task of AdamW in `f32`, each buffer a shard.
    fn task(masters: &[u64]) -> StoredBuffers {
        StoredBuffers {
            masters: masters.to_vec(),
            promoted: masters.iter().map(|bytes| bytes / 3).collect(),
            first: masters.iter().map(|bytes| bytes / 3).collect(),
            stepped: masters.to_vec(),
            written: masters.iter().map(|bytes| bytes / 3).collect(),
            narrowed: vec![false; masters.len()],
            narrow: vec![false; masters.len()],
            in_place: vec![0; masters.len()],
            shards: (0..masters.len()).map(|buffer| vec![buffer]).collect(),
            shared: vec![None; masters.len()],
            replicas: 1,
            may_leave: true,
        }
    }

    /// Tasks that share their first buffer.
    fn sharing(tasks: &[&[u64]]) -> Vec<StoredBuffers> {
        let first = ParamBufferId::new(hydra_core::TaskId(0), 0).shared();
        let sharing = |masters: &&[u64]| {
            let mut task = task(masters);
            task.shared[0] = Some(first);
            task
        };
        tasks.iter().map(sharing).collect()
    }

    fn divide(tasks: &[StoredBuffers], available: u64, devices: usize) -> Result<Division, Division> {
        super::divide(
            &tasks.iter().collect::<Vec<_>>(),
            available,
            Promoters { devices, each: 2, stages: false },
        )
    }

    fn shown(division: &Division) -> Vec<String> {
        let letter = |on_disk: &bool| if *on_disk { 'd' } else { 'm' };
        division.on_disk.iter().map(|task| task.iter().map(letter).collect()).collect()
    }

    #[test]
    fn what_fits_stays_first_come_first_served() {
        // On the disk, each takes 30 at the optimizer, 10 at the writer and two promotions of 10.
        let tasks = [task(&[30; 3]), task(&[30; 3])];
        let at = |available| shown(&divide(&tasks, available, 1).unwrap());
        assert_eq!(at(180), ["mmm", "mmm"]);
        assert_eq!(at(179), ["mmm", "ddd"]);
        assert_eq!(at(119), ["mdd", "ddd"]);
        assert_eq!(at(90), ["mdd", "ddd"]);
        assert_eq!(at(89), ["ddd", "ddd"]);
        assert_eq!(at(60), ["ddd", "ddd"]);
        let least = divide(&tasks, 59, 1).unwrap_err();
        assert_eq!((least.needed(), least.working, least.disk), (60, 60, 180));
        assert_eq!(divide(&tasks, 79, 2).unwrap_err().needed(), 80, "two promotions for each device");
        assert_eq!(divide(&tasks[..1], 59, 2).unwrap_err().needed(), 60, "one task is on one device");
    }

    #[test]
    fn groups_of_one_task_promote_on_as_many_devices() {
        let needed = |replicas: usize, devices: usize| {
            let one = StoredBuffers { replicas, ..task(&[30; 3]) };
            Division::of(&[&one], vec![vec![true; 3]], Promoters { devices, each: 1, stages: false }).needed()
        };
        assert_eq!(
            [(1, 3), (2, 3), (4, 3), (2, 1)].map(|(replicas, devices)| needed(replicas, devices)),
            [50, 60, 70, 50]
        );
    }

    #[test]
    fn a_large_buffer_takes_its_parameters_and_a_piece_of_its_masters() {
        let needed = |task: &StoredBuffers, each: usize| {
            Division::of(&[task], vec![vec![true; 3]], Promoters { devices: 1, each, stages: false }).needed()
        };
        // One buffer has 3000 bytes of masters, 30 of them stepped at a time.
        let large = StoredBuffers { stepped: vec![30; 3], ..task(&[30, 3000, 30]) };
        assert_eq!([1, 2].map(|each| needed(&large, each)), [1000 + 30 + 1000, 2000 + 30 + 1000]);
        let narrow = StoredBuffers { promoted: vec![5, 500, 5], ..large };
        assert_eq!([1, 2].map(|each| needed(&narrow, each)), [1000 + 30 + 1000; 2], "first parameters");
    }

    #[test]
    fn a_large_buffer_stays_where_it_costs_less() {
        let tasks = [task(&[30, 300, 30])];
        let division = divide(&tasks, 385, 1).unwrap();
        assert_eq!((shown(&division), division.needed()), (vec!["mmm".to_owned()], 360));
        // All on the disk would take 600; the large one alone leaves no memory for the others.
        assert_eq!(divide(&tasks, 359, 1).unwrap_err().needed(), 360);
        let tasks = [task(&[30, 300, 30, 30, 30, 30])];
        let division = divide(&tasks, 380, 1).unwrap();
        assert_eq!((shown(&division), division.needed()), (vec!["dmdddd".to_owned()], 360));
    }

    #[test]
    fn what_lives_on_a_device_does_not_leave() {
        let tasks = [StoredBuffers { may_leave: false, ..task(&[300]) }, task(&[30; 4])];
        assert_eq!(shown(&divide(&tasks, 419, 1).unwrap()), ["m", "mddd"]);
        assert_eq!(divide(&tasks[..1], 299, 1).unwrap_err().needed(), 300);
    }

    #[test]
    fn what_tasks_have_in_common_counts_once_and_has_one_home() {
        let tasks = sharing(&[&[90, 30], &[90, 30], &[90, 30]]);
        let all: Vec<&StoredBuffers> = tasks.iter().collect();
        assert_eq!((shared_bytes(&all), compared_bytes(&all), compared_bytes(&all[..1])), (90, 90, 0));
        assert_eq!((tasks[0].own_bytes(), tasks[0].shared().collect::<Vec<_>>().len()), (30, 1));
        let at = |available| divide(&tasks, available, 1).unwrap();
        assert_eq!((shown(&at(180)), at(180).needed()), (vec!["mm".to_owned(); 3], 180));
        let some = at(179);
        assert_eq!((shown(&some), some.needed(), some.disk), (vec!["md".to_owned(); 3], 90 + 60, 90));
        // A shared buffer has one place, even where the tasks' other buffers differ in theirs.
        let tasks = sharing(&[&[10, 300][..]; 8]);
        let some = divide(&tasks, 1500, 1).unwrap();
        assert_eq!(shown(&some), [vec!["mm"; 2], vec!["md"; 6]].concat());
        assert_eq!((some.in_memory, some.disk), (10 + 2 * 300, 6 * 300));
        let all_on_disk = divide(&tasks, 0, 1).unwrap_err();
        assert_eq!((all_on_disk.in_memory + all_on_disk.disk, all_on_disk.on_disk.len()), (10 + 8 * 300, 8));
    }

    #[test]
    fn a_promotion_reads_of_its_shard_what_is_on_the_disk() {
        let mut one = task(&[30; 4]);
        one.shards = vec![vec![0, 1], vec![2, 3]];
        let division = divide(&[one], 100, 1).unwrap();
        assert_eq!((division.working, division.disk), (80, 120));
    }

    #[test]
    fn buffers_are_made_in_groups_that_find_room() {
        let on_disk = [None, None, Some(100), Some(100), Some(100), None];
        assert_eq!(groups(&on_disk, &[1, 900, 50, 50, 50, 7]), [0..2, 2..4, 4..5, 5..6]);
        let both = [Some(100), Some(100), Some(60), Some(60)];
        assert_eq!(groups(&both, &[30, 200, 50, 10]), [0..1, 1..2, 2..4]);
        assert!(groups(&[], &[]).is_empty());
    }

    proptest! {
        #[test]
        fn a_division_keeps_to_the_room_or_says_what_is_missing(
            sizes in prop::collection::vec(prop::collection::vec(1_u64..100, 1..6), 1..4),
            available in 0_u64..1500,
            devices in 1_usize..3,
        ) {
            let tasks: Vec<StoredBuffers> = sizes.iter().map(|sizes| task(sizes)).collect();
            let all: u64 = sizes.iter().flatten().sum();
            match divide(&tasks, available, devices) {
                Ok(division) => {
                    prop_assert!(division.needed() <= available);
                    prop_assert_eq!(division.in_memory + division.disk, all);
                    prop_assert!(all > available || division.disk == 0, "what fits stays");
                }
                Err(least) => {
                    prop_assert!(least.needed() > available);
                    prop_assert!(divide(&tasks, least.needed(), devices).is_ok(), "what is missing suffices");
                }
            }
        }
    }
}
