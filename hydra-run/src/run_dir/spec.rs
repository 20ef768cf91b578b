//! The spec of a run: every resolved flag, saved as `spec.toml` in the run directory, from which the run can be repeated.

use crate::machine::Machine;
use crate::run_dir::directory::{CONTROL, PLANS, SPEC};
use crate::run_dir::inputs::Inputs;
use crate::run_dir::run_command::{RunCommand, read_commands};
use crate::settings::TaskName;
use crate::settings::flags::{self, GivenFlags};
use crate::settings::{
    AdapterSettings, CheckpointArg, CheckpointSettings, Configuration, DeviceSettings, Grid, ModelSettings,
    PartSettings, RunSettings, SaveSettings, SearchSettings, TrainingSettings, find_base,
};
use crate::terminal::Usage;
use anyhow::{Context, Result, ensure};
use hydra_core::TrainSpec;
use hydra_models::objective::PreferenceLoss;
use serde::{Deserialize, Serialize};
use std::path::Path;
use toml::Table;

/// The version of the format of `spec.toml`.
const SPEC_FORMAT: u32 = 1;

/// The command that made a spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommandName {
    /// `hydra select`.
    Select,
    /// `hydra train`.
    Train,
}

impl CommandName {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Select => "select",
            Self::Train => "train",
        }
    }
}

/// How the tasks of a run are named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Notation {
    /// By batch size, learning rate, LoRA rank and trial number: the notation of earlier versions.
    #[default]
    BatchAndRate,
    /// By the settings in which the tasks of the run differ.
    Differences,
}

/// A run, with every flag resolved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSpec {
    pub(crate) format: u32,
    pub(crate) command: CommandName,
    #[serde(default)]
    pub(crate) checkpoint_every: CheckpointArg,
    /// How its tasks are named. A resumed run keeps its notation.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) names: Notation,
    /// The model and its data.
    pub model: ModelSettings,
    /// The second and further models.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) models: Vec<ModelSettings>,
    /// The settings of training that all tasks have.
    pub training: TrainingSettings,
    #[serde(default = "flags::defaults", skip_serializing_if = "AdapterSettings::is_none")]
    pub(crate) adapters: AdapterSettings,
    /// Settings with a list of values.
    #[serde(default, skip_serializing_if = "Grid::is_none")]
    pub(crate) grid: Grid,
    /// The search, if the run is one.
    #[serde(default = "flags::defaults", skip_serializing_if = "SearchSettings::is_none")]
    pub search: SearchSettings,
    #[serde(default = "flags::defaults", skip_serializing_if = "PartSettings::is_none")]
    pub(crate) tasks: PartSettings,
    /// The devices and their memory.
    pub devices: DeviceSettings,
    /// How trained models are written.
    #[serde(default = "flags::defaults", skip_serializing_if = "SaveSettings::is_none")]
    pub save: SaveSettings,
    #[serde(default)]
    pub(crate) inputs: Option<Inputs>,
    /// Recorded run-control commands, which have a file of their own.
    #[serde(skip)]
    pub(crate) run_commands: Vec<RunCommand>,
}

impl RunSpec {
    /// Returns the spec of a new run with these settings.
    pub fn new(command: CommandName, settings: RunSettings, machine: &Machine) -> Result<Self> {
        let (format, checkpoint_every) = (SPEC_FORMAT, CheckpointArg::default());
        let devices = settings.devices.resolve(machine)?;
        let search = settings.search.resolve()?;
        let grid = Grid::new(settings.grid)?;
        grid.check_lengths(&settings.training)?;
        let (mut models, mut adapters) = (settings.model.each()?, settings.adapters);
        if let [model] = models.as_mut_slice() {
            find_base(model, &mut adapters.adapter)?;
        }
        let mut models =
            grid.models(models).into_iter().map(ModelSettings::resolve).collect::<Result<Vec<_>>>()?;
        let model = models.remove(0);
        let (training, adapters) = (settings.training.resolve(), adapters.resolve()?);
        let mut spec = Self {
            format,
            command,
            checkpoint_every,
            names: Notation::Differences,
            model,
            models,
            training,
            adapters,
            grid,
            search,
            tasks: flags::defaults(),
            devices,
            save: settings.save,
            inputs: None,
            run_commands: Vec::new(),
        };
        spec.check()?;
        if let Some(of) = spec.search.spec(&spec.training)? {
            let milestones = spec.search()?.map(|search| search.milestones()).unwrap_or_default();
            // Every trial is evaluated at its end anyway.
            spec.training.eval_at.extend(milestones.into_iter().filter(|at| *at < of.steps));
            spec.training.eval_at.sort_unstable();
            spec.training.eval_at.dedup();
        }
        Ok(spec)
    }

