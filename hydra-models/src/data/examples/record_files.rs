//! The records of row files, in up to three splits.

use super::columns::Column;
use super::encode::ExampleError;
use super::record::Fields;
use super::row_files::{RowFiles, SplitRows, is_table};
use super::splits::looked_for;
use super::tally::Tally;
use crate::data::{DataError, RowPosition, Split, ragged};
use rayon::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The records of a file or directory, held in memory.
#[derive(Clone, Debug)]
pub struct RecordFiles<R> {
    pub(in crate::data) name: String,
    pub(in crate::data) splits: [Option<Records<R>>; 3],
    pub(in crate::data) unread: Vec<PathBuf>,
    /// The names that a split may have, for messages.
    pub(in crate::data) looked_for: fn(Split) -> Vec<&'static str>,
}

/// The records of a split.
#[derive(Clone, Debug)]
pub(in crate::data) struct Records<R> {
    pub(in crate::data) files: Arc<[PathBuf]>,
    /// The records, each with the index of its file and its position in it.
    pub(in crate::data) records: Arc<[(usize, RowPosition, R)]>,
    /// Unused data in the rows.
    pub(in crate::data) tally: Arc<Tally>,
}

/// Where a record is.
#[derive(Clone, Copy)]
pub(in crate::data) struct RecordOrigin<'a> {
    pub(in crate::data) path: &'a Path,
    pub(in crate::data) place: RowPosition,
}

impl RecordOrigin<'_> {
    /// Returns whether the record's file is a text table, whose cells are all text.
    pub(in crate::data) fn is_table(&self) -> bool {
        is_table(self.path)
    }

    /// The error of a row that is not a record.
    pub(in crate::data) fn wrong(&self, found: String) -> DataError {
        DataError::Record { path: self.path.to_owned(), place: self.place, found }
    }

    /// The error of a record that cannot be encoded.
    pub(in crate::data) fn not_encoded(&self, source: ExampleError) -> DataError {
        DataError::Example { path: self.path.to_owned(), place: self.place, source }
    }

    /// Rejects ids outside the vocabulary.
    pub(in crate::data) fn check(&self, ids: &[u32], vocabulary: usize) -> Result<(), DataError> {
        ragged::check(&format!("{} of `{}`", self.place, self.path.display()), ids, vocabulary)
    }
}

impl<R> RecordFiles<R> {
    /// Reads the records of a row file, or of a directory with files for each split, as [`RowFiles::open`] finds them.
    /// `columns` maps columns to fields.
    pub(in crate::data) fn read(
        path: &Path,
        columns: &[Column],
        read: impl Fn(RecordOrigin<'_>, Fields, &mut Tally) -> Result<R, DataError>,
    ) -> Result<Self, DataError> {
        let RowFiles { name, splits, unread } = RowFiles::open(path, columns)?;
        let records = |SplitRows { files, rows }| {
            let fields = |(file, (place, row))| (file, place, Fields::new(row, columns));
            Records::read(files, rows.into_iter().map(fields), &read)
        };
        let splits = Split::try_each(splits, |rows| rows.map(records).transpose())?;
        Ok(Self { name, splits, unread, looked_for })
    }

    /// The path as given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the data has this split.
    pub fn has(&self, split: Split) -> bool {
        self.splits[split as usize].is_some()
    }

    /// Row files in the directory that belong to no split, and texts of a split.
    pub fn unread(&self) -> &[PathBuf] {
        &self.unread
    }

    /// The records of a split, and its name in messages.
    pub(in crate::data) fn split(&self, split: Split) -> Result<(String, &Records<R>), DataError> {
        match &self.splits[split as usize] {
            Some(records) => Ok((format!("the {split} split of `{}`", self.name), records)),
            None => {
                let looked_for = (self.looked_for)(split);
                Err(DataError::SplitMissing { corpus: self.name.clone(), split, looked_for })
            }
        }
    }
}

impl<R> Records<R> {
    /// Reads records from the fields of rows, each with the index of its file and its position in it.
    pub(super) fn read(
        files: Arc<[PathBuf]>,
        rows: impl Iterator<Item = (usize, RowPosition, Fields)>,
        read: impl Fn(RecordOrigin<'_>, Fields, &mut Tally) -> Result<R, DataError>,
    ) -> Result<Self, DataError> {
        let mut tally = Tally::default();
        let record = |(file, place, fields): (usize, RowPosition, Fields)| {
            let path: &Path = &files[file];
            Ok((file, place, read(RecordOrigin { path, place }, fields, &mut tally)?))
        };
        let records = rows.map(record).collect::<Result<Vec<_>, DataError>>()?;
        Ok(Self { files, records: records.into(), tally: Arc::new(tally) })
    }

    /// The records, each with its origin.
    pub(in crate::data) fn located(&self) -> impl Iterator<Item = (RecordOrigin<'_>, &R)> {
        self.records.iter().map(move |record| self.locate(record))
    }

    fn locate<'a>(&'a self, (file, place, record): &'a (usize, RowPosition, R)) -> (RecordOrigin<'a>, &'a R) {
        (RecordOrigin { path: &self.files[*file], place: *place }, record)
    }
}

impl<R: Send + Sync> Records<R> {
    /// Encodes all records. Of several that cannot be encoded, the error names the first.
    pub(in crate::data) fn encode<E: Send>(
        &self,
        encode: impl Fn(RecordOrigin<'_>, &R) -> Result<E, DataError> + Sync,
    ) -> Result<Vec<E>, DataError> {
        let encode = |record| {
            let (origin, record) = self.locate(record);
            encode(origin, record)
        };
        let encoded: Vec<Result<E, DataError>> = self.records.par_iter().map(encode).collect();
        encoded.into_iter().collect()
    }
}
