//! JSON values for templates: they print as in Python, and reads of message fields are recorded.

use super::trace::Trace;
use minijinja::value::{Enumerator, Object, ObjectRepr, Value as Jinja, ValueKind};
use serde_json::Value;
use std::fmt;
use std::sync::Arc;

/// Converts a JSON value; object keys keep their order.
pub(super) fn from_json(value: &Value) -> Jinja {
    match value {
        Value::Null => Jinja::from(()),
        Value::Bool(value) => Jinja::from(*value),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Jinja::from(number),
            (None, Some(number)) => Jinja::from(number),
            (None, None) => Jinja::from(number.as_f64()),
        },
        Value::String(text) => Jinja::from(text.as_str()),
        Value::Array(items) => Jinja::from_object(List(items.iter().map(from_json).collect())),
        Value::Object(_) => Jinja::from_object(Dict { entries: entries(value), message: None }),
    }
}

/// Converts a message; reads of its fields are recorded.
pub(super) fn message(number: usize, message: &Value, trace: &Arc<Trace>) -> Jinja {
    Jinja::from_object(Dict { entries: entries(message), message: Some((number, trace.clone())) })
}

/// Converts a list of values.
pub(super) fn list(items: Vec<Jinja>) -> Jinja {
    Jinja::from_object(List(items))
}

/// The index of the message, if the value is one.
pub(super) fn message_number(value: &Jinja) -> Option<usize> {
    value.downcast_object_ref::<Dict>()?.message.as_ref().map(|(number, _)| *number)
}

fn entries(object: &Value) -> Vec<(String, Jinja)> {
    let fields = object.as_object().into_iter().flatten();
    fields.map(|(name, value)| (name.clone(), from_json(value))).collect()
}

#[derive(Debug)]
struct Dict {
    entries: Vec<(String, Jinja)>,
    /// The index of the message, if this is one.
    message: Option<(usize, Arc<Trace>)>,
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Jinja) -> Option<Jinja> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Jinja> {
        let (name, value) = self.entries.iter().find(|(name, _)| name == key)?;
        self.message.iter().for_each(|(_, trace)| trace.read_field(name));
        Some(value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        if let Some((_, trace)) = &self.message {
            self.entries.iter().for_each(|(name, _)| trace.read_field(name));
        }
        Enumerator::Values(self.entries.iter().map(|(name, _)| Jinja::from(name.as_str())).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.entries.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&repr(&Jinja::from_dyn_object(self.clone())))
    }
}

#[derive(Debug)]
struct List(Vec<Jinja>);

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Jinja) -> Option<Jinja> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&repr(&Jinja::from_dyn_object(self.clone())))
    }
}

/// Python's `str`.
pub(super) fn text(value: &Jinja) -> String {
    match value.kind() {
        ValueKind::Number if !value.is_integer() => float(value),
        ValueKind::Seq | ValueKind::Map => repr(value),
        _ => value.to_string(),
    }
}

/// Python's `repr`.
fn repr(value: &Jinja) -> String {
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let items: Vec<String> = items().map(|item| repr(&item)).collect();
            match (value.is_tuple(), items.as_slice()) {
                (true, [only]) => format!("({only},)"),
                (true, _) => format!("({})", items.join(", ")),
                (false, _) => format!("[{}]", items.join(", ")),
            }
        }
        ValueKind::Map => {
            let field = |key: Jinja| {
                let value = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", repr(&key), repr(&value))
            };
            format!("{{{}}}", items().map(field).collect::<Vec<_>>().join(", "))
        }
        _ => text(value),
    }
}

/// A string as in Python's `repr`: in single quotes unless it contains some and no double quotes.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || (0x7f..0xa1).contains(&(c as u32)) || c == '\u{ad}' => {
                out.push_str(&format!("\\x{:02x}", c as u32));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// A float as in Python: its shortest digits, with an exponent below 1e-4 and from 1e16.
pub(super) fn float(value: &Jinja) -> String {
    let number = f64::try_from(value.clone()).unwrap_or(f64::NAN);
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf".to_owned() } else { "-inf".to_owned() };
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = number.to_string();
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Expected values are from Python 3.11.
    #[test]
    fn values_print_as_in_python() {
        let shown = |value: Value| text(&from_json(&value));
        assert_eq!(
            shown(json!({"b": [1, 2.0, null, true], "a": {"it's": "x\n\"y\"", "q": "don't"}})),
            r#"{'b': [1, 2.0, None, True], 'a': {"it's": 'x\n"y"', 'q': "don't"}}"#
        );
        for (number, printed) in [
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1e-5, "1e-05"),
            (0.0001, "0.0001"),
            (1.5e-7, "1.5e-07"),
        ] {
            assert_eq!(shown(json!(number)), printed);
        }
        assert_eq!(shown(json!("plain")), "plain");
        assert_eq!(shown(json!(18_446_744_073_709_551_615_u64)), "18446744073709551615");
    }
}
