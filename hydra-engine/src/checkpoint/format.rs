//! The file format: a safetensors header with the state in its metadata, then every tensor, buffer by buffer.
//!
//! It is written and read from front to back, one buffer at a time. A checksum over the whole file is in the header;
//! during the first write it is zeros.

use super::state::SCHEMA;
use super::{Position, TaskAtRest};
use crate::error::{CheckpointError, EngineError};
use crate::weights::{pieces, read_piece};
use hydra_core::optimizer::{MomentEncoding, MomentLayout};
use hydra_core::{BufferParam, Chain, ParamBufferLayout, TaskId, replace_file};
use hydra_spill::{Budget, MastersPart, ParamBufferId, SpillError, TierStore};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Deserialize;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The bytes of the header's length.
const PREFIX: usize = 8;
/// The longest header that safetensors allows.
const LONGEST_HEADER: u64 = 100_000_000;
/// The metadata key of the [`TaskAtRest`].
const STATE: &str = "hydra.checkpoint";
/// The header's bytes before the eight digits of the checksum.
const CHECKSUM: &[u8] = b"\"crc32\":\"";
const NO_CHECKSUM: &[u8] = b"00000000";
/// Bytes per read or write.
const BUFFER: usize = 1 << 20;
/// Elements of parameters that are read at a time.
const READ: usize = 1 << 16;

/// The weights of a task at rest.
pub(crate) struct Tensors<'a> {
    pub store: &'a dyn TierStore,
    /// Host memory for weights that are widened to `f32`.
    pub budget: &'a Budget,
    pub task: TaskId,
    /// True if the snapshot of the best weights is written too.
    pub best: bool,
}

/// The role of a tensor for a parameter.
#[derive(Clone, Copy)]
pub(crate) enum TensorRole {
    Masters,
    Moment(usize),
    Best,
}

impl TensorRole {
    fn name(self, param: &str) -> String {
        match self {
            Self::Masters => format!("masters/{param}"),
            Self::Moment(moment) => format!("moment{}/{param}", moment + 1),
            Self::Best => format!("best/{param}"),
        }
    }

    /// The parts of a buffer in file order.
    fn of(buffer: &ParamBufferLayout, moments: usize, best: bool) -> Vec<Self> {
        let mut parts = vec![Self::Masters];
        if buffer.is_optimized() {
            parts.extend((0..moments).map(Self::Moment));
        }
        if buffer.trained {
            parts.extend(best.then_some(Self::Best));
        }
        parts
    }
}

/// Writes a checkpoint and returns its size; without tensors it holds only the state. On an error an earlier file is
/// unchanged.
pub(crate) fn write(
    path: &Path,
    state: &TaskAtRest,
    chain: &Chain,
    tensors: Option<&Tensors<'_>>,
) -> Result<u64, EngineError> {
    let failed = |source| CheckpointError::Write { path: path.to_owned(), source };
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(failed)?;
    }
    let content = CheckpointSources { state, chain, tensors };
    replace_file(path, |file| content.write_to(file)).map_err(|failure| match failure {
        SaveError::Io(source) => failed(source).into(),
        SaveError::Source(error) => error,
    })?;
    Ok(path.metadata().map_err(failed)?.len())
}

/// An error of the file or of the store.
enum SaveError {
    Io(io::Error),
    Source(EngineError),
}

impl From<io::Error> for SaveError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// The sources of a checkpoint.
struct CheckpointSources<'a> {
    state: &'a TaskAtRest,
    chain: &'a Chain,
    tensors: Option<&'a Tensors<'a>>,
}

