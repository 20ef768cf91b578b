//! Hashing and writing trained models, on a thread of its own.

use crate::error::{EngineError, guarded};
use crate::event::{Event, Written};
use crate::weights::WeightHash;
use crossbeam_channel::{Receiver, Sender};
use hydra_core::{Chain, ImageReader, ModelWriter, TaskId, WeightError};
use hydra_spill::{ImageId, TierStore};
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) struct WriteJob {
    pub task: TaskId,
    pub chain: Arc<Chain>,
    pub output: Option<(Arc<dyn ModelWriter>, PathBuf)>,
}

struct StoreReader<'a> {
    store: &'a dyn TierStore,
    task: TaskId,
    chain: &'a Chain,
}

impl ImageReader for StoreReader<'_> {
    fn image(&self, image: usize) -> Result<bytes::Bytes, WeightError> {
        let view = self.store.read_masters(ImageId { task: self.task, image });
        view.map(|view| view.bytes).map_err(|error| WeightError::Image {
            chain: self.chain.name().to_owned(),
            image,
            source: Box::new(error),
        })
    }
}

/// Works until every sender of jobs is gone.
pub(crate) fn run(store: &dyn TierStore, jobs: &Receiver<WriteJob>, events: &Sender<Event>) {
    for job in jobs {
        let task = job.task;
        let result = guarded("writing the model", || write(store, job));
        // The orchestrator outlives its workers; if it is gone, the run was given up.
        let _ = events.send(Event::Written { task, result });
    }
}

fn write(store: &dyn TierStore, job: WriteJob) -> Result<Written, EngineError> {
    let reader = StoreReader { store, task: job.task, chain: &job.chain };
    let mut hash = WeightHash::default();
    for image in 0..job.chain.images().len() {
        hash.add(&job.chain, image, bytemuck::cast_slice(&reader.image(image)?));
    }
    let dir = match job.output {
        Some((writer, dir)) => {
            writer.write(&job.chain, &reader, &dir)?;
            Some(dir)
        }
        None => None,
    };
    Ok(Written { sha256: hash.finish(), dir })
}
