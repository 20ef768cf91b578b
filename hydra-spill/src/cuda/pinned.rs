//! Page-locked host memory, within its own budget.
//!
//! A card can copy at the full speed of its bus, concurrently with its computations, only between itself and
//! such memory. The system cannot swap it out, so it should be scarcer than other memory, and locking is
//! slow: a freed buffer stays locked for reuse by a buffer of nearly the same size.

use super::driver::{Driver, DriverError};
use crate::{Budget, BudgetError, PinnedMemory, Reservation, SpillError, alloc};
use bytes::Bytes;
use hydra_core::ByteSize;
use std::collections::BTreeMap;
use std::fmt;
use std::mem::size_of_val;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Blocks are multiples of a page.
const PAGE: usize = 4096;

/// An idle block is reused if the request takes at least this part of it minus one: seven eighths.
const SPARE_PART: usize = 8;

/// The owner of locked memory that is not in use.
const IDLE: &str = "idle page-locked buffers";

/// An error of allocating page-locked memory.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum PinnedError {
    /// The budget of page-locked memory is used up.
    #[error("no page-locked memory is left; `--pinned-memory` sets its limit")]
    Budget {
        #[from]
        source: BudgetError,
    },
    /// The system did not lock the pages, although the budget allows it.
    #[error(
        "the system did not page-lock {} for `{owner}`, with {} already locked: raise its limit of locked \
         memory (`ulimit -l`, or the memlock and memory limits of the container), free memory of the machine, \
         or give a `--pinned-memory` below {}",
        ByteSize(*requested), ByteSize(*locked), ByteSize(*requested + *locked)
    )]
    System {
        /// The bytes to lock.
        requested: u64,
        /// The bytes that are already locked.
        locked: u64,
        owner: String,
        source: DriverError,
    },
}

impl From<PinnedError> for SpillError {
    fn from(error: PinnedError) -> Self {
        Self::Setup(error.into())
    }
}

/// Page-locked memory of this machine, for all its cards. Clones share it.
#[derive(Clone, Debug)]
pub struct PinnedPool {
    shelf: Arc<Shelf>,
}

impl PinnedPool {
    /// Returns a pool that locks at most the bytes of `budget`; nothing is locked yet.
    pub fn new(driver: Arc<dyn Driver>, budget: Budget) -> Self {
        Self { shelf: Arc::new(Shelf { driver, budget, state: Mutex::default() }) }
    }

    /// Returns a buffer of `len` bytes for `owner`, aligned to the page size. Its contents are those last
    /// written to that memory.
    ///
    /// # Errors
    /// [`PinnedError::Budget`] if the budget has too few free bytes, [`PinnedError::System`] if the system
    /// locks no more.
    pub fn take(&self, len: usize, owner: &str) -> Result<PinnedBuffer, PinnedError> {
        let block = match len {
            0 => None,
            _ => Some(self.shelf.block(whole_pages(len), owner)?),
        };
        Ok(PinnedBuffer { block, len, home: self.shelf.clone() })
    }

    /// Copies these floats for `owner`. Errors are those of [`take`](Self::take).
    pub fn floats(&self, values: &[f32], owner: &str) -> Result<PinnedFloats, PinnedError> {
        let mut buffer = self.take(size_of_val(values), owner)?;
        buffer.copy_from_slice(bytemuck::cast_slice(values));
        Ok(PinnedFloats { buffer })
    }

    /// Returns whether all of these bytes are in memory that this pool locked.
    pub fn contains(&self, bytes: &[u8]) -> bool {
        bytes.is_empty() || self.shelf.state().contains(bytes.as_ptr().addr(), bytes.len())
    }

    /// The budget.
    pub fn budget(&self) -> &Budget {
        &self.shelf.budget
    }

    /// Unlocks all idle memory.
    #[cfg(test)]
    fn trim(&self) {
        while self.shelf.free_one() {}
    }
}

fn whole_pages(len: usize) -> usize {
    // More than any memory, so every budget refuses it.
    len.checked_next_multiple_of(PAGE).unwrap_or(usize::MAX)
}

/// The state of a pool, to which every buffer returns.
#[derive(Debug)]
struct Shelf {
    driver: Arc<dyn Driver>,
    budget: Budget,
    state: Mutex<PoolState>,
}

#[derive(Debug, Default)]
struct PoolState {
    /// All locked memory: address and size.
    ranges: BTreeMap<usize, usize>,
    /// Blocks for reuse, the oldest first.
    idle: Vec<Block>,
    /// The reservation of all idle memory; `None` before there was any.
    reservation: Option<Reservation>,
}

