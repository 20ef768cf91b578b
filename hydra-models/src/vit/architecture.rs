//! Vision transformers as an architecture.

use super::config::PRESETS;
use super::{VitConfig, hf_name, layers, module_name, module_target};
use crate::ModelError;
use crate::family::supported::read_config;
use crate::family::{Adapting, Classes, NamedConfig, Reads, TaskType};
use crate::lora::{Adaptation, AdaptedLayers, AdapterDir};
use crate::pretrained::{Architecture, PretrainedDir, PretrainedModel, PretrainedWriter, keys};
use crate::weights::Naming;
use serde_json::{Map, Value};
use std::path::Path;

/// A vision transformer described by a configuration or a directory.
pub type Vit = PretrainedModel<VitConfig>;

/// A directory with a vision transformer.
pub type VitDir = PretrainedDir<VitConfig>;

/// Writes a vision transformer.
pub type VitWriter = PretrainedWriter<VitConfig>;

impl Architecture for VitConfig {
    const MODEL_TYPES: &'static [&'static str] = &["vit"];

    const PRESETS: &'static [NamedConfig<Self>] = &PRESETS;

    fn read(file: &Path) -> Result<Self, ModelError> {
        read_config(file, Self::validate)
    }

    fn description(&self) -> Result<Value, ModelError> {
        Ok(Value::Object(keys(&Self { other: Map::new(), ..self.clone() })?))
    }

    fn class(&self, _: TaskType) -> &'static str {
        "ViTForImageClassification"
    }

    fn naming(&self) -> Naming {
        Naming::new("vit.", "encoder.layer.", "num_hidden_layers", hf_name)
    }

    fn depth(&self) -> usize {
        self.num_hidden_layers
    }

    fn layers(&self, adaptation: Option<Adaptation<'_>>) -> Result<AdaptedLayers, ModelError> {
        layers(self, adaptation)
    }

    fn reads(&self) -> Reads {
        Reads::Images { side: self.image_size, channels: self.num_channels }
    }

    fn classes_mut(&mut self) -> Option<&mut Classes> {
        Some(&mut self.labels)
    }

    fn set_dropout(&mut self, probability: f64) {
        (self.hidden_dropout_prob, self.attention_probs_dropout_prob) = (probability, probability);
    }

    fn adapting(&self) -> Adapting {
        Adapting { target: module_target, ..Adapting::new(&["query", "value"], module_name) }
    }

    fn adapter_name(&self, adapter: &AdapterDir) -> fn(&str) -> String {
        // Adapters trained before Transformers 5 use the names of files.
        if adapter.names(".encoder.layer.") { hf_name } else { module_name }
    }

    /// The number of tokens is fixed: the patches and the class token.
    fn flops(&self, _: usize) -> f64 {
        let [layers, width, inner, patches, patch, classes] = [
            self.num_hidden_layers,
            self.hidden_size,
            self.intermediate_size,
            self.patches(),
            self.num_channels * self.patch_size.pow(2),
            self.labels.count(),
        ]
        .map(|size| size as f64);
        let (tokens, block) = (patches + 1.0, 4.0 * width * width + 2.0 * width * inner);
        // The embedding's input, the image, gets no gradient. The head and the layers after the last block's attention compute one token.
        let unread = 6.0 * width * (width + 2.0 * inner) * patches;
        let ends = 4.0 * patches * patch * width + 6.0 * width * classes;
        (6.0 * layers * block + 12.0 * layers * width * tokens) * tokens - unread + ends
    }
}

#[cfg(test)]
mod tests {
    use super::super::chain;
    use super::*;
    use crate::family::Classes;
    use crate::family::Model;
    use crate::lora::{AdapterWriter, Lora};
    use crate::weights::testing::ParamBuffers;
    use hydra_core::{Chain, ModelWriter};
    use tempfile::TempDir;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn tiny() -> VitConfig {
        VitConfig::preset("vit-tiny").unwrap()
    }

    /// Opens a directory written with these classes.
    fn saved(config: VitConfig) -> (TempDir, Box<dyn Model>) {
        let dir = TempDir::new().unwrap();
        let chain = chain(&config, None).unwrap();
        VitWriter::new(config).write(&chain, &ParamBuffers::of(&chain, 1), dir.path()).unwrap();
        let model = Vit::open(dir.path()).unwrap();
        (dir, Box::new(model))
    }

    #[test]
    fn a_model_without_weights_has_the_classes_of_its_data() {
        let mut model = Vit::new(tiny());
        assert_eq!(model.number_classes(&names(&["cat", "dog", "owl"])).unwrap(), [0, 1, 2]);
        assert_eq!(model.config().labels.names(), ["cat", "dog", "owl"]);
        let head = model.chain().unwrap();
        let bias = head.buffers().last().unwrap().params.iter().find(|param| param.name.ends_with("r.bias"));
        assert_eq!(bias.unwrap().shape, [3]);
    }

