//! Reading batches ahead, on threads of their own: a dataset that takes long keeps no device and no other task waiting.
//!
//! While the last shard task of a minibatch is under way, the batches of the next one are read, as far as host memory has
//! room that neither masters nor models within a minibatch can need; otherwise they are read when they are needed. They
//! are the same batches either way. Nothing waits for a read but the minibatch that needs it. A dataset that never returns
//! costs the run a loader and the room of its batches, and its thread ends when it returns, or with the process.

use crate::protocol::{Event, HeadroomAhead, Loaded, Reading, Reporter};
use crate::stages::MicrobatchPass;
use crossbeam_channel::Receiver;
use hydra_core::TaskId;

/// The most threads that read. Tasks share them where there are more.
pub(crate) const MOST_LOADERS: usize = 16;

pub(crate) struct LoadJob {
    pub task: TaskId,
    pub of: MicrobatchPass,
    pub reading: Reading,
    /// Host memory for the batches.
    pub room: HeadroomAhead,
}

/// Works until every sender of jobs is gone.
pub(crate) fn run(jobs: &Receiver<LoadJob>, reporter: &Reporter) {
    for LoadJob { task, of, reading, room } in jobs {
        let loaded = Loaded { of, batches: reading.batches(), _room: room };
        reporter.send(Event::Loaded { task, loaded });
    }
}
