//! The head of a model that reads tokens, as in its configuration: a language model's, or a classifier's with its labels.

use super::supported::{self, refuse};
use super::{Classes, Labels, TaskType};
use crate::ModelError;
use crate::objective::ProblemType;
use crate::ops::KvCache;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use std::path::Path;

/// The end of the Transformers classes of sequence classifiers.
const CLASSIFIER: &str = "ForSequenceClassification";

/// The maximum number of a classifier's outputs.
const MOST_CLASSES: usize = 1 << 20;

/// The keys of a Transformers `config.json` that describe a model's head, to be flattened into a configuration. All are
/// kept as they are in the file, with null apart from absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HeadConfig {
    /// The Transformers classes of the weights; if empty, any without a classifier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architectures: Option<Vec<String>>,
    /// Class names by number.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub id2label: Option<Value>,
    /// Class numbers by name.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub label2id: Option<Value>,
    /// The number of classes in files without names.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub num_labels: Option<Value>,
    /// What the outputs mean.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub problem_type: Option<Value>,
    /// The id of the padding token.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub pad_token_id: Option<Value>,
    /// The key-value cache of a language model that generates.
    #[serde(skip)]
    pub cache: Option<KvCache>,
    /// The keys of the file, if a new head has replaced them.
    #[serde(skip)]
    pub(crate) file: Option<Box<HeadConfig>>,
}

/// Reads a key that exists, which may be null.
fn present<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(value).map(Some)
}

/// The value of a key that exists and is not null.
fn set(key: &Option<Value>) -> Option<&Value> {
    key.as_ref().filter(|value| !value.is_null())
}

impl ProblemType {
    /// The value of `problem_type`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Regression => "regression",
            Self::SingleLabelClassification => "single_label_classification",
            Self::MultiLabelClassification => "multi_label_classification",
        }
    }

    /// The problem type of this name.
    pub(crate) fn named(name: &Value) -> Option<Self> {
        let all = [Self::Regression, Self::SingleLabelClassification, Self::MultiLabelClassification];
        all.into_iter().find(|problem| name == problem.name())
    }
}

impl HeadConfig {
    /// The keys of a file.
    ///
    /// # Errors
    /// Architectures that are not a list of strings.
    pub(crate) fn read(file: &Map<String, Value>) -> Result<Self, ModelError> {
        // All other keys may have any value.
        let expected = "a list of strings";
        let found = file.get("architectures").unwrap_or(&Value::Null);
        Self::deserialize(file).map_err(|_| refuse("architectures", found, expected))
    }

    /// Replaces the keys of a file.
    pub(crate) fn write(&self, file: &mut Map<String, Value>) {
        let keys = [
            ("architectures", self.architectures.as_ref().map(|classes| json!(classes))),
            ("id2label", self.id2label.clone()),
            ("label2id", self.label2id.clone()),
            ("num_labels", self.num_labels.clone()),
            ("problem_type", self.problem_type.clone()),
            ("pad_token_id", self.pad_token_id.clone()),
        ];
        for (name, value) in keys {
            match value {
                Some(value) => file.insert(name.to_owned(), value),
                None => file.remove(name),
            };
        }
    }

    /// Returns whether the model is a sequence classifier.
    pub fn is_classifier(&self) -> bool {
        self.architectures.iter().flatten().any(|class| class.ends_with(CLASSIFIER))
    }

