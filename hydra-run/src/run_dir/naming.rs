//! Names of tasks, made of the settings in which the tasks of a run differ: `b12-lr3e-3-sgd-wd0.1`.
//!
//! Grids and searches share the notation. A name is also a directory name and is typed by users: it consists of letters,
//! digits, `-`, `_` and `.`, and is unique within a run, also on file systems that ignore case.

use crate::run_dir::differences::{Differences, Settings, place, settings, shown};
use crate::run_dir::spec::{Notation, RunSpec};
use crate::settings::{Configuration, Setting};
use crate::terminal::Usage;
use hydra_search::{Parameter, Range, Search, TrialId};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The longest name, before the number that makes it unique.
const LONGEST: usize = 80;
/// The longest model or data name within a task name.
const LONGEST_PART: usize = 40;
/// The settings that name a task which differs from no other, as far as it has them.
const ALONE: [&str; 3] = ["batch", "lr", "lora"];
/// Settings whose values appear without the setting's name.
const BARE: [&str; 5] = ["model", "data", "optimizer", "schedule", "dtype"];

/// Returns the component of a name for one setting.
fn part(name: &str, value: &Value) -> String {
    let short = Setting::named(name).map(|setting| setting.short.to_owned());
    let long = || name.replace('_', "-");
    match value {
        Value::Null => format!("no{}", long()),
        Value::Bool(true) => long(),
        Value::Bool(false) => {
            long().strip_prefix("no-").map_or_else(|| format!("no-{}", long()), str::to_owned)
        }
        _ if BARE.contains(&name) => shown(name, value).chars().take(LONGEST_PART).collect(),
        _ => short.unwrap_or_else(long) + &shown(name, value),
    }
}

/// Returns the name of a task, made of the settings in `names`.
fn name_of(settings: &Settings, names: &[String]) -> String {
    // An unset length is implied by the other one: epochs or steps.
    let is_named =
        |(name, value): &(&String, &Value)| !(value.is_null() && matches!(name.as_str(), "epochs" | "steps"));
    let of = names.iter().filter_map(|name| Some((name, settings.get(name)?))).filter(is_named);
    let parts: Vec<String> = of.map(|(name, value)| part(name, value)).collect();
    safe(&parts.join("-"))
}

/// Returns `text` restricted to the characters of names.
fn safe(text: &str) -> String {
    let is_safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = text.chars().take(LONGEST).map(is_safe).collect();
    match name.trim_start_matches(['.', '-']).trim_end_matches(['.', '-']) {
        "" => "task".to_owned(),
        name => name.to_owned(),
    }
}

/// Names in use.
#[derive(Debug, Default)]
struct Taken(BTreeSet<String>);

impl Taken {
    /// Reserves a name, or the name with the first unused number appended.
    fn take(&mut self, name: &str) -> String {
        let numbered = (2..).map(|number| format!("{name}-{number}"));
        let mut all = std::iter::once(name.to_owned()).chain(numbered);
        all.find(|name| self.0.insert(name.to_ascii_lowercase())).unwrap_or_default()
    }
}

/// The names of a search's trials in trial order, each computed once.
#[derive(Debug, Default)]
pub struct TrialNames {
    names: Vec<String>,
    taken: Taken,
}

impl TrialNames {
    /// Returns the name of a trial. Trials whose settings look alike are numbered in trial order.
    pub(super) fn name(&mut self, spec: &RunSpec, search: &Search, trial: TrialId, given: &str) -> String {
        if spec.names == Notation::BatchAndRate {
            return given.to_owned();
        }
        let names = spec.searched_differences();
        for view in search.trials().skip(self.names.len()).take_while(|view| view.trial.0 <= trial.0) {
            let one = spec.search.configuration(view.trial, view.settings, &spec.training, &spec.adapters);
            let one = one.and_then(|one| spec.settings_of(&one));
            // Invalid settings are refused when the task is created.
            let name = one.map_or_else(|_| format!("trial{}", view.trial.0), |one| name_of(&one, &names));
            self.names.push(self.taken.take(&name));
        }
        self.names.get(trial.0).cloned().unwrap_or_else(|| given.to_owned())
    }
}

