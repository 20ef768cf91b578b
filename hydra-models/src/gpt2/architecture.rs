//! GPT-2 as an architecture.

use super::config::{CLASSIFIER, LANGUAGE_MODEL, PRESETS};
use super::{Gpt2Config, first_row, hf_name, layers};
use crate::ModelError;
use crate::family::supported::read_config;
use crate::family::{Adapting, HeadConfig, NamedConfig, Reads, TaskType};
use crate::gguf::{self, GgufError, GgufLayout};
use crate::lora::{Adaptation, AdaptedLayers};
use crate::ops::KvCacheForm;
use crate::parts::SCORE;
use crate::pretrained::{Architecture, PretrainedDir, PretrainedModel, PretrainedWriter, keys};
use crate::weights::Naming;
use hydra_core::FloatType;
use serde_json::{Map, Value, json};
use std::path::Path;

/// A GPT-2 described by a configuration or a directory.
pub type Gpt2 = PretrainedModel<Gpt2Config>;

/// A directory with a GPT-2.
pub type Gpt2Dir = PretrainedDir<Gpt2Config>;

/// Writes a GPT-2.
pub type Gpt2Writer = PretrainedWriter<Gpt2Config>;

/// The id of GPT-2's `<|endoftext|>`.
const GPT2_END: usize = 50_256;

impl Architecture for Gpt2Config {
    const MODEL_TYPES: &'static [&'static str] = &["gpt2"];

    const DRAWN: [&'static [&'static str]; 2] = [&[SCORE], &[]];

    const PRESETS: &'static [NamedConfig<Self>] = &PRESETS;

    fn read(file: &Path) -> Result<Self, ModelError> {
        read_config(file, Self::validate)
    }

    fn description(&self) -> Result<Value, ModelError> {
        let config = Self { other: Map::new(), head: self.head.computed(), ..self.clone() };
        let mut described = Value::Object(keys(&config)?);
        // Runs are resumed where descriptions agree, and those of language models have always named the file's classes.
        described["architectures"] = json!(self.head.architectures);
        if config.vocabulary_parts > 1 {
            described["vocabulary_parts"] = config.vocabulary_parts.into();
        }
        Ok(described)
    }

    fn to_file(&self) -> Result<Map<String, Value>, ModelError> {
        let mut config = keys(self)?;
        // If absent, Transformers assumes GPT-2's id, which smaller vocabularies do not have.
        let end = (GPT2_END < self.vocab_size).then_some(GPT2_END);
        for key in ["bos_token_id", "eos_token_id"] {
            config.entry(key).or_insert(json!(end));
        }
        Ok(config)
    }

    fn class(&self, task: TaskType) -> &'static str {
        if task == TaskType::SequenceClassification { CLASSIFIER } else { LANGUAGE_MODEL }
    }

    fn naming(&self) -> Naming {
        Naming {
            embedding: "transformer.wte.weight",
            exact: false,
            first_row,
            ..Naming::new("transformer.", "h.", "n_layer", hf_name)
        }
    }

    fn depth(&self) -> usize {
        self.n_layer
    }

    fn layers(&self, adaptation: Option<Adaptation<'_>>) -> Result<AdaptedLayers, ModelError> {
        layers(self, adaptation)
    }

    fn reads(&self) -> Reads {
        Reads::Tokens { positions: self.n_positions, vocabulary: self.vocab_size }
    }

    fn head(&self) -> Option<&HeadConfig> {
        Some(&self.head)
    }

    fn head_mut(&mut self) -> Option<&mut HeadConfig> {
        Some(&mut self.head)
    }

    fn set_dropout(&mut self, probability: f64) {
        (self.resid_pdrop, self.embd_pdrop, self.attn_pdrop) = (probability, probability, probability);
    }

    fn cut_vocabulary(&mut self, parts: usize) -> Result<(), ModelError> {
        self.vocabulary_parts = parts;
        self.validate()
    }

    fn cache_form(&self, float: FloatType, longest: usize) -> Option<KvCacheForm> {
        let Self { n_layer: blocks, n_head: key_heads, n_embd, .. } = *self;
        Some(KvCacheForm { blocks, key_heads, head_width: n_embd / key_heads, float, longest })
    }

    fn gguf(&self) -> Result<GgufLayout, GgufError> {
        gguf::of_gpt2(self)
    }

    fn adapting(&self) -> Adapting {
        let classifies = self.head.is_classifier();
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

    fn flops(&self, tokens: usize) -> f64 {
        let (layers, width, tokens) = (self.n_layer as f64, self.n_embd as f64, tokens as f64);
        let block = 4.0 * width * width + 2.0 * width * self.inner() as f64;
        let maps = layers * block;
        // The head of a classifier and the layers after the last block's attention compute one token.
        let head = match self.head.is_classifier() {
            true => {
                self.head.outputs() as f64 * width
                    - width * (width + 2.0 * self.inner() as f64) * (tokens - 1.0)
            }
            false => self.vocab_size as f64 * width * tokens,
        };
        (6.0 * maps + 12.0 * layers * width * tokens) * tokens + 6.0 * head
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Model;

    #[test]
    fn dropout_is_all_three() {
        let mut model = Gpt2::new(Gpt2Config::preset("bytes-tiny").unwrap());
        model.set_dropout(0.25);
        let Gpt2Config { resid_pdrop, embd_pdrop, attn_pdrop, .. } = *model.config();
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
