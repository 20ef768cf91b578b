//! CSV and TSV tables with a header row.

use super::rows::Row;
use crate::data::{DataError, RowPosition};
use csv::{ErrorKind, ReaderBuilder, StringRecord};
use serde_json::{Map, Value};
use std::path::Path;

/// A row appended to a table: an unclosed quote swallows it.
const END: &str = "\u{1}end of the table\u{1}";

/// Reads the rows of a table. Every cell is text; an empty one is null, as in `datasets`.
pub(super) fn read(path: &Path, text: &str, separator: u8) -> Result<Vec<Row>, DataError> {
    let failed = |error: csv::Error| {
        let byte = error.position().map_or(0, csv::Position::byte);
        let found = match error.kind() {
            ErrorKind::UnequalLengths { expected_len, len, .. } => {
                format!(
                    "found {len} cells, expected {expected_len}: quote cells that contain the separator, \
                     \"like, this\""
                )
            }
            _ => error.to_string(),
        };
        DataError::Record {
            path: path.to_owned(),
            place: RowPosition::Line(Lines::new(text).line_at(byte)),
            found,
        }
    };
    let names = names(text, separator).map_err(failed)?;
    if let Some(twice) = (0..names.len()).find(|&at| names[..at].contains(&names[at])) {
        return Err(DataError::ColumnTwice { path: path.to_owned(), column: names[twice].clone() });
    }
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let mut lines = Lines::new(text);
    let row = |record: StringRecord| {
        let line = lines.line_at(record.position().map_or(0, csv::Position::byte));
        let cells = names.iter().zip(&record).map(|(name, cell)| {
            (name.clone(), if cell.is_empty() { Value::Null } else { Value::String(cell.to_owned()) })
        });
        (RowPosition::Line(line), cells.collect::<Map<_, _>>())
    };
    let separators = char::from(separator).to_string().repeat(names.len() - 1);
    let ended = format!("{text}\n{END}{separators}\n");
    let mut reader = ReaderBuilder::new().delimiter(separator).from_reader(ended.as_bytes());
    let records = reader.records().map(|record| record.map_err(failed));
    let mut records: Vec<StringRecord> = records.collect::<Result<_, _>>()?;
    match records.pop() {
        Some(end) if &end[0] == END => Ok(records.into_iter().map(row).collect()),
        last => {
            let byte = last.as_ref().and_then(StringRecord::position).map_or(0, csv::Position::byte);
            let found = "unclosed quote: close it, or write a quote within a cell as \"\"".to_owned();
            Err(DataError::Record {
                path: path.to_owned(),
                place: RowPosition::Line(Lines::new(text).line_at(byte)),
                found,
            })
        }
    }
}

/// Finds line numbers by byte offset, in ascending order.
struct Lines<'a> {
    text: &'a [u8],
    /// The first byte not yet counted, and its line.
    at: usize,
    line: usize,
}

impl<'a> Lines<'a> {
    fn new(text: &'a str) -> Self {
        Self { text: text.as_bytes(), at: 0, line: 1 }
    }

    /// The line, counted from one, of the first byte at or after this one that is not a line ending.
    fn line_at(&mut self, byte: u64) -> usize {
        let rest = &self.text[(byte as usize).clamp(self.at, self.text.len())..];
        let blank = rest.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
        let end = self.text.len() - rest.len() + blank;
        self.line += self.text[self.at..end].iter().filter(|byte| **byte == b'\n').count();
        self.at = end;
        self.line
    }
}

/// The column names; empty names become pandas' `Unnamed: N`.
fn names(text: &str, separator: u8) -> Result<Vec<String>, csv::Error> {
    let mut reader = ReaderBuilder::new().delimiter(separator).from_reader(text.as_bytes());
    let names = reader.headers()?.iter().enumerate();
    Ok(names
        .map(|(at, name)| if name.is_empty() { format!("Unnamed: {at}") } else { name.to_owned() })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rows(text: &str, separator: u8) -> Result<Vec<Row>, String> {
        read(Path::new("a.csv"), text, separator).map_err(|error| error.to_string())
    }

    #[test]
    fn cells_are_text_with_quotes_and_newlines() {
        let text = "id,text\r\n007,\"a \"\"b\"\", c\nd\"\r\n\r\n8,\r\n9,NA\r\n";
        let rows = rows(text, b',').unwrap();
        let of: Vec<(String, Value)> =
            rows.into_iter().map(|(place, row)| (place.to_string(), Value::Object(row))).collect();
        assert_eq!(
            of,
            [
                ("line 2".to_owned(), json!({"id": "007", "text": "a \"b\", c\nd"})),
                ("line 5".to_owned(), json!({"id": "8", "text": null})),
                ("line 6".to_owned(), json!({"id": "9", "text": "NA"})),
            ]
        );
    }

    #[test]
    fn tabs_separate_columns_too() {
        let rows = rows("prompt\tcompletion\na, b\tc\n", b'\t').unwrap();
        assert_eq!(Value::Object(rows[0].1.clone()), json!({"prompt": "a, b", "completion": "c"}));
    }

    #[test]
    fn tables_that_contradict_themselves_are_named() {
        let error = rows("a,b\n1,2\n1,2,3\n", b',').unwrap_err();
        assert!(
            error.contains("line 3 of `a.csv`") && error.contains("found 3 cells, expected 2"),
            "{error}"
        );
        let error = rows("text,text\n1,2\n", b',').unwrap_err();
        assert!(error.contains("two columns named `text`"), "{error}");
        let error = rows("id,text\n1,a\n2,\"b\n3,c\n", b',').unwrap_err();
        assert!(error.contains("line 3") && error.contains("unclosed quote"), "{error}");
        assert_eq!(rows("text\n", b',').unwrap().len(), 0);
        assert_eq!(rows("text", b',').unwrap().len(), 0);
        assert_eq!(rows("", b',').unwrap().len(), 0);
        assert_eq!(rows(",text\n1,a", b',').unwrap()[0].1["Unnamed: 0"], "1");
    }
}
