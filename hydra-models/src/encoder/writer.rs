//! Writes an encoder in the format of Transformers.

use super::{EncoderConfig, EncoderDir};
use crate::weights::{CONFIG, Export, SaveForm, SavedType, failed};
use hydra_core::{Chain, ModelWriter, ParamBufferReader, WeightError};
use std::io;
use std::path::{Path, PathBuf};

/// Writes a trained encoder with its classifier into a directory that Transformers'
/// `AutoModelForSequenceClassification.from_pretrained` and [`EncoderDir`] read: `config.json`, `model.safetensors`,
/// and the tokenizer if the model was loaded from a directory. Each file is renamed into place when it is complete.
#[derive(Clone, Debug)]
pub struct EncoderWriter {
    config: EncoderConfig,
    source: Option<PathBuf>,
    saved: SaveForm,
}

impl EncoderWriter {
    /// A writer of a model without a source directory.
    pub fn new(config: EncoderConfig) -> Self {
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
}

impl From<&EncoderDir> for EncoderWriter {
    /// A writer that also copies the other files of the model's directory.
    fn from(source: &EncoderDir) -> Self {
        Self::new(source.config().clone()).with_source(Some(source.directory().to_owned()))
    }
}

impl ModelWriter for EncoderWriter {
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError> {
        let (source, saved, kind) = (self.source.as_deref(), self.saved, self.config.model_type);
        let config = self.config.to_json().map_err(|e| failed(&dir.join(CONFIG), io::Error::other(e)))?;
        let (architecture, name) = (kind.architecture(), &kind.hf_name());
        Export { config, architecture, source, saved, name }.write(chain, buffers, dir)
    }

    fn reads_parts(&self) -> bool {
        true
    }
}
