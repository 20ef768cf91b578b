//! Tests of the writer.

use super::super::testing::{Broken, ParamBuffers, config};
use super::super::*;
use crate::gpt2::chain;
use crate::weights::CONFIG;
use crate::weights::WEIGHTS;
use hydra_core::{ModelWriter, WeightError};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
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
