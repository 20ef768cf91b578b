//! The points at which a task pauses, is saved or ends.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// The points at which a task pauses, is saved or ends, in trained minibatches.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    /// Pauses after this many minibatches, until it is resumed.
    pub until: Option<usize>,
    /// The files to save its state to, by the number of minibatches trained.
    pub saves: BTreeMap<usize, Vec<PathBuf>>,
    /// Ends after this many minibatches.
    pub ends: Option<usize>,
    /// The pause that was reported last.
    pub(super) reported: Option<usize>,
    /// Whether its host memory is released while it is paused.
    pub leaving: Leaving,
}

/// Whether a paused task releases the host memory of its master weights for other tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Leaving {
    #[default]
    No,
    /// It does as soon as its checkpoint is written.
    Requested,
    /// It cannot: its checkpoint could not be written.
    Never,
}

impl Pause {
    /// Pauses after `until` and ends after `ends` minibatches; saves nothing.
    pub(super) fn of(until: Option<usize>, ends: Option<usize>) -> Self {
        Self { until, ends, ..Self::default() }
    }
}
