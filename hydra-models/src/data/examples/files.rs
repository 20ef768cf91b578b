//! Row files, in up to three splits.

use super::columns::{self, Column};
use super::encode::Example;
use super::record::{Fields, Refusal};
use super::rows::{self, Row};
use super::splits::{self, looked_for};
use super::{LossOn, Record, Tally};
use crate::data::{DataError, RowPosition, Split, TokenForm};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The rows of a file or directory, held in memory.
#[derive(Clone, Debug)]
pub struct ExampleFiles {
    name: String,
    splits: [Option<Records>; 3],
    unread: Vec<PathBuf>,
}

/// The rows of a split.
#[derive(Clone, Debug)]
struct Records {
    files: Arc<[PathBuf]>,
    lines: Arc<[Line]>,
    tally: Arc<Tally>,
}

/// A row with the index of its file and its position in it.
#[derive(Clone, Debug)]
struct Line {
    file: usize,
    place: RowPosition,
    record: Record,
}

/// The encoded examples of a split.
pub(in crate::data) struct Encoded {
    pub(in crate::data) name: String,
    pub(in crate::data) examples: Vec<Example>,
    /// Unused data in their rows.
    pub(in crate::data) tally: Tally,
}

impl Encoded {
    /// The length of the longest example, up to truncation.
    pub(in crate::data) fn longest(&self) -> usize {
        self.examples.iter().map(|example| example.ids.len()).max().unwrap_or(0)
    }
}

impl ExampleFiles {
    /// Returns whether [`open`](Self::open) reads the path: a row file by its name, or a directory with one for a
    /// split.
    pub fn are_at(path: &Path) -> bool {
        let of_rows =
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| rows::named(name).is_some());
        let has_split =
            || splits::find(path).map_or(true, |files| files.splits.iter().any(|split| !split.is_empty()));
        (of_rows && path.is_file()) || (path.is_dir() && has_split())
    }

    /// Opens a directory with a file per split (`train.jsonl`, `validation.csv`, `test-00000-of-00001.parquet`, ..), or
    /// a single file, whose last tenth of rows is the test split and the tenth before it the validation split.
    /// `columns` maps columns to fields.
    ///
    /// # Errors
    /// A file that cannot be read, has no rows or is not UTF-8, a row that is not a [`Record`], or a column that no row
    /// has.
    pub fn open(path: &Path, columns: &[Column]) -> Result<Self, DataError> {
        let name = path.display().to_string();
        let mut unread = Vec::new();
        let mut splits: [Vec<(usize, Row)>; 3] = Default::default();
        let mut files: [Arc<[PathBuf]>; 3] = std::array::from_fn(|_| Arc::from([path.to_owned()]));
        if path.is_dir() {
            let found = splits::find(path)?;
            unread = found.unread;
            files = found.splits.map(Arc::from);
            for (rows, files) in splits.iter_mut().zip(&files) {
                for (at, file) in files.iter().enumerate() {
                    rows.extend(rows::read(file)?.into_iter().map(|row| (at, row)));
                }
            }
        } else {
            splits = parts(rows::read(path)?.into_iter().map(|row| (0, row)).collect());
        }
        check_columns(columns, &files, &splits)?;
        let split = |(rows, files): (Vec<(usize, Row)>, Arc<[PathBuf]>)| match rows.is_empty() {
            true => Ok(None),
            false => Records::new(files, rows, columns).map(Some),
        };
        let [train, validation, test] = splits;
        let [of_train, of_validation, of_test] = files;
        let splits =
            [split((train, of_train))?, split((validation, of_validation))?, split((test, of_test))?];
        Ok(Self { name, splits, unread })
    }

    /// The path as given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the data has this split.
    pub fn has(&self, split: Split) -> bool {
        self.splits[split as usize].is_some()
    }

    /// Row files in the directory that belong to no split.
    pub fn unread(&self) -> &[PathBuf] {
        &self.unread
    }

    /// Encodes the examples of a split.
    ///
    /// # Errors
    /// A missing split, or a row that cannot be encoded for the model.
    pub(in crate::data) fn encode(&self, split: Split, form: &TokenForm<'_>) -> Result<Encoded, DataError> {
        let Some(Records { files, lines, tally }) = &self.splits[split as usize] else {
            let looked_for = looked_for(split);
            return Err(DataError::SplitMissing { corpus: self.name.clone(), split, looked_for });
        };
        let encode = |line: &Line| {
            let failed =
                |source| DataError::Example { path: files[line.file].clone(), place: line.place, source };
            form.encode(&line.record).map_err(failed)
        };
        let mut examples = lines.par_iter().map(encode).collect::<Result<Vec<_>, _>>()?;
        let mut tally = Tally::clone(tally);
        for example in &mut examples {
            tally.remarks.add(std::mem::take(&mut example.remarks));
            tally.unused(example.unused.iter());
            tally.merged += usize::from(example.merged && form.loss_on == LossOn::Completions);
        }
        if form.loss_on == LossOn::All {
            let masks = std::mem::take(&mut tally.masks);
            tally.add(&Tally { unused: masks, ..Tally::default() });
        }
        Ok(Encoded { name: format!("the {split} split of `{}`", self.name), examples, tally })
    }
}

impl Records {
    fn new(files: Arc<[PathBuf]>, rows: Vec<(usize, Row)>, columns: &[Column]) -> Result<Self, DataError> {
        let mut tally = Tally::default();
        let line = |(file, (place, row)): (usize, Row)| {
            let fields = Fields::new(columns::rename(columns, row), columns);
            let record = Record::from_fields(fields, &mut tally).map_err(|refusal| {
                let path = files[file].clone();
                match refusal {
                    Refusal::Unknown { found, example } => {
                        DataError::UnknownFields { path, place, found, example }
                    }
                    Refusal::Wrong(found) => DataError::Record { path, place, found },
                }
            })?;
            Ok(Line { file, place, record })
        };
        let lines = rows.into_iter().map(line).collect::<Result<Vec<_>, DataError>>()?;
        Ok(Self { files, lines: lines.into(), tally: Arc::new(tally) })
    }
}

