//! Families of models behind one port, so that a program need not know which it trains.
//!
//! A [`Family`] reads the configurations of some architectures and makes a [`Model`] of one: its chain, its writer, its
//! files, and what it reads. [`load`] finds the family of a name. A further family is a folder of this crate with an
//! implementation, and a line in [`FAMILIES`].
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
mod hub;
mod load;
pub(crate) mod supported;

pub use classes::Classes;
pub use hub::directory;
pub use load::load;

use crate::lora::{AdapterDir, Lora, Plan};
use crate::weights::SavedType;
use crate::{ModelError, convnext, decoder, gpt2, vit};
use hydra_core::{Chain, ModelWriter};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The families that are known, in the order in which their presets are listed.
pub const FAMILIES: &[&dyn Family] =
    &[&gpt2::Gpt2Family, &decoder::DecoderFamily, &vit::VitFamily, &convnext::ConvNextFamily];

/// Models that are described by configurations of one form.
pub trait Family: Sync {
    /// The `model_type`s of the configurations that it reads, as in Hugging Face's `config.json`.
    fn model_types(&self) -> &'static [&'static str];

    /// The models that have names.
    fn presets(&self) -> Vec<Preset>;

    /// The preset called `name`, one of [`presets`](Self::presets), without weights.
    ///
    /// # Errors
    /// A name that no preset has.
    fn preset(&self, name: &str) -> Result<Box<dyn Model>, ModelError>;

    /// The model of a configuration file, without weights.
    ///
    /// # Errors
    /// A file that cannot be read, or a configuration that the family refuses.
    fn configured(&self, file: &Path) -> Result<Box<dyn Model>, ModelError>;

    /// The model of a Hugging Face directory, with its weights, which are checked now and read when they are asked for.
    ///
    /// # Errors
    /// A configuration that the family refuses, and weights that are missing, damaged or of another model.
    fn open(&self, directory: &Path) -> Result<Box<dyn Model>, ModelError>;
}

/// A model that has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// The name.
    pub name: &'static str,
    /// One line about it.
    pub description: &'static str,
}

/// What a model's batches are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Ids `[items, tokens]`, of which each predicts the next.
    Tokens {
        /// The longest sequence in tokens.
        positions: usize,
        /// The number of ids.
        vocabulary: usize,
    },
    /// Images `[items, channels, side, side]`, of which each has a class.
    Images {
        /// The pixels of a side.
        side: usize,
        /// The colours of a pixel.
        channels: usize,
    },
}

/// What PEFT knows of a family.
#[derive(Clone, Copy, Debug)]
pub struct Adapting {
    /// The maps that are adapted where nobody says which.
    pub targets: &'static [&'static str],
    /// True if weights are `[in, out]`.
    pub fan_in_fan_out: bool,
    /// The name that transformers gives a parameter in memory.
    pub name: fn(&str) -> String,
    /// The name that a target has in transformers, for one that it may be asked for by.
    pub target: for<'a> fn(&'a str) -> &'a str,
    /// The row of the table of that name with which a parameter begins: not 0 where it is a part of one.
    pub first_row: fn(&str) -> usize,
    /// The module that is the embedding of tokens in transformers, and the one that is the head of a language model; empty of
    /// other models.
    pub embedding: &'static str,
    /// See [`embedding`](Self::embedding).
    pub head: &'static str,
    /// True if the two share a table.
    pub tied: bool,
    /// PEFT's kind of task.
    pub task: Option<&'static str>,
}

impl Adapting {
    /// Those of a model whose weights are `[out, in]`, without a table of tokens.
    pub(crate) fn new(targets: &'static [&'static str], name: fn(&str) -> String) -> Self {
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
        }
    }

    /// The settings with the names that targets have in transformers.
    pub(crate) fn named(&self, lora: Lora) -> Lora {
        lora.with_targets(self.target)
    }
}

/// A model that is described and not in memory.
pub trait Model: Send + Sync {
    /// What its batches are made of.
    fn reads(&self) -> Reads;