impl CheckpointSources<'_> {
    fn write_to(&self, file: &mut File) -> Result<(), SaveError> {
        let header = self.header()?;
        let checksum = checksum_at(&header).ok_or_else(|| io::Error::other("the header has no checksum"))?;
        let inner = BufWriter::with_capacity(BUFFER, &mut *file);
        let mut out = Summed { inner, sum: crc32fast::Hasher::new() };
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        if let Some(tensors) = self.tensors {
            for (index, buffer) in self.chain.buffers().iter().enumerate() {
                self.write_buffer(&mut out, index, buffer, tensors)?;
            }
        }
        out.flush()?;
        let sum = out.sum.clone();
        drop(out);
        file.seek(SeekFrom::Start((PREFIX + checksum) as u64))?;
        Ok(file.write_all(digits(sum).as_bytes())?)
    }

    fn write_buffer(
        &self,
        out: &mut impl Write,
        index: usize,
        buffer: &ParamBufferLayout,
        tensors: &Tensors<'_>,
    ) -> Result<(), SaveError> {
        let id = ParamBufferId::new(tensors.task, index);
        for part in TensorRole::of(buffer, self.state.moments(), tensors.best) {
            let (id, of) = match part {
                TensorRole::Masters => (id, MastersPart::Params),
                TensorRole::Moment(moment) => (id, MastersPart::Moment(moment)),
                TensorRole::Best => (id.snapshot(), MastersPart::Params),
            };
            let layout = self.layout(buffer, part);
            let source = |error: SpillError| SaveError::Source(error.into());
            // Each piece is a separate read.
            for (piece, params) in pieces(buffer) {
                let values = match part {
                    TensorRole::Masters => {
                        read_piece(tensors.store, id, buffer, piece.clone(), tensors.budget)
                    }
                    _ => tensors.store.read_part(id, of, piece.clone()).map(|view| view.bytes),
                };
                let values = values.map_err(source)?;
                let before = layout.bytes_of(piece).start;
                for (_, elements) in params {
                    let bytes = layout.bytes_of(elements);
                    out.write_all(&values[bytes.start - before..bytes.end - before])?;
                }
            }
        }
        Ok(())
    }

    /// Where the store has the elements of a part.
    fn layout(&self, buffer: &ParamBufferLayout, part: TensorRole) -> MomentLayout {
        match part {
            TensorRole::Moment(moment) => {
                MomentLayout::new(self.state.identity.spec.optimizer.encoding(moment), buffer)
            }
            _ => MomentLayout::default(),
        }
    }

    /// The header without a checksum: all tensors in file order, without gaps.
    fn header(&self) -> io::Result<Vec<u8>> {
        let mut end = 0;
        let mut infos = Vec::new();
        let best = self.tensors.is_some_and(|tensors| tensors.best);
        for buffer in self.chain.buffers().iter().filter(|_| self.tensors.is_some()) {
            for part in TensorRole::of(buffer, self.state.moments(), best) {
                let layout = self.layout(buffer, part);
                for param in &buffer.params {
                    let info = tensor(param, &layout, end);
                    end = info.data_offsets.1;
                    infos.push((part.name(&param.name), info));
                }
            }
        }
        let no_checksum = String::from_utf8_lossy(NO_CHECKSUM).into_owned();
        let metadata = HashMap::from([
            (STATE.to_owned(), serde_json::to_string(self.state)?),
            ("crc32".to_owned(), no_checksum),
        ]);
        let metadata = Metadata::new(Some(metadata), infos).map_err(io::Error::other)?;
        let mut header = serde_json::to_vec(&metadata)?;
        header.resize(header.len().next_multiple_of(8), b' ');
        match header.len() as u64 > LONGEST_HEADER {
            true => Err(io::Error::other(format!("its header of {} bytes is too long", header.len()))),
            false => Ok(header),
        }
    }
}

/// The tensor of a parameter in a part that is laid out so, if it begins at this byte.
fn tensor(param: &BufferParam, layout: &MomentLayout, start: usize) -> TensorInfo {
    let bytes = layout.bytes_of(param.range()).len();
    let data_offsets = (start, start + bytes);
    match layout.is_quantized(param) {
        true => TensorInfo { dtype: Dtype::U8, shape: vec![bytes], data_offsets },
        false => TensorInfo { dtype: Dtype::F32, shape: param.shape.clone(), data_offsets },
    }
}

