//! Host memory for decoding images.

use crate::data::DataError;
use hydra_core::ByteSize;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A host memory budget for decoding images, shared by all concurrent decoders. A decoder waits until its image fits;
/// an image larger than the whole budget is an error.
#[derive(Debug)]
pub struct DecodeMemory {
    state: Mutex<CacheState>,
    freed: Condvar,
}

#[derive(Debug)]
struct CacheState {
    limit: u64,
    taken: u64,
    /// The most that one image took.
    largest: u64,
    /// Whether images are decoded again during a run.
    again: bool,
}

/// Memory taken from the budget until this is dropped.
#[derive(Debug)]
pub(super) struct TakenMemory<'a> {
    memory: &'a DecodeMemory,
    bytes: u64,
}

impl DecodeMemory {
    /// A budget of this size.
    pub fn new(limit: ByteSize) -> Self {
        let state = CacheState { limit: limit.bytes(), taken: 0, largest: 0, again: false };
        Self { state: Mutex::new(state), freed: Condvar::new() }
    }

    /// The whole budget in bytes.
    pub(super) fn limit(&self) -> u64 {
        self.lock().limit
    }

    /// Records that images are decoded on every access.
    pub(super) fn needed_again(&self) {
        self.lock().again = true;
    }

    /// Shrinks the budget to what decoding the largest image takes, or to nothing if no image is decoded again, and
    /// returns the new size. Call it after every image has been decoded once.
    pub fn keep_largest(&self) -> ByteSize {
        let mut state = self.lock();
        if state.again {
            state.limit = state.largest;
        }
        ByteSize(if state.again { state.largest } else { 0 })
    }

    /// Rejects a file that takes more than the whole budget; `of` returns its path, and the size of its image if known.
    pub(super) fn check(
        &self,
        needed: u64,
        of: impl FnOnce() -> (PathBuf, Option<[usize; 2]>),
    ) -> Result<(), DataError> {
        let available = self.limit();
        if needed <= available {
            return Ok(());
        }
        let (path, size) = of();
        let [needed, available] = [needed, available].map(ByteSize);
        Err(DataError::ImageMemory { path, size, needed, available })
    }

    /// Takes this many bytes, waiting until they are free.
    ///
    /// # Errors
    /// Those of [`check`](Self::check).
    pub(super) fn take(
        &self,
        bytes: u64,
        of: impl FnOnce() -> (PathBuf, Option<[usize; 2]>),
    ) -> Result<TakenMemory<'_>, DataError> {
        self.check(bytes, of)?;
        let mut state = self.lock();
        while state.limit - state.taken < bytes {
            state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.taken += bytes;
        state.largest = state.largest.max(bytes);
        Ok(TakenMemory { memory: self, bytes })
    }

    fn lock(&self) -> MutexGuard<'_, CacheState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TakenMemory<'_> {
    fn drop(&mut self) {
        self.memory.lock().taken -= self.bytes;
        self.memory.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of() -> (PathBuf, Option<[usize; 2]>) {
        ("a.png".into(), Some([7, 9]))
    }

    #[test]
    fn what_is_taken_is_never_more_than_there_is() {
        let memory = DecodeMemory::new(ByteSize(100));
        let first = memory.take(70, of).unwrap();
        std::thread::scope(|scope| {
            // It waits until the first is dropped; otherwise this test would count more than the budget.
            let second = scope.spawn(|| memory.take(40, of).map(|taken| taken.bytes));
            drop(first);
            assert_eq!(second.join().unwrap().unwrap(), 40);
        });
        let free = |memory: &DecodeMemory| memory.lock().taken == 0;
        assert!(free(&memory));
        let said = memory.take(101, of).unwrap_err().to_string();
        assert!(
            said.contains("`a.png`") && said.contains("7 by 9") && said.contains("--host-memory"),
            "{said}"
        );
        assert_eq!((memory.keep_largest(), memory.limit()), (ByteSize(0), 100), "nothing is decoded again");
        memory.needed_again();
        assert_eq!((memory.keep_largest(), memory.limit()), (ByteSize(70), 70));
    }
}
