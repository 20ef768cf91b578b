//! Pausing and saving a task between its minibatches.

use super::live::LiveTask;
use super::pause::Leaving;
use super::phase::Phase;
use hydra_sched::program::{EvaluationKind, ShardTask, Stage};
use std::path::PathBuf;

impl LiveTask {
    /// The range of minibatches after which the task can pause; `None` if it trains no further.
    pub(crate) fn can_pause(&self) -> Option<(usize, usize)> {
        let (step, steps) = (self.cursor.step(), self.cursor.program().steps);
        let first = match self.cursor.stage() {
            Stage::Measure { .. } | Stage::Train { .. } if self.cursor.at_minibatch_start() => step,
            Stage::Measure { .. } | Stage::Train { .. } => step + 1,
            Stage::Evaluate { kind: EvaluationKind::Initial | EvaluationKind::Periodic, .. }
            | Stage::Round { kind: EvaluationKind::Periodic } => step,
            Stage::Shared => step,
            _ => return None,
        };
        let open = !self.phase.is_over() && !self.phase.ends_at_rest() && !self.phase.is_closing();
        let last = self.pause.ends.map_or(steps, |ends| ends + 1).min(steps).checked_sub(1)?;
        (open && first <= last).then_some((first, last))
    }

    /// Returns whether the task waits before `next`, its next shard task, until it is resumed, ended or saved.
    pub(super) fn pauses_before(&self, next: &ShardTask) -> bool {
        let start = self.cursor.program().minibatch_start(next.step);
        let begins = next.stage == start && self.cursor.at_minibatch_start();
        let pauses = self.is_until(next.step) || self.is_ending(next.step) || self.saves_at(next.step);
        begins && !self.phase.ends_at_rest() && pauses
    }

    fn is_ending(&self, step: usize) -> bool {
        self.pause.ends.is_some_and(|ends| ends <= step)
    }

    /// Returns whether it has reached the point at which it is to end, with nothing in flight.
    pub(crate) fn is_where_it_ends(&self) -> bool {
        let step = self.cursor.step();
        let here = self.is_ending(step) && !self.saves_at(step) && self.cursor.at_minibatch_start();
        here && matches!(self.phase, Phase::Running) && self.request.is_none() && self.is_at_rest()
    }

    fn is_until(&self, step: usize) -> bool {
        self.pause.until.is_some_and(|until| until <= step)
    }

    fn saves_at(&self, step: usize) -> bool {
        self.pause.saves.contains_key(&step)
    }

    /// Returns whether the task is paused: it does nothing until it is resumed.
    pub(crate) fn is_paused(&self) -> bool {
        let step = self.cursor.step();
        let initial = Stage::Evaluate { kind: EvaluationKind::Initial, batch: 0, rounds: false };
        let begins = self.cursor.at_minibatch_start() || matches!(self.cursor.stage(), Stage::Shared);
        let here = begins || self.cursor.stage() == initial && self.cursor.is_between_groups();
        match self.phase.is_waiting() {
            true => here && self.is_until(step) && !self.is_ending(step) && !self.saves_at(step),
            false => {
                // A task that received a stop request meanwhile still has to end.
                let runs = matches!(self.phase, Phase::Running);
                let at_rest = runs && self.request.is_none() && self.is_at_rest();
                let pauses = self.is_until(step) && !self.is_ending(step) && !self.saves_at(step);
                at_rest && self.cursor.at_minibatch_start() && pauses
            }
        }
    }

    /// The minibatches after which it has paused; each pause is returned once.
    pub(crate) fn has_paused(&mut self) -> Option<usize> {
        let is_here = self.is_paused() && (!self.phase.is_waiting() || self.info.resumed_at.is_some());
        let step = Some(self.cursor.step()).filter(|_| is_here);
        let news = step.filter(|_| step != self.pause.reported);
        self.pause.reported = news.or(self.pause.reported);
        news
    }

    /// The next file to save its current state to.
    pub(super) fn save_here(&self) -> Option<PathBuf> {
        let files = self.pause.saves.get(&self.cursor.step()).filter(|_| self.cursor.at_minibatch_start());
        files.and_then(|files| files.first()).cloned()
    }

    /// Removes and returns the file that its current state was saved to, successfully or not.
    pub(crate) fn saved_here(&mut self) -> Option<PathBuf> {
        let step = self.cursor.step();
        let files = self.pause.saves.get_mut(&step)?;
        let file = (!files.is_empty()).then(|| files.remove(0));
        if files.is_empty() {
            self.pause.saves.remove(&step);
        }
        file
    }

    /// Returns whether it releases its master weights now: it is paused, and its checkpoint is up to date.
    pub(super) fn may_leave(&self) -> bool {
        self.pause.leaving == Leaving::Requested && self.is_paused_with_masters() && !self.wants_checkpoint()
    }

    /// Returns whether it could release its master weights: it is paused, and has a checkpoint to resume from.
    pub(crate) fn can_leave(&self) -> bool {
        let elsewhere = self.info.has_resident() || self.info.uses_disk();
        let kept = self.info.task.checkpoint.is_some() && self.cursor.step() > 0;
        self.pause.leaving == Leaving::No && kept && !elsewhere && self.is_paused_with_masters()
    }

    /// Returns whether it is paused with its master weights loaded.
    fn is_paused_with_masters(&self) -> bool {
        self.is_paused() && !self.phase.is_waiting()
    }
}
