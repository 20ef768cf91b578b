//! Checks tasks before anything is measured.

use crate::error::{EngineError, guarded, refused};
use crate::train_task::TrainTask;
use hydra_core::{CoreError, Dataset, gather_items};

/// Refuses a run without tasks, and any task or shape whose microbatch group is longer than a minibatch or whose
/// datasets are empty, have different item shapes or cannot be shuffled.
pub(super) fn check(tasks: &[TrainTask], shapes: &[TrainTask]) -> Result<(), EngineError> {
    if tasks.is_empty() {
        return Err(EngineError::NoTask);
    }
    tasks.iter().chain(shapes).try_for_each(|task| check_data(task).map_err(refused(&task.name)))
}

fn check_data(task: &TrainTask) -> Result<(), EngineError> {
    task.spec.metric.as_ref().map_or(Ok(()), |metric| task.metric(metric).map(drop))?;
    task.rounds.as_ref().map_or(Ok(()), |of| of.check(&task.chain))?;
    let accumulate = task.spec.accumulate.max(1);
    if let Some(microbatch_group) = task
        .execution
        .microbatch_group
        .filter(|microbatch_group| !(1..=accumulate).contains(microbatch_group))
    {
        return Err(EngineError::MicrobatchGroup { microbatch_group, accumulate });
    }
    let datasets = [Some(&task.train), task.validation.as_ref(), task.test.as_ref()];
    let datasets = || datasets.into_iter().flatten();
    if let Some(data) = datasets().find(|data| data.is_empty()) {
        let dataset = data.name().to_owned();
        return Err(EngineError::EmptyDataset { task: task.name.clone(), dataset });
    }
    if !task.evaluate_only {
        task.spec.check_evaluations(task.train.len())?;
    }
    let draws_order = task.spec.shuffle && !task.evaluate_only;
    if draws_order && u32::try_from(task.train.len()).is_err() {
        let expected = "false for a dataset of more than 4294967295 items (the order of an epoch takes 8 bytes per item)";
        return Err(CoreError::Spec { name: "shuffle", found: "true".to_owned(), expected }.into());
    }
    let expected = item_shapes(task.train.as_ref())?;
    for data in datasets() {
        let found = item_shapes(data.as_ref())?;
        if found != expected {
            let dataset = data.name().to_owned();
            return Err(EngineError::ItemShapes { dataset, expected, found });
        }
    }
    Ok(())
}

/// The shapes of the tensors of the largest one-item batch.
fn item_shapes(data: &dyn Dataset) -> Result<Vec<Vec<usize>>, EngineError> {
    let batch = guarded("reading a batch", || {
        gather_items(data, &[0])?;
        Ok(data.largest(1)?)
    })?;
    Ok(batch.inputs.parts.into_iter().chain(batch.targets.parts).map(|part| part.shape).collect())
}
