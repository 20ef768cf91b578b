//! Writes a decoder in the format of Transformers.

use super::{DecoderConfig, DecoderDir, hf_name};
use crate::weights::{Export, SaveForm, SavedType};
use hydra_core::{Chain, ModelWriter, ParamBufferReader, WeightError};
use std::path::{Path, PathBuf};

/// Writes a trained decoder into a directory that Transformers' `from_pretrained` and [`DecoderDir`] read:
/// `config.json`, `model.safetensors`, and the tokenizer, chat template and similar files if the model was loaded from
/// a directory. Each file is renamed into place when it is complete.
#[derive(Clone, Debug)]
pub struct DecoderWriter {
    config: DecoderConfig,
    source: Option<PathBuf>,
    saved: SaveForm,
}

impl DecoderWriter {
    /// A writer of a model without a source directory.
    pub fn new(config: DecoderConfig) -> Self {
        Self { config, source: None, saved: SavedType::F32.into() }
    }

    /// Sets the data type of the weights, or how they are written.
    pub fn saved_as(self, saved: impl Into<SaveForm>) -> Self {
        Self { saved: saved.into(), ..self }
    }
}

impl From<&DecoderDir> for DecoderWriter {
    /// A writer that also copies the other files of the model's directory.
    fn from(source: &DecoderDir) -> Self {
        Self { source: Some(source.directory().to_owned()), ..Self::new(source.config().clone()) }
    }
}

impl ModelWriter for DecoderWriter {
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError> {
        let (config, model) = (self.config.to_json(), self.config.model_type);
        let architecture =
            if self.config.head.is_classifier() { model.classifier() } else { model.architecture() };
        let source = self.source.as_deref();
        Export { config, architecture, source, saved: self.saved, name: &hf_name }.write(chain, buffers, dir)
    }

    fn reads_parts(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::chain;
    use super::super::testing::{Broken, ParamBuffers, config};
    use super::*;
    use crate::weights::{CONFIG, WEIGHTS};
    use serde_json::{Value, json};
    use std::fs;
    use tempfile::TempDir;

    fn write(writer: &DecoderWriter, dir: &Path) -> Result<(), WeightError> {
        let chain = chain(&writer.config, None).unwrap();
        writer.write(&chain, &ParamBuffers::of(&chain, 1), dir)
    }

    #[test]
    fn the_configuration_is_one_that_transformers_reads() {
        let dir = TempDir::new().unwrap();
        let keys = json!({"model_type": "qwen3", "torch_dtype": "bfloat16", "architectures": ["Qwen3Model"], "x": 1});
        write(&DecoderWriter::new(config(keys)), dir.path()).unwrap();
        let written: Value = serde_json::from_slice(&fs::read(dir.path().join(CONFIG)).unwrap()).unwrap();
        assert_eq!(written["architectures"], json!(["Qwen3ForCausalLM"]));
        assert_eq!((&written["model_type"], &written["dtype"]), (&json!("qwen3"), &json!("float32")));
        assert!(written["x"] == 1 && written.get("torch_dtype").is_none());
        let bytes = fs::read(dir.path().join(WEIGHTS)).unwrap();
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        assert_eq!(metadata.info("lm_head.weight").unwrap().shape, [11, 8]);
    }

    #[test]
    fn what_belongs_to_a_model_travels() {
        let (from, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        write(&DecoderWriter::new(config(json!({}))), from.path()).unwrap();
        let carried = [
            "tokenizer.json",
            "tokenizer_config.json",
            "tokenizer.model",
            "chat_template.jinja",
            "generation_config.json",
            "preprocessor_config.json",
        ];
        carried.iter().for_each(|name| fs::write(from.path().join(name), name).unwrap());
        fs::write(from.path().join("README.md"), "not this").unwrap();
        let writer = DecoderWriter::from(&DecoderDir::open(from.path()).unwrap());
        for dir in [to.path(), from.path()] {
            write(&writer, dir).unwrap();
            carried.iter().for_each(|name| assert_eq!(&fs::read_to_string(dir.join(name)).unwrap(), name));
        }
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), carried.len() + 2);
    }

    #[test]
    fn an_buffer_that_cannot_be_read_leaves_no_file() {
        let (dir, config) = (TempDir::new().unwrap(), config(json!({})));
        let chain = chain(&config, None).unwrap();
        let error = DecoderWriter::new(config).write(&chain, &Broken, dir.path()).unwrap_err();
        assert!(matches!(error, WeightError::ParamBuffer { .. }), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
