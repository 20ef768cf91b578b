//! The pauses of a task between its minibatches, and what is saved of it there.

use super::live::LiveTask;
use super::pause::Leaving;
use super::phase::Phase;
use crate::stages::{EvaluationKind, ShardTask, Stage};
use std::path::PathBuf;

impl LiveTask {
    /// The minibatches after which the task can pause, from the fewest to the most; none if it trains no further.
    pub(crate) fn can_pause(&self) -> Option<(usize, usize)> {
        let (step, steps) = (self.cursor.step(), self.cursor.program().steps);
        let first = match self.cursor.stage() {
            Stage::Train { .. } if self.cursor.at_minibatch_start() => step,
            Stage::Train { .. } => step + 1,
            Stage::Evaluate { kind: EvaluationKind::Initial | EvaluationKind::Periodic, .. } => step,
            Stage::Shared => step,
            _ => return None,
        };
        let open = !self.phase.is_over() && !self.phase.ends_at_rest() && !self.phase.is_closing();
        let last = self.pause.ends.map_or(steps, |ends| ends + 1).min(steps).checked_sub(1)?;
        (open && first <= last).then_some((first, last))
    }

    /// Returns whether the task waits, before this shard task, which is next, until it is told to go on or was saved.
    pub(super) fn pauses_before(&self, next: &ShardTask) -> bool {
        let begins = next.stage == Stage::Train { microbatch: 0 } && self.cursor.at_minibatch_start();
        let pauses = self.is_until(next.step) || self.is_ending(next.step) || self.saves_at(next.step);
        begins && !self.phase.ends_at_rest() && pauses
    }

    fn is_ending(&self, step: usize) -> bool {
        self.pause.ends.is_some_and(|ends| ends <= step)
    }

    /// Returns whether it has come to where it is to end, and nothing of it is under way.
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

    /// Returns whether nothing happens to the task until it is told to go on.
    pub(crate) fn is_paused(&self) -> bool {
        let step = self.cursor.step();
        let initial = Stage::Evaluate { kind: EvaluationKind::Initial, batch: 0 };
        let begins = self.cursor.at_minibatch_start() || matches!(self.cursor.stage(), Stage::Shared);
        let here = begins || self.cursor.stage() == initial && self.cursor.is_between_groups();
        match self.phase.is_waiting() {
            true => here && self.is_until(step) && !self.is_ending(step) && !self.saves_at(step),
            false => {
                // One that was told to stop meanwhile has something to do.
                let runs = matches!(self.phase, Phase::Running);
                let at_rest = runs && self.request.is_none() && self.is_at_rest();
                let pauses = self.is_until(step) && !self.is_ending(step) && !self.saves_at(step);
                at_rest && self.cursor.at_minibatch_start() && pauses
            }
        }
    }

    /// The minibatches after which it has paused, once each time.
    pub(crate) fn has_paused(&mut self) -> Option<usize> {
        let is_here = self.is_paused() && (!self.phase.is_waiting() || self.resumed_at.is_some());
        let step = Some(self.cursor.step()).filter(|_| is_here);
        let news = step.filter(|_| step != self.pause.told);
        self.pause.told = news.or(self.pause.told);
        news
    }

    /// The next file into which the state that it has here is to be written.
    pub(super) fn save_here(&self) -> Option<PathBuf> {
        let files = self.pause.saves.get(&self.cursor.step()).filter(|_| self.cursor.at_minibatch_start());
        files.and_then(|files| files.first()).cloned()
    }

    /// The state that it has here was written into a file, or could not be: which one.
    pub(crate) fn saved_here(&mut self) -> Option<PathBuf> {
        let step = self.cursor.step();
        let files = self.pause.saves.get_mut(&step)?;
        let file = (!files.is_empty()).then(|| files.remove(0));
        if files.is_empty() {
            self.pause.saves.remove(&step);
        }
        file
    }

    /// Returns whether its masters can make room for others: it is paused, and its checkpoint says where it stands.
    pub(super) fn may_leave(&self) -> bool {
        self.pause.leaving == Leaving::Asked && self.is_paused_with_masters() && !self.wants_checkpoint()
    }

    /// Returns whether its masters could make room for others: it is paused, and has a checkpoint to go on from.
    pub(crate) fn can_leave(&self) -> bool {
        let device_resident = self.info.on_device() || self.info.most_passing().is_some();
        let kept = self.info.task.checkpoint.is_some() && self.cursor.step() > 0;
        self.pause.leaving == Leaving::No && kept && !device_resident && self.is_paused_with_masters()
    }

    /// Returns whether it is paused, and has masters.
    fn is_paused_with_masters(&self) -> bool {
        self.is_paused() && !self.phase.is_waiting()
    }
}
