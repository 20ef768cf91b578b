//! Tests of the writer.

use super::super::testing::{Broken, ParamBuffers, config};
use super::super::*;
use crate::weights::{CONFIG, WEIGHTS};
use hydra_core::{ModelWriter, WeightError};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

fn write(config: &DecoderConfig, writer: &DecoderWriter, dir: &Path) -> Result<(), WeightError> {
    let chain = chain(config, None).unwrap();
    writer.write(&chain, &ParamBuffers::of(&chain, 1), dir)
}

#[test]
fn the_configuration_is_one_that_transformers_reads() {
    let dir = TempDir::new().unwrap();
    let keys =
        json!({"model_type": "qwen3", "torch_dtype": "bfloat16", "architectures": ["Qwen3Model"], "x": 1});
    let config = config(keys);
    write(&config, &DecoderWriter::new(config.clone()), dir.path()).unwrap();
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
    let config = config(json!({}));
    write(&config, &DecoderWriter::new(config.clone()), from.path()).unwrap();
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
        write(&config, &writer, dir).unwrap();
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
