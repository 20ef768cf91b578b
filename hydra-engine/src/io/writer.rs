//! Hashes and writes trained models, and writes checkpoints, on a separate thread.

use crate::checkpoint::{self, Position, TaskAtRest, Tensors};
use crate::error::{EngineError, guarded};
use crate::protocol::{Event, Reporter, Written};
use crate::weights::{ParamHashes, WeightHash, pieces, read_params, read_piece};
use bytes::Bytes;
use crossbeam_channel::Receiver;
use hydra_core::{ByteSize, Chain, ModelWriter, ParamBufferLayout, ParamBufferReader, TaskId, WeightError};
use hydra_spill::{
    Budget, DeviceResidentStore, DiskStore, Hashes, ParamBufferId, SharedStore, SpillError, TierStore,
};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// The run's store, as the writer reads it.
pub(crate) struct WriterStores {
    pub shared: Arc<SharedStore>,
    pub device_resident: Arc<DeviceResidentStore>,
    pub disk: Arc<DiskStore>,
    /// Host memory for reading master weights from the disk, in bytes.
    pub read_bytes: u64,
}

impl WriterStores {
    /// A view of the store with a read budget of its own, which a user's model writer cannot exhaust for others.
    fn open(&self) -> (SharedStore, Budget) {
        let budget = Budget::new("host memory for writing a model", ByteSize(self.read_bytes));
        let disk = Arc::new(self.disk.within(budget.clone()));
        (self.shared.over(Arc::new(self.device_resident.over(disk))), budget)
    }
}

pub(crate) enum WriterJob {
    Model(WriteJob),
    /// Writes a checkpoint, with the best weights if `best`.
    Checkpoint {
        job: CheckpointJob,
        best: bool,
    },
}

/// A checkpoint to write; its task waits for it.
pub(crate) struct CheckpointJob {
    pub task: TaskId,
    pub chain: Arc<Chain>,
    pub file: PathBuf,
    pub state: Box<TaskAtRest>,
}

pub(crate) struct WriteJob {
    pub task: TaskId,
    pub chain: Arc<Chain>,
    pub output: Option<(Arc<dyn ModelWriter>, PathBuf)>,
    /// The file and the state of the final checkpoint; its position is set when the model is written.
    pub finished: Option<(PathBuf, Box<TaskAtRest>)>,
}

struct StoreReader<'a> {
    store: &'a dyn TierStore,
    budget: &'a Budget,
    task: TaskId,
    chain: &'a Chain,
}

impl StoreReader<'_> {
    fn of(&self, buffer: usize) -> (ParamBufferId, &ParamBufferLayout) {
        (ParamBufferId::new(self.task, buffer), &self.chain.buffers()[buffer])
    }

    fn failed(&self, buffer: usize) -> impl FnOnce(SpillError) -> WeightError {
        let chain = self.chain.name().to_owned();
        move |error| match error {
            SpillError::Budget(_) => WeightError::NoSpace { chain, buffer, source: error.into() },
            _ => WeightError::ParamBuffer { chain, buffer, source: error.into() },
        }
    }
}

impl ParamBufferReader for StoreReader<'_> {
    fn buffer(&self, buffer: usize) -> Result<Bytes, WeightError> {
        let (id, layout) = self.of(buffer);
        read_params(self.store, id, layout, self.budget).map_err(self.failed(buffer))
    }

    fn part(&self, buffer: usize, elements: Range<usize>) -> Result<Bytes, WeightError> {
        let (id, layout) = self.of(buffer);
        read_piece(self.store, id, layout, elements, self.budget).map_err(self.failed(buffer))
    }
}

/// Handles jobs until every sender is dropped.
pub(crate) fn run(stores: &WriterStores, jobs: &Receiver<WriterJob>, reporter: &Reporter) {
    for job in jobs {
        let event = match job {
            WriterJob::Model(job) => {
                let task = job.task;
                Event::Written { task, result: guarded("hashing the model", || write(stores, job)) }
            }
            WriterJob::Checkpoint { job, best } => {
                let (task, start_s) = (job.task, reporter.now());
                let write = || {
                    let (store, budget) = &stores.open();
                    let tensors = Tensors { store, budget, task, best };
                    checkpoint::write(&job.file, &job.state, &job.chain, Some(&tensors))
                };
                let result = guarded("writing a checkpoint", write);
                Event::Checkpointed { task, result, time: reporter.since(start_s) }
            }
        };
        reporter.send(event);
    }
}

