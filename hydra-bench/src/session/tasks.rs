//! The tasks of a run, made of its configurations: at its start, and while it goes on.

use crate::control::Control;
use crate::run_dir::{FileBytes, Origin, Planned, RunDir, RunSpec, TaskFiles};
use crate::session::data::Data;
use crate::session::model::{Model, Trained};
use crate::settings::Configuration;
use anyhow::Result;
use hydra_core::{Dataset, TrainSpec};
use hydra_engine::{Admission, AdmittedTask, Checkpoint, TrainTask};
use hydra_models::data::Cut;
use hydra_models::weights::SavedType;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::sync::Arc;

/// The models beside the best ones that may be there until they are removed: one that has been written, and one that is.
const OVERTAKEN: usize = 2;

/// What a chain depends on beside the model: the rank of its adapters, and what a configuration has of its own in the model.
type Chained = (Option<usize>, String);

/// What a task's needs depend on: tasks that have it in common have one plan.
type Shape = (usize, usize, Chained, usize, bool);

/// A model with its data, and its chains, each of which is measured once.
struct OfModel {
    model: Model,
    trained: BTreeMap<Chained, Trained>,
    train: Arc<dyn Dataset>,
    evaluated: [Option<Arc<dyn Dataset>>; 2],
    read: Read,
}

/// The training data of a model in numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Read {
    /// The tokens of an item at most, where items have some.
    pub(crate) context: Option<usize>,
    /// What that cuts off examples.
    pub(crate) cut: Cut,
}

impl Read {
    fn of(data: &Data) -> Self {
        Self { context: data.context, cut: data.train.cut_by(data.context.unwrap_or(usize::MAX)) }
    }
}

/// Makes tasks with what they have in common.
pub(crate) struct TaskMaker {
    /// In the order of the spec.
    models: Vec<OfModel>,
    /// The files of the run directory, if there is one.
    files: Option<TaskFiles>,
    resumed: bool,
    /// A task of each shape.
    shapes: BTreeMap<Shape, String>,
    /// The program around the run, if there is one, which may stop each task.
    control: Option<Control>,
}

impl TaskMaker {
    /// Makes the tasks of a run of these models, each on its data.
    pub(crate) fn new(
        models: Vec<(Model, Data)>,
        spec: &RunSpec,
        dir: Option<&RunDir>,
        control: Option<Control>,
    ) -> Result<Self> {
        let of = |(model, data): (Model, Data)| OfModel {
            model,
            trained: BTreeMap::new(),
            read: Read::of(&data),
            evaluated: data.evaluated(spec.training.eval_limit),
            train: data.train,
        };
        Ok(Self {
            models: models.into_iter().map(of).collect(),
            files: dir.map(RunDir::task_files).transpose()?,
            resumed: dir.is_some_and(|dir| dir.resumed),
            shapes: BTreeMap::new(),
            control,
        })
    }

    /// Makes tasks that are planned alone from now on: they have no files.
    pub(crate) fn plan_only(&mut self) {
        (self.files, self.resumed) = (None, false);
    }

    /// Changes the models of tasks that are made from now on.
    pub(crate) fn change_models(&mut self, change: impl Fn(&mut Model) -> Result<()>) -> Result<()> {
        self.shapes.clear();
        self.models.iter_mut().try_for_each(|of| {
            of.trained.clear();
            change(&mut of.model)
        })
    }

    /// Reads the data again, as the settings of a spec say.
    pub(crate) fn read_again(&mut self, spec: &RunSpec) -> Result<()> {
        for (of, settings) in self.models.iter_mut().zip(spec.all_models()) {
            of.model.read_as(settings)?;
            let data = of.model.data(settings.text())?;
            of.read = Read::of(&data);
            (of.evaluated, of.train) = (data.evaluated(spec.training.eval_limit), data.train);
        }
        Ok(())
    }

    /// The training data of each model.
    pub(crate) fn read(&self) -> impl Iterator<Item = Read> {
        self.models.iter().map(|of| of.read)
    }

    /// The task of a configuration as the run begins or goes on. Its chain is built if it was not yet.
    pub(crate) fn first(&mut self, spec: &RunSpec, planned: &Planned) -> Result<TrainTask> {
        let one = &planned.configuration;
        let of = &mut self.models[one.model];
        if let Entry::Vacant(new) = of.trained.entry(chained(one)) {
            if let Some(dropout) = one.number("dropout") {
                of.model.set_dropout(dropout);
            }
            new.insert(of.model.trained(&one.adapters(&spec.adapters), one.lora, spec.save.save_dtype)?);
        }
        let train = self.training(spec, one)?;
        self.shapes.entry(shape(one, &train)).or_insert_with(|| one.name.clone());
        let task = self.task(spec, planned)?;
        let Some(origin) = planned.origin.as_ref().filter(|_| !self.has_checkpoint(&one.name)) else {
            return Ok(task);
        };
        // It is there, or the task would wait for it.
        let state = Checkpoint::open(self.state_file(&origin.task, origin.at)?)?;
        Ok(if origin.weights_only { task.weights_from(state) } else { task.fork_from(state) })
    }

    /// A task of the shape of a configuration, if the run has none yet: it is measured, and not trained.
    pub(crate) fn shape(&mut self, spec: &RunSpec, one: Configuration) -> Result<Option<TrainTask>> {
        match self.like(&one, &self.training(spec, &one)?) {
            Some(_) => Ok(None),
            None => self.first(spec, &one.into()).map(Some),
        }
    }

