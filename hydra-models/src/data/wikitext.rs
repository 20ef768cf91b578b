//! WikiText directories: one file per split.

use std::path::{Path, PathBuf};

use super::{DataError, Split, text};

/// File names accepted for a split; the first existing one is read.
pub(super) fn file_names(split: Split) -> &'static [&'static str] {
    match split {
        Split::Train => &["wiki.train.tokens", "wiki.train.raw", "train.txt"],
        Split::Validation => &[
            "wiki.valid.tokens",
            "wiki.valid.raw",
            "validation.txt",
            "valid.txt",
            "val.txt",
            "dev.txt",
            "eval.txt",
        ],
        Split::Test => &["wiki.test.tokens", "wiki.test.raw", "test.txt"],
    }
}

/// Reads the texts of train, validation and test that exist.
pub(super) fn read(directory: &Path) -> Result<[Option<String>; 3], DataError> {
    let [train, validation, test] = Split::ALL.map(|split| read_split(directory, split));
    let splits = [train?, validation?, test?];
    if splits.iter().all(Option::is_none) {
        let rows = ["train.jsonl", "train.csv", "train.parquet"];
        let looked_for =
            Split::ALL.iter().flat_map(|&split| file_names(split)).copied().chain(rows).collect();
        let (directory, found) = (directory.to_owned(), super::examples::in_no_split(directory));
        return Err(DataError::NoSplits { directory, looked_for, found });
    }
    Ok(splits)
}

fn read_split(directory: &Path, split: Split) -> Result<Option<String>, DataError> {
    let mut paths: Vec<PathBuf> = file_names(split).iter().map(|name| directory.join(name)).collect();
    paths.retain(|path| path.exists());
    let is_text = |path: &&PathBuf| path.extension().is_some_and(|ending| ending == "txt");
    if paths.iter().filter(is_text).count() > 1 && paths.iter().all(|path| is_text(&path)) {
        return Err(DataError::SplitTwice { split, found: paths });
    }
    paths.first().map(|path| text::read(path)).transpose()
}