    /// Reads a spec written by [`to_toml`](Self::to_toml), possibly edited by a user, to run it on this machine.
    pub fn load(file: &Path, machine: &Machine) -> Result<Self> {
        let mut spec = Self::read(file)?;
        spec.devices = spec.devices.resolve(machine).with_context(|| cannot_be_run(file))?;
        Ok(spec)
    }

    /// Returns the spec of the run to resume in `dir`, with its plans, and with the device settings that are `given` now.
    pub fn resume(dir: &Path, given: &GivenFlags<DeviceSettings>, machine: &Machine) -> Result<Self> {
        let spec = Self::read(&dir.join(SPEC))?;
        let run_commands = read_commands(&dir.join(CONTROL))?;
        Ok(Self { devices: spec.devices.resumed(given, &dir.join(PLANS), machine)?, run_commands, ..spec })
    }

    /// Returns this spec with another checkpoint interval, if one is given.
    pub fn checkpointed(self, checkpoints: CheckpointSettings) -> Self {
        Self { checkpoint_every: checkpoints.checkpoint_every.unwrap_or(self.checkpoint_every), ..self }
    }

    /// Returns this spec restricted to a part of its tasks.
    pub fn of_part(self, tasks: PartSettings) -> Result<Self, Usage> {
        let spec = Self { tasks, ..self };
        spec.check_part().map(|()| spec)
    }

    /// Fails on a part of a search, and on a part without tasks.
    fn check_part(&self) -> Result<(), Usage> {
        if !self.search.is_none() && !self.tasks.is_none() {
            return Err(Usage::new(
                "--part and --only divide a grid, whose tasks are independent; a search compares its trials during training: \
                omit them, or give a grid",
            ));
        }
        self.grid().map(drop)
    }

    /// Reads the spec in a run directory.
    pub(crate) fn in_dir(dir: &Path) -> Result<Self> {
        Self::read(&dir.join(SPEC))
    }

    fn read(file: &Path) -> Result<Self> {
        let shown = file.display();
        let text = std::fs::read_to_string(file);
        let text = text.with_context(|| format!("the spec `{shown}` could not be read"))?;
        let no_spec = || format!("`{shown}` is not a spec: pass the spec.toml of a run directory");
        let table: Table = toml::from_str(&text).with_context(no_spec)?;
        check_values(&table).with_context(|| cannot_be_run(file))?;
        let spec: Self = toml::from_str(&text).with_context(no_spec)?;
        spec.check().with_context(|| cannot_be_run(file))?;
        Ok(spec)
    }

    /// Returns the text of `spec.toml`.
    ///
    /// # Errors
    /// If a setting cannot be written as TOML.
    pub fn to_toml(&self) -> Result<String> {
        let body = toml::to_string(self).context("the spec could not be written as TOML")?;
        Ok(format!(
            "# Repeat this run: hydra select --spec spec.toml --out DIR\n\
            # Continue it after an interruption: hydra resume DIR\n\n{body}"
        ))
    }