fn write(stores: &WriterStores, job: WriteJob) -> Result<Written, EngineError> {
    let WriteJob { task, chain, output, finished } = job;
    // The task's writer reads within a budget of its own, because it may hold buffers after it returns.
    let ((store, budget), (theirs, their_budget)) = (&stores.open(), &stores.open());
    let masters = Tensors { store, budget, task, best: false };
    let sha256 = hashed(store, &StoreReader { store, budget, task, chain: &chain })?;
    let dir = match output {
        Some((writer, dir)) => {
            let reader = StoreReader { store: theirs, budget: their_budget, task, chain: &chain };
            let written = guarded("writing the model", || Ok(writer.write(&chain, &reader, &dir)?));
            if let Err(source) = written {
                // A resumed task then only has to write the model.
                let save = |(file, state): (PathBuf, Box<TaskAtRest>)| {
                    checkpoint::write(&file, &state, &chain, Some(&masters)).map(|_| file).map_err(Box::new)
                };
                let checkpoint = finished.map(save);
                return Err(EngineError::NotWritten { checkpoint, source: Box::new(source) });
            }
            Some(dir)
        }
        None => None,
    };
    let finish = |(file, mut state): (PathBuf, Box<TaskAtRest>)| {
        state.position = Position::Finished { sha256: sha256.clone(), dir: dir.clone() };
        // If no model was written, the checkpoint is the only copy of the trained weights.
        checkpoint::write(&file, &state, &chain, dir.is_none().then_some(&masters)).err()
    };
    let unsaved = finished.and_then(finish);
    Ok(Written { sha256, dir, unsaved })
}

/// The hash of a trained model; an error if a weight is not finite. Shared buffers, which are never written, were hashed when they
/// were stored.
fn hashed(store: &SharedStore, reader: &StoreReader<'_>) -> Result<String, EngineError> {
    let mut hash = WeightHash::default();
    for (buffer, layout) in reader.chain.buffers().iter().enumerate() {
        let (id, _) = reader.of(buffer);
        let hashes = match store.hashes(store.identity(id)) {
            Some(hashes) => hashes,
            None => hashed_buffer(buffer, layout, reader)?,
        };
        hash.add(&hashes);
    }
    Ok(hash.finish())
}

/// Reads and hashes the parameters of a buffer; an error if one is not finite.
fn hashed_buffer(
    buffer: usize,
    layout: &ParamBufferLayout,
    reader: &StoreReader<'_>,
) -> Result<Hashes, EngineError> {
    let mut hashes = ParamHashes::new(layout.params.len());
    for (piece, params) in pieces(layout) {
        let bytes = reader.part(buffer, piece.clone())?;
        let values: &[f32] = bytemuck::cast_slice(&bytes);
        for (slot, elements) in params {
            let values = &values[elements.start - piece.start..elements.end - piece.start];
            if layout.trained && !values.iter().all(|value| value.is_finite()) {
                return Err(EngineError::NotFinite { param: layout.params[slot].name.clone() });
            }
            hashes.add(slot, values);
        }
    }
    Ok(hashes.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::{initial_buffer, param_hashes};
    use hydra_models::mlp;
    use hydra_spill::{DramStore, Masters};

    #[test]
    fn of_a_shared_buffer_the_hashes_are_those_that_are_known() {
        let chain = mlp::chain(&[2, 16], 3).unwrap().training_only(&["classifier"]).unwrap();
        let (task, budget) = (TaskId(0), &Budget::new("host memory", ByteSize::mib(1)));
        let store = &SharedStore::new(Arc::new(DramStore::new()));
        let values = |buffer| initial_buffer(&chain, buffer, 1).unwrap();
        let masters = |buffer| Masters::new(values(buffer), Vec::new());
        let reserve = |masters: &Masters| budget.reserve(masters.len_bytes(), "a buffer").unwrap();
        let (frozen, trained) = (ParamBufferId::new(task, 0), ParamBufferId::new(task, 1));
        let known: Hashes = chain.buffers()[0].params.iter().map(|_| [7; 32]).collect();
        store.join(frozen, frozen.shared(), Some(reserve(&masters(0))));
        store.put(frozen.shared(), masters(0), known.clone(), None).unwrap();
        store.insert(trained, masters(1), reserve(&masters(1))).unwrap();
        let mut expected = WeightHash::default();
        [known, param_hashes(&chain, 1, &values(1))].iter().for_each(|hashes| expected.add(hashes));
        let found = hashed(store, &StoreReader { store, budget, task, chain: &chain }).unwrap();
        assert_eq!(found, expected.finish());
    }
}
