//! Host memory of a run while it runs: one budget, of which a part is kept for batches that are read ahead.
//!
//! Masters and models within a minibatch never take of that part, nor a batch of theirs. So no read keeps a model out,
//! however long a dataset takes, and what both take together is never more than what the run was admitted with.

use hydra_core::ByteSize;
use hydra_spill::{Budget, BudgetError, Reservation};

/// The host memory that a run was admitted with.
pub(crate) struct HostHeadroom {
    all: Budget,
    /// Counts what is read ahead, which is reserved of both.
    ahead: Budget,
}

/// Host memory for batches that are read ahead.
pub(crate) struct HeadroomAhead {
    /// Dropped before the whole, in the order of the fields: models never see more than is left to them.
    _part: Reservation,
    _whole: Reservation,
}

impl HostHeadroom {
    /// So many bytes in all, of which so many are for batches that are read ahead.
    pub(crate) fn new(all: u64, ahead: u64) -> Self {
        Self {
            all: Budget::new("host memory", ByteSize(all)),
            ahead: Budget::new("host memory for batches that are read ahead", ByteSize(ahead)),
        }
    }

    /// Bytes that are free for masters and models within a minibatch.
    pub(crate) fn available(&self) -> u64 {
        self.all.available().saturating_sub(self.ahead.available())
    }

    /// Room for masters, or for work on them.
    pub(crate) fn reserve(&self, bytes: u64, owner: &str) -> Result<Reservation, BudgetError> {
        self.all.reserve(bytes, owner)
    }

    /// Room for a model within a minibatch, if it is free.
    pub(crate) fn try_reserve(&self, bytes: u64, owner: &str) -> Option<Reservation> {
        // Others only release meanwhile: one thread alone reserves.
        if bytes > self.available() {
            return None;
        }
        self.all.try_reserve(bytes, owner)
    }

    /// Room for batches that are read ahead, if it is free.
    pub(crate) fn try_ahead(&self, bytes: u64, owner: &str) -> Option<HeadroomAhead> {
        let part = self.ahead.try_reserve(bytes, owner)?;
        Some(HeadroomAhead { _whole: self.all.try_reserve(bytes, owner)?, _part: part })
    }

    /// All of it.
    pub(crate) fn budget(&self) -> &Budget {
        &self.all
    }

    /// The most bytes that were reserved at once.
    pub(crate) fn peak(&self) -> u64 {
        self.all.peak()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_ahead_and_what_models_need_take_nothing_from_each_other() {
        let room = HostHeadroom::new(100, 30);
        let masters = room.reserve(50, "masters").unwrap();
        assert_eq!(room.available(), 20);
        let batch = room.try_ahead(20, "reads").unwrap();
        assert!(room.try_ahead(11, "reads too").is_none());
        assert_eq!(room.available(), 20, "what is read is not of models' room");
        let model = room.try_reserve(20, "a model").unwrap();
        assert!(room.try_reserve(1, "another").is_none());
        drop(batch);
        assert!(room.try_reserve(1, "another").is_none(), "nor is what could be read");
        let batch = room.try_ahead(30, "reads").unwrap();
        assert_eq!((room.available(), room.peak()), (0, 100));
        drop((masters, model, batch));
        assert_eq!((room.available(), room.peak()), (70, 100));
    }
}
