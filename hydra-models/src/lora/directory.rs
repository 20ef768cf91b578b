//! Adapter directories as written by PEFT.

use super::plan::Plan;
use super::{
    BASE, Base, CLASSIFIERS, CONFIG, LABELS, Lora, NF4, PREFIX, PROBLEM, WEIGHTS, base_layer_name,
    is_adapter, json, peft_name,
};
use crate::ModelError;
use crate::family::supported::refuse;
use crate::family::{Adapting, Classes, TaskType};
use crate::objective::ProblemType;
use crate::weights::{TensorFile, read_json};
use hydra_core::{BufferParam, Chain, FileVersion};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Adapters in a directory; values are read buffer by buffer. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct AdapterDir {
    path: PathBuf,
    config: Arc<Map<String, Value>>,
    lora: Lora,
    notes: Vec<String>,
    file: Arc<TensorFile>,
    /// The classes of a classifier's adapters, if Hydra wrote them.
    classes: Option<Classes>,
    /// The tensors of parameters, by the parameters' names in the chain.
    places: Arc<BTreeMap<String, ParamTensors>>,
}

/// The classes in the metadata of a weight file.
fn classes(file: &Path, labels: &str) -> Result<Classes, ModelError> {
    let id2label =
        serde_json::from_str(labels).map_err(|source| ModelError::Json { path: file.to_owned(), source })?;
    Ok(Classes::named(&Classes { id2label, label2id: Map::new() }.names()))
}

/// The tensors of a parameter.
#[derive(Clone, Debug, Default)]
struct ParamTensors {
    /// The tensor with the parameter's values, and the parameter's first row in it.
    whole: Option<(String, usize)>,
    /// The tensor with values of individual rows: (parameter row, tensor row).
    rows: Option<(String, Vec<(usize, usize)>)>,
}

/// Adds the configuration file's path to an error about its values.
pub(super) fn in_config_file(directory: &Path, source: ModelError) -> ModelError {
    match source {
        ModelError::Config { .. } => {
            ModelError::AdapterConfig { path: directory.join(CONFIG), source: Box::new(source) }
        }
        other => other,
    }
}

/// The directories of adapters in a directory, such as a training's checkpoints, or one level below, as in a run directory.
fn below(directory: &Path) -> Vec<PathBuf> {
    let entries = |of: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(of).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    };
    let mut all = entries(directory);
    let second: Vec<PathBuf> = all.iter().flat_map(|path| entries(path)).collect();
    all.extend(second);
    all.retain(|path| path.join(CONFIG).is_file());
    all.sort();
    all
}

/// Adapter files in unsupported formats.
const OTHERS: [&str; 2] = ["adapter_model.bin", "adapter_model.safetensors.index.json"];

/// A tensor, and the table row that each of its rows replaces: (table row, tensor row).
type OwnRows = (String, Vec<(usize, usize)>);

