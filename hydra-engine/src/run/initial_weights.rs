//! The first masters of tasks: drawn or read, or those of a checkpoint.
//!
//! They go into the store group by group, so that a model that host memory has no room for is never whole in it.

use super::memory::MastersHeadroom;
use crate::admission::{SharedBuffer, best_bytes, groups};
use crate::ahead_of_time::AheadOfTimeInit;
use crate::checkpoint::{Checkpoint, Part, Reader};
use crate::error::{EngineError, guarded};
use crate::protocol::{Begun, Event, Reporter};
use crate::task::TaskInfo;
use crate::weights::{WeightHash, initial_buffer, param_hashes};
use crossbeam_channel::Receiver;
use hydra_core::FloatType;
use hydra_spill::{
    DeviceLink, Hashes, Masters, MastersPart, NarrowFloats, PIECE, ParamBufferId, Reservation, SharedStore,
    SpillError, TierStore,
};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// The first parameters of a group of buffers: the next ones of its checkpoint, or drawn, before or now.
fn params(
    info: &TaskInfo,
    ahead_of_time: &AheadOfTimeInit,
    reader: Option<&mut Reader>,
    group: Range<usize>,
) -> Result<Vec<Vec<f32>>, EngineError> {
    let (chain, seed) = (info.chain(), info.task.spec.seed);
    let drawn = |buffer: usize| {
        let ahead_of_time = ahead_of_time.take(&info.task.name, buffer);
        Ok(ahead_of_time.map_or_else(|| initial_buffer(chain, buffer, seed), Ok)?)
    };
    match reader {
        Some(reader) => chain.buffers()[group].iter().map(|buffer| Ok(reader.params(buffer)?)).collect(),
        None => group.into_par_iter().map(drawn).collect(),
    }
}

