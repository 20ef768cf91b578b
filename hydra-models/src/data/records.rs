//! Files of data that are no plain text.

use serde_json::Value;
use std::path::Path;

/// Lines that are looked at.
const LINES: usize = 20;

/// The records that a text consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Records {
    /// A JSON value in every line.
    JsonLines {
        /// The names in the first object, those of texts first.
        fields: Vec<String>,
    },
    /// One JSON value.
    Json,
    /// Lines of columns.
    Table {
        /// The character between columns: a comma or a tab.
        separator: char,
        /// The names that the first line gives.
        columns: Vec<String>,
    },
}

impl Records {
    /// Looks at the beginning of a text, and for tables at the name of its file: a comma is also prose.
    pub(super) fn found(text: &str, file: &Path) -> Option<Self> {
        let ending = file.extension().map(|ending| ending.to_ascii_lowercase());
        match ending.as_deref().and_then(|ending| ending.to_str()) {
            Some("csv") => Some(Self::table(text, ',')),
            Some("tsv" | "tab") => Some(Self::table(text, '\t')),
            _ => Self::json(text),
        }
    }

    fn table(text: &str, separator: char) -> Self {
        let first = text.trim_start_matches('\u{FEFF}').lines().find(|line| !line.trim().is_empty());
        let names = first.unwrap_or_default().split(separator);
        Self::Table {
            separator,
            columns: names.map(|name| name.trim().trim_matches('"').to_owned()).collect(),
        }
    }

    fn json(text: &str) -> Option<Self> {
        let text = text.trim_start_matches('\u{FEFF}').trim_start();
        if !text.starts_with(['{', '[']) {
            return None;
        }
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty()).take(LINES);
        let values: Result<Vec<Value>, _> = lines.map(serde_json::from_str).collect();
        match values {
            Ok(values) if values.iter().all(|value| value.is_object() || value.is_array()) => {
                Some(Self::JsonLines { fields: fields(values.first()?) })
            }
            // Cut off where a part of the file ends, or written over many lines.
            _ => is_json_from_the_start(text).then_some(Self::Json),
        }
    }
}

/// The names in an object, those of texts first.
fn fields(value: &Value) -> Vec<String> {
    let Some(object) = value.as_object() else { return Vec::new() };
    let mut fields: Vec<(&String, &Value)> = object.iter().collect();
    fields.sort_by_key(|(_, value)| !value.is_string());
    fields.into_iter().map(|(name, _)| name.clone()).collect()
}

/// Returns true if nothing is wrong with a text as JSON before its end.
fn is_json_from_the_start(text: &str) -> bool {
    match serde_json::from_str::<serde::de::IgnoredAny>(text) {
        Ok(_) => true,
        Err(error) => error.is_eof(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, file: &str) -> Option<Records> {
        Records::found(text, Path::new(file))
    }

    #[test]
    fn lines_of_json_are_found_whatever_the_file_is_called() {
        let text = "{\"id\": 1, \"prompt\": \"a\", \"answer\": \"b\"}\n\n{\"id\": 2}\n";
        let fields = ["answer", "prompt", "id"].map(str::to_owned).to_vec();
        for file in ["data.jsonl", "data", "/a/b.txt"] {
            assert_eq!(found(text, file), Some(Records::JsonLines { fields: fields.clone() }));
        }
        assert_eq!(found("[1, 2]\n[3, 4]\n", "pairs"), Some(Records::JsonLines { fields: Vec::new() }));
    }

    #[test]
    fn one_value_of_json_is_found_also_where_its_end_is_cut_off() {
        let text = "[\n  {\"text\": \"one\"},\n  {\"text\": \"two\"}\n]\n";
        for end in [text.len(), 20, 4] {
            assert_eq!(found(&text[..end], "data.json"), Some(Records::Json), "{}", &text[..end]);
        }
    }

    #[test]
    fn tables_are_found_by_the_names_of_their_files() {
        let columns = ["id", "text"].map(str::to_owned).to_vec();
        let table = |separator| Some(Records::Table { separator, columns: columns.clone() });
        assert_eq!(found("\u{FEFF}id,\"text\"\n1,\"a, b\"\n", "DATA.CSV"), table(','));
        assert_eq!(found("id\ttext\n1\ta\n", "data.tsv"), table('\t'));
    }

    #[test]
    fn prose_is_no_record() {
        for text in [
            "One, two, three.\nFour, five, six.\n",
            "[Chorus]\nla la\n",
            "{a set}\n",
            "[sic] he said\n",
            "= Title = \n",
        ] {
            assert_eq!(found(text, "text.txt"), None, "{text}");
        }
    }
}
