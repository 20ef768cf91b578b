//! The settings in which the tasks of a run may differ, and lists of their values.
//! It reads values through the groups of flags, and opens no files.

use super::{AdapterSettings, ModelSettings, TrainingSettings, flags, values};
use clap::Args;
use serde::Serialize;
use std::str::FromStr;
use toml::{Table, Value};

/// The group of flags that a setting belongs to. Tasks that differ in training alone share one chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SettingGroup {
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
    group: SettingGroup,
    list: List,
    pub(super) sampling: Sampling,
}

/// Defines the settings, each by its name, its abbreviation, its group, the place of its list, and whether a search samples it.
macro_rules! settings {
    ($($name:ident, $short:literal, $group:ident, $list:ident, $sampling:ident;)*) => {
        /// The settings in which tasks may differ, in the order of their names.
        static SETTINGS: &[Setting] = &[$(Setting {
            name: stringify!($name), short: $short, group: SettingGroup::$group, list: List::$list, sampling: Sampling::$sampling,
        }),*];
    };
}

settings! {
    accumulate, "acc", Training, Grid, Never;
    batch, "b", Training, Flag, Measured;
    beta, "beta", Model, Grid, Never;
    clip, "clip", Training, Grid, Measured;
    context, "ctx", Model, Grid, Never;
    decay_steps, "decay", Training, Grid, Free;
    decay_to, "to", Training, Grid, Free;
    dropout, "drop", Model, Grid, Never;
    epochs, "ep", Training, Grid, Never;
    gamma, "gamma", Model, Grid, Never;
    lora, "r", Adapters, Flag, Measured;
    lora_alpha, "alpha", Adapters, Grid, Never;
    lora_dropout, "ldrop", Adapters, Grid, Never;
    lora_targets, "on-", Adapters, GridOfLists, Never;
    lr, "lr", Training, Flag, Free;
    no_decay_norms, "no-decay-norms", Training, Grid, Free;
    optimizer, "", Training, Grid, Measured;
    schedule, "", Training, Grid, Free;
    seed, "seed", Model, Grid, Free;
    steps, "steps", Training, Grid, Never;
    warmup, "warmup", Training, Grid, Free;
    weight_decay, "wd", Training, Grid, Free;
}

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
    pub(crate) fn group_of(name: &str) -> SettingGroup {
        Self::named(name).map_or(SettingGroup::Training, |setting| setting.group)
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
        match self.group {
            SettingGroup::Adapters => value_of::<AdapterSettings>(self.name, text),
            SettingGroup::Model => value_of::<ModelSettings>(self.name, text),
            SettingGroup::Training => value_of::<TrainingSettings>(self.name, text),
        }
    }
}

/// Reads a value by the flag of a group.
fn value_of<S: Args + Serialize>(name: &str, text: &str) -> Result<Value, String> {
    let texts = flags::Texts::from([(name.to_owned(), text.to_owned())]);
    let (settings, _) = flags::read::<S>(&texts).map_err(|error| error.to_string())?;
    let mut table = Table::try_from(&settings).map_err(|error| error.to_string())?;
    table.remove(name).ok_or_else(|| format!("{name}: `{text}` is not a value"))
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
