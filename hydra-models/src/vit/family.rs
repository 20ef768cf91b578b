//! Vision transformers behind the port of families.

use super::config::PRESETS;
use super::{VitConfig, VitDir, VitWriter, chain, hf_name};
use crate::ModelError;
use crate::family::{Adapting, Family, Model, Preset, Reads};
use crate::lora::{AdapterDir, Lora};
use hydra_core::{Chain, ModelWriter};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The family of vision transformers.
pub struct VitFamily;

impl Family for VitFamily {
    fn model_types(&self) -> &'static [&'static str] {
        &["vit"]
    }

    fn presets(&self) -> Vec<Preset> {
        PRESETS.into()
    }

    fn preset(&self, name: &str) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(Vit::new(VitConfig::preset(name)?)))
    }

    fn configured(&self, file: &Path) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(Vit::new(VitConfig::read(file)?)))
    }

    fn open(&self, directory: &Path) -> Result<Box<dyn Model>, ModelError> {
        let weights = VitDir::open(directory)?;
        Ok(Box::new(Vit { config: weights.config().clone(), weights: Some(weights) }))
    }
}

/// A vision transformer as a configuration or a directory describes it.
#[derive(Clone, Debug)]
pub struct Vit {
    config: VitConfig,
    weights: Option<VitDir>,
}

impl Vit {
    /// A model without weights.
    pub fn new(config: VitConfig) -> Self {
        Self { config, weights: None }
    }
}

impl Model for Vit {
    fn reads(&self) -> Reads {
        Reads::Pictures { side: self.config.image_size, channels: self.config.num_channels }
    }

    fn number_classes(&mut self, names: &[String]) -> Result<Vec<i32>, ModelError> {
        let Some(weights) = &self.weights else {
            self.config = self.config.clone().with_class_names(names);
            return Ok((0..names.len() as i32).collect());
        };
        let numbers = self.config.numbers_of(names).ok_or_else(|| ModelError::Classes {
            model: weights.directory().to_owned(),
            expected: self.config.class_names(),
            found: names.to_vec(),
        })?;
        if self.config.has_unnamed_classes() {
            self.config = self.config.clone().with_class_names(names);
        }
        Ok(numbers)
    }

    fn set_dropout(&mut self, probability: f64) {
        let config = &mut self.config;
        (config.hidden_dropout_prob, config.attention_probs_dropout_prob) = (probability, probability);
    }

    fn description(&self) -> Result<Value, ModelError> {
        let config = VitConfig { other: Map::new(), ..self.config.clone() };
        serde_json::to_value(&config).map_err(|source| ModelError::Describe { source })
    }

    fn chain(&self) -> Result<Chain, ModelError> {
        chain(&self.config, self.weights.clone())
    }

    fn writer(&self) -> Arc<dyn ModelWriter> {
        let source = self.weights.as_ref().map(|weights| weights.directory().to_owned());
        Arc::new(VitWriter { config: self.config.clone(), source })
    }

    fn adapted(&self, _: &Lora, _: Option<AdapterDir>) -> Result<Chain, ModelError> {
        Err(ModelError::NoAdapters { model_type: "vit" })
    }

    fn adapting(&self) -> Adapting {
        Adapting { targets: &["query", "value"], fan_in_fan_out: false, name: hf_name }
    }

    fn directory(&self) -> Option<&Path> {
        self.weights.as_ref().map(VitDir::directory)
    }

    fn files(&self) -> Vec<PathBuf> {
        self.weights.iter().flat_map(|weights| weights.files().map(PathBuf::from)).collect()
    }

    /// A picture's tokens are its patches and the class token, however many are asked for.
    fn flops(&self, _: usize) -> f64 {
        let config = &self.config;
        let [layers, width, inner, patches, patch, classes] = [
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.patches(),
            config.num_channels * config.patch_size.pow(2),
            config.classes(),
        ]
        .map(|size| size as f64);
        let (tokens, block) = (patches + 1.0, 4.0 * width * width + 2.0 * width * inner);
        // The embedding's input is the picture, to which no gradient goes, and the head sees one token.
        let ends = 4.0 * patches * patch * width + 6.0 * width * classes;
        (6.0 * layers * block + 12.0 * layers * width * tokens) * tokens + ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::testing::Images;
    use tempfile::TempDir;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn tiny() -> VitConfig {
        VitConfig::preset("vit-tiny").unwrap()
    }

    /// The model of a directory that was written with these classes.
    fn saved(config: VitConfig) -> (TempDir, Box<dyn Model>) {
        let dir = TempDir::new().unwrap();
        let chain = chain(&config, None).unwrap();
        VitWriter::new(config).write(&chain, &Images::of(&chain, 1), dir.path()).unwrap();
        let model = VitFamily.open(dir.path()).unwrap();
        (dir, model)
    }

    #[test]
    fn a_model_without_weights_has_the_classes_of_its_data() {
        let mut model = Vit::new(tiny());
        assert_eq!(model.number_classes(&names(&["cat", "dog", "owl"])).unwrap(), [0, 1, 2]);
        assert_eq!(model.config.class_names(), ["cat", "dog", "owl"]);
        let head = model.chain().unwrap();
        let bias = head.images().last().unwrap().params.iter().find(|param| param.name.ends_with("r.bias"));
        assert_eq!(bias.unwrap().shape, [3]);
    }

    #[test]
    fn weights_say_which_class_has_which_number() {
        let named = tiny().with_class_names(&names(&["owl", "cat", "dog"]));
        let (dir, mut model) = saved(named);
        assert_eq!(model.number_classes(&names(&["cat", "dog", "owl"])).unwrap(), [1, 2, 0]);
        assert_eq!(model.number_classes(&names(&["dog"])).unwrap(), [2], "a part of them can be evaluated");
        let said = model.number_classes(&names(&["cat", "fox"])).unwrap_err().to_string();
        for part in [dir.path().to_str().unwrap(), "3 classes (owl, cat, dog)", "2 (cat, fox)"] {
            assert!(said.contains(part), "{part} in {said}");
        }
        let (_dir, mut unnamed) = saved(tiny().with_classes(2));
        assert_eq!(unnamed.number_classes(&names(&["a", "b"])).unwrap(), [0, 1]);
        assert_eq!(unnamed.description().unwrap()["id2label"]["1"], "b");
        assert!(saved(tiny().with_classes(2)).1.number_classes(&names(&["a"])).is_err());
    }

    #[test]
    fn dropout_is_both_and_the_work_of_a_step_is_counted() {
        let mut model = Vit::new(tiny());
        model.set_dropout(0.25);
        assert_eq!(model.config.hidden_dropout_prob, 0.25);
        assert_eq!(model.config.attention_probs_dropout_prob, 0.25);
        let blocks = (6 * 3 * (4 * 48 * 48 + 2 * 48 * 96) + 12 * 3 * 48 * 17) * 17;
        let ends = 4 * 16 * 3 * 64 * 48 + 6 * 48 * 10;
        assert_eq!(model.flops(1), f64::from(blocks + ends));
    }
}
