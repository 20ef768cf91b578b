//! Sources and destinations of parameter values, image by image.

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
    /// An image could not be had.
    #[error("image {image} of chain `{chain}` could not be read")]
    Image { chain: String, image: usize, source: BoxError },
    /// An image finds no room beside those that were read before and are still held.
    #[error(
        "image {image} of chain `{chain}` finds no room beside those that are held: let go of each image before the next \
         is read"
    )]
    NoRoom { chain: String, image: usize, source: BoxError },
    /// A model could not be written.
    #[error("the model could not be written to {}", path.display())]
    Write { path: PathBuf, source: BoxError },
}

/// Gives a chain its first values, one image at a time, so that a model is never whole in memory for it.
pub trait WeightSource: Send + Sync {
    /// Writes the values of the image at `image` of `chain` into `out`, which is zeroed and has
    /// [`ImageLayout::elements`](crate::ImageLayout::elements) elements; gaps between parameters stay zero.
    fn fill(&self, chain: &Chain, image: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError>;

    /// Names all that the values of the image at `image` depend on, beside the names and shapes of its parameters: the
    /// files that they are read from, or the seed that they are drawn with. A run keeps frozen images of its tasks that
    /// are alike in all of that once for all of them. Each task's values are compared all the same, and a task whose
    /// values are others fails, so a file that changes meanwhile is noticed.
    ///
    /// The default, `None`, says nothing: only tasks of one chain object and one seed have such images in common.
    fn origin(&self, _chain: &Chain, _image: usize, _seed: u64) -> Option<String> {
        None
    }
}

/// The source of a chain that was given none: values that the modules held, and [`Init`](crate::Init) for
/// lazy parameters, as a function of the task's seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct SeededInit;

impl WeightSource for SeededInit {
    fn fill(&self, chain: &Chain, image: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError> {
        let root = Key::new(seed).fold(0x696E_6974).fold(image as u64);
        for (slot, param) in chain.images()[image].params.iter().enumerate() {
            let out = &mut out[param.range()];
            match &param.given {
                Some(given) => out.copy_from_slice(given.as_f32()),
                None => param.init.fill(root.fold(slot as u64), out),
            }
        }
        Ok(())
    }

    fn origin(&self, chain: &Chain, image: usize, seed: u64) -> Option<String> {
        let params = &chain.images()[image].params;
        let inits: Vec<Init> = params.iter().map(|param| param.init).collect();
        // Nobody knows where values that a module held are from.
        let drawn = params.iter().all(|param| param.given.is_none());
        drawn.then(|| format!("seed {seed}, drawn as image {image}: {inits:?}"))
    }
}

/// Reads the masters of a chain, one image at a time: let go of each before the next is read. Where masters live on a disk
/// there is room in memory for the largest of their images with its optimizer state, and no more for all that is held.
pub trait ImageReader {
    /// The `f32` bytes of the image at `image`, with the offsets of its layout.
    ///
    /// # Errors
    /// [`WeightError::NoRoom`] where images that were read before are still held, and [`WeightError::Image`].
    fn image(&self, image: usize) -> Result<bytes::Bytes, WeightError>;
}

/// Writes a trained chain in a format that other programs read.
pub trait ModelWriter: Send + Sync {
    /// Writes the model into the directory `dir`, which is made if it is not there, one image at a time
    /// ([`ImageReader`]). Bytes of images that are kept for longer than this takes are memory that no budget counts.
    fn write(&self, chain: &Chain, images: &dyn ImageReader, dir: &Path) -> Result<(), WeightError>;
}
