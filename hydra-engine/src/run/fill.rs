//! What a run begins with: the first masters of every task, drawn or read, or those of its checkpoint.
//!
//! They go into the store group by group, so that a model that host memory has no room for is never whole in it.

use super::Run;
use crate::admission::{best_bytes, groups, waiting};
use crate::checkpoint::{ImageValues, Reader};
use crate::error::{EngineError, guarded};
use crate::optimizer::HostJob;
use crate::task::Model;
use crate::weights::initial_image;
use hydra_core::{Chain, FloatType, TrainSpec};
use hydra_spill::{ImageId, Masters, NarrowFloats, Reservation, SpillError};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Where a task's first masters come from.
enum Source {
    Drawn { chain: Arc<Chain>, spec: TrainSpec },
    Kept { chain: Arc<Chain>, reader: Box<Reader> },
}

impl Source {
    fn of(model: &Model) -> Result<Self, EngineError> {
        let chain = model.chain().clone();
        Ok(match &model.task.resume {
            Some(checkpoint) => Self::Kept { chain, reader: Box::new(checkpoint.reader()?) },
            None => Self::Drawn { chain, spec: model.task.spec.clone() },
        })
    }

    /// The images that follow those that were given so far.
    fn next(&mut self, group: Range<usize>) -> Result<Vec<ImageValues>, EngineError> {
        match self {
            Self::Drawn { chain, spec } => {
                group.into_par_iter().map(|image| drawn(chain, spec, image)).collect()
            }
            Self::Kept { chain, reader } => {
                chain.images()[group].iter().map(|image| Ok(reader.image(image)?)).collect()
            }
        }
    }

    fn finish(self, moments: usize) -> Result<(), EngineError> {
        match self {
            Self::Drawn { .. } => Ok(()),
            Self::Kept { reader, .. } => Ok(reader.finish(moments)?),
        }
    }
}

fn drawn(chain: &Chain, spec: &TrainSpec, image: usize) -> Result<ImageValues, EngineError> {
    let params = initial_image(chain, image, spec.seed)?;
    let moments = if chain.images()[image].trained { spec.optimizer.moments() } else { 0 };
    Ok(ImageValues { moments: vec![vec![0.0; params.len()]; moments], params, best: None })
}

impl Run {
    /// Puts every task's first masters into the store. A task whose weights cannot be read fails.
    pub(crate) fn fill_store(&mut self) {
        for index in
            (0..self.models.len()).filter(|index| self.models[*index].ended.is_none()).collect::<Vec<_>>()
        {
            if let Err(error) = self.fill_task(index) {
                self.fail(index, error);
            }
        }
    }

    fn fill_task(&mut self, index: usize) -> Result<(), EngineError> {
        const WHAT: &str = "reading the first weights";
        let mut source = guarded(WHAT, || Source::of(&self.models[index]))?;
        let mut best = false;
        for group in self.groups(index) {
            let (rooms, passing) = self.rooms(index, group.clone())?;
            let images = guarded(WHAT, || source.next(group.clone()))?;
            for ((image, values), room) in group.zip(images).zip(rooms) {
                best |= values.best.is_some();
                self.insert(index, image, values, room)?;
            }
            drop(passing);
        }
        let model = &self.models[index];
        source.finish(model.task.spec.optimizer.moments())?;
        let job = HostJob::Register {
            task: model.id,
            chain: model.chain().clone(),
            spec: model.task.spec.clone(),
            steps: model.cursor.program().steps,
            best,
        };
        let _ = self.threads.host.send(job);
        self.keep_waiting(index)
    }

    /// The images of a task that are made together.
    fn groups(&self, index: usize) -> Vec<Range<usize>> {
        let model = &self.models[index];
        let images = 0..model.chain().images().len();
        let bytes: Vec<u64> = images.clone().map(|image| model.kept_bytes(image)).collect();
        let on_disk: Vec<bool> = images.map(|image| model.lives_on_disk(image)).collect();
        groups(&on_disk, &bytes, self.disk.working.capacity())
    }

    /// Room for each image of a group where it will live and, for those that leave host memory, there until they have.
    fn rooms(
        &mut self,
        index: usize,
        group: Range<usize>,
    ) -> Result<(Vec<Reservation>, Option<Reservation>), EngineError> {
        let mut passing = None;
        let mut rooms = Vec::new();
        for image in group {
            let model = &self.models[index];
            let bytes = model.kept_bytes(image);
            if !model.lives_on_disk(image) {
                let room = self.host_budget.reserve(bytes, &model.task.name);
                rooms.push(room.map_err(SpillError::from)?);
                continue;
            }
            let on_its_way = self.disk.working.reserve(bytes, &model.task.name);
            add(&mut passing, on_its_way.map_err(SpillError::from)?);
            rooms.push(self.disk.room(model.id, bytes)?);
        }
        Ok((rooms, passing))
    }

    /// Keeps room for the gradients of a task that lives on the device.
    fn keep_waiting(&mut self, index: usize) -> Result<(), EngineError> {
        let model = &mut self.models[index];
        if model.placement.on_device() {
            let bytes = waiting(&model.task.chain, &model.task.spec);
            let budget = self.threads.devices[0].device.manager.budget();
            let room = budget.reserve(bytes, &model.task.name).map_err(SpillError::from)?;
            model.waiting = Some(room);
        }
        Ok(())
    }

    fn insert(
        &self,
        index: usize,
        image: usize,
        values: ImageValues,
        mut room: Reservation,
    ) -> Result<(), EngineError> {
        let ImageValues { params, moments, best } = values;
        let model = &self.models[index];
        let (layout, id) = (&model.chain().images()[image], ImageId::new(model.id, image));
        if let Some(bytes) = best_bytes(layout, &model.task.spec) {
            // Before there are any, nobody asks for them.
            let best = best.unwrap_or_else(|| vec![0.0; params.len()]);
            self.store.insert(id.best(), Masters::new(best, Vec::new()), room.split(bytes))?;
        }
        let home = |values: Vec<f32>| match model.placement.on_device() || model.lives_on_disk(image) {
            // They leave host memory.
            true => values.into(),
            false => self.threads.devices[0].device.manager.link().home(values),
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

fn add(sum: &mut Option<Reservation>, more: Reservation) {
    match sum {
        Some(sum) => sum.merge(more),
        None => *sum = Some(more),
    }
}
