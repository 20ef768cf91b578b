//! The first masters of tasks: drawn or read, or those of a checkpoint.
//!
//! They go into the store group by group, so that a model that host memory has no room for is never whole in it.

use super::memory::RunMemory;
use crate::admission::{best_bytes, groups};
use crate::checkpoint::{Checkpoint, ImageValues, Reader};
use crate::error::{EngineError, guarded};
use crate::task::Facts;
use crate::weights::initial_image;
use hydra_core::{Chain, FloatType, TrainSpec};
use hydra_spill::{DeviceLink, ImageId, Masters, NarrowFloats, Reservation, SpillError, TierStore};
use rayon::prelude::*;
use std::ops::Range;

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

/// Puts the first masters of tasks into the store.
pub(super) struct FirstMasters<'a> {
    pub store: &'a dyn TierStore,
    pub memory: &'a mut RunMemory,
    /// Makes a home for what is promoted from host memory.
    pub link: &'a dyn DeviceLink,
}

impl FirstMasters<'_> {
    /// Puts those of one task there; returns whether its best masters so far are among them.
    ///
    /// # Errors
    /// Weights that cannot be read.
    pub(super) fn put(&mut self, facts: &Facts) -> Result<bool, EngineError> {
        const WHAT: &str = "reading the first weights";
        let checkpoint = facts.task.resume.as_ref();
        let mut reader = guarded(WHAT, || Ok(checkpoint.map(Checkpoint::reader).transpose()?))?;
        let mut best = false;
        for group in self.groups(facts) {
            let (rooms, passing) = self.rooms(facts, group.clone())?;
            let images = guarded(WHAT, || values(facts, reader.as_mut(), group.clone()))?;
            for ((image, values), room) in group.zip(images).zip(rooms) {
                best |= values.best.is_some();
                self.insert(facts, image, values, room)?;
            }
            drop(passing);
        }
        if let Some(reader) = reader {
            reader.finish(facts.task.spec.optimizer.moments())?;
        }
        Ok(best)
    }

    /// The images of a task that are made together.
    fn groups(&self, facts: &Facts) -> Vec<Range<usize>> {
        let images = 0..facts.chain().images().len();
        let bytes: Vec<u64> = images.clone().map(|image| facts.stored_bytes(image)).collect();
        let on_disk: Vec<bool> = images.map(|image| facts.lives_on_disk(image)).collect();
        groups(&on_disk, &bytes, self.memory.disk.working.capacity())
    }

    /// Room for each image of a group where it will live and, for those that leave host memory, there until they have.
    fn rooms(
        &mut self,
        facts: &Facts,
        group: Range<usize>,
    ) -> Result<(Vec<Reservation>, Reservation), EngineError> {
        let leaving = group.clone().filter(|image| facts.lives_on_disk(*image));
        let passing = leaving.map(|image| facts.stored_bytes(image)).sum();
        let passing = self.memory.disk.working.reserve(passing, facts.name()).map_err(SpillError::from)?;
        let mut room = |image: usize| match facts.lives_on_disk(image) {
            true => self.memory.disk.room(facts.id, facts.stored_bytes(image)),
            false => {
                let room = self.memory.host.reserve(facts.stored_bytes(image), facts.name());
                Ok(room.map_err(SpillError::from)?)
            }
        };
        Ok((group.map(&mut room).collect::<Result<_, _>>()?, passing))
    }

    fn insert(
        &self,
        facts: &Facts,
        image: usize,
        values: ImageValues,
        mut room: Reservation,
    ) -> Result<(), EngineError> {
        let ImageValues { params, moments, best } = values;
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
