//! Sources and destinations of parameter values, buffer by buffer.

use crate::{BufferParam, Chain, Encoding, FloatType, HostTensor, Init, Key};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::fs::Metadata;
use std::ops::Range;
#[cfg(unix)]
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An error of reading or writing weights.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum WeightError {
    /// A parameter could not be read.
    #[error("the weights of `{param}` could not be read")]
    Read { param: String, source: BoxError },
    /// A buffer could not be read.
    #[error("parameter buffer {buffer} of chain `{chain}` could not be read")]
    ParamBuffer { chain: String, buffer: usize, source: BoxError },
    /// There is no memory for a buffer in addition to those that were read before and are still held.
    #[error(
        "no memory to read parameter buffer {buffer} of chain `{chain}` while others are held: drop each buffer before reading the next"
    )]
    NoSpace { chain: String, buffer: usize, source: BoxError },
    /// A model could not be written.
    #[error("the model could not be written to {}", path.display())]
    Write { path: PathBuf, source: BoxError },
}

/// Provides a chain's initial values one buffer at a time, so that the whole model is never in memory.
pub trait WeightSource: Send + Sync {
    /// Writes the values of the buffer at `buffer` of `chain` into `out`, which is zeroed and has
    /// [`ParamBufferLayout::elements`](crate::ParamBufferLayout::elements) elements; gaps between parameters
    /// stay zero.
    fn fill(&self, chain: &Chain, buffer: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError>;

    /// Identifies everything that the values of the buffer at `buffer` depend on, besides the names and
    /// shapes of its parameters: the files that they are read from, or the seed that they are drawn with.
    /// Tasks whose frozen buffers agree in all of this share one copy in a run. Each task's values are still
    /// compared, and a task whose values differ fails, so a file that changes during the run is detected; only where
    /// none of the [files](Self::files_of) has changed, nothing is read again.
    ///
    /// With the default, `None`, only tasks with the same chain object and the same seed share such buffers.
    fn origin(&self, _chain: &Chain, _buffer: usize, _seed: u64) -> Option<String> {
        None
    }

    /// The files that the values of the buffer at `buffer` are read from, as they were when the source opened them; none for
    /// values that are computed from nothing but what [`origin`](Self::origin) identifies. With the default, `None`, the values
    /// are compared for each task.
    fn files_of(&self, _chain: &Chain, _buffer: usize) -> Option<BTreeSet<FileVersion>> {
        None
    }

    /// The float type of the source's values for the buffer at `buffer`, whatever the seed: `Bf16` for parameters of a
    /// file in that type. A frozen buffer whose devices compute in this type is stored in it alone, and a run refuses
    /// values that the type does not represent. The default, `F32`, holds for all values.
    fn float_type(&self, _chain: &Chain, _buffer: usize) -> FloatType {
        FloatType::F32
    }

    /// Reads parts of the parameters of the buffer at `buffer`, with the values of [`fill`](Self::fill) for every seed.
    /// Initial values then take memory for a part at a time instead of for a buffer in `f32`. The default, `None`, is for
    /// a source that can only fill a whole buffer.
    fn parts<'a>(&'a self, _chain: &'a Chain, _buffer: usize) -> Option<PartReader<'a>> {
        None
    }

    /// Where files have the values of the buffer at `buffer`: one span for each of its parameters, in order. The bytes
    /// there are its elements in row-major order, little-endian, of type [`float_type`](Self::float_type). A frozen buffer
    /// can then be read in place, without a copy in host memory. The default, `None`, is for values that are drawn,
    /// computed, converted or permuted.
    fn spans(&self, _chain: &Chain, _buffer: usize) -> Option<Vec<FileSpan>> {
        None
    }

    /// Returns whether the values of the quantized buffer at `buffer` are those of blocks already, which are then stored as
    /// they are; a run refuses others. With the default, false, the values are quantized.
    fn is_quantized(&self, _chain: &Chain, _buffer: usize) -> bool {
        false
    }
}

/// Reads elements of a parameter: the function gets the parameter's index in the buffer, its first element to read, and
/// memory for the values.
pub type PartReader<'a> = Box<dyn Fn(usize, usize, &mut [f32]) -> Result<(), WeightError> + Send + Sync + 'a>;

/// The consecutive bytes of a parameter in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSpan {
    /// The file.
    pub path: Arc<Path>,
    /// The offset of the first byte.
    pub offset: u64,
}