/// The offset of the checksum's digits in a header. No string value can contain the same bytes, because its quotes
/// are escaped.
fn checksum_at(header: &[u8]) -> Option<usize> {
    let at = header.windows(CHECKSUM.len()).position(|window| window == CHECKSUM)? + CHECKSUM.len();
    header.get(at..at + NO_CHECKSUM.len()).map(|_| at)
}

fn digits(sum: crc32fast::Hasher) -> String {
    format!("{:08x}", sum.finalize())
}

/// A stream that updates a checksum with the bytes that pass.
struct Summed<T> {
    inner: T,
    sum: crc32fast::Hasher,
}

impl<T: Write> Write for Summed<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.sum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T: Read> Read for Summed<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.sum.update(&bytes[..read]);
        Ok(read)
    }
}

/// Receives the words of some elements of a part.
type Take<'a> = dyn FnMut(TensorRole, Range<usize>, &[f32]) -> Result<(), EngineError> + 'a;

/// Reads a checkpoint buffer by buffer, in order. The values are valid only if [`finish`](Self::finish) succeeds at
/// the end.
pub(crate) struct Reader {
    path: PathBuf,
    state: TaskAtRest,
    metadata: Metadata,
    /// The checksum in the header.
    pub(super) checksum: String,
    data: Summed<BufReader<File>>,
    /// True if it has the best weights.
    best: bool,
    /// The number of moments of each trained parameter.
    moments: usize,
    /// Bytes of tensors read so far.
    at: usize,
}

