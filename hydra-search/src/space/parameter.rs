//! A parameter: a range, and the conditions under which it is searched.

use super::{Range, SpaceError, Value, parse_parameter};
use std::collections::BTreeMap;

/// A searched setting: its possible values, and the conditions under which a trial has it.
///
/// In a file it is a list of values, a text as on the command line ([`parse_parameter`]), or a table:
///
/// ```
/// let space: hydra_search::Space = toml::from_str(r#"
///     batch = [8, 16]
///     lr = "log:1e-5..1e-2"
///     optimizer = { choice = ["adamw", "sgd"] }
///     momentum = { uniform = [0.0, 0.99], when = { optimizer = "sgd" } }
/// "#)?;
/// assert_eq!(space.names().collect::<Vec<_>>(), ["batch", "lr", "momentum", "optimizer"]);
/// # Ok::<(), toml::de::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its possible values.
    pub range: Range,
    /// The values of other parameters at which this one is searched; all conditions must hold. A condition on a
    /// parameter that a trial does not have does not hold.
    pub when: BTreeMap<String, Vec<Value>>,
}

impl From<Range> for Parameter {
    fn from(range: Range) -> Self {
        Self { range, when: BTreeMap::new() }
    }
}

impl Parameter {
    /// Parses the description of a parameter in a file.
    pub(super) fn read(name: &str, described: Value) -> Result<Self, SpaceError> {
        match described {
            Value::List(values) => Ok(Range::Choice(values).into()),
            Value::Text(text) => parse_parameter(&text)
                .map_err(|source| SpaceError::Shorthand { name: name.to_owned(), source }),
            Value::Table(table) => Self::read_table(name, table),
            value => Ok(Range::Choice(vec![value]).into()),
        }
    }

    fn read_table(name: &str, mut table: BTreeMap<String, Value>) -> Result<Self, SpaceError> {
        let found = Value::Table(table.clone()).identity();
        let wrong = || SpaceError::Description { name: name.to_owned(), found: found.clone() };
        let when = match table.remove("when") {
            None => BTreeMap::new(),
            Some(Value::Table(when)) => when.into_iter().map(|(of, values)| (of, several(values))).collect(),
            Some(_) => return Err(wrong()),
        };
        let (kind, described) = table.pop_first().ok_or_else(wrong)?;
        let range = match (kind.as_str(), described) {
            _ if !table.is_empty() => None,
            ("choice", Value::List(values)) => Some(Range::Choice(values)),
            ("uniform", ends) => ends_of(&ends).map(|(low, high)| Range::Uniform { low, high }),
            ("log", ends) => ends_of(&ends).map(|(low, high)| Range::Log { low, high }),
            ("int", Value::List(ends)) => match ends[..] {
                [Value::Whole(low), Value::Whole(high)] => Some(Range::Int { low, high }),
                _ => None,
            },
            _ => None,
        };
        Ok(Self { range: range.ok_or_else(wrong)?, when })
    }

    /// The description of the parameter for a file.
    pub(super) fn write(self) -> Value {
        let pair = |low: f64, high: f64| Value::List(vec![low.into(), high.into()]);
        let (kind, described) = match self.range {
            Range::Choice(values) if self.when.is_empty() => return Value::List(values),
            Range::Choice(values) => ("choice", Value::List(values)),
            Range::Uniform { low, high } => ("uniform", pair(low, high)),
            Range::Log { low, high } => ("log", pair(low, high)),
            Range::Int { low, high } => ("int", Value::List(vec![low.into(), high.into()])),
        };
        let mut table = BTreeMap::from([(kind.to_owned(), described)]);
        if !self.when.is_empty() {
            let when = self.when.into_iter().map(|(of, values)| (of, Value::List(values)));
            table.insert("when".to_owned(), Value::Table(when.collect()));
        }
        Value::Table(table)
    }
}

fn several(values: Value) -> Vec<Value> {
    match values {
        Value::List(values) => values,
        value => vec![value],
    }
}

fn ends_of(ends: &Value) -> Option<(f64, f64)> {
    match ends {
        Value::List(ends) => match &ends[..] {
            [low, high] => Some((low.number()?, high.number()?)),
            _ => None,
        },
        _ => None,
    }
}
