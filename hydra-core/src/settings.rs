//! Named settings of optimizers and schedules.

use crate::CoreError;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;

/// One setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Setting {
    /// A switch.
    Flag(bool),
    /// A count, such as a number of steps.
    Count(u64),
    /// A finite number.
    Number(f64),
    /// A text.
    Text(String),
}

macro_rules! setting_from {
    ($($from:ty: $setting:expr),*) => {$(
        impl From<$from> for Setting {
            fn from(value: $from) -> Self {
                $setting(value)
            }
        }
    )*};
}

setting_from!(bool: Self::Flag, f64: Self::Number);
setting_from!(usize: |count| Self::Count(count as u64), &str: |text: &str| Self::Text(text.to_owned()));

/// All settings of an optimizer or a schedule. They are written in insertion order, which does not affect
/// equality.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(from = "BTreeMap<String, Setting>")]
pub struct Settings(Vec<(String, Setting)>);

impl Settings {
    /// Returns an empty collection.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a setting.
    #[must_use]
    pub fn with(mut self, name: &str, setting: impl Into<Setting>) -> Self {
        self.0.push((name.to_owned(), setting.into()));
        self
    }

    /// Returns the setting with this name.
    pub fn get(&self, name: &str) -> Option<&Setting> {
        self.0.iter().find(|(of, _)| of == name).map(|(_, setting)| setting)
    }

    /// Returns the number with this name.
    ///
    /// # Errors
    /// [`CoreError::Spec`] if there is no such number.
    pub fn number(&self, name: &'static str) -> Result<f64, CoreError> {
        match self.get(name) {
            Some(Setting::Number(number)) => Ok(*number),
            Some(Setting::Count(count)) => Ok(*count as f64),
            other => Err(unexpected(name, other, "a number")),
        }
    }

    /// Returns the count with this name.
    ///
    /// # Errors
    /// [`CoreError::Spec`] if there is no such count.
    pub fn count(&self, name: &'static str) -> Result<usize, CoreError> {
        let count = match self.get(name) {
            Some(Setting::Count(count)) => usize::try_from(*count).ok(),
            _ => None,
        };
        count.ok_or_else(|| unexpected(name, self.get(name), "a whole number"))
    }
}

fn unexpected(name: &'static str, found: Option<&Setting>, expected: &'static str) -> CoreError {
    let found = found.map_or_else(|| "missing".to_owned(), |setting| format!("{setting:?}"));
    CoreError::Spec { name, found, expected }
}

impl PartialEq for Settings {
    fn eq(&self, other: &Self) -> bool {
        self.0.len() == other.0.len() && self.0.iter().all(|(name, value)| other.get(name) == Some(value))
    }
}

impl From<BTreeMap<String, Setting>> for Settings {
    fn from(settings: BTreeMap<String, Setting>) -> Self {
        Self(settings.into_iter().collect())
    }
}

impl Serialize for Settings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, setting)| (name, setting)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_survive_their_text_and_have_their_types() {
        let settings = Settings::new().with("z", 1.0).with("n", 3_usize).with("on", true).with("by", "row");
        let text = toml::to_string(&settings).unwrap();
        assert_eq!(text, "z = 1.0\nn = 3\non = true\nby = \"row\"\n");
        assert_eq!(toml::from_str::<Settings>(&text).unwrap(), settings);
        assert_eq!((settings.number("z").unwrap(), settings.number("n").unwrap()), (1.0, 3.0));
        assert_eq!(settings.count("n").unwrap(), 3);
        assert!(settings.count("z").is_err() && settings.number("on").is_err());
        let missing = settings.number("beta").unwrap_err().to_string();
        assert_eq!(missing, "`beta` is missing, expected a number");
        assert_ne!(settings, Settings::new().with("z", 1.0));
    }
}
