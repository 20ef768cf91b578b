//! Builds the tasks of a run from its configurations, at its start and while it runs.

use crate::control::Control;
use crate::run_dir::{FileBytes, Origin, PlannedTask, RunDir, RunSpec, TaskFiles};
use crate::session::data::Data;
use crate::session::model::{Model, Trained};
use crate::session::samples::Samples;
use crate::settings::{Configuration, SettingGroup, TEXT_METRICS};
use crate::terminal::Usage;
use anyhow::Result;
use hydra_core::optimizer::MomentEncoding;
use hydra_core::{Dataset, TrainSpec};
use hydra_engine::{Admission, AdmittedTask, Checkpoint, TrainTask};
use hydra_models::data::Cut;
use hydra_models::weights::SavedType;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::sync::Arc;

/// Models in addition to the best ones that may exist until they are removed: one written, and one being written.
const OVERTAKEN: usize = 2;

/// The key of a model's chains: the LoRA rank, and the model settings of a configuration.
type ChainKey = (Option<usize>, String);

/// The key of a task's memory and time. Tasks with the same key share a plan.
type Shape = (usize, usize, ChainKey, Vec<MomentEncoding>, bool);

/// A model with its data and its chains. Each chain is measured once.
struct ModelTasks {
    model: Model,
    trained: BTreeMap<ChainKey, Trained>,
    train: Arc<dyn Dataset>,
    evaluated: [Option<Arc<dyn Dataset>>; 2],
    /// The texts that are generated at evaluations.
    samples: Option<Samples>,
    stats: DataStats,
}

/// Statistics of a model's training data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataStats {
    /// Maximum tokens of an item; `None` for images.
    pub(crate) context: Option<usize>,
    /// Tokens lost by truncating examples to the context.
    pub(crate) cut: Cut,
}

impl DataStats {
    fn from_data(data: &Data) -> Self {
        Self { context: data.context, cut: data.train.cut_by(data.context.unwrap_or(usize::MAX)) }
    }
}

/// Builds tasks from shared models, data and chains.
pub(crate) struct TaskMaker {
    /// Models in spec order.
    models: Vec<ModelTasks>,
    /// Paths in the run directory, if there is one.
    files: Option<TaskFiles>,
    resumed: bool,
    /// The name of one task of each shape.
    shapes: BTreeMap<Shape, String>,
    /// The embedding program, if any, which may stop each task.
    control: Option<Control>,
    /// The largest key-value cache of a task.
    cache_bytes: u64,
}

impl TaskMaker {
    /// Returns the maker for a run of these models with their data.
    pub(crate) fn new(
        models: Vec<(Model, Data)>,
        spec: &RunSpec,
        dir: Option<&RunDir>,
        (control, cache_bytes): (Option<Control>, u64),
    ) -> Result<Self> {
        let of = |(model, data): (Model, Data)| -> Result<ModelTasks> {
            let evaluated = data.evaluated(spec.training.eval_limit);
            let own = control.as_ref().and_then(Control::metric);
            Ok(ModelTasks {
                samples: Samples::new(&model, &spec.training, evaluated[0].as_ref(), (cache_bytes, own))?,
                model,
                trained: BTreeMap::new(),
                stats: DataStats::from_data(&data),
                evaluated,
                train: data.train,
            })
        };
        Ok(Self {
            models: models.into_iter().map(of).collect::<Result<_>>()?,
            files: dir.map(RunDir::task_files).transpose()?,
            resumed: dir.is_some_and(|dir| dir.resumed),
            shapes: BTreeMap::new(),
            control: control.clone(),
            cache_bytes,
        })
    }

    /// Makes tasks for planning only from now on, without files.
    pub(crate) fn plan_only(&mut self) {
        (self.files, self.resumed) = (None, false);
    }

    /// Changes the models of tasks made from now on.
    pub(crate) fn change_models(&mut self, change: impl Fn(&mut Model) -> Result<()>) -> Result<()> {
        self.shapes.clear();
        self.models.iter_mut().try_for_each(|of| {
            of.trained.clear();
            change(&mut of.model)
        })
    }

