//! The host memory of a running run: one budget, with a part reserved for batches that are read ahead.
//!
//! Master weights and models within a minibatch, including the batches that these read, never use the reserved part.
//! So a read never blocks a model, however slow the dataset is, and the total never exceeds the memory that the run
//! was admitted with.

use hydra_core::ByteSize;
use hydra_spill::{Budget, BudgetError, Reservation};

/// The host memory that a run was admitted with.
pub(crate) struct HostHeadroom {
    all: Budget,
    /// Counts batches that are read ahead, which are reserved in both budgets.
    ahead: Budget,
}

/// Host memory for batches that are read ahead.
pub(crate) struct HeadroomAhead {
    /// Dropped before the whole, in field order, so that models never see more than their share.
    _part: Reservation,
    _whole: Reservation,
}

impl HostHeadroom {
    /// A budget of `all` bytes, `ahead` bytes of it for batches that are read ahead.
    pub(crate) fn new(all: u64, ahead: u64) -> Self {
        Self {
            all: Budget::new("host memory", ByteSize(all)),
            ahead: Budget::new("host memory for batches that are read ahead", ByteSize(ahead)),
        }
    }

    /// Free bytes for master weights and models within a minibatch.
    pub(crate) fn available(&self) -> u64 {
        self.all.available().saturating_sub(self.ahead.available())
    }

    /// Reserves memory for master weights, or for work on them.
    pub(crate) fn reserve(&self, bytes: u64, owner: &str) -> Result<Reservation, BudgetError> {
        self.all.reserve(bytes, owner)
    }

    /// Reserves memory for a model within a minibatch; `None` if it is not free.
    pub(crate) fn try_reserve(&self, bytes: u64, owner: &str) -> Option<Reservation> {
        // Only one thread reserves; other threads only release.
        if bytes > self.available() {
            return None;
        }
        self.all.try_reserve(bytes, owner)
    }

    /// Reserves memory for batches that are read ahead; `None` if it is not free.
    pub(crate) fn try_ahead(&self, bytes: u64, owner: &str) -> Option<HeadroomAhead> {
        let part = self.ahead.try_reserve(bytes, owner)?;
        Some(HeadroomAhead { _whole: self.all.try_reserve(bytes, owner)?, _part: part })
    }

    /// The whole budget.
    pub(crate) fn budget(&self) -> &Budget {
        &self.all
    }

    /// The peak of reserved bytes.
    pub(crate) fn peak(&self) -> u64 {
        self.all.peak()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_ahead_and_what_models_need_take_nothing_from_each_other() {
        let headroom = HostHeadroom::new(100, 30);
        let masters = headroom.reserve(50, "masters").unwrap();
        assert_eq!(headroom.available(), 20);
        let batch = headroom.try_ahead(20, "reads").unwrap();
        assert!(headroom.try_ahead(11, "reads too").is_none());
        assert_eq!(headroom.available(), 20, "what is read is not of models' memory");
        let model = headroom.try_reserve(20, "a model").unwrap();
        assert!(headroom.try_reserve(1, "another").is_none());
        drop(batch);
        assert!(headroom.try_reserve(1, "another").is_none(), "nor is what could be read");
        let batch = headroom.try_ahead(30, "reads").unwrap();
        assert_eq!((headroom.available(), headroom.peak()), (0, 100));
        drop((masters, model, batch));
        assert_eq!((headroom.available(), headroom.peak()), (70, 100));
    }
}
