//! Parameters in flag syntax.

use super::{Parameter, Range, ShorthandError, Value};

const LOG: &str = "log:1e-5..1e-2";
const UNIFORM: &str = "uniform:0..0.3";
const INT: &str = "int:1..8";

/// Parses a parameter from flag syntax: `log:1e-5..1e-2`, `uniform:0..0.3`, `int:1..8`, `choice:8,16`, or values
/// separated by commas, such as `1e-4,3e-4`. A single value is a list of one.
///
/// ```
/// use hydra_search::{Range, parse_parameter};
///
/// assert_eq!(parse_parameter("log:1e-5..1e-2")?.range, Range::Log { low: 1e-5, high: 1e-2 });
/// assert_eq!(parse_parameter("choice:8,16")?, parse_parameter("8,16")?);
/// let error = parse_parameter("lgo:1e-5..1e-2").unwrap_err().to_string();
/// assert!(error.starts_with("`lgo` is not a kind of range: give log:LOW..HIGH"));
/// # Ok::<(), hydra_search::ShorthandError>(())
/// ```
///
/// # Errors
/// [`ShorthandError`], with the problem and an example.
pub fn parse_parameter(text: &str) -> Result<Parameter, ShorthandError> {
    let range = match text.split_once(':') {
        Some(("log", ends)) => {
            let (low, high) = numbers(ends, "log", LOG)?;
            Range::Log { low, high }
        }
        Some(("uniform", ends)) => {
            let (low, high) = numbers(ends, "uniform", UNIFORM)?;
            Range::Uniform { low, high }
        }
        Some(("int", ends)) => {
            let (low, high) = split(ends, "int", INT)?;
            Range::Int { low: whole(low)?, high: whole(high)? }
        }
        Some(("choice", values)) => choice(values)?,
        // A word with a colon may be a value, such as a model's name; one before two ends is a typing error.
        Some((kind, ends)) if ends.contains("..") => {
            return Err(ShorthandError::Kind { found: kind.to_owned() });
        }
        _ => choice(text)?,
    };
    range.check("").map_err(|_| ShorthandError::Nothing { found: text.to_owned() })?;
    Ok(range.into())
}

fn choice(text: &str) -> Result<Range, ShorthandError> {
    let values = text.split(',').map(str::trim);
    let read = |value: &str| match value.is_empty() {
        true => Err(ShorthandError::Empty { found: text.to_owned() }),
        false => Ok(Value::of_text(value)),
    };
    values.map(read).collect::<Result<_, _>>().map(Range::Choice)
}

fn split<'a>(
    ends: &'a str,
    kind: &'static str,
    example: &'static str,
) -> Result<(&'a str, &'a str), ShorthandError> {
    let split = ends.split_once("..").map(|(low, high)| (low.trim(), high.trim()));
    split.ok_or_else(|| ShorthandError::Ends { found: ends.to_owned(), kind, example })
}

fn numbers(ends: &str, kind: &'static str, example: &'static str) -> Result<(f64, f64), ShorthandError> {
    let (low, high) = split(ends, kind, example)?;
    let read = |text: &str| {
        let number = text.parse().ok().filter(|number: &f64| number.is_finite());
        let (found, expected) = (text.to_owned(), "a finite number");
        number.ok_or(ShorthandError::Number { found, expected, kind, example })
    };
    Ok((read(low)?, read(high)?))
}

fn whole(text: &str) -> Result<i64, ShorthandError> {
    let (found, expected) = (text.to_owned(), "an integer");
    text.parse().map_err(|_| ShorthandError::Number { found, expected, kind: "int", example: INT })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> Range {
        parse_parameter(text).unwrap().range
    }

    #[test]
    fn every_kind_is_read() {
        assert_eq!(range("uniform:0..0.3"), Range::Uniform { low: 0.0, high: 0.3 });
        assert_eq!(range("uniform:-1..1"), Range::Uniform { low: -1.0, high: 1.0 });
        assert_eq!(range("int:1..8"), Range::Int { low: 1, high: 8 });
        assert_eq!(range("1e-4,3e-4"), Range::Choice(vec![1e-4.into(), 3e-4.into()]));
        assert_eq!(range("choice: a , b"), Range::Choice(vec!["a".into(), "b".into()]));
        assert_eq!(range("hub:gpt2"), Range::Choice(vec!["hub:gpt2".into()]));
        assert_eq!(range("../model"), Range::Choice(vec!["../model".into()]));
    }

    #[test]
    fn errors_say_what_was_found_and_what_to_give() {
        for (text, says) in [
            ("", "`` has an empty value"),
            ("1,,2", "`1,,2` has an empty value"),
            ("choice:", "`` has an empty value"),
            ("log:1e-5", "`1e-5` does not have two ends: give log:LOW..HIGH, such as log:1e-5..1e-2"),
            ("log:a..1", "`a` is not a finite number: give log:LOW..HIGH"),
            ("log:0..1", "`log:0..1` is an empty range"),
            ("uniform:1..nan", "`nan` is not a finite number: give uniform:LOW..HIGH"),
            ("uniform:2..1", "`uniform:2..1` is an empty range"),
            ("int:1..2.5", "`2.5` is not an integer: give int:LOW..HIGH, such as int:1..8"),
            ("normal:0..1", "`normal` is not a kind of range"),
        ] {
            let error = parse_parameter(text).unwrap_err().to_string();
            assert!(error.starts_with(says), "{text}: {error}");
        }
    }
}