    /// A task with the plan that this configuration would have, if one was measured.
    pub(crate) fn like(&self, one: &Configuration, train: &TrainSpec) -> Option<String> {
        self.shapes.get(&shape(one, train)).cloned()
    }

    /// The training of a configuration.
    pub(crate) fn training(&self, spec: &RunSpec, one: &Configuration) -> Result<TrainSpec> {
        Ok(spec.training.of(one, spec.model_of(one).seed, self.models[one.model].train.len())?)
    }

    /// A task whose chain has been built, without the state that it begins with if that is another task's.
    pub(crate) fn task(&self, spec: &RunSpec, planned: &Planned) -> Result<TrainTask> {
        let one = &planned.configuration;
        let train = self.training(spec, one)?;
        let config = described(spec, planned, &train);
        let OfModel { trained, train: data, evaluated, .. } = &self.models[one.model];
        let trained = trained.get(&chained(one));
        let trained =
            trained.ok_or_else(|| anyhow::anyhow!("no task of the shape of `{}` was measured", one.name))?;
        let mut task = TrainTask::new(&one.name, trained.chain.clone(), data.clone(), train).config(config);
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
        self.with_files(task, &one.name, trained, spec)
    }

    /// The task with what it writes into the run directory, and the checkpoint in there that it goes on from.
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
        // What is there is to say at last that the task is finished.
        if spec.checkpoint_every.0.is_some() || resumed.is_some() {
            task = task.checkpoint_to(files.checkpoint_file(name));
        }
        Ok(match resumed {
            Some(checkpoint) => task.resume_from(checkpoint),
            None => task,
        })
    }

    /// The checkpoint with which a task goes on, if its run does and there is one.
    pub(crate) fn checkpoint(&self, name: &str) -> Result<Option<Checkpoint>> {
        let file = self.files.as_ref().map(|files| files.checkpoint_file(name));
        let there = file.filter(|file| self.resumed && file.exists());
        Ok(there.map(Checkpoint::open).transpose()?)
    }

    /// The most bytes on the disk: a checkpoint of each task, and beside them the next one of a task, and the models.
    pub(crate) fn file_bytes(&self, admission: &Admission, spec: &RunSpec, planned: &[Planned]) -> FileBytes {
        let unfinished = || admission.tasks.iter().filter(|task| task.master_bytes > 0);
        let written = spec.checkpoint_every.0.is_some();
        let checkpoints = || unfinished().map(|task| task.master_bytes).filter(|_| written);
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

    /// The bytes of the model that a task writes, if its chain has been built.
    fn model_bytes(&self, one: &Configuration) -> u64 {
        self.models[one.model].trained.get(&chained(one)).map_or(0, |trained| trained.model_bytes)
    }

    /// The notes on models that are not written with all bits of their weights.
    pub(crate) fn notes_of_types(&self, spec: &RunSpec) -> Vec<String> {
        let rounded =
            |of: &OfModel| of.trained.values().map(|one| one.saved).find(|saved| *saved != SavedType::F32);
        let mut notes: Vec<String> = Vec::new();
        for (of, model) in self.models.iter().zip(spec.all_models()) {
            let Some(saved) = rounded(of) else { continue };
            let why = match spec.save.save_dtype {
                Some(_) => "as --save-dtype says".to_owned(),
                None => format!(
                    "as the files of `{}` are",
                    spec.adapters.adapter.as_deref().unwrap_or(model.name())
                ),
            };
            let note = format!(
                "note: models are written in {saved}, {why}: a loss that is measured of one may differ from the reported one in \
                 its last digits, for training keeps f32{}",
                if spec.save.save_dtype.is_some() { "" } else { "; --save-dtype f32 writes all bits" }
            );
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
        notes
    }

    /// The minibatches that the task of a configuration has in all.
    pub(crate) fn steps(&self, spec: &RunSpec, one: &Configuration) -> Result<usize> {
        Ok(self.training(spec, one)?.steps(self.models[one.model].train.len()))
    }

    fn has_checkpoint(&self, name: &str) -> bool {
        let file = self.files.as_ref().map(|files| files.checkpoint_file(name));
        self.resumed && file.is_some_and(|file| file.exists())
    }

    /// Returns whether a task can begin now: from the start, its own checkpoint, or the state of its parent.
    pub(crate) fn can_begin(&self, planned: &Planned) -> Result<bool> {
        let Some((parent, at)) = planned.place() else { return Ok(true) };
        Ok(self.has_checkpoint(&planned.configuration.name) || self.state_file(&parent, at)?.exists())
    }

    /// Removes what a task has written, if it has a place to write to.
    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        self.files.as_ref().map_or(Ok(()), |files| files.remove_task(name))
    }

    /// The file for the state that a task has after so many minibatches.
    pub(crate) fn state_file(&self, name: &str, step: usize) -> Result<PathBuf> {
        let files = self.files.as_ref();
        let files = files.ok_or_else(|| anyhow::anyhow!("a run without a directory saves no states"))?;
        Ok(files.state_file(name, step))
    }
}

/// The description of a task for reports.
pub(crate) fn described(spec: &RunSpec, planned: &Planned, train: &TrainSpec) -> Value {
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

fn chained(one: &Configuration) -> Chained {
    (one.lora, one.of_model().to_string())
}

fn shape(one: &Configuration, train: &TrainSpec) -> Shape {
    (one.model, one.batch, chained(one), train.optimizer.moments(), train.clip.is_some())
}