impl Reader {
    /// Reads the header.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let read = |source| CheckpointError::Read { path: path.to_owned(), source };
        let not = |problem: String| CheckpointError::NotACheckpoint { path: path.to_owned(), problem };
        let mut file = BufReader::with_capacity(BUFFER, File::open(path).map_err(read)?);
        let length = file.get_ref().metadata().map_err(read)?.len();
        let mut prefix = [0; PREFIX];
        if length < PREFIX as u64 {
            return Err(not(format!("it has {length} bytes")));
        }
        file.read_exact(&mut prefix).map_err(read)?;
        let size = u64::from_le_bytes(prefix);
        if size > LONGEST_HEADER || size > length - PREFIX as u64 {
            return Err(not(format!("its header claims {size} of its {length} bytes")));
        }
        let mut header = vec![0; size as usize];
        file.read_exact(&mut header).map_err(read)?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|error| not(format!("its header: {error}")))?;
        let state = state(path, &metadata)?;
        let expected = PREFIX as u64 + size + metadata.data_len() as u64;
        if length != expected {
            return Err(not(format!("it has {length} bytes, expected {expected}")));
        }
        let at = checksum_at(&header).ok_or_else(|| not("it has no checksum".to_owned()))?;
        let digits = at..at + NO_CHECKSUM.len();
        let checksum = String::from_utf8_lossy(&header[digits.clone()]).into_owned();
        header[digits].copy_from_slice(NO_CHECKSUM);
        let mut data = Summed { inner: file, sum: crc32fast::Hasher::new() };
        data.sum.update(&prefix);
        data.sum.update(&header);
        let names = metadata.offset_keys();
        let has = |part: TensorRole| names.iter().any(|name| name.starts_with(&part.name("")));
        let best = has(TensorRole::Best);
        let moments = (0..).take_while(|moment| has(TensorRole::Moment(*moment))).count();
        Ok(Self { path: path.to_owned(), state, metadata, checksum, data, best, moments, at: 0 })
    }

    /// Returns true if it has tensors.
    pub(crate) fn has_tensors(&self) -> bool {
        self.metadata.data_len() > 0
    }

    /// Returns the state. The whole file of a finished task is verified first, because its tensors are not read
    /// later.
    pub(crate) fn into_state(mut self) -> Result<TaskAtRest, CheckpointError> {
        if self.metadata.data_len() == 0 || matches!(self.state.position, Position::Finished { .. }) {
            self.read_all()?;
        }
        Ok(self.state)
    }

    /// Verifies the checksum of the whole file before its content is used.
    pub(crate) fn verify(mut self) -> Result<(), CheckpointError> {
        self.read_all()
    }

    fn read_all(&mut self) -> Result<(), CheckpointError> {
        let read = |source| CheckpointError::Read { path: self.path.clone(), source };
        io::copy(&mut self.data, &mut io::sink()).map_err(read)?;
        self.check()
    }

    /// Compares the checksum with that of the bytes read.
    fn check(&self) -> Result<(), CheckpointError> {
        let found = digits(self.data.sum.clone());
        match found == self.checksum {
            true => Ok(()),
            false => Err(CheckpointError::Damaged {
                path: self.path.clone(),
                found,
                expected: self.checksum.clone(),
            }),
        }
    }

    /// Refuses the checkpoint if the bytes read are not all of it, or if it does not have this number of moments (if
    /// given).
    pub(crate) fn finish(self, moments: Option<usize>) -> Result<(), CheckpointError> {
        // Earlier versions wrote the moments of a trained task whose model could not be written, too.
        if let Some(moments) = moments.filter(|moments| !self.state.is_trained() && self.moments != *moments)
        {
            let (expected, found) = (format!("{moments} moments"), format!("{}", self.moments));
            return Err(self.other_tensors(&expected, &found));
        }
        let rest = self.metadata.data_len() - self.at;
        if rest > 0 {
            return Err(self.other_tensors("tensors", &format!("{rest} bytes more than the model's")));
        }
        self.check()?;
        if self.state.has_best() && !self.best {
            let problem = "its state refers to best weights, but it has none".to_owned();
            return Err(CheckpointError::NotACheckpoint { path: self.path, problem });
        }
        Ok(())
    }

    /// Reads the parameters of the next buffer of the chain, if its tensors match those of the file. Read its other
    /// parts [next](Self::others).
    pub(crate) fn params(&mut self, buffer: &ParamBufferLayout) -> Result<Vec<f32>, CheckpointError> {
        let mut params = vec![0.0; buffer.elements];
        let layout = MomentLayout::default();
        self.begin(buffer, TensorRole::Masters, &layout)?;
        self.read(buffer, &layout, 0..buffer.elements, &mut params)?;
        Ok(params)
    }

    /// Reads the parameters of the next buffer as [`params`](Self::params), in parts: `take` receives the index of a
    /// parameter, the range of elements in the buffer, and their values.
    pub(crate) fn param_parts(
        &mut self,
        buffer: &ParamBufferLayout,
        mut take: impl FnMut(usize, Range<usize>, &[f32]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let layout = MomentLayout::default();
        self.begin(buffer, TensorRole::Masters, &layout)?;
        let mut values = Vec::new();
        for (slot, param) in buffer.params.iter().enumerate() {
            for start in param.range().step_by(READ) {
                let elements = start..param.range().end.min(start + READ);
                values.resize(elements.len(), 0.0);
                self.read(buffer, &layout, elements.clone(), &mut values)?;
                take(slot, elements, &values)?;
            }
        }
        Ok(())
    }

    /// Reads the other parts of a buffer in pieces. The moments must be laid out as `own`, as far as there are any.
    pub(crate) fn others(
        &mut self,
        buffer: &ParamBufferLayout,
        piece: usize,
        own: &[MomentLayout],
        take: &mut Take<'_>,
    ) -> Result<(), EngineError> {
        let mut words = Vec::with_capacity(piece.min(buffer.elements));
        for part in TensorRole::of(buffer, self.moments, self.best).into_iter().skip(1) {
            let layout = match part {
                TensorRole::Moment(moment) => {
                    own.get(moment).cloned().unwrap_or_else(|| self.found(buffer, part))
                }
                _ => MomentLayout::default(),
            };
            self.begin(buffer, part, &layout)?;
            for start in (0..buffer.elements).step_by(piece) {
                let elements = start..buffer.elements.min(start + piece);
                // Zeros for the gaps between parameters.
                words.clear();
                words.resize(layout.words_of(elements.clone()).len(), 0.0);
                self.read(buffer, &layout, elements.clone(), &mut words)?;
                take(part, elements, &words)?;
            }
        }
        Ok(())
    }

    /// The layout of a moment in the file.
    fn found(&self, buffer: &ParamBufferLayout, part: TensorRole) -> MomentLayout {
        let infos = buffer.params.iter().filter_map(|param| self.metadata.info(&part.name(&param.name)));
        match infos.into_iter().any(|info| info.dtype == Dtype::U8) {
            // All encodings in 8 bits have the same bytes.
            true => MomentLayout::new(MomentEncoding::Signed8, buffer),
            false => MomentLayout::default(),
        }
    }

    /// Checks that the tensors of a part are the next ones of the file.
    fn begin(
        &mut self,
        buffer: &ParamBufferLayout,
        part: TensorRole,
        layout: &MomentLayout,
    ) -> Result<(), CheckpointError> {
        let parts = |info: &TensorInfo| (info.dtype, info.shape.clone(), info.data_offsets);
        for param in &buffer.params {
            let name = part.name(&param.name);
            let expected = tensor(param, layout, self.at);
            match self.metadata.info(&name) {
                Some(info) if parts(info) == parts(&expected) => {}
                Some(info) => {
                    let at = |info: &TensorInfo| {
                        format!("{:?} {:?} at {:?}", info.dtype, info.shape, info.data_offsets)
                    };
                    return Err(self.other_tensors(&format!("tensor `{name}` {}", at(&expected)), &at(info)));
                }
                None => return Err(self.other_tensors(&format!("tensor `{name}`"), "none")),
            }
            self.at = expected.data_offsets.1;
        }
        Ok(())
    }

    /// Reads the words of the next elements of a part that is laid out so.
    fn read(
        &mut self,
        buffer: &ParamBufferLayout,
        layout: &MomentLayout,
        piece: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let out: &mut [u8] = bytemuck::cast_slice_mut(out);
        let before = layout.bytes_of(piece.clone()).start;
        for elements in buffer.params.iter().filter_map(|param| param.among(&piece)) {
            let bytes = layout.bytes_of(elements);
            let out = &mut out[bytes.start - before..bytes.end - before];
            let read = |source| CheckpointError::Read { path: self.path.clone(), source };
            self.data.read_exact(out).map_err(read)?;
        }
        Ok(())
    }

    fn other_tensors(&self, expected: &str, found: &str) -> CheckpointError {
        CheckpointError::Other {
            path: self.path.clone(),
            what: "model".to_owned(),
            found: found.to_owned(),
            expected: expected.to_owned(),
        }
    }
}

fn state(path: &Path, metadata: &Metadata) -> Result<TaskAtRest, CheckpointError> {
    #[derive(Deserialize)]
    struct FormatVersion {
        schema: u64,
    }
    let not = |problem: String| CheckpointError::NotACheckpoint { path: path.to_owned(), problem };
    let text = metadata.metadata().as_ref().and_then(|metadata| metadata.get(STATE));
    let text = text.ok_or_else(|| not(format!("its header has no `{STATE}`")))?;
    let broken = |error: serde_json::Error| not(format!("its state: {error}"));
    match serde_json::from_str::<FormatVersion>(text).map_err(broken)?.schema {
        found if found == u64::from(SCHEMA) => serde_json::from_str(text).map_err(broken),
        found => Err(CheckpointError::Schema { path: path.to_owned(), found, expected: SCHEMA }),
    }
}