    #[test]
    fn weights_say_which_class_has_which_number() {
        let named = VitConfig { labels: Classes::named(&names(&["owl", "cat", "dog"])), ..tiny() };
        let (dir, mut model) = saved(named);
        assert_eq!(model.number_classes(&names(&["cat", "dog", "owl"])).unwrap(), [1, 2, 0]);
        assert_eq!(model.number_classes(&names(&["dog"])).unwrap(), [2], "a part of them can be evaluated");
        let said = model.number_classes(&names(&["cat", "fox"])).unwrap_err().to_string();
        for part in [dir.path().to_str().unwrap(), "3 classes (owl, cat, dog)", "2 (cat, fox)"] {
            assert!(said.contains(part), "{part} in {said}");
        }
        let (_dir, mut unnamed) = saved(VitConfig { labels: Classes::numbered(2), ..tiny() });
        assert_eq!(unnamed.number_classes(&names(&["a", "b"])).unwrap(), [0, 1]);
        assert_eq!(unnamed.description().unwrap()["id2label"]["1"], "b");
        assert!(
            saved(VitConfig { labels: Classes::numbered(2), ..tiny() })
                .1
                .number_classes(&names(&["a"]))
                .is_err()
        );
    }

    #[test]
    fn dropout_is_both_and_the_work_of_a_step_is_counted() {
        let mut model = Vit::new(tiny());
        model.set_dropout(0.25);
        assert_eq!(model.config().hidden_dropout_prob, 0.25);
        assert_eq!(model.config().attention_probs_dropout_prob, 0.25);
        let blocks = (6 * 3 * (4 * 48 * 48 + 2 * 48 * 96) + 12 * 3 * 48 * 17) * 17;
        let (unread, ends) = (6 * 48 * (48 + 2 * 96) * 16, 4 * 16 * 3 * 64 * 48 + 6 * 48 * 10);
        assert_eq!(model.flops(1), f64::from(blocks - unread + ends));
    }

    /// The tensors of an adapter file.
    fn adapters(dir: &Path) -> Vec<(String, Vec<u8>)> {
        let bytes = std::fs::read(dir.join("adapter_model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut all: Vec<_> =
            file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect();
        all.sort();
        all
    }

    #[test]
    fn adapters_are_written_and_read_by_the_names_of_either_transformers() {
        let (base, model) = saved(tiny());
        let lora = |targets: &[&str]| Lora { rank: 2, targets: names(targets).into(), ..Lora::default() };
        let (older, newer) = (lora(&["query", "value"]), lora(&["q_proj", "v_proj"]));
        let (chain, same) = (model.adapted(&older, None).unwrap(), model.adapted(&newer, None).unwrap());
        let params = |chain: &Chain| -> Vec<String> {
            chain.buffers().iter().flat_map(|buffer| buffer.params.iter().map(|p| p.name.clone())).collect()
        };
        assert_eq!(params(&chain), params(&same));
        let trained = (0..chain.len()).flat_map(|layer| chain.trained_params(layer)).filter(|is| *is).count();
        assert_eq!(trained, 3 * 2 * 2);
        let dir = TempDir::new().unwrap();
        let buffers = ParamBuffers::of(&chain, 3);
        AdapterWriter::new(model.as_ref(), older).write(&chain, &buffers, dir.path()).unwrap();
        let config = std::fs::read(dir.path().join("adapter_config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        assert_eq!(config["target_modules"], serde_json::json!(["q_proj", "v_proj"]));
        assert!(
            config["task_type"].is_null()
                && config["base_model_name_or_path"] == base.path().to_str().unwrap()
        );
        let written = adapters(dir.path());
        assert_eq!(written[0].0, "base_model.model.vit.layers.0.attention.q_proj.lora_A.weight");
        let again = AdapterDir::open(dir.path()).unwrap();
        let read = model.adapted(&again.lora().clone(), Some(again)).unwrap();
        assert_eq!(ParamBuffers::of(&read, 9), buffers);
        // As written by PEFT with Transformers before 5.
        let renamed = |name: &str| {
            let name = name.replace("vit.layers.", "vit.encoder.layer.");
            name.replace(".q_proj.", ".attention.query.").replace(".v_proj.", ".attention.value.")
        };
        let views = written.iter().map(|(name, bytes)| {
            let shape = if name.contains("lora_A") { vec![2, 48] } else { vec![48, 2] };
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, bytes).unwrap();
            (renamed(name), view)
        });
        let file = safetensors::tensor::serialize(views, None).unwrap();
        std::fs::write(dir.path().join("adapter_model.safetensors"), file).unwrap();
        let text = serde_json::json!({"peft_type": "LORA", "r": 2, "target_modules": ["query", "value"]});
        std::fs::write(dir.path().join("adapter_config.json"), text.to_string()).unwrap();
        let older = AdapterDir::open(dir.path()).unwrap();
        assert_eq!(ParamBuffers::of(&model.adapted(&older.lora().clone(), Some(older)).unwrap(), 9), buffers);
        let refused = model.adapted(&lora(&["c_attn"]), None).unwrap_err().to_string();
        assert!(
            refused.contains("`c_attn`, expected some of q_proj, k_proj, v_proj, o_proj, fc1, fc2"),
            "{refused}"
        );
    }
}
