//! Directories of texts: one file per split, named as WikiText's or as the splits.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::{DataError, Split, examples};

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

/// Returns whether a file is one of WikiText's own, whose convention blank lines are.
pub(super) fn is_original(file: &Path) -> bool {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.starts_with("wiki.") && Split::ALL.into_iter().any(|split| file_names(split).contains(&name))
}

/// Finds the files of train, validation and test that exist, and the other texts and row files, which are not read.
pub(super) fn find(directory: &Path) -> Result<([Option<PathBuf>; 3], Vec<PathBuf>), DataError> {
    let [train, validation, test] = Split::ALL.map(|split| of_split(directory, split));
    let files = [train?, validation?, test?];
    let rows_in_no_split = examples::in_no_split(directory);
    if files.iter().all(Option::is_none) {
        let rows = ["train.jsonl", "train.csv", "train.parquet"];
        let looked_for =
            Split::ALL.iter().flat_map(|&split| file_names(split)).copied().chain(rows).collect();
        return Err(DataError::NoSplits {
            directory: directory.to_owned(),
            looked_for,
            found: rows_in_no_split,
        });
    }
    let is_text = |path: &PathBuf| {
        let part = |part: Option<&OsStr>| part.and_then(OsStr::to_str).unwrap_or_default().to_lowercase();
        let (name, ending) = (part(path.file_stem()), part(path.extension()));
        let describes = ["readme", "license"].iter().any(|word| name.starts_with(word));
        ["txt", "raw", "tokens"].contains(&ending.as_str()) && !describes
    };
    let texts = examples::files_in(directory).into_iter().filter(is_text);
    let is_read = |path: &PathBuf| files.iter().flatten().any(|file| file == path);
    let unread = texts.chain(rows_in_no_split).filter(|path| !is_read(path)).collect();
    Ok((files, unread))
}

fn of_split(directory: &Path, split: Split) -> Result<Option<PathBuf>, DataError> {
    let mut paths: Vec<PathBuf> = file_names(split).iter().map(|name| directory.join(name)).collect();
    paths.retain(|path| path.exists());
    let is_text = |path: &&PathBuf| path.extension().is_some_and(|ending| ending == "txt");
    if paths.iter().filter(is_text).count() > 1 && paths.iter().all(|path| is_text(&path)) {
        return Err(DataError::SplitTwice { split, found: paths });
    }
    Ok(paths.into_iter().next())
}