/// Locked memory, idle or in a buffer.
#[derive(Debug)]
struct Block {
    memory: NonNull<u8>,
    size: usize,
    /// The bytes in the budget; those of an idle block are in the reservation of all idle blocks.
    reservation: Option<Reservation>,
}

// SAFETY: a block is the only owner of its memory, which is ordinary memory to the processor; a shared block
// is only read.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Shelf {
    fn state(&self) -> MutexGuard<'_, PoolState> {
        // Related changes cannot be interrupted by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn block(&self, size: usize, owner: &str) -> Result<Block, PinnedError> {
        if let Some(block) = self.reuse(size, owner) {
            return Ok(block);
        }
        let reservation = self.reserve(size, owner)?;
        // Locking is slow, and the channels query the locked ranges in the meantime.
        let memory = self.lock_pages(size, owner)?;
        alloc::with_tag(None, || self.state().ranges.insert(memory.as_ptr().addr(), size));
        Ok(Block { memory, size, reservation: Some(reservation) })
    }

    /// Takes the smallest idle block that is large enough and not much larger.
    fn reuse(&self, size: usize, owner: &str) -> Option<Block> {
        let mut state = self.state();
        let fits = |block: &Block| size <= block.size && block.size - size <= block.size / SPARE_PART;
        let candidates = state.idle.iter().enumerate().filter(|(_, block)| fits(block));
        let (index, _) = candidates.min_by_key(|(_, block)| block.size)?;
        let mut block = state.unshelve(index);
        drop(state);
        // The bytes stay reserved, and pass to the new owner. A reservation of zero bytes is never refused.
        block.reservation = merged(self.budget.try_reserve(0, owner), block.reservation.take());
        Some(block)
    }

    /// Reserves memory in the budget, freeing idle blocks as needed.
    fn reserve(&self, size: usize, owner: &str) -> Result<Reservation, BudgetError> {
        loop {
            match self.budget.reserve(size as u64, owner) {
                Ok(reservation) => return Ok(reservation),
                Err(refused) if size as u64 > self.budget.capacity() => return Err(refused),
                Err(refused) => {
                    // A request that does not fit even then is refused before anything is unlocked for it.
                    let idle = self.state().reservation.as_ref().map_or(0, Reservation::bytes);
                    if self.budget.available() + idle < size as u64 || !self.free_one() {
                        return Err(refused);
                    }
                }
            }
        }
    }

    /// Locks pages, freeing idle blocks if the system has too few.
    fn lock_pages(&self, size: usize, owner: &str) -> Result<NonNull<u8>, PinnedError> {
        loop {
            match self.driver.lock_pages(size) {
                Ok(memory) => return Ok(memory),
                Err(source) => {
                    if !self.free_one() {
                        let locked = self.state().ranges.values().sum::<usize>() as u64;
                        let owner = owner.to_owned();
                        return Err(PinnedError::System { requested: size as u64, locked, owner, source });
                    }
                }
            }
        }
    }

    /// Frees the oldest idle block, if there is one.
    fn free_one(&self) -> bool {
        let mut state = self.state();
        if state.idle.is_empty() {
            return false;
        }
        let block = state.unshelve(0);
        state.ranges.remove(&block.memory.as_ptr().addr());
        // Freeing may wait for the card, during which others must not wait for the lock.
        drop(state);
        self.free(block);
        true
    }

    fn free(&self, block: Block) {
        // SAFETY: the block came from this driver, and its last user has dropped it: copies hold their
        // buffers until they are over.
        let freed = unsafe { self.driver.unlock_pages(block.memory) };
        // A driver that cannot free has failed as a whole, and every copy reports that. Memory that it does
        // not free is freed with the process.
        drop(freed);
    }

    fn shelve(&self, mut block: Block) {
        let mut state = self.state();
        let all = state.reservation.take().or_else(|| self.budget.try_reserve(0, IDLE));
        state.reservation = merged(all, block.reservation.take());
        // The list's own memory is charged to the host, regardless of the thread that drops the buffer.
        alloc::with_tag(None, || state.idle.push(block));
    }
}

/// Merges both, with the owner of the first one.
fn merged(into: Option<Reservation>, other: Option<Reservation>) -> Option<Reservation> {
    match (into, other) {
        (Some(mut all), Some(other)) => {
            all.merge(other);
            Some(all)
        }
        (one, other) => one.or(other),
    }
}

impl PoolState {
    fn contains(&self, start: usize, len: usize) -> bool {
        let before = self.ranges.range(..=start).next_back();
        before.is_some_and(|(at, size)| (start - at).checked_add(len).is_some_and(|end| end <= *size))
    }