impl RunSpec {
    /// Returns the settings of a configuration by name, as its report will list them.
    fn settings_of(&self, one: &Configuration) -> Result<Settings, Usage> {
        let train = self.training.of(one, self.model_of(one).seed, usize::MAX)?;
        let mut settings = settings(&self.describe(one, &train));
        for (name, value) in &one.changes {
            let value = serde_json::to_value(value).map_err(Usage::from_error)?;
            settings.entry(name.clone()).or_insert(value);
        }
        // A warmup that is a fraction of the length is named as given.
        if let Some(warmup) = one.changes.get("warmup") {
            settings.insert("warmup".to_owned(), serde_json::to_value(warmup).map_err(Usage::from_error)?);
        }
        if !self.models.is_empty() {
            // These belong to the model, and some of them are unknown before it is read.
            let own = |name: &&str| one.changes.contains_key(*name) || self.grid.has(name);
            let of_model =
                ["data", "context", "dropout", "dtype", "pack"].into_iter().filter(|name| !own(name));
            of_model.for_each(|name| drop(settings.remove(name)));
            settings.insert("model".to_owned(), self.model_names()[one.model].clone().into());
        }
        Ok(settings)
    }

    /// Names the configurations of a grid by the settings in which they differ.
    pub(super) fn named(&self, grid: Vec<Configuration>) -> Result<Vec<Configuration>, Usage> {
        if self.names == Notation::BatchAndRate {
            return Ok(grid);
        }
        let all = grid.iter().map(|one| self.settings_of(one)).collect::<Result<Vec<_>, _>>()?;
        let (names, mut taken) = (named_by(&all), Taken::default());
        let named = |(one, settings): (Configuration, &Settings)| Configuration {
            name: taken.take(&name_of(settings, &names)),
            ..one
        };
        Ok(grid.into_iter().zip(&all).map(named).collect())
    }

    /// Returns the name of a fork: the settings in which the tasks of the run differ, and those in which the fork differs from its
    /// parent.
    pub(crate) fn name_of_fork(
        &self,
        tasks: &[&Configuration],
        parent: &str,
        fork: &Configuration,
    ) -> Result<String, Usage> {
        let own = self.settings_of(fork)?;
        let mut names = BTreeSet::new();
        let all = tasks.iter().map(|task| self.settings_of(task));
        let all = all.collect::<Result<Vec<_>, _>>()?;
        names.extend(named_by(&all));
        let parent = tasks.iter().zip(&all).find(|(task, _)| task.name == parent);
        let changed = |(name, value): &(&String, &Value)| {
            parent.is_some_and(|(_, parent)| parent.get(*name).is_none_or(|before| before != *value))
        };
        // An optimizer's constants follow from the optimizer.
        let constant = |name: &String| name.contains('.');
        names.extend(own.iter().filter(changed).map(|(name, _)| name.clone()).filter(|name| !constant(name)));
        let mut names: Vec<String> = names.into_iter().collect();
        names.sort_by_key(|name| place(name));
        Ok(name_of(&own, &names))
    }

    /// Returns a unique name for each model: its own, or the name of its data if models share a name.
    fn model_names(&self) -> Vec<String> {
        // In a grid of contexts, each model follows itself with other contexts, which name its tasks.
        let contexts = self.grid.contexts();
        let of = |text: fn(&crate::settings::ModelSettings) -> String| -> Vec<String> {
            let models = self.all_models().step_by(contexts);
            models.map(|model| safe(&text(model)).chars().take(LONGEST_PART).collect()).collect()
        };
        let differ = |names: &[String]| names.iter().collect::<BTreeSet<_>>().len() == names.len();
        let models = of(|model| model.short_name());
        let data = of(|model| crate::run_dir::differences::last_part(model.text()));
        let mut taken = Taken::default();
        let chosen = match differ(&models) {
            true => models,
            false if differ(&data) => data,
            false => models.iter().zip(&data).map(|(model, data)| format!("{model}-{data}")).collect(),
        };
        chosen.iter().flat_map(|name| vec![taken.take(name); contexts]).collect()
    }

    /// Returns the settings in which the trials of the search can differ: those sampled from more than one value, and those of
    /// given trials.
    fn searched_differences(&self) -> Vec<String> {
        let drawn: BTreeMap<String, Parameter> = self.search.parameters().into_iter().collect();
        let given = self.search.trial.iter().flat_map(|trial| trial.iter().map(|(name, _)| name.to_owned()));
        let all: BTreeSet<String> = drawn.keys().cloned().chain(given).collect();
        let differs = |name: &String| {
            let trials = self.search.trial.iter();
            let given = trials.map(|trial| trial.get(name).map_or_else(String::new, ToString::to_string));
            let drawn = drawn.get(name).into_iter().flat_map(values_of);
            given.chain(drawn).collect::<BTreeSet<_>>().len() > 1
        };
        let mut names: Vec<String> = all.into_iter().filter(differs).collect();
        names.sort_by_key(|name| place(name));
        if names.is_empty() { ALONE[..2].iter().map(|name| (*name).to_owned()).collect() } else { names }
    }
}

