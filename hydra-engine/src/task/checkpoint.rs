//! When a task is kept, what its checkpoint says, and how it begins from one.

use super::model::{Model, Results};
use crate::checkpoint::{Checkpoint, Identity, KeptResults, Position, SCHEMA, State};
use crate::observer::{Observer, RunEvent};
use crate::protocol::KeptEvaluation;
use crate::stages::{Cursor, Stage, TaskState};
use hydra_core::Chain;
use std::path::Path;

/// Where and when a task was kept last, or should have been.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    /// Minibatches trained.
    pub step: usize,
    /// What came next.
    pub stage: Stage,
    pub at_s: f64,
}

impl Kept {
    /// At a task's first stage there is nothing to keep: it is drawn or read again.
    pub(crate) fn before(cursor: &Cursor) -> Self {
        Self { step: cursor.step(), stage: cursor.stage(), at_s: 0.0 }
    }
}

impl Model {
    /// What a checkpoint says of the task at rest.
    pub(crate) fn state(&self, identity: Identity) -> State {
        let position = match self.cursor.stage() {
            Stage::Evaluate { kind, batch } => {
                Position::Evaluate { kind, batch, sums: self.evaluation.clone() }
            }
            Stage::Restore => Position::Restore,
            Stage::Write => Position::Write,
            _ => Position::Train,
        };
        State {
            schema: SCHEMA,
            identity,
            step: self.cursor.step(),
            steps: self.cursor.program().steps,
            position,
            results: KeptResults::from(&self.results),
        }
    }

    /// Whether the task ends, trained or not, when nothing of it is under way.
    pub(crate) fn ends_here(&self) -> bool {
        self.stopping || self.cannot_go_on.is_some()
    }

    /// Whether there is something to keep that was not kept before.
    pub(crate) fn is_news(&self) -> bool {
        let (step, stage) = (self.cursor.step(), self.cursor.stage());
        let more = (step, stage) != (self.kept.step, self.kept.stage);
        more && !matches!(stage, Stage::Write | Stage::Finished) && !self.gives_up()
    }

    /// Goes to where the task's checkpoint says.
    pub(crate) fn resume(&mut self, observer: &mut dyn Observer, at_s: f64) {
        let Some(state) = self.task.resume.as_ref().map(Checkpoint::state).cloned() else { return };
        let State { step, position, results, .. } = state;
        self.results = results.restored(self.chain());
        let stage = match position {
            Position::Finished { .. } if !self.task.is_finished() => Stage::Write,
            _ => position.stage(),
        };
        match position {
            Position::Evaluate { sums, .. } => self.evaluation = sums,
            Position::Finished { sha256, dir } if stage == Stage::Finished => {
                // Its model may have been moved to where the task would write it now.
                let here = self.task.output_dir().filter(|here| dir.is_some() && here.is_dir());
                self.results.dir = here.map(Path::to_owned).or(dir);
                self.results.sha256 = Some(sha256);
                self.ended = Some(TaskState::Done);
            }
            _ => {}
        }
        self.kept = Kept { step, stage, at_s };
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

impl KeptResults {
    /// The results, which are of this chain.
    fn restored(self, chain: &Chain) -> Results {
        let Self { losses, initial, validation, test, periodic, best } = self;
        let of = |kept: KeptEvaluation| kept.evaluation(chain);
        let at = |(step, kept): (usize, KeptEvaluation)| (step, kept.evaluation(chain));
        Results {
            losses,
            initial: initial.map(of),
            validation: validation.map(of),
            test: test.map(of),
            periodic: periodic.into_iter().map(at).collect(),
            best: best.map(at),
            ..Results::default()
        }
    }
}

impl From<&Results> for KeptResults {
    fn from(results: &Results) -> Self {
        Self {
            losses: results.losses.clone(),
            initial: results.initial.clone().map(Into::into),
            validation: results.validation.clone().map(Into::into),
            test: results.test.clone().map(Into::into),
            periodic: results.periodic.iter().map(|(step, result)| (*step, result.clone().into())).collect(),
            best: results.best.clone().map(|(step, result)| (step, result.into())),
        }
    }
}
