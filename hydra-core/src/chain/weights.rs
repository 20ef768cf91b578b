//! Sources and destinations of parameter values, buffer by buffer.

use crate::{Chain, Init, Key};
use std::path::{Path, PathBuf};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why weights could not be read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum WeightError {
    /// A parameter's values could not be had.
    #[error("the weights of `{param}` could not be read")]
    Read { param: String, source: BoxError },
    /// A buffer could not be had.
    #[error("image {buffer} of chain `{chain}` could not be read")]
    ParamBuffer { chain: String, buffer: usize, source: BoxError },
    /// A buffer finds no room beside those that were read before and are still held.
    #[error(
        "image {buffer} of chain `{chain}` finds no room beside those that are held: let go of each image before the next \
         is read"
    )]
    NoSpace { chain: String, buffer: usize, source: BoxError },
    /// A model could not be written.
    #[error("the model could not be written to {}", path.display())]
    Write { path: PathBuf, source: BoxError },
}

/// Gives a chain its first values, one buffer at a time, so that a model is never whole in memory for it.
pub trait WeightSource: Send + Sync {
    /// Writes the values of the buffer at `buffer` of `chain` into `out`, which is zeroed and has
    /// [`ParamBufferLayout::elements`](crate::ImageLayout::elements) elements; gaps between parameters stay zero.
    fn fill(&self, chain: &Chain, buffer: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError>;

    /// Names all that the values of the buffer at `buffer` depend on, beside the names and shapes of its parameters: the
    /// files that they are read from, or the seed that they are drawn with. A run keeps frozen buffers of its tasks that
    /// are alike in all of that once for all of them. Each task's values are compared all the same, and a task whose
    /// values are others fails, so a file that changes meanwhile is noticed.
    ///
    /// The default, `None`, says nothing: only tasks of one chain object and one seed have such buffers in common.
    fn origin(&self, _chain: &Chain, _buffer: usize, _seed: u64) -> Option<String> {
        None
    }
}

/// The source of a chain that was given none: values that the modules held, and [`Init`](crate::Init) for
/// lazy parameters, as a function of the task's seed.
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
        // Nobody knows where values that a module held are from.
        let drawn = params.iter().all(|param| param.given.is_none());
        drawn.then(|| format!("seed {seed}, drawn as image {buffer}: {inits:?}"))
    }
}

/// Reads the masters of a chain, one buffer at a time: let go of each before the next is read. Where masters live on a disk
/// there is room in memory for the largest of their buffers with its optimizer state, and no more for all that is held.
pub trait ParamBufferReader {
    /// The `f32` bytes of the buffer at `buffer`, with the offsets of its layout.
    ///
    /// # Errors
    /// [`WeightError::NoSpace`] where buffers that were read before are still held, and [`WeightError::ParamBuffer`].
    fn buffer(&self, buffer: usize) -> Result<bytes::Bytes, WeightError>;
}

/// Writes a trained chain in a format that other programs read.
pub trait ModelWriter: Send + Sync {
    /// Writes the model into the directory `dir`, which is made if it is not there, one buffer at a time
    /// ([`ParamBufferReader`]). Bytes of buffers that are kept for longer than this takes are memory that no budget counts.
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError>;
}
