//! Model families behind a common trait.
//!
//! A [`Family`] reads the configurations of some architectures and makes a [`Model`] of one: its chain, writer, files
//! and input form. [`load`] finds the family of a name. To add a family, add a folder with an implementation of
//! [`Architecture`] to this crate and an entry to [`FAMILIES`].
//!
//! ```
//! use hydra_models::family::{self, Reads};
//!
//! let model = family::load("bytes-tiny")?;
//! assert_eq!(model.reads(), Reads::Tokens { positions: 128, vocabulary: 256 });
//! assert_eq!(model.chain()?.len(), 6);
//! # Ok::<(), hydra_models::ModelError>(())
//! ```

mod classes;
mod classifier;
mod hub;
mod load;
pub(crate) mod supported;

pub use crate::objective::Labels;
pub use classes::Classes;
pub use classifier::HeadConfig;
pub use hub::directory;
pub use load::load;
use supported::check_uncut;

use crate::gguf::{GgufError, GgufLayout};
use crate::lora::{AdapterDir, Lora, Plan};
use crate::ops::KvCacheForm;
use crate::pretrained::{Architecture, PretrainedModel};
use crate::weights::SaveForm;
use crate::{ModelError, convnext, decoder, encoder, gpt2, resnet, vit};
use hydra_core::{Chain, FloatType, ModelWriter};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// All families, in the order in which their presets are listed.
pub static FAMILIES: [Family; 6] = [
    Family::of::<gpt2::Gpt2Config>(),
    Family::of::<decoder::DecoderConfig>(),
    Family::of::<encoder::EncoderConfig>(),
    Family::of::<vit::VitConfig>(),
    Family::of::<convnext::ConvNextConfig>(),
    Family::of::<resnet::ResNetConfig>(),
];

/// A family of models with one form of configuration.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// The supported `model_type`s, as in Hugging Face's `config.json`.
    pub model_types: &'static [&'static str],
    /// The named models.
    pub presets: fn() -> Vec<Preset>,
    /// The preset of a name, without weights.
    preset: fn(&str) -> Result<Box<dyn Model>, ModelError>,
    /// The model of a configuration file, without weights.
    configured: fn(&Path) -> Result<Box<dyn Model>, ModelError>,
    /// The model of a Hugging Face directory. Its weights are checked and read on demand.
    open: fn(&Path) -> Result<Box<dyn Model>, ModelError>,
}

impl Family {
    const fn of<C: Architecture>() -> Self {
        Self {
            model_types: C::MODEL_TYPES,
            presets: || C::PRESETS.iter().map(NamedConfig::preset).collect(),
            preset: |name| Ok(Box::new(PretrainedModel::new(NamedConfig::find(C::PRESETS, name)?))),
            configured: |file| Ok(Box::new(PretrainedModel::<C>::configured(file)?)),
            open: |directory| Ok(Box::new(PretrainedModel::<C>::open(directory)?)),
        }
    }
}

/// A named model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// The name.
    pub name: &'static str,
    /// A one-line description.
    pub description: &'static str,
}

/// A named configuration of an architecture.
#[derive(Debug)]
pub struct NamedConfig<C> {
    preset: Preset,
    config: fn() -> Result<C, ModelError>,
}

impl<C> NamedConfig<C> {
    /// The configuration of this name, with a one-line description.
    pub(crate) const fn new(
        name: &'static str,
        description: &'static str,
        config: fn() -> Result<C, ModelError>,
    ) -> Self {
        Self { preset: Preset { name, description }, config }
    }

    /// Its name and description.
    pub fn preset(&self) -> Preset {
        self.preset
    }

    /// The configuration of this name.
    ///
    /// # Errors
    /// An unknown name.
    pub(crate) fn find(all: &[Self], name: &str) -> Result<C, ModelError> {
        let known = || all.iter().map(|named| named.preset.name).collect();
        match all.iter().find(|named| named.preset.name == name) {
            Some(named) => (named.config)(),
            None => Err(ModelError::UnknownPreset { found: name.to_owned(), known: known() }),
        }
    }
}

/// The form of a model's inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Ids `[items, tokens]`; each predicts the next, or the sequence has labels ([`Model::task_type`]).
    Tokens {
        /// The longest sequence in tokens.
        positions: usize,
        /// The size of the vocabulary.
        vocabulary: usize,
    },
    /// Images `[items, channels, side, side]` with one class each.
    Images {
        /// The side in pixels.
        side: usize,
        /// The number of colour channels.
        channels: usize,
    },
    /// Batches of the program that brings the model and its data: this crate reads none.
    Batches,
}

