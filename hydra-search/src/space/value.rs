//! The value of a setting.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The value of a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// A boolean.
    Flag(bool),
    /// An integer.
    Whole(i64),
    /// A number.
    Number(f64),
    /// A word.
    Text(String),
    /// Several values.
    List(Vec<Value>),
    /// Settings of a setting.
    Table(BTreeMap<String, Value>),
}

impl Value {
    /// Parses a flag's text: an integer, a number, `true`, `false`, or otherwise the text itself.
    pub fn of_text(text: &str) -> Self {
        if let Ok(whole) = text.parse() {
            return Self::Whole(whole);
        }
        match text.parse::<f64>() {
            // `inf` and `nan` are not valid numbers of a setting.
            Ok(number) if number.is_finite() => Self::Number(number),
            _ if text == "true" || text == "false" => Self::Flag(text == "true"),
            _ => Self::Text(text.to_owned()),
        }
    }

    /// The number, if it is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Whole(whole) => Some(*whole as f64),
            Self::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// The value as text; two values have the same text exactly if they are equal, such as 8 and 8.0, or 1e-4 and
    /// 0.0001.
    pub fn identity(&self) -> String {
        match self {
            Self::Flag(flag) => flag.to_string(),
            Self::Whole(whole) => whole.to_string(),
            Self::Number(number) => match as_whole(*number) {
                Some(whole) => whole.to_string(),
                None => format!("{number:e}"),
            },
            Self::Text(text) => format!("{text:?}"),
            Self::List(values) => {
                let values: Vec<String> = values.iter().map(Self::identity).collect();
                format!("[{}]", values.join(","))
            }
            Self::Table(table) => identity_of(table),
        }
    }

    /// The first number in it that is not finite.
    pub(crate) fn not_finite(&self) -> Option<f64> {
        match self {
            Self::Number(number) => (!number.is_finite()).then_some(*number),
            Self::List(values) => values.iter().find_map(Self::not_finite),
            Self::Table(table) => table.values().find_map(Self::not_finite),
            Self::Flag(_) | Self::Whole(_) | Self::Text(_) => None,
        }
    }
}

/// The integer equal to this number, in the range in which floats represent all integers.
fn as_whole(number: f64) -> Option<i64> {
    let exact = number.trunc() == number && number.abs() <= (1u64 << 53) as f64;
    exact.then_some(number as i64)
}

/// A table's values by name as one text.
pub(super) fn identity_of(table: &BTreeMap<String, Value>) -> String {
    let members: Vec<String> =
        table.iter().map(|(name, value)| format!("{name:?}:{}", value.identity())).collect();
    format!("{{{}}}", members.join(","))
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Number(number) if *number != 0.0 && !(1e-2..1e6).contains(&number.abs()) => {
                write!(f, "{number:e}")
            }
            Self::Number(number) => write!(f, "{number}"),
            other => f.write_str(&other.identity()),
        }
    }
}

macro_rules! value_from {
    ($($from:ty: $value:expr),*) => {$(
        impl From<$from> for Value {
            fn from(value: $from) -> Self {
                $value(value)
            }
        }
    )*};
}

value_from!(bool: Self::Flag, i64: Self::Whole, f64: Self::Number, &str: |text: &str| Self::Text(text.to_owned()));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_become_the_values_that_they_look_like() {
        assert_eq!(Value::of_text("8"), Value::Whole(8));
        assert_eq!(Value::of_text("1e-4"), Value::Number(1e-4));
        assert_eq!(Value::of_text("true"), Value::Flag(true));
        for word in ["adamw", "nan", "inf", "", "True", "a:b"] {
            assert_eq!(Value::of_text(word), Value::from(word));
        }
    }

    #[test]
    fn the_same_value_has_one_identity() {
        let same = |a: Value, b: Value| a.identity() == b.identity();
        assert!(same(8.0.into(), 8.into()));
        assert!(same((-0.0).into(), 0.into()));
        assert!(same(Value::of_text("1e-4"), Value::of_text("0.0001")));
        assert!(!same("8".into(), 8.into()), "a word is no number");
        assert!(!same(true.into(), "true".into()));
        assert!(!same((0.1 + 0.2).into(), 0.3.into()));
        let list = |values: &[i64]| Value::List(values.iter().copied().map(Value::from).collect());
        assert!(!same(list(&[1, 2]), list(&[2, 1])));
        assert!(!same(list(&[1, 2]), list(&[12])));
        let huge = (1u64 << 60) as f64;
        assert!(!same(huge.into(), (huge as i64 + 1).into()));
    }

    #[test]
    fn values_survive_both_files() {
        let text = "a = true\nb = 3\nc = 3.0\nd = \"x\"\ne = [1, 2.5]\n\n[f]\nrank = 8\n";
        let table: BTreeMap<String, Value> = toml::from_str(text).unwrap();
        assert_eq!((&table["b"], &table["c"]), (&Value::Whole(3), &Value::Number(3.0)));
        assert_eq!(toml::to_string(&table).unwrap(), text);
        let json = serde_json::to_string(&table).unwrap();
        assert_eq!(serde_json::from_str::<BTreeMap<String, Value>>(&json).unwrap(), table);
    }

    #[test]
    fn numbers_are_shown_as_people_write_them() {
        let shown: Vec<String> = [3e-4, 0.1, 8.0, 0.0, 2.5e7].map(|n| Value::from(n).to_string()).to_vec();
        assert_eq!(shown, ["3e-4", "0.1", "8", "0", "2.5e7"]);
    }
}
