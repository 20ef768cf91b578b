//! The first masters of tasks: drawn or read, or those of a checkpoint.
//!
//! They go into the store group by group, so that a model that host memory has no room for is never whole in it.

use super::memory::MastersRoom;
use crate::admission::{SharedImage, best_bytes, groups};
use crate::checkpoint::{Checkpoint, ImageValues, Reader};
use crate::early::EarlyValues;
use crate::error::{EngineError, guarded};
use crate::protocol::{Begun, Event, Reporter};
use crate::task::Facts;
use crate::weights::{WeightHash, initial_image, param_hashes};
use crossbeam_channel::Receiver;
use hydra_core::{Chain, FloatType, ImageLayout, TrainSpec};
use hydra_spill::{
    DeviceLink, Hashes, ImageId, Masters, NarrowFloats, Reservation, SharedStore, SpillError, TierStore,
};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// The first values of a group of images: the next ones of its checkpoint, or drawn.
fn values(
    facts: &Facts,
    early: &EarlyValues,
    reader: Option<&mut Reader>,
    group: Range<usize>,
) -> Result<Vec<ImageValues>, EngineError> {
    let (chain, spec) = (facts.chain(), &facts.task.spec);
    let fresh = facts.task.resume.is_none();
    let next = |reader: &mut Reader, image: &ImageLayout| {
        let values = reader.image(image)?;
        Ok(if fresh { first_of(values, image, spec) } else { values })
    };
    match reader {
        Some(reader) => chain.images()[group].iter().map(|image| next(reader, image)).collect(),
        None => {
            let early = |image: usize| early.take(&facts.task.name, image);
            group.into_par_iter().map(|image| drawn(chain, spec, image, early(image))).collect()
        }
    }
}

/// The weights alone of what was read, with the moments of a task that has trained nothing.
fn first_of(values: ImageValues, image: &ImageLayout, spec: &TrainSpec) -> ImageValues {
    let moments = if image.trained { spec.optimizer.moments() } else { 0 };
    ImageValues { moments: vec![vec![0.0; values.params.len()]; moments], best: None, ..values }
}

