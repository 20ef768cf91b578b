//! Computes the identities of a run's tasks: everything that their results depend on bit for bit.

use super::admit::AdmittedTask;
use super::alike::is_same_dataset;
use crate::checkpoint::{Checkpoint, DataIdentity, Identity};
use crate::device::{DeviceKind, LogicalDevice};
use crate::error::{CheckpointError, EngineError, guarded, refused};
use crate::train_task::{Start, TrainTask};
use crate::weights::hexadecimal;
use hydra_core::{Batch, Dataset, gather_items};
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// The most items of a dataset that are hashed.
const HASHED_ITEMS: usize = 1 << 18;
/// Items that are read together.
const HASHED_TOGETHER: usize = 8;

/// The identities of the tasks that have checkpoints. A checkpoint that does not belong to its task is refused.
pub(crate) fn identities<'a>(
    tasks: impl Iterator<Item = (&'a TrainTask, &'a AdmittedTask)>,
    device: &LogicalDevice,
    config: &str,
    controlled: bool,
) -> Result<Vec<Option<Identity>>, EngineError> {
    let mut hashed = HashedData::default();
    let mut identity = |task: &TrainTask, admitted: &AdmittedTask| {
        if task.checkpoint.is_none() && task.start.state().is_none() && !controlled {
            return Ok(None);
        }
        let mut data = |data: Option<&Arc<dyn Dataset>>| data.map(|data| hashed.identity(data)).transpose();
        let identity = Identity {
            backend: backend(device),
            config: config.to_owned(),
            float: task.chain.float_type().to_string(),
            architecture: hexadecimal(Sha256::new_with_prefix(task.chain.architecture())),
            exact: admitted.optimizer.exact,
            spec: task.spec.clone(),
            train: data(Some(&task.train))?,
            validation: data(task.validation.as_ref())?,
            test: data(task.test.as_ref())?,
            initial_validation: task.initial_validation,
        };
        if let Some(checkpoint) = task.start.state() {
            check(task, checkpoint, &identity)?;
        }
        Ok(Some(identity))
    };
    tasks.map(|(task, admitted)| identity(task, admitted).map_err(refused(&task.name))).collect()
}

/// Refuses a checkpoint that does not belong to its task.
pub(crate) fn check(
    task: &TrainTask,
    checkpoint: &Checkpoint,
    own: &Identity,
) -> Result<(), CheckpointError> {
    let (saved, path) = (&checkpoint.state().identity, checkpoint.path());
    match task.start {
        Start::Forked(_) => saved.check_fork(path, own),
        _ => saved.check(path, own),
    }
}

/// The hashes of datasets, so that a shared dataset is read once.
#[derive(Default)]
struct HashedData(Vec<(Arc<dyn Dataset>, DataIdentity)>);

impl HashedData {
    fn identity(&mut self, data: &Arc<dyn Dataset>) -> Result<DataIdentity, EngineError> {
        if let Some((_, identity)) = self.0.iter().find(|(known, _)| is_same_dataset(known, data)) {
            return Ok(identity.clone());
        }
        let identity = data_identity(data.as_ref())?;
        self.0.push((data.clone(), identity.clone()));
        Ok(identity)
    }
}

fn data_identity(data: &dyn Dataset) -> Result<DataIdentity, EngineError> {
    let items = data.len();
    let hashed: Vec<usize> = match items <= HASHED_ITEMS {
        true => (0..items).collect(),
        false => {
            (0..HASHED_ITEMS).map(|i| (i as u128 * items as u128 / HASHED_ITEMS as u128) as usize).collect()
        }
    };
    let mut hash = Sha256::new();
    let gathered = |items: &[usize]| guarded("reading a batch", || Ok(gather_items(data, items)?));
    let mut add = |batch: &Batch| {
        for part in batch.inputs.parts.iter().chain(&batch.targets.parts) {
            hash.update(format!("{:?}{:?}", part.dtype, part.shape));
            hash.update(&part.bytes);
        }
    };
    for some in hashed.chunks(HASHED_TOGETHER) {
        let batch = gathered(some)?;
        // A single row with several items does not show where each of them ends.
        if batch.inputs.parts.iter().all(|part| part.shape.first() == Some(&some.len())) {
            add(&batch);
            continue;
        }
        some.iter().try_for_each(|item| gathered(&[*item]).map(|batch| add(&batch)))?;
    }
    Ok(DataIdentity { items, sha256: hexadecimal(hash) })
}

/// The hardware that computes, as far as results depend on it.
fn backend(device: &LogicalDevice) -> String {
    match device.spec.kind {
        DeviceKind::Cpu => "CPU".to_owned(),
        DeviceKind::Cuda { .. } | DeviceKind::Wgpu { .. } => device.model.clone(),
    }
}
