//! Stores the initial weights of tasks: drawn, read from a file, or from a checkpoint.
//!
//! They go into the store group by group, so that a model larger than host memory is never there as a whole.

use super::memory::MastersMemory;
use crate::admission::{SharedBuffer, best_bytes, groups, is_narrowed};
use crate::ahead_of_time::AheadOfTimeInit;
use crate::checkpoint::{Checkpoint, Reader, TensorRole};
use crate::error::{EngineError, guarded};
use crate::protocol::{Event, LoadedWeights, Reporter};
use crate::task::TaskInfo;
use crate::weights::{ParamHashes, WeightHash, initial_buffer, param_hashes};
use crossbeam_channel::Receiver;
use hydra_core::{BufferParam, Encoding, FileSpan, FloatType, ParamBufferLayout};
use hydra_spill::{
    Budget, DeviceLink, Files, Floats, Hashes, InPlaceParam, InPlaceParams, Masters, MastersPart,
    NarrowFloats, PIECE, ParamBufferId, Reservation, SharedStore, SourceFile, SpillError, TierStore,
};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// The initial parameters of a buffer.
enum Initial {
    /// `f32` values.
    Wide(Vec<f32>),
    /// Values in the form that is promoted, which is narrower.
    Narrow(NarrowFloats),
    /// Values that are read in place.
    InPlace(InPlaceParams),
    /// Values that are stored already, for another task.
    Stored,
}

/// Initial parameters and, where they are needed, their hashes.
type Loaded = (Initial, Option<Hashes>);

/// The places of a buffer's parameters in files, which are opened.
fn in_place_params(layout: &ParamBufferLayout, spans: &[FileSpan]) -> Result<Vec<InPlaceParam>, SpillError> {
    let mut files: Vec<Arc<SourceFile>> = Vec::new();
    let place = |(param, span): (&BufferParam, &FileSpan)| {
        let file = match files.iter().find(|file| file.path() == &*span.path) {
            Some(file) => file.clone(),
            None => SourceFile::open(&span.path)?,
        };
        files.push(file.clone());
        Ok::<_, SpillError>(InPlaceParam { elements: param.range(), file, offset: span.offset })
    };
    layout.params.iter().zip(spans).map(place).collect()
}

/// Stores the initial weights of one task after another until all senders are gone.
pub(super) fn run(jobs: &Receiver<InitialWeights>, reporter: &Reporter) {
    for masters in jobs {
        let task = masters.info.id;
        let result = guarded("storing the initial weights", || masters.put());
        reporter.send(Event::WeightsLoaded { task, result });
    }
}

/// Hashes that identify the weights a task starts with.
struct StartHashes {
    /// Hash of all weights, if another task may start with the same weights and evaluation.
    weights: Option<WeightHash>,
    /// Hash of the frozen weights, if the task has checkpoints: it shows tasks that resume whether they share them.
    frozen: Option<WeightHash>,
}

impl StartHashes {
    /// Returns whether the next buffer has to be hashed.
    fn wants(&self, frozen: bool) -> bool {
        self.weights.is_some() || frozen && self.frozen.is_some()
    }

    /// Adds the hashes of the next buffer.
    fn add(&mut self, frozen: bool, hashes: &Hashes) {
        self.weights.iter_mut().for_each(|hash| hash.add(hashes));
        self.frozen.iter_mut().filter(|_| frozen).for_each(|hash| hash.add(hashes));
    }
}

/// Encodes a buffer that is stored as it is promoted, and hashes its values.
struct Encoder<'a> {
    layout: &'a ParamBufferLayout,
    /// Whether the values of a quantized buffer are those of blocks already.
    are_exact: bool,
    narrow: NarrowFloats,
    hashes: Option<ParamHashes>,
    /// The values of encoded elements, where they are not those that were encoded.
    values: Vec<f32>,
}

impl Encoder<'_> {
    /// Encodes the next values of a parameter.
    fn add(&mut self, slot: usize, elements: Range<usize>, values: &[f32]) -> Result<(), EngineError> {
        let words = &mut self.narrow[self.layout.words_of(elements)];
        if !self.layout.encode(values, self.are_exact, words) {
            return Err(self.refusal(slot));
        }
        let Some(hashes) = &mut self.hashes else { return Ok(()) };
        if self.layout.encoding == Encoding::Nf4 {
            self.values.resize(values.len(), 0.0);
            self.layout.decode(words, &mut self.values);
            hashes.add(slot, &self.values);
        } else {
            hashes.add(slot, values);
        }
        Ok(())
    }

    /// The error for values that the encoding does not represent.
    fn refusal(&self, slot: usize) -> EngineError {
        let param = self.layout.params[slot].name.clone();
        let expected = match self.are_exact {
            true => {
                "those that blocks have, as the checkpoint of a quantized base and a quantized file should"
            }
            false => "finite numbers",
        };
        match self.layout.encoding {
            Encoding::Nf4 => EngineError::NotQuantized { param, expected },
            _ => EngineError::NotExact { param, float: self.layout.float },
        }
    }

    fn finish(self) -> Loaded {
        (Initial::Narrow(self.narrow), self.hashes.map(ParamHashes::finish))
    }
}

