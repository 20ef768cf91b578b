//! Image folders: one per split, containing one per class.

use super::decode::{is_other_image, is_read};
use super::source::{ByClass, Image};
use crate::data::{DataError, Split};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Files and folders in an image directory that are not read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unread {
    /// The number of files by extension.
    endings: BTreeMap<String, usize>,
    first: Option<PathBuf>,
    /// Folders other than those of the splits.
    folders: Vec<String>,
}

impl Unread {
    /// The number of files that are not read because their extension is not that of PNG or JPEG.
    pub fn files(&self) -> usize {
        self.endings.values().sum()
    }

    /// Folders that match no split, or a split that already has another folder.
    pub fn folders(&self) -> &[String] {
        &self.folders
    }

    /// Records the directory's entries other than the splits' folders.
    pub(super) fn record_extra_entries(&mut self, directory: &Path) -> Result<(), DataError> {
        let splits = Split::ALL.map(|split| of_split(directory, split));
        for path in entries(directory)? {
            if !path.is_dir() {
                self.add(path);
            } else if !splits.iter().flatten().any(|split| *split == path) {
                self.folders.extend(path.file_name().map(|name| name.to_string_lossy().into_owned()));
            }
        }
        Ok(())
    }

    fn add(&mut self, path: PathBuf) {
        let ending = path.extension().map(|ending| format!(".{}", ending.to_string_lossy().to_lowercase()));
        *self.endings.entry(ending.unwrap_or_else(|| "without an extension".to_owned())).or_default() += 1;
        self.first.get_or_insert(path);
    }
}

/// Counts by extension, with an example.
impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<String> =
            self.endings.iter().map(|(ending, count)| format!("{count} {ending}")).collect();
        write!(f, "{}", counts.join(", "))?;
        self.first.iter().try_for_each(|first| write!(f, ", such as `{}`", first.display()))
    }
}

/// Folder names accepted for a split.
pub(super) fn names(split: Split) -> &'static [&'static str] {
    match split {
        Split::Train => &["train"],
        Split::Validation => &["validation", "valid", "val", "dev", "eval"],
        Split::Test => &["test"],
    }
}

/// The folder of a split, if it exists.
pub(super) fn of_split(directory: &Path, split: Split) -> Option<PathBuf> {
    names(split).iter().map(|name| directory.join(name)).find(|path| path.is_dir())
}

/// The images in the folders of a split by class name, sorted by file name within a class; other files are recorded in
/// `unread`.
pub(super) fn classes(split: &Path, unread: &mut Unread) -> Result<BTreeMap<String, Vec<Image>>, DataError> {
    let mut classes = BTreeMap::new();
    for path in entries(split)? {
        if !path.is_dir() {
            if is_read(&path) || is_other_image(&path) {
                return Err(DataError::NoClass { path });
            }
            unread.add(path);
            continue;
        }
        let name = path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let name = name.ok_or_else(|| DataError::ClassName { path: path.clone() })?;
        classes.insert(name, images(&path, unread)?);
    }
    match classes.is_empty() {
        true => Err(DataError::NoImages { path: split.to_owned() }),
        false => Ok(classes),
    }
}

/// The images of each class in `names`; some may have none here.
///
/// # Errors
/// A class that is not in `names`.
pub(super) fn numbered(
    split: &Path,
    mut found: BTreeMap<String, Vec<Image>>,
    names: &[String],
) -> Result<ByClass, DataError> {
    let numbered = names.iter().map(|name| found.remove(name).unwrap_or_default()).collect();
    match found.into_keys().next() {
        Some(class) => Err(DataError::ClassUnknown { path: split.join(class), known: names.to_vec() }),
        None => Ok(numbered),
    }
}

fn images(class: &Path, unread: &mut Unread) -> Result<Vec<Image>, DataError> {
    let mut images = Vec::new();
    for path in entries(class)? {
        if path.is_dir() {
            return Err(DataError::ClassWithin { path });
        }
        match is_read(&path) || is_other_image(&path) {
            true => images.push(Image::File(path)),
            false => unread.add(path),
        }
    }
    match images.is_empty() {
        true => Err(DataError::ClassEmpty { path: class.to_owned() }),
        false => Ok(images),
    }
}

/// The entries of a directory, sorted by name, without hidden ones.
fn entries(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
    let failed = |source| DataError::Read { path: directory.to_owned(), source };
    let all = fs::read_dir(directory).map_err(failed)?.map(|entry| entry.map(|entry| entry.path()));
    let mut all = all.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    all.retain(|path| !path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")));
    all.sort();
    Ok(all)
}
