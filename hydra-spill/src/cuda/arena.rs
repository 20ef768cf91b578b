//! Where in one allocation on a card promotions go, and when.
//!
//! Placement has two ends: a range goes to the bottom if there is room, else to the top, else into the smallest
//! hole that takes it. With two ranges alive at a time, one computed on and one brought in, each is at an end
//! of its own, and so two always fit that fit together, whatever came before them.
//!
//! A range may be written anew when its [`Lease`] is dropped and every [`Reading`] of it is fenced:
//!
//! ```text
//! free --place--> leased --read--> leased, n readings --fenced--> leased
//!   ^                |                     | drop of the lease       |
//!   |                v                     v                         |
//!   +---------- drop of the lease     n readings --fenced----------->+
//! ```
//!
//! A reading that is dropped without its fence, as by a panic half way through a shard, keeps the range until
//! the arena is told of a later fence, for the card may read it until then.

use crate::{Monitor, StdMonitor};
use hydra_core::ByteSize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Ranges begin at multiples of this, in bytes, which suits every kernel and copy.
pub const ARENA_ALIGN: u64 = 512;

/// There is no hole of a size in an arena.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the arena has no hole of {}: the largest has {} of {}; use memory outside of it, or wait for a range",
    ByteSize(*requested), ByteSize(*largest), ByteSize(*capacity)
)]
pub struct ArenaFull {
    /// The bytes that were asked for.
    pub requested: u64,
    /// The bytes of the largest hole.
    pub largest: u64,
    /// The bytes of the arena.
    pub capacity: u64,
}

/// Where each of several parts begins in one range, and how long the range is.
pub fn offsets(parts: impl IntoIterator<Item = u64>) -> (Vec<u64>, u64) {
    let mut end = 0_u64;
    let place = |part: u64| {
        let start = end;
        end = start.saturating_add(rounded(part));
        start
    };
    let starts = parts.into_iter().map(place).collect();
    (starts, end)
}

fn rounded(len: u64) -> u64 {
    len.checked_next_multiple_of(ARENA_ALIGN).unwrap_or(u64::MAX)
}

/// The ranges of one allocation. It knows no address and touches no memory. Clones are the same arena.
pub struct Arena<M: Monitor = StdMonitor> {
    cell: Arc<M::Cell<Ranges>>,
    capacity: u64,
}

/// The right to fill a range and to read it, until this is dropped.
#[must_use = "the range is free again when the lease is dropped"]
pub struct Lease<M: Monitor = StdMonitor> {
    cell: Arc<M::Cell<Ranges>>,
    start: u64,
    len: u64,
}

/// Work of the card that reads a range and may not be over. It keeps the range, also from its own lease's
/// successors, until it is [`fenced`](Self::fenced).
#[must_use = "a reading that is dropped without its fence keeps the range until the arena's next fence"]
pub struct Reading<M: Monitor = StdMonitor> {
    cell: Arc<M::Cell<Ranges>>,
    start: u64,
    fenced: bool,
}

impl Arena {
    /// An arena over so many bytes, all free; what is over a multiple of [`ARENA_ALIGN`] is not used.
    pub fn new(capacity: u64) -> Self {
        Self::with_monitor(capacity)
    }
}

impl<M: Monitor> Clone for Arena<M> {
    fn clone(&self) -> Self {
        Self { cell: self.cell.clone(), capacity: self.capacity }
    }
}

impl<M: Monitor> Arena<M> {
    /// As [`Arena::new`], over the monitor `M`.
    pub fn with_monitor(capacity: u64) -> Self {
        let capacity = capacity - capacity % ARENA_ALIGN;
        Self { cell: Arc::new(M::guard(Ranges { capacity, held: BTreeMap::new() })), capacity }
    }

    /// A range of `len` bytes.
    ///
    /// # Errors
    /// [`ArenaFull`] if no hole is large enough.
    pub fn place(&self, len: u64) -> Result<Lease<M>, ArenaFull> {
        let placed = M::enter(&self.cell, |ranges| ranges.place(len).ok_or_else(|| ranges.full(len)));
        placed.map(|start| self.lease(start, len))
    }

