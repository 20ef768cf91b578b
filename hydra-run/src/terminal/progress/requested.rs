//! The number of minibatches that a search has requested so far. Its total is not known in advance.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The minibatches that a search has requested, shared between the search and the display. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestedMinibatches(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    minibatches: usize,
    /// For each forked task, the minibatches that it shares with its parent.
    shared: BTreeMap<String, usize>,
}

impl RequestedMinibatches {
    /// Sets the requested minibatches; a minibatch that several trials share counts once.
    pub(crate) fn set(&self, minibatches: usize) {
        self.inner().minibatches = minibatches;
    }

    /// Records that `task` is forked from another task after `at` minibatches.
    pub(crate) fn fork(&self, task: &str, at: usize) {
        self.inner().shared.insert(task.to_owned(), at);
    }

    /// The requested minibatches of all tasks.
    pub(super) fn minibatches(&self) -> usize {
        self.inner().minibatches
    }

    /// The minibatches that a task shares with its parent.
    pub(super) fn shared(&self, task: &str) -> usize {
        self.inner().shared.get(task).copied().unwrap_or_default()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
