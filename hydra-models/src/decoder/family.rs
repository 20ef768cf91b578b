//! Decoders as a model family.

use super::presets::PRESETS;
use super::{DecoderConfig, DecoderDir, DecoderWriter, chain, first_row, hf_name, layers};
use crate::ModelError;
use crate::family::{Adapting, Family, HeadConfig, Labels, Model, Preset, Reads, classify};
use crate::gguf::{self, GgufError, GgufLayout};
use crate::lora::{AdapterDir, Lora, Plan, adapted_chain, plan_of};
use crate::ops::KvCacheForm;
use crate::weights::{ParamSource, SaveForm};
use hydra_core::{Chain, FloatType, ModelWriter};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The family of Llama, Mistral, Qwen2 and Qwen3.
pub struct DecoderFamily;

impl Family for DecoderFamily {
    fn model_types(&self) -> &'static [&'static str] {
        &["llama", "mistral", "qwen2", "qwen3"]
    }

    fn presets(&self) -> Vec<Preset> {
        PRESETS.map(|(preset, _)| preset).into()
    }

    fn preset(&self, name: &str) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(Decoder::new(DecoderConfig::preset(name)?)))
    }

    fn configured(&self, file: &Path) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(Decoder::new(DecoderConfig::read(file)?)))
    }

    fn open(&self, directory: &Path) -> Result<Box<dyn Model>, ModelError> {
        let weights = DecoderDir::open(directory)?;
        Ok(Box::new(Decoder { config: weights.config().clone(), weights: Some(weights) }))
    }
}

/// A decoder described by a configuration or a directory.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: DecoderConfig,
    weights: Option<DecoderDir>,
}

impl Decoder {
    /// A model without weights.
    pub fn new(config: DecoderConfig) -> Self {
        Self { config, weights: None }
    }
}

impl Model for Decoder {
    fn reads(&self) -> Reads {
        let DecoderConfig { max_position_embeddings: positions, vocab_size: vocabulary, .. } = self.config;
        Reads::Tokens { positions, vocabulary }
    }

    fn classify(&mut self, labels: &Labels) -> Result<Vec<i32>, ModelError> {
        let architecture = self.config.model_type.classifier();
        classify(&mut self.config.head, &mut self.weights, architecture, labels)
    }

    fn head(&self) -> Option<&HeadConfig> {
        Some(&self.config.head)
    }

    fn head_mut(&mut self) -> Option<&mut HeadConfig> {
        Some(&mut self.config.head)
    }

    fn notes(&self) -> Vec<String> {
        self.weights.iter().flat_map(DecoderDir::notes).collect()
    }

    fn cache_form(&self, float: FloatType, longest: usize) -> Option<KvCacheForm> {
        let DecoderConfig { num_hidden_layers: blocks, num_key_value_heads: key_heads, head_dim, .. } =
            self.config;
        let head_width = head_dim;
        Some(KvCacheForm { blocks, key_heads, head_width, float, longest })
    }

    fn is_quantized(&self) -> bool {
        self.weights.as_ref().is_some_and(ParamSource::has_quantized)
    }

    fn set_dropout(&mut self, probability: f64) {
        self.config.attention_dropout = probability;
    }

    fn cut_vocabulary(&mut self, parts: usize) -> Result<(), ModelError> {
        self.config.vocabulary_parts = parts;
        self.config.validate()
    }

    fn description(&self) -> Result<Value, ModelError> {
        let config =
            DecoderConfig { other: Map::new(), head: self.config.head.computed(), ..self.config.clone() };
        let mut described = config.to_json();
        if config.vocabulary_parts > 1 {
            described.insert("vocabulary_parts".to_owned(), config.vocabulary_parts.into());
        }
        Ok(Value::Object(described))
    }

    fn chain(&self) -> Result<Chain, ModelError> {
        chain(&self.config, self.weights.clone())
    }

    fn writer(&self, saved: SaveForm) -> Arc<dyn ModelWriter> {
        let from = |weights: &DecoderDir| DecoderWriter::from(weights);
        let fresh = || DecoderWriter::new(self.config.clone());
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

    fn untied(&self) -> Option<Box<dyn Model>> {
        if self.config.head.is_classifier() {
            return None;
        }
        let weights = self.weights.clone().map(DecoderDir::untied);
        Some(Box::new(Self { config: self.config.untied(), weights }))
    }

    fn gguf(&self) -> Result<GgufLayout, GgufError> {
        gguf::of_decoder(&self.config)
    }

    fn adapting(&self) -> Adapting {
        let classifies = self.config.head.is_classifier();
        Adapting {
            first_row,
            embedding: "model.embed_tokens",
            head: if classifies { "" } else { "lm_head" },
            tied: self.config.tie_word_embeddings && !classifies,
            task: self.task_type().peft_name(),
            quantizes: true,
            ..Adapting::new(&["q_proj", "v_proj"], hf_name)
        }
    }

    fn directory(&self) -> Option<&Path> {
        self.weights.as_ref().map(DecoderDir::directory)
    }

    fn files(&self) -> Vec<PathBuf> {
        self.weights.iter().flat_map(|weights| weights.files().map(PathBuf::from)).collect()
    }

    fn flops(&self, tokens: usize) -> f64 {
        let config = &self.config;
        let [layers, width, inner, head, vocabulary, tokens] = [
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.head_dim,
            config.vocab_size,
            tokens,
        ]
        .map(|size| size as f64);
        let [queries, keys] =
            [config.num_attention_heads, config.num_key_value_heads].map(|heads| heads as f64 * head);
        let block = width * (2.0 * queries + 2.0 * keys + 3.0 * inner);
        // The head of a classifier and the layers after the last block's attention compute one token.
        let head = match config.head.is_classifier() {
            true => config.head.outputs() as f64 * width - width * (queries + 3.0 * inner) * (tokens - 1.0),
            false => vocabulary * width * tokens,
        };
        (6.0 * layers * block + 12.0 * layers * queries * tokens) * tokens + 6.0 * head
    }
}

#[cfg(test)]
mod tests {
    use super::super::ModelType as Kind;
    use super::*;

    #[test]
    fn every_kind_of_decoder_is_read() {
        let kinds = [Kind::Llama, Kind::Mistral, Kind::Qwen2, Kind::Qwen3];
        assert_eq!(DecoderFamily.model_types(), kinds.map(Kind::name));
    }

    #[test]
    fn the_work_of_a_step_is_six_for_each_weight_and_token() {
        let model = Decoder::new(DecoderConfig::preset("bytes-llama-tiny").unwrap());
        let maps = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176) + 256 * 64;
        let expected = (6 * maps + 12 * 4 * 64 * 128) * 128;
        assert_eq!(model.flops(128), expected as f64);
    }

    #[test]
    fn what_is_computed_is_described() {
        let config = DecoderConfig::preset("bytes-llama-tiny").unwrap();
        let mut other = config.clone();
        other.rope.theta = 20_000.0;
        let described = |config: DecoderConfig| Decoder::new(config).description().unwrap();
        assert_ne!(described(config.clone()), described(other));
        let mut with_notes = config.clone();
        with_notes.other.insert("x".to_owned(), 1.into());
        assert_eq!(described(config), described(with_notes));
    }
}
