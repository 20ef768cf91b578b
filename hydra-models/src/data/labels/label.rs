//! The label of a row as it is written.

use crate::data::examples::kind;
use serde_json::Value;

/// One class or number.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Entry {
    /// A name.
    Name(String),
    /// An integer: a class or a number.
    Integer(i64),
    /// A number that is written with a fraction or an exponent.
    Fraction(f64),
}

/// The label of a row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Label {
    /// One class or number.
    One(Entry),
    /// A list.
    List(Vec<Entry>),
}

impl Label {
    /// Reads the value of a field. Cells of a table are text: they hold a list where they are one in JSON, and numbers where they
    /// look like one.
    pub(super) fn read(field: &str, value: Value, is_table: bool) -> Result<Self, String> {
        if let Some(cell) = value.as_str().map(str::trim).filter(|cell| is_table && cell.starts_with('[')) {
            match serde_json::from_str(cell) {
                Ok(list @ Value::Array(_)) => return Self::read(field, list, false),
                _ if is_list_of_python(cell) => {
                    let advice = "write it as JSON, such as [\"a\", \"b\"]";
                    return Err(format!("`{field}` is a list in the form of Python, {cell}: {advice}"));
                }
                _ => {}
            }
        }
        match value {
            Value::Array(list) => {
                let entry = |value| Entry::read(field, value, is_table);
                Ok(Self::List(list.into_iter().map(entry).collect::<Result<_, _>>()?))
            }
            value => Entry::read(field, value, is_table).map(Self::One),
        }
    }

    /// The classes or numbers.
    pub(super) fn entries(&self) -> &[Entry] {
        match self {
            Self::One(entry) => std::slice::from_ref(entry),
            Self::List(entries) => entries,
        }
    }
}

/// Returns whether a cell is a list as Python or NumPy prints it, such as `['a', 'b']`, `[True, False]` or `[0. 1.]`.
fn is_list_of_python(cell: &str) -> bool {
    let Some(inner) = cell.strip_prefix('[').and_then(|cell| cell.strip_suffix(']')) else { return false };
    let mut entries = inner.split([',', ' ']).filter(|entry| !entry.is_empty()).peekable();
    let is_printed = |entry: &str| matches!(entry, "True" | "False") || entry.parse::<f64>().is_ok();
    inner.trim_start().starts_with('\'') || entries.peek().is_some() && entries.all(is_printed)
}

impl Entry {
    fn read(field: &str, value: Value, is_table: bool) -> Result<Self, String> {
        match value {
            Value::String(text) if text.trim().is_empty() => {
                Err(format!("`{field}` has an empty name: fill it in, or remove the row"))
            }
            Value::String(text) if is_table => Ok(Self::of_cell(text)),
            Value::String(text) => Ok(Self::Name(text)),
            Value::Bool(truth) => Ok(Self::Name(truth.to_string())),
            Value::Number(number) => Ok(match number.as_i64() {
                Some(integer) => Self::Integer(integer),
                // An identifier beyond the integers is a name.
                None if number.is_u64() => Self::Name(number.to_string()),
                None => Self::Fraction(number.as_f64().unwrap_or(f64::NAN)),
            }),
            other => Err(format!("`{field}` must have names or numbers, found {}", kind(&other))),
        }
    }

    /// Reads a cell: an integer as it is written by default, so that no two cells are one class; a number with a point
    /// or an exponent; or a name.
    fn of_cell(text: String) -> Self {
        let integer = text.parse::<i64>().ok().filter(|integer| integer.to_string() == text);
        let fraction = || {
            let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
            number.filter(|_| text.contains(['.', 'e', 'E']))
        };
        match (integer, fraction()) {
            (Some(integer), _) => Self::Integer(integer),
            (_, Some(fraction)) => Self::Fraction(fraction),
            _ => Self::Name(text),
        }
    }

    /// Reads the name of a class folder: an integer as it is written by default, or a name.
    pub(super) fn of_folder(name: String) -> Self {
        match Self::of_cell(name.clone()) {
            Self::Integer(integer) => Self::Integer(integer),
            _ => Self::Name(name),
        }
    }