/// Returns the settings in which the tasks differ, or those that name a single task.
fn named_by(tasks: &[Settings]) -> Vec<String> {
    let names = Differences::between(tasks.to_vec()).names;
    let has = |name: &&str| tasks.iter().any(|task| task.get(*name).is_some_and(|value| !value.is_null()));
    let alone = || ALONE.into_iter().filter(has).map(str::to_owned).collect();
    if names.is_empty() { alone() } else { names }
}

/// Returns possible values of a parameter: all values of a list, and the bounds of a range.
fn values_of(parameter: &Parameter) -> Vec<String> {
    let ends = |low: String, high: String| vec![low, high];
    let mut values = match &parameter.range {
        Range::Choice(values) => values.iter().map(ToString::to_string).collect(),
        Range::Uniform { low, high } | Range::Log { low, high } => ends(low.to_string(), high.to_string()),
        Range::Int { low, high } => ends(low.to_string(), high.to_string()),
    };
    // A trial that does not meet the condition has the run's value.
    values.extend((!parameter.when.is_empty()).then(String::new));
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::flags::Texts;

    fn spec(training: &str) -> RunSpec {
        let text = format!(
            "format = 1\ncommand = 'select'\nnames = 'differences'\n[model]\n[training]\n{training}\n[devices]\n"
        );
        toml::from_str(&text).unwrap()
    }

    fn forked(
        spec: &RunSpec,
        tasks: &mut Vec<Configuration>,
        parent: &str,
        changes: &[(&str, &str)],
    ) -> String {
        let texts: Texts =
            changes.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        let of = tasks.iter().find(|task| task.name == parent).unwrap();
        let fork = of.forked("unnamed", &texts).unwrap();
        let name = spec.name_of_fork(&tasks.iter().collect::<Vec<_>>(), parent, &fork).unwrap();
        tasks.push(Configuration { name: name.clone(), ..fork });
        name
    }

    #[test]
    fn a_fork_is_named_by_what_differs_and_by_what_it_changes() {
        let spec = spec("batch = [4]\nlr = [0.001, 0.0003]\nepochs = 2");
        let mut tasks = spec.grid().unwrap();
        let mut forked = |parent: &str, changes: &[(&str, &str)]| forked(&spec, &mut tasks, parent, changes);
        assert_eq!(forked("lr1e-3", &[("lr", "1e-4")]), "lr1e-4");
        assert_eq!(forked("lr1e-3", &[("weight-decay", "0.1")]), "lr1e-3-wd0.1");
        // The weight decay differs between the tasks.
        assert_eq!(forked("lr1e-4", &[("steps", "40")]), "lr1e-4-wd0.01-steps40");
        assert_eq!(forked("lr3e-4", &[]), "lr3e-4-wd0.01-ep2");
    }

    #[test]
    fn the_fork_of_a_task_that_is_alone_shows_what_it_changes() {
        let spec = spec("batch = [4]\nlr = [0.001]");
        let mut tasks = spec.grid().unwrap();
        let name = forked(&spec, &mut tasks, "b4-lr1e-3", &[("clip", "0.5")]);
        assert_eq!(name, "b4-lr1e-3-clip0.5");
    }

    #[test]
    fn names_can_be_typed_and_are_told_apart() {
        let texts = ["my model (2)", "..", "-x-", &"long".repeat(40)];
        let safe = texts.map(safe);
        assert_eq!(safe[..3], ["my_model__2_", "task", "x"]);
        assert_eq!(safe[3].len(), LONGEST);
        let mut taken = Taken::default();
        assert_eq!(["a", "A", "b", "a"].map(|name| taken.take(name)), ["a", "A-2", "b", "a-3"]);
    }

    #[test]
    fn settings_are_switched_on_and_off() {
        let parts = [
            ("clip", Value::Null, "noclip"),
            ("lora", Value::Null, "nolora"),
            ("no_decay_norms", true.into(), "no-decay-norms"),
            ("no_decay_norms", false.into(), "decay-norms"),
            ("shuffle", false.into(), "no-shuffle"),
            ("warmup", 0.1.into(), "warmup0.1"),
            ("model", "/a/b/gpt2.json".into(), "gpt2"),
        ];
        for (name, value, expected) in parts {
            assert_eq!(part(name, &value), expected);
        }
    }
}
