//! Reads batches ahead on separate threads, so that a slow dataset blocks neither a device nor another task.
//!
//! While the last shard task of a minibatch is in flight, the batches of the next one are read if the part of host memory
//! reserved for them allows it; otherwise they are read on use. The batches are the same either way. Only the minibatch
//! that uses a batch waits for it. A dataset that never returns blocks one loader thread and the memory of its batches;
//! the thread ends when the dataset returns, or with the process.

use crate::protocol::{Event, HeadroomAhead, Loaded, Reading, Reporter};
use crossbeam_channel::Receiver;
use hydra_core::TaskId;
use hydra_sched::program::MicrobatchPass;

/// The maximum number of loader threads, which all tasks share.
pub(crate) const MAX_LOADERS: usize = 16;

pub(crate) struct LoadJob {
    pub task: TaskId,
    pub of: MicrobatchPass,
    pub reading: Reading,
    /// Host memory for the batches.
    pub memory: HeadroomAhead,
}

/// Handles jobs until every sender is dropped.
pub(crate) fn run(jobs: &Receiver<LoadJob>, reporter: &Reporter) {
    for LoadJob { task, of, reading, memory } in jobs {
        let loaded = Loaded { of, batches: reading.batches(), _memory: memory };
        reporter.send(Event::Loaded { task, loaded });
    }
}