    /// Takes an idle block with its reservation.
    fn unshelve(&mut self, index: usize) -> Block {
        let mut block = self.idle.remove(index);
        block.reservation = self.reservation.as_mut().map(|reservation| reservation.split(block.size as u64));
        block
    }
}

impl Drop for Shelf {
    fn drop(&mut self) {
        // Every buffer holds a reference to this state, so all blocks are idle now.
        while self.free_one() {}
    }
}

/// Page-locked bytes, aligned to a page. When dropped, they return to their pool for reuse.
#[must_use = "dropping it gives the memory back"]
pub struct PinnedBuffer {
    /// `None` if there are no bytes, and during drop.
    block: Option<Block>,
    len: usize,
    home: Arc<Shelf>,
}

impl PinnedBuffer {
    /// Converts the buffer to shared bytes, which return to the pool when the last clone or slice is dropped.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// The address of the first byte, for writers that alternate with a card and so cannot borrow the whole
    /// buffer.
    pub(super) fn base(&self) -> *mut u8 {
        // Also aligned for an empty buffer.
        self.block.as_ref().map_or(ptr::without_provenance_mut(PAGE), |block| block.memory.as_ptr())
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the block has at least this many bytes, all of them initialized, and this owns it.
        unsafe { std::slice::from_raw_parts(self.base(), self.len) }
    }
}

impl DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.len) }
    }
}

impl AsRef<[u8]> for PinnedBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.home.shelve(block);
        }
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Page-locked floats, such as master weights that a card reads in place.
#[must_use = "dropping it gives the memory back"]
pub struct PinnedFloats {
    buffer: PinnedBuffer,
}

impl Deref for PinnedFloats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        bytemuck::cast_slice(&self.buffer)
    }
}

impl DerefMut for PinnedFloats {
    fn deref_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(&mut self.buffer)
    }
}

impl PinnedMemory for PinnedFloats {}