/// The initial weights of a task, with their reserved memory. The thread that has this value stores them.
pub(super) struct InitialWeights {
    pub info: Arc<TaskInfo>,
    pub store: Arc<SharedStore>,
    /// Allocates page-locked memory for buffers that are promoted from host memory.
    pub link: Arc<dyn DeviceLink>,
    pub memory: MastersMemory,
    /// Host memory for promotions of buffers that are read in place.
    pub working: Budget,
    /// Initial values drawn ahead of time.
    pub ahead_of_time: Arc<AheadOfTimeInit>,
}

impl InitialWeights {
    /// Stores the weights and hashes them as needed. Shared buffers that are already stored are compared, unless the files that
    /// they were read from are as they were.
    ///
    /// # Errors
    /// Weights that cannot be read, and [`EngineError::Changed`].
    pub(super) fn put(mut self) -> Result<LoadedWeights, EngineError> {
        const WHAT: &str = "reading the initial weights";
        let task = &self.info.task;
        let checkpoint = task.start.weights();
        let open = || guarded(WHAT, || Ok(checkpoint.map(Checkpoint::reader).transpose()?));
        if self.info.shared_names().next().is_some() {
            // Other tasks read these weights too, so the file is verified before any are stored.
            open()?.map_or(Ok(()), Reader::verify)?;
        }
        let mut reader = open()?;
        let mut best = false;
        let mut start_hashes = self.start_hashes();
        for group in self.groups(reader.is_some()) {
            // Before the files are read: what changes afterwards is noticed for the next task. A checkpoint may have other values
            // than its files have now.
            let files = |buffer| if reader.is_some() { None } else { self.info.files(buffer) };
            let files: Vec<Files> = group.clone().map(files).collect();
            let load = || self.load(group.clone(), reader.as_mut(), &files, &start_hashes);
            let loaded = guarded(WHAT, load)?;
            for ((buffer, files), (params, hashes)) in group.clone().zip(files).zip(loaded) {
                hashes.iter().for_each(|hashes| start_hashes.add(self.is_frozen(buffer), hashes));
                self.store_buffer(buffer, params, hashes, files)?;
                if let Some(reader) = &mut reader {
                    best |= guarded(WHAT, || self.restore_state(reader, buffer))?;
                }
            }
        }
        if let Some(reader) = reader {
            let of_own = self.info.task.start.state().map(|_| &self.info.task.spec);
            reader.finish(of_own.map(|spec| spec.optimizer.moments()))?;
        }
        let [weights, frozen] =
            [start_hashes.weights, start_hashes.frozen].map(|hash| hash.map(WeightHash::finish));
        Ok(LoadedWeights { best, weights, frozen })
    }

    /// Empty hashers, for the hashes that are needed.
    fn start_hashes(&self) -> StartHashes {
        let (info, buffers) = (&self.info, 0..self.info.chain().buffers().len());
        let kept = info.identity.is_some() && buffers.into_iter().any(|buffer| self.is_frozen(buffer));
        StartHashes {
            weights: info.admitted.first_evaluation.map(|_| WeightHash::default()),
            frozen: kept.then(WeightHash::default),
        }
    }

    fn is_frozen(&self, buffer: usize) -> bool {
        !self.info.chain().buffers()[buffer].trained
    }

    /// Returns whether a buffer has to be hashed.
    fn is_hashed(&self, buffer: usize, start_hashes: &StartHashes) -> bool {
        self.info.admitted.storage.shared[buffer].is_some() || start_hashes.wants(self.is_frozen(buffer))
    }

    /// The hashes of a shared buffer that another task has read from these files.
    fn stored(&self, buffer: usize, files: &Files) -> Option<Hashes> {
        let from = || self.store.hashes_from(self.info.admitted.storage.shared[buffer]?.id, files);
        self.memory.stored.get(&buffer).cloned().or_else(from)
    }

