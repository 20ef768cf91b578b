//! Writes a GPT-2 in the format of Transformers.

use super::config::{CLASSIFIER, LANGUAGE_MODEL};
use super::{Gpt2Config, Gpt2Dir, hf_name};
use crate::weights::{CONFIG, Export, SaveForm, SavedType, failed};
use hydra_core::{Chain, ModelWriter, ParamBufferReader, WeightError};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Writes a trained GPT-2 into a directory that Transformers' `from_pretrained` and [`Gpt2Dir`] read: `config.json`,
/// `model.safetensors`, and the tokenizer's files if the model was loaded from a directory. Each file is renamed into
/// place when it is complete.
#[derive(Clone, Debug)]
pub struct Gpt2Writer {
    config: Gpt2Config,
    source: Option<PathBuf>,
    saved: SaveForm,
}

/// The id of GPT-2's `<|endoftext|>`.
const GPT2_END: usize = 50_256;

impl Gpt2Writer {
    /// A writer of a model without a source directory.
    pub fn new(config: Gpt2Config) -> Self {
        Self { config, source: None, saved: SavedType::F32.into() }
    }

    /// Sets the data type of the weights, or how they are written.
    pub fn saved_as(self, saved: impl Into<SaveForm>) -> Self {
        Self { saved: saved.into(), ..self }
    }

    fn json(&self) -> serde_json::Result<Map<String, Value>> {
        let mut config: Map<String, Value> = serde_json::from_value(serde_json::to_value(&self.config)?)?;
        // If absent, Transformers assumes GPT-2's id, which smaller vocabularies do not have.
        let end = (GPT2_END < self.config.vocab_size).then_some(GPT2_END);
        for key in ["bos_token_id", "eos_token_id"] {
            config.entry(key).or_insert(json!(end));
        }
        Ok(config)
    }
}

impl From<&Gpt2Dir> for Gpt2Writer {
    /// A writer that also copies the tokenizer's files from the model's directory.
    fn from(source: &Gpt2Dir) -> Self {
        Self { source: Some(source.directory().to_owned()), ..Self::new(source.config().clone()) }
    }
}

impl ModelWriter for Gpt2Writer {
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError> {
        let config = self.json().map_err(|e| failed(&dir.join(CONFIG), e.into()))?;
        let architecture = if self.config.head.is_classifier() { CLASSIFIER } else { LANGUAGE_MODEL };
        let source = self.source.as_deref();
        Export { config, architecture, source, saved: self.saved, name: &hf_name }.write(chain, buffers, dir)
    }

    fn reads_parts(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Broken, ParamBuffers, config};
    use super::*;
    use crate::gpt2::chain;
    use crate::weights::WEIGHTS;
    use std::fs;
    use tempfile::TempDir;

    const GENERATION: &str = "generation_config.json";

    fn write(writer: &Gpt2Writer, dir: &Path) -> Result<(), WeightError> {
        let chain = chain(&config(), None).unwrap();
        writer.write(&chain, &ParamBuffers::of(&chain, 1), dir)
    }

    #[test]
    fn the_configuration_is_one_that_transformers_reads() {
        let dir = TempDir::new().unwrap();
        let mut config = config();
        config.head.architectures = Some(vec!["GPT2Model".to_owned()]);
        config.other.insert("torch_dtype".to_owned(), json!("float16"));
        config.other.insert("summary_type".to_owned(), json!("cls_index"));
        write(&Gpt2Writer::new(config), dir.path()).unwrap();
        let written: Value = serde_json::from_slice(&fs::read(dir.path().join(CONFIG)).unwrap()).unwrap();
        assert_eq!(written["architectures"], json!(["GPT2LMHeadModel"]));
        assert_eq!((&written["model_type"], &written["dtype"]), (&json!("gpt2"), &json!("float32")));
        assert_eq!((&written["summary_type"], &written["eos_token_id"]), (&json!("cls_index"), &Value::Null));
        assert!(written.get("torch_dtype").is_none());
        let bytes = fs::read(dir.path().join(WEIGHTS)).unwrap();
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        assert_eq!(metadata.info("transformer.wte.weight").unwrap().shape, [11, 4]);
    }

    #[test]
    fn tokenizer_files_travel_and_a_directory_can_be_written_over_itself() {
        let (from, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        write(&Gpt2Writer::new(config()), from.path()).unwrap();
        fs::write(from.path().join("vocab.json"), "{}").unwrap();
        fs::write(from.path().join(GENERATION), "{\"x\": 1}").unwrap();
        let writer = Gpt2Writer::from(&Gpt2Dir::open(from.path()).unwrap());
        for dir in [to.path(), from.path()] {
            write(&writer, dir).unwrap();
            assert_eq!(fs::read_to_string(dir.join("vocab.json")).unwrap(), "{}");
            assert_eq!(fs::read_to_string(dir.join(GENERATION)).unwrap(), "{\"x\": 1}");
            let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect();
            names.sort();
            assert_eq!(names, [CONFIG, GENERATION, WEIGHTS, "vocab.json"]);
        }
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = write(&Gpt2Writer::new(config()), &file.join("model")).unwrap_err();
        assert!(matches!(&error, WeightError::Write { path, .. } if path.ends_with("file/model")), "{error}");
    }

    #[test]
    fn an_buffer_that_cannot_be_read_leaves_no_file() {
        let dir = TempDir::new().unwrap();
        let chain = chain(&config(), None).unwrap();
        let error = Gpt2Writer::new(config()).write(&chain, &Broken, dir.path()).unwrap_err();
        assert!(matches!(error, WeightError::ParamBuffer { .. }), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
