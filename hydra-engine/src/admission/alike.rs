//! Finds tasks whose first evaluations are the same computation if their weights are equal.

use crate::train_task::TrainTask;
use hydra_core::Dataset;
use hydra_sched::program::{EvaluationKind, MicrobatchGroup, Stage};
use std::sync::Arc;

/// Returns whether two datasets are the same object.
pub(super) fn is_same_dataset(one: &Arc<dyn Dataset>, other: &Arc<dyn Dataset>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

/// For each task, the first task whose evaluation before training is the same computation if both start from equal
/// weights; `None` if no other task has the same one.
///
/// Two evaluations count as the same only if nothing can differ: the validation data is one object, read in batches
/// of the same size, and the chains are [known to evaluate alike](hydra_core::Chain::evaluates_as). The devices of a
/// run are of one kind.
pub(super) fn equal_first_evaluations(tasks: &[&TrainTask]) -> Vec<Option<usize>> {
    let mut firsts: Vec<usize> = Vec::new();
    let mut first_of = |index: usize| {
        let task = tasks[index];
        task.validation.as_ref().filter(|_| evaluates_first(task))?;
        let known = firsts.iter().copied().find(|first| evaluate_alike(tasks[*first], task));
        Some(known.unwrap_or_else(|| {
            firsts.push(index);
            index
        }))
    };
    let first: Vec<Option<usize>> = (0..tasks.len()).map(&mut first_of).collect();
    let is_shared = |of: &usize| first.iter().filter(|first| **first == Some(*of)).count() > 1;
    first.iter().map(|first| first.filter(is_shared)).collect()
}

/// Returns whether the evaluation before training is still to be done.
fn evaluates_first(task: &TrainTask) -> bool {
    let whole = 0..task.chain.len();
    let program = task.program(std::slice::from_ref(&whole), 0, MicrobatchGroup::ONE);
    matches!(task.initial_cursor(program).stage(), Stage::Evaluate { kind: EvaluationKind::Initial, .. })
}

fn evaluate_alike(one: &TrainTask, other: &TrainTask) -> bool {
    let data = one.validation.as_ref().zip(other.validation.as_ref());
    data.is_some_and(|(one, other)| is_same_dataset(one, other))
        && one.evaluation_batch() == other.evaluation_batch()
        && one.chain.evaluates_as(&other.chain)
}
