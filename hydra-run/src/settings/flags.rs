//! Groups of flags as data: files use the names, defaults and limits that the command line defines.

use crate::terminal::Usage;
use anyhow::{Context, Result};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::{ContextKind, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, Id};
use serde::Serialize;
use serde::de::value::Error as NameError;
use serde::de::{DeserializeOwned, IntoDeserializer};
use std::collections::BTreeMap;
use std::error::Error;
use std::marker::PhantomData;
use toml::{Table, Value};

/// Suffixes of keys that name the unit of a number.
const UNITS: [&str; 2] = ["_bytes_per_s", "_bytes"];

/// Flags whose values in a file may be names that the command line does not take, or no longer takes; serde reads them.
const NAMED_IN_FILES: [&str; 1] = ["policy"];

fn command<S: Args>() -> Command {
    S::augment_args(Command::new("settings").no_binary_name(true))
}

/// The names of a group's flags.
pub fn names<S: Args>() -> Vec<Id> {
    command::<S>().get_arguments().map(|flag| flag.get_id().clone()).collect()
}

/// The group with no flag given. None of its flags may be required.
pub fn defaults<S: Args>() -> S {
    let matches = command::<S>().try_get_matches_from([""; 0]);
    matches.and_then(|matches| S::from_arg_matches(&matches)).expect("no flag of a group is required")
}

/// The name of the flag for a key of a file.
fn flag_of(key: &str) -> &str {
    UNITS.iter().find_map(|ending| key.strip_suffix(ending)).unwrap_or(key)
}

/// The unit of a number in a file, for flags whose values need a unit on the command line.
fn unit_of(flag: &Arg, value: &Value) -> &'static str {
    let name = flag.get_value_names().into_iter().flatten().next().map_or("", |name| name.as_str());
    match (name, value) {
        ("SIZE", Value::Integer(_) | Value::Float(_)) => "B",
        ("SIZE/s", Value::Integer(_) | Value::Float(_)) => "B/s",
        _ => "",
    }
}

/// Refuses values of a file that the flags of the same names would refuse.
pub(crate) fn check<S: Args>(table: &Table) -> Result<(), Usage> {
    let command = command::<S>();
    for (key, value) in table {
        let name = flag_of(key);
        let is_it = |flag: &&Arg| flag.get_id() == name && !NAMED_IN_FILES.contains(&name);
        let Some(flag) = command.get_arguments().find(is_it) else { continue };
        let (Some(long), true) = (flag.get_long(), flag.get_action().takes_values()) else { continue };
        for value in value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice) {
            let number = text_of(value);
            let text = number.clone() + unit_of(flag, value);
            if let Err(error) = command.clone().try_get_matches_from([format!("--{long}={text}")]) {
                // The error shows the value as the file has it.
                let why = refusal(&error, &text)
                    .map(|why| why.replacen(&format!("`{text}`"), &format!("`{number}`"), 1));
                why.map_or(Ok(()), |why| Err(Usage::new(format!("{key}: {why}"))))?;
            }
        }
    }
    Ok(())
}

/// A value in the notation of a command line.
pub(super) fn text_of(value: &Value) -> String {
    match value {
        Value::Array(values) => values.iter().map(text_of).collect::<Vec<_>>().join(","),
        Value::String(text) => text.clone(),
        // TOML writes 1.0 for 1.
        Value::Float(number) => number.to_string(),
        other => other.to_string(),
    }
}

/// The reason why a value is refused; `None` if the error is about something else, such as a missing flag.
fn refusal(error: &clap::Error, text: &str) -> Option<String> {
    match error.kind() {
        ErrorKind::ValueValidation => Some(error.source()?.to_string()),
        ErrorKind::InvalidValue => {
            let names = error.get(ContextKind::ValidValue);
            let expected = names.map(|names| format!(": expected one of {names}")).unwrap_or_default();
            Some(format!("unknown value `{text}`{expected}"))
        }
        _ => None,
    }
}

/// A group of flags, and the names of those that are given.
#[derive(Clone, Debug)]
pub struct GivenFlags<S> {
    settings: S,
    names: Vec<Id>,
}

impl<S: Clone + Serialize + DeserializeOwned> GivenFlags<S> {
    /// `begun`, overridden by the given flags.
    pub(crate) fn over(&self, begun: &S) -> Result<S> {
        let table = |settings| Table::try_from(settings).context("the settings could not be written as TOML");
        let (given, mut merged) = (table(&self.settings)?, table(begun)?);
        let is_given = |key: &str| self.names.iter().any(|name| name == flag_of(key));
        merged.extend(given.into_iter().filter(|(key, _)| is_given(key)));
        merged.try_into().context("the flags could not be applied to the settings of the run")
    }
}

impl<S: Args> Args for GivenFlags<S> {
    fn augment_args(command: Command) -> Command {
        S::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        S::augment_args_for_update(command)
    }
}

impl<S: Args> FromArgMatches for GivenFlags<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_given = |name: &Id| matches.value_source(name.as_str()) == Some(ValueSource::CommandLine);
        let names = names::<S>().into_iter().filter(is_given).collect();
        Ok(Self { settings: S::from_arg_matches(matches)?, names })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Flags by name with their values as text (`true` for a flag without a value).
pub(crate) type Texts = BTreeMap<String, String>;

/// A group of flags that keeps only the texts of the given flags; another process parses them.
#[derive(Clone, Debug)]
pub struct RawFlags<S> {
    /// The values that were given, as texts.
    pub texts: Texts,
    of: PhantomData<S>,
}

impl<S: Args> Args for RawFlags<S> {
    fn augment_args(command: Command) -> Command {
        S::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        S::augment_args_for_update(command)
    }
}

