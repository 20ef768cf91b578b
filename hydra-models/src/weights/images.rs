//! Writes models that read images.

use super::{CONFIG, Export, SaveForm, SavedType, failed};
use crate::data::{PREPROCESSOR, Preprocessor};
use hydra_core::{Chain, ModelWriter, ParamBufferReader, WeightError, replace_file};
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt::Debug;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The configuration of a model that reads images, and its Hugging Face names.
pub trait ImagesConfig: Clone + Debug + Serialize + Send + Sync {
    /// The Transformers class of the model.
    const ARCHITECTURE: &'static str;

    /// The side of its input images, in pixels.
    fn side(&self) -> usize;

    /// The Hugging Face name of a parameter of its chain.
    fn hf_name(param: &str) -> String;
}

/// Writes a trained image model into a directory that Transformers' `from_pretrained` and the family's own reader read:
/// `config.json`, `model.safetensors`, the preprocessor's configuration, and other files of the directory that the
/// model was loaded from, if any. Each file is renamed into place when it is complete.
#[derive(Clone, Debug)]
pub struct ImagesWriter<C> {
    config: C,
    source: Option<PathBuf>,
    saved: SaveForm,
}

impl<C: ImagesConfig> ImagesWriter<C> {
    /// A writer of a model without a source directory.
    pub fn new(config: C) -> Self {
        Self { config, source: None, saved: SavedType::F32.into() }
    }

    /// Sets the directory that the model was loaded from, whose other files are copied.
    pub fn with_source(self, source: Option<PathBuf>) -> Self {
        Self { source, ..self }
    }

    /// Sets the data type of the weights, or how they are written.
    pub fn saved_as(self, saved: impl Into<SaveForm>) -> Self {
        Self { saved: saved.into(), ..self }
    }

    fn json(&self) -> serde_json::Result<Map<String, Value>> {
        serde_json::from_value(serde_json::to_value(&self.config)?)
    }
}

impl<C: ImagesConfig> ModelWriter for ImagesWriter<C> {
    /// Keeps the source directory's preprocessor configuration, or writes the default one.
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

    fn reads_parts(&self) -> bool {
        true
    }
}
