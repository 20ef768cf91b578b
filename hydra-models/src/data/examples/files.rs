//! Files of records, in up to three splits.

use super::{Examples, Record};
use crate::data::{DataError, Split, TokenForm, text};
use rayon::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The endings of such files' names.
const LINES: &str = "jsonl";
const TABLE: &str = "parquet";

/// A record and the line, or the row, that it stands on, counted from one.
pub(super) type Line = (usize, Record);

/// The records of a file or of a directory, read whole.
#[derive(Clone, Debug)]
pub struct ExampleFiles {
    name: String,
    splits: [Option<Records>; 3],
}

#[derive(Clone, Debug)]
struct Records {
    path: PathBuf,
    lines: Arc<[Line]>,
}

/// The names that a split's file may have.
pub(super) fn file_names(split: Split) -> &'static [&'static str] {
    match split {
        Split::Train => &["train.jsonl", "train.parquet"],
        Split::Validation => &["validation.jsonl", "valid.jsonl", "validation.parquet", "valid.parquet"],
        Split::Test => &["test.jsonl", "test.parquet"],
    }
}

impl ExampleFiles {
    /// Returns whether a path is for [`open`](Self::open): a file `*.jsonl` or `*.parquet`, or a directory with one of a
    /// split.
    pub fn are_at(path: &Path) -> bool {
        let ends = ends_in(path, LINES) || ends_in(path, TABLE);
        let named = |split| file_names(split).iter().any(|name| path.join(name).is_file());
        (ends && path.is_file()) || (path.is_dir() && Split::ALL.into_iter().any(named))
    }

    /// Reads `train.jsonl`, `validation.jsonl` and `test.jsonl` of a directory, or `train.parquet` and so on, or a file, of
    /// whose lines or rows the last tenth is the test split, and the tenth before it the validation split. Blank lines are
    /// left out. Parquet is read with the feature `parquet`.
    ///
    /// # Errors
    /// A file that cannot be read, is blank or not UTF-8, and a line that is no [`Record`].
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let name = path.display().to_string();
        if path.is_dir() {
            let split = |split| {
                let path = file_names(split).iter().map(|name| path.join(name)).find(|path| path.is_file());
                path.map(|path| Ok(Records { lines: read(&path)?.into(), path })).transpose()
            };
            let [train, validation, test] = Split::ALL.map(split);
            return Ok(Self { name, splits: [train?, validation?, test?] });
        }
        let splits = parts(read(path)?).map(|lines| Records { path: path.to_owned(), lines: lines.into() });
        Ok(Self { name, splits: splits.map(|split| Some(split).filter(|split| !split.lines.is_empty())) })
    }

    /// The path as it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether there is this split.
    pub fn has(&self, split: Split) -> bool {
        self.splits[split as usize].is_some()
    }

    /// The examples of a split.
    ///
    /// # Errors
    /// A split that is not there, a record that the model has no text for, and a split without anything to learn.
    pub fn examples(&self, split: Split, form: &TokenForm<'_>) -> Result<Examples, DataError> {
        let Some(Records { path, lines }) = &self.splits[split as usize] else {
            let looked_for = file_names(split).to_vec();
            return Err(DataError::SplitMissing { corpus: self.name.clone(), split, looked_for });
        };
        let encode = |(line, record): &Line| {
            let failed = |source| DataError::Example { path: path.clone(), line: *line, source };
            form.encode(record).map_err(failed)
        };
        let examples = lines.par_iter().map(encode).collect::<Result<Vec<_>, _>>()?;
        Examples::new(format!("the {split} split of `{}`", self.name), examples, form)
    }
}

fn ends_in(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending))
}

#[cfg(feature = "parquet")]
use super::parquet::read as read_table;

#[cfg(not(feature = "parquet"))]
fn read_table(path: &Path) -> Result<Vec<Line>, DataError> {
    Err(DataError::Parquet { path: path.to_owned() })
}

fn read(path: &Path) -> Result<Vec<Line>, DataError> {
    if ends_in(path, TABLE) {
        return read_table(path);
    }
    let text = text::read(path)?;
    let text = text.trim_start_matches('\u{FEFF}');
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let record = |(at, line): (usize, &str)| {
        let wrong = |found| DataError::Record { path: path.to_owned(), line: at + 1, found };
        Ok((at + 1, Record::parse(line).map_err(wrong)?))
    };
    lines.map(record).collect()
}

/// Eight tenths of the records, a tenth and a tenth; of fewer than ten, one each for validation and test where any is
/// left to train on.
fn parts(mut lines: Vec<Line>) -> [Vec<Line>; 3] {
    let tenth = (lines.len() / 10).max(1).min(lines.len().saturating_sub(1) / 2);
    let test = lines.split_off(lines.len() - tenth);
    let validation = lines.split_off(lines.len() - tenth);
    [lines, validation, test]
}

#[cfg(test)]
mod tests {
    use super::super::LossOn;
    use super::*;
    use crate::data::Context;
    use crate::tokenizer::{Conventions, Tokenizer};
    use hydra_core::Dataset;
    use std::fs;

    fn text(n: usize) -> String {
        (0..n).map(|i| format!("{{\"text\": \"{i}\"}}\n")).collect()
    }

    fn lens(files: &ExampleFiles) -> [usize; 3] {
        let conventions = Conventions::of(&Tokenizer::Bytes, None).unwrap();
        let form = TokenForm {
            tokenizer: &Tokenizer::Bytes,
            conventions: &conventions,
            context: Context::AtMost(8),
            vocabulary: 256,
            loss_on: LossOn::Completions,
            pack: false,
        };
        Split::ALL.map(|split| if files.has(split) { files.examples(split, &form).unwrap().len() } else { 0 })
    }

    #[test]
    fn the_last_tenths_of_a_file_are_validation_and_test() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("data.JSONL");
        for (lines, expected) in
            [(1, [1, 0, 0]), (2, [2, 0, 0]), (3, [1, 1, 1]), (9, [7, 1, 1]), (40, [32, 4, 4])]
        {
            fs::write(&file, text(lines) + "\n \n").unwrap();
            assert!(ExampleFiles::are_at(&file));
            assert_eq!(lens(&ExampleFiles::open(&file).unwrap()), expected, "{lines} lines");
        }
    }

    #[test]
    fn a_directory_has_a_file_a_split() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!ExampleFiles::are_at(dir.path()));
        fs::write(dir.path().join("train.jsonl"), text(5)).unwrap();
        fs::write(dir.path().join("valid.jsonl"), text(2)).unwrap();
        let files = ExampleFiles::open(dir.path()).unwrap();
        assert!(ExampleFiles::are_at(dir.path()));
        assert_eq!(lens(&files), [5, 2, 0]);
        assert!(!ExampleFiles::are_at(&dir.path().join("none.jsonl")));
    }

    #[test]
    fn a_line_that_is_no_record_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("chat.jsonl");
        fs::write(&file, "{\"text\": \"a\"}\n\n{\"answer\": 3}\n").unwrap();
        let error = ExampleFiles::open(&file).unwrap_err().to_string();
        assert!(error.contains("chat.jsonl") && error.contains("line 3"), "{error}");
        assert!(error.contains("`answer`") && error.contains("{\"messages\":"), "{error}");
    }
}
