//! `--columns`: maps a file's columns to the fields of a row.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::str::FromStr;

/// Fields that decide the kind of a row.
pub(super) const LEARNED: [&str; 8] =
    ["text", "prompt", "completion", "messages", "conversations", "instruction", "output", "input_ids"];

/// Other fields that are read.
const OTHERS: [&str; 13] = [
    "input",
    "chosen",
    "rejected",
    "text_pair",
    "label",
    "labels",
    "attention_mask",
    "completion_mask",
    "assistant_masks",
    "position_ids",
    "tools",
    "documents",
    "chat_template_kwargs",
];

/// A field of a row and the column that it is read from: `prompt=question`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Column {
    /// The field's name in Hydra.
    pub field: String,
    /// The column's name in the file.
    pub column: String,
}

/// An invalid `FIELD=COLUMN`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the fields")]
pub enum ColumnError {
    /// Not of the form `FIELD=COLUMN`.
    #[error("`{found}` is not of the form FIELD=COLUMN, for example prompt=question")]
    Form { found: String },
    /// An unknown field.
    #[error("`{found}` is not a field that Hydra reads: expected one of {}", [&LEARNED[..], &OTHERS].concat().join(", "))]
    Field { found: String },
}

impl FromStr for Column {
    type Err = ColumnError;

    fn from_str(text: &str) -> Result<Self, ColumnError> {
        let form = || ColumnError::Form { found: text.to_owned() };
        let (field, column) = text.split_once('=').ok_or_else(form)?;
        let known = LEARNED.into_iter().chain(OTHERS).find(|known| *known == field.trim());
        let field = known.ok_or_else(|| ColumnError::Field { found: field.trim().to_owned() })?;
        if column.is_empty() {
            return Err(form());
        }
        Ok(Self { field: field.to_owned(), column: column.to_owned() })
    }
}

impl TryFrom<String> for Column {
    type Error = ColumnError;

    fn try_from(text: String) -> Result<Self, ColumnError> {
        text.parse()
    }
}

impl From<Column> for String {
    fn from(Column { field, column }: Column) -> Self {
        format!("{field}={column}")
    }
}

/// Renames the columns of a row to their fields. Another column that already has the name of such a field is renamed to
/// `column NAME`.
pub(super) fn rename(columns: &[Column], row: Map<String, Value>) -> Map<String, Value> {
    if columns.is_empty() {
        return row;
    }
    let mut renamed = Map::new();
    for (name, value) in row {
        let mut fields = columns.iter().filter(|column| column.column == name).peekable();
        if fields.peek().is_none() {
            let is_field = columns.iter().any(|column| column.field == name);
            renamed.insert(if is_field { format!("column {name}") } else { name }, value);
            continue;
        }
        fields.for_each(|column| drop(renamed.insert(column.field.clone(), value.clone())));
    }
    renamed
}

/// Formats a column for a command line.
pub(super) fn quoted(field: &str, column: &str) -> String {
    let plain = column.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.'));
    if plain { format!("{field}={column}") } else { format!("'{field}={column}'") }
}

/// The fields of these columns that decide the kind of a row; empty if the row itself decides.
pub(super) fn decisive(columns: &[Column]) -> Vec<&'static str> {
    LEARNED.into_iter().filter(|field| columns.iter().any(|column| column.field == *field)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn columns_are_read_as_fields_in_the_order_of_the_file() {
        let columns: Vec<Column> =
            ["prompt=question", "completion=answer"].map(|text| text.parse().unwrap()).to_vec();
        let row = json!({"answer": "a", "id": 1, "prompt": "p", "question": "q"});
        let renamed = rename(&columns, row.as_object().unwrap().clone());
        let names: Vec<&String> = renamed.keys().collect();
        assert_eq!(names, ["completion", "id", "column prompt", "prompt"]);
        assert_eq!(decisive(&columns), ["prompt", "completion"]);
        assert_eq!(decisive(&["tools=functions".parse().unwrap()]), [""; 0]);
    }

    #[test]
    fn what_is_no_column_is_said() {
        for (text, part) in [
            ("question", "not of the form FIELD=COLUMN"),
            ("prompt=", "not of the form"),
            ("question=prompt", "`question` is not a field that Hydra reads: expected one of text, prompt"),
        ] {
            let error = text.parse::<Column>().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
