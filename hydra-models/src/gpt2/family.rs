//! GPT-2 as a model family.

use super::config::{CLASSIFIER, PRESETS};
use super::weights::read_config;
use super::{Gpt2Config, Gpt2Dir, Gpt2Writer, chain, first_row, hf_name, layers};
use crate::ModelError;
use crate::family::{Adapting, Family, HeadConfig, Labels, Model, Preset, Reads, classify};
use crate::gguf::{self, GgufError, GgufLayout};
use crate::lora::{AdapterDir, Lora, Plan, adapted_chain, plan_of};
use crate::ops::KvCacheForm;
use crate::weights::{ParamSource, SaveForm};
use hydra_core::{Chain, FloatType, ModelWriter};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The GPT-2 family.
pub struct Gpt2Family;

impl Family for Gpt2Family {
    fn model_types(&self) -> &'static [&'static str] {
        &["gpt2"]
    }

    fn presets(&self) -> Vec<Preset> {
        PRESETS.map(|(preset, _)| preset).into()
    }

    fn preset(&self, name: &str) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(Gpt2::new(Gpt2Config::preset(name)?)))
    }

    fn configured(&self, file: &Path) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(Gpt2::new(read_config(file)?)))
    }

    fn open(&self, directory: &Path) -> Result<Box<dyn Model>, ModelError> {
        let weights = Gpt2Dir::open(directory)?;
        Ok(Box::new(Gpt2 { config: weights.config().clone(), weights: Some(weights) }))
    }
}

/// A GPT-2 described by a configuration or a directory.
#[derive(Clone, Debug)]
pub struct Gpt2 {
    config: Gpt2Config,
    weights: Option<Gpt2Dir>,
}

impl Gpt2 {
    /// A model without weights.
    pub fn new(config: Gpt2Config) -> Self {
        Self { config, weights: None }
    }
}

impl Model for Gpt2 {
    fn reads(&self) -> Reads {
        Reads::Tokens { positions: self.config.n_positions, vocabulary: self.config.vocab_size }
    }

    fn classify(&mut self, labels: &Labels) -> Result<Vec<i32>, ModelError> {
        classify(&mut self.config.head, &mut self.weights, CLASSIFIER, labels)
    }

    fn head(&self) -> Option<&HeadConfig> {
        Some(&self.config.head)
    }

    fn head_mut(&mut self) -> Option<&mut HeadConfig> {
        Some(&mut self.config.head)
    }

    fn notes(&self) -> Vec<String> {
        self.weights.iter().flat_map(Gpt2Dir::notes).collect()
    }

    fn cache_form(&self, float: FloatType, longest: usize) -> Option<KvCacheForm> {
        let Gpt2Config { n_layer: blocks, n_head: key_heads, n_embd, .. } = self.config;
        Some(KvCacheForm { blocks, key_heads, head_width: n_embd / key_heads, float, longest })
    }

    fn set_dropout(&mut self, probability: f64) {
        let config = &mut self.config;
        (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) = (probability, probability, probability);
    }

    fn cut_vocabulary(&mut self, parts: usize) -> Result<(), ModelError> {
        self.config.vocabulary_parts = parts;
        self.config.validate()
    }

    fn description(&self) -> Result<Value, ModelError> {
        let config =
            Gpt2Config { other: Map::new(), head: self.config.head.computed(), ..self.config.clone() };
        let described = serde_json::to_value(&config);
        let mut described = described.map_err(|source| ModelError::Describe { source })?;
        // Runs are resumed where descriptions agree, and those of language models have always named the file's classes.
        described["architectures"] = json!(self.config.head.architectures);
        if config.vocabulary_parts > 1 {
            described["vocabulary_parts"] = config.vocabulary_parts.into();
        }
        Ok(described)
    }

    fn chain(&self) -> Result<Chain, ModelError> {
        chain(&self.config, self.weights.clone())
    }

    fn writer(&self, saved: SaveForm) -> Arc<dyn ModelWriter> {
        let from = |weights: &Gpt2Dir| Gpt2Writer::from(weights);
        let fresh = || Gpt2Writer::new(self.config.clone());
        Arc::new(self.weights.as_ref().map_or_else(fresh, from).saved_as(saved))
    }

    fn adapted(&self, lora: &Lora, adapter: Option<AdapterDir>) -> Result<Chain, ModelError> {
        let base = self.weights.clone().map(|weights| Arc::new(weights) as Arc<dyn ParamSource>);
        adapter.as_ref().map_or(Ok(()), |adapter| adapter.check_classes(self.classes()))?;
        let adapting = &self.adapting();
        adapted_chain(lora, [adapting; 2], base, adapter, |with| layers(&self.config, Some(with)))
    }

    fn plan(&self, lora: &Lora) -> Result<Plan, ModelError> {
        plan_of(lora, &self.adapting(), |with| layers(&self.config, Some(with)))
    }

    fn gguf(&self) -> Result<GgufLayout, GgufError> {
        gguf::of_gpt2(&self.config)
    }

    fn adapting(&self) -> Adapting {
        let classifies = self.config.head.is_classifier();
        Adapting {
            fan_in_fan_out: true,
            first_row,
            embedding: "transformer.wte",
            head: if classifies { "" } else { "lm_head" },
            tied: !classifies,
            task: self.task_type().peft_name(),
            quantizes: true,
            ..Adapting::new(&["c_attn"], hf_name)
        }
    }

    fn directory(&self) -> Option<&Path> {
        self.weights.as_ref().map(Gpt2Dir::directory)
    }

    fn files(&self) -> Vec<PathBuf> {
        self.weights.iter().flat_map(|weights| weights.files().map(PathBuf::from)).collect()
    }

    fn flops(&self, tokens: usize) -> f64 {
        let config = &self.config;
        let (layers, width, tokens) = (config.n_layer as f64, config.n_embd as f64, tokens as f64);
        let block = 4.0 * width * width + 2.0 * width * config.inner() as f64;
        let maps = layers * block;
        // The head of a classifier and the layers after the last block's attention compute one token.
        let head = match config.head.is_classifier() {
            true => {
                config.head.outputs() as f64 * width
                    - width * (width + 2.0 * config.inner() as f64) * (tokens - 1.0)
            }
            false => config.vocab_size as f64 * width * tokens,
        };
        (6.0 * maps + 12.0 * layers * width * tokens) * tokens + 6.0 * head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropout_is_all_three() {
        let mut model = Gpt2::new(Gpt2Config::preset("bytes-tiny").unwrap());
        model.set_dropout(0.25);
        let Gpt2Config { resid_pdrop, embd_pdrop, attn_pdrop, .. } = model.config;
        assert_eq!([resid_pdrop, embd_pdrop, attn_pdrop], [0.25; 3]);
    }

    #[test]
    fn the_work_of_a_step_is_six_for_each_weight_and_token() {
        let model = Gpt2::new(Gpt2Config::preset("bytes-tiny").unwrap());
        let maps = 4 * 12 * 64 * 64 + 256 * 64;
        let expected = (6 * maps + 12 * 4 * 64 * 128) * 128;
        assert_eq!(model.flops(128), expected as f64);
    }
}