    /// The name of the class; `None` for a number that is not an integer.
    pub(super) fn class(&self) -> Option<String> {
        /// Above it, not every integer is a number.
        const EXACT: f64 = (1_u64 << 53) as f64;
        match self {
            Self::Name(name) => Some(name.clone()),
            Self::Integer(integer) => Some(integer.to_string()),
            Self::Fraction(number) => {
                let is_integer = number.fract() == 0.0 && number.abs() < EXACT;
                is_integer.then(|| (*number as i64).to_string())
            }
        }
    }

    /// The number; `None` for a name. A cell of a table may hold a number in any form, also one that is not finite.
    pub(super) fn number(&self, is_table: bool) -> Option<f64> {
        match self {
            Self::Name(text) if is_table => text.parse().ok(),
            Self::Name(_) => None,
            Self::Integer(integer) => Some(*integer as f64),
            Self::Fraction(number) => Some(*number),
        }
    }

    /// Returns whether the label is a name that spells a number that is not finite.
    pub(super) fn is_not_finite(&self) -> bool {
        matches!(self, Self::Name(text) if text.parse::<f64>().is_ok_and(|number| !number.is_finite()))
    }

    /// Describes the label for messages.
    pub(super) fn shown(&self) -> String {
        match self {
            Self::Name(name) => format!("`{name}`"),
            Self::Integer(integer) => integer.to_string(),
            Self::Fraction(number) => format!("{number:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(value: Value, is_table: bool) -> Entry {
        match Label::read("label", value, is_table).unwrap() {
            Label::One(entry) => entry,
            Label::List(_) => panic!("one label"),
        }
    }

    #[test]
    fn cells_that_look_like_numbers_are_numbers() {
        for (cell, expected) in [
            ("3", Entry::Integer(3)),
            ("-12", Entry::Integer(-12)),
            ("0.5", Entry::Fraction(0.5)),
            ("1.0", Entry::Fraction(1.0)),
            ("1e-3", Entry::Fraction(0.001)),
            ("007", Entry::Name("007".to_owned())),
            ("+1", Entry::Name("+1".to_owned())),
            ("nan", Entry::Name("nan".to_owned())),
            ("1e999", Entry::Name("1e999".to_owned())),
            ("good", Entry::Name("good".to_owned())),
        ] {
            assert_eq!(entry(json!(cell), true), expected, "{cell}");
            assert_eq!(entry(json!(cell), false), Entry::Name(cell.to_owned()), "text is text in JSON");
        }
    }

    #[test]
    fn values_of_json_are_names_or_numbers() {
        assert_eq!(entry(json!(3), false), Entry::Integer(3));
        assert_eq!(entry(json!(3.0), false), Entry::Fraction(3.0));
        assert_eq!(entry(json!(true), false), Entry::Name("true".to_owned()));
        let list = Label::read("labels", json!(["a", 2]), false).unwrap();
        assert_eq!(list, Label::List(vec![Entry::Name("a".to_owned()), Entry::Integer(2)]));
        let cell = |text: &str| Label::read("labels", json!(text), true);
        assert_eq!(cell(r#" ["a", 2]"#).unwrap(), list);
        for name in ["[other]", "[don't know]", "[]s"] {
            assert_eq!(cell(name).unwrap(), Label::One(Entry::Name(name.to_owned())));
        }
        for list in ["['a', 'b']", "[True, False]", "[1 0]", "[0. 1.]"] {
            let error = cell(list).unwrap_err();
            let found = format!("`labels` is a list in the form of Python, {list}: write it as JSON");
            assert!(error.contains(&found), "{error}");
        }
        for (value, found) in [
            (json!(" "), "`label` has an empty name"),
            (json!({"a": 1}), "`label` must have names or numbers, found an object"),
            (json!([1, null]), "`label` must have names or numbers, found null"),
            (json!([[1]]), "`label` must have names or numbers, found a list"),
        ] {
            let error = Label::read("label", value.clone(), false).unwrap_err();
            assert!(error.contains(found), "{error} for {value}");
        }
    }

    #[test]
    fn an_integer_is_a_class_however_it_is_written() {
        let class = |value| entry(value, false).class();
        assert_eq!(
            [class(json!(7)), class(json!(7.0)), class(json!("7"))],
            [(); 3].map(|()| Some("7".to_owned()))
        );
        assert_eq!([class(json!(7.5)), class(json!(1e300))], [None, None]);
        assert_eq!(entry(json!("007"), true).number(true), Some(7.0));
        assert_eq!(entry(json!("7.5"), false).number(false), None);
    }
}