    /// The end of a chain's description, with which the bits of a classifier differ from those of builds that computed all tokens in
    /// the last block.
    pub(crate) fn description(&self) -> &'static str {
        if self.is_classifier() { ", the last block ends in last tokens" } else { "" }
    }

    /// The classes of a classifier, two unnamed ones if the file has none, as in Transformers.
    pub fn classes(&self) -> Classes {
        let map = |key: &Option<Value>| key.as_ref().and_then(Value::as_object).cloned();
        match map(&self.id2label) {
            Some(id2label) => Classes { id2label, label2id: map(&self.label2id).unwrap_or_default() },
            None => Classes::numbered(self.number().unwrap_or(2)),
        }
    }

    /// The classes of a file that names them, which automatic names (`LABEL_0`) do not.
    pub fn named_classes(&self) -> Option<Classes> {
        let names = set(&self.id2label)?.as_object()?;
        let classes = Classes::named(&self.classes().names());
        (names.values().all(Value::is_string) && !classes.are_unnamed()).then_some(classes)
    }

    /// The classes that the file names, and their numbers for these labels, if it names all of them. The numbers of a
    /// regression are those of the file if there are as many.
    fn named_for(&self, labels: &Labels) -> Option<(Classes, Vec<i32>)> {
        let classes = self.named_classes()?;
        let count = classes.count();
        let numbers = match labels.problem {
            ProblemType::Regression => (count == labels.names.len()).then(|| (0..count as i32).collect()),
            _ => classes.numbers_of(&labels.names).filter(|_| count > 1),
        };
        Some((classes, numbers?))
    }

    /// Returns whether a new head has the classes of the data or the adapters, because the file does not name them.
    pub fn has_classes_of_data(&self) -> bool {
        let named = self.file.as_ref().map(|file| file.named_classes());
        named.is_some_and(|named| named.is_none_or(|named| named.names() != self.classes().names()))
    }

    /// The keys of the file that a new head does not have, each with the reason, as sentences without an end.
    pub fn notes(&self) -> Vec<String> {
        let Some(file) = &self.file else { return Vec::new() };
        let place = "of the model's configuration is not used";
        let names = file.named_classes().is_some();
        let classes = (names && self.has_classes_of_data())
            .then(|| format!("`id2label` {place}: it does not name every class of the data or the adapters"));
        let number = set(&file.num_labels).filter(|_| !names && file.number() != Some(self.outputs()));
        let ending = if self.outputs() == 1 { "" } else { "s" };
        let number = number
            .map(|_| format!("`num_labels` {place}: the new head has {} output{ending}", self.outputs()));
        let problem = set(&file.problem_type).filter(|name| ProblemType::named(name) != Some(self.problem()));
        let problem = problem
            .map(|_| format!("`problem_type` {place}: the labels are those of a {}", self.problem().name()));
        classes.into_iter().chain(number).chain(problem).collect()
    }

    /// The value of `num_labels`.
    fn number(&self) -> Option<usize> {
        set(&self.num_labels)?.as_u64().and_then(|count| usize::try_from(count).ok())
    }

    /// The number of a classifier's outputs.
    pub fn outputs(&self) -> usize {
        set(&self.id2label).and_then(Value::as_object).map_or_else(|| self.number().unwrap_or(2), Map::len)
    }

    /// What a classifier's outputs mean, if the configuration determines it: by `problem_type`, or by a single output,
    /// which is a number.
    pub fn determined_problem(&self) -> Option<ProblemType> {
        self.named_problem().or_else(|| (self.outputs() == 1).then_some(ProblemType::Regression))
    }

    /// The value of `problem_type`.
    pub fn named_problem(&self) -> Option<ProblemType> {
        set(&self.problem_type).and_then(ProblemType::named)
    }

    /// What a classifier's outputs mean; where the configuration does not determine it, an item has one of several classes.
    pub fn problem(&self) -> ProblemType {
        self.determined_problem().unwrap_or(ProblemType::SingleLabelClassification)
    }

    /// The id of the padding token, if there is one.
    pub fn padding(&self) -> Option<u32> {
        set(&self.pad_token_id)?.as_u64().and_then(|id| u32::try_from(id).ok())
    }

    /// Checks that the weights are of one of these Transformers classes, and the labels of a classifier.
    ///
    /// # Errors
    /// The first invalid value.
    pub(crate) fn validate(&self, known: &[&str]) -> Result<(), ModelError> {
        supported::check_architectures(self.architectures.as_deref(), known)?;
        if !self.is_classifier() {
            return Ok(());
        }
        let is_named =
            |value: &Value| value.as_object().is_some_and(|map| map.values().all(Value::is_string));
        if let Some(found) = set(&self.id2label).filter(|value| !is_named(value)) {
            return Err(refuse("id2label", found, "an object of class names by number"));
        }
        if let Some(found) = set(&self.num_labels) {
            match self.number() {
                None => return Err(refuse("num_labels", found, "an integer")),
                Some(count) if count != self.outputs() => {
                    let expected = format!("{}, the number of classes in id2label", self.outputs());
                    return Err(refuse("num_labels", count, expected));
                }
                Some(_) => {}
            }
        }
        supported::check_sizes(&[("id2label", self.outputs(), MOST_CLASSES)])?;
        self.validate_problem()
    }

    fn validate_problem(&self) -> Result<(), ModelError> {
        if let Some(found) = set(&self.problem_type)
            && ProblemType::named(found).is_none()
        {
            let expected = "regression, single_label_classification or multi_label_classification";
            return Err(refuse("problem_type", found, expected));
        }
        match (self.problem(), self.outputs()) {
            (ProblemType::SingleLabelClassification, 1) => {
                let expected = "at least 2 classes, because problem_type is single_label_classification";
                Err(refuse("id2label", "1 class", expected))
            }
            _ => Ok(()),
        }
    }

    /// Makes the head a classifier of these labels, of the Transformers class `architecture`, and returns the numbers
    /// that it gives to them, in order. `trained` is the directory that has the head's weights, if there is one: then
    /// its labels remain, and unnamed ones take the data's names. A new head has the classes that the file names, if the
    /// labels are some of them, and those of the labels otherwise. The name of a regression's only number is ignored.
    ///
    /// # Errors
    /// Labels that a trained head does not have, or another meaning of its outputs.
    pub(crate) fn classify(
        &mut self,
        architecture: &str,
        trained: Option<&Path>,
        labels: &Labels,
    ) -> Result<Vec<i32>, ModelError> {
        // Other labels may have replaced the keys of the file before.
        let file = self.file.clone().unwrap_or_else(|| Box::new(self.clone()));
        let (classes, numbers) = match (trained, file.named_for(labels)) {
            (None, Some(named)) => named,
            _ => {
                let mut classes = if trained.is_some() { self.classes() } else { Classes::named(&[]) };
                if let Some(directory) = trained {
                    self.check_problem(directory, labels.problem)?;
                }
                let only =
                    trained.is_some() && labels.problem == ProblemType::Regression && classes.count() == 1;
                let numbers = match only && labels.names.len() == 1 {
                    true => vec![0],
                    false => classes.number(trained, &labels.names)?,
                };
                (classes, numbers)
            }
        };
        let head = Self {
            architectures: Some(vec![architecture.to_owned()]),
            id2label: Some(Value::Object(classes.id2label)),
            label2id: Some(Value::Object(classes.label2id)),
            num_labels: None,
            problem_type: Some(json!(labels.problem.name())),
            pad_token_id: self.pad_token_id.clone(),
            cache: None,
            file: trained.is_none().then_some(file),
        };
        head.validate(&[architecture])?;
        *self = head;
        Ok(numbers)
    }

    /// Rejects labels of another kind than those that the head of `directory` was trained for.
    fn check_problem(&self, directory: &Path, labels: ProblemType) -> Result<(), ModelError> {
        // Without `problem_type`, the labels determine what several classes mean, as in Transformers.
        let open = set(&self.problem_type).is_none() && self.outputs() > 1;
        if self.problem() == labels || open && labels == ProblemType::MultiLabelClassification {
            return Ok(());
        }
        let expected = format!(
            "{}, which the labels of the data are: use other data, pass the problem type of the head, or use a model whose head is \
             not trained yet",
            labels.name()
        );
        Err(refuse(
            "problem_type",
            format!("{} in `{}`", self.problem().name(), directory.display()),
            expected,
        ))
    }

    /// The keys that affect computation: those of a classifier.
    pub(crate) fn computed(&self) -> Self {
        if self.is_classifier() { self.clone() } else { Self::default() }
    }

    /// What a model with this head is trained for.
    pub(crate) fn task_type(&self) -> TaskType {
        if self.is_classifier() { TaskType::SequenceClassification } else { TaskType::CausalLm }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::{self, Model};
    use crate::lora::{AdapterDir, AdapterWriter, Lora, MergedWriter, Targets};
    use crate::weights::SavedType;
    use crate::weights::testing::ParamBuffers;
    use ProblemType::{MultiLabelClassification, Regression, SingleLabelClassification};
    use hydra_core::{Chain, ModelWriter};
    use std::collections::{BTreeMap, BTreeSet};
    use tempfile::TempDir;

    const CLASS: &str = "GPT2ForSequenceClassification";

    /// A configuration with a flattened head.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Config {
        #[serde(flatten)]
        head: HeadConfig,
        #[serde(flatten)]
        other: Map<String, Value>,
    }

    fn head(mut keys: Value) -> HeadConfig {
        keys["architectures"] = json!([CLASS]);
        serde_json::from_value(keys).unwrap()
    }

    fn labels(problem: ProblemType, names: &[&str]) -> Labels {
        Labels { problem, names: names.iter().map(|name| (*name).to_owned()).collect() }
    }

    #[test]
    fn keys_are_written_back_as_they_were_read() {
        let text = json!({
            "architectures": [CLASS], "id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1},
            "problem_type": null, "pad_token_id": null, "mine": 7,
        });
        let config: Config = serde_json::from_value(text.clone()).unwrap();
        assert_eq!((config.head.classes().names(), config.other.len()), (vec!["no".into(), "yes".into()], 1));
        assert_eq!(serde_json::to_value(&config).unwrap(), text);
        let empty: Config = serde_json::from_value(json!({})).unwrap();
        assert!(!empty.head.is_classifier() && empty.head.padding().is_none());
        assert_eq!(serde_json::to_value(&empty).unwrap(), json!({}));
    }

    #[test]
    fn absent_keys_have_the_defaults_of_transformers() {
        let plain = head(json!({}));
        assert_eq!((plain.classes(), plain.problem()), (Classes::numbered(2), SingleLabelClassification));
        let one = head(json!({"num_labels": 1, "pad_token_id": 3}));
        assert_eq!((one.outputs(), one.problem(), one.padding()), (1, Regression, Some(3)));
        assert_eq!(head(json!({"pad_token_id": -1})).padding(), None);
        let several = head(json!({"num_labels": 4, "problem_type": "multi_label_classification"}));
        assert_eq!((several.outputs(), several.problem()), (4, MultiLabelClassification));
        several.validate(&[CLASS]).unwrap();
    }

    #[test]
    fn what_cannot_be_a_classifier_is_named() {
        for (keys, expected) in [
            (json!({"id2label": ["a"]}), "`id2label` is [\"a\"], expected an object"),
            (json!({"id2label": {"0": 1}}), "`id2label` is {\"0\":1}, expected an object"),
            (json!({"id2label": {}}), "`id2label` is 0, expected at least 1"),
            (json!({"num_labels": "two"}), "`num_labels` is \"two\", expected an integer"),
            (
                json!({"num_labels": 3, "id2label": {"0": "a"}}),
                "`num_labels` is 3, expected 1, the number of",
            ),
            (
                json!({"problem_type": "ranking"}),
                "`problem_type` is \"ranking\", expected regression, single",
            ),
            (
                json!({"num_labels": 1, "problem_type": "single_label_classification"}),
                "`id2label` is 1 class, expected at least 2 classes",
            ),
        ] {
            let error = head(keys).validate(&[CLASS]).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        let error = head(json!({})).validate(&["GPT2Model"]).unwrap_err().to_string();
        assert_eq!(error, format!("`architectures` is {CLASS}, expected GPT2Model"));
    }

    #[test]
    fn a_new_head_takes_the_labels_of_the_data() {
        let mut new = HeadConfig { num_labels: Some(json!(9)), ..HeadConfig::default() };
        let numbers = new.classify(CLASS, None, &labels(MultiLabelClassification, &["b", "a"])).unwrap();
        assert_eq!((numbers, new.problem(), new.outputs()), (vec![0, 1], MultiLabelClassification, 2));
        let written = serde_json::to_value(&new).unwrap();
        let expected = json!({
            "architectures": [CLASS], "id2label": {"0": "b", "1": "a"}, "label2id": {"b": 0, "a": 1},
            "problem_type": "multi_label_classification",
        });
        assert_eq!(written, expected);
        let error = new.classify(CLASS, None, &labels(SingleLabelClassification, &["a"])).unwrap_err();
        assert!(error.to_string().contains("at least 2 classes"), "{error}");
    }

    #[test]
    fn a_new_head_takes_the_classes_that_the_file_names() {
        let language = |keys: Value| -> HeadConfig { serde_json::from_value(keys).unwrap() };
        let single = SingleLabelClassification;
        let keys =
            json!({"architectures": ["GPT2LMHeadModel"], "id2label": {"0": "pos", "1": "neg", "2": "so"}});
        let mut named = language(keys.clone());
        // Data may have some of them, and other data all.
        assert_eq!(named.classify(CLASS, None, &labels(single, &["neg", "pos"])).unwrap(), [1, 0]);
        assert_eq!(
            (named.classes().names(), named.notes()),
            (["pos", "neg", "so"].map(str::to_owned).into(), vec![])
        );
        assert_eq!(named.label2id, Some(json!({"pos": 0, "neg": 1, "so": 2})));
        assert_eq!(named.classify(CLASS, None, &labels(single, &["neg", "pos", "so"])).unwrap(), [1, 0, 2]);
        // Other labels replace them, which a note states, until labels fit again.
        assert_eq!(named.classify(CLASS, None, &labels(single, &["a", "neg"])).unwrap(), [0, 1]);
        let note = "`id2label` of the model's configuration is not used: it does not name every class of the data or the \
                    adapters";
        assert_eq!(
            (named.classes().names(), named.notes()),
            (["a", "neg"].map(str::to_owned).into(), vec![note.to_owned()])
        );
        assert_eq!(named.classify(CLASS, None, &labels(MultiLabelClassification, &["so"])).unwrap(), [2]);
        assert!(named.notes().is_empty());
        assert_eq!(serde_json::to_value(&named).unwrap()["id2label"], keys["id2label"]);

        let two = json!({"id2label": {"0": "joy", "1": "fear"}, "problem_type": "regression"});
        let mut numbers = language(two);
        assert_eq!(numbers.named_problem(), Some(Regression));
        assert_eq!(
            numbers.classify(CLASS, None, &labels(Regression, &["LABEL_0", "LABEL_1"])).unwrap(),
            [0, 1]
        );
        assert_eq!(
            (numbers.classes().names(), numbers.notes()),
            (["joy", "fear"].map(str::to_owned).into(), vec![])
        );
        numbers.classify(CLASS, None, &labels(single, &["fear", "joy"])).unwrap();
        let note = "`problem_type` of the model's configuration is not used: the labels are those of a \
                    single_label_classification";
        assert_eq!(numbers.notes(), [note]);

        let automatic = json!({"id2label": {"0": "LABEL_0"}, "num_labels": 1});
        let mut automatic = language(automatic);
        assert_eq!(automatic.classify(CLASS, None, &labels(single, &["b", "a"])).unwrap(), [0, 1]);
        let note = "`num_labels` of the model's configuration is not used: the new head has 2 outputs";
        assert_eq!(automatic.notes(), [note]);
    }

    #[test]
    fn a_trained_head_keeps_its_labels() {
        let dir = Some(Path::new("a/model"));
        let mut named = head(json!({"id2label": {"0": "no", "1": "yes", "2": "both"}}));
        let said = |head: &mut HeadConfig, problem, names: &[&str]| {
            head.classify(CLASS, dir, &labels(problem, names)).map_err(|error| error.to_string())
        };
        let single = SingleLabelClassification;
        assert_eq!(said(&mut named, single, &["yes", "no", "both"]).unwrap(), [1, 0, 2]);
        let error = said(&mut named, single, &["yes", "never"]).unwrap_err();
        assert!(error.contains("3 classes (no, yes, both)") && error.contains("2 (yes, never)"), "{error}");
        let error = said(&mut named, Regression, &["x", "y", "z"]).unwrap_err();
        assert!(error.contains("`problem_type` is single_label_classification in `a/model`"), "{error}");
        let mut unnamed = head(json!({"num_labels": 2}));
        assert!(said(&mut unnamed, single, &["a", "b", "c"]).is_err());
        assert_eq!(said(&mut unnamed, single, &["LABEL_1", "LABEL_0"]).unwrap(), [1, 0]);
        assert_eq!(unnamed.classes().names(), ["LABEL_0", "LABEL_1"]);
        assert_eq!(said(&mut unnamed, single, &["a", "b"]).unwrap(), [0, 1]);
        assert_eq!(unnamed.classes().names(), ["a", "b"]);
        let mut open = head(json!({"num_labels": 2}));
        assert_eq!(said(&mut open, MultiLabelClassification, &["a", "b"]).unwrap(), [0, 1]);
        let mut number = head(json!({"id2label": {"0": "similarity"}}));
        assert_eq!(said(&mut number, Regression, &["score"]).unwrap(), [0]);
        assert_eq!(number.classes().names(), ["similarity"]);
    }

    /// A directory with a language model of this configuration, or with the preset of this name.
    fn language_model(keys: &str) -> TempDir {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("tiny.json");
        std::fs::write(&file, keys).unwrap();
        let name = if keys.starts_with('{') { file.to_str().unwrap() } else { keys };
        write(family::load(name).unwrap().as_ref(), 7, dir.path());
        dir
    }

    /// Writes a model of this seed.
    fn write(model: &dyn Model, seed: u64, dir: &Path) {
        let chain = model.chain().unwrap();
        model.writer(SavedType::F32.into()).write(&chain, &ParamBuffers::of(&chain, seed), dir).unwrap();
    }

    fn load(dir: &Path) -> Box<dyn Model> {
        family::load(dir.to_str().unwrap()).unwrap()
    }

    /// The values of the parameters of a chain by name.
    fn values(chain: &Chain, seed: u64) -> BTreeMap<String, Vec<f32>> {
        let buffers = chain.buffers().iter().enumerate().flat_map(|(at, buffer)| {
            let mut out = vec![0.0; buffer.elements];
            chain.source().fill(chain, at, seed, &mut out).unwrap();
            buffer.params.iter().map(move |param| (param.name.clone(), out[param.range()].to_vec()))
        });
        buffers.collect()
    }

    const SCORE: &str = "head.score.weight";
    const UNTIED: &str = r#"{"model_type": "qwen3", "vocab_size": 11, "max_position_embeddings": 64, "hidden_size": 8,
        "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 4, "tie_word_embeddings": false, "pad_token_id": 3}"#;
    /// Two families, with and without a table of the head.
    const MODELS: [&str; 2] = ["bytes-tiny", UNTIED];

    fn three() -> Labels {
        labels(SingleLabelClassification, &["b", "a", "c"])
    }

    #[test]
    fn a_language_model_becomes_a_classifier_with_a_new_head() {
        for (keys, class, padding) in
            [(MODELS[0], CLASS, None), (UNTIED, "Qwen3ForSequenceClassification", Some(3))]
        {
            let (from, to) = (language_model(keys), TempDir::new().unwrap());
            let mut model = load(from.path());
            assert_eq!((model.task_type(), model.padding()), (TaskType::CausalLm, padding));
            assert!(model.notes().is_empty());
            let body = values(&model.chain().unwrap(), 0);
            assert_eq!(model.classify(&three()).unwrap(), [0, 1, 2]);
            assert_eq!(model.task_type(), TaskType::SequenceClassification);
            let chain = model.chain().unwrap();
            let (one, other) = (values(&chain, 1), values(&chain, 2));
            let differ: Vec<&String> = one.keys().filter(|name| one[*name] != other[*name]).collect();
            assert_eq!(differ, [SCORE], "the rest is read");
            assert!(body.iter().all(|(name, values)| one.get(name).is_none_or(|found| found == values)));
            let head = chain.buffers().len() - 1;
            let origin = |seed| chain.source().origin(&chain, head, seed).unwrap();
            assert!(
                origin(1) != origin(2) && origin(1).contains("model.safetensors but for head.score.weight")
            );
            let notes = model.notes().join("; ");
            assert!(notes.contains("has no `score.weight`: new weights are drawn"), "{notes}");
            assert_eq!(notes.contains("does not use `lm_head.weight` of"), keys == UNTIED, "{notes}");
            // Labels of other data replace those of a new head.
            assert_eq!(model.classify(&labels(Regression, &["x"])).unwrap(), [0]);
            model.classify(&three()).unwrap();

            write(model.as_ref(), 1, to.path());
            let config: Value =
                serde_json::from_slice(&std::fs::read(to.path().join("config.json")).unwrap()).unwrap();
            assert_eq!(config["architectures"], json!([class]));
            assert_eq!(config["id2label"], json!({"0": "b", "1": "a", "2": "c"}));
            assert_eq!(config["label2id"], json!({"b": 0, "a": 1, "c": 2}));
            assert_eq!(config["problem_type"], "single_label_classification");
            assert_eq!(config["pad_token_id"].as_u64(), padding.map(u64::from));
            let mut again = load(to.path());
            assert_eq!(again.task_type(), TaskType::SequenceClassification);
            assert_eq!(values(&again.chain().unwrap(), 9), one);
            assert_eq!(
                again.classify(&labels(SingleLabelClassification, &["a", "b", "c"])).unwrap(),
                [1, 0, 2]
            );
            assert_eq!((values(&again.chain().unwrap(), 9), again.notes()), (one, Vec::new()));
            assert_ne!(again.description().unwrap(), load(from.path()).description().unwrap());
            assert!(again.untied().is_none());
        }
    }

    #[test]
    fn a_classifier_without_its_head_is_refused() {
        let (from, file) = (language_model(UNTIED), "config.json");
        let path = from.path().join(file);
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config["architectures"] = json!(["Qwen3ForSequenceClassification"]);
        std::fs::write(&path, config.to_string()).unwrap();
        let error = family::load(from.path().to_str().unwrap()).err().unwrap().to_string();
        assert!(error.contains("has no tensor `score.weight`"), "{error}");
        let mut images = family::load("vit-tiny").unwrap();
        let error = images.classify(&three()).unwrap_err().to_string();
        assert!(error.contains("3 classes") && error.contains("model that reads images"), "{error}");
    }

    /// Trained values of a chain.
    fn trained(chain: &Chain, seed: u64) -> BTreeMap<String, Vec<f32>> {
        let trained = chain.buffers().iter().filter(|buffer| buffer.trained);
        let names: BTreeSet<&String> =
            trained.flat_map(|buffer| buffer.params.iter().map(|param| &param.name)).collect();
        values(chain, seed).into_iter().filter(|(name, _)| names.contains(name)).collect()
    }

    #[test]
    fn adapters_train_the_head_and_are_saved_with_it() {
        for keys in MODELS {
            let (base, dir) = (language_model(keys), TempDir::new().unwrap());
            let mut model = load(base.path());
            model.classify(&three()).unwrap();
            let lora = Lora { rank: 2, targets: Targets::AllLinear, ..Lora::default() };
            let chain = model.adapted(&lora, None).unwrap();
            let found = trained(&chain, 5);
            assert!(found.contains_key(SCORE) && !found.keys().any(|name| name.contains("score.lora")));
            assert!(found.len() > 8 && !found.keys().any(|name| name.starts_with("head.norm")));
            assert!(model.plan(&lora).unwrap().notes().is_empty());
            let buffers = ParamBuffers::of(&chain, 5);
            AdapterWriter::new(model.as_ref(), lora).write(&chain, &buffers, dir.path()).unwrap();
            let file = std::fs::read(dir.path().join("adapter_model.safetensors")).unwrap();
            let file = safetensors::SafeTensors::deserialize(&file).unwrap();
            assert_eq!(file.tensor("base_model.model.score.weight").unwrap().shape()[0], 3);

            let adapter = AdapterDir::open(dir.path()).unwrap();
            assert_eq!(adapter.task_type(), Some(TaskType::SequenceClassification));
            assert_eq!(adapter.lora().modules_to_save, ["classifier", "score"], "as in PEFT");
            let read = model.adapted(adapter.lora(), Some(adapter.clone())).unwrap();
            assert_eq!(trained(&read, 8), found);
            let merged = TempDir::new().unwrap();
            let writer = MergedWriter::new(model.as_ref(), adapter.lora().clone(), SavedType::F32).unwrap();
            writer.write(&read, &ParamBuffers::of(&read, 8), merged.path()).unwrap();
            let merged = load(merged.path());
            assert_eq!(values(&merged.chain().unwrap(), 0)[SCORE], found[SCORE]);
            // The adapter's own head starts from the base's.
            let lora = Lora { rank: 2, ..Lora::default() };
            let chain = merged.adapted(&lora, None).unwrap();
            assert_eq!(trained(&chain, 6)[SCORE], found[SCORE]);

            for other in [&["a", "b"][..], &["a", "b", "c"]] {
                model.classify(&labels(SingleLabelClassification, other)).unwrap();
                let error = model.adapted(adapter.lora(), Some(adapter.clone())).unwrap_err().to_string();
                assert!(
                    error.contains("3 classes (b, a, c)") && error.contains(&other.join(", ")),
                    "{error}"
                );
            }
            assert_eq!(adapter.classes().unwrap().names(), ["b", "a", "c"]);
        }
    }

    #[test]
    fn adapters_of_another_task_are_refused() {
        let (base, dir) = (language_model(MODELS[0]), TempDir::new().unwrap());
        let refused = |model: &dyn Model| {
            let adapter = AdapterDir::open(dir.path()).unwrap();
            hydra_core::with_causes(&model.adapted(&adapter.lora().clone(), Some(adapter)).unwrap_err())
        };
        let write = |model: &dyn Model| {
            let lora = Lora { rank: 2, ..Lora::default() };
            let chain = model.adapted(&lora, None).unwrap();
            AdapterWriter::new(model, lora).write(&chain, &ParamBuffers::of(&chain, 5), dir.path()).unwrap();
        };
        let (plain, mut classifier) = (load(base.path()), load(base.path()));
        classifier.classify(&three()).unwrap();
        write(plain.as_ref());
        let error = refused(classifier.as_ref());
        assert!(error.contains("`task_type` is \"CAUSAL_LM\", expected SEQ_CLS, because"), "{error}");
        write(classifier.as_ref());
        let error = refused(plain.as_ref());
        assert!(error.contains("`task_type` is \"SEQ_CLS\", expected CAUSAL_LM, because"), "{error}");
    }
}
