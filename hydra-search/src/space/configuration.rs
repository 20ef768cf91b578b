//! A configuration: the settings of a trial.

use super::value::identity_of;
use super::{TrialsError, Value};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The settings of a trial, by name. Settings that it does not name have the caller's values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Configuration(BTreeMap<String, Value>);

impl Configuration {
    /// No settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces a setting.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.set(name, value.into());
        self
    }

    /// The setting with this name.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// The settings in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// The configuration as text; two configurations have the same text exactly if they have the same settings.
    pub fn identity(&self) -> String {
        identity_of(&self.0)
    }

    /// The settings that `other` does not have, or has with another value.
    pub fn changes_from(&self, other: &Self) -> Self {
        let same = |name: &str, value: &Value| {
            other.get(name).is_some_and(|before| before.identity() == value.identity())
        };
        let changed = self.0.iter().filter(|(name, value)| !same(name, value));
        Self(changed.map(|(name, value)| (name.clone(), value.clone())).collect())
    }

    pub(crate) fn set(&mut self, name: &str, value: Value) {
        self.0.insert(name.to_owned(), value);
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    fn checked(self, trial: usize) -> Result<Self, TrialsError> {
        let bad = self.0.iter().find_map(|(name, value)| Some((name.clone(), value.not_finite()?)));
        match bad {
            Some((name, found)) => Err(TrialsError::NotFinite { trial, name, found }),
            None => Ok(self),
        }
    }
}

impl fmt::Display for Configuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings: Vec<String> = self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&settings.join(" "))
    }
}

/// The trials of a TOML file: tables named `trial`, each with the settings of one.
///
/// # Errors
/// [`TrialsError`], with the position.
pub fn trials_from_toml(text: &str) -> Result<Vec<Configuration>, TrialsError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        trial: Vec<Configuration>,
    }
    let file: File = toml::from_str(text)?;
    check_all(file.trial)
}

/// The trials of a file with one JSON object per line; empty lines are skipped.
///
/// # Errors
/// [`TrialsError`], with the line.
pub fn trials_from_jsonl(text: &str) -> Result<Vec<Configuration>, TrialsError> {
    let lines = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
    let read = |(text, line)| serde_json::from_str(text).map_err(|source| TrialsError::Json { line, source });
    check_all(lines.map(read).collect::<Result<_, _>>()?)
}

/// Refuses trials with settings that are not finite.
pub(crate) fn check_all(trials: Vec<Configuration>) -> Result<Vec<Configuration>, TrialsError> {
    trials.into_iter().zip(1..).map(|(trial, number)| trial.checked(number)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_are_read_from_both_files() {
        let toml = "[[trial]]\nlr = 1e-3\nbatch = 8\n[[trial]]\nlora = { rank = 4 }\n";
        let jsonl = "{\"batch\": 8, \"lr\": 1e-3}\n\n{\"lora\": {\"rank\": 4}}\n";
        let trials = trials_from_toml(toml).unwrap();
        assert_eq!(trials, trials_from_jsonl(jsonl).unwrap());
        assert_eq!(trials[0].to_string(), "batch=8 lr=1e-3");
        assert_eq!(trials[1].identity(), "{\"lora\":{\"rank\":4}}");
    }

    #[test]
    fn errors_say_where() {
        let says = |error: TrialsError| error.to_string();
        let jsonl = says(trials_from_jsonl("{\"lr\": 1}\n\n[1]\n").unwrap_err());
        assert!(jsonl.starts_with("line 3 of the trials is not an object of settings"), "{jsonl}");
        let infinite = says(trials_from_toml("[[trial]]\nlr = 1\n[[trial]]\nlr = inf").unwrap_err());
        assert!(infinite.starts_with("trial 2 has `lr` = inf"), "{infinite}");
        assert!(says(trials_from_toml("[[trials]]\nlr = 1").unwrap_err()).contains("trials"));
    }

    #[test]
    fn changes_are_what_differs() {
        let parent = Configuration::new().with("lr", 0.1).with("batch", 8);
        let child = parent.clone().with("lr", 0.2).with("batch", 8.0);
        assert_eq!(child.changes_from(&parent), Configuration::new().with("lr", 0.2));
    }
}
