//! When a task's next checkpoint is due.

use crate::checkpoint::{CheckpointEvery, estimated_cost_s, interval_s};
use crate::protocol::Time;
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
    /// When the task began to compute, in seconds; until then nothing is due.
    began_s: Option<f64>,
    /// The seconds that its last checkpoint took, or before the first what it may take.
    cost_s: f64,
}

impl CheckpointClock {
    /// A task that has computed nothing since it began or was resumed, and whose checkpoint has so many bytes.
    pub(crate) fn new(cursor: &Cursor, at_s: f64, bytes: u64) -> Self {
        let (step, stage, cost_s) = (cursor.step(), cursor.place(), estimated_cost_s(bytes));
        Self { due: false, step, stage, at_s, began_s: None, cost_s }
    }

    /// The task was saved where it stands. One that could not be is not tried again here, but when the next is due.
    pub(crate) fn saved(&mut self, cursor: &Cursor, time: Time) {
        let (step, stage, cost_s) = (cursor.step(), cursor.place(), time.seconds());
        *self = Self { due: false, step, stage, at_s: time.end_s, cost_s, ..*self };
    }

    /// Returns whether the task has computed something, and notes when it began to.
    pub(crate) fn has_begun(&mut self, cursor: &Cursor, now_s: f64) -> bool {
        if self.began_s.is_none() {
            match self.stands_at(cursor) {
                true => self.at_s = now_s,
                false => self.began_s = Some(self.at_s),
            }
        }
        self.began_s.is_some()
    }

    /// Returns whether the interval has passed, where so many tasks are saved in turn.
    pub(crate) fn has_run(&self, every: CheckpointEvery, tasks: usize, cursor: &Cursor, now_s: f64) -> bool {
        let since_s = now_s - self.at_s;
        match (every, self.began_s) {
            (CheckpointEvery::Minibatches(n), _) => cursor.step() - self.step >= n.max(1),
            (CheckpointEvery::Time(time), Some(_)) => since_s >= time.as_secs_f64(),
            (CheckpointEvery::Auto, Some(began_s)) => {
                since_s >= interval_s(now_s - began_s, self.cost_s, tasks)
            }
            (_, None) => false,
        }
    }

    /// Returns whether there is something to save that was not saved before.
    pub(crate) fn is_behind(&self, cursor: &Cursor) -> bool {
        !self.stands_at(cursor) && !matches!(cursor.stage(), Stage::Write | Stage::Finished)
    }

    fn stands_at(&self, cursor: &Cursor) -> bool {
        (cursor.step(), cursor.place()) == (self.step, self.stage)
    }
}
