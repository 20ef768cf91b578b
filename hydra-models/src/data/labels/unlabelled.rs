//! Texts without labels, for predictions of a sequence classifier.

use super::class::Target;
use super::record::texts;
use super::{LabelForm, LabelledTexts};
use crate::data::{DataError, InputRows};

/// The dataset of the texts of these rows: an item for each row, in order. Labels of the rows are not read; those of the
/// dataset have no meaning.
///
/// # Errors
/// A row without a text, or a text that cannot be encoded for the model or has no tokens.
pub fn unlabelled(rows: &InputRows, form: &LabelForm<'_>) -> Result<LabelledTexts, DataError> {
    let records = rows.records(|origin, mut fields, _| {
        texts(&mut fields, origin.is_table()).map_err(|found| origin.wrong(found))
    })?;
    let sequences = records.encode(|origin, (text, pair)| form.encode(origin, text, pair.as_deref()))?;
    let targets = vec![Target::Class(0); sequences.len()];
    LabelledTexts::new(rows.name(), sequences, &targets, &LabelForm { numbers: &[0], ..*form })
}
