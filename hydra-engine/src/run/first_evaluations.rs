//! The first evaluations of a run, shared by tasks that start with equal weights.

use super::Run;
use super::journal::Journal;
use super::shared_evaluation::SharedEvaluation;
use crate::error::EngineError;
use crate::task::{LiveTask, Progress};
use hydra_core::TaskId;
use hydra_sched::program::{EvaluationKind, Stage};
use std::collections::BTreeMap;

/// Identifies an evaluation: the first of the tasks that evaluate alike, and the hash of the weights.
type Key = (usize, String);

/// The shared evaluations before training, and the one that each task takes part in.
#[derive(Default)]
pub(super) struct FirstEvaluations {
    all: BTreeMap<Key, SharedEvaluation>,
    of: BTreeMap<TaskId, Key>,
}

impl FirstEvaluations {
    /// Adds a task that starts with weights of this hash to its shared evaluation, if it has one.
    pub(super) fn join(&mut self, task: &LiveTask, weights: Option<String>) {
        let Some(key) = task.info.admitted.first_evaluation.zip(weights) else { return };
        if task.cursor.stage() == Stage::Shared {
            let batches = task.cursor.program().batches(EvaluationKind::Initial, 0);
            let shared = self.all.entry(key.clone()).or_insert_with(|| SharedEvaluation::new(batches));
            shared.join(task.id(), task.known_batches());
            self.of.insert(task.id(), key);
        }
    }

    /// Records a batch of a shared evaluation and returns the progress of the whole; other progress is returned
    /// unchanged.
    pub(super) fn record(&mut self, task: &LiveTask, progress: Progress) -> Progress {
        let Progress::SharedBatch { batch, sums, units } = progress else { return progress };
        let Some(shared) = self.of.get(&task.id()).and_then(|key| self.all.get_mut(key)) else {
            return Progress::Nothing;
        };
        shared.computed(task.id(), batch, sums);
        let kind = EvaluationKind::Initial;
        let (done, batches) = (shared.computed_batches(), task.cursor.program().batches(kind, 0));
        // The last batch is reported by the result.
        match done < batches {
            true => Progress::Evaluating { kind, batch: done - 1, batches, units },
            false => Progress::Nothing,
        }
    }
}

impl Run {
    /// Divides the open batches of shared evaluations among at most as many tasks as there are devices, and ends
    /// complete evaluations. The batches of a task that fails or stops go to the others.
    pub(super) fn share_first_evaluations(&mut self) {
        let devices = self.devices.iter().filter(|device| !device.lost).count();
        let mut failed = Vec::new();
        for shared in self.first_evaluations.all.values_mut() {
            pass_on(shared, &mut self.tasks);
            match shared.is_over() {
                true => failed.extend(end(shared, &mut self.tasks, &mut self.journal)),
                false => divide(shared, &mut self.tasks, devices),
            }
        }
        for (id, error) in failed {
            let fate = self.tasks[id.0].fails_in(0, error);
            self.apply_fate(id.0, fate);
        }
    }
}

/// Gives the tasks of an evaluation its known sums, and removes those that no longer take part.
fn pass_on(shared: &mut SharedEvaluation, tasks: &mut [LiveTask]) {
    for id in shared.members() {
        let task = &mut tasks[id.0];
        if !task.shares_evaluation() {
            shared.leave(id);
        } else if task.receives_batches() && !shared.is_known() {
            task.know_batches(shared.known());
        }
    }
}

fn divide(shared: &mut SharedEvaluation, tasks: &mut [LiveTask], devices: usize) {
    for id in shared.members() {
        let task = &mut tasks[id.0];
        if task.awaits_batch()
            && let Some(batch) = shared.take(id, devices)
        {
            task.cursor.take_batch(batch);
        }
    }
}

/// Ends the evaluation for each of its tasks; returns those that fail.
fn end(
    shared: &mut SharedEvaluation,
    tasks: &mut [LiveTask],
    journal: &mut Journal,
) -> Vec<(TaskId, EngineError)> {
    let name = |id: &TaskId| tasks[id.0].info.name().to_owned();
    let by: Vec<String> = shared.by().iter().map(name).collect();
    let at_s = journal.clock.now();
    let mut failed = Vec::new();
    for id in shared.members() {
        let task = &mut tasks[id.0];
        if task.receives_batches() {
            task.know_batches(shared.known());
            match task.end_shared_evaluation(&by) {
                Ok(progress) => journal.progress(task, progress, at_s),
                Err(error) => failed.push((id, error)),
            }
            shared.leave(id);
        }
    }
    failed
}
