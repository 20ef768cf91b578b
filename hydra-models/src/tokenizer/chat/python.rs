//! Python and Jinja features that the template engine lacks.

use super::values::text;
use minijinja::value::Tuple;
use minijinja::value::{Kwargs, Value as Jinja, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Makes values behave in templates as in Python.
pub(super) fn extend(environment: &mut Environment<'_>) {
    minijinja_contrib::add_to_environment(environment);
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, _, value| {
        write_str(out, if value.is_undefined() { String::new() } else { text(value) })
    });
    environment.add_filter("string", |value: Jinja| text(&value));
    environment.add_test("sequence", |value: &Jinja| {
        let kinds = [ValueKind::Undefined, ValueKind::Seq, ValueKind::String, ValueKind::Map];
        kinds.contains(&value.kind())
    });
    environment.add_test("iterable", |value: &Jinja| {
        let is_other = !value.is_none() && value.try_iter().is_ok();
        value.kind() == ValueKind::String || value.is_undefined() || is_other
    });
    environment.add_test("callable", |value: &Jinja| value.kind() == ValueKind::Plain);
}

fn write_str(out: &mut minijinja::Output<'_>, text: String) -> Result<(), Error> {
    Ok(out.write_str(&text)?)
}

/// Methods of Python's strings, lists and dictionaries.
fn method(state: &mut State<'_, '_>, value: &Jinja, name: &str, args: &[Jinja]) -> Result<Jinja, Error> {
    let found = match value.kind() {
        ValueKind::String => string_method(value.as_str().unwrap_or_default(), name, args)?,
        ValueKind::Seq if name == "index" => Some(index_in(value, args)?),
        ValueKind::Seq | ValueKind::Map if name == "copy" => {
            let () = from_args(args)?;
            Some(value.clone())
        }
        _ => None,
    };
    found.map_or_else(|| unknown_method_callback(state, value, name, args), Ok)
}

fn index_in(list: &Jinja, args: &[Jinja]) -> Result<Jinja, Error> {
    let (what,): (&Jinja,) = from_args(args)?;
    let at = list.try_iter()?.position(|item| item == *what);
    at.map(Jinja::from).ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "value is not in list"))
}

/// String methods that the engine's compatibility layer lacks or implements differently.
fn string_method(text: &str, name: &str, args: &[Jinja]) -> Result<Option<Jinja>, Error> {
    Ok(Some(match name {
        "strip" | "lstrip" | "rstrip" => strip(text, name, args)?,
        "split" | "rsplit" => split(text, name == "rsplit", args)?,
        "splitlines" => split_lines(text, args)?,
        "partition" | "rpartition" => partition(text, name == "rpartition", args)?,
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Jinja::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Jinja::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "ljust" | "rjust" | "center" | "zfill" => pad(text, name, args)?,
        "index" | "rindex" => {
            let (what,): (&str,) = from_args(args)?;
            let at = if name == "index" { text.find(what) } else { text.rfind(what) };
            let at = at.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found"))?;
            Jinja::from(text[..at].chars().count())
        }
        "swapcase" => Jinja::from(swap_case(text)),
        "casefold" => Jinja::from(text.to_lowercase().replace('ß', "ss")),
        "isdecimal" => Jinja::from(!text.is_empty() && text.chars().all(|c| c.is_ascii_digit())),
        "isidentifier" => {
            let mut chars = text.chars();
            let first = chars.next().is_some_and(|c| c == '_' || c.is_alphabetic());
            Jinja::from(first && chars.all(|c| c == '_' || c.is_alphanumeric()))
        }
        "expandtabs" => {
            let (size,): (Option<usize>,) = from_args(args)?;
            Jinja::from(text.replace('\t', &" ".repeat(size.unwrap_or(8))))
        }
        _ => return Ok(None),
    }))
}

/// White space as defined by Python's `str`.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn strip(text: &str, name: &str, args: &[Jinja]) -> Result<Jinja, Error> {
    let (chars,): (Option<&str>,) = from_args(args)?;
    let wanted = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    Ok(Jinja::from(match name {
        "lstrip" => text.trim_start_matches(wanted),
        "rstrip" => text.trim_end_matches(wanted),
        _ => text.trim_matches(wanted),
    }))
}

