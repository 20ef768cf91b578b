//! Hyperparameter searches: the search space, the number of trials, and how long each trains.

use super::axis::{Sampling, Setting};
use super::{AdapterSettings, Configuration, TrainingSettings, flags, values};
use crate::terminal::Usage;
use anyhow::{Context, Result};
use clap::Args;
use clap::builder::PossibleValuesParser;
use hydra_search as search;
use hydra_search::{Method, Parameter, Range, Space, Spec, TrialId, parse_parameter};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The most combinations of settings that change a task's memory.
const MOST_MEASURED: usize = 64;

/// A search, if there is one.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Search")]
#[serde(default = "flags::defaults", deny_unknown_fields)]
pub struct SearchSettings {
    /// Search method: grid and random train every trial to the end; halving, hyperband and asha stop poor trials early; pbt
    /// replaces poor trials by changed copies of good ones; tpe draws trials near the best so far [default: grid, with --sample]
    #[arg(long, value_name = "METHOD", value_parser = PossibleValuesParser::new(Method::ALL.map(Method::name)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) search: Option<String>,
    /// Search space of one setting, such as lr=log:1e-5..1e-2, weight_decay=uniform:0..0.1, batch=8,16 or seed=int:0..9; repeat
    /// the flag for more settings
    #[arg(long, value_name = "NAME=RANGE", value_parser = sampled)]
    pub(crate) sample: Vec<String>,
    /// Search space in a TOML file with a table [space]: each setting is a range as in --sample, or a table with a condition such
    /// as { log = [1e-5, 1e-2], when = { optimizer = "sgd" } }
    #[arg(long = "space", value_name = "FILE")]
    #[serde(skip)]
    pub(crate) space_file: Option<PathBuf>,
    /// Number of trials to draw; for pbt, the population size
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) trials: Option<usize>,
    /// Run the trials in this file: TOML with a [[trial]] table each, or JSON lines with an object each
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub(crate) trials_file: Option<PathBuf>,
    /// For halving, hyperband and asha: reduction factor; the best 1/N of the trials continue, for N times as many minibatches
    /// [default: 3]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) eta: Option<usize>,
    /// For halving, hyperband and asha: minibatches that every trial trains before the first comparison [default: 1]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) first_rung: Option<usize>,
    /// For asha: number of virtual workers; results depend on it, and not on the number of devices [default: 8]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) workers: Option<usize>,
    /// For pbt: minibatches between two comparisons [default: a tenth of --steps]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) interval: Option<usize>,
    /// The search space of the file.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Space::is_empty")]
    pub(crate) space: Space,
    /// The trials of the file.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) trial: Vec<search::Configuration>,
}

/// Checks `NAME=RANGE` and returns it unchanged.
fn sampled(text: &str) -> Result<String, String> {
    named_range(text).map(|_| text.to_owned())
}

/// The settings that a search space may have.
fn sampled_names() -> Vec<&'static str> {
    Setting::names(|setting| setting.sampling != Sampling::Never)
}

/// The settings that change a task's memory, which is measured when a run starts.
fn measured_names() -> Vec<&'static str> {
    Setting::names(|setting| setting.sampling == Sampling::Measured)
}

fn named_range(text: &str) -> Result<(String, Parameter), String> {
    let (name, range) = text.split_once('=').ok_or("expected NAME=RANGE, such as lr=log:1e-5..1e-2")?;
    let name = name.trim().replace('-', "_");
    let known = sampled_names();
    if !known.contains(&name.as_str()) {
        return Err(format!("`{name}` cannot be searched: expected one of {}", known.join(", ")));
    }
    Ok((name, parse_parameter(range.trim()).map_err(|error| error.to_string())?))
}

impl SearchSettings {
    /// Returns true if there is no search.
    pub fn is_none(&self) -> bool {
        let files = [&self.trials_file, &self.space_file];
        let drawn = !self.sample.is_empty() || !self.space.is_empty();
        self.search.is_none() && !drawn && self.trial.is_empty() && files.iter().all(|file| file.is_none())
    }

