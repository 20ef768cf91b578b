//! Searches: which settings are drawn, how many trials there are, and how far each is trained.

use super::{AdapterSettings, Configuration, TrainingSettings, flags, values};
use crate::terminal::Usage;
use anyhow::{Context, Result};
use clap::Args;
use clap::builder::PossibleValuesParser;
use hydra_search as search;
use hydra_search::{Method, Parameter, Range, Space, Spec, TrialId, Value, parse_parameter};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::Table;

/// The settings that trials can differ in.
pub(crate) const SAMPLED: [&str; 12] = [
    "batch",
    "clip",
    "decay_steps",
    "decay_to",
    "lora",
    "lr",
    "no_decay_norms",
    "optimizer",
    "schedule",
    "seed",
    "warmup",
    "weight_decay",
];

/// Those of them on which the needs of a task depend, which are measured when a run begins.
const MEASURED: [&str; 4] = ["batch", "clip", "lora", "optimizer"];
/// The most combinations of these of which each is measured.
const MOST_MEASURED: usize = 64;

/// A search, if there is one.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Search")]
#[serde(default = "flags::defaults", deny_unknown_fields)]
pub(crate) struct SearchSettings {
    /// Compare trials on the way, and train on what is promising: halving, hyperband, asha, pbt, tpe; or train all of them to
    /// their ends: grid, random [default: grid, where there is a --sample]
    #[arg(long, value_name = "METHOD", value_parser = PossibleValuesParser::new(Method::ALL.map(Method::name)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) search: Option<String>,
    /// A setting that trials differ in: lr=log:1e-5..1e-2, weight_decay=uniform:0..0.1, batch=8,16, seed=int:0..9; repeat it for
    /// more settings
    #[arg(long, value_name = "NAME=RANGE", value_parser = sampled)]
    pub(crate) sample: Vec<String>,
    /// More such settings, perhaps with conditions: a TOML file with a table [space], in which a setting is a range as above,
    /// or such as { log = [1e-5, 1e-2], when = { optimizer = "sgd" } }
    #[arg(long = "space", value_name = "FILE")]
    #[serde(skip)]
    pub(crate) space_file: Option<PathBuf>,
    /// How many trials are drawn; of pbt the population
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) trials: Option<usize>,
    /// Trials that are given: a file of TOML with a [[trial]] each, or of JSON with an object a line
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub(crate) trials_file: Option<PathBuf>,
    /// Of halving, hyperband and asha: one of so many goes on, so many times as far [default: 3]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) eta: Option<usize>,
    /// Of the same: the fewest minibatches before a trial is stopped [default: 1]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) first_rung: Option<usize>,
    /// Of asha: its virtual workers, on which results depend; devices may be more or fewer [default: 8]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) workers: Option<usize>,
    /// Of pbt: minibatches from one comparison to the next [default: a tenth of --steps]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) interval: Option<usize>,
    /// The settings of the space's file.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Space::is_empty")]
    pub(crate) space: Space,
    /// The trials of the file.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) trial: Vec<search::Configuration>,
}

/// A setting with its range, as it is.
fn sampled(text: &str) -> Result<String, String> {
    named_range(text).map(|_| text.to_owned())
}

fn named_range(text: &str) -> Result<(String, Parameter), String> {
    let (name, range) = text.split_once('=').ok_or("give NAME=RANGE, such as lr=log:1e-5..1e-2")?;
    let name = name.trim().replace('-', "_");
    if !SAMPLED.contains(&name.as_str()) {
        return Err(format!(
            "`{name}` is no setting that trials can differ in: these are {}",
            SAMPLED.join(", ")
        ));
    }
    Ok((name, parse_parameter(range.trim()).map_err(|error| error.to_string())?))
}

impl SearchSettings {
    /// Returns true if there is no search.
    pub(crate) fn is_none(&self) -> bool {
        let files = [&self.trials_file, &self.space_file];
        let drawn = !self.sample.is_empty() || !self.space.is_empty();
        self.search.is_none() && !drawn && self.trial.is_empty() && files.iter().all(|file| file.is_none())
    }

    /// A flag that says how to search, where nothing is searched.
    pub(crate) fn idle(&self) -> Option<&'static str> {
        let given = [
            ("--trials", self.trials.is_some()),
            ("--eta", self.eta.is_some()),
            ("--first-rung", self.first_rung.is_some()),
            ("--workers", self.workers.is_some()),
            ("--interval", self.interval.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given && self.is_none()).map(|(flag, _)| flag)
    }