/// What a model is trained for, by its head. Transformers has a class of models for each, PEFT a task type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskType {
    /// The next token: a language model head.
    CausalLm,
    /// The labels of a text: a classifier's head on one vector for each sequence.
    SequenceClassification,
    /// The class of an image.
    ImageClassification,
    /// The loss that a model of another program computes.
    Own,
}

impl TaskType {
    /// What a model with these inputs and this head is trained for.
    pub(crate) fn of(reads: Reads, head: Option<&HeadConfig>) -> Self {
        match reads {
            Reads::Tokens { .. } => head.map_or(Self::CausalLm, HeadConfig::task_type),
            Reads::Images { .. } => Self::ImageClassification,
            Reads::Batches => Self::Own,
        }
    }

    /// PEFT's name, if it has one.
    pub fn peft_name(self) -> Option<&'static str> {
        match self {
            Self::CausalLm => Some("CAUSAL_LM"),
            Self::SequenceClassification => Some("SEQ_CLS"),
            Self::ImageClassification | Self::Own => None,
        }
    }
}

/// PEFT's view of a family.
#[derive(Clone, Copy, Debug)]
pub struct Adapting {
    /// The default target modules.
    pub targets: &'static [&'static str],
    /// Whether weights are `[in, out]`.
    pub fan_in_fan_out: bool,
    /// Maps a parameter to its Transformers name in memory.
    pub name: fn(&str) -> String,
    /// Maps an accepted target name to its Transformers name.
    pub target: for<'a> fn(&'a str) -> &'a str,
    /// A parameter's first row in the table of that name; nonzero for a slice.
    pub first_row: fn(&str) -> usize,
    /// The Transformers module of the token embedding; empty for other models.
    pub embedding: &'static str,
    /// The Transformers module of the language model head; empty for other models.
    pub head: &'static str,
    /// Whether the two share a table.
    pub tied: bool,
    /// PEFT's task type.
    pub task: Option<&'static str>,
    /// Whether its linear modules can be quantized.
    pub quantizes: bool,
}

impl Adapting {
    /// The view of a model with `[out, in]` weights and no token table.
    pub fn new(targets: &'static [&'static str], name: fn(&str) -> String) -> Self {
        Self {
            targets,
            fan_in_fan_out: false,
            name,
            target: |target| target,
            first_row: |_| 0,
            embedding: "",
            head: "",
            tied: false,
            task: None,
            quantizes: false,
        }
    }

    /// Returns the settings with target names mapped to Transformers' names, and with the head of a sequence classifier.
    pub(crate) fn named(&self, lora: Lora) -> Lora {
        let lora = lora.with_targets(self.target);
        match self.task == TaskType::SequenceClassification.peft_name() {
            true => lora.with_classifier(),
            false => lora,
        }
    }
}

/// A model's description, without its weights in memory.
pub trait Model: Send + Sync {
    /// The form of its inputs.
    fn reads(&self) -> Reads;

    /// The numbers that the model gives to the data's classes of these names, in order. A model without weights takes
    /// these classes; weights determine their own. Only called for classifiers.
    ///
    /// # Errors
    /// Classes that the weights do not have, or a model that is not a classifier.
    fn number_classes(&mut self, names: &[String]) -> Result<Vec<i32>, ModelError> {
        Err(ModelError::NoClassifier { found: names.len() })
    }

    /// What the model is trained for. A directory's `architectures` determine it; presets and configurations without
    /// them are language models if they [read](Self::reads) tokens.
    fn task_type(&self) -> TaskType {
        TaskType::of(self.reads(), self.head())
    }

    /// Makes the model a sequence classifier of these labels, and returns the numbers that it gives to them, in order. A
    /// directory of a classifier keeps its head, which determines the names and what they mean; otherwise the head
    /// is new, and its weights are drawn from the task's seed.
    ///
    /// # Errors
    /// Labels that the directory's head does not have, or a family without sequence classifiers.
    fn classify(&mut self, labels: &Labels) -> Result<Vec<i32>, ModelError> {
        Err(ModelError::NoClassifier { found: labels.names.len() })
    }

    /// The head in the configuration of a model that reads tokens.
    fn head(&self) -> Option<&HeadConfig> {
        None
    }

    /// The [head](Self::head), to be changed.
    fn head_mut(&mut self) -> Option<&mut HeadConfig> {
        None
    }

    /// The classes of a sequence classifier, or names of the numbers of a regression.
    fn classes(&self) -> Option<Classes> {
        self.head().filter(|head| head.is_classifier()).map(HeadConfig::classes)
    }

    /// What the model does not use of its weight files, and what it adds to them, each as a sentence without an end.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// The id of the padding token, `pad_token_id`. A sequence classifier of a decoder reads the last token that is
    /// another one.
    fn padding(&self) -> Option<u32> {
        self.head().and_then(HeadConfig::padding)
    }

