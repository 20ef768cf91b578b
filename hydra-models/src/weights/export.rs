//! Writes a model as a Hugging Face directory.

use super::{CONFIG, SaveForm, failed, write_model};
use crate::tokenizer::{copy_files, copy_tokenizer};
use hydra_core::{Chain, ParamBufferReader, WeightError, replace_file};
use serde_json::{Map, Value, json};
use std::fs;
use std::io::Write;
use std::path::Path;

/// Other files of a model directory that are copied along.
const CARRIED: [&str; 4] =
    ["generation_config.json", "chat_template.json", "preprocessor_config.json", "processor_config.json"];

/// A model to write into a directory.
pub(crate) struct Export<'a> {
    /// The model's configuration, except for the keys that writing sets.
    pub config: Map<String, Value>,
    /// The Transformers class of the model.
    pub architecture: &'static str,
    /// The directory that the model was loaded from; its tokenizer and similar files are copied.
    pub source: Option<&'a Path>,
    /// How the weights are written.
    pub saved: SaveForm,
    /// Maps a parameter to its Hugging Face name.
    pub name: &'a dyn Fn(&str) -> String,
}

impl Export<'_> {
    /// Writes `config.json` and the weights, and copies the other files. Each file is renamed into place when it is
    /// complete.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn write(
        self,
        chain: &Chain,
        buffers: &dyn ParamBufferReader,
        dir: &Path,
    ) -> Result<(), WeightError> {
        fs::create_dir_all(dir).map_err(|e| failed(dir, e))?;
        let path = dir.join(CONFIG);
        write_model(chain, buffers, dir, self.saved, &|name| Some((self.name)(name)))?;
        let source = self.source;
        let text = self.config_text().map_err(|e| failed(&path, e.into()))?;
        replace_file(&path, |out| out.write_all(&text)).map_err(|e| failed(&path, e))?;
        source.map_or(Ok(()), |source| carry(source, dir))
    }

    fn config_text(mut self) -> serde_json::Result<Vec<u8>> {
        self.config.insert("architectures".to_owned(), json!([self.architecture]));
        self.config.insert("dtype".to_owned(), json!(self.saved.dtype.torch_name()));
        self.config.remove("torch_dtype");
        let mut text = serde_json::to_vec_pretty(&self.config)?;
        text.push(b'\n');
        Ok(text)
    }
}

/// Copies the other files of a model, if they exist.
fn carry(source: &Path, dir: &Path) -> Result<(), WeightError> {
    copy_tokenizer(source, dir)?;
    copy_files(source, dir, &CARRIED)
}