/// Puts the first masters of one task after the other, until every sender of them is gone.
pub(super) fn run(jobs: &Receiver<InitialWeights>, reporter: &Reporter) {
    for masters in jobs {
        let task = masters.info.id;
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
    /// Returns whether the next buffer is to be hashed.
    fn wants(&self, frozen: bool) -> bool {
        self.weights.is_some() || frozen && self.frozen.is_some()
    }

    /// Adds the next buffer.
    fn add(&mut self, frozen: bool, hashes: &Hashes) {
        self.weights.iter_mut().for_each(|hash| hash.add_hashes(hashes));
        self.frozen.iter_mut().filter(|_| frozen).for_each(|hash| hash.add_hashes(hashes));
    }
}

/// The first masters of a task, with their room. Whichever thread has them puts them into the store.
pub(super) struct InitialWeights {
    pub info: Arc<TaskInfo>,
    pub store: Arc<SharedStore>,
    /// Makes a home for what is promoted from host memory.
    pub link: Arc<dyn DeviceLink>,
    pub room: MastersHeadroom,
    /// First values that were drawn before.
    pub ahead_of_time: Arc<AheadOfTimeInit>,
}

impl InitialWeights {
    /// Puts them there, and hashes those that others ask for. What other tasks have put there too is compared.
    ///
    /// # Errors
    /// Weights that cannot be read, and [`EngineError::Changed`].
    pub(super) fn put(mut self) -> Result<Begun, EngineError> {
        const WHAT: &str = "reading the first weights";
        let task = &self.info.task;
        let checkpoint = task.resume.as_ref().or(task.weights.as_ref());
        let open = || guarded(WHAT, || Ok(checkpoint.map(Checkpoint::reader).transpose()?));
        if self.info.shared_names().next().is_some() {
            // What others read too must be what was written, before it is there.
            open()?.map_or(Ok(()), Reader::verify)?;
        }
        let mut reader = open()?;
        let mut best = false;
        let mut known = self.known();
        for group in self.groups(reader.is_some()) {
            let buffers =
                guarded(WHAT, || params(&self.info, &self.ahead_of_time, reader.as_mut(), group.clone()))?;
            let hashes = self.hashes(group.clone(), &buffers, &known);
            for ((buffer, params), hashes) in group.zip(buffers).zip(hashes) {
                hashes.iter().for_each(|hashes| known.add(self.is_frozen(buffer), hashes));
                self.place(buffer, params, hashes)?;
                if let Some(reader) = &mut reader {
                    best |= guarded(WHAT, || self.go_on(reader, buffer))?;
                }
            }
        }
        if let Some(reader) = reader {
            let of_own = self.info.task.resume.as_ref().map(|_| &self.info.task.spec);
            reader.finish(of_own.map(|spec| spec.optimizer.moments()))?;
        }
        let [weights, frozen] = [known.weights, known.frozen].map(|hash| hash.map(WeightHash::finish));
        Ok(Begun { best, weights, frozen })
    }

    /// The hashes that are asked for, of nothing yet.
    fn known(&self) -> Known {
        let (info, buffers) = (&self.info, 0..self.info.chain().buffers().len());
        let kept = info.identity.is_some() && buffers.into_iter().any(|buffer| self.is_frozen(buffer));
        Known {
            weights: info.admitted.first_evaluation.map(|_| WeightHash::default()),
            frozen: kept.then(WeightHash::default),
        }
    }

    fn is_frozen(&self, buffer: usize) -> bool {
        !self.info.chain().buffers()[buffer].trained
    }

    /// The hashes of these buffers, of those for which somebody asks.
    fn hashes(&self, group: Range<usize>, buffers: &[Vec<f32>], known: &Known) -> Vec<Option<Hashes>> {
        let (chain, shared) = (self.info.chain(), &self.info.admitted.shared);
        let is_wanted = |buffer: usize| shared[buffer].is_some() || known.wants(self.is_frozen(buffer));
        let of = |(buffer, params): (usize, &Vec<f32>)| {
            is_wanted(buffer).then(|| param_hashes(chain, buffer, params))
        };
        group.into_par_iter().zip(buffers).map(of).collect()
    }

    /// Puts a buffer where it will live.
    fn place(&mut self, buffer: usize, params: Vec<f32>, hashes: Option<Hashes>) -> Result<(), EngineError> {
        if let Some((shared, hashes)) = self.info.admitted.shared[buffer].zip(hashes) {
            return self.share(shared, buffer, params, hashes);
        }
        let room = self.room(buffer)?;
        self.insert(buffer, params, room)
    }

    /// Reads what a checkpoint has of a buffer beside its parameters, with which a task that resumes goes on. Returns whether
    /// best parameters are among it.
    fn go_on(&self, reader: &mut Reader, buffer: usize) -> Result<bool, EngineError> {
        let TaskInfo { task, .. } = &*self.info;
        let (layout, id) = (&task.chain.buffers()[buffer], ParamBufferId::new(self.info.id, buffer));
        let (resumes, moments) = (task.resume.is_some(), task.spec.optimizer.moments());
        // What lives on a device goes there as a whole.
        let piece = if self.info.on_device() { layout.elements } else { PIECE };
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

    /// The buffers that are made together: one after the other where they are read.
    fn groups(&self, are_read: bool) -> Vec<Range<usize>> {
        let buffers = 0..self.info.chain().buffers().len();
        if are_read {
            return buffers.map(|buffer| buffer..buffer + 1).collect();
        }
        let bytes: Vec<u64> = buffers.clone().map(|buffer| self.info.passing_bytes(buffer)).collect();
        let is_there = |buffer: usize| {
            self.info.admitted.shared[buffer].is_some_and(|shared| self.store.hashes(shared.id).is_some())
        };
        let passing = |buffer: usize| match self.info.lives_on_disk(buffer) {
            _ if is_there(buffer) => Some(self.room.compared.bytes()),
            true => Some(self.room.passing.bytes()),
            false => None,
        };
        groups(&buffers.map(passing).collect::<Vec<_>>(), &bytes)
    }

    /// Puts a buffer that other tasks have too where it will live, or finds that it is there with the same values.
    fn share(
        &self,
        shared: SharedBuffer,
        buffer: usize,
        params: Vec<f32>,
        hashes: Hashes,
    ) -> Result<(), EngineError> {
        let Some(there) = self.store.hashes(shared.id) else {
            return Ok(self.store.put(shared.id, self.masters(buffer, params), hashes)?);
        };
        let chain = self.info.chain();
        let params = chain.buffers()[buffer].params.iter().zip(there.iter().zip(hashes.iter()));
        let differs = params.into_iter().find(|(_, (there, found))| there != found);
        differs.map_or(Ok(()), |(param, _)| Err(self.changed(&param.name, buffer)))
    }

    /// The error of a parameter whose values are others than those that another task has read.
    fn changed(&self, param: &str, buffer: usize) -> EngineError {
        let (task, param) = (&self.info.task, param.to_owned());
        let said = || task.chain.source().origin(&task.chain, buffer, task.spec.seed);
        let origin = match task.resume.as_ref().or(task.weights.as_ref()) {
            Some(checkpoint) => checkpoint.path().display().to_string(),
            None => said().unwrap_or_else(|| format!("the source of chain `{}`", task.chain.name())),
        };
        EngineError::Changed { param, origin }
    }

    /// Room for a buffer where it will live.
    fn room(&mut self, buffer: usize) -> Result<Reservation, EngineError> {
        let bytes = self.info.stored_bytes(buffer);
        if !self.info.lives_on_disk(buffer) {
            return Ok(self.room.host.split(bytes));
        }
        let room = self.room.disk.as_mut().map(|room| room.split(bytes));
        Ok(room.ok_or(SpillError::BufferMissing { buffer: ParamBufferId::new(self.info.id, buffer) })?)
    }

    fn insert(&self, buffer: usize, params: Vec<f32>, mut room: Reservation) -> Result<(), EngineError> {
        let info = &self.info;
        let (layout, id) = (&info.chain().buffers()[buffer], ParamBufferId::new(info.id, buffer));
        let best = best_bytes(layout, &info.task.spec).map(|bytes| room.split(bytes));
        self.store.insert(id, self.masters(buffer, params), room)?;
        if let Some(room) = best {
            // Before there are any, nobody asks for them.
            self.store.insert(id.snapshot(), Masters::new(vec![0.0; layout.elements], Vec::new()), room)?;
        }
        Ok(())
    }

    /// The first masters of a buffer, in memory of where they will live.
    fn masters(&self, buffer: usize, params: Vec<f32>) -> Masters {
        let info = &self.info;
        let trained = info.chain().buffers()[buffer].trained;
        let moments = if trained { info.task.spec.optimizer.moments() } else { 0 };
        // They are zeros.
        let moments = vec![Vec::new(); moments];
        let home = |values: Vec<f32>| match info.on_device() || info.lives_on_disk(buffer) {
            // They leave host memory.
            true => values.into(),
            false => self.link.pin(values),
        };
        match info.chain().buffers()[buffer].float {
            FloatType::F32 => Masters::new(home(params), moments),
            // The masters themselves do not move.
            float => {
                let narrow = Some(NarrowFloats::of(&params, float, home));
                Masters { narrow, ..Masters::new(params, moments) }
            }
        }
    }
}
