//! CIFAR-10 binary files: one byte for the class, then 32 rows of 32 bytes each for red, green and blue.

use super::decode::Rgb;
use super::source::{ByClass, Image};
use crate::data::{DataError, Split};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The class names, by number.
pub(super) const CLASSES: [&str; 10] =
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];
const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;
/// Bytes of a record.
const RECORD: usize = 1 + 3 * PLANE;

/// An image in a file held in memory.
#[derive(Clone, Debug)]
pub(super) struct Record {
    file: Arc<[u8]>,
    at: usize,
}

impl Record {
    /// The image's bytes, as in the file.
    pub fn bytes(&self) -> &[u8] {
        &self.file[self.at + 1..self.at + RECORD]
    }

    pub fn rgb(&self) -> Rgb {
        let planes = self.bytes();
        let pixel = |at: usize| [planes[at], planes[PLANE + at], planes[2 * PLANE + at]];
        Rgb { width: SIDE, height: SIDE, bytes: (0..PLANE).flat_map(pixel).collect() }
    }
}

/// The files of a split in a directory: those that exist, and those that do not.
fn files(directory: &Path, split: Split) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let names: Vec<String> = match split {
        Split::Train => (1..=5).map(|file| format!("data_batch_{file}.bin")).collect(),
        Split::Validation => Vec::new(),
        Split::Test => vec!["test_batch.bin".to_owned()],
    };
    names.iter().map(|name| directory.join(name)).partition(|file| file.is_file())
}

/// Returns whether a directory has a file of a split.
pub(super) fn has(directory: &Path, split: Split) -> bool {
    !files(directory, split).0.is_empty()
}

/// Reads the images of a split, grouped by class, if it has files.
///
/// # Errors
/// Files that cannot be read, and a split with some of its files missing.
pub(super) fn read(directory: &Path, split: Split) -> Result<Option<ByClass>, DataError> {
    let (files, missing) = files(directory, split);
    if files.is_empty() {
        return Ok(None);
    }
    if !missing.is_empty() {
        return Err(DataError::CifarMissing { split, missing });
    }
    let mut classes: ByClass = vec![Vec::new(); CLASSES.len()];
    for path in &files {
        let file = fs::read(path).map_err(|source| DataError::Read { path: path.clone(), source })?;
        let wrong = |found: String| DataError::Cifar { path: path.clone(), found };
        if file.is_empty() || !file.len().is_multiple_of(RECORD) {
            return Err(wrong(format!("{} bytes", file.len())));
        }
        let file: Arc<[u8]> = file.into();
        for at in (0..file.len()).step_by(RECORD) {
            let class = usize::from(file[at]);
            let images = classes.get_mut(class);
            let images = images.ok_or_else(|| wrong(format!("class {class} at byte {at}")))?;
            images.push(Image::Record(Record { file: file.clone(), at }));
        }
    }
    Ok(Some(classes))
}
