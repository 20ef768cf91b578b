//! The first evaluations of a run, shared by the tasks that begin with equal weights.

use super::Run;
use super::journal::Journal;
use super::shared_evaluation::SharedEvaluation;
use crate::stages::{EvaluationKind, Stage};
use crate::task::{LiveTask, Progress};
use hydra_core::TaskId;
use std::collections::BTreeMap;

/// What tells one evaluation from another: the first of the tasks that evaluate alike, and the hash of the weights.
type Key = (usize, String);

/// The evaluations before training that tasks may share, and which one is whose.
#[derive(Default)]
pub(super) struct FirstEvaluations {
    all: BTreeMap<Key, SharedEvaluation>,
    of: BTreeMap<TaskId, Key>,
}

impl FirstEvaluations {
    /// A task has begun with weights of this hash, if others may begin with the same.
    pub(super) fn join(&mut self, task: &LiveTask, weights: Option<String>) {
        let Some(key) = task.info.admitted.first_evaluation.zip(weights) else { return };
        if task.cursor.stage() == Stage::Shared {
            let batches = task.cursor.program().batches(EvaluationKind::Initial);
            let shared = self.all.entry(key.clone()).or_insert_with(|| SharedEvaluation::new(batches));
            shared.join(task.id(), task.known_batches());
            self.of.insert(task.id(), key);
        }
    }

    /// Notes a batch of a shared evaluation, and gives how far that is; other progress stays what it is.
    pub(super) fn hear(&mut self, task: &LiveTask, progress: Progress) -> Progress {
        let Progress::SharedBatch { batch, sums, units } = progress else { return progress };
        let Some(shared) = self.of.get(&task.id()).and_then(|key| self.all.get_mut(key)) else {
            return Progress::Nothing;
        };
        shared.computed(task.id(), batch, sums);
        let kind = EvaluationKind::Initial;
        let (done, batches) = (shared.computed_batches(), task.cursor.program().batches(kind));
        // Of the last one its result tells.
        match done < batches {
            true => Progress::Evaluating { kind, batch: done - 1, batches, units },
            false => Progress::Nothing,
        }
    }
}

impl Run {
    /// Divides what is open of shared evaluations among their tasks, as many as there are devices, and ends those that are
    /// over. A task that fails or stops leaves what it has taken to the others.
    pub(super) fn share_first_evaluations(&mut self) {
        let devices = self.devices.iter().filter(|device| !device.lost).count();
        for shared in self.first_evaluations.all.values_mut() {
            pass_on(shared, &mut self.tasks);
            match shared.is_over() {
                true => end(shared, &mut self.tasks, &mut self.journal),
                false => divide(shared, &mut self.tasks, devices),
            }
        }
    }
}

/// Tells the tasks of an evaluation what is known of it, and leaves those out that go on without it.
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

fn end(shared: &mut SharedEvaluation, tasks: &mut [LiveTask], journal: &mut Journal) {
    let name = |id: &TaskId| tasks[id.0].info.name().to_owned();
    let by: Vec<String> = shared.by().iter().map(name).collect();
    let at_s = journal.clock.now();
    for id in shared.members() {
        let task = &mut tasks[id.0];
        if task.receives_batches() {
            task.know_batches(shared.known());
            let progress = task.end_shared_evaluation(&by);
            journal.progress(task, progress, at_s);
            shared.leave(id);
        }
    }
}