/// A file at a moment: its path, its size, and what a file system changes with its content.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileVersion {
    path: PathBuf,
    bytes: u64,
    modified: Option<SystemTime>,
    /// The device, the inode, and the time at which either the content or these were changed, in seconds and nanoseconds.
    #[cfg(unix)]
    status: (u64, u64, i64, i64),
}

impl FileVersion {
    /// The version of the file at `path` that has this metadata.
    pub fn new(path: &Path, metadata: &Metadata) -> Self {
        Self {
            path: path.to_owned(),
            bytes: metadata.len(),
            modified: metadata.modified().ok(),
            #[cfg(unix)]
            status: (metadata.dev(), metadata.ino(), metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// The size of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns whether the file is as it was. A file that cannot be examined is not.
    pub fn is_current(&self) -> bool {
        self.path.metadata().is_ok_and(|now| Self::new(&self.path, &now) == *self)
    }
}

/// Elements that [`Chain::read_parts`] reads at a time.
const PART: usize = 1 << 16;

impl Chain {
    /// Reads the initial values of a buffer in parts, in the order of its elements, if its source can
    /// ([`WeightSource::parts`]): `take` gets the index of a parameter in the buffer, the range of elements within the
    /// buffer, and their values. Returns whether it can.
    ///
    /// # Errors
    /// Values that cannot be read, and those of `take`.
    pub fn read_parts<E: From<WeightError>>(
        &self,
        buffer: usize,
        mut take: impl FnMut(usize, Range<usize>, &[f32]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let Some(read) = self.source().parts(self, buffer) else { return Ok(false) };
        let mut values = Vec::new();
        for (slot, param) in self.buffers()[buffer].params.iter().enumerate() {
            for from in (0..param.len).step_by(PART) {
                let elements = param.offset + from..param.offset + param.len.min(from + PART);
                values.resize(elements.len(), 0.0);
                read(slot, from, &mut values)?;
                take(slot, elements, &values)?;
            }
        }
        Ok(true)
    }

    /// The initial values of a buffer, rounded to its element type, or the words of its blocks if it is quantized. They are not in memory as `f32` as a whole if the
    /// source reads parts.
    ///
    /// # Errors
    /// Values that cannot be read.
    pub fn initial_values(&self, buffer: usize, seed: u64) -> Result<HostTensor, WeightError> {
        let layout = &self.buffers()[buffer];
        let (elements, float) = (layout.elements, layout.float);
        if float == FloatType::F32 && layout.encoding != Encoding::Nf4 {
            let mut values = vec![0.0; elements];
            self.source().fill(self, buffer, seed, &mut values)?;
            return Ok(HostTensor::float(values, [elements]));
        }
        let words = layout.words_of(0..elements).len();
        let (mut bits, are_exact) = (vec![0; words], self.source().is_quantized(self, buffer));
        let mut encode = |range: Range<usize>, values: &[f32]| {
            layout.encode(values, are_exact, &mut bits[layout.words_of(range)]);
        };
        let part = |_, range: Range<usize>, values: &[f32]| {
            encode(range, values);
            Ok::<_, WeightError>(())
        };
        if !self.read_parts(buffer, part)? {
            let mut values = vec![0.0; elements];
            self.source().fill(self, buffer, seed, &mut values)?;
            layout.params.iter().for_each(|param| encode(param.range(), &values[param.range()]));
        }
        let dtype = if layout.encoding == Encoding::Nf4 { FloatType::Bf16 } else { float }.dtype();
        Ok(HostTensor::own(bits, vec![words], dtype))
    }
}

/// The default source: the values that the modules held, and [`Init`](crate::Init) for lazy parameters, as a
/// function of the task's seed. Values that are drawn for a frozen buffer whose devices compute in 16 bits are rounded to that
/// type, in which the buffer is then stored ([`Encoding::Narrow`]).
#[derive(Clone, Copy, Debug, Default)]
pub struct SeededInit;

impl WeightSource for SeededInit {
    fn fill(&self, chain: &Chain, buffer: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError> {
        let root = Key::new(seed).fold(0x696E_6974).fold(buffer as u64);
        for (slot, param) in chain.buffers()[buffer].params.iter().enumerate() {
            let out = &mut out[param.range()];
            match &param.given {
                Some(given) => out.copy_from_slice(given.as_f32()),
                None => param.init.fill(root.fold(slot as u64), out),
            }
        }
        if chain.buffers()[buffer].encoding == Encoding::Narrow {
            round(chain.buffers()[buffer].float, out);
        }
        Ok(())
    }

    fn origin(&self, chain: &Chain, buffer: usize, seed: u64) -> Option<String> {
        let params = &chain.buffers()[buffer].params;
        let inits: Vec<Init> = params.iter().map(|param| param.init).collect();
        is_drawn(params).then(|| format!("seed {seed}, drawn as image {buffer}: {inits:?}"))
    }

    fn files_of(&self, _: &Chain, _: usize) -> Option<BTreeSet<FileVersion>> {
        Some(BTreeSet::new())
    }

    fn float_type(&self, chain: &Chain, buffer: usize) -> FloatType {
        let layout = &chain.buffers()[buffer];
        if is_drawn(&layout.params) && !layout.trained { layout.float } else { FloatType::F32 }
    }
}

/// Returns whether no module held values of these parameters, whose origin would be unknown.
fn is_drawn(params: &[BufferParam]) -> bool {
    params.iter().all(|param| param.given.is_none())
}

/// Rounds values to a 16-bit type.
fn round(float: FloatType, values: &mut [f32]) {
    values.par_chunks_mut(PART).for_each(|values| {
        let mut bits = vec![0; values.len()];
        float.narrow(values, &mut bits);
        float.widen(&bits, values);
    });
}

/// Reads the master weights of a chain one buffer at a time. Drop each buffer before reading the next: if
/// master weights are on disk, memory is reserved only for the largest buffer with its optimizer state.
pub trait ParamBufferReader {
    /// Returns the `f32` bytes of the buffer at `buffer`, with the offsets of its layout.
    ///
    /// # Errors
    /// [`WeightError::NoSpace`] if buffers that were read before are still held, and
    /// [`WeightError::ParamBuffer`].
    fn buffer(&self, buffer: usize) -> Result<bytes::Bytes, WeightError>;

    /// Returns the `f32` bytes of some elements of the buffer at `buffer`. Reading parts of [`BUFFER_PART`] elements takes
    /// less memory than the whole buffer if that is not in host memory as `f32`. Errors are those of
    /// [`buffer`](Self::buffer).
    fn part(&self, buffer: usize, elements: Range<usize>) -> Result<bytes::Bytes, WeightError> {
        let each = size_of::<f32>();
        Ok(self.buffer(buffer)?.slice(elements.start * each..elements.end * each))
    }
}

/// The elements of a part that a [`ParamBufferReader`] reads at a time. Parts start at multiples of this number.
pub const BUFFER_PART: usize = 1 << 18;

/// Writes a trained chain in a format for other programs.
pub trait ModelWriter: Send + Sync {
    /// Writes the model into the directory `dir`, which is created if it does not exist, one buffer at a time
    /// ([`ParamBufferReader`]). No budget counts buffers that are still held after this returns.
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError>;

    /// Returns whether it reads at most [`BUFFER_PART`] elements of a buffer at a time
    /// ([`part`](ParamBufferReader::part)). A run then has memory only for those, and whole buffers may be refused.
    fn reads_parts(&self) -> bool {
        false
    }
}