/// Rejects columns that no row has.
fn check_columns(
    columns: &[Column],
    files: &[Arc<[PathBuf]>; 3],
    splits: &[Vec<(usize, Row)>; 3],
) -> Result<(), DataError> {
    if columns.is_empty() {
        return Ok(());
    }
    let mut missing: BTreeSet<&str> = columns.iter().map(|column| column.column.as_str()).collect();
    for (_, (_, row)) in splits.iter().flatten() {
        missing.retain(|column| !row.contains_key(*column));
    }
    let first = splits.iter().zip(files).find_map(|(rows, files)| Some((rows.first()?, files)));
    match (missing.first(), first) {
        (Some(column), Some(((file, (_, row)), files))) => Err(DataError::NoColumn {
            path: files[*file].clone(),
            column: (*column).to_owned(),
            found: row.keys().cloned().collect(),
        }),
        _ => Ok(()),
    }
}

/// Splits rows into eight tenths, a tenth and a tenth. Fewer than ten rows give one row each to validation and test as
/// long as one remains for training.
fn parts<T>(mut rows: Vec<T>) -> [Vec<T>; 3] {
    let tenth = (rows.len() / 10).max(1).min(rows.len().saturating_sub(1) / 2);
    let test = rows.split_off(rows.len() - tenth);
    let validation = rows.split_off(rows.len() - tenth);
    [rows, validation, test]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Context, Examples};
    use crate::tokenizer::{Conventions, Tokenizer};
    use hydra_core::Dataset;
    use std::fs;

    fn text(n: usize) -> String {
        (0..n).map(|i| format!("{{\"text\": \"{i}\"}}\n")).collect()
    }

    fn encoded(files: &ExampleFiles, split: Split, loss_on: LossOn) -> (usize, Tally) {
        let tokenizer = Tokenizer::Bytes;
        let conventions = Conventions::load(&tokenizer, None).unwrap();
        let (tokenizer, conventions, context) = (&tokenizer, &conventions, Context::uniform(8));
        let form = TokenForm { tokenizer, conventions, context, vocabulary: 256, loss_on, pack: false };
        let Encoded { name, examples, tally } = files.encode(split, &form).unwrap();
        (Examples::new(name, examples, 8, &form).unwrap().len(), tally)
    }

    fn lens(files: &ExampleFiles) -> [usize; 3] {
        let len = |split| if files.has(split) { encoded(files, split, LossOn::Completions).0 } else { 0 };
        Split::ALL.map(len)
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
            assert_eq!(lens(&ExampleFiles::open(&file, &[]).unwrap()), expected, "{lines} lines");
        }
    }

    #[test]
    fn a_directory_has_files_of_several_forms() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!ExampleFiles::are_at(dir.path()));
        fs::write(dir.path().join("train-00000-of-00002.jsonl"), text(5)).unwrap();
        fs::write(dir.path().join("train-00001-of-00002.jsonl"), text(2)).unwrap();
        fs::write(dir.path().join("val.csv"), "id,text\n1,a\n2,\"b, c\"\n").unwrap();
        fs::write(dir.path().join("more.json"), "[]").unwrap();
        let files = ExampleFiles::open(dir.path(), &[]).unwrap();
        assert!(ExampleFiles::are_at(dir.path()));
        assert_eq!(lens(&files), [7, 2, 0]);
        assert!(files.unread()[0].ends_with("more.json"));
        assert_eq!(encoded(&files, Split::Validation, LossOn::All).1.unused["id"], 2);
        assert!(!ExampleFiles::are_at(&dir.path().join("none.jsonl")));
    }

    #[test]
    fn masks_have_no_use_where_everything_is_learned() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.jsonl");
        fs::write(&file, "{\"input_ids\": [1, 2], \"labels\": [-100, 2]}\n").unwrap();
        let files = ExampleFiles::open(&file, &[]).unwrap();
        assert_eq!(encoded(&files, Split::Train, LossOn::Completions).1.unused.len(), 0);
        assert_eq!(encoded(&files, Split::Train, LossOn::All).1.unused["labels"], 1);
    }

    #[test]
    fn a_row_that_is_no_record_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |name: &str, text: &str, columns: &[&str]| {
            let columns: Vec<Column> = columns.iter().map(|column| column.parse().unwrap()).collect();
            fs::write(dir.path().join(name), text).unwrap();
            ExampleFiles::open(&dir.path().join(name), &columns).unwrap_err().to_string()
        };
        let error = refused("chat.jsonl", "{\"text\": \"a\"}\n\n{\"answer\": 3}\n", &[]);
        assert!(error.contains("line 3 of `") && error.contains("has the columns `answer`"), "{error}");
        assert!(error.contains("`prompt` and `completion`"), "{error}");
        let error = refused("a.csv", "question;answer\na;b\n", &[]);
        assert!(error.contains("line 2") && error.contains("`question;answer`"), "{error}");
        let error = refused("b.csv", "prompt,completion\n\"a\",\n", &[]);
        assert!(error.contains("line 2") && error.contains("`completion` is null or empty"), "{error}");
        let error = refused("c.csv", "question,answer\na,b\n", &["prompt=question", "completion=reply"]);
        assert!(error.contains("the column `reply`") && error.contains("`question`, `answer`"), "{error}");
        let error = refused("d.tsv", "text\n", &[]);
        assert!(error.contains("d.tsv` has no rows"), "{error}");
    }
}