    /// The initial parameters of a group of buffers: the next ones in the checkpoint, stored already, drawn ahead of time, or
    /// drawn or read now.
    fn load(
        &self,
        group: Range<usize>,
        reader: Option<&mut Reader>,
        files: &[Files],
        start_hashes: &StartHashes,
    ) -> Result<Vec<Loaded>, EngineError> {
        let is_hashed = |buffer: usize| self.is_hashed(buffer, start_hashes);
        match reader {
            Some(reader) => {
                group.map(|buffer| self.load_buffer(buffer, Some(&mut *reader), is_hashed(buffer))).collect()
            }
            None => {
                let load = |(buffer, files)| match self.stored(buffer, files) {
                    Some(hashes) => Ok((Initial::Stored, Some(hashes))),
                    None => self.load_buffer(buffer, None, is_hashed(buffer)),
                };
                group.into_par_iter().zip(files).map(load).collect()
            }
        }
    }

    fn load_buffer(
        &self,
        buffer: usize,
        reader: Option<&mut Reader>,
        is_hashed: bool,
    ) -> Result<Loaded, EngineError> {
        let (chain, task) = (self.info.chain(), &self.info.task);
        if self.info.is_in_place(buffer) {
            return self.load_in_place(buffer, reader, is_hashed);
        }
        if chain.buffers()[buffer].encoding != Encoding::Masters && !is_narrowed(chain, buffer) {
            return self.load_narrow(buffer, reader, is_hashed);
        }
        let is_saved = reader.is_some();
        let params = match reader {
            Some(reader) => self.as_drawn(buffer, reader.params(&chain.buffers()[buffer])?)?,
            None => match self.ahead_of_time.take(&task.name, buffer) {
                Some(drawn) => drawn,
                None => initial_buffer(chain, buffer, task.spec.seed)?,
            },
        };
        if chain.buffers()[buffer].encoding != Encoding::Masters {
            let mut encoder = self.encoder(buffer, is_saved, is_hashed);
            for (slot, param) in chain.buffers()[buffer].params.iter().enumerate() {
                encoder.add(slot, param.range(), &params[param.range()])?;
            }
            return Ok(encoder.finish());
        }
        let hashes = is_hashed.then(|| param_hashes(chain, buffer, &params));
        Ok((Initial::Wide(params), hashes))
    }

    /// The saved values of a buffer. Earlier versions drew frozen weights of 16-bit chains in `f32` and computed with the rounded
    /// ones: where saved values are not of the type, those that are drawn now replace them, if rounding makes them equal.
    fn as_drawn(&self, buffer: usize, saved: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        let (chain, seed) = (self.info.chain(), self.info.task.spec.seed);
        let ParamBufferLayout { float, encoding, .. } = chain.buffers()[buffer];
        if encoding != Encoding::Narrow {
            return Ok(saved);
        }
        let mut rounded = vec![0.0; saved.len()];
        let mut bits = vec![0; saved.len()];
        float.narrow(&saved, &mut bits);
        float.widen(&bits, &mut rounded);
        if rounded == saved {
            return Ok(saved);
        }
        let drawn = initial_buffer(chain, buffer, seed)?;
        Ok(if rounded == drawn { drawn } else { saved })
    }

    /// Reads a buffer that is read in place for the first time. A checkpoint must have the same values.
    fn load_in_place(
        &self,
        buffer: usize,
        reader: Option<&mut Reader>,
        is_hashed: bool,
    ) -> Result<Loaded, EngineError> {
        let layout = &self.info.chain().buffers()[buffer];
        let hashed = is_hashed || reader.is_some();
        let mut hashes = hashed.then(|| ParamHashes::new(layout.params.len()));
        let mut values = Vec::new();
        let take = |slot: usize, bytes: &[u8]| {
            let Some(hashes) = &mut hashes else { return Ok(()) };
            values.resize(bytes.len() / layout.float.bytes(), 0.0);
            match layout.float {
                FloatType::F32 => bytemuck::cast_slice_mut::<f32, u8>(&mut values).copy_from_slice(bytes),
                float => float.widen(&bytemuck::pod_collect_to_vec::<u8, u16>(bytes), &mut values),
            }
            hashes.add(slot, &values);
            Ok::<_, EngineError>(())
        };
        let spans = self.info.chain().source().spans(self.info.chain(), buffer).unwrap_or_default();
        let (expected, found) = (layout.params.len(), spans.len());
        if expected != found {
            return Err(EngineError::Spans { buffer, expected, found });
        }
        let (of, working) = ((layout.elements, layout.float), self.working.clone());
        let in_place = InPlaceParams::check(in_place_params(layout, &spans)?, of, working, take)?;
        let hashes = hashes.map(ParamHashes::finish);
        if let Some((reader, hashes)) = reader.zip(hashes.as_ref()) {
            let mut saved = ParamHashes::new(layout.params.len());
            reader.param_parts(layout, |slot, _, values| {
                saved.add(slot, values);
                Ok(())
            })?;
            let saved = saved.finish();
            let differs = saved.iter().zip(hashes.iter()).position(|(saved, read)| saved != read);
            differs.map_or(Ok(()), |slot| Err(self.base_differs(&layout.params[slot].name, &spans[slot])))?;
        }
        Ok((Initial::InPlace(in_place), hashes.filter(|_| is_hashed)))
    }

