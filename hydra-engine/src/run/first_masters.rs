//! The first masters of tasks: drawn or read, or those of a checkpoint.
//!
//! They go into the store group by group, so that a model that host memory has no room for is never whole in it.

use super::memory::MastersRoom;
use crate::admission::{SharedImage, best_bytes, groups};
use crate::checkpoint::{Checkpoint, Part, Reader};
use crate::early::EarlyValues;
use crate::error::{EngineError, guarded};
use crate::protocol::{Begun, Event, Reporter};
use crate::task::Facts;
use crate::weights::{WeightHash, initial_image, param_hashes};
use crossbeam_channel::Receiver;
use hydra_core::FloatType;
use hydra_spill::{
    DeviceLink, Hashes, ImageId, Masters, MastersPart, NarrowFloats, PIECE, Reservation, SharedStore,
    SpillError, TierStore,
};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// The first parameters of a group of images: the next ones of its checkpoint, or drawn, before or now.
fn params(
    facts: &Facts,
    early: &EarlyValues,
    reader: Option<&mut Reader>,
    group: Range<usize>,
) -> Result<Vec<Vec<f32>>, EngineError> {
    let (chain, seed) = (facts.chain(), facts.task.spec.seed);
    let drawn = |image: usize| {
        let early = early.take(&facts.task.name, image);
        Ok(early.map_or_else(|| initial_image(chain, image, seed), Ok)?)
    };
    match reader {
        Some(reader) => chain.images()[group].iter().map(|image| Ok(reader.params(image)?)).collect(),
        None => group.into_par_iter().map(drawn).collect(),
    }
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
        for group in self.groups(reader.is_some()) {
            let images = guarded(WHAT, || params(&self.facts, &self.early, reader.as_mut(), group.clone()))?;
            let hashes = self.hashes(group.clone(), &images, &known);
            for ((image, params), hashes) in group.zip(images).zip(hashes) {
                hashes.iter().for_each(|hashes| known.add(self.is_frozen(image), hashes));
                self.place(image, params, hashes)?;
                if let Some(reader) = &mut reader {
                    best |= guarded(WHAT, || self.go_on(reader, image))?;
                }
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
    fn hashes(&self, group: Range<usize>, images: &[Vec<f32>], known: &Known) -> Vec<Option<Hashes>> {
        let (chain, shared) = (self.facts.chain(), &self.facts.admitted.shared);
        let is_wanted = |image: usize| shared[image].is_some() || known.wants(self.is_frozen(image));
        let of = |(image, params): (usize, &Vec<f32>)| {
            is_wanted(image).then(|| param_hashes(chain, image, params))
        };
        group.into_par_iter().zip(images).map(of).collect()
    }

    /// Puts an image where it will live.
    fn place(&mut self, image: usize, params: Vec<f32>, hashes: Option<Hashes>) -> Result<(), EngineError> {
        if let Some((shared, hashes)) = self.facts.admitted.shared[image].zip(hashes) {
            return self.share(shared, image, params, hashes);
        }
        let room = self.room(image)?;
        self.insert(image, params, room)
    }

    /// Reads what a checkpoint has of an image beside its parameters, with which a task that resumes goes on. Returns whether
    /// best parameters are among it.
    fn go_on(&self, reader: &mut Reader, image: usize) -> Result<bool, EngineError> {
        let Facts { task, .. } = &*self.facts;
        let (layout, id) = (&task.chain.images()[image], ImageId::new(self.facts.id, image));
        let (resumes, moments) = (task.resume.is_some(), task.spec.optimizer.moments());
        // What lives on a device goes there as a whole.
        let piece = if self.facts.on_device() { layout.elements } else { PIECE };
        let mut best = false;
        reader.others(layout, piece, &mut |part, start, values| {
            match part {
                Part::Moment(moment) if resumes && moment < moments => {
                    self.store.write_part(id, MastersPart::Moment(moment), start, values)?;
                }
                Part::Best if resumes && best_bytes(layout, &task.spec).is_some() => {
                    self.store.write_part(id.snapshot(), MastersPart::Params, start, values)?;
                    best = true;
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok(best)
    }

    /// The images that are made together: one after the other where they are read.
    fn groups(&self, are_read: bool) -> Vec<Range<usize>> {
        let images = 0..self.facts.chain().images().len();
        if are_read {
            return images.map(|image| image..image + 1).collect();
        }
        let bytes: Vec<u64> = images.clone().map(|image| self.facts.passing_bytes(image)).collect();
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
        params: Vec<f32>,
        hashes: Hashes,
    ) -> Result<(), EngineError> {
        let Some(there) = self.store.hashes(shared.id) else {
            return Ok(self.store.put(shared.id, self.masters(image, params), hashes)?);
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

    fn insert(&self, image: usize, params: Vec<f32>, mut room: Reservation) -> Result<(), EngineError> {
        let facts = &self.facts;
        let (layout, id) = (&facts.chain().images()[image], ImageId::new(facts.id, image));
        let best = best_bytes(layout, &facts.task.spec).map(|bytes| room.split(bytes));
        self.store.insert(id, self.masters(image, params), room)?;
        if let Some(room) = best {
            // Before there are any, nobody asks for them.
            self.store.insert(id.snapshot(), Masters::new(vec![0.0; layout.elements], Vec::new()), room)?;
        }
        Ok(())
    }

    /// The first masters of an image, in memory of where they will live.
    fn masters(&self, image: usize, params: Vec<f32>) -> Masters {
        let facts = &self.facts;
        let trained = facts.chain().images()[image].trained;
        let moments = if trained { facts.task.spec.optimizer.moments() } else { 0 };
        // They are zeros.
        let moments = vec![Vec::new(); moments];
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
