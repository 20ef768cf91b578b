//! Ranges for promotions in one allocation on a card.
//!
//! A range is placed at the bottom if it fits, else at the top, else into the smallest sufficient hole. With
//! two live ranges, one computed on and one uploaded, each is at its own end, so two ranges that fit together
//! always fit, regardless of earlier ones.
//!
//! A range may be overwritten after its [`Lease`] is dropped. A caller whose range is read by the card keeps
//! the lease until the card has finished: the arena does not know about the card.

use crate::{Monitor, StdMonitor};
use hydra_core::ByteSize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// The alignment of ranges in bytes, which suffices for every kernel and copy.
pub const ARENA_ALIGN: u64 = 512;

/// No hole in an arena is large enough.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the arena has no hole of {}: the largest has {} of {}; use memory outside of it",
    ByteSize(*requested), ByteSize(*largest), ByteSize(*capacity)
)]
pub struct ArenaFull {
    /// The requested bytes.
    pub requested: u64,
    /// The bytes of the largest hole.
    pub largest: u64,
    /// The bytes of the arena.
    pub capacity: u64,
}

/// Returns the start of each part in one range, and the length of the range.
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

/// The ranges of one allocation. It knows no address and accesses no memory. Clones share the arena.
pub struct Arena<M: Monitor = StdMonitor> {
    cell: Arc<M::Cell<Ranges>>,
    capacity: u64,
}

/// The exclusive use of a range until this is dropped.
#[must_use = "the range is free again when the lease is dropped"]
pub struct Lease<M: Monitor = StdMonitor> {
    cell: Arc<M::Cell<Ranges>>,
    start: u64,
    len: u64,
}

impl Arena {
    /// Returns an empty arena over this many bytes; a remainder beyond a multiple of [`ARENA_ALIGN`] is not
    /// used.
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

    /// Allocates a range of `len` bytes.
    ///
    /// # Errors
    /// [`ArenaFull`] if no hole is large enough.
    pub fn place(&self, len: u64) -> Result<Lease<M>, ArenaFull> {
        let placed = M::enter(&self.cell, |ranges| ranges.place(len).ok_or_else(|| ranges.full(len)));
        placed.map(|start| self.lease(start, len))
    }

    /// Like [`place`](Self::place), but waits until there is a hole, as the models of the tests do. A caller
    /// that holds all ranges of an arena waits forever.
    ///
    /// # Errors
    /// [`ArenaFull`], without waiting, if the whole arena is too small.
    #[cfg(test)]
    pub(super) fn place_when_free(&self, len: u64) -> Result<Lease<M>, ArenaFull> {
        let placed = M::wait_for(&self.cell, |ranges| match rounded(len) > ranges.capacity {
            true => Some(Err(ranges.full(len))),
            false => ranges.place(len).map(Ok),
        });
        placed.map(|start| self.lease(start, len))
    }

    fn lease(&self, start: u64, len: u64) -> Lease<M> {
        Lease { cell: self.cell.clone(), start, len }
    }

    /// The bytes of the arena.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The bytes that are in use.
    #[cfg(test)]
    pub fn used(&self) -> u64 {
        M::enter(&self.cell, |ranges| ranges.held.values().sum())
    }
}

impl<M: Monitor> Lease<M> {
    /// The first byte's offset in the arena.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// The bytes of the range.
    #[cfg(test)]
    pub fn len(&self) -> u64 {
        self.len
    }
}

