//! Reading batches ahead, on threads of their own: a dataset that takes long keeps no device and no other task waiting.
//!
//! While the last shard task of a minibatch is under way, the batches of the next one are read, as far as host memory has
//! room for them that neither masters nor models within a minibatch can need. Where it has none, they are read when they
//! are needed, by whoever needs them. They are the same batches either way.
//!
//! Nothing waits for a read but the minibatch that needs it. A task that only reads is at rest: it gives up the memory of
//! its last minibatch, is kept, and stops. A dataset that never returns costs the run a loader and the room of its
//! batches, and outlives it: its thread ends when it returns, or with the process.

use crate::cursor::{ShardTask, Stage};
use crate::error::{EngineError, guarded};
use crate::event::{Event, Reporter};
use crate::host_room::RoomAhead;
use crossbeam_channel::Receiver;
use hydra_core::{Batch, Dataset, DatasetError, FloatType, TaskId, gather};
use std::sync::Arc;

/// The most threads that read. Tasks share them where there are more.
pub(crate) const MOST_LOADERS: usize = 16;

/// What is trained or evaluated with batches that are read together: a minibatch, or a batch of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sweep {
    pub stage: Stage,
    /// Minibatches trained before it.
    pub step: usize,
}

impl Sweep {
    /// That of a shard task.
    pub(crate) fn of(task: &ShardTask) -> Self {
        Self { stage: task.stage, step: task.step }
    }
}

/// What a sweep reads.
pub(crate) struct Reading {
    pub data: Arc<dyn Dataset>,
    /// The items of each microbatch.
    pub parts: Vec<Vec<usize>>,
    pub float: FloatType,
}

impl Reading {
    /// The batches, one a microbatch.
    ///
    /// # Errors
    /// Those of the dataset, whose panics are errors too.
    pub(crate) fn batches(&self) -> Result<Vec<Batch>, EngineError> {
        let batch =
            |part: &Vec<usize>| Ok::<_, DatasetError>(gather(self.data.as_ref(), part)?.in_type(self.float));
        guarded("reading a batch", || Ok(self.parts.iter().map(batch).collect::<Result<_, _>>()?))
    }
}

pub(crate) struct LoadJob {
    pub task: TaskId,
    pub of: Sweep,
    pub reading: Reading,
    /// Host memory for the batches.
    pub room: RoomAhead,
}

/// Batches that were read ahead, with the host memory that they take. Why they could not be read is said when they are
/// needed, and what was trained before is not lost.
pub(crate) struct Loaded {
    pub of: Sweep,
    pub batches: Result<Vec<Batch>, EngineError>,
    /// Released after the batches are freed, for fields are dropped in this order.
    pub _room: RoomAhead,
}

/// Works until every sender of jobs is gone.
pub(crate) fn run(jobs: &Receiver<LoadJob>, reporter: &Reporter) {
    for LoadJob { task, of, reading, room } in jobs {
        let loaded = Loaded { of, batches: reading.batches(), _room: room };
        reporter.send(Event::Loaded { task, loaded });
    }
}
