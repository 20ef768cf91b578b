//! Decides when a task's next checkpoint is due.

use crate::checkpoint::{CheckpointEvery, estimated_cost_s, interval_s};
use crate::protocol::Time;
use hydra_sched::program::{Cursor, Stage};

/// The position and time of a task's last checkpoint attempt, and whether the next checkpoint is due.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckpointClock {
    /// True if a checkpoint must be written before the next minibatch.
    pub due: bool,
    /// Minibatches trained at the last checkpoint, and the stage that followed.
    step: usize,
    stage: Stage,
    /// Time of the last checkpoint attempt, in seconds of the run's clock.
    pub at_s: f64,
    /// Time at which the task started to compute, in seconds; nothing is due before.
    began_s: Option<f64>,
    /// Seconds that the last checkpoint took; before the first one, an estimate.
    cost_s: f64,
}

impl CheckpointClock {
    /// The clock of a task that has computed nothing since it started or was resumed; its checkpoint has `bytes`
    /// bytes.
    pub(crate) fn new(cursor: &Cursor, at_s: f64, bytes: u64) -> Self {
        let (step, stage, cost_s) = (cursor.step(), cursor.current_stage(), estimated_cost_s(bytes));
        Self { due: false, step, stage, at_s, began_s: None, cost_s }
    }

    /// Records that a checkpoint was attempted at `cursor`. A failed write is not retried until the next one is due.
    pub(crate) fn saved(&mut self, cursor: &Cursor, time: Time) {
        let (step, stage, cost_s) = (cursor.step(), cursor.current_stage(), time.seconds());
        *self = Self { due: false, step, stage, at_s: time.end_s, cost_s, ..*self };
    }

    /// Returns whether the task has computed something; records the time at which it started to.
    pub(crate) fn has_begun(&mut self, cursor: &Cursor, now_s: f64) -> bool {
        if self.began_s.is_none() {
            match self.stands_at(cursor) {
                true => self.at_s = now_s,
                false => self.began_s = Some(self.at_s),
            }
        }
        self.began_s.is_some()
    }

    /// Returns whether the checkpoint interval has passed; `tasks` tasks share the checkpoint writer.
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

    /// Returns whether the task has progress that is not in its last checkpoint.
    pub(crate) fn is_behind(&self, cursor: &Cursor) -> bool {
        !self.stands_at(cursor) && !matches!(cursor.stage(), Stage::Write | Stage::Finished)
    }

    fn stands_at(&self, cursor: &Cursor) -> bool {
        (cursor.step(), cursor.current_stage()) == (self.step, self.stage)
    }
}
