//! The preprocessed images of a split as a dataset.

use super::source::Image;
use super::{DecodeMemory, Preprocessor};
use crate::data::{Content, DataError};
use hydra_core::{Batch, Dataset, DatasetError, HostActivation, HostTensor};
use rayon::prelude::*;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// Maximum bytes of resized images that a split caches; a larger split decodes each image on every access.
const KEPT: usize = 256 << 20;

/// Images with classes. A batch has inputs `[items, 3, side, side]` and the class numbers `[items]` as targets.
pub struct Images {
    name: String,
    items: Vec<(Image, i32)>,
    preprocessor: Preprocessor,
    /// Host memory for decoding.
    memory: Arc<DecodeMemory>,
    /// The normalized value of each byte, per colour channel.
    numbers: Box<[[f32; 256]; 3]>,
    /// The resized bytes of all images, if they fit [`KEPT`].
    kept: Option<Vec<u8>>,
}

impl Images {
    pub(super) fn new(
        name: String,
        items: Vec<(Image, i32)>,
        preprocessor: &Preprocessor,
        memory: Arc<DecodeMemory>,
    ) -> Result<Self, DataError> {
        let numbers = Box::new(preprocessor.numbers());
        let mut images =
            Self { name, items, preprocessor: preprocessor.clone(), memory, numbers, kept: None };
        let read = |(image, _): &(Image, i32)| images.resized(image);
        if images.items.len().saturating_mul(images.size()) <= KEPT {
            let each = images.items.par_iter().map(read).collect::<Result<Vec<_>, _>>()?;
            images.kept = Some(each.concat());
        } else {
            images.items.par_iter().try_for_each(|item| read(item).map(drop))?;
            images.memory.needed_again();
        }
        Ok(images)
    }

    /// The bytes of one resized image.
    fn size(&self) -> usize {
        3 * self.preprocessor.side().pow(2)
    }

    fn resized(&self, image: &Image) -> Result<Vec<u8>, DataError> {
        let side = self.preprocessor.side();
        let path = || image.file().unwrap_or("CIFAR-10".as_ref()).to_owned();
        let other = |found| DataError::ImageSize { path: path(), side, found };
        self.preprocessor.resized(image.rgb(&self.memory)?).map_err(other)
    }

    /// The bytes of an item's image, `[side, side, 3]`.
    fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>, DataError> {
        match &self.kept {
            Some(kept) => Ok(Cow::Borrowed(&kept[index * self.size()..(index + 1) * self.size()])),
            None => self.resized(&self.items[index].0).map(Cow::Owned),
        }
    }

    fn unread(&self, source: DataError) -> DatasetError {
        DatasetError::Read { dataset: self.name.clone(), source: source.into() }
    }
}

impl Dataset for Images {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> usize {
        self.items.len()
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        let (n, side) = (items.len(), self.preprocessor.side());
        let mut values = Vec::with_capacity(n * self.size());
        let mut classes = Vec::with_capacity(n);
        for &index in items {
            let Some((_, class)) = self.items.get(index) else {
                return Err(DatasetError::OutOfRange { dataset: self.name.clone(), index, len: self.len() });
            };
            let bytes = self.bytes(index).map_err(|source| self.unread(source))?;
            for (colour, numbers) in self.numbers.iter().enumerate() {
                values.extend(bytes.iter().skip(colour).step_by(3).map(|byte| numbers[usize::from(*byte)]));
            }
            classes.push(*class);
        }
        Ok(Batch {
            inputs: HostActivation::of(HostTensor::float(values, [n, 3, side, side])),
            targets: HostActivation::of(HostTensor::int(classes, [n])),
            items: n,
            loss_targets: n,
            units: n,
        })
    }

    fn unit(&self) -> &'static str {
        "images"
    }
}

impl Content for Images {
    fn content(&self, to: &mut dyn FnMut(&[u8])) -> Result<(), DatasetError> {
        for (image, class) in &self.items {
            let bytes = image.bytes().map_err(|source| self.unread(source))?;
            to(&(bytes.len() as i64).to_le_bytes());
            to(&class.to_le_bytes());
            to(&bytes);
        }
        Ok(())
    }

    fn units(&self) -> usize {
        self.items.len()
    }
}

impl fmt::Debug for Images {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pictures")
            .field("name", &self.name)
            .field("images", &self.items.len())
            .field("preprocessor", &self.preprocessor)
            .field("kept", &self.kept.is_some())
            .finish()
    }
}
