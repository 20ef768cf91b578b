//! When a task's next checkpoint is due.

use crate::checkpoint::CheckpointEvery;
use crate::stages::{Cursor, Stage};

/// The place and time of a task's last checkpoint, written or not, and whether the next one is due.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckpointClock {
    /// True if a checkpoint is to be written before the next minibatch.
    pub due: bool,
    /// Minibatches trained, and what came next.
    step: usize,
    stage: Stage,
    /// When that was, in seconds.
    pub at_s: f64,
}

impl CheckpointClock {
    /// The task was saved where it stands. One that could not be is not tried again here, but when the next is due.
    pub(crate) fn saved_at(cursor: &Cursor, at_s: f64) -> Self {
        Self { due: false, step: cursor.step(), stage: cursor.stage(), at_s }
    }

    /// Returns whether the interval has passed.
    pub(crate) fn has_run(&self, every: CheckpointEvery, cursor: &Cursor, now_s: f64) -> bool {
        match every {
            CheckpointEvery::Minibatches(n) => cursor.step() - self.step >= n.max(1),
            CheckpointEvery::Time(time) => now_s - self.at_s >= time.as_secs_f64(),
        }
    }

    /// Returns whether there is something to save that was not saved before.
    pub(crate) fn is_behind(&self, cursor: &Cursor) -> bool {
        let (step, stage) = (cursor.step(), cursor.stage());
        (step, stage) != (self.step, self.stage) && !matches!(stage, Stage::Write | Stage::Finished)
    }
}
