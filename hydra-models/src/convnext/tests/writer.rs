//! Tests of the writer.

use super::super::*;
use crate::weights::CONFIG;
use crate::weights::testing::ParamBuffers;
use hydra_core::ModelWriter;
use std::fs;
use tempfile::TempDir;

#[test]
fn weights_that_are_not_those_of_the_configuration_are_named() {
    let dir = TempDir::new().unwrap();
    let config = ConvNextConfig::preset("convnext-mini").unwrap();
    let fresh = chain(&config, None).unwrap();
    ConvNextWriter::new(config.clone()).write(&fresh, &ParamBuffers::of(&fresh, 7), dir.path()).unwrap();
    let refused = |config: ConvNextConfig| {
        fs::write(dir.path().join(CONFIG), serde_json::to_vec(&config).unwrap()).unwrap();
        hydra_core::with_causes(&ConvNextDir::open(dir.path()).unwrap_err())
    };
    let two = ConvNextConfig { depths: vec![1, 1, 1], ..config.clone() };
    assert!(refused(two).contains("encoder.stages.2.layers.1"), "a block more in the files");
    let stages =
        ConvNextConfig { num_stages: 2, depths: vec![1, 1], hidden_sizes: vec![16, 32], ..config.clone() };
    assert!(refused(stages).contains("`num_stages` is 2, expected 3"));
    let wide = ConvNextConfig { hidden_sizes: vec![16, 32, 48], ..config };
    assert!(refused(wide).contains("has shape [64, 32, 2, 2], expected [48, 32, 2, 2]"));
}