/// The first values of an image, drawn before or now.
fn drawn(
    chain: &Chain,
    spec: &TrainSpec,
    image: usize,
    early: Option<Vec<f32>>,
) -> Result<ImageValues, EngineError> {
    let params = early.map_or_else(|| initial_image(chain, image, spec.seed), Ok)?;
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

/// The hashes by which it is known what a task began with.
struct Known {
    /// Of all masters, where another task may begin with the same ones and the same evaluation.
    weights: Option<WeightHash>,
    /// Of those that are frozen, where checkpoints say it: tasks that go on see by it that they have the same.
    frozen: Option<WeightHash>,
}

impl Known {
    /// Returns whether the next image is to be hashed.
    fn wants(&self, frozen: bool) -> bool {
        self.weights.is_some() || frozen && self.frozen.is_some()
    }

    /// Adds the next image.
    fn add(&mut self, frozen: bool, hashes: &Hashes) {
        self.weights.iter_mut().for_each(|hash| hash.add_hashes(hashes));
        self.frozen.iter_mut().filter(|_| frozen).for_each(|hash| hash.add_hashes(hashes));
    }
}

/// The first masters of a task, with their room. Whichever thread has them puts them into the store.
pub(super) struct FirstMasters {
    pub facts: Arc<Facts>,
    pub store: Arc<SharedStore>,
    /// Makes a home for what is promoted from host memory.
    pub link: Arc<dyn DeviceLink>,
    pub room: MastersRoom,
    /// First values that were drawn before.
    pub early: Arc<EarlyValues>,
}

impl FirstMasters {
    /// Puts them there, and hashes those that others ask for. What other tasks have put there too is compared.
    ///
    /// # Errors
    /// Weights that cannot be read, and [`EngineError::Changed`].
    pub(super) fn put(mut self) -> Result<Begun, EngineError> {
        const WHAT: &str = "reading the first weights";
        let task = &self.facts.task;
        let checkpoint = task.resume.as_ref().or(task.weights.as_ref());
        let open = || guarded(WHAT, || Ok(checkpoint.map(Checkpoint::reader).transpose()?));
        if self.facts.shared_names().next().is_some() {
            // What others read too must be what was written, before it is there.
            open()?.map_or(Ok(()), Reader::verify)?;
        }
        let mut reader = open()?;
        let mut best = false;
        let mut known = self.known();
        for group in self.groups() {
            let images = guarded(WHAT, || values(&self.facts, &self.early, reader.as_mut(), group.clone()))?;
            let hashes = self.hashes(group.clone(), &images, &known);
            for ((image, values), hashes) in group.zip(images).zip(hashes) {
                best |= values.best.is_some();
                hashes.iter().for_each(|hashes| known.add(self.is_frozen(image), hashes));
                self.place(image, values, hashes)?;
            }
        }
        if let Some(reader) = reader {
            let of_own = self.facts.task.resume.as_ref().map(|_| &self.facts.task.spec);
            reader.finish(of_own.map(|spec| spec.optimizer.moments()))?;
        }
        let [weights, frozen] = [known.weights, known.frozen].map(|hash| hash.map(WeightHash::finish));
        Ok(Begun { best, weights, frozen })
    }

    /// The hashes that are asked for, of nothing yet.
    fn known(&self) -> Known {
        let (facts, images) = (&self.facts, 0..self.facts.chain().images().len());
        let kept = facts.identity.is_some() && images.into_iter().any(|image| self.is_frozen(image));
        Known {
            weights: facts.admitted.first_evaluation.map(|_| WeightHash::default()),
            frozen: kept.then(WeightHash::default),
        }
    }

    fn is_frozen(&self, image: usize) -> bool {
        !self.facts.chain().images()[image].trained
    }

    /// The hashes of these images, of those for which somebody asks.
    fn hashes(&self, group: Range<usize>, images: &[ImageValues], known: &Known) -> Vec<Option<Hashes>> {
        let (chain, shared) = (self.facts.chain(), &self.facts.admitted.shared);
        let is_wanted = |image: usize| shared[image].is_some() || known.wants(self.is_frozen(image));
        let of = |(image, values): (usize, &ImageValues)| {
            is_wanted(image).then(|| param_hashes(chain, image, &values.params))
        };
        group.into_par_iter().zip(images).map(of).collect()
    }

    /// Puts an image where it will live.
    fn place(
        &mut self,
        image: usize,
        values: ImageValues,
        hashes: Option<Hashes>,
    ) -> Result<(), EngineError> {
        if let Some((shared, hashes)) = self.facts.admitted.shared[image].zip(hashes) {
            return self.share(shared, image, values, hashes);
        }
        let room = self.room(image)?;
        self.insert(image, values, room)
    }

    /// The images that are made together.
    fn groups(&self) -> Vec<Range<usize>> {
        let images = 0..self.facts.chain().images().len();
        let bytes: Vec<u64> = images.clone().map(|image| self.facts.stored_bytes(image)).collect();
        let is_there = |image: usize| {
            self.facts.admitted.shared[image].is_some_and(|shared| self.store.hashes(shared.id).is_some())
        };
        let passing = |image: usize| match self.facts.lives_on_disk(image) {
            _ if is_there(image) => Some(self.room.compared.bytes()),
            true => Some(self.room.passing.bytes()),
            false => None,
        };
        groups(&images.map(passing).collect::<Vec<_>>(), &bytes)
    }

    /// Puts an image that other tasks have too where it will live, or finds that it is there with the same values.
    fn share(
        &self,
        shared: SharedImage,
        image: usize,
        values: ImageValues,
        hashes: Hashes,
    ) -> Result<(), EngineError> {
        let Some(there) = self.store.hashes(shared.id) else {
            return Ok(self.store.put(shared.id, self.masters(image, values), hashes)?);
        };
        let chain = self.facts.chain();
        let params = chain.images()[image].params.iter().zip(there.iter().zip(hashes.iter()));
        let differs = params.into_iter().find(|(_, (there, found))| there != found);
        differs.map_or(Ok(()), |(param, _)| Err(self.changed(&param.name, image)))
    }

    /// The error of a parameter whose values are others than those that another task has read.
    fn changed(&self, param: &str, image: usize) -> EngineError {
        let (task, param) = (&self.facts.task, param.to_owned());
        let said = || task.chain.source().origin(&task.chain, image, task.spec.seed);
        let origin = match task.resume.as_ref().or(task.weights.as_ref()) {
            Some(checkpoint) => checkpoint.path().display().to_string(),
            None => said().unwrap_or_else(|| format!("the source of chain `{}`", task.chain.name())),
        };
        EngineError::Changed { param, origin }
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
        let values = ImageValues { params, moments, best: None };
        self.store.insert(id, self.masters(image, values), room)?;
        Ok(())
    }

    /// The masters of an image, in memory of where they will live.
    fn masters(&self, image: usize, values: ImageValues) -> Masters {
        let (facts, ImageValues { params, moments, .. }) = (&self.facts, values);
        let home = |values: Vec<f32>| match facts.on_device() || facts.lives_on_disk(image) {
            // They leave host memory.
            true => values.into(),
            false => self.link.pin(values),
        };
        match facts.chain().images()[image].float {
            FloatType::F32 => Masters::new(home(params), moments),
            // The masters themselves do not move.
            float => {
                let narrow = Some(NarrowFloats::of(&params, float, home));
                Masters { narrow, ..Masters::new(params, moments) }
            }
        }
    }
}
