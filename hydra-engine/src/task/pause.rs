//! Where a task is to pause, and what is to be saved of it there.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// Where a task is to pause, and what is to be saved there.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    /// The minibatches after which it waits to be told to go on.
    pub until: Option<usize>,
    /// The files into which its state is to be written, by the minibatches before.
    pub saves: BTreeMap<usize, Vec<PathBuf>>,
    /// The minibatches after which it ends.
    pub ends: Option<usize>,
    /// Where it was last said that it is paused.
    pub(super) told: Option<usize>,
    /// Whether its masters are to make room for others.
    pub leaving: Leaving,
}

/// Whether a paused task's masters make room for others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Leaving {
    #[default]
    No,
    /// They do as soon as its checkpoint is written.
    Asked,
    /// That cannot be written.
    Never,
}

impl Pause {
    /// So far only that it pauses, and ends, after so many minibatches.
    pub(super) fn of(until: Option<usize>, ends: Option<usize>) -> Self {
        Self { until, ends, ..Self::default() }
    }
}