    /// Reads the data again with the settings of a spec.
    pub(crate) fn read_again(&mut self, spec: &RunSpec) -> Result<()> {
        for (of, settings) in self.models.iter_mut().zip(spec.all_models()) {
            of.model.read_as(settings)?;
            let data = of.model.data(settings.text())?;
            of.stats = DataStats::from_data(&data);
            of.evaluated = data.evaluated(spec.training.eval_limit);
            let own = self.control.as_ref().and_then(Control::metric);
            let validation = of.evaluated[0].as_ref();
            of.samples = Samples::new(&of.model, &spec.training, validation, (self.cache_bytes, own))?;
            of.train = data.train;
        }
        Ok(())
    }

    /// Returns the statistics of each model's training data.
    pub(crate) fn read(&self) -> impl Iterator<Item = DataStats> {
        self.models.iter().map(|of| of.stats)
    }

    /// Returns the task of a configuration for the start of the run. Builds its chain if necessary.
    pub(crate) fn first(&mut self, spec: &RunSpec, planned: &PlannedTask) -> Result<TrainTask> {
        let one = &planned.configuration;
        let of = &mut self.models[one.model];
        if let Entry::Vacant(new) = of.trained.entry(chain_key(one)) {
            if let Some(dropout) = one.number("dropout") {
                of.model.set_dropout(dropout);
            }
            of.model.set_preference(one.number("beta"), one.number("gamma"));
            new.insert(of.model.trained(
                &one.changed(&spec.adapters, SettingGroup::Adapters)?,
                one.lora,
                spec.save.save_dtype,
            )?);
        }
        let train = self.training(spec, one)?;
        self.shapes.entry(shape(one, &train)).or_insert_with(|| one.name.clone());
        let task = self.task(spec, planned)?;
        let Some(origin) = planned.origin.as_ref().filter(|_| !self.has_checkpoint(&one.name)) else {
            return Ok(task);
        };
        // The state exists, since the task would wait for it otherwise.
        let state = Checkpoint::open(self.state_file(&origin.task, origin.at)?)?;
        Ok(if origin.weights_only { task.weights_from(state) } else { task.fork_from(state) })
    }

    /// Returns a task with the shape of a configuration, to be measured and not trained, or `None` if the run has this shape.
    pub(crate) fn shape(&mut self, spec: &RunSpec, one: Configuration) -> Result<Option<TrainTask>> {
        match self.like(&one, &self.training(spec, &one)?) {
            Some(_) => Ok(None),
            None => self.first(spec, &one.into()).map(Some),
        }
    }

    /// Returns the name of a measured task with the same plan as this configuration, if there is one.
    pub(crate) fn like(&self, one: &Configuration, train: &TrainSpec) -> Option<String> {
        self.shapes.get(&shape(one, train)).cloned()
    }

    /// Returns the training specification of a configuration.
    pub(crate) fn training(&self, spec: &RunSpec, one: &Configuration) -> Result<TrainSpec> {
        let items = self.models[one.model].train.len();
        let train = spec.training.of(one, spec.model_of(one).seed, items)?;
        let checked = train.check_evaluations(items);
        checked.map_err(|error| Usage::new(format!("{error}: pass a larger --eval-every")))?;
        Ok(train)
    }

    /// Returns true if tasks generate texts at their evaluations.
    pub(crate) fn generates(&self) -> bool {
        self.models.iter().any(|of| of.samples.is_some())
    }

