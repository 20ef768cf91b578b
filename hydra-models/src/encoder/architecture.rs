//! Encoders as an architecture.

use super::presets::PRESETS;
use super::{EncoderConfig, ModelType, Pooling, layers};
use crate::ModelError;
use crate::family::supported::refuse;
use crate::family::{Adapting, HeadConfig, NamedConfig, Reads, TaskType};
use crate::lora::{Adaptation, AdaptedLayers};
use crate::pretrained::{Architecture, PretrainedDir, PretrainedModel, PretrainedWriter};
use crate::weights::{Naming, in_file, read_json};
use serde_json::{Map, Value};
use std::path::Path;

/// An encoder described by a configuration or a directory.
pub type Encoder = PretrainedModel<EncoderConfig>;

/// A directory with an encoder, with or without a classifier.
pub type EncoderDir = PretrainedDir<EncoderConfig>;

/// Writes an encoder with its classifier.
pub type EncoderWriter = PretrainedWriter<EncoderConfig>;

impl Architecture for EncoderConfig {
    const MODEL_TYPES: &'static [&'static str] = &ModelType::NAMES;

    // It may have the other linear layer of the head: BERT's pooler belongs to the encoder, and ModernBERT's also to the language
    // model.
    const DRAWN: [&'static [&'static str]; 2] =
        [&["head.classifier."], &["head.classifier.", "head.dense.", "head.norm."]];

    const PRESETS: &'static [NamedConfig<Self>] = &PRESETS;

    fn read(file: &Path) -> Result<Self, ModelError> {
        let config = Self::from_json(file, read_json(file)?);
        let checked = config.and_then(|config| config.validate().map(|()| config));
        checked.map_err(|source| match source {
            ModelError::Config { .. } => in_file(file, source),
            source => source,
        })
    }

    fn check_without_weights(&self) -> Result<(), ModelError> {
        if self.other.get("sinusoidal_pos_embds").and_then(Value::as_bool) == Some(true) {
            let expected = "false for a model without weights, whose positions are drawn";
            return Err(refuse("sinusoidal_pos_embds", true, expected));
        }
        Ok(())
    }

    fn description(&self) -> Result<Value, ModelError> {
        let mut described = Self { other: Map::new(), ..self.clone() }.to_json()?;
        if let Some(modern) = &self.modern {
            described.insert("modern".to_owned(), format!("{modern:?}").into());
        }
        Ok(Value::Object(described))
    }

    fn to_file(&self) -> Result<Map<String, Value>, ModelError> {
        self.to_json()
    }

    fn class(&self, _: TaskType) -> &'static str {
        self.model_type.architecture()
    }

    fn naming(&self) -> Naming {
        self.model_type.naming()
    }

    fn depth(&self) -> usize {
        self.num_hidden_layers
    }

    fn layers(&self, adaptation: Option<Adaptation<'_>>) -> Result<AdaptedLayers, ModelError> {
        layers(self, adaptation)
    }

    fn reads(&self) -> Reads {
        Reads::Tokens { positions: self.longest(), vocabulary: self.vocab_size }
    }

    fn task_type(&self) -> TaskType {
        TaskType::SequenceClassification
    }

    fn head(&self) -> Option<&HeadConfig> {
        Some(&self.head)
    }

    fn head_mut(&mut self) -> Option<&mut HeadConfig> {
        Some(&mut self.head)
    }

    fn has_token_types(&self) -> bool {
        // The tokenizers of other types give no token types.
        self.model_type == ModelType::Bert && self.type_vocab_size > 1
    }

    fn set_dropout(&mut self, probability: f64) {
        (self.hidden_dropout_prob, self.attention_probs_dropout_prob) = (probability, probability);
        self.classifier_dropout = Some(probability);
        self.modern.iter_mut().for_each(|modern| modern.mlp_dropout = probability);
    }

    fn adapting(&self) -> Adapting {
        let kind = self.model_type;
        Adapting {
            embedding: kind.embedding(),
            task: self.task_type().peft_name(),
            ..Adapting::new(kind.targets(), kind.hf_name())
        }
    }

    fn flops(&self, tokens: usize) -> f64 {
        let gates = if self.modern.is_some() { 3.0 } else { 2.0 };
        let [layers, width, inner, outputs, tokens] =
            [self.num_hidden_layers, self.hidden_size, self.intermediate_size, self.head.outputs(), tokens]
                .map(|size| size as f64);
        let attended: f64 = (0..self.num_hidden_layers)
            .map(|index| match self.modern.as_ref().and_then(|modern| modern.window(index)) {
                Some(window) => tokens.min(2.0 * window as f64 - 1.0),
                None => tokens,
            })
            .sum();
        let block = 4.0 * width * width + gates * width * inner;
        // The head and, with first tokens, the layers after the last block's attention compute one vector.
        let head = 6.0 * width * (width + outputs);
        let unread = match self.pooling() {
            Pooling::First => 6.0 * width * (width + gates * inner) * (tokens - 1.0),
            Pooling::Mean => 0.0,
        };
        (6.0 * layers * block + 12.0 * width * attended) * tokens - unread + head
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::config;
    use super::*;
    use crate::family::{Labels, Model};
    use crate::lora::{AdapterDir, AdapterWriter, Lora, MergedWriter};
    use crate::objective::ProblemType;
    use crate::weights::SavedType;
    use crate::weights::WEIGHTS;
    use crate::weights::testing::ParamBuffers;
    use hydra_core::ModelWriter;
    use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
    use serde_json::json;
    use std::collections::BTreeMap;
    use std::fs;
    use tempfile::TempDir;

    fn labels(names: &[&str]) -> Labels {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Labels { problem: ProblemType::SingleLabelClassification, names }
    }

    fn model(kind: &str) -> Encoder {
        Encoder::new(config(json!({"model_type": kind})))
    }

    /// A directory with a classifier of two labels, and the values of its parameters.
    fn written(kind: &str) -> (TempDir, ParamBuffers) {
        let (dir, mut model) = (TempDir::new().unwrap(), model(kind));
        model.classify(&labels(&["no", "yes"])).unwrap();
        let chain = model.chain().unwrap();
        let buffers = ParamBuffers::of(&chain, 7);
        model.writer(SavedType::F32.into()).write(&chain, &buffers, dir.path()).unwrap();
        (dir, buffers)
    }

    fn open(dir: &TempDir) -> Box<dyn Model> {
        Box::new(Encoder::open(dir.path()).unwrap_or_else(|e| panic!("{}", hydra_core::with_causes(&e))))
    }

    type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

    fn tensors(path: &Path) -> Tensors {
        let bytes = fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor =
            |(name, view): (String, TensorView)| (name, (view.shape().to_vec(), view.data().to_vec()));
        file.tensors().into_iter().map(tensor).collect()
    }

    fn save(path: &Path, tensors: &Tensors) {
        let views = tensors.iter().map(|(name, (shape, bytes))| {
            (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
        });
        fs::write(path, serialize(views, None).unwrap()).unwrap();
    }

    /// Replaces keys of a directory's configuration.
    fn configure(dir: &TempDir, keys: Value) {
        let path = dir.path().join("config.json");
        let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        file.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        fs::write(path, file.to_string()).unwrap();
    }

    /// Makes a directory one of an encoder without a classifier, without the prefix of names if it is not a language
    /// model's.
    fn without_head(dir: &TempDir, kind: &str, class: &str) {
        let path = dir.path().join(WEIGHTS);
        let is_head = |name: &str| name.contains("classifier") || name.starts_with("head.");
        let kind = ModelType::ALL.into_iter().find(|of| of.name() == kind).unwrap();
        let prefix = if class.ends_with("Model") { kind.naming().prefix } else { "" };
        let rest = tensors(&path).into_iter().filter(|(name, _)| !is_head(name));
        let rest = rest.map(|(name, tensor)| (name.strip_prefix(prefix).unwrap_or(&name).to_owned(), tensor));
        save(&path, &rest.collect());
        configure(dir, json!({"architectures": [class], "id2label": null, "problem_type": null}));
    }

    #[test]
    fn what_was_written_loads_to_the_same_bits() {
        for kind in ModelType::NAMES {
            let (dir, buffers) = written(kind);
            let mut model = open(&dir);
            assert_eq!(ParamBuffers::of(&model.chain().unwrap(), 0), buffers, "{kind}");
            assert_eq!(model.classify(&labels(&["yes", "no"])).unwrap(), [1, 0]);
            let error = model.classify(&labels(&["yes", "never"])).unwrap_err().to_string();
            assert!(error.contains("no, yes") && error.contains("yes, never"), "{error}");
            let again = TempDir::new().unwrap();
            model
                .writer(SavedType::F32.into())
                .write(&model.chain().unwrap(), &buffers, again.path())
                .unwrap();
            let file = |dir: &TempDir, name: &str| fs::read(dir.path().join(name)).unwrap();
            assert_eq!(file(&dir, WEIGHTS), file(&again, WEIGHTS), "{kind}");
            let json = |dir| -> Value { serde_json::from_slice(&file(dir, "config.json")).unwrap() };
            assert_eq!(json(&dir), json(&again), "{kind}");
            assert!(model.notes().is_empty(), "{kind}: {:?}", model.notes());
        }
    }

    #[test]
    fn a_directory_without_a_classifier_gets_a_new_one_that_is_drawn() {
        for (kind, class, absent) in [
            ("bert", "BertModel", 2),
            ("roberta", "RobertaForMaskedLM", 4),
            ("xlm-roberta", "XLMRobertaModel", 4),
            ("distilbert", "DistilBertForMaskedLM", 4),
            ("modernbert", "ModernBertModel", 4),
        ] {
            let (dir, buffers) = written(kind);
            without_head(&dir, kind, class);
            let mut model = open(&dir);
            assert_eq!(model.classify(&labels(&["a", "b", "c"])).unwrap(), [0, 1, 2]);
            let chain = model.chain().unwrap();
            let (one, other) = (ParamBuffers::of(&chain, 0), ParamBuffers::of(&chain, 1));
            let last = chain.buffers().len() - 1;
            assert_eq!(
                (&one.0[..last], &other.0[..last]),
                (&buffers.0[..last], &buffers.0[..last]),
                "{kind}"
            );
            assert_ne!(one.0[last], other.0[last], "{kind}: the head is drawn with the seed");
            let notes = model.notes();
            assert!(notes.len() == 1 && notes[0].contains("new weights are drawn"), "{kind}: {notes:?}");
            assert_eq!(notes[0].matches("`, `").count() + 1, absent, "{kind}: {notes:?}");
            assert!(model.description().unwrap()["id2label"]["2"] == "c");
        }
    }

    #[test]
    fn a_pooler_is_read_where_there_is_one() {
        let (dir, buffers) = written("bert");
        without_head(&dir, "bert", "BertForMaskedLM");
        let path = dir.path().join(WEIGHTS);
        let mut all = tensors(&path);
        all.insert("cls.predictions.bias".to_owned(), (vec![1], vec![0; 4]));
        save(&path, &all);
        let model = open(&dir);
        let chain = model.chain().unwrap();
        let dense = |buffers: &ParamBuffers| {
            let (at, buffer) = chain.buffers().iter().enumerate().next_back().unwrap();
            let param = buffer.params.iter().find(|param| param.name == "head.dense.weight").unwrap();
            let range = param.range();
            buffers.0[at][range.start * 4..range.end * 4].to_vec()
        };
        assert_eq!(dense(&ParamBuffers::of(&chain, 3)), dense(&buffers));
        let notes = model.notes().join("\n");
        assert!(notes.contains("`cls.predictions.bias`") && !notes.contains("pooler"), "{notes}");
        all.retain(|name, _| !name.contains("pooler"));
        save(&path, &all);
        let drawn = open(&dir);
        assert_ne!(dense(&ParamBuffers::of(&drawn.chain().unwrap(), 3)), dense(&buffers));
        let notes = drawn.notes().join("\n");
        assert!(notes.contains("`bert.pooler.dense.weight`"), "{notes}");
    }

    #[test]
    fn older_names_are_read_and_those_of_other_models_are_refused() {
        let (dir, buffers) = written("bert");
        let (path, good) = (dir.path().join(WEIGHTS), tensors(&dir.path().join(WEIGHTS)));
        let older = |name: &str| {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        };
        save(&path, &good.iter().map(|(name, tensor)| (older(name), tensor.clone())).collect());
        assert_eq!(ParamBuffers::of(&open(&dir).chain().unwrap(), 0), buffers);
        let refusal = |change: &dyn Fn(&mut Tensors)| {
            let mut all = good.clone();
            change(&mut all);
            save(&path, &all);
            hydra_core::with_causes(&Encoder::open(dir.path()).map(|_| ()).unwrap_err())
        };
        let more = refusal(&|all| {
            drop(all.insert("bert.encoder.layer.3.output.dense.bias".into(), (vec![1], vec![0; 4])))
        });
        assert!(more.contains("`num_hidden_layers` is 3, expected 4"), "{more}");
        let cross = "bert.encoder.layer.0.crossattention.self.query.weight";
        let unknown = refusal(&|all| drop(all.insert(cross.into(), (vec![1], vec![0; 4]))));
        assert!(unknown.contains(cross), "{unknown}");
        let lost = refusal(&|all| drop(all.remove("bert.pooler.dense.bias")));
        assert!(lost.contains("has no tensor `bert.pooler.dense.bias`"), "{lost}");
    }

    #[test]
    fn a_file_without_weights_has_learned_positions() {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("tiny.json");
        let mut config = config(json!({"model_type": "distilbert"})).to_json().unwrap();
        let configured = |config: &Map<String, Value>| {
            fs::write(&file, serde_json::to_vec(config).unwrap()).unwrap();
            Encoder::configured(&file).map(|model| model.reads())
        };
        assert_eq!(configured(&config).unwrap(), Reads::Tokens { positions: 34, vocabulary: 40 });
        config.insert("sinusoidal_pos_embds".to_owned(), true.into());
        let error = hydra_core::with_causes(&configured(&config).unwrap_err());
        assert!(error.contains("`sinusoidal_pos_embds` is true") && error.contains("tiny.json"), "{error}");
    }

    #[test]
    fn token_types_are_those_of_bert_and_positions_those_of_the_table() {
        let types = |kind: &str| model(kind).has_token_types();
        assert_eq!(ModelType::NAMES.map(types), [true, false, false, false, false]);
        let positions = |kind: &str| match model(kind).reads() {
            Reads::Tokens { positions, .. } => positions,
            Reads::Images { .. } | Reads::Batches => 0,
        };
        assert_eq!(ModelType::NAMES.map(positions), [34, 32, 32, 34, 34]);
        assert_eq!(model("bert").task_type(), TaskType::SequenceClassification);
        assert_eq!((model("bert").padding(), model("roberta").padding()), (Some(0), Some(1)));
        assert!(Encoder::new(config(json!({"type_vocab_size": 1}))).cut_vocabulary(2).is_err());
    }

    #[test]
    fn dropout_is_all_of_them_and_the_work_of_a_step_is_counted() {
        for kind in ModelType::NAMES {
            let mut model = model(kind);
            let before = model.description().unwrap();
            model.set_dropout(0.25);
            assert_eq!(model.config().hidden_dropout_prob, 0.25);
            assert_eq!(model.config().attention_probs_dropout_prob, 0.25);
            assert_eq!(model.config().head_dropout(), 0.25);
            assert!(model.config().modern.iter().all(|modern| modern.mlp_dropout == 0.25));
            assert_ne!(model.description().unwrap(), before, "{kind}");
        }
        let (head, unread) = (6 * 16 * (16 + 2), |gates| 6 * 16 * (16 + gates * 24) * 8);
        let bert = (6 * 3 * (4 * 16 * 16 + 2 * 16 * 24) + 12 * 3 * 16 * 9) * 9 - unread(2) + head;
        assert_eq!(model("bert").flops(9), f64::from(bert));
        // Two of three layers are local, and a token sees two others on each side.
        let modern = (6 * 3 * (4 * 16 * 16 + 3 * 16 * 24) + 12 * 16 * (9 + 5 + 5)) * 9 - unread(3) + head;
        assert_eq!(model("modernbert").flops(9), f64::from(modern));
    }

    #[test]
    fn adapters_are_those_of_peft_with_the_whole_classifier() {
        for (kind, adapters, saved) in [
            ("bert", "base_model.model.bert.encoder.layer.0.attention.self.query.lora_A.weight", 2),
            ("roberta", "base_model.model.roberta.encoder.layer.2.attention.self.value.lora_B.weight", 4),
            (
                "distilbert",
                "base_model.model.distilbert.transformer.layer.1.attention.q_lin.lora_A.weight",
                4,
            ),
            ("modernbert", "base_model.model.model.layers.1.attn.Wqkv.lora_A.weight", 2),
        ] {
            let (base, _) = written(kind);
            let model = open(&base);
            let lora = Lora { rank: 2, ..Lora::default() };
            let chain = model.adapted(&lora, None).unwrap();
            let buffers = ParamBuffers::of(&chain, 3);
            let dir = TempDir::new().unwrap();
            let writer = AdapterWriter::new(model.as_ref(), lora.clone());
            writer.write(&chain, &buffers, dir.path()).unwrap();
            let config = fs::read(dir.path().join("adapter_config.json")).unwrap();
            let config: Value = serde_json::from_slice(&config).unwrap();
            assert_eq!(config["task_type"], "SEQ_CLS");
            assert_eq!(config["modules_to_save"], json!(["classifier", "score"]));
            let written = tensors(&dir.path().join("adapter_model.safetensors"));
            assert!(written.contains_key(adapters), "{kind}: {:?}", written.keys());
            let maps = if kind == "modernbert" { 1 } else { 2 };
            assert_eq!(written.len(), 3 * 2 * maps + saved, "{kind}: {:?}", written.keys());
            let again = AdapterDir::open(dir.path()).unwrap();
            let read = model.adapted(&again.lora().clone(), Some(again)).unwrap();
            assert_eq!(ParamBuffers::of(&read, 9), buffers, "{kind}");
            let merged = TempDir::new().unwrap();
            let writer = MergedWriter::new(model.as_ref(), lora, SavedType::F32).unwrap();
            writer.write(&chain, &buffers, merged.path()).unwrap();
            assert!(open(&merged).chain().is_ok());
        }
    }

    #[test]
    fn adapters_of_all_linear_layers_leave_the_classifier_alone() {
        let lora = Lora { targets: crate::lora::Targets::AllLinear, ..Lora::default() };
        let (base, _) = written("bert");
        let chain = open(&base).adapted(&lora, None).unwrap();
        let adapted = chain.buffers().iter().flat_map(|buffer| &buffer.params);
        let adapted = adapted.filter(|param| param.name.ends_with("lora.a.weight"));
        assert_eq!(adapted.count(), 3 * 6 + 1, "the layers of blocks, and the pooler");
        let (base, _) = written("distilbert");
        let error = open(&base).adapted(&lora, None).unwrap_err().to_string();
        assert!(error.contains("`pre_classifier`"), "{error}");
    }
}
