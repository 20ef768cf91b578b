//! Decides which checkpoints are due.
//!
//! One checkpoint is written at a time. Meanwhile the other tasks compute, except the one whose last save is the
//! longest ago: it waits for its turn. Tasks that stop all wait.

use crate::checkpoint::CheckpointEvery;
use crate::task::{Leaving, LiveTask, ThreadRequest};
use hydra_core::TaskId;

/// The tasks that the writer could save now.
#[derive(Clone, Copy)]
pub(super) enum Saveable {
    /// The writer is idle.
    Any,
    /// The writer is busy, and this task comes next.
    Only(Option<TaskId>),
}

impl Saveable {
    /// Finds the tasks that may be saved next.
    pub(super) fn next(tasks: &[LiveTask]) -> Self {
        let open = || tasks.iter().filter(|task| !task.phase.is_over());
        let is_written = |task: &LiveTask| task.request == Some(ThreadRequest::Checkpoint);
        if !open().any(is_written) {
            return Self::Any;
        }
        let waits = |task: &&LiveTask| !is_written(task) && task.wants_checkpoint();
        let longest = open().filter(waits).min_by(|a, b| a.checkpoint.at_s.total_cmp(&b.checkpoint.at_s));
        Self::Only(longest.map(LiveTask::id))
    }

    /// Returns whether it is this task's turn.
    pub(super) fn allows(self, task: TaskId) -> bool {
        match self {
            Self::Any => true,
            Self::Only(only) => only == Some(task),
        }
    }
}

/// Marks the tasks whose checkpoint is due.
pub(super) fn mark_due(tasks: &mut [LiveTask], every: CheckpointEvery, now_s: f64) {
    let next = Saveable::next(tasks);
    // There is one writer; a task that still has to save waits as long as writing a model takes.
    let is_writing = |task: &LiveTask| !task.phase.is_over() && task.request == Some(ThreadRequest::Write);
    let held = every == CheckpointEvery::Auto && tasks.iter().any(is_writing);
    let open = tasks.iter_mut().filter(|task| !task.phase.is_over() && task.info.task.checkpoint.is_some());
    let saved = open.map(|task| usize::from(task.checkpoint.has_begun(&task.cursor, now_s))).sum();
    for task in tasks {
        let passed = task.checkpoint.has_run(every, saved, &task.cursor, now_s) && next.allows(task.id());
        let ends = task.phase.ends_at_rest() || task.pause.leaving == Leaving::Requested;
        task.checkpoint.due = (ends || passed && !held) && task.wants_checkpoint();
    }
}