    /// A given search flag that has no effect, because there is no search.
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

    /// Returns true if the search space or the given trials have this setting.
    pub(crate) fn has(&self, name: &str) -> bool {
        let sampled = self.sample.iter().filter_map(|text| named_range(text).ok());
        sampled.map(|(name, _)| name).any(|of| of == name)
            || self.space.get(name).is_some()
            || self.trial.iter().any(|trial| trial.get(name).is_some())
    }

    /// These settings with the search space and the trials read from their files.
    pub(crate) fn resolve(mut self) -> Result<Self> {
        if let Some(file) = self.space_file.take() {
            let read: SpaceFile = toml::from_str(&read_file(&file, "space")?)
                .with_context(|| format!("the space `{}` cannot be used", file.display()))?;
            self.space = read.space;
        }
        if let Some(file) = self.trials_file.take() {
            let shown = file.display();
            let text = read_file(&file, "trials")?;
            let toml = file.extension().is_some_and(|ending| ending == "toml");
            let read = if toml { search::trials_from_toml(&text) } else { search::trials_from_jsonl(&text) };
            self.trial = read.with_context(|| format!("the trials `{shown}` cannot be used"))?;
        }
        Ok(self)
    }

    /// The settings of the search space with their ranges; entries that cannot be parsed are skipped.
    pub(crate) fn parameters(&self) -> Vec<(String, Parameter)> {
        let own = |name: &str| Some((name.to_owned(), self.space.get(name)?.clone()));
        let sampled = self.sample.iter().filter_map(|text| named_range(text).ok());
        self.space.names().filter_map(own).chain(sampled).collect()
    }

