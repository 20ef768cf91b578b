//! Directories in the form of WikiText: a file for each split.

use std::path::Path;

use super::{DataError, Split, text};

/// The names a split's file can have; the first one that is there is read.
pub(super) fn file_names(split: Split) -> &'static [&'static str] {
    match split {
        Split::Train => &["wiki.train.tokens", "wiki.train.raw", "train.txt"],
        Split::Validation => &["wiki.valid.tokens", "wiki.valid.raw", "valid.txt", "validation.txt"],
        Split::Test => &["wiki.test.tokens", "wiki.test.raw", "test.txt"],
    }
}

/// The texts of train, validation and test, as far as they are there.
pub(super) fn read(directory: &Path) -> Result<[Option<String>; 3], DataError> {
    let [train, validation, test] = Split::ALL.map(|split| read_split(directory, split));
    let splits = [train?, validation?, test?];
    if splits.iter().all(Option::is_none) {
        let looked_for = Split::ALL.iter().flat_map(|&split| file_names(split)).copied().collect();
        return Err(DataError::NoSplits { directory: directory.to_owned(), looked_for });
    }
    Ok(splits)
}

fn read_split(directory: &Path, split: Split) -> Result<Option<String>, DataError> {
    let path = file_names(split).iter().map(|name| directory.join(name)).find(|path| path.exists());
    path.map(|path| text::read(&path)).transpose()
}
