//! What an evaluation means for its task, which may end early.

use super::model::{Model, Progress};
use crate::stages::{EvaluationKind, ShardTask, Stage};

impl Model {
    /// An evaluation has ended: what it gave, and whether the task goes on.
    pub(crate) fn end_evaluation(&mut self, kind: EvaluationKind, step: usize) -> Progress {
        let result = std::mem::take(&mut self.evaluation).mean(self.chain());
        let mut best = false;
        match kind {
            EvaluationKind::Initial => self.results.initial = Some(result.clone()),
            EvaluationKind::Validation => self.results.validation = Some(result.clone()),
            EvaluationKind::Test => self.results.test = Some(result.clone()),
            EvaluationKind::Periodic => {
                self.results.periodic.push((step, result.clone()));
                best = self.results.best.as_ref().is_none_or(|(_, best)| result.loss < best.loss);
                if best {
                    self.results.best = Some((step, result.clone()));
                    self.results.validation = Some(result.clone());
                }
                if self.cursor.at_minibatch_start() && self.out_of_patience() {
                    self.cursor.stop(true);
                }
            }
        }
        Progress::Evaluated { kind, step, result, best }
    }

    /// Whether an evaluation computes yet that may be the last one.
    pub(crate) fn awaits_verdict(&self) -> bool {
        let periodic = EvaluationKind::Periodic;
        let evaluates =
            |task: ShardTask| matches!(task.stage, Stage::Evaluate { kind, .. } if kind == periodic);
        let may_end = self.task.spec.patience.is_some() && self.running_task.is_some_and(evaluates);
        may_end && self.cursor.at_minibatch_start()
    }

    /// Whether as many evaluations as the task has patience for were no better than the best one.
    fn out_of_patience(&self) -> bool {
        let best = self.results.best.as_ref().map(|(step, _)| *step);
        let since = self.results.periodic.iter().rev().take_while(|(step, _)| Some(*step) != best).count();
        self.task.spec.patience.is_some_and(|patience| since >= patience)
    }

    /// Whether it ended, or is to end, before its length because evaluations got no better.
    pub(crate) fn stopped_early(&self) -> bool {
        let trained = self.results.losses.len();
        self.results.failure.is_none() && trained < self.cursor.program().steps && self.out_of_patience()
    }
}
