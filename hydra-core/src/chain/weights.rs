//! Sources and destinations of parameter values, buffer by buffer.

use crate::{Chain, FloatType, Init, Key};
use std::path::{Path, PathBuf};

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
    /// compared, and a task whose values differ fails, so a file that changes during the run is detected.
    ///
    /// With the default, `None`, only tasks with the same chain object and the same seed share such buffers.
    fn origin(&self, _chain: &Chain, _buffer: usize, _seed: u64) -> Option<String> {
        None
    }

    /// The float type of the source's values for the buffer at `buffer`, whatever the seed: `Bf16` for parameters of a
    /// file in that type. A frozen buffer whose devices compute in this type is stored in it alone, and a run refuses
    /// values that the type does not represent. The default, `F32`, holds for all values.
    fn float_type(&self, _chain: &Chain, _buffer: usize) -> FloatType {
        FloatType::F32
    }
}

/// The default source: the values that the modules held, and [`Init`](crate::Init) for lazy parameters, as a
/// function of the task's seed.
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
        Ok(())
    }

    fn origin(&self, chain: &Chain, buffer: usize, seed: u64) -> Option<String> {
        let params = &chain.buffers()[buffer].params;
        let inits: Vec<Init> = params.iter().map(|param| param.init).collect();
        // The origin of values that a module held is unknown.
        let drawn = params.iter().all(|param| param.given.is_none());
        drawn.then(|| format!("seed {seed}, drawn as image {buffer}: {inits:?}"))
    }
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
}

/// Writes a trained chain in a format for other programs.
pub trait ModelWriter: Send + Sync {
    /// Writes the model into the directory `dir`, which is created if it does not exist, one buffer at a time
    /// ([`ParamBufferReader`]). No budget counts buffers that are still held after this returns.
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError>;
}