impl AdapterDir {
    /// Reads the configuration and the header of the weights.
    ///
    /// # Errors
    /// A missing or damaged file, or an unsupported kind of adapter.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, ModelError> {
        let path = path.into();
        let config = path.join(CONFIG);
        let keys: Map<String, Value> = read_json(&config).map_err(|error| match error {
            ModelError::Read { source, .. }
                if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                ModelError::NoAdapter { file: config.clone(), found: below(&path).into() }
            }
            other => other,
        })?;
        let (mut lora, notes) = json::lora(&keys).map_err(|error| in_config_file(&path, error))?;
        let weights = path.join(WEIGHTS);
        if let Some(other) = OTHERS.iter().map(|name| path.join(name)).find(|other| other.is_file())
            && !weights.is_file()
        {
            return Err(ModelError::AdapterFile { path: other, directory: path });
        }
        let notes = notes.into_iter().map(|note| format!("{}: {note}", config.display())).collect();
        let file = Arc::new(TensorFile::open(&weights)?);
        if file.text(BASE) == Some(NF4) {
            lora.base = Base::Nf4;
        }
        let classes = file.text(LABELS).map(|labels| classes(&weights, labels)).transpose()?;
        Ok(Self { path, config: Arc::new(keys), lora, notes, file, classes, places: Arc::default() })
    }

    /// The adapter settings.
    pub fn lora(&self) -> &Lora {
        &self.lora
    }

    /// Settings that have no effect.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The file with the weights, as it was when it was opened.
    pub(super) fn version(&self) -> FileVersion {
        self.file.version.clone()
    }

    /// The file with the weights.
    pub fn file(&self) -> PathBuf {
        self.path.join(WEIGHTS)
    }

    /// What the adapters were trained for, if their configuration names it.
    pub fn task_type(&self) -> Option<TaskType> {
        let task = self.config.get("task_type").and_then(Value::as_str)?;
        [TaskType::CausalLm, TaskType::SequenceClassification]
            .into_iter()
            .find(|of| of.peft_name() == Some(task))
    }

    /// The classes that the adapters of a classifier were trained for, if Hydra wrote them.
    pub fn classes(&self) -> Option<&Classes> {
        self.classes.as_ref()
    }

    /// What the outputs of a classifier mean, if Hydra wrote its adapters.
    pub fn problem(&self) -> Option<ProblemType> {
        ProblemType::named(&Value::from(self.file.text(PROBLEM)?))
    }

    /// The number of outputs of the classifier's head in the file, if it has one.
    pub fn outputs(&self) -> Option<usize> {
        // The last layer of a head: `score`, `classifier`, or `classifier.out_proj`.
        let is_last = |name: &&String| {
            let name = canonical(name).replace(".modules_to_save.", ".");
            let own = name.strip_prefix(PREFIX).and_then(|name| name.strip_suffix(".weight"));
            own.is_some_and(|own| CLASSIFIERS.contains(&own) || own == "classifier.out_proj")
        };
        let names = self.file.names();
        let last = names.iter().find(is_last)?;
        self.file.info(last)?.shape.first().copied()
    }

    /// Rejects adapters of a classifier for a model with other classes, or with these in another order.
    pub(crate) fn check_classes(&self, model: Option<Classes>) -> Result<(), ModelError> {
        match (self.classes(), model) {
            (Some(own), Some(model)) if own.names() != model.names() => Err(ModelError::Classes {
                model: self.path.clone(),
                expected: own.names(),
                found: model.names(),
            }),
            _ => Ok(()),
        }
    }

    /// Rejects adapters of a classifier for a language model, and others for a classifier: PEFT trains a classifier's
    /// head with its adapters.
    pub(super) fn check_task(&self, model: Option<&str>) -> Result<(), ModelError> {
        let classifier = TaskType::SequenceClassification;
        let is_classifier = model == classifier.peft_name();
        if model.is_none() || is_classifier == (self.task_type() == Some(classifier)) {
            return Ok(());
        }
        let found = self.config.get("task_type").unwrap_or(&Value::Null);
        let expected = match is_classifier {
            true => {
                "SEQ_CLS, because the model is a sequence classifier: use adapters that were trained as those of one"
            }
            false => "CAUSAL_LM, because the model is a language model: use the adapters with labelled data",
        };
        Err(in_config_file(&self.path, refuse("task_type", found, expected)))
    }

    /// The configuration as read.
    pub(super) fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// The base model that the configuration of an adapter directory names; `None` if the directory holds no adapters.
    ///
    /// # Errors
    /// A configuration that cannot be read or names no model.
    pub fn base_of(path: &Path) -> Result<Option<String>, ModelError> {
        let config = path.join(CONFIG);
        if !config.is_file() {
            return Ok(None);
        }
        let keys: Map<String, Value> = read_json(&config)?;
        let name =
            keys.get("base_model_name_or_path").and_then(Value::as_str).filter(|name| !name.is_empty());
        name.map(|name| Some(name.to_owned()))
            .ok_or_else(|| ModelError::AdapterBase { path: path.to_owned(), found: "no model".to_owned() })
    }

    /// Returns whether any tensor's name contains this part.
    pub(crate) fn names(&self, part: &str) -> bool {
        self.file.names().iter().any(|name| name.contains(part))
    }

    /// Matches the tensors to a model's chain.
    ///
    /// # Errors
    /// A missing tensor, one with an unexpected shape, or one without a parameter in the chain.
    pub(crate) fn bind(
        mut self,
        chain: &Chain,
        plan: &Plan,
        adapting: &Adapting,
    ) -> Result<Self, ModelError> {
        let tensors = self.file.names().into_iter().map(|tensor| (canonical(&tensor), tensor)).collect();
        let mut finder = Finder { adapters: &self, adapting, plan, tensors, used: BTreeSet::new() };
        let mut places = BTreeMap::new();
        for (param, rows) in params(chain, adapting) {
            if let Some(place) = finder.place(chain, param, rows)? {
                places.insert(param.name.clone(), place);
            }
        }
        let unknown = finder.tensors.values().filter(|tensor| !finder.used.contains(*tensor)).min();
        if let Some(tensor) = unknown.cloned() {
            let (path, chain) = (self.file(), chain.name().to_owned());
            return Err(ModelError::TensorUnknown { path, tensor, chain });
        }
        self.places = Arc::new(places);
        Ok(self)
    }

    /// Returns whether the directory has values of the parameter.
    pub(super) fn has(&self, param: &str) -> bool {
        self.places.contains_key(param)
    }

    /// The tensor with the values of a base parameter, by its Transformers name, if it exists.
    pub(super) fn tensor(&self, name: &str) -> Option<String> {
        [peft_name(name), base_layer_name(name)].into_iter().find(|tensor| self.file.info(tensor).is_some())
    }

    /// Overwrites a parameter with the values that the directory has for it.
    pub(super) fn fill(&self, param: &BufferParam, out: &mut [f32]) -> Result<(), ModelError> {
        let Some(place) = self.places.get(&param.name) else { return Ok(()) };
        let width = param.shape.iter().skip(1).product::<usize>();
        if let Some((tensor, first)) = &place.whole {
            self.file.read_part(tensor, first * width, out)?;
        }
        if let Some((tensor, rows)) = &place.rows {
            for (to, from) in rows {
                self.file.read_part(tensor, from * width, &mut out[to * width..(to + 1) * width])?;
            }
        }
        Ok(())
    }
}