    /// The search as `hydra-search` takes it, if there is one.
    pub(crate) fn spec(&self, training: &TrainingSettings) -> Result<Option<Spec>, Usage> {
        if self.is_none() {
            return Ok(None);
        }
        let (None, Some(steps)) = (training.epochs, training.steps) else {
            let says =
                "a search counts minibatches; pass --steps N, the most that a trial trains, and no --epochs";
            return Err(Usage::new(says));
        };
        let own = |name: &str| self.space.get(name).map(|parameter| (name.to_owned(), parameter.clone()));
        let mut space: BTreeMap<String, Parameter> = self.space.names().filter_map(own).collect();
        for text in &self.sample {
            let (name, parameter) = named_range(text).map_err(Usage::new)?;
            if space.insert(name.clone(), parameter).is_some() {
                let says = format!(
                    "--sample {name} is given twice; give each setting once, in --sample or in --space"
                );
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
        spec.check_names(&sampled_names()).map_err(Usage::from_error)?;
        check_forks(&spec)?;
        if begins_later(method) {
            measured(&spec).map_err(|says| {
                Usage::new(format!(
                    "--search {method} starts trials during the run, and their memory is measured before it: {says}; give lists \
                     with fewer values, or use --search halving, hyperband or random"
                ))
            })?;
        }
        Ok(Some(spec))
    }

    /// The configurations that are measured when a run starts, one for each combination of batch, clipping, adapters and
    /// optimizer that a later trial may have; none if all trials start with the run.
    pub(crate) fn shapes(
        &self,
        training: &TrainingSettings,
        adapters: &AdapterSettings,
    ) -> Result<Vec<Configuration>, Usage> {
        let Some(spec) = self.spec(training)?.filter(|spec| begins_later(spec.search)) else {
            return Ok(Vec::new());
        };
        let of = |settings: search::Configuration| {
            // A combination that is not a valid configuration is skipped; no trial has it.
            let one = self.configuration(TrialId(0), &settings, training, adapters).ok()?;
            let said = |name: &&str| settings.get(name).map(|value| format!("-{name}-{value}"));
            Some(Configuration {
                name: format!("shape{}", measured_names().iter().filter_map(said).collect::<String>()),
                ..one
            })
        };
        let all = measured(&spec).map_err(Usage::new)?.into_iter().chain(spec.given.clone());
        let mut shapes: Vec<Configuration> = all.filter_map(of).collect();
        shapes.dedup_by(|one, other| one.name == other.name);
        Ok(shapes)
    }

    /// The configuration of a trial: the run's settings, overridden by the trial's.
    pub(crate) fn configuration(
        &self,
        trial: TrialId,
        settings: &search::Configuration,
        training: &TrainingSettings,
        adapters: &AdapterSettings,
    ) -> Result<Configuration, Usage> {
        let has = |name: &str| settings.get(name).is_some();
        let mut of = Configuration {
            batch: if has("batch") { 0 } else { one("--batch", &training.batch)? },
            lr: if has("lr") { 0.0 } else { one("--lr", &training.lr)? },
            ..Configuration::default()
        };
        if !has("lora") && !adapters.lora.is_empty() {
            of.lora = Some(one("--lora", &adapters.lora)?);
        }
        for (name, value) in settings.iter() {
            let value = toml::Value::try_from(value).map_err(Usage::from_error)?;
            of = of.with(name, value).map_err(|why| Usage::new(format!("trial {trial}: {why}")))?;
        }
        flags::check::<TrainingSettings>(&of.changes)?;
        let rank = of.lora.filter(|_| self.has("lora")).map(|rank| format!("-r{rank}")).unwrap_or_default();
        Ok(Configuration { name: format!("t{:02}-b{}-lr{:.1e}{rank}", trial.0, of.batch, of.lr), ..of })
    }
}

/// Returns true if a search may start trials during the run whose shapes no task had at its start. The members of a population
/// all start with the run, and their forks have their shapes.
fn begins_later(method: Method) -> bool {
    matches!(method, Method::Asha | Method::Tpe)
}

/// Refuses a population whose forks could have other shapes than their parents, because a measured setting depends on a setting
/// that forks change.
fn check_forks(spec: &Spec) -> Result<(), Usage> {
    let changes = |name: &String| {
        let range = spec.space.get(name).map(|parameter| &parameter.range);
        matches!(range, Some(Range::Uniform { .. } | Range::Log { .. }))
    };
    for name in measured_names() {
        let on = spec.space.get(name).and_then(|of| of.when.keys().find(|name| changes(name)));
        if let Some(on) = on.filter(|_| spec.search == Method::Pbt) {
            return Err(Usage::new(format!(
                "--search pbt changes `{on}` in forks, and `{name}` has a condition on it, but a fork keeps its parent's `{name}`; \
                 remove the condition"
            )));
        }
    }
    Ok(())
}

/// Configurations with every combination of the measured settings.
fn measured(spec: &Spec) -> Result<Vec<search::Configuration>, String> {
    let all = spec.space.combinations(&measured_names()).map_err(|error| error.to_string())?;
    if all.len() > MOST_MEASURED {
        let named: Vec<&str> = spec.space.names().filter(|name| measured_names().contains(name)).collect();
        return Err(format!(
            "{} combinations of {}, at most {MOST_MEASURED} can be measured",
            all.len(),
            named.join(", ")
        ));
    }
    Ok(all)
}

/// A file with a search space.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SpaceFile {
    space: Space,
}

fn read_file(file: &Path, what: &str) -> Result<String> {
    let text = std::fs::read_to_string(file);
    text.with_context(|| format!("the {what} `{}` could not be read", file.display()))
}

/// The value of a list with one value, which every trial has.
fn one<T: Copy>(flag: &str, list: &[T]) -> Result<T, Usage> {
    match list {
        [one] => Ok(*one),
        _ => {
            let name = flag.trim_start_matches('-');
            Err(Usage::new(format!("every trial needs {flag}; pass one value, or --sample {name}=RANGE")))
        }
    }
}
