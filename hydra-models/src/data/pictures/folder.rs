//! Folders of pictures: one for each split, and in it one for each class.

use super::decode::is_picture;
use super::source::{ByClass, Picture};
use crate::data::{DataError, Split};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The names that a split's folder may have.
pub(super) fn names(split: Split) -> &'static [&'static str] {
    match split {
        Split::Train => &["train"],
        Split::Validation => &["validation", "valid", "val"],
        Split::Test => &["test"],
    }
}

/// The folder of a split, if there is one.
pub(super) fn of_split(directory: &Path, split: Split) -> Option<PathBuf> {
    names(split).iter().map(|name| directory.join(name)).find(|path| path.is_dir())
}

/// The pictures in the folders of a split, by the name of the class, each in the order of their files' names.
pub(super) fn classes(split: &Path) -> Result<BTreeMap<String, Vec<Picture>>, DataError> {
    let mut classes = BTreeMap::new();
    for path in entries(split)? {
        if !path.is_dir() {
            if is_picture(&path) {
                return Err(DataError::NoClass { path });
            }
            continue;
        }
        let name = path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let name = name.ok_or_else(|| DataError::ClassName { path: path.clone() })?;
        classes.insert(name, pictures(&path)?);
    }
    match classes.is_empty() {
        true => Err(DataError::NoPictures { path: split.to_owned() }),
        false => Ok(classes),
    }
}

/// The pictures of each of `names`, of which some may have none here.
///
/// # Errors
/// A class that has no name among them.
pub(super) fn numbered(
    split: &Path,
    mut found: BTreeMap<String, Vec<Picture>>,
    names: &[String],
) -> Result<ByClass, DataError> {
    let numbered = names.iter().map(|name| found.remove(name).unwrap_or_default()).collect();
    match found.into_keys().next() {
        Some(class) => Err(DataError::ClassUnknown { path: split.join(class), known: names.to_vec() }),
        None => Ok(numbered),
    }
}

fn pictures(class: &Path) -> Result<Vec<Picture>, DataError> {
    let mut pictures = Vec::new();
    for path in entries(class)? {
        if path.is_dir() {
            return Err(DataError::ClassWithin { path });
        }
        if is_picture(&path) {
            pictures.push(Picture::File(path));
        }
    }
    match pictures.is_empty() {
        true => Err(DataError::ClassEmpty { path: class.to_owned() }),
        false => Ok(pictures),
    }
}

/// What lies in a directory in the order of the names, but for what is hidden.
fn entries(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
    let failed = |source| DataError::Read { path: directory.to_owned(), source };
    let all = fs::read_dir(directory).map_err(failed)?.map(|entry| entry.map(|entry| entry.path()));
    let mut all = all.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    all.retain(|path| !path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")));
    all.sort();
    Ok(all)
}