    /// Returns true if this setting is drawn, or given by trials.
    pub(crate) fn has(&self, name: &str) -> bool {
        let sampled = self.sample.iter().filter_map(|text| named_range(text).ok());
        sampled.map(|(name, _)| name).any(|of| of == name)
            || self.space.get(name).is_some()
            || self.trial.iter().any(|trial| trial.get(name).is_some())
    }

    /// These settings with the space and the trials of their files.
    pub(crate) fn resolve(mut self) -> Result<Self> {
        if let Some(file) = self.space_file.take() {
            let read: SpaceFile = toml::from_str(&text_of(&file, "space")?)
                .with_context(|| format!("the space `{}` cannot be used", file.display()))?;
            self.space = read.space;
        }
        if let Some(file) = self.trials_file.take() {
            let shown = file.display();
            let text = text_of(&file, "trials")?;
            let toml = file.extension().is_some_and(|ending| ending == "toml");
            let read = if toml { search::trials_from_toml(&text) } else { search::trials_from_jsonl(&text) };
            self.trial = read.with_context(|| format!("the trials `{shown}` cannot be used"))?;
        }
        Ok(self)
    }

    /// Returns the settings that are drawn, each with its range, as far as they can be read.
    pub(crate) fn parameters(&self) -> Vec<(String, Parameter)> {
        let own = |name: &str| Some((name.to_owned(), self.space.get(name)?.clone()));
        let sampled = self.sample.iter().filter_map(|text| named_range(text).ok());
        self.space.names().filter_map(own).chain(sampled).collect()
    }

    /// What is asked of the search.
    pub(crate) fn spec(&self, training: &TrainingSettings) -> Result<Option<Spec>, Usage> {
        if self.is_none() {
            return Ok(None);
        }
        let (None, Some(steps)) = (training.epochs, training.steps) else {
            let says = "a search compares trials after minibatches: give --steps N, the most that a trial gets, and no --epochs";
            return Err(Usage::new(says));
        };
        let own = |name: &str| self.space.get(name).map(|parameter| (name.to_owned(), parameter.clone()));
        let mut space: BTreeMap<String, Parameter> = self.space.names().filter_map(own).collect();
        for text in &self.sample {
            let (name, parameter) = named_range(text).map_err(Usage::new)?;
            if space.insert(name.clone(), parameter).is_some() {
                let says = format!("--sample {name} is given twice: give each setting once, also of --space");
                return Err(Usage::new(says));
            }
        }
        let method = self.search.as_deref().unwrap_or("grid").parse().map_err(Usage::from_error)?;
        let spec = Spec {
            search: method,
            steps,
            trials: self.trials,
            eta: self.eta,
            first_rung: self.first_rung,
            workers: self.workers,
            interval: self.interval,
            space: Space::new(space).map_err(Usage::from_error)?,
            given: self.trial.clone(),
            ..Spec::default()
        };
        spec.check().map_err(Usage::from_error)?;
        spec.check_names(&SAMPLED).map_err(Usage::from_error)?;
        check_forks(&spec)?;
        if begins_later(method) {
            measured(&spec).map_err(|says| {
                Usage::new(format!(
                    "--search {method} begins trials while a run goes on, and what they need is measured when it begins: {says}; \
                     give lists with fewer values, or search by halving, hyperband or random"
                ))
            })?;
        }
        Ok(Some(spec))
    }

    /// The configurations of which each is measured when a run begins, so that a trial may have its batch, its adapters and
    /// its optimizer later; none where all trials begin at the start.
    pub(crate) fn shapes(
        &self,
        training: &TrainingSettings,
        adapters: &AdapterSettings,
    ) -> Result<Vec<Configuration>, Usage> {
        let Some(spec) = self.spec(training)?.filter(|spec| begins_later(spec.search)) else {
            return Ok(Vec::new());
        };
        let of = |settings: search::Configuration| {
            // What is no trial by itself, no trial will be.
            let one = self.configuration(TrialId(0), &settings, training, adapters).ok()?;
            let said = |name: &&str| settings.get(name).map(|value| format!("-{name}-{value}"));
            Some(Configuration {
                name: format!("shape{}", MEASURED.iter().filter_map(said).collect::<String>()),
                ..one
            })
        };
        let all = measured(&spec).map_err(Usage::new)?.into_iter().chain(spec.given.clone());
        let mut shapes: Vec<Configuration> = all.filter_map(of).collect();
        shapes.dedup_by(|one, other| one.name == other.name);
        Ok(shapes)
    }

