//! Writing a model that reads images.

use super::{CONFIG, Export, SavedType, failed};
use crate::data::{PREPROCESSOR, Preprocessor};
use hydra_core::{Chain, ModelWriter, ParamBufferReader, WeightError, replace_file};
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt::Debug;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The configuration of a model that reads images, and what its files are called by.
pub trait ImagesConfig: Clone + Debug + Serialize + Send + Sync {
    /// The class of Hugging Face transformers that reads it.
    const ARCHITECTURE: &'static str;

    /// The side of its images, in pixels.
    fn side(&self) -> usize;

    /// The name that Hugging Face's files give a parameter of its chain.
    fn hf_name(param: &str) -> String;
}

/// Writes a trained model of images into a directory that transformers' `from_pretrained` and the family's own reader read:
/// `config.json`, `model.safetensors`, and the preprocessor's configuration, with other files like it where the model
/// came from a directory. Each file gets its name only when it is complete.
#[derive(Clone, Debug)]
pub struct ImagesWriter<C> {
    config: C,
    source: Option<PathBuf>,
    saved: SavedType,
}

impl<C: ImagesConfig> ImagesWriter<C> {
    /// A writer of a model that came from nowhere.
    pub fn new(config: C) -> Self {
        Self { config, source: None, saved: SavedType::F32 }
    }

    /// A writer that also copies what belongs to the model in the directory that it came from, if it came from one.
    pub fn beside(self, source: Option<PathBuf>) -> Self {
        Self { source, ..self }
    }

    /// A writer of weights of this type.
    pub fn saved_as(self, saved: SavedType) -> Self {
        Self { saved, ..self }
    }

    fn json(&self) -> serde_json::Result<Map<String, Value>> {
        serde_json::from_value(serde_json::to_value(&self.config)?)
    }
}

impl<C: ImagesConfig> ModelWriter for ImagesWriter<C> {
    /// The preprocessor's configuration is its directory's, or says what is done where nobody says otherwise.
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError> {
        let config = self.json().map_err(|e| failed(&dir.join(CONFIG), e.into()))?;
        let (architecture, source) = (C::ARCHITECTURE, self.source.as_deref());
        Export { config, architecture, source, saved: self.saved, name: &C::hf_name }
            .write(chain, buffers, dir)?;
        if source.is_some() {
            return Ok(());
        }
        let (path, text) = (dir.join(PREPROCESSOR), Preprocessor::of_side(self.config.side()).to_json());
        replace_file(&path, |out| out.write_all(text.as_bytes())).map_err(|e| failed(&path, e))
    }
}
