//! Matches modules with PEFT's rules for names and regular expressions.

use crate::ModelError;
use crate::family::supported::refuse;
use fancy_regex::Regex;

/// Modules by their names, or by a regular expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Modules {
    /// Name ends, in whole components: `q_proj` matches the one of every block.
    Names(Vec<String>),
    /// A Python regular expression for the whole name.
    Pattern(String),
}

/// The target modules of adapters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Targets {
    /// The default of the model family.
    #[default]
    Family,
    /// Name ends, in whole components: `q_proj` matches the one of every block.
    Names(Vec<String>),
    /// A Python regular expression for the whole name.
    Pattern(String),
    /// Every linear module except the head of a language model.
    AllLinear,
}

impl From<Vec<String>> for Targets {
    fn from(names: Vec<String>) -> Self {
        Self::Names(names)
    }
}

/// The blocks whose modules are adapted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layers {
    /// Block indices.
    pub indices: Vec<usize>,
    /// Regular expressions for the part of the name before the index; empty matches any.
    pub patterns: Vec<String>,
}

/// Compiles a Python regular expression; `{}` in `form` is replaced with the configured pattern.
pub(super) fn regex(field: &'static str, form: &str, pattern: &str) -> Result<Regex, ModelError> {
    // Python's end of text.
    let whole = form.replace("{}", pattern).replace(r"\Z", r"\z");
    Regex::new(&whole).map_err(|error| {
        refuse(field, format!("`{pattern}`"), format!("a regular expression ({error}), or a list of names"))
    })
}

/// Returns whether a regular expression matches; false if matching exceeds the time limit.
pub(super) fn matches(regex: &Regex, text: &str) -> bool {
    regex.is_match(text).unwrap_or(false)
}

/// Returns whether a name ends with `end`, in whole components.
pub(super) fn ends_with(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Compiled [`Modules`].
pub(super) enum Matcher {
    Names(Vec<String>),
    Pattern(Regex),
}

impl Matcher {
    pub fn new(field: &'static str, modules: &Modules) -> Result<Self, ModelError> {
        Ok(match modules {
            Modules::Names(names) => Self::Names(names.clone()),
            Modules::Pattern(pattern) => Self::Pattern(regex(field, r"\A(?:{})\z", pattern)?),
        })
    }

    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::Names(names) => names.iter().any(|end| ends_with(name, end)),
            Self::Pattern(regex) => matches(regex, name),
        }
    }
}

/// Compiled [`Layers`].
pub(super) struct LayerMatcher {
    indices: Vec<usize>,
    patterns: Vec<Regex>,
}

impl LayerMatcher {
    pub fn new(layers: &Layers) -> Result<Self, ModelError> {
        let (any, named) = (r"\A.*?\.[^.]*\.(?P<idx>\d+)\.", r"\A(?:^|.*?\.){}\.(?P<idx>\d+)\.");
        let named = layers.patterns.iter().map(|pattern| regex("layers_pattern", named, pattern));
        let patterns: Result<Vec<Regex>, ModelError> = if layers.patterns.is_empty() {
            regex("layers_pattern", any, "").map(|any| vec![any])
        } else {
            named.collect()
        };
        Ok(Self { indices: layers.indices.clone(), patterns: patterns? })
    }

    /// Returns whether a module is in one of the layers.
    pub fn has(&self, name: &str) -> bool {
        let found = self.patterns.iter().find_map(|regex| regex.captures(name).ok().flatten());
        let index = found.and_then(|found| found.name("idx")?.as_str().parse().ok());
        index.is_some_and(|index: usize| self.indices.contains(&index))
    }
}

/// Values by regular expression; the first match applies.
pub(super) struct Patterns<T> {
    patterns: Vec<(String, Regex, T)>,
}

impl<T: Copy> Patterns<T> {
    pub fn new(field: &'static str, patterns: &[(String, T)]) -> Result<Self, ModelError> {
        let one =
            |(key, value): &(String, T)| Ok((key.clone(), regex(field, r"\A(?:(.*\.)?({})$)", key)?, *value));
        Ok(Self { patterns: patterns.iter().map(one).collect::<Result<_, ModelError>>()? })
    }

    /// The value of a module, if an expression matches it.
    pub fn get(&self, name: &str) -> Option<T> {
        self.patterns.iter().find(|(_, regex, _)| matches(regex, name)).map(|(.., value)| *value)
    }

    /// The keys that match none of these modules.
    pub fn unused<'a>(&'a self, maps: &'a [&str]) -> impl Iterator<Item = &'a str> {
        let unused = |regex: &Regex| !maps.iter().any(|map| matches(regex, map));
        self.patterns.iter().filter(move |(_, regex, _)| unused(regex)).map(|(key, ..)| key.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: [&str; 3] =
        ["transformer.h.0.attn.c_attn", "transformer.h.10.attn.c_proj", "transformer.h.1.mlp.c_proj"];

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn found(modules: &Modules) -> [bool; 3] {
        let matcher = Matcher::new("target_modules", modules).unwrap();
        MAPS.map(|map| matcher.has(map))
    }

    #[test]
    fn a_name_is_the_end_of_a_modules_name() {
        let found = |ends: &[&str]| found(&Modules::Names(names(ends)));
        assert_eq!(found(&["c_attn"]), [true, false, false]);
        assert_eq!(found(&["c_proj"]), [false, true, true]);
        assert_eq!(found(&["mlp.c_proj"]), [false, false, true]);
        assert_eq!(found(&["proj", "attn"]), [false; 3], "whole parts");
        assert_eq!(found(&["transformer.h.0.attn.c_attn"]), [true, false, false]);
    }

    #[test]
    fn a_regular_expression_matches_the_whole_name() {
        let found = |pattern: &str| found(&Modules::Pattern(pattern.to_owned()));
        assert_eq!(found(r".*\.c_(attn|proj)"), [true; 3]);
        assert_eq!(found(r"c_attn|.*mlp.*"), [false, false, true]);
        assert_eq!(found(r".*(?<!mlp\.)c_proj\Z"), [false, true, false], "lookbehind, and Python's end");
        let unclosed = Matcher::new("target_modules", &Modules::Pattern("(".to_owned()));
        let said = unclosed.err().unwrap().to_string();
        assert!(said.contains("target_modules") && said.contains('('), "{said}");
    }

    #[test]
    fn a_layer_is_the_first_number_of_a_name() {
        let found = |indices: &[usize], patterns: &[&str]| {
            let layers = Layers { indices: indices.to_vec(), patterns: names(patterns) };
            let matcher = LayerMatcher::new(&layers).unwrap();
            MAPS.map(|map| matcher.has(map))
        };
        assert_eq!(found(&[0, 10], &[]), [true, true, false]);
        assert_eq!(found(&[1], &["h"]), [false, false, true]);
        assert_eq!(found(&[1], &["layers"]), [false; 3]);
    }

    #[test]
    fn the_first_pattern_that_matches_counts() {
        let patterns = [("mlp.c_proj".to_owned(), 2), ("c_proj".to_owned(), 3), ("k_proj".to_owned(), 4)];
        let patterns = Patterns::new("rank_pattern", &patterns).unwrap();
        assert_eq!(MAPS.map(|map| patterns.get(map)), [None, Some(3), Some(2)]);
        assert_eq!(patterns.unused(&MAPS).collect::<Vec<_>>(), ["k_proj"]);
        let whole = Patterns::new("rank_pattern", &[(r"^transformer.*\.0\..*".to_owned(), 5)]).unwrap();
        assert_eq!(MAPS.map(|map| whole.get(map)), [Some(5), None, None]);
    }
}
