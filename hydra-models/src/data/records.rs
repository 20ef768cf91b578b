//! Detects data files that are not plain text.

use serde_json::Value;

/// The number of lines that detection reads.
const LINES: usize = 20;

/// The records of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Records {
    /// One JSON value per line.
    JsonLines {
        /// The keys of the first object, string values first.
        fields: Vec<String>,
    },
    /// A single JSON value.
    Json,
}

impl Records {
    /// Inspects the start of a text.
    pub(super) fn found(text: &str) -> Option<Self> {
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
            // A JSON value cut off by the end of the excerpt, or spread over many lines.
            _ => is_json_from_the_start(text).then_some(Self::Json),
        }
    }
}

/// The keys of an object, string values first.
fn fields(value: &Value) -> Vec<String> {
    let Some(object) = value.as_object() else { return Vec::new() };
    let mut fields: Vec<(&String, &Value)> = object.iter().collect();
    fields.sort_by_key(|(_, value)| !value.is_string());
    fields.into_iter().map(|(name, _)| name.clone()).collect()
}

/// Returns true if the text is valid JSON up to its end.
fn is_json_from_the_start(text: &str) -> bool {
    match serde_json::from_str::<serde::de::IgnoredAny>(text) {
        Ok(_) => true,
        Err(error) => error.is_eof(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_json_are_found() {
        let text = "{\"id\": 1, \"prompt\": \"a\", \"answer\": \"b\"}\n\n{\"id\": 2}\n";
        let fields = ["prompt", "answer", "id"].map(str::to_owned).to_vec();
        assert_eq!(Records::found(text), Some(Records::JsonLines { fields }));
        assert_eq!(Records::found("[1, 2]\n[3, 4]\n"), Some(Records::JsonLines { fields: Vec::new() }));
    }

    #[test]
    fn one_value_of_json_is_found_also_where_its_end_is_cut_off() {
        let text = "[\n  {\"text\": \"one\"},\n  {\"text\": \"two\"}\n]\n";
        for end in [text.len(), 20, 4] {
            assert_eq!(Records::found(&text[..end]), Some(Records::Json), "{}", &text[..end]);
        }
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
            assert_eq!(Records::found(text), None, "{text}");
        }
    }
}