    /// The configuration of a trial: its settings in place of those of the run.
    pub(crate) fn configuration(
        &self,
        trial: TrialId,
        settings: &search::Configuration,
        training: &TrainingSettings,
        adapters: &AdapterSettings,
    ) -> Result<Configuration, Usage> {
        let whole = |name: &str| match settings.get(name) {
            Some(Value::Whole(number)) if *number >= 0 => Ok(Some(*number as u64)),
            Some(other) => {
                Err(Usage::new(format!("trial {trial} has {name} = {other}: give a whole number")))
            }
            None => Ok(None),
        };
        let batch = match whole("batch")? {
            Some(batch) => batch as usize,
            None => one("--batch", &training.batch)?,
        };
        let lr = match settings.get("lr") {
            Some(lr) => lr
                .number()
                .ok_or_else(|| Usage::new(format!("trial {trial} has lr = {lr}: give a number")))?,
            None => one("--lr", &training.lr)?,
        };
        let lora = match whole("lora")? {
            None if adapters.lora.is_empty() => None,
            None => Some(one("--lora", &adapters.lora)?),
            rank => rank.map(|rank| rank as usize),
        };
        let is_other = |name: &str| !matches!(name, "batch" | "lr" | "lora" | "seed");
        let others = settings.iter().filter(|(name, _)| is_other(name));
        let toml = |(name, value): (&str, &Value)| Ok((name.to_owned(), toml::Value::try_from(value)?));
        let changes: Result<Table, toml::ser::Error> = others.map(toml).collect();
        let changes = changes.map_err(Usage::from_error)?;
        flags::check::<TrainingSettings>(&changes)?;
        let rank = lora.filter(|_| self.has("lora")).map(|rank| format!("-r{rank}")).unwrap_or_default();
        let name = format!("t{:02}-b{batch}-lr{lr:.1e}{rank}", trial.0);
        Ok(Configuration { name, model: 0, batch, lr, lora, seed: whole("seed")?, changes })
    }
}

/// Returns whether a search begins trials while the run goes on that may be unlike all that began with it. A population has
/// its members at the start, and forks of them are of their shapes.
fn begins_later(method: Method) -> bool {
    matches!(method, Method::Asha | Method::Tpe)
}

/// Refuses a population whose forks could be of another shape than their parents: where a setting that is measured depends on
/// one that forks change.
fn check_forks(spec: &Spec) -> Result<(), Usage> {
    let changes = |name: &String| {
        let range = spec.space.get(name).map(|parameter| &parameter.range);
        matches!(range, Some(Range::Uniform { .. } | Range::Log { .. }))
    };
    for name in MEASURED {
        let on = spec.space.get(name).and_then(|of| of.when.keys().find(|name| changes(name)));
        if let Some(on) = on.filter(|_| spec.search == Method::Pbt) {
            return Err(Usage::new(format!(
                "--search pbt changes `{on}` in forks, and whether a trial has `{name}` depends on it: a fork has its parent's; \
                 take the condition away"
            )));
        }
    }
    Ok(())
}

/// Configurations with every combination of what is measured.
fn measured(spec: &Spec) -> Result<Vec<search::Configuration>, String> {
    let all = spec.space.combinations(&MEASURED).map_err(|error| error.to_string())?;
    if all.len() > MOST_MEASURED {
        let named: Vec<&str> = spec.space.names().filter(|name| MEASURED.contains(name)).collect();
        return Err(format!(
            "{} combinations of {} are more than {MOST_MEASURED}",
            all.len(),
            named.join(", ")
        ));
    }
    Ok(all)
}

/// A file with a space.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SpaceFile {
    space: Space,
}

fn text_of(file: &Path, what: &str) -> Result<String> {
    let text = std::fs::read_to_string(file);
    text.with_context(|| format!("the {what} `{}` could not be read", file.display()))
}

/// The one value of a list that every trial has.
fn one<T: Copy>(flag: &str, list: &[T]) -> Result<T, Usage> {
    match list {
        [one] => Ok(*one),
        _ => {
            let name = flag.trim_start_matches('-');
            Err(Usage::new(format!("every trial needs {flag}: give one value, or --sample {name}=RANGE")))
        }
    }
}
