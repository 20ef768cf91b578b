//! Rows to predict for: those of one file, in its order.

use super::columns::{self, Column};
use super::dataset::loss_targets;
use super::files::record;
use super::record::Fields;
use super::record_files::{RecordOrigin, Records};
use super::row_files::{check_columns, named};
use super::rows::{self, Row};
use super::{Examples, Tally};
use crate::data::{Content as _, Cut, DataError, TokenForm};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The rows of a file, in order, with all of their fields.
#[derive(Clone, Debug)]
pub struct InputRows {
    path: PathBuf,
    rows: Vec<Row>,
    columns: Vec<Column>,
}

/// The examples of rows for a language model, and what the rows have without an example.
#[derive(Debug)]
pub struct ScoredRows {
    /// An item for each row with loss targets, in the order of the rows.
    pub data: Examples,
    /// The number of loss targets of each row.
    pub targets: Vec<usize>,
    /// Truncation at the context.
    pub cut: Cut,
    /// What the rows have that is not scored, and remarks about them.
    pub tally: Tally,
}

impl InputRows {
    /// Reads a file of rows (JSON Lines, JSON, CSV, TSV or Parquet). `columns` maps columns to fields.
    ///
    /// # Errors
    /// A file of another kind, one that cannot be read or has no rows, or a column that no row has.
    pub fn open(path: &Path, columns: &[Column]) -> Result<Self, DataError> {
        if named(path).is_none() {
            return Err(DataError::NotRows { path: path.to_owned() });
        }
        let rows = rows::read(path)?;
        check_columns(columns, rows.iter().map(|(_, row)| (path, row)))?;
        Ok(Self { path: path.to_owned(), rows, columns: columns.to_vec() })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The name of a dataset of the rows, for messages.
    pub(in crate::data) fn name(&self) -> String {
        format!("`{}`", self.path.display())
    }

    /// The fields of each row, by their names in the file.
    pub fn fields(&self) -> impl ExactSizeIterator<Item = &Map<String, Value>> {
        self.rows.iter().map(|(_, fields)| fields)
    }

    /// Reads the records of the rows, from their fields by the names that `columns` gives them.
    pub(in crate::data) fn records<R>(
        &self,
        read: impl Fn(RecordOrigin<'_>, Fields, &mut Tally) -> Result<R, DataError>,
    ) -> Result<Records<R>, DataError> {
        let fields = |(place, row): &Row| {
            let row = columns::rename(&self.columns, row.clone());
            (0, *place, Fields::new(row, &self.columns))
        };
        Records::read(Arc::from([self.path.clone()]), self.rows.iter().map(fields), read)
    }

    /// Encodes the rows for a language model.
    ///
    /// # Errors
    /// A row that is no [`Record`](super::Record) or cannot be encoded for the model, or rows without a loss target.
    pub fn examples(&self, form: &TokenForm<'_>) -> Result<ScoredRows, DataError> {
        let (examples, tally) = self.records(record)?.examples(form)?;
        let targets = examples.iter().map(|example| loss_targets(&example.counts)).collect();
        let longest = examples.iter().map(|example| example.ids.len()).max().unwrap_or(0);
        let data = Examples::new(self.name(), examples, longest, form)?;
        let cut = data.cut_by(form.context.example);
        Ok(ScoredRows { data, targets, cut, tally })
    }
}
