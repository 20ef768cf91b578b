//! Writes a model in the format of Transformers.

use super::{Architecture, PretrainedDir};
use crate::data::{PREPROCESSOR, Preprocessor};
use crate::family::Reads;
use crate::weights::{CONFIG, Export, SaveForm, SavedType, failed};
use hydra_core::{Chain, ModelWriter, ParamBufferReader, WeightError, replace_file};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes a trained model into a directory that Transformers' `from_pretrained` and [`PretrainedDir`] read: `config.json`,
/// `model.safetensors`, and the tokenizer, chat template, preprocessor and similar files of the directory that the model was loaded
/// from, if any. Each file is renamed into place when it is complete.
#[derive(Clone, Debug)]
pub struct PretrainedWriter<C> {
    config: C,
    source: Option<PathBuf>,
    saved: SaveForm,
}

impl<C: Architecture> PretrainedWriter<C> {
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
}

impl<C: Architecture> From<&PretrainedDir<C>> for PretrainedWriter<C> {
    /// A writer that also copies the other files of the model's directory.
    fn from(source: &PretrainedDir<C>) -> Self {
        Self::new(source.config().clone()).with_source(Some(source.directory().to_owned()))
    }
}

impl<C: Architecture> ModelWriter for PretrainedWriter<C> {
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError> {
        let config = self.config.to_file().map_err(|e| failed(&dir.join(CONFIG), io::Error::other(e)))?;
        let architecture = self.config.class(self.config.task_type());
        let (source, name) = (self.source.as_deref(), self.config.naming().name);
        Export { config, architecture, source, saved: self.saved, name: &name }.write(chain, buffers, dir)?;
        match self.config.reads() {
            Reads::Images { side, .. } if source.is_none() => {
                let (path, text) = (dir.join(PREPROCESSOR), Preprocessor::of_side(side).to_json());
                replace_file(&path, |out| out.write_all(text.as_bytes())).map_err(|e| failed(&path, e))
            }
            _ => Ok(()),
        }
    }

    fn reads_parts(&self) -> bool {
        true
    }
}