/// A tensor's name without the adapter's name, which some programs leave in it.
fn canonical(tensor: &str) -> String {
    ["lora_A", "lora_B"].iter().fold(tensor.to_owned(), |name, factor| {
        name.replace(&format!(".{factor}.default."), &format!(".{factor}."))
    })
}

/// The parameters of a chain, each with its first row in the whole table if it is a slice of one.
fn params<'a>(chain: &'a Chain, adapting: &Adapting) -> Vec<(&'a BufferParam, usize)> {
    let mut rows: BTreeMap<String, usize> = BTreeMap::new();
    let all = || chain.buffers().iter().flat_map(|buffer| &buffer.params);
    for param in all() {
        *rows.entry((adapting.name)(&param.name)).or_default() += param.shape.first().copied().unwrap_or(1);
    }
    all().map(|param| (param, rows[&(adapting.name)(&param.name)])).collect()
}

/// Matches tensors to parameters.
struct Finder<'a> {
    adapters: &'a AdapterDir,
    adapting: &'a Adapting,
    plan: &'a Plan,
    /// Tensors by their names without the adapter's name.
    tensors: BTreeMap<String, String>,
    used: BTreeSet<String>,
}

impl Finder<'_> {
    fn place(
        &mut self,
        chain: &Chain,
        param: &BufferParam,
        rows: usize,
    ) -> Result<Option<ParamTensors>, ModelError> {
        let name = (self.adapting.name)(&param.name);
        let first = (self.adapting.first_row)(&param.name);
        let mut shape = param.shape.clone();
        if let Some(first) = shape.first_mut() {
            *first = rows;
        }
        let (candidates, needed) = self.candidates(param, &name);
        let mut found = Vec::new();
        for candidate in &candidates {
            if let Some(tensor) = self.tensors.get(candidate).cloned() {
                self.adapters.file.check(&tensor, &shape)?;
                self.used.insert(tensor.clone());
                found.push(tensor);
            }
        }
        if found.is_empty() && needed {
            return Err(ModelError::TensorMissing {
                place: self.adapters.file(),
                tensor: candidates[0].clone(),
            });
        }
        self.check_same(chain, &found)?;
        let whole = found.into_iter().next().map(|tensor| (tensor, first));
        let place = ParamTensors { whole, rows: self.rows(param, &name, first)? };
        Ok((place.whole.is_some() || place.rows.is_some()).then_some(place))
    }

    /// The possible tensor names of a parameter, and whether one of them is required.
    fn candidates(&self, param: &BufferParam, name: &str) -> (Vec<String>, bool) {
        if is_adapter(&param.name) {
            return (vec![peft_name(name)], true);
        }
        let map = param.name.rsplit_once('.').map_or("", |(map, _)| map);
        if self.plan.adapter(map).is_some() {
            return (vec![base_layer_name(name)], false);
        }
        let mut candidates = vec![format!("{PREFIX}{name}")];
        let table = name.strip_suffix(".weight").unwrap_or("");
        if self.plan.shared && table == self.adapting.embedding {
            candidates.push(format!("{PREFIX}{}.weight", self.adapting.head));
        }
        if self.plan.rows.contains_key(table) {
            candidates.push(format!("{PREFIX}{table}.token_adapter.base_layer.weight"));
        }
        (candidates, self.plan.saves(&param.name))
    }

    /// Rejects several tensors of one parameter with different values.
    fn check_same(&self, chain: &Chain, found: &[String]) -> Result<(), ModelError> {
        let file = &self.adapters.file;
        let Some((one, others)) = found.split_first() else { return Ok(()) };
        for other in others {
            if file.same(one, file, other)? == Some(false) {
                let (path, chain) = (self.adapters.file(), chain.name().to_owned());
                return Err(ModelError::TensorUnknown { path, tensor: other.clone(), chain });
            }
        }
        Ok(())
    }

    /// The individually replaced rows of a table, or of a slice of it that starts at row `first`.
    fn rows(&mut self, param: &BufferParam, name: &str, first: usize) -> Result<Option<OwnRows>, ModelError> {
        let Some(table) = name.strip_suffix(".weight") else { return Ok(None) };
        let Some(rows) = self.plan.rows.get(table) else { return Ok(None) };
        let tensor = format!("{PREFIX}{table}.token_adapter.trainable_tokens_delta");
        self.adapters.file.check(&tensor, &[rows.len(), param.shape[1]])?;
        self.used.insert(tensor.clone());
        let own = first..first + param.shape[0];
        let rows = rows.iter().enumerate().filter(|(_, row)| own.contains(row));
        Ok(Some((tensor, rows.map(|(from, row)| (row - first, from)).collect())))
    }
}

/// The directory's path.
impl AsRef<Path> for AdapterDir {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}