    /// Like [`place`](Self::place), but waits until there is a hole. Whoever holds all ranges of an arena
    /// waits for ever.
    ///
    /// # Errors
    /// [`ArenaFull`], at once, if the whole arena is too small.
    pub fn place_when_free(&self, len: u64) -> Result<Lease<M>, ArenaFull> {
        let placed = M::wait_for(&self.cell, |ranges| match rounded(len) > ranges.capacity {
            true => Some(Err(ranges.full(len))),
            false => ranges.place(len).map(Ok),
        });
        placed.map(|start| self.lease(start, len))
    }

    fn lease(&self, start: u64, len: u64) -> Lease<M> {
        Lease { cell: self.cell.clone(), start, len }
    }

    /// Says that everything that the card was given before is over: ranges of dropped leases whose readings
    /// were dropped without a fence are free again. Readings that are still held keep theirs.
    pub fn fenced(&self) {
        M::enter(&self.cell, |ranges| ranges.held.retain(|_, held| held.after_fence()));
    }

    /// The bytes of the arena.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The bytes that are not free.
    pub fn used(&self) -> u64 {
        M::enter(&self.cell, |ranges| ranges.held.values().map(|held| held.size).sum())
    }
}

impl<M: Monitor> Lease<M> {
    /// The first byte's offset in the arena.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// The bytes of the range.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Notes work of the card that reads the range: from before it is enqueued until it is over.
    pub fn read(&self) -> Reading<M> {
        M::enter(&self.cell, |ranges| {
            if let Some(held) = ranges.held.get_mut(&self.start) {
                held.readings += 1;
            }
        });
        Reading { cell: self.cell.clone(), start: self.start, fenced: false }
    }
}

impl<M: Monitor> Drop for Lease<M> {
    fn drop(&mut self) {
        M::enter(&self.cell, |ranges| ranges.change(self.start, |held| held.leased = false));
    }
}

impl<M: Monitor> Reading<M> {
    /// Says that the card is done with it.
    pub fn fenced(mut self) {
        self.fenced = true;
    }
}

impl<M: Monitor> Drop for Reading<M> {
    fn drop(&mut self) {
        let fenced = self.fenced;
        M::enter(&self.cell, |ranges| {
            ranges.change(self.start, |held| {
                held.readings -= 1;
                held.unfenced |= !fenced;
            });
        });
    }
}

impl<M: Monitor> fmt::Debug for Arena<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        M::enter(&self.cell, |ranges| f.debug_tuple("Arena").field(ranges).finish())
    }
}

impl<M: Monitor> fmt::Debug for Lease<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("start", &self.start).field("len", &self.len).finish()
    }
}

impl<M: Monitor> fmt::Debug for Reading<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reading").field("start", &self.start).finish()
    }
}

/// What the monitor guards: the ranges that are not free.
#[derive(Debug)]
struct Ranges {
    capacity: u64,
    /// By their first byte.
    held: BTreeMap<u64, Held>,
}

/// A range that is not free.
#[derive(Debug)]
struct Held {
    size: u64,
    leased: bool,
    /// Readings that are alive.
    readings: usize,
    /// Whether a reading ended without a fence, and no fence of the arena has come since.
    unfenced: bool,
}

impl Held {
    fn is_free(&self) -> bool {
        !self.leased && self.readings == 0 && !self.unfenced
    }

    /// Whether it is still held after a fence of the whole card.
    fn after_fence(&mut self) -> bool {
        self.unfenced = false;
        !self.is_free()
    }
}

impl Ranges {
    fn place(&mut self, len: u64) -> Option<u64> {
        // Nothing at all has a place of its own too, so that ranges can be told apart by where they begin.
        let size = rounded(len.max(1));
        let start = self.bottom(size).or_else(|| self.top(size)).or_else(|| self.hole(size))?;
        self.held.insert(start, Held { size, leased: true, readings: 0, unfenced: false });
        Some(start)
    }

    fn bottom(&self, size: u64) -> Option<u64> {
        let end = self.held.keys().next().copied().unwrap_or(self.capacity);
        (size <= end).then_some(0)
    }

    fn top(&self, size: u64) -> Option<u64> {
        let last = self.held.last_key_value().map_or(0, |(start, held)| start + held.size);
        (size <= self.capacity - last).then(|| self.capacity - size)
    }

