//! Decoders of the Llama kind as an architecture.

use super::presets::PRESETS;
use super::{DecoderConfig, ModelType, first_row, hf_name, layers};
use crate::ModelError;
use crate::family::{Adapting, HeadConfig, NamedConfig, Reads, TaskType};
use crate::gguf::{self, GgufError, GgufLayout};
use crate::lora::{Adaptation, AdaptedLayers};
use crate::ops::KvCacheForm;
use crate::parts::SCORE;
use crate::pretrained::{Architecture, PretrainedDir, PretrainedModel, PretrainedWriter};
use crate::weights::{Naming, in_file, read_json};
use hydra_core::FloatType;
use serde_json::{Map, Value};
use std::path::Path;

/// A decoder described by a configuration or a directory.
pub type Decoder = PretrainedModel<DecoderConfig>;

/// A directory with a decoder.
pub type DecoderDir = PretrainedDir<DecoderConfig>;

/// Writes a decoder.
pub type DecoderWriter = PretrainedWriter<DecoderConfig>;

impl Architecture for DecoderConfig {
    const MODEL_TYPES: &'static [&'static str] = &ModelType::NAMES;

    const DRAWN: [&'static [&'static str]; 2] = [&[SCORE], &[]];

    const PRESETS: &'static [NamedConfig<Self>] = &PRESETS;

    fn read(file: &Path) -> Result<Self, ModelError> {
        let config = Self::from_json(read_json(file)?);
        let checked = config.and_then(|config| config.validate().map(|()| config));
        checked.map_err(|source| in_file(file, source))
    }

    fn description(&self) -> Result<Value, ModelError> {
        let config = Self { other: Map::new(), head: self.head.computed(), ..self.clone() };
        let mut described = config.to_json();
        if config.vocabulary_parts > 1 {
            described.insert("vocabulary_parts".to_owned(), config.vocabulary_parts.into());
        }
        Ok(Value::Object(described))
    }

    fn class(&self, task: TaskType) -> &'static str {
        let [language_model, _, classifier] = self.model_type.architectures();
        if task == TaskType::SequenceClassification { classifier } else { language_model }
    }

    fn naming(&self) -> Naming {
        Naming {
            embedding: "model.embed_tokens.weight",
            first_row,
            ..Naming::new("model.", "layers.", "num_hidden_layers", hf_name)
        }
    }

    fn depth(&self) -> usize {
        self.num_hidden_layers
    }

    fn layers(&self, adaptation: Option<Adaptation<'_>>) -> Result<AdaptedLayers, ModelError> {
        layers(self, adaptation)
    }

    fn reads(&self) -> Reads {
        Reads::Tokens { positions: self.max_position_embeddings, vocabulary: self.vocab_size }
    }

    fn head(&self) -> Option<&HeadConfig> {
        Some(&self.head)
    }

    fn head_mut(&mut self) -> Option<&mut HeadConfig> {
        Some(&mut self.head)
    }

    fn set_dropout(&mut self, probability: f64) {
        self.attention_dropout = probability;
    }

    fn cut_vocabulary(&mut self, parts: usize) -> Result<(), ModelError> {
        self.vocabulary_parts = parts;
        self.validate()
    }

    fn cache_form(&self, float: FloatType, longest: usize) -> Option<KvCacheForm> {
        let (blocks, key_heads) = (self.num_hidden_layers, self.num_key_value_heads);
        Some(KvCacheForm { blocks, key_heads, head_width: self.head_dim, float, longest })
    }

    fn untied(&self) -> Option<Self> {
        (!self.head.is_classifier()).then(|| Self { tie_word_embeddings: false, ..self.clone() })
    }

    fn gguf(&self) -> Result<GgufLayout, GgufError> {
        gguf::of_decoder(self)
    }

    fn adapting(&self) -> Adapting {
        let classifies = self.head.is_classifier();
        Adapting {
            first_row,
            embedding: "model.embed_tokens",
            head: if classifies { "" } else { "lm_head" },
            tied: self.tie_word_embeddings && !classifies,
            task: self.task_type().peft_name(),
            quantizes: true,
            ..Adapting::new(&["q_proj", "v_proj"], hf_name)
        }
    }

    fn flops(&self, tokens: usize) -> f64 {
        let [layers, width, inner, head, vocabulary, tokens] = [
            self.num_hidden_layers,
            self.hidden_size,
            self.intermediate_size,
            self.head_dim,
            self.vocab_size,
            tokens,
        ]
        .map(|size| size as f64);
        let [queries, keys] =
            [self.num_attention_heads, self.num_key_value_heads].map(|heads| heads as f64 * head);
        let block = width * (2.0 * queries + 2.0 * keys + 3.0 * inner);
        // The head of a classifier and the layers after the last block's attention compute one token.
        let head = match self.head.is_classifier() {
            true => self.head.outputs() as f64 * width - width * (queries + 3.0 * inner) * (tokens - 1.0),
            false => vocabulary * width * tokens,
        };
        (6.0 * layers * block + 12.0 * layers * queries * tokens) * tokens + 6.0 * head
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Model;

    #[test]
    fn every_kind_of_decoder_is_read() {
        for kind in ModelType::ALL {
            let file = serde_json::json!({"model_type": kind.name()});
            assert_eq!(serde_json::from_value::<DecoderConfig>(file).unwrap().model_type, kind);
        }
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
