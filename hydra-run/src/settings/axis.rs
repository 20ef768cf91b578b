//! The settings in which the tasks of a run may differ, and lists of their values.
//! It reads values through the groups of flags, and opens no files.

use super::{AdapterSettings, ModelSettings, TrainingSettings, flags, values};
use clap::Args;
use serde::Serialize;
use std::str::FromStr;
use toml::{Table, Value};

/// The group of flags that a setting belongs to. Tasks that differ in training alone share one chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    Adapters,
    Model,
    Training,
}

/// Where the list of a setting's values is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum List {
    /// In its own flag, separated by commas.
    Flag,
    /// In the grid, separated by commas.
    Grid,
    /// In the grid, separated by semicolons: each value is itself a list with commas.
    GridOfLists,
}

/// Whether a search may sample a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sampling {
    Never,
    Free,
    /// It changes a task's memory, which is measured when a run starts.
    Measured,
}

/// A setting in which the tasks of a run may differ.
#[derive(Debug)]
pub struct Setting {
    /// Its name in files; in flags with `-` for `_`.
    name: &'static str,
    /// Its abbreviation in names of tasks.
    pub(crate) short: &'static str,
    group: Group,
    list: List,
    pub(super) sampling: Sampling,
}

const fn setting(
    name: &'static str,
    short: &'static str,
    group: Group,
    list: List,
    sampling: Sampling,
) -> Setting {
    Setting { name, short, group, list, sampling }
}

/// The settings in which tasks may differ, in the order of their names.
#[rustfmt::skip]
static SETTINGS: [Setting; 21] = [
    setting("accumulate", "acc", Group::Training, List::Grid, Sampling::Never),
    setting("batch", "b", Group::Training, List::Flag, Sampling::Measured),
    setting("beta", "beta", Group::Model, List::Grid, Sampling::Never),
    setting("clip", "clip", Group::Training, List::Grid, Sampling::Measured),
    setting("decay_steps", "decay", Group::Training, List::Grid, Sampling::Free),
    setting("decay_to", "to", Group::Training, List::Grid, Sampling::Free),
    setting("dropout", "drop", Group::Model, List::Grid, Sampling::Never),
    setting("epochs", "ep", Group::Training, List::Grid, Sampling::Never),
    setting("gamma", "gamma", Group::Model, List::Grid, Sampling::Never),
    setting("lora", "r", Group::Adapters, List::Flag, Sampling::Measured),
    setting("lora_alpha", "alpha", Group::Adapters, List::Grid, Sampling::Never),
    setting("lora_dropout", "ldrop", Group::Adapters, List::Grid, Sampling::Never),
    setting("lora_targets", "on-", Group::Adapters, List::GridOfLists, Sampling::Never),
    setting("lr", "lr", Group::Training, List::Flag, Sampling::Free),
    setting("no_decay_norms", "no-decay-norms", Group::Training, List::Grid, Sampling::Free),
    setting("optimizer", "", Group::Training, List::Grid, Sampling::Measured),
    setting("schedule", "", Group::Training, List::Grid, Sampling::Free),
    setting("seed", "seed", Group::Model, List::Grid, Sampling::Free),
    setting("steps", "steps", Group::Training, List::Grid, Sampling::Never),
    setting("warmup", "warmup", Group::Training, List::Grid, Sampling::Free),
    setting("weight_decay", "wd", Group::Training, List::Grid, Sampling::Free),
];

impl Setting {
    /// The setting of this name, if tasks of a run may differ in it.
    pub fn named(name: &str) -> Option<&'static Self> {
        SETTINGS.iter().find(|setting| setting.name == name)
    }

    /// The names of the settings for which `is_it` returns true.
    pub(super) fn names(is_it: impl Fn(&Self) -> bool) -> Vec<&'static str> {
        SETTINGS.iter().filter(|setting| is_it(setting)).map(|setting| setting.name).collect()
    }

    /// The group of a setting; settings that no list has belong to training.
    pub(crate) fn group_of(name: &str) -> Group {
        Self::named(name).map_or(Group::Training, |setting| setting.group)
    }

    /// The name of the flag that takes a list of its values.
    pub fn list_flag(&self) -> &'static str {
        if self.list == List::Flag { self.name } else { "grid" }
    }

    /// The separator of its values in a list.
    pub fn separator(&self) -> char {
        if self.list == List::GridOfLists { ';' } else { ',' }
    }

    /// Reads a value, as it is in files.
    fn value(&self, text: &str) -> Result<Value, String> {
        if let ("no_decay_norms", Ok(value)) = (self.name, text.parse()) {
            return Ok(Value::Boolean(value));
        }
        let texts = flags::Texts::from([(self.name.to_owned(), text.to_owned())]);
        let (settings, _) = flags::read::<Settings>(&texts).map_err(|error| error.to_string())?;
        let mut table = Table::try_from(&settings).map_err(|error| error.to_string())?;
        table.remove(self.name).ok_or_else(|| format!("{}: `{text}` is not a value", self.name))
    }
}

/// The groups of flags that read values.
#[derive(Debug, Args, Serialize)]
struct Settings {
    #[command(flatten)]
    #[serde(flatten)]
    model: ModelSettings,
    #[command(flatten)]
    #[serde(flatten)]
    training: TrainingSettings,
    #[command(flatten)]
    #[serde(flatten)]
    adapters: AdapterSettings,
}

/// A setting and a list of its values: one way in which the tasks of a run differ.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    pub(super) name: String,
    pub(super) values: Vec<Value>,
}

impl Axis {
    pub(super) fn new<T: Into<Value>>(name: &str, values: impl IntoIterator<Item = T>) -> Self {
        Self { name: name.to_owned(), values: values.into_iter().map(Into::into).collect() }
    }
}

/// Reads `NAME=VALUE,..`.
impl FromStr for Axis {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, list) = text.split_once('=').ok_or("expected NAME=VALUE,.. such as weight_decay=0,0.1")?;
        let name = name.trim().replace('-', "_");
        let setting =
            Setting::named(&name).filter(|setting| setting.list != List::Flag).ok_or_else(|| {
                let own = Setting::names(|setting| setting.list == List::Flag).join(", ");
                let others = values::any_of(&Setting::names(|setting| setting.list != List::Flag));
                format!("`{name}` cannot have a list of values: lists are for {own}, {others}")
            })?;
        let values = list.split(setting.separator()).map(|text| setting.value(text.trim()));
        let values = values.collect::<Result<Vec<_>, _>>()?;
        match repeated(&values) {
            Some(value) => Err(format!("{name} = {value} is given twice; give each value once")),
            None => Ok(Self { name, values }),
        }
    }
}

/// The first element of a list that equals an earlier one.
pub(super) fn repeated<T: PartialEq>(list: &[T]) -> Option<&T> {
    list.iter().enumerate().find(|(at, one)| list[..*at].contains(one)).map(|(_, one)| one)
}