impl fmt::Debug for PinnedFloats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{FakeDriver, Pace};
    use super::*;
    use proptest::prelude::*;

    fn pool(pages: u64) -> (FakeDriver, PinnedPool) {
        let driver = FakeDriver::new(Pace::AtOnce);
        let budget = Budget::new("page-locked memory", ByteSize(pages * PAGE as u64));
        (driver.clone(), PinnedPool::new(Arc::new(driver), budget))
    }

    #[test]
    fn buffers_are_aligned_hold_what_is_written_and_are_known() {
        let (_driver, pool) = pool(64);
        for len in [0, 1, 4095, 4096, 4097, 100_003] {
            let mut buffer = pool.take(len, "task 1").unwrap();
            assert_eq!((buffer.len(), buffer.as_ptr().addr() % PAGE), (len, 0));
            buffer.iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
            assert!(pool.contains(&buffer) && (len == 0 || pool.contains(&buffer[len - 1..])));
            let bytes = buffer.into_bytes();
            let slice = bytes.slice(len / 2..);
            drop(bytes);
            assert!(pool.contains(&slice));
            assert!(slice.iter().enumerate().all(|(i, byte)| *byte == (i + len / 2) as u8));
        }
        let elsewhere = vec![0_u8; 10];
        assert!(!pool.contains(&elsewhere) && pool.contains(&elsewhere[..0]));
    }

    #[test]
    fn a_range_that_leaves_its_block_is_not_contained() {
        let (_driver, pool) = pool(8);
        let one = pool.take(2 * PAGE, "task 1").unwrap();
        let start = one.as_ptr().addr();
        let contains = |at, len| pool.shelf.state().contains(at, len);
        assert!(contains(start, 2 * PAGE) && contains(start + 5, 2 * PAGE - 5));
        assert!(!contains(start, 2 * PAGE + 1) && !contains(start + 2 * PAGE, 1) && !contains(start - 1, 2));
        assert!(!contains(start + 1, usize::MAX));
    }

    #[test]
    fn freed_memory_is_locked_once_and_charged_to_who_uses_it() {
        let (driver, pool) = pool(4);
        let first = pool.take(3 * PAGE - 5, "a").unwrap().into_bytes();
        let address = first.as_ptr();
        let clone = first.clone();
        drop(first);
        assert_eq!((driver.locked(), pool.budget().used()), (3 * PAGE, 3 * PAGE as u64));
        drop(clone);
        assert_eq!((driver.locked(), driver.lockings()), (3 * PAGE, 1), "it is kept for reuse");
        let refused = pool.take(5 * PAGE, "b").unwrap_err();
        assert!(matches!(refused, PinnedError::Budget { source: BudgetError::Refused { .. } }));
        let again = pool.take(3 * PAGE, "b").unwrap();
        assert_eq!((again.as_ptr(), driver.lockings()), (address, 1));
        let PinnedError::Budget { source } = pool.take(2 * PAGE, "c").unwrap_err() else { panic!() };
        let text = source.to_string();
        assert!(text.contains("`c` needs 8.00 KiB of `page-locked memory`"), "{text}");
        assert!(text.contains("held by `b` (12.00 KiB):"), "{text}");
        drop(again);
        // No block of this size is idle, and the budget has no space for it in addition to the idle one.
        let other = pool.take(2 * PAGE, "c").unwrap();
        assert_eq!((driver.locked(), driver.lockings(), pool.budget().used()), (2 * PAGE, 2, 8192));
        drop(pool);
        assert_eq!(driver.locked(), 2 * PAGE, "a buffer outlives its pool");
        drop(other);
        assert_eq!(driver.locked(), 0);
    }

    #[test]
    fn the_systems_limit_is_put_into_words() {
        let (driver, pool) = pool(100);
        driver.limit_pages(8 * PAGE);
        let held = pool.take(5 * PAGE, "a").unwrap();
        drop(pool.take(2 * PAGE, "b").unwrap());
        let error = pool.take(4 * PAGE, "masters of task 3").unwrap_err();
        assert_eq!(
            error.to_string(),
            "the system did not page-lock 16.00 KiB for `masters of task 3`, with 20.00 KiB already locked: \
             raise its limit of locked memory (`ulimit -l`, or the memlock and memory limits of the container), \
             free memory of the machine, or give a `--pinned-memory` below 36.00 KiB"
        );
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.starts_with("cuMemHostAlloc failed with CUDA_ERROR_OUT_OF_MEMORY:"), "{cause}");
        assert_eq!(pool.budget().used(), 5 * PAGE as u64, "refused memory is not charged");
        let rest = pool.take(3 * PAGE, "c").unwrap();
        drop((held, rest));
        pool.trim();
        assert_eq!((driver.locked(), pool.budget().used()), (0, 0));
    }

    #[test]
    fn floats_are_those_that_were_given_also_where_others_wrote() {
        let (_driver, pool) = pool(4);
        pool.take(100, "a").unwrap().fill(7);
        let given: Vec<f32> = (0..25).map(|i| i as f32 / 4.0).collect();
        let mut floats = pool.floats(&given, "b").unwrap();
        assert_eq!(*floats, given[..]);
        floats[3] = -1.5;
        let bytes: &[u8] = bytemuck::cast_slice(&floats);
        assert_eq!((bytes.len(), bytemuck::cast_slice::<u8, f32>(bytes)[3]), (100, -1.5));
        let mut same = pool.floats(&given, "c").unwrap();
        assert_ne!(*floats, *same);
        same[3] = -1.5;
        assert_eq!(*floats, *same);
        assert_eq!(pool.floats(&[], "d").unwrap().len(), 0);
        assert!(pool.floats(&[0.0; 1 << 15], "e").is_err());
    }

    #[test]
    fn threads_never_get_the_same_memory() {
        let (_driver, pool) = pool(24);
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..500_usize {
                        let Ok(mut buffer) = pool.take(1 + round * 37 % (9 * PAGE), "thread") else {
                            continue;
                        };
                        buffer.fill(thread);
                        assert!(pool.contains(&buffer));
                        assert!(buffer.iter().all(|byte| *byte == thread));
                    }
                });
            }
        });
        pool.trim();
        assert_eq!(pool.budget().used(), 0);
    }

    proptest! {
        #[test]
        fn what_is_locked_is_what_is_charged_and_stays_within_the_budget(
            sizes in prop::collection::vec((1..7 * PAGE, any::<prop::sample::Index>(), any::<bool>()), 1..60)
        ) {
            let (driver, pool) = pool(16);
            let mut held: Vec<PinnedBuffer> = Vec::new();
            for (len, index, release) in sizes {
                if release && !held.is_empty() {
                    drop(held.swap_remove(index.index(held.len())));
                } else if let Ok(buffer) = pool.take(len, "someone") {
                    held.push(buffer);
                }
                let in_use: usize = held.iter().map(|buffer| buffer.len()).sum();
                prop_assert_eq!(driver.locked() as u64, pool.budget().used());
                prop_assert!(pool.budget().used() <= pool.budget().capacity() && driver.locked() >= in_use);
            }
            held.clear();
            pool.trim();
            prop_assert_eq!((driver.locked(), pool.budget().used()), (0, 0));
        }
    }
}
