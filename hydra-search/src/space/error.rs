//! Errors of spaces, of flags that describe parameters, and of files of trials.

use thiserror::Error;

/// The reason why a space is invalid.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum SpaceError {
    /// A range is empty, or its ends are not finite.
    #[error("`{name}` goes from {low} to {high}: give two finite numbers, the lower one first")]
    Ends { name: String, low: f64, high: f64 },
    /// A logarithmic range reaches zero.
    #[error("`{name}` is logarithmic and starts at {low}: give a lower end above zero")]
    Logarithm { name: String, low: f64 },
    /// A choice has no values.
    #[error("`{name}` has no values: give at least one")]
    Empty { name: String },
    /// A value is not finite.
    #[error("`{name}` has the value {found}: give finite numbers")]
    NotFinite { name: String, found: f64 },
    /// The description of a parameter is not a known form.
    #[error(
        "`{name}` is {found}: give a list of values, a text such as \"log:1e-5..1e-2\", or a table with one of \
         `choice`, `uniform`, `log` and `int`, and `when` if it has conditions"
    )]
    Description { name: String, found: String },
    /// A text that describes a parameter is invalid.
    #[error("`{name}`: {source}")]
    Shorthand { name: String, source: ShorthandError },
    /// A condition names no other parameter.
    #[error("`{name}` has a condition on `{of}`, which is not another parameter: {suggestion}")]
    Condition { name: String, of: String, suggestion: String },
    /// A condition can never hold.
    #[error("`{name}` has the condition that `{of}` is {value}, which never holds: its values are {values}")]
    Never { name: String, of: String, value: String, values: String },
    /// Conditions are cyclic.
    #[error("`{name}` depends on itself through the conditions of the space: remove one of them")]
    Circle { name: String },
    /// A grid requires lists.
    #[error("a grid tries every value, and `{name}` is a range: give it a list, or search at random")]
    Endless { name: String },
    /// A grid is too large.
    #[error("the grid has more than {most} configurations: give shorter lists, or search at random")]
    Large { most: usize },
}

/// The reason why a flag does not describe a parameter.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum ShorthandError {
    /// A value is empty.
    #[error("`{found}` has an empty value: give values separated by commas, such as 1e-4,3e-4")]
    Empty { found: String },
    /// The kind of range is unknown.
    #[error(
        "`{found}` is not a kind of range: give log:LOW..HIGH, uniform:LOW..HIGH, int:LOW..HIGH, choice:A,B or \
         values separated by commas"
    )]
    Kind { found: String },
    /// The range does not have two ends.
    #[error("`{found}` does not have two ends: give {kind}:LOW..HIGH, such as {example}")]
    Ends { found: String, kind: &'static str, example: &'static str },
    /// An end is not a number of the required kind.
    #[error("`{found}` is not {expected}: give {kind}:LOW..HIGH, such as {example}")]
    Number { found: String, expected: &'static str, kind: &'static str, example: &'static str },
    /// The ends are in the wrong order, or invalid for the kind of range.
    #[error("`{found}` is an empty range: give the lower end first, above zero if it is logarithmic")]
    Nothing { found: String },
}

/// The reason why a file of trials cannot be read.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum TrialsError {
    /// It is not TOML with tables named `trial`.
    #[error("the trials are not TOML with a table [[trial]] for each: {0}")]
    Toml(#[from] toml::de::Error),
    /// A line is not a JSON object.
    #[error("line {line} of the trials is not an object of settings: {source}")]
    Json { line: usize, source: serde_json::Error },
    /// A setting is not finite.
    #[error("trial {trial} has `{name}` = {found}: give a finite number")]
    NotFinite { trial: usize, name: String, found: f64 },
}
