//! The minibatches that a search has asked for so far: nobody knows yet what else it will ask for.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a search has asked for, as it says itself. Clones are of the same search.
#[derive(Clone, Debug, Default)]
pub(crate) struct Asked(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    minibatches: usize,
    /// Of each task that is a fork, the minibatches that another one was trained for.
    shared: BTreeMap<String, usize>,
}

impl Asked {
    /// So many minibatches in all, each counted once, however many trials share it.
    pub(crate) fn set(&self, minibatches: usize) {
        self.inner().minibatches = minibatches;
    }

    /// This task begins where another one was trained to.
    pub(crate) fn fork(&self, task: &str, at: usize) {
        self.inner().shared.insert(task.to_owned(), at);
    }

    /// The minibatches in all.
    pub(super) fn minibatches(&self) -> usize {
        self.inner().minibatches
    }

    /// Those of a task that were trained for another one.
    pub(super) fn shared(&self, task: &str) -> usize {
        self.inner().shared.get(task).copied().unwrap_or_default()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