    /// The smallest that is large enough, the lowest of several.
    fn hole(&self, size: u64) -> Option<u64> {
        let fitting = self.holes().filter(|(_, hole)| size <= *hole);
        fitting.min_by_key(|(_, hole)| *hole).map(|(start, _)| start)
    }

    /// Start and size of each hole, some of them of no size.
    fn holes(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let starts = std::iter::once(0).chain(self.held.iter().map(|(start, held)| start + held.size));
        let ends = self.held.keys().copied().chain([self.capacity]);
        starts.zip(ends).map(|(start, end)| (start, end - start))
    }

    fn full(&self, requested: u64) -> ArenaFull {
        let largest = self.holes().map(|(_, size)| size).max().unwrap_or(0);
        ArenaFull { requested, largest, capacity: self.capacity }
    }

    /// Changes a range, and frees it if nothing keeps it any more.
    fn change(&mut self, start: u64, change: impl FnOnce(&mut Held)) {
        if let Some(held) = self.held.get_mut(&start) {
            change(held);
            if held.is_free() {
                self.held.remove(&start);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::double_buffer::tests::LoomMonitor;
    use loom::cell::UnsafeCell;
    use loom::sync::mpsc::{Receiver, channel};
    use proptest::prelude::*;

    const UNIT: u64 = ARENA_ALIGN;

    fn starts(arena: &Arena, sizes: &[u64]) -> Vec<Lease> {
        sizes.iter().map(|size| arena.place(size * UNIT).unwrap()).collect()
    }

    #[test]
    fn ranges_go_to_the_bottom_then_the_top_then_the_smallest_hole() {
        let arena = Arena::new(10 * UNIT + 100);
        assert_eq!(arena.capacity(), 10 * UNIT);
        let mut held = starts(&arena, &[2, 3, 1, 1]);
        let at: Vec<_> = held.iter().map(|lease| lease.start() / UNIT).collect();
        assert_eq!(at, [0, 7, 2, 3]);
        drop(held.remove(2));
        // Holes of one unit at 2 and of three at 4.
        assert_eq!(arena.place(UNIT - 1).unwrap().start(), 2 * UNIT);
        assert_eq!(arena.place(2 * UNIT).unwrap().start(), 4 * UNIT);
        let full = arena.place(3 * UNIT + 1).unwrap_err();
        assert_eq!(
            full.to_string(),
            "the arena has no hole of 1.50 KiB: the largest has 1.50 KiB of 5.00 KiB; use memory outside of it, \
             or wait for a range"
        );
        assert_eq!((full.requested, full.largest, arena.used()), (3 * UNIT + 1, 3 * UNIT, 6 * UNIT));
        held.clear();
        assert_eq!(arena.place(10 * UNIT).unwrap().len(), 10 * UNIT);
        assert!(arena.place(u64::MAX).is_err() && arena.place_when_free(10 * UNIT + 1).is_err());
        assert_eq!(arena.used(), 0);
    }

    #[test]
    fn parts_of_a_range_are_aligned_and_do_not_overlap() {
        assert_eq!(offsets([]), (vec![], 0));
        assert_eq!(offsets([1, 0, 512, 513]), (vec![0, 512, 512, 1024], 2048));
        assert_eq!(offsets([u64::MAX, 1]).1, u64::MAX, "refused by every arena");
    }

    #[test]
    fn a_range_is_kept_until_its_readings_are_fenced() {
        let arena = Arena::new(UNIT);
        let lease = arena.place(UNIT).unwrap();
        let (one, two) = (lease.read(), lease.read());
        drop(lease);
        one.fenced();
        assert!(arena.place(UNIT).is_err(), "the second reading is not over");
        two.fenced();
        let lease = arena.place(UNIT).unwrap();
        lease.read().fenced();
        assert_eq!(arena.used(), UNIT, "the lease keeps it");
    }

    #[test]
    fn a_lost_reading_keeps_the_range_until_the_next_fence() {
        let arena = Arena::new(UNIT);
        let lease = arena.place(UNIT).unwrap();
        drop(lease.read());
        let held = lease.read();
        drop(lease);
        arena.fenced();
        assert!(arena.place(UNIT).is_err(), "a reading that began before the fence may go on");
        drop(held);
        assert!(arena.place(UNIT).is_err());
        arena.fenced();
        assert_eq!(arena.place(UNIT).unwrap().start(), 0);
        arena.fenced();
        let lease = arena.place(UNIT).unwrap();
        drop(lease.read());
        arena.fenced();
        assert_eq!(arena.used(), UNIT, "a fence takes no lease away");
        drop(lease);
        assert_eq!(arena.used(), 0);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Place(u64),
        Release(prop::sample::Index),
        Read(prop::sample::Index),
        EndReading(prop::sample::Index, bool),
        Fence,
    }

    fn op() -> impl Strategy<Value = Op> {
        let at = any::<prop::sample::Index>;
        prop_oneof![
            5 => (0..9 * UNIT).prop_map(Op::Place),
            3 => at().prop_map(Op::Release),
            2 => at().prop_map(Op::Read),
            2 => (at(), any::<bool>()).prop_map(|(i, fenced)| Op::EndReading(i, fenced)),
            1 => Just(Op::Fence),
        ]
    }

    /// What keeps a range, as the tests remember it.
    #[derive(Default)]
    struct Keeping {
        leases: Vec<Lease>,
        readings: Vec<(Reading, u64)>,
        lost: Vec<(u64, u64)>,
    }

    impl Keeping {
        fn apply(&mut self, op: Op, arena: &Arena) {
            match op {
                Op::Place(len) => match arena.place(len) {
                    Ok(lease) => self.check_new(lease, arena.capacity()),
                    Err(full) => assert!(full.largest < rounded(len.max(1))),
                },
                Op::Release(i) if !self.leases.is_empty() => {
                    drop(self.leases.swap_remove(i.index(self.leases.len())));
                }
                Op::Read(i) if !self.leases.is_empty() => {
                    let lease = i.get(&self.leases);
                    self.readings.push((lease.read(), lease.len()));
                }
                Op::EndReading(i, fenced) if !self.readings.is_empty() => {
                    let (reading, len) = self.readings.swap_remove(i.index(self.readings.len()));
                    match fenced {
                        true => reading.fenced(),
                        false => self.lost.push((reading.start, len)),
                    }
                }
                Op::Fence => {
                    arena.fenced();
                    self.lost.clear();
                }
                _ => {}
            }
        }

        fn ranges(&self) -> Vec<(u64, u64)> {
            let leases = self.leases.iter().map(|lease| (lease.start(), lease.len()));
            let readings = self.readings.iter().map(|(reading, len)| (reading.start, *len));
            let mut ranges: Vec<_> = leases.chain(readings).chain(self.lost.iter().copied()).collect();
            ranges.sort();
            ranges.dedup();
            ranges
        }

        fn check_new(&mut self, lease: Lease, capacity: u64) {
            let (start, size) = (lease.start(), rounded(lease.len().max(1)));
            assert!(start.is_multiple_of(ARENA_ALIGN) && start + size <= capacity);
            for (other, len) in self.ranges() {
                assert!(start + size <= other || other + len.max(1) <= start, "{start} and {other}");
            }
            self.leases.push(lease);
        }

        fn used(&self) -> u64 {
            self.ranges().iter().map(|(_, len)| rounded((*len).max(1))).sum()
        }
    }

    proptest! {
        #[test]
        fn ranges_lie_inside_apart_and_are_all_freed(ops in prop::collection::vec(op(), 0..120)) {
            let arena = Arena::new(20 * UNIT + 17);
            let mut keeping = Keeping::default();
            for op in ops {
                keeping.apply(op, &arena);
                prop_assert_eq!(arena.used(), keeping.used());
            }
            drop(keeping);
            arena.fenced();
            prop_assert_eq!(arena.used(), 0);
            prop_assert!(arena.place(20 * UNIT).is_ok());
        }

        // With no more than two alive at a time, what fits together always fits.
        #[test]
        fn two_promotions_that_fit_together_always_fit(
            ops in prop::collection::vec((1..=20 * UNIT, any::<bool>()), 1..60)
        ) {
            let arena = Arena::new(20 * UNIT);
            let mut held: Vec<Lease> = Vec::new();
            for (len, which) in ops {
                if held.len() == 2 {
                    drop(held.remove(usize::from(which)));
                }
                let beside: u64 = held.iter().map(|lease| rounded(lease.len())).sum();
                let placed = arena.place(len);
                prop_assert_eq!(placed.is_ok(), rounded(len) + beside <= arena.capacity());
                held.extend(placed);
            }
        }
    }

    type Model = Arena<LoomMonitor>;

    /// The card's memory: one range. The model checker reports whoever touches it while another writes it, or
    /// without an order between the two.
    struct Card(UnsafeCell<u64>);

    // SAFETY: the model checker watches that the cell is shared without a race; that is what is tested.
    unsafe impl Sync for Card {}

    impl Card {
        fn new() -> Arc<Self> {
            Arc::new(Self(UnsafeCell::new(0)))
        }

        fn fill(&self, value: u64) {
            // SAFETY: the checker has made sure that nobody else has the cell.
            self.0.with_mut(|cell| unsafe { *cell = value });
        }

        fn check(&self, value: u64) {
            // SAFETY: the checker has made sure that nobody writes the cell.
            self.0.with(|cell| assert_eq!(unsafe { *cell }, value));
        }
    }

    /// How many promotions there are in a model; the second takes the place of the first.
    const ROUNDS: u64 = 2;

    /// Brings in the payloads, one after another, as soon as there is a place for each.
    fn copier(
        arena: &Model,
        card: &Arc<Card>,
    ) -> (Receiver<Lease<LoomMonitor>>, loom::thread::JoinHandle<()>) {
        let (send, receive) = channel();
        let (arena, card) = (arena.clone(), card.clone());
        let copier = loom::thread::spawn(move || {
            for round in 1..=ROUNDS {
                let lease = arena.place_when_free(UNIT).unwrap();
                card.fill(round);
                send.send(lease).unwrap();
            }
        });
        (receive, copier)
    }

    #[test]
    fn model_a_range_is_not_refilled_while_someone_holds_it() {
        loom::model(|| {
            let (arena, card) = (Model::with_monitor(UNIT), Card::new());
            let (promoted, copier) = copier(&arena, &card);
            let lease = loom::sync::Arc::new(promoted.recv().unwrap());
            let (held, taken) = (lease.clone(), card.clone());
            // Takes results down that lie in the range, while the shard's own holder lets go of it.
            let taker = loom::thread::spawn(move || {
                taken.check(1);
                drop(held);
            });
            let reading = lease.read();
            card.check(1);
            reading.fenced();
            drop(lease);
            drop(promoted.recv().unwrap());
            card.check(2);
            copier.join().unwrap();
            taker.join().unwrap();
            assert_eq!(arena.used(), 0);
        });
    }

    #[test]
    fn model_a_range_is_not_refilled_before_the_fence_of_what_reads_it() {
        let mut model = loom::model::Builder::new();
        // All interleavings of three threads and a card take too long; races show with few preemptions.
        model.preemption_bound = Some(4);
        model.check(|| {
            let (arena, card) = (Model::with_monitor(UNIT), Card::new());
            let (promoted, copier) = copier(&arena, &card);
            for round in 1..=ROUNDS {
                let lease = promoted.recv().unwrap();
                let (reading, device) = (lease.read(), card.clone());
                // The card: it computes later than it is asked to, when the lease may be long gone.
                let device = loom::thread::spawn(move || {
                    device.check(round);
                    reading.fenced();
                });
                drop(lease);
                if round == ROUNDS {
                    device.join().unwrap();
                }
            }
            copier.join().unwrap();
            assert_eq!(arena.used(), 0);
        });
    }

    #[test]
    fn model_a_lost_reading_frees_its_range_at_the_next_fence_and_wakes_the_copier() {
        loom::model(|| {
            let (arena, card) = (Model::with_monitor(UNIT), Card::new());
            let (promoted, copier) = copier(&arena, &card);
            let lease = promoted.recv().unwrap();
            drop(lease.read());
            drop(lease);
            card.check(1);
            arena.fenced();
            drop(promoted.recv().unwrap());
            copier.join().unwrap();
            assert_eq!(arena.used(), 0);
        });
    }
}