    /// The numbers that it gives the classes of these names, which are those of the data, in order. A model without weights
    /// is made one of these classes; one that has weights says which it knows. No other model than a classifier is asked.
    ///
    /// # Errors
    /// Classes that its weights do not have, and a model that is no classifier.
    fn number_classes(&mut self, names: &[String]) -> Result<Vec<i32>, ModelError> {
        Err(ModelError::NoClassifier { found: names.len() })
    }

    /// Gives every dropout that it has this probability.
    fn set_dropout(&mut self, probability: f64);

    /// Cuts the tables of its vocabulary into so many layers each, so that a device need not have room for a whole one.
    ///
    /// # Errors
    /// More parts than the family, or the model's vocabulary, can be cut into.
    fn cut_vocabulary(&mut self, parts: usize) -> Result<(), ModelError> {
        let expected = "1: only the tables of language models can be cut".to_owned();
        match parts {
            1 => Ok(()),
            found => Err(ModelError::Config { name: "vocabulary_parts", found: found.to_string(), expected }),
        }
    }

    /// All that its configuration says of what is computed and drawn: two models of one description and of equal files
    /// are equal.
    ///
    /// # Errors
    /// A configuration that is no JSON.
    fn description(&self) -> Result<Value, ModelError>;

    /// The chain, whose first values come from its files, or from a task's seed where it has none.
    ///
    /// # Errors
    /// A configuration that cannot be built.
    fn chain(&self) -> Result<Chain, ModelError>;

    /// A writer of the trained model, in the form that the family reads, with weights of this type.
    fn writer(&self, saved: SavedType) -> Arc<dyn ModelWriter>;

    /// The chain frozen, with adapters that are trained: fresh ones, or those of a directory.
    ///
    /// # Errors
    /// A configuration that cannot be built, and adapters that do not fit it.
    fn adapted(&self, lora: &Lora, adapter: Option<AdapterDir>) -> Result<Chain, ModelError>;

    /// What the settings of adapters mean for this model.
    ///
    /// # Errors
    /// A configuration that cannot be built, and settings that do not fit it.
    fn plan(&self, lora: &Lora) -> Result<Plan, ModelError>;

    /// The same model with a table of its own for the head, where embedding and head share one and such a model can be
    /// written.
    fn untied(&self) -> Option<Box<dyn Model>> {
        None
    }

    /// The maps that PEFT adapts where nobody says which, and how it sees the weights.
    fn adapting(&self) -> Adapting;

    /// The Hugging Face directory that it came from, where it came from one.
    fn directory(&self) -> Option<&Path>;

    /// The files that its weights are in, if it has some.
    fn files(&self) -> Vec<PathBuf>;

    /// Floating-point operations of a training step on one item of so many tokens: six for each token and parameter of a
    /// matrix that multiplies it (forward, and backward to the input and to the matrix), and twelve for each layer, width
    /// of all heads, token and token that it attends to (scores and values; nothing is taken off for the causal mask).
    /// Recomputation is not counted.
    fn flops(&self, tokens: usize) -> f64;
}

/// All presets of all families.
pub fn presets() -> impl Iterator<Item = Preset> {
    FAMILIES.iter().flat_map(|family| family.presets())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_and_types_belong_to_one_family() {
        let types: Vec<&str> = FAMILIES.iter().flat_map(|family| family.model_types()).copied().collect();
        assert_eq!(types.iter().collect::<BTreeSet<_>>().len(), types.len(), "{types:?}");
        let names: Vec<&str> = presets().map(|preset| preset.name).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "{names:?}");
    }

    #[test]
    fn every_preset_is_a_model_that_counts_its_work() {
        for preset in presets() {
            let model = load(preset.name).unwrap();
            assert!(model.files().is_empty(), "{}", preset.name);
            let (short, long) = (model.flops(8), model.flops(16));
            match model.reads() {
                Reads::Tokens { positions, vocabulary } => {
                    assert!(positions > 1 && vocabulary >= 256, "{}", preset.name);
                    assert!(short > 0.0 && long > 2.0 * short, "{}: attention grows", preset.name);
                }
                Reads::Images { side, channels } => {
                    assert!(side > 1 && channels == 3 && short > 0.0 && short == long, "{}", preset.name);
                }
            }
        }
    }
}
