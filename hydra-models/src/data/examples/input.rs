//! Rows to predict for: those of one file, in its order.

use super::columns::{self, Column};
use super::dataset::loss_targets;
use super::files::record;
use super::record::Fields;
use super::row_files::{check_columns, is_table, named};
use super::rows::{self, Row};
use super::{Examples, LossOn, Tally};
use crate::data::{Cut, DataError, RowPosition, TokenForm};
use rayon::prelude::*;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

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
        let rows = rows::read(path)?.into_iter().map(|row| (0, row)).collect();
        let (files, rows) =
            ([[path.to_owned()].into(), [].into(), [].into()], [rows, Vec::new(), Vec::new()]);
        check_columns(columns, &files, &rows)?;
        let rows = rows.into_iter().flatten().map(|(_, row)| row).collect();
        Ok(Self { path: path.to_owned(), rows, columns: columns.to_vec() })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The fields of each row, by their names in the file.
    pub fn fields(&self) -> impl ExactSizeIterator<Item = &Map<String, Value>> {
        self.rows.iter().map(|(_, fields)| fields)
    }

    /// Returns whether the file is a text table, whose cells are all text.
    pub(in crate::data) fn is_table(&self) -> bool {
        is_table(&self.path)
    }

    /// The position of each row, and its fields by the names that `columns` gives them.
    pub(in crate::data) fn renamed(&self) -> impl Iterator<Item = (RowPosition, Fields)> {
        let columns = &self.columns;
        self.rows
            .iter()
            .map(move |(place, row)| (*place, Fields::new(columns::rename(columns, row.clone()), columns)))
    }

    /// Encodes the rows for a language model.
    ///
    /// # Errors
    /// A row that is no [`Record`](super::Record) or cannot be encoded for the model, or rows without a loss target.
    pub fn examples(&self, form: &TokenForm<'_>) -> Result<ScoredRows, DataError> {
        let mut tally = Tally::default();
        let read = |(place, fields)| Ok((place, record(&self.path, place, fields, &mut tally)?));
        let records = self.renamed().map(read).collect::<Result<Vec<_>, DataError>>()?;
        let encode = |(place, record): &(RowPosition, _)| {
            let failed = |source| DataError::Example { path: self.path.clone(), place: *place, source };
            form.encode(record).map_err(failed)
        };
        let encoded: Vec<Result<_, _>> = records.par_iter().map(encode).collect();
        let mut examples = encoded.into_iter().collect::<Result<Vec<_>, _>>()?;
        let targets = examples.iter().map(|example| loss_targets(&example.counts)).collect();
        let longest = examples.iter().map(|example| example.ids.len()).max().unwrap_or(0);
        for example in &mut examples {
            tally.remarks.add(std::mem::take(&mut example.remarks));
            tally.merged += usize::from(example.merged && form.loss_on == LossOn::Completions);
        }
        let name = format!("`{}`", self.path.display());
        let mut data = Examples::new(name, examples, longest, form)?;
        data.set_context(data.longest());
        let cut = crate::data::Content::cut_by(&data, form.context.example);
        Ok(ScoredRows { data, targets, cut, tally })
    }
}
