//! Keeping checkpoints of tasks while they run, and beginning from them.

use crate::checkpoint::{Checkpoint, CheckpointEvery, KeptResults, Position, State};
use crate::clock::Time;
use crate::cursor::{Cursor, Stage};
use crate::error::{EngineError, with_causes};
use crate::host::HostJob;
use crate::model::{Model, Results};
use crate::observer::{Observer, RunEvent};
use crate::report::TaskState;
use crate::run::Run;
use crate::writer::KeepJob;
use hydra_core::TaskId;
use std::path::PathBuf;

/// Where and when a task was kept last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Kept {
    /// The minibatches trained and what came next; `None` before the first checkpoint of a run.
    at: Option<(usize, Stage)>,
    step: usize,
    at_s: f64,
}

impl Run {
    /// Marks the task whose checkpoint is the longest due. One at a time: the others compute meanwhile.
    pub(crate) fn mark_due(&mut self) {
        let now = self.clock.now();
        let mut open = self.models.iter().filter(|model| model.ended.is_none());
        if open.any(|model| model.keep_due || model.keeping) {
            return;
        }
        let intervals = |model: &Model| match self.every {
            CheckpointEvery::Minibatches(n) => {
                (model.cursor.step() - model.kept.step) as f64 / n.max(1) as f64
            }
            CheckpointEvery::Time(time) => (now - model.kept.at_s) / time.as_secs_f64().max(1e-9),
        };
        let keeps = |model: &&Model| model.ended.is_none() && model.task.checkpoint.is_some();
        let due = self.models.iter().filter(keeps).map(|model| (intervals(model), model.id.0));
        let longest = due.filter(|(due, _)| *due >= 1.0).max_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((_, index)) = longest {
            self.models[index].keep_due = true;
        }
    }

    /// Has the checkpoint written that is due of a task at rest; whether the task has to wait for it.
    pub(crate) fn keep(&mut self, index: usize) -> bool {
        let model = &mut self.models[index];
        if !std::mem::take(&mut model.keep_due) {
            return false;
        }
        let at = (model.cursor.step(), model.cursor.stage());
        let Some(file) = model.task.checkpoint.clone().filter(|_| model.kept.at != Some(at)) else {
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
        // One that failed is tried again when the next is due.
        model.kept = Kept { at: result.is_ok().then_some((step, stage)), step, at_s: time.end_s };
        match result {
            Ok(bytes) => {
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
        let at_s = self.clock.now();
        self.observer.observe(&RunEvent::CheckpointFailed { task, step, error: &error, at_s });
    }

    /// What the last checkpoint of a task says that is about to be written for good.
    pub(crate) fn finished_state(&self, index: usize) -> Option<(PathBuf, Box<State>)> {
        let model = &self.models[index];
        let file = model.task.checkpoint.clone().filter(|_| !model.is_unfinished())?;
        Some((file, self.state(index)?))
    }

    fn state(&self, index: usize) -> Option<Box<State>> {
        let identity = self.identities[index].clone()?;
        Some(Box::new(State::of(&self.models[index], identity)))
    }
}

impl Model {
    /// Goes to where the task's checkpoint says.
    pub(crate) fn resume(&mut self, observer: &mut dyn Observer, at_s: f64) {
        let Some(state) = self.task.resume.as_ref().map(Checkpoint::state).cloned() else { return };
        let State { step, position, results, .. } = state;
        self.results = results.into();
        let stage = match position {
            Position::Train => Stage::Train { microbatch: 0 },
            Position::Restore => Stage::Restore,
            Position::Evaluate { kind, batch, sum, terms } => {
                self.evaluation = (sum, terms);
                Stage::Evaluate { kind, batch }
            }
            Position::Finished { sha256, dir } => {
                (self.results.sha256, self.results.dir) = (Some(sha256), dir);
                self.ended = Some(TaskState::Done);
                Stage::Finished
            }
        };
        self.kept = Kept { at: Some((step, stage)), step, at_s };
        self.cursor = Cursor::resumed(self.cursor.program().clone(), step, stage);
        // Frozen images are always up to date.
        self.versions.iter_mut().filter(|version| **version == 0).for_each(|version| *version = step);
        let (task, steps) = (self.id, self.cursor.program().steps);
        observer.observe(&RunEvent::Resumed { task, step, steps, at_s });
        if let Some(state) = self.ended {
            observer.observe(&RunEvent::Ended { task, state, error: None, at_s });
        }
    }
}

impl From<KeptResults> for Results {
    fn from(kept: KeptResults) -> Self {
        let KeptResults { losses, initial, validation, test, periodic, best } = kept;
        Self {
            losses,
            initial: initial.map(Into::into),
            validation: validation.map(Into::into),
            test: test.map(Into::into),
            periodic: periodic.into_iter().map(|(step, result)| (step, result.into())).collect(),
            best: best.map(|(step, result)| (step, result.into())),
            ..Self::default()
        }
    }
}

impl From<&Results> for KeptResults {
    fn from(results: &Results) -> Self {
        Self {
            losses: results.losses.clone(),
            initial: results.initial.map(Into::into),
            validation: results.validation.map(Into::into),
            test: results.test.map(Into::into),
            periodic: results.periodic.iter().map(|(step, result)| (*step, (*result).into())).collect(),
            best: results.best.map(|(step, result)| (step, result.into())),
        }
    }
}