    /// Returns the notes on texts that are generated, without duplicates.
    pub(crate) fn notes_of_samples(&self) -> Vec<&String> {
        let mut notes: Vec<&String> = Vec::new();
        for note in self.models.iter().flat_map(|of| &of.samples).flat_map(Samples::notes) {
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
        notes
    }

    /// Returns the task of a configuration whose chain has been built, without another task's initial state.
    pub(crate) fn task(&mut self, spec: &RunSpec, planned: &PlannedTask) -> Result<TrainTask> {
        let one = &planned.configuration;
        let train = self.training(spec, one)?;
        let config = described(spec, planned, &train);
        let ModelTasks { model, trained, train: data, evaluated, samples, .. } = &mut self.models[one.model];
        let trained = trained.get(&chain_key(one));
        let trained =
            trained.ok_or_else(|| anyhow::anyhow!("no measured task has the shape of `{}`", one.name))?;
        let metric = train.metric.clone();
        let mut task = TrainTask::new(&one.name, trained.chain.clone(), data.clone(), train).config(config);
        if let Some(samples) = samples {
            let (chain, data) =
                samples.of_task(model, &one.changed(&spec.adapters, SettingGroup::Adapters)?, one.lora)?;
            task = task.rounds(chain, data);
        }
        metric.iter().try_for_each(|name| task.metric(name).map(drop)).map_err(|error| {
            let of_texts = metric.as_deref().filter(|name| TEXT_METRICS.contains(name));
            match of_texts {
                Some(name) => Usage::new(format!(
                    "this run generates no answers for {name}: start another one with --metric {name}"
                )),
                None if model.is_language_model_alone() => Usage::new(format!(
                    "{error}, and for rows of prompts and answers {}",
                    TEXT_METRICS.join(", ")
                )),
                None => Usage::from_error(error),
            }
        })?;
        task = task.initial_validation(spec.training.initial_validation);
        if let Some(control) = &self.control {
            task = task.stop_flag(control.task(&one.name));
        }
        let [validation, test] = evaluated;
        if let Some(validation) = validation {
            task = task.validation(validation.clone());
        }
        if let Some(test) = test {
            task = task.test(test.clone());
        }
        if let Some(cuts) = &spec.devices.cuts {
            task = task.cuts(cuts.clone());
        }
        if let Some(microbatch_group) = spec.devices.microbatch_group {
            task = task.microbatch_group(microbatch_group);
        }
        if let Some(most) = spec.devices.replicas {
            task = task.most_devices(most);
        }
        if let Some(until) = planned.until {
            task = task.until(until);
        }
        if let Some(ends) = planned.ends {
            task = task.ends_at(ends);
        }
        let trained = &self.models[one.model].trained[&chain_key(one)];
        self.with_files(task, &one.name, trained, spec)
    }

    /// Adds the task's output files in the run directory, and the checkpoint to resume from.
    fn with_files(
        &self,
        task: TrainTask,
        name: &str,
        trained: &Trained,
        spec: &RunSpec,
    ) -> Result<TrainTask> {
        let Some(files) = &self.files else { return Ok(task) };
        let mut task = task.write_to(trained.writer.clone(), files.model_dir(name));
        let resumed = self.checkpoint(name)?;
        // An existing checkpoint must finally record that the task is finished.
        if spec.checkpoint_every.0.is_some() || resumed.is_some() {
            task = task.checkpoint_to(files.checkpoint_file(name));
        }
        Ok(match resumed {
            Some(checkpoint) => task.resume_from(checkpoint),
            None => task,
        })
    }

    /// Returns the checkpoint of a task, if the run is resumed and the checkpoint exists.
    pub(crate) fn checkpoint(&self, name: &str) -> Result<Option<Checkpoint>> {
        let file = self.files.as_ref().map(|files| files.checkpoint_file(name));
        let there = file.filter(|file| self.resumed && file.exists());
        Ok(there.map(Checkpoint::open).transpose()?)
    }

    /// Returns the peak disk usage: a checkpoint of each task, the next checkpoint of one task, and the models.
    pub(crate) fn file_bytes(
        &self,
        admission: &Admission,
        spec: &RunSpec,
        planned: &[PlannedTask],
    ) -> FileBytes {
        let unfinished = || admission.tasks.iter().filter(|task| task.storage.master_bytes > 0);
        let written = spec.checkpoint_every.0.is_some();
        let checkpoints = || unfinished().map(|task| task.storage.master_bytes).filter(|_| written);
        let model = |task: &AdmittedTask| {
            let planned = planned.iter().find(|one| one.configuration.name == task.name);
            planned.map_or(0, |one| self.model_bytes(&one.configuration))
        };
        let mut models: Vec<u64> = unfinished().map(model).collect();
        models.sort_unstable_by(|a, b| b.cmp(a));
        let kept = spec.save.keep_best.map_or(models.len(), |keep| keep.saturating_add(OVERTAKEN));
        let models = models.into_iter().take(kept).sum();
        FileBytes { checkpoints: checkpoints().sum(), next: checkpoints().max().unwrap_or(0), models }
    }

    /// Returns the bytes of a task's model, or 0 if its chain has not been built.
    fn model_bytes(&self, one: &Configuration) -> u64 {
        self.models[one.model].trained.get(&chain_key(one)).map_or(0, |trained| trained.model_bytes)
    }

    /// Returns the notes on models written with reduced precision.
    pub(crate) fn notes_of_types(&self, spec: &RunSpec) -> Vec<String> {
        let rounded =
            |of: &ModelTasks| of.trained.values().map(|one| one.saved).find(|saved| *saved != SavedType::F32);
        let mut notes: Vec<String> = Vec::new();
        for (of, model) in self.models.iter().zip(spec.all_models()) {
            let Some(saved) = rounded(of) else { continue };
            let why = match spec.save.save_dtype {
                Some(_) => "as --save-dtype requests".to_owned(),
                None => format!(
                    "as the files of `{}` are",
                    spec.adapters.adapter.as_deref().unwrap_or(model.name())
                ),
            };
            let note = format!(
                "note: models are written in {saved}, {why}: the loss of a written model may differ from the reported one in \
                its last digits, because training uses f32{}",
                if spec.save.save_dtype.is_some() { "" } else { "; --save-dtype f32 keeps full precision" }
            );
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
        notes
    }

    /// Returns the total minibatches of a configuration.
    pub(crate) fn steps(&self, spec: &RunSpec, one: &Configuration) -> Result<usize> {
        Ok(self.training(spec, one)?.steps(self.models[one.model].train.len()))
    }

    fn has_checkpoint(&self, name: &str) -> bool {
        let file = self.files.as_ref().map(|files| files.checkpoint_file(name));
        self.resumed && file.is_some_and(|file| file.exists())
    }

    /// Returns true if a task can start now: from the beginning, its own checkpoint, or its parent's state.
    pub(crate) fn can_start(&self, planned: &PlannedTask) -> Result<bool> {
        let Some((parent, at)) = planned.parent_state() else { return Ok(true) };
        Ok(self.has_checkpoint(&planned.configuration.name) || self.state_file(&parent, at)?.exists())
    }

    /// Removes the files of a task, if the run has a directory.
    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        self.files.as_ref().map_or(Ok(()), |files| files.remove_task(name))
    }

    /// Returns the file for the state of a task after `step` minibatches.
    pub(crate) fn state_file(&self, name: &str, step: usize) -> Result<PathBuf> {
        let files = self.files.as_ref();
        let files = files.ok_or_else(|| anyhow::anyhow!("a run without a directory cannot save states"))?;
        Ok(files.state_file(name, step))
    }
}

/// Returns the description of a task for reports.
pub(crate) fn described(spec: &RunSpec, planned: &PlannedTask, train: &TrainSpec) -> Value {
    let mut config = spec.describe(&planned.configuration, train);
    if let Some(Origin { task, at, changes, weights_only }) = &planned.origin {
        config["fork"] = json!({ "of": task, "at": at });
        if !changes.is_empty() {
            config["fork"]["changes"] = json!(changes);
        }
        if *weights_only {
            config["fork"]["weights_only"] = true.into();
        }
    }
    config
}

fn chain_key(one: &Configuration) -> ChainKey {
    (one.lora, one.of_model().to_string())
}

fn shape(one: &Configuration, train: &TrainSpec) -> Shape {
    (one.model, one.batch, chain_key(one), train.optimizer.encodings(), train.clip.is_some())
}
