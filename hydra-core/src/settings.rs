//! Settings by name: what a file says of an optimizer or of a schedule.

use crate::CoreError;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;

/// One setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Setting {
    /// Something on or off.
    Flag(bool),
    /// A number of steps or the like.
    Count(u64),
    /// A finite number.
    Number(f64),
    /// A word.
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

/// All settings of an optimizer or a schedule, written in their order; that order makes no difference otherwise.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(from = "BTreeMap<String, Setting>")]
pub struct Settings(Vec<(String, Setting)>);

impl Settings {
    /// No settings yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// These settings and one more.
    #[must_use]
    pub fn with(mut self, name: &str, setting: impl Into<Setting>) -> Self {
        self.0.push((name.to_owned(), setting.into()));
        self
    }

    /// The setting of this name.
    pub fn get(&self, name: &str) -> Option<&Setting> {
        self.0.iter().find(|(of, _)| of == name).map(|(_, setting)| setting)
    }

    /// The number of this name.
    ///
    /// # Errors
    /// [`CoreError::Spec`] if there is none.
    pub fn number(&self, name: &'static str) -> Result<f64, CoreError> {
        match self.get(name) {
            Some(Setting::Number(number)) => Ok(*number),
            Some(Setting::Count(count)) => Ok(*count as f64),
            other => Err(unexpected(name, other, "a number")),
        }
    }

    /// The count of this name.
    ///
    /// # Errors
    /// [`CoreError::Spec`] if there is none.
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
