//! Keeping checkpoints of tasks while they run, and beginning from them.

use super::Run;
use crate::checkpoint::{Checkpoint, CheckpointEvery, State};
use crate::error::{EngineError, with_causes};
use crate::io::writer::KeepJob;
use crate::observer::{Observer, RunEvent};
use crate::optimizer::HostJob;
use crate::protocol::Time;
use crate::task::{Kept, Model};
use hydra_core::TaskId;
use std::path::PathBuf;

/// Who may be kept, as far as the writer is concerned.
enum Turn {
    /// The writer has nothing to do.
    Anyone,
    /// The writer is at work, and this task comes next.
    Only(Option<TaskId>),
}

impl Turn {
    fn is(&self, task: TaskId) -> bool {
        match self {
            Self::Anyone => true,
            Self::Only(only) => *only == Some(task),
        }
    }
}

impl Run {
    /// Marks the tasks whose checkpoint is due. One is written at a time, and the others compute meanwhile, but for
    /// the one that was kept the longest ago: it waits for its turn. In a run that stops all wait.
    pub(crate) fn mark_due(&mut self) {
        let (turn, now) = (self.turn(), self.clock.now());
        for model in &mut self.models {
            let due = match self.every {
                CheckpointEvery::Minibatches(n) => model.cursor.step() - model.kept.step >= n.max(1),
                CheckpointEvery::Time(time) => now - model.kept.at_s >= time.as_secs_f64(),
            };
            let due = model.ends_here() || due && turn.is(model.id);
            model.keep_due = due && model.task.checkpoint.is_some() && model.is_news();
        }
    }

    /// Whose turn it is to be kept.
    fn turn(&self) -> Turn {
        let open = || self.models.iter().filter(|model| model.ended.is_none());
        match open().any(|model| model.keeping) {
            false => Turn::Anyone,
            true => {
                let waits =
                    |model: &&Model| model.task.checkpoint.is_some() && !model.keeping && model.is_news();
                let longest = open().filter(waits).min_by(|a, b| a.kept.at_s.total_cmp(&b.kept.at_s));
                Turn::Only(longest.map(|model| model.id))
            }
        }
    }

    /// Has the checkpoint written that is due of a task at rest; whether the task has to wait for it.
    pub(crate) fn keep(&mut self, index: usize) -> bool {
        let turn = self.turn();
        let model = &mut self.models[index];
        let due = std::mem::take(&mut model.keep_due) && (model.ends_here() || turn.is(model.id));
        let Some(file) = model.task.checkpoint.clone().filter(|_| due && model.is_news()) else {
            return false;
        };
        let Some(state) = self.state(index) else { return false };
        let model = &mut self.models[index];
        (model.asked, model.keeping) = (true, true);
        let job = KeepJob { task: model.id, chain: model.chain().clone(), file, state };
        let _ = self.threads.host.send(HostJob::Keep(job));
        true
    }

    /// A checkpoint was written, or could not be.
    pub(crate) fn kept(&mut self, task: TaskId, result: Result<u64, EngineError>, time: Time) {
        let model = &mut self.models[task.0];
        if model.ended.is_some() {
            return;
        }
        (model.asked, model.keeping) = (false, false);
        let (step, stage) = (model.cursor.step(), model.cursor.stage());
        // One that failed is not tried again here, but when the next is due.
        model.kept = Kept { step, stage, at_s: time.end_s };
        match result {
            Ok(bytes) => {
                model.results.checkpoint_error = None;
                let (seconds, at_s) = (time.seconds(), time.end_s);
                self.observer.observe(&RunEvent::Checkpointed { task, step, bytes, seconds, at_s });
            }
            Err(error) => self.keep_failed(task.0, &error),
        }
    }

    /// Tells that a checkpoint could not be written; the task goes on.
    pub(crate) fn keep_failed(&mut self, index: usize, error: &EngineError) {
        let (task, step) = (TaskId(index), self.models[index].cursor.step());
        let error = with_causes(error);
        self.models[index].results.checkpoint_error = Some(error.clone());
        let at_s = self.clock.now();
        self.observer.observe(&RunEvent::CheckpointFailed { task, step, error: &error, at_s });
    }

    /// What the last checkpoint of a task says that is about to be written for good.
    pub(crate) fn finished_state(&self, index: usize) -> Option<(PathBuf, Box<State>)> {
        let model = &self.models[index];
        let file = model.task.checkpoint.clone().filter(|_| !model.cut_short)?;
        Some((file, self.state(index)?))
    }

    /// Says where the weights are of a task whose model could not be written, if they were kept before.
    pub(crate) fn with_checkpoint(&self, index: usize, error: EngineError) -> EngineError {
        let model = &self.models[index];
        let EngineError::NotWritten { kept: kept @ (None | Some(Err(_))), source } = error else {
            return error;
        };
        // Of a task that diverged other weights were to be written than those that were kept last.
        let kept_before = || {
            let file = model.task.checkpoint.clone().filter(|_| model.results.failure.is_none())?;
            let is_this = |kept: Checkpoint| kept.step() == model.cursor.step();
            Checkpoint::open(&file).is_ok_and(is_this).then_some(file)
        };
        EngineError::NotWritten { kept: kept_before().map(Ok).or(kept), source }
    }

    fn state(&self, index: usize) -> Option<Box<State>> {
        let identity = self.identities[index].clone()?;
        Some(Box::new(self.models[index].state(identity)))
    }
}
