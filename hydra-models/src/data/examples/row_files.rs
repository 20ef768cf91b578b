//! The rows of a file, or of a directory with files for each split.

use super::columns::{self, Column};
use super::rows::{self, Format, Row};
use super::splits;
use crate::data::DataError;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The rows of a `--data` value, with columns renamed to fields.
pub(in crate::data) struct RowFiles {
    /// The path as given.
    pub(in crate::data) name: String,
    /// The rows of each split.
    pub(in crate::data) splits: [Option<SplitRows>; 3],
    /// Files in the directory that are not read.
    pub(in crate::data) unread: Vec<PathBuf>,
}

/// The rows of a split.
pub(in crate::data) struct SplitRows {
    /// The files.
    pub(in crate::data) files: Arc<[PathBuf]>,
    /// The rows, each with the index of its file.
    pub(in crate::data) rows: Vec<(usize, Row)>,
}

impl RowFiles {
    /// Returns whether [`open`](Self::open) reads the path: a row file by its name, or a directory with one for a
    /// split.
    pub(in crate::data) fn are_at(path: &Path) -> bool {
        let of_rows = named(path).is_some();
        let has_split =
            || splits::find(path).map_or(true, |files| files.splits.iter().any(|split| !split.is_empty()));
        (of_rows && path.is_file()) || (path.is_dir() && has_split())
    }

    /// Reads a directory with a file per split (`train.jsonl`, `validation.csv`, `test-00000-of-00001.parquet`, ..), or
    /// a single file, whose last tenth of rows is the test split and the tenth before it the validation split.
    ///
    /// # Errors
    /// A file that cannot be read, has no rows or is not UTF-8, or a column in `columns` that no row has.
    pub(in crate::data) fn open(path: &Path, columns: &[Column]) -> Result<Self, DataError> {
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
        let rows = splits
            .iter()
            .zip(&files)
            .flat_map(|(rows, files)| rows.iter().map(move |(file, (_, row))| (files[*file].as_path(), row)));
        check_columns(columns, rows)?;
        let mut files = files.into_iter();
        let splits = splits.map(|rows| {
            let files = files.next().unwrap_or_default();
            let rename = |(file, (place, row))| (file, (place, columns::rename(columns, row)));
            (!rows.is_empty()).then(|| SplitRows { files, rows: rows.into_iter().map(rename).collect() })
        });
        Ok(Self { name: path.display().to_string(), splits, unread })
    }
}

/// Returns whether a row file is a text table, whose cells are all text.
pub(in crate::data) fn is_table(path: &Path) -> bool {
    matches!(named(path), Some(Format::Table(_)))
}

/// The format of a row file by its name.
pub(super) fn named(path: &Path) -> Option<Format> {
    let name = path.file_name().and_then(|name| name.to_str())?;
    rows::named(name).map(|named| named.format)
}

/// Rejects columns that none of these rows, each with its file, has.
pub(super) fn check_columns<'a>(
    columns: &[Column],
    mut rows: impl Iterator<Item = (&'a Path, &'a Map<String, Value>)> + Clone,
) -> Result<(), DataError> {
    let mut missing: BTreeSet<&str> = columns.iter().map(|column| column.column.as_str()).collect();
    for (_, row) in rows.clone() {
        missing.retain(|column| !row.contains_key(*column));
    }
    match (missing.first(), rows.next()) {
        (Some(column), Some((path, row))) => Err(DataError::NoColumn {
            path: path.to_owned(),
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