    /// The error for a parameter whose values in a file are not those of the checkpoint.
    fn base_differs(&self, param: &str, span: &FileSpan) -> EngineError {
        let task = &self.info.task;
        let checkpoint = task.start.weights();
        let checkpoint = checkpoint.map(|checkpoint| checkpoint.path().to_owned()).unwrap_or_default();
        EngineError::BaseDiffers { param: param.to_owned(), file: span.path.to_path_buf(), checkpoint }
    }

    /// Reads a buffer that is stored as it is promoted, part by part.
    fn load_narrow(
        &self,
        buffer: usize,
        reader: Option<&mut Reader>,
        is_hashed: bool,
    ) -> Result<Loaded, EngineError> {
        let chain = self.info.chain();
        let mut encoder = self.encoder(buffer, reader.is_some(), is_hashed);
        let take = |slot: usize, elements: Range<usize>, values: &[f32]| encoder.add(slot, elements, values);
        match reader {
            Some(reader) => reader.param_parts(&chain.buffers()[buffer], take)?,
            None => drop(chain.read_parts(buffer, take)?),
        }
        Ok(encoder.finish())
    }

    /// An encoder of a buffer that is stored as it is promoted, for the values of its source or of a checkpoint.
    fn encoder(&self, buffer: usize, is_saved: bool, is_hashed: bool) -> Encoder<'_> {
        let chain = self.info.chain();
        let layout = &chain.buffers()[buffer];
        let are_exact = is_saved || chain.source().is_quantized(chain, buffer);
        // A store converts neither type: the words of blocks are no floats.
        let float = if layout.encoding == Encoding::Nf4 { FloatType::Bf16 } else { layout.float };
        let words = layout.words_of(0..layout.elements).len();
        let narrow = NarrowFloats::new(words, float, |values| self.in_tier(buffer, values));
        let hashes = is_hashed.then(|| ParamHashes::new(layout.params.len()));
        Encoder { layout, are_exact, narrow, hashes, values: Vec::new() }
    }

    /// Stores a buffer in its tier.
    fn store_buffer(
        &mut self,
        buffer: usize,
        params: Initial,
        hashes: Option<Hashes>,
        files: Files,
    ) -> Result<(), EngineError> {
        if let Some((shared, hashes)) = self.info.admitted.storage.shared[buffer].zip(hashes) {
            return self.share((shared, files), buffer, params, hashes);
        }
        let reservation = self.reserved(buffer)?;
        self.insert(buffer, params, reservation)
    }

    /// Reads the other values of a buffer in a checkpoint (moments and best parameters), which a resumed task
    /// continues from. Returns whether there were best parameters.
    fn restore_state(&self, reader: &mut Reader, buffer: usize) -> Result<bool, EngineError> {
        let TaskInfo { task, .. } = &*self.info;
        let (layout, id) = (&task.chain.buffers()[buffer], ParamBufferId::new(self.info.id, buffer));
        let resumes = task.start.state().is_some();
        // A task that takes only the weights can have another optimizer.
        let moments = if resumes { task.spec.optimizer.moment_layouts(layout) } else { Vec::new() };
        // A device-resident buffer is moved as a whole.
        let piece = if self.info.is_resident(buffer) { layout.elements } else { PIECE };
        let mut best = false;
        reader.others(layout, piece, &moments, &mut |part, elements, words| {
            match part {
                TensorRole::Moment(moment) if moment < moments.len() => {
                    self.store.write_part(id, MastersPart::Moment(moment), elements, words)?;
                }
                TensorRole::Best if resumes && best_bytes(layout, &task.spec).is_some() => {
                    self.store.write_part(id.snapshot(), MastersPart::Params, elements, words)?;
                    best = true;
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok(best)
    }

    /// The groups of buffers that are created together; single buffers if they are read from a file.
    fn groups(&self, are_read: bool) -> Vec<Range<usize>> {
        let buffers = 0..self.info.chain().buffers().len();
        if are_read {
            return buffers.map(|buffer| buffer..buffer + 1).collect();
        }
        let bytes: Vec<u64> = buffers.clone().map(|buffer| self.info.passing_bytes(buffer)).collect();
        let shared = &self.info.admitted.storage.shared;
        let is_there = |buffer: usize| shared[buffer].is_some_and(|of| self.store.hashes(of.id).is_some());
        let passing = |buffer: usize| match self.info.passes(buffer) {
            _ if self.memory.stored.contains_key(&buffer) => None,
            _ if is_there(buffer) => Some(self.memory.compared.bytes()),
            true => Some(self.memory.passing.bytes()),
            false => None,
        };
        groups(&buffers.map(passing).collect::<Vec<_>>(), &bytes)
    }

    /// Stores a shared buffer, or checks that the stored values are equal.
    fn share(
        &self,
        (shared, files): (SharedBuffer, Files),
        buffer: usize,
        params: Initial,
        hashes: Hashes,
    ) -> Result<(), EngineError> {
        let Some(there) = self.store.hashes(shared.id) else {
            return Ok(self.store.put(shared.id, self.masters(buffer, params)?, hashes, files)?);
        };
        let chain = self.info.chain();
        let params = chain.buffers()[buffer].params.iter().zip(there.iter().zip(hashes.iter()));
        let differs = params.into_iter().find(|(_, (there, found))| there != found);
        differs.map_or(Ok(()), |(param, _)| Err(self.changed(&param.name, buffer)))
    }

    /// The error for a parameter whose values differ from those that another task has read.
    fn changed(&self, param: &str, buffer: usize) -> EngineError {
        let (task, param) = (&self.info.task, param.to_owned());
        let said = || task.chain.source().origin(&task.chain, buffer, task.spec.seed);
        let origin = match task.start.weights() {
            Some(checkpoint) => checkpoint.path().display().to_string(),
            None => said().unwrap_or_else(|| format!("the weight source of chain `{}`", task.chain.name())),
        };
        EngineError::Changed { param, origin }
    }

    /// Takes the reserved memory of a buffer in its tier.
    fn reserved(&mut self, buffer: usize) -> Result<Reservation, EngineError> {
        let bytes = self.info.stored_bytes(buffer);
        if !self.info.lives_on_disk(buffer) {
            return Ok(self.memory.host.split(bytes));
        }
        let reservation = self.memory.disk.as_mut().map(|reservation| reservation.split(bytes));
        Ok(reservation
            .ok_or(SpillError::BufferMissing { buffer: ParamBufferId::new(self.info.id, buffer) })?)
    }

    fn insert(
        &self,
        buffer: usize,
        params: Initial,
        mut reservation: Reservation,
    ) -> Result<(), EngineError> {
        let info = &self.info;
        let (layout, id) = (&info.chain().buffers()[buffer], ParamBufferId::new(info.id, buffer));
        let best = best_bytes(layout, &info.task.spec).map(|bytes| reservation.split(bytes));
        self.store.insert(id, self.masters(buffer, params)?, reservation)?;
        if let Some(reservation) = best {
            // Not read before the first best parameters are saved.
            self.store.insert(
                id.snapshot(),
                Masters::new(vec![0.0; layout.elements], Vec::new()),
                reservation,
            )?;
        }
        Ok(())
    }

    /// Moves values to memory that suits their tier.
    fn in_tier(&self, buffer: usize, values: Vec<f32>) -> Floats {
        match self.info.is_resident(buffer) || self.info.lives_on_disk(buffer) {
            // These leave host memory, so they are not page-locked.
            true => values.into(),
            false => self.link.pin(values),
        }
    }

    /// The initial masters of a buffer, in memory that suits their tier.
    fn masters(&self, buffer: usize, params: Initial) -> Result<Masters, EngineError> {
        let info = &self.info;
        let layout = &info.chain().buffers()[buffer];
        let params = match params {
            Initial::Narrow(narrow) => return Ok(Masters::frozen(narrow)),
            Initial::InPlace(files) => return Ok(Masters::in_place(Arc::new(files))),
            Initial::Wide(params) => params,
            Initial::Stored => {
                return Err(SpillError::BufferMissing { buffer: ParamBufferId::new(info.id, buffer) }.into());
            }
        };
        let in_tier = |values| self.in_tier(buffer, values);
        let masters = match layout.float {
            FloatType::F32 => Masters::new(in_tier(params), Vec::new()),
            // Only the narrow copy is promoted; the masters need not be page-locked.
            float => {
                let narrow = Some(NarrowFloats::of(&params, float, in_tier));
                Masters { narrow, ..Masters::new(params, Vec::new()) }
            }
        };
        // Empty moments stand for zeros.
        Ok(masters.with_moments(info.task.spec.optimizer.moment_layouts(layout)))
    }
}