    /// Sets the padding token of a model that reads tokens.
    fn set_padding(&mut self, id: u32) {
        if let Some(head) = self.head_mut() {
            head.pad_token_id = Some(id.into());
        }
    }

    /// Returns whether the model embeds token types: inputs then have a third tensor, the type of each token.
    fn has_token_types(&self) -> bool {
        false
    }

    /// Sets the probability of every dropout in the model.
    fn set_dropout(&mut self, probability: f64);

    /// Splits the vocabulary tables into this many layers each, so that a device does not have to hold a whole one.
    ///
    /// # Errors
    /// More parts than the family supports or the vocabulary has tokens.
    fn cut_vocabulary(&mut self, parts: usize) -> Result<(), ModelError> {
        check_uncut(parts)
    }

    /// The sizes of a key-value cache for values of this type and sequences of up to `longest` tokens; `None` if the model
    /// is no decoder. With a cache in its [head](Self::head_mut), a language model's chain returns logits of next tokens
    /// ([`generation`](crate::generation)).
    fn cache_form(&self, _float: FloatType, _longest: usize) -> Option<KvCacheForm> {
        None
    }

    /// Returns whether its files have quantized matrices, which cannot be trained: train [adapters](Self::adapted).
    fn is_quantized(&self) -> bool {
        false
    }

    /// Everything in the configuration that affects computation and initialization: two models with equal descriptions
    /// and equal files are equal.
    ///
    /// # Errors
    /// A configuration that cannot be written as JSON.
    fn description(&self) -> Result<Value, ModelError>;

    /// The chain; its initial weights come from the model's files, or from a task's seed if there are none.
    ///
    /// # Errors
    /// An invalid configuration.
    fn chain(&self) -> Result<Chain, ModelError>;

    /// A writer of the trained model in the format that the family reads, with weights in this form.
    fn writer(&self, saved: SaveForm) -> Arc<dyn ModelWriter>;

    /// The frozen chain with trained adapters, new ones or those of a directory.
    ///
    /// # Errors
    /// An invalid configuration, or adapters that do not fit it.
    fn adapted(&self, lora: &Lora, adapter: Option<AdapterDir>) -> Result<Chain, ModelError>;

    /// Resolves adapter settings for this model.
    ///
    /// # Errors
    /// An invalid configuration, or settings that do not fit it.
    fn plan(&self, lora: &Lora) -> Result<Plan, ModelError>;

    /// The same model with a separate table for the head, if embedding and head share one and such a model can be
    /// written.
    fn untied(&self) -> Option<Box<dyn Model>> {
        None
    }

    /// llama.cpp's view of the model: the settings and tensors of a GGUF file.
    ///
    /// # Errors
    /// A model that llama.cpp does not compute.
    fn gguf(&self) -> Result<GgufLayout, GgufError> {
        Err(GgufError::reads(self.reads()))
    }

    /// PEFT's view of the model: default targets and weight layout.
    fn adapting(&self) -> Adapting;

    /// The Hugging Face directory that the model was loaded from, if any.
    fn directory(&self) -> Option<&Path>;

    /// The weight files, if any.
    fn files(&self) -> Vec<PathBuf>;

    /// Floating-point operations of a training step on one item of this many tokens: six per token and element of each
    /// weight matrix that multiplies it (forward, backward to the input, and backward to the weight), and twelve per
    /// layer, width of all heads, token and attended token (scores and values; the causal mask is not subtracted).
    /// Recomputation is not counted.
    fn flops(&self, tokens: usize) -> f64;
}

/// All presets of all families.
pub fn presets() -> impl Iterator<Item = Preset> {
    FAMILIES.iter().flat_map(|family| (family.presets)())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_and_types_belong_to_one_family() {
        let types: Vec<&str> = FAMILIES.iter().flat_map(|family| family.model_types).copied().collect();
        assert_eq!(types.iter().collect::<BTreeSet<_>>().len(), types.len(), "{types:?}");
        let names: Vec<&str> = presets().map(|preset| preset.name).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "{names:?}");
    }

    #[test]
    fn every_preset_is_a_model_that_counts_its_work() {
        for preset in presets() {
            let model = load(preset.name).unwrap();
            assert!(model.files().is_empty(), "{}", preset.name);
            let (short, long) = (model.flops(1024), model.flops(2048));
            match model.reads() {
                Reads::Tokens { positions, vocabulary } => {
                    assert!(positions > 1 && vocabulary >= 256, "{}", preset.name);
                    assert!(short > 0.0 && long > 2.0 * short, "{}: attention grows", preset.name);
                }
                Reads::Images { side, channels } => {
                    assert!(side > 1 && channels == 3 && short > 0.0 && short == long, "{}", preset.name);
                }
                Reads::Batches => panic!("`{}` has no form of inputs", preset.name),
            }
        }
    }
}