/// `split` and `rsplit`, with positional or keyword arguments.
fn split(text: &str, from_right: bool, args: &[Jinja]) -> Result<Jinja, Error> {
    let (sep, most, named): (Option<Jinja>, Option<i64>, Kwargs) = from_args(args)?;
    let sep = sep.map_or_else(|| named.get::<Option<Jinja>>("sep"), |sep| Ok(Some(sep)))?;
    let most = most.map_or_else(|| named.get::<Option<i64>>("maxsplit"), |most| Ok(Some(most)))?;
    named.assert_all_used()?;
    let parts =
        most.and_then(|most| usize::try_from(most).ok()).map_or(usize::MAX, |most| most.saturating_add(1));
    let sep = sep.filter(|sep| !sep.is_none());
    let found: Vec<&str> = match sep.as_ref().map(|sep| sep.as_str()) {
        Some(Some("")) => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(Some(sep)) if from_right => reversed(text.rsplitn(parts, sep)),
        Some(Some(sep)) => text.splitn(parts, sep).collect(),
        Some(None) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "the separator must be a string"));
        }
        None => split_at_space(text, parts, from_right),
    };
    Ok(found.into_iter().map(Jinja::from).collect())
}

fn reversed<'a>(parts: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut parts: Vec<&str> = parts.collect();
    parts.reverse();
    parts
}

/// Splits at white space; the last part found contains the rest of the text.
fn split_at_space(text: &str, parts: usize, from_right: bool) -> Vec<&str> {
    let (mut rest, mut found) = (text, Vec::new());
    loop {
        rest = if from_right { rest.trim_end_matches(is_space) } else { rest.trim_start_matches(is_space) };
        let at = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        match at.filter(|_| found.len() + 1 < parts) {
            Some(at) => {
                let after = at + rest[at..].chars().next().map_or(0, char::len_utf8);
                let (before, after) = (&rest[..at], &rest[after..]);
                let (word, left) = if from_right { (after, before) } else { (before, after) };
                found.push(word);
                rest = left;
            }
            None => {
                found.extend(Some(rest).filter(|rest| !rest.is_empty()));
                break;
            }
        }
    }
    if from_right {
        found.reverse();
    }
    found
}

fn split_lines(text: &str, args: &[Jinja]) -> Result<Jinja, Error> {
    let (keep, named): (Option<bool>, Kwargs) = from_args(args)?;
    let keep = keep.map_or_else(|| named.get::<Option<bool>>("keepends"), |keep| Ok(Some(keep)))?;
    named.assert_all_used()?;
    let ends = ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(ends) {
        let end = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(Jinja::from(&rest[..if keep == Some(true) { at + end } else { at }]));
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        lines.push(Jinja::from(rest));
    }
    Ok(lines.into_iter().collect())
}

fn partition(text: &str, from_right: bool, args: &[Jinja]) -> Result<Jinja, Error> {
    let (sep,): (&str,) = from_args(args)?;
    let found = if from_right { text.rsplit_once(sep) } else { text.split_once(sep) };
    let parts = match found {
        Some((before, after)) => [before, sep, after],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Tuple::from(parts.map(Jinja::from)).into())
}

fn pad(text: &str, name: &str, args: &[Jinja]) -> Result<Jinja, Error> {
    let (width, fill): (usize, Option<&str>) = from_args(args)?;
    let missing = width.saturating_sub(text.chars().count());
    let fill = |count: usize| fill.unwrap_or(if name == "zfill" { "0" } else { " " }).repeat(count);
    Ok(Jinja::from(match name {
        "ljust" => format!("{text}{}", fill(missing)),
        "rjust" => format!("{}{text}", fill(missing)),
        "center" => {
            // Python puts the extra space on the left if the width is odd.
            let left = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", fill(left), fill(missing - left))
        }
        _ => {
            let digits = text.trim_start_matches(['-', '+']);
            format!("{}{}{digits}", &text[..text.len() - digits.len()], fill(missing))
        }
    }))
}

fn swap_case(text: &str) -> String {
    let swap = |c: char| -> String {
        if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
    };
    text.chars().map(swap).collect()
}

/// The function that templates call to reject a conversation.
pub(super) fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}
