//! Texts without labels, for predictions of a sequence classifier.

use super::class::Target;
use super::record::texts;
use super::{LabelForm, LabelledTexts};
use crate::data::{DataError, InputRows, RowPosition};
use rayon::prelude::*;

/// The dataset of the texts of these rows: an item for each row, in order. Labels of the rows are not read; those of the
/// dataset have no meaning.
///
/// # Errors
/// A row without a text, or a text that cannot be encoded for the model or has no tokens.
pub fn unlabelled(rows: &InputRows, form: &LabelForm<'_>) -> Result<LabelledTexts, DataError> {
    let (path, is_table) = (rows.path(), rows.is_table());
    let read = |(place, mut fields): (RowPosition, _)| match texts(&mut fields, is_table) {
        Ok((text, pair)) => Ok((place, text, pair)),
        Err(found) => Err(DataError::Record { path: path.to_owned(), place, found }),
    };
    let texts = rows.renamed().map(read).collect::<Result<Vec<_>, _>>()?;
    let encode = |(place, text, pair): &(RowPosition, String, Option<String>)| {
        form.encode(path, *place, (text, pair.as_deref()))
    };
    let sequences: Vec<Result<_, _>> = texts.par_iter().map(encode).collect();
    let sequences = sequences.into_iter().collect::<Result<Vec<_>, _>>()?;
    let targets = vec![Target::Class(0); sequences.len()];
    let form = LabelForm { numbers: &[0], ..*form };
    let mut data = LabelledTexts::new(format!("`{}`", path.display()), sequences, &targets, &form)?;
    data.set_context(data.longest());
    Ok(data)
}
