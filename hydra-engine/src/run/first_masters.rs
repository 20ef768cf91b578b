//! The first masters of tasks: drawn or read, or those of a checkpoint.
//!
//! They go into the store group by group, so that a model that host memory has no room for is never whole in it.

use super::memory::MastersRoom;
use crate::admission::{best_bytes, groups};
use crate::checkpoint::{Checkpoint, ImageValues, Reader};
use crate::error::{EngineError, guarded};
use crate::protocol::{Begun, Event, Reporter};
use crate::task::Facts;
use crate::weights::{WeightHash, initial_image};
use crossbeam_channel::Receiver;
use hydra_core::{Chain, FloatType, TrainSpec};
use hydra_spill::{DeviceLink, ImageId, Masters, NarrowFloats, Reservation, SpillError, TierStore};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// The first values of a group of images: the next ones of its checkpoint, or drawn.
fn values(
    facts: &Facts,
    reader: Option<&mut Reader>,
    group: Range<usize>,
) -> Result<Vec<ImageValues>, EngineError> {
    let (chain, spec) = (facts.chain(), &facts.task.spec);
    match reader {
        Some(reader) => chain.images()[group].iter().map(|image| Ok(reader.image(image)?)).collect(),
        None => group.into_par_iter().map(|image| drawn(chain, spec, image)).collect(),
    }
}

fn drawn(chain: &Chain, spec: &TrainSpec, image: usize) -> Result<ImageValues, EngineError> {
    let params = initial_image(chain, image, spec.seed)?;
    let moments = if chain.images()[image].trained { spec.optimizer.moments() } else { 0 };
    Ok(ImageValues { moments: vec![vec![0.0; params.len()]; moments], params, best: None })
}

/// Puts the first masters of one task after the other, until every sender of them is gone.
pub(super) fn run(jobs: &Receiver<FirstMasters>, reporter: &Reporter) {
    for masters in jobs {
        let task = masters.facts.id;
        let result = guarded("putting the first masters", || masters.put());
        reporter.send(Event::Begun { task, result });
    }
}

/// The first masters of a task, with their room. Whichever thread has them puts them into the store.
pub(super) struct FirstMasters {
    pub facts: Arc<Facts>,
    pub store: Arc<dyn TierStore>,
    /// Makes a home for what is promoted from host memory.
    pub link: Arc<dyn DeviceLink>,
    pub room: MastersRoom,
}

impl FirstMasters {
    /// Puts them there, and hashes them if another task may begin with the same ones and the same evaluation.
    ///
    /// # Errors
    /// Weights that cannot be read.
    pub(super) fn put(mut self) -> Result<Begun, EngineError> {
        const WHAT: &str = "reading the first weights";
        let checkpoint = self.facts.task.resume.as_ref();
        let mut reader = guarded(WHAT, || Ok(checkpoint.map(Checkpoint::reader).transpose()?))?;
        let mut best = false;
        let mut weights = self.facts.admitted.first_evaluation.map(|_| WeightHash::default());
        for group in self.groups() {
            let images = guarded(WHAT, || values(&self.facts, reader.as_mut(), group.clone()))?;
            weights.iter_mut().for_each(|hash| self.hash(hash, group.clone(), &images));
            for (image, values) in group.zip(images) {
                best |= values.best.is_some();
                let room = self.room(image)?;
                self.insert(image, values, room)?;
            }
        }
        if let Some(reader) = reader {
            reader.finish(self.facts.task.spec.optimizer.moments())?;
        }
        Ok(Begun { best, weights: weights.map(WeightHash::finish) })
    }

    /// Adds the hashes of these images, each of which is hashed by itself.
    fn hash(&self, hash: &mut WeightHash, group: Range<usize>, images: &[ImageValues]) {
        let chain = self.facts.chain();
        let of = |(image, values): (usize, &ImageValues)| {
            let mut hash = WeightHash::default();
            hash.add(chain, image, &values.params);
            hash
        };
        let hashes: Vec<WeightHash> = group.into_par_iter().zip(images).map(of).collect();
        hashes.into_iter().for_each(|image| hash.add_hash(image));
    }

    /// The images that are made together.
    fn groups(&self) -> Vec<Range<usize>> {
        let images = 0..self.facts.chain().images().len();
        let bytes: Vec<u64> = images.clone().map(|image| self.facts.stored_bytes(image)).collect();
        let on_disk: Vec<bool> = images.map(|image| self.facts.lives_on_disk(image)).collect();
        groups(&on_disk, &bytes, self.room.passing.bytes())
    }

    /// Room for an image where it will live.
    fn room(&mut self, image: usize) -> Result<Reservation, EngineError> {
        let bytes = self.facts.stored_bytes(image);
        if !self.facts.lives_on_disk(image) {
            return Ok(self.room.host.split(bytes));
        }
        let room = self.room.disk.as_mut().map(|room| room.split(bytes));
        Ok(room.ok_or(SpillError::ImageMissing { image: ImageId::new(self.facts.id, image) })?)
    }

    fn insert(&self, image: usize, values: ImageValues, mut room: Reservation) -> Result<(), EngineError> {
        let ImageValues { params, moments, best } = values;
        let facts = &self.facts;
        let (layout, id) = (&facts.chain().images()[image], ImageId::new(facts.id, image));
        if let Some(bytes) = best_bytes(layout, &facts.task.spec) {
            // Before there are any, nobody asks for them.
            let best = best.unwrap_or_else(|| vec![0.0; params.len()]);
            self.store.insert(id.snapshot(), Masters::new(best, Vec::new()), room.split(bytes))?;
        }
        let home = |values: Vec<f32>| match facts.on_device() || facts.lives_on_disk(image) {
            // They leave host memory.
            true => values.into(),
            false => self.link.pin(values),
        };
        let masters = match layout.float {
            FloatType::F32 => Masters::new(home(params), moments),
            // The masters themselves do not move.
            float => {
                let narrow = Some(NarrowFloats::of(&params, float, home));
                Masters { narrow, ..Masters::new(params, moments) }
            }
        };
        self.store.insert(id, masters, room)?;
        Ok(())
    }
}