    fn check(&self) -> Result<(), Usage> {
        self.devices.check_dtype(self.model.dtype)?;
        self.all_models().try_for_each(|model| self.adapters.check(model))?;
        self.check_several()?;
        self.training.check_alone(|name| self.search.has(name) || self.grid.has(name))?;
        self.check_lists()?;
        if self.search.is_none() {
            let grid = self.whole_grid()?;
            self.all_models().try_for_each(|model| self.training.check_grid(&grid, model.seed))?;
        }
        self.check_part()
    }

    /// Fails on lists of values that would have no effect.
    fn check_lists(&self) -> Result<(), Usage> {
        self.grid.check_contexts(1 + self.models.len())?;
        if let Some(flag) = self.search.idle() {
            return Err(Usage::new(format!(
                "{flag} applies to a search, and a grid trains every combination: add --search, or omit {flag}"
            )));
        }
        let mut of_adapters = ["lora_alpha", "lora_dropout", "lora_targets"].into_iter();
        if of_adapters.any(|name| self.grid.has(name)) && self.adapters.lora.is_empty() {
            return Err(Usage::new(
                "lists of --lora-alpha, --lora-dropout and --lora-targets apply to adapters: add --lora",
            ));
        }
        let has = |name: &str| self.grid.has(name) || self.search.has(name);
        let prefers = |model: &ModelSettings| model.task == Some(TaskName::Preference);
        let simpo = |model: &ModelSettings| prefers(model) && model.loss == Some(PreferenceLoss::Simpo);
        if has("beta") && !self.all_models().all(prefers) {
            return Err(Usage::new("lists of --beta apply to preferences: pass --task preference too"));
        }
        if has("gamma") && !self.all_models().all(simpo) {
            return Err(Usage::new("lists of --gamma apply to the loss simpo: pass --loss simpo too"));
        }
        if !self.grid.is_none() && !self.search.is_none() {
            return Err(Usage::new(
                "a search samples from the lists in its own table: move the lists of `grid` to `sample` in `search`",
            ));
        }
        Ok(())
    }

    /// Returns the configurations with which the run starts, in submission order.
    pub fn grid(&self) -> Result<Vec<Configuration>, Usage> {
        if let Some(search) = self.search()? {
            return Ok(self.planned(&search)?.into_iter().map(|task| task.configuration).collect());
        }
        self.tasks.of(self.whole_grid()?, &self.training)
    }

    /// Returns all configurations of the grid, also those outside the run's part.
    pub(crate) fn whole_grid(&self) -> Result<Vec<Configuration>, Usage> {
        let grid = self.grid.of(&self.training, &self.adapters)?;
        if self.models.is_empty() {
            return self.named(grid);
        }
        let of_model = |(model, prefix): (usize, String)| {
            grid.iter().map(move |one| Configuration {
                name: format!("{prefix}-{}", one.name),
                model,
                ..one.clone()
            })
        };
        self.named(self.prefixes().into_iter().enumerate().flat_map(of_model).collect())
    }

    /// Returns the models in task order.
    pub(crate) fn all_models(&self) -> impl Iterator<Item = &ModelSettings> {
        std::iter::once(&self.model).chain(&self.models)
    }

    /// Returns the model of a configuration.
    pub(crate) fn model_of(&self, one: &Configuration) -> &ModelSettings {
        one.model.checked_sub(1).and_then(|further| self.models.get(further)).unwrap_or(&self.model)
    }

    /// Returns a unique name for each model.
    fn prefixes(&self) -> Vec<String> {
        let mut prefixes: Vec<String> = Vec::new();
        for model in self.all_models() {
            let name = model.short_name();
            let numbered = (2..).map(|number| format!("{name}-{number}"));
            let free = std::iter::once(name.clone()).chain(numbered).find(|name| !prefixes.contains(name));
            prefixes.extend(free);
        }
        prefixes
    }

