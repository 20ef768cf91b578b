//! Tests of the writer.

use super::super::*;
use crate::family::Classes;
use crate::weights::CONFIG;
use crate::weights::testing::ParamBuffers;
use hydra_core::ModelWriter;
use std::fs;
use tempfile::TempDir;

#[test]
fn what_was_written_loads_to_the_same_bits_with_what_belongs_to_it() {
    let (from, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let config = VitConfig::preset("vit-tiny").unwrap();
    let config = VitConfig { labels: Classes::numbered(3), ..config };
    let fresh = chain(&config, None).unwrap();
    let buffers = ParamBuffers::of(&fresh, 7);
    VitWriter::new(config.clone()).write(&fresh, &buffers, from.path()).unwrap();
    let file = from.path().join("preprocessor_config.json");
    assert!(fs::read_to_string(&file).unwrap().contains("ViTImageProcessor"));
    fs::write(&file, "{}").unwrap();
    let source = VitDir::open(from.path()).unwrap();
    assert_eq!(source.config().labels.count(), 3);
    let loaded = chain(source.config(), Some(source.clone())).unwrap();
    assert_eq!(ParamBuffers::of(&loaded, 0), buffers);
    VitWriter::from(&source).write(&loaded, &buffers, to.path()).unwrap();
    for name in ["config.json", "model.safetensors", "preprocessor_config.json"] {
        assert_eq!(fs::read(from.path().join(name)).unwrap(), fs::read(to.path().join(name)).unwrap());
    }
    let other = serde_json::json!({"model_type": "vit", "hidden_size": 96}).to_string();
    fs::write(to.path().join(CONFIG), other).unwrap();
    let error = VitDir::open(to.path()).unwrap_err().to_string();
    assert!(error.contains("expected") && error.contains("model.safetensors"), "{error}");
}
