//! What distinguishes the models of one architecture from those of another.

use super::keys;
use crate::ModelError;
use crate::family::supported::check_uncut;
use crate::family::{Adapting, Classes, HeadConfig, NamedConfig, Reads, TaskType};
use crate::gguf::{GgufError, GgufLayout};
use crate::lora::{Adaptation, AdaptedLayers, AdapterDir};
use crate::ops::KvCacheForm;
use crate::weights::Naming;
use hydra_core::FloatType;
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt::Debug;
use std::path::Path;

/// The configuration of an architecture of Transformers, and what distinguishes its models from those of other architectures.
///
/// Only this crate implements it: several of its types are private.
pub trait Architecture: Clone + Debug + Serialize + Send + Sync + 'static {
    /// The supported `model_type`s, as in Hugging Face's `config.json`.
    const MODEL_TYPES: &'static [&'static str];

    /// The parameters that a directory without a trained classifier lacks, by the beginnings of their names in the chain. Where the
    /// files lack others too, they may lack those of the second list.
    const DRAWN: [&'static [&'static str]; 2] = [&[], &[]];

    /// The named configurations.
    const PRESETS: &'static [NamedConfig<Self>];

    /// Reads and validates a `config.json`.
    ///
    /// # Errors
    /// A file that cannot be read, or a model that is not supported.
    fn read(file: &Path) -> Result<Self, ModelError>;

    /// Rejects what only weights can provide.
    ///
    /// # Errors
    /// A setting that a model without weights does not support.
    fn check_without_weights(&self) -> Result<(), ModelError> {
        Ok(())
    }

    /// Everything that affects computation and initialization ([`Model::description`](crate::family::Model::description)).
    ///
    /// # Errors
    /// Numbers that JSON cannot represent.
    fn description(&self) -> Result<Value, ModelError>;

    /// The keys of a `config.json`, except for those that writing sets.
    ///
    /// # Errors
    /// Numbers that JSON cannot represent.
    fn to_file(&self) -> Result<Map<String, Value>, ModelError> {
        keys(self)
    }

    /// The Transformers class of a model for this task.
    fn class(&self, task: TaskType) -> &'static str;

    /// The names of tensors in files.
    fn naming(&self) -> Naming;

    /// The number of blocks, or of stages, that the files must not exceed.
    fn depth(&self) -> usize;

    /// The layers of the chain, with trained adapters if there is an adaptation.
    ///
    /// # Errors
    /// An invalid configuration, or adapter settings that do not fit it.
    fn layers(&self, adaptation: Option<Adaptation<'_>>) -> Result<AdaptedLayers, ModelError>;

    /// The form of the inputs.
    fn reads(&self) -> Reads;

    /// What the model is trained for ([`Model::task_type`](crate::family::Model::task_type)).
    fn task_type(&self) -> TaskType {
        TaskType::of(self.reads(), self.head())
    }

    /// The head of a model that reads tokens.
    fn head(&self) -> Option<&HeadConfig> {
        None
    }

    /// The [head](Self::head), to be changed.
    fn head_mut(&mut self) -> Option<&mut HeadConfig> {
        None
    }

    /// The classes of a model that reads images.
    fn classes_mut(&mut self) -> Option<&mut Classes> {
        None
    }

    /// Returns whether the model embeds token types.
    fn has_token_types(&self) -> bool {
        false
    }

    /// Sets the probability of every dropout in the model.
    fn set_dropout(&mut self, probability: f64);

    /// Splits the vocabulary tables into this many layers each.
    ///
    /// # Errors
    /// More parts than the architecture supports or the vocabulary has tokens.
    fn cut_vocabulary(&mut self, parts: usize) -> Result<(), ModelError> {
        check_uncut(parts)
    }

    /// The sizes of a key-value cache ([`Model::cache_form`](crate::family::Model::cache_form)).
    fn cache_form(&self, _float: FloatType, _longest: usize) -> Option<KvCacheForm> {
        None
    }

    /// The same configuration with a separate table for the head ([`Model::untied`](crate::family::Model::untied)).
    fn untied(&self) -> Option<Self> {
        None
    }

    /// llama.cpp's view of the model.
    ///
    /// # Errors
    /// A model that llama.cpp does not compute.
    fn gguf(&self) -> Result<GgufLayout, GgufError> {
        Err(GgufError::reads(self.reads()))
    }

    /// PEFT's view of the model. Without default targets the architecture has no adapters.
    fn adapting(&self) -> Adapting;

    /// Maps a parameter to its name in the files of these adapters.
    fn adapter_name(&self, _adapter: &AdapterDir) -> fn(&str) -> String {
        self.adapting().name
    }

    /// Floating-point operations of a training step on one item ([`Model::flops`](crate::family::Model::flops)).
    fn flops(&self, tokens: usize) -> f64;
}