    /// Fails on settings that allow only one model, if there are several.
    fn check_several(&self) -> Result<(), Usage> {
        let alone = [
            ("a search", !self.search.is_none()),
            ("--cuts", self.devices.cuts.is_some()),
            ("--adapter", self.adapters.adapter.is_some()),
            ("hydra train", self.command == CommandName::Train),
        ];
        if let Some((what, _)) = alone.into_iter().find(|(_, asked)| *asked && !self.models.is_empty()) {
            let count = 1 + self.models.len();
            let named = if self.grid.has("context") { "--model and --context name" } else { "--model names" };
            return Err(Usage::new(format!("{what} requires a single model, and {named} {count}")));
        }
        let dtype = self.model.dtype;
        match self.models.iter().find(|model| model.dtype != dtype) {
            Some(other) => Err(Usage::new(format!(
                "all models of a run must have the same dtype, got {dtype} and {}: train them in separate runs",
                other.dtype
            ))),
            None => Ok(()),
        }
    }

    pub(crate) fn describe(&self, one: &Configuration, spec: &TrainSpec) -> serde_json::Value {
        let model = self.model_of(one);
        let mut config = serde_json::json!({
            "model": model.model, "data": model.data, "context": model.context,
            "dropout": model.dropout, "dtype": model.dtype, "batch": spec.batch,
            "lr": spec.optimizer.lr(), "training": spec,
        });
        if model.pack {
            config["pack"] = true.into();
        }
        if let Some(frozen) = model.frozen_dtype {
            config["frozen_dtype"] = frozen.to_string().into();
        }
        if let Some(base) = self.adapters.base {
            config["base"] = serde_json::to_value(base).unwrap_or_default();
        }
        if !model.columns.is_empty() {
            config["columns"] = serde_json::to_value(&model.columns).unwrap_or_default();
        }
        if let Some(built_in) = &model.tokenizer {
            config["tokenizer"] = serde_json::to_value(built_in).unwrap_or_default();
        }
        let kinds = [
            ("task", serde_json::to_value(model.task)),
            ("problem_type", serde_json::to_value(model.problem_type)),
            ("loss", serde_json::to_value(model.loss)),
            ("beta", serde_json::to_value(model.beta)),
            ("gamma", serde_json::to_value(model.gamma)),
        ];
        for (setting, kind) in kinds.into_iter().filter_map(|(setting, kind)| Some((setting, kind.ok()?))) {
            if !kind.is_null() {
                config[setting] = kind;
            }
        }
        for (setting, value) in one.of_model() {
            config[setting] = serde_json::to_value(value).unwrap_or_default();
        }
        one.lora.iter().for_each(|rank| config["lora"] = (*rank).into());
        self.training.eval_limit.iter().for_each(|blocks| config["eval_limit"] = (*blocks).into());
        config
    }
}

fn is_default(names: &Notation) -> bool {
    *names == Notation::default()
}

fn cannot_be_run(file: &Path) -> String {
    format!("the spec `{}` cannot be run", file.display())
}

/// Fails on another format version, and on values that the flags would not accept.
fn check_values(spec: &Table) -> Result<()> {
    let format = spec.get("format").and_then(toml::Value::as_integer).unwrap_or(i64::from(SPEC_FORMAT));
    ensure!(
        format == i64::from(SPEC_FORMAT),
        "it has format {format}; this version of hydra reads format {SPEC_FORMAT}"
    );
    let group = |name: &str| spec.get(name).and_then(toml::Value::as_table);
    let further = spec.get("models").and_then(toml::Value::as_array).into_iter().flatten();
    let models = group("model").into_iter().chain(further.filter_map(toml::Value::as_table));
    models.into_iter().try_for_each(flags::check::<ModelSettings>)?;
    group("training").map_or(Ok(()), flags::check::<TrainingSettings>)?;
    group("adapters").map_or(Ok(()), flags::check::<AdapterSettings>)?;
    group("grid").map_or(Ok(()), |lists| Grid::try_from(lists.clone()).map(drop))?;
    group("search").map_or(Ok(()), flags::check::<SearchSettings>)?;
    group("save").map_or(Ok(()), flags::check::<SaveSettings>)?;
    group("tasks").map_or(Ok(()), flags::check::<PartSettings>)?;
    Ok(group("devices").map_or(Ok(()), flags::check::<DeviceSettings>)?)
}
