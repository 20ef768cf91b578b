//! A task's part in an initial evaluation that it shares with other tasks.

use super::live::LiveTask;
use super::phase::Phase;
use super::results::Progress;
use crate::error::EngineError;
use crate::protocol::Sums;
use hydra_sched::program::{EvaluationKind, Stage};

impl LiveTask {
    /// Returns whether it computes batches of a shared evaluation, or waits for the result.
    pub(crate) fn shares_evaluation(&self) -> bool {
        let goes_on = matches!(self.phase, Phase::Running | Phase::Stopping | Phase::Failing { .. });
        goes_on && self.cursor.is_in_shared_evaluation()
    }

    /// Returns whether it accepts results of other tasks now. A task that is being saved accepts them after its
    /// checkpoint is written.
    pub(crate) fn receives_batches(&self) -> bool {
        matches!(self.phase, Phase::Running | Phase::Stopping) && self.request.is_none()
    }

    /// Returns whether it could compute another batch of a shared evaluation.
    pub(crate) fn awaits_batch(&self) -> bool {
        let goes_on = matches!(self.phase, Phase::Running) && self.request.is_none() && !self.checkpoint.due;
        goes_on && self.cursor.stage() == Stage::Shared
    }

    /// The number of leading batches of a shared evaluation whose results it knows, and their sums.
    pub(crate) fn known_batches(&self) -> (usize, Sums) {
        (self.cursor.evaluated(), self.results.underway.evaluation.clone())
    }

    /// Takes over the sums of the first `batches` batches.
    pub(crate) fn know_batches(&mut self, (batches, sums): &(usize, Sums)) {
        if self.cursor.evaluated() != *batches {
            self.cursor.know_batches(*batches);
            self.results.underway.evaluation = sums.clone();
        }
    }

    /// Ends a shared evaluation whose batches are all known; `by` names the tasks that computed them.
    ///
    /// # Errors
    /// An objective without the figures of its metrics.
    pub(crate) fn end_shared_evaluation(&mut self, by: &[String]) -> Result<Progress, EngineError> {
        let kind = EvaluationKind::Initial;
        let result = self.results.underway.end_evaluation().mean(self.info.chain(), &self.info.task.spec)?;
        let best = self.results.note(kind, 0, &result);
        let alone = by == [self.info.task.name.clone()];
        self.results.initial_by = if alone { Vec::new() } else { by.to_vec() };
        self.cursor.end_shared_evaluation();
        Ok(Progress::Evaluated { kind, step: 0, result, best })
    }
}
