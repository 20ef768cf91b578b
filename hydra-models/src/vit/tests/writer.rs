//! Tests of the writer.

use super::super::*;
use crate::weights::CONFIG;
use crate::weights::testing::ParamBuffers;
use hydra_core::ModelWriter;
use std::fs;
use tempfile::TempDir;

#[test]
fn weights_that_are_not_those_of_the_configuration_are_named() {
    let (dir, config) = (TempDir::new().unwrap(), VitConfig::preset("vit-tiny").unwrap());
    let fresh = chain(&config, None).unwrap();
    VitWriter::new(config).write(&fresh, &ParamBuffers::of(&fresh, 7), dir.path()).unwrap();
    let other = serde_json::json!({"model_type": "vit", "hidden_size": 96}).to_string();
    fs::write(dir.path().join(CONFIG), other).unwrap();
    let error = VitDir::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("expected") && error.contains("model.safetensors"), "{error}");
}
