//! Writes rows as JSON Lines or as a table.

use crate::terminal::Usage;
use anyhow::Result;
use serde_json::{Map, Value};
use std::io::{self, Write};
use std::path::Path;

/// The format of written rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFormat {
    /// One JSON object per line.
    Lines,
    /// A text table with this separator.
    Table(char),
}

impl RowFormat {
    /// The format of a file by its name; for standard output, a table if the input is one, else lines.
    ///
    /// # Errors
    /// A name of another ending.
    pub fn of(out: Option<&Path>, input: &Path) -> Result<Self, Usage> {
        let Some(out) = out else { return Ok(Self::named(input).unwrap_or(Self::Lines)) };
        Self::named(out).ok_or_else(|| {
            Usage::new(format!("--out `{}`: expected FILE.jsonl, FILE.csv or FILE.tsv", out.display()))
        })
    }

    fn named(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "jsonl" | "ndjson" => Some(Self::Lines),
            "csv" => Some(Self::Table(',')),
            "tsv" => Some(Self::Table('\t')),
            _ => None,
        }
    }

    /// Writes rows. The columns of a table are the names of all rows' fields in the order of their first appearance. Each field
    /// of an object is a column `FIELD.NAME`, and lists are written as JSON.
    pub fn write(self, rows: &[Map<String, Value>], out: &mut dyn Write) -> io::Result<()> {
        let Self::Table(separator) = self else {
            return rows.iter().try_for_each(|row| writeln!(out, "{}", serde_json::to_string(row)?));
        };
        let flat: Vec<Map<String, Value>> = rows.iter().map(flat).collect();
        let mut columns = Map::new();
        for name in flat.iter().flat_map(Map::keys) {
            if !columns.contains_key(name) {
                columns.insert(name.clone(), Value::Null);
            }
        }
        let mut line = |cells: &mut dyn Iterator<Item = String>| {
            let cells: Vec<String> = cells.map(|text| quoted(&text, separator)).collect();
            writeln!(out, "{}", cells.join(&separator.to_string()))
        };
        line(&mut columns.keys().cloned())?;
        flat.iter().try_for_each(|row| line(&mut columns.keys().map(|name| cell(row.get(name)))))
    }
}

/// A row with the names of an object's fields after its own.
fn flat(row: &Map<String, Value>) -> Map<String, Value> {
    let mut out = Map::new();
    for (name, value) in row {
        match value {
            Value::Object(fields) => {
                out.extend(fields.iter().map(|(of, value)| (format!("{name}.{of}"), value.clone())));
            }
            value => drop(out.insert(name.clone(), value.clone())),
        }
    }
    out
}

/// A value as the text of a cell.
fn cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// A cell, in quotes if it needs them.
fn quoted(text: &str, separator: char) -> String {
    let special = |c: char| c == separator || matches!(c, '"' | '\n' | '\r');
    if text.contains(special) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn written(format: RowFormat, rows: Value) -> String {
        let rows: Vec<Map<String, Value>> = serde_json::from_value(rows).unwrap();
        let mut out = Vec::new();
        format.write(&rows, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn rows_are_lines_or_a_table() {
        let rows = json!([{"b": "x, \"y\"\n", "a": 1}, {"b": null, "p": {"no": 0.25, "yes": 0.75}, "l": ["u", "v"]}]);
        let lines = written(RowFormat::Lines, rows.clone());
        assert_eq!(lines.lines().next().unwrap(), r#"{"b":"x, \"y\"\n","a":1}"#);
        assert_eq!(lines.lines().count(), 2);
        let table = written(RowFormat::Table(','), rows.clone());
        let expected = "b,a,p.no,p.yes,l\n\"x, \"\"y\"\"\n\",1,,,\n,,0.25,0.75,\"[\"\"u\"\",\"\"v\"\"]\"\n";
        assert_eq!(table, expected);
        assert!(written(RowFormat::Table('\t'), rows).starts_with("b\ta\tp.no\t"));
    }

    #[test]
    fn names_decide_the_format() {
        let of = |out: Option<&str>, input: &str| RowFormat::of(out.map(Path::new), Path::new(input));
        assert_eq!(of(None, "a.csv").unwrap(), RowFormat::Table(','));
        assert_eq!(of(None, "a.parquet").unwrap(), RowFormat::Lines);
        assert_eq!(of(Some("a/b.TSV"), "a.csv").unwrap(), RowFormat::Table('\t'));
        assert!(of(Some("out"), "a.csv").unwrap_err().to_string().contains("`out`: expected FILE.jsonl"));
    }
}