impl<S: Args> FromArgMatches for RawFlags<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut texts = Texts::new();
        for flag in command::<S>().get_arguments() {
            let name = flag.get_id().as_str();
            let given = matches.value_source(name) == Some(ValueSource::CommandLine);
            let Some(long) = flag.get_long().filter(|_| given) else { continue };
            let values = matches.get_raw(name).into_iter().flatten().map(|value| value.to_string_lossy());
            let text = match flag.get_action().takes_values() {
                true => values.collect::<Vec<_>>().join(","),
                false => "true".to_owned(),
            };
            texts.insert(long.to_owned(), text);
        }
        Ok(Self { texts, of: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Reads flags of a group as the command line does; returns the settings and the names of the given flags.
pub(crate) fn read<S: Args>(texts: &Texts) -> Result<(S, Vec<String>), Usage> {
    let command = command::<S>();
    let (mut arguments, mut given) = (Vec::new(), Vec::new());
    for (name, text) in texts {
        let long = name.replace('_', "-");
        let flag = command.get_arguments().find(|flag| flag.get_long() == Some(&*long)).ok_or_else(|| {
            let known: Vec<&str> = command.get_arguments().filter_map(Arg::get_long).collect();
            Usage::new(format!("`{name}` is not a setting of a task: expected one of {}", known.join(", ")))
        })?;
        let argument = match flag.get_action().takes_values() {
            true => format!("--{long}={text}"),
            false if text == "true" => format!("--{long}"),
            false => return Err(Usage::new(format!("{name}: unknown value `{text}`: expected true"))),
        };
        if let Err(error) = command.clone().try_get_matches_from([&argument]) {
            refusal(&error, text).map_or(Ok(()), |why| Err(Usage::new(format!("{name}: {why}"))))?;
        }
        arguments.push(argument);
        given.push(flag.get_id().to_string());
    }
    // Flags that are missing have the values of the settings below.
    let matches = command.ignore_errors(true).try_get_matches_from(arguments);
    let settings = matches.and_then(|matches| S::from_arg_matches(&matches)).map_err(Usage::from_error)?;
    Ok((settings, given))
}

/// A parser of an enum by the names that its variants have in files.
pub fn named<T: DeserializeOwned + Clone + Send + Sync + 'static>(
    names: &'static [&'static str],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(names)
        .try_map(|name| T::deserialize(IntoDeserializer::<NameError>::into_deserializer(name.as_str())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{
        AdapterSettings, DeviceSettings, ModelSettings, RunSettings, SaveSettings, SearchSettings,
        TrainingSettings,
    };
    use hydra_core::ByteSize;

    #[test]
    fn every_group_has_defaults_and_reads_its_flags_by_name() {
        assert_eq!(toml::from_str::<ModelSettings>("").unwrap(), defaults());
        assert_eq!(toml::from_str::<TrainingSettings>("").unwrap(), defaults());
        let devices = "device_memory = '64MiB'\nhost_memory = 1024\nlink = '1KiB/s'\nprefetch = false\ndevices = 'cpu:2'";
        let devices: DeviceSettings = toml::from_str(devices).unwrap();
        assert_eq!(devices.device_memory, Some(ByteSize::mib(64)));
        assert_eq!(devices.host_memory, Some(ByteSize(1024)));
        assert!(!devices.prefetch);
    }

    #[test]
    fn every_flag_of_a_run_is_a_key_of_its_file() {
        let spec: Table =
            toml::from_str(include_str!("../../../hydra-bench/tests/specs/all-settings.toml")).unwrap();
        let groups = ["model", "training", "devices"].map(|group| spec[group].as_table().unwrap().keys());
        let file: Vec<&str> = groups.into_iter().flatten().map(|key| flag_of(key)).collect();
        for name in names::<RunSettings>() {
            let name = name.as_str();
            // The file has no plan and no disk, which not every machine has, no adapters and no `wsd` schedule; and an earlier
            // version wrote it.
            let new = [
                "concurrent",
                "strict",
                "eval_limit",
                "eval_at",
                "initial_validation",
                "microbatch_group",
                "cache",
                "reserve_for_forks",
                "vocabulary_parts",
                "grid",
                "columns",
                "frozen_weights",
                "frozen_dtype",
                "task",
                "problem_type",
                "loss",
                "beta",
                "gamma",
                "metric",
                "sample_prompts",
                "sample_tokens",
            ];
            let new = [&new[..], &["replicas"]].concat();
            let absent = [
                &["plan", "disk", "decay_steps", "decay_to", "loss_on", "pack", "tokenizer", "train"][..],
                &new,
            ]
            .concat();
            let others =
                [names::<AdapterSettings>(), names::<SearchSettings>(), names::<SaveSettings>()].concat();
            let is_other = others.iter().any(|flag| flag == name);
            assert!(is_other || absent.contains(&name) || file.contains(&name), "{name} in {file:?}");
        }
    }

    #[test]
    fn names_of_an_enum_are_those_of_files() {
        let devices = command::<DeviceSettings>();
        for (flag, unknown) in [
            ("precision", toml::from_str::<DeviceSettings>("precision = '?'")),
            ("optimizer_placement", toml::from_str("optimizer_placement = '?'")),
            ("frozen_weights", toml::from_str("frozen_weights = '?'")),
        ] {
            let flag = devices.get_arguments().find(|known| known.get_id() == flag).unwrap();
            let names: Vec<String> =
                flag.get_possible_values().iter().map(|name| format!("`{}`", name.get_name())).collect();
            // serde's error lists all variants.
            let error = unknown.unwrap_err().message().replace(" or ", ", ");
            assert!(error.trim_end().ends_with(&names.join(", ")), "{names:?} in {error}");
        }
        assert!(toml::from_str::<DeviceSettings>("optimizer_placement = 'auto'").is_ok());
    }
}
