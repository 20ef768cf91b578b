//! JSON formatted like Python's `json.dumps`.

use super::values::float;
use minijinja::value::{Kwargs, Rest, Value as Jinja, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind};

/// The `tojson` filter of Transformers: `json.dumps` with these arguments and `ensure_ascii` false by default.
pub(super) fn to_json(value: Jinja, arguments: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let arguments = arguments.into_values();
    let (places, named): (&[Jinja], Kwargs) = from_args(&arguments)?;
    let given = |place: usize, name: &str| -> Result<Option<Jinja>, Error> {
        let value = places.get(place).cloned();
        let value = value.map_or_else(|| named.get::<Option<Jinja>>(name), |value| Ok(Some(value)))?;
        Ok(value.filter(|value| !value.is_none()))
    };
    let (ascii, indent) = (given(0, "ensure_ascii")?, given(1, "indent")?);
    let (separators, sorted) = (given(2, "separators")?, given(3, "sort_keys")?);
    named.assert_all_used()?;
    let indent = indent.map(|indent| match indent.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => i64::try_from(indent).map(|count| " ".repeat(usize::try_from(count).unwrap_or(0))),
    });
    let indent = indent.transpose()?;
    let default = if indent.is_some() { [",", ": "] } else { [", ", ": "] };
    let mut style = Style {
        ascii: ascii.is_some_and(|ascii| ascii.is_true()),
        sorted: sorted.is_some_and(|sorted| sorted.is_true()),
        indent,
        separators: default.map(str::to_owned),
    };
    if let Some(given) = separators {
        style.separators = [0, 1].map(|at| given.get_item_by_index(at).unwrap_or_default().to_string());
    }
    let mut out = String::new();
    style.write(&mut out, &value, 0)?;
    Ok(out)
}

struct Style {
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    /// The separators of items, and of keys and values.
    separators: [String; 2],
}

impl Style {
    fn write(&self, out: &mut String, value: &Jinja, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Jinja> = value.try_iter()?.collect();
                self.write_all(out, ['[', ']'], &items, depth, |out, item| self.write(out, item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Jinja> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.write_all(out, ['{', '}'], &keys, depth, |out, key| {
                    self.write_text(out, &key_text(key));
                    out.push_str(&self.separators[1]);
                    self.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            kind => {
                let wrong = format!("a value that is {kind} has no JSON");
                return Err(Error::new(ErrorKind::BadSerialization, wrong));
            }
        }
        Ok(())
    }

    fn write_all(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        items: &[Jinja],
        depth: usize,
        mut write: impl FnMut(&mut String, &Jinja) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |out: &mut String, depth: usize| {
            if let Some(indent) = self.indent.as_ref().filter(|_| !items.is_empty()) {
                out.push('\n');
                out.extend(std::iter::repeat_n(indent.as_str(), depth));
            }
        };
        out.push(open);
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                out.push_str(&self.separators[0]);
            }
            line(out, depth + 1);
            write(out, item)?;
        }
        line(out, depth);
        out.push(close);
        Ok(())
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ascii && !c.is_ascii()) => {
                    let mut units = [0; 2];
                    c.encode_utf16(&mut units)
                        .iter()
                        .for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn number(value: &Jinja) -> String {
    let written = if value.is_integer() { value.to_string() } else { float(value) };
    match written.as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        _ => written,
    }
}

/// A key as a JSON string.
fn key_text(key: &Jinja) -> String {
    match key.kind() {
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => key.is_true().to_string(),
        ValueKind::Number => number(key),
        _ => key.to_string(),
    }
}