impl<M: Monitor> Drop for Lease<M> {
    fn drop(&mut self) {
        M::enter(&self.cell, |ranges| ranges.held.remove(&self.start));
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

/// The state that the monitor guards: the ranges in use.
#[derive(Debug)]
struct Ranges {
    capacity: u64,
    /// The size of each range, by its start.
    held: BTreeMap<u64, u64>,
}

impl Ranges {
    fn place(&mut self, len: u64) -> Option<u64> {
        // An empty range also occupies space, so that every range has a unique start.
        let size = rounded(len.max(1));
        let start = self.bottom(size).or_else(|| self.top(size)).or_else(|| self.hole(size))?;
        self.held.insert(start, size);
        Some(start)
    }

    fn bottom(&self, size: u64) -> Option<u64> {
        let end = self.held.keys().next().copied().unwrap_or(self.capacity);
        (size <= end).then_some(0)
    }

    fn top(&self, size: u64) -> Option<u64> {
        let last = self.held.last_key_value().map_or(0, |(start, size)| start + size);
        (size <= self.capacity - last).then(|| self.capacity - size)
    }

    /// Returns the smallest sufficient hole, and the lowest of several.
    fn hole(&self, size: u64) -> Option<u64> {
        let fitting = self.holes().filter(|(_, hole)| size <= *hole);
        fitting.min_by_key(|(_, hole)| *hole).map(|(start, _)| start)
    }

    /// Returns the start and size of each hole; some are empty.
    fn holes(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let starts = std::iter::once(0).chain(self.held.iter().map(|(start, size)| start + size));
        let ends = self.held.keys().copied().chain([self.capacity]);
        starts.zip(ends).map(|(start, end)| (start, end - start))
    }

    fn full(&self, requested: u64) -> ArenaFull {
        let largest = self.holes().map(|(_, size)| size).max().unwrap_or(0);
        ArenaFull { requested, largest, capacity: self.capacity }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::tests::LoomMonitor;
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
            "the arena has no hole of 1.50 KiB: the largest has 1.50 KiB of 5.00 KiB; use memory outside of it"
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

    #[derive(Clone, Debug)]
    enum Op {
        Place(u64),
        Release(prop::sample::Index),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            5 => (0..9 * UNIT).prop_map(Op::Place),
            3 => any::<prop::sample::Index>().prop_map(Op::Release),
        ]
    }

    fn apply(op: Op, arena: &Arena, leases: &mut Vec<Lease>) {
        match op {
            Op::Place(len) => match arena.place(len) {
                Ok(lease) => {
                    let (start, size) = (lease.start(), rounded(len.max(1)));
                    assert!(start.is_multiple_of(ARENA_ALIGN) && start + size <= arena.capacity());
                    for other in leases.iter() {
                        let end = other.start() + rounded(other.len().max(1));
                        assert!(start + size <= other.start() || end <= start);
                    }
                    leases.push(lease);
                }
                Err(full) => assert!(full.largest < rounded(len.max(1))),
            },
            Op::Release(i) if !leases.is_empty() => drop(leases.swap_remove(i.index(leases.len()))),
            Op::Release(_) => {}
        }
    }

    proptest! {
        #[test]
        fn ranges_lie_inside_apart_and_are_all_freed(ops in prop::collection::vec(op(), 0..120)) {
            let arena = Arena::new(20 * UNIT + 17);
            let mut leases = Vec::new();
            for op in ops {
                apply(op, &arena, &mut leases);
                let used: u64 = leases.iter().map(|lease| rounded(lease.len().max(1))).sum();
                prop_assert_eq!(arena.used(), used);
            }
            leases.clear();
            prop_assert_eq!(arena.used(), 0);
            prop_assert!(arena.place(20 * UNIT).is_ok());
        }

        // With at most two live ranges, ranges that fit together always fit.
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

    /// The card's memory: one range. The model checker reports accesses that are concurrent with a write or
    /// unordered with it.
    struct Card(UnsafeCell<u64>);

    // SAFETY: the model checker verifies that the cell is shared without a race, which is the purpose of the
    // test.
    unsafe impl Sync for Card {}

    impl Card {
        fn new() -> Arc<Self> {
            Arc::new(Self(UnsafeCell::new(0)))
        }

        fn fill(&self, value: u64) {
            // SAFETY: the checker verifies exclusive access to the cell.
            self.0.with_mut(|cell| unsafe { *cell = value });
        }

        fn check(&self, value: u64) {
            // SAFETY: the checker verifies that there is no concurrent write to the cell.
            self.0.with(|cell| assert_eq!(unsafe { *cell }, value));
        }
    }

    /// The number of promotions in a model; the second reuses the range of the first.
    const ROUNDS: u64 = 2;

    /// Uploads the payloads one after another, each as soon as a range is free.
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
            // Downloads results from the range, while the shard's own holder drops it.
            let taker = loom::thread::spawn(move || {
                taken.check(1);
                drop(held);
            });
            card.check(1);
            drop(lease);
            drop(promoted.recv().unwrap());
            card.check(2);
            copier.join().unwrap();
            taker.join().unwrap();
            assert_eq!(arena.used(), 0);
        });
    }

    #[test]
    fn model_a_range_is_not_refilled_before_the_card_has_read_it() {
        let mut model = loom::model::Builder::new();
        // All interleavings of three threads and a card take too long; races appear with few preemptions.
        model.preemption_bound = Some(4);
        model.check(|| {
            let (arena, card) = (Model::with_monitor(UNIT), Card::new());
            let (promoted, copier) = copier(&arena, &card);
            for round in 1..=ROUNDS {
                let lease = promoted.recv().unwrap();
                let device = card.clone();
                // The card: it computes later than requested, and the lease is kept until then.
                let device = loom::thread::spawn(move || {
                    device.check(round);
                    drop(lease);
                });
                if round == ROUNDS {
                    device.join().unwrap();
                }
            }
            copier.join().unwrap();
            assert_eq!(arena.used(), 0);
        });
    }
}
