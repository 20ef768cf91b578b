//! Tests of the writer.

use super::super::*;
use crate::weights::CONFIG;
use crate::weights::testing::ParamBuffers;
use hydra_core::ModelWriter;
use safetensors::{Dtype, SafeTensors};
use std::fs;
use tempfile::TempDir;

fn mini() -> ResNetConfig {
    ResNetConfig::preset("resnet-mini").unwrap()
}

#[test]
fn counts_are_integers_without_dimensions_as_in_pytorch() {
    let dir = TempDir::new().unwrap();
    let fresh = chain(&mini(), None).unwrap();
    ResNetWriter::new(mini()).write(&fresh, &ParamBuffers::of(&fresh, 7), dir.path()).unwrap();
    let bytes = fs::read(dir.path().join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let of = |name: &str| file.tensor(&format!("resnet.embedder.embedder.normalization.{name}")).unwrap();
    let (count, mean) = (of("num_batches_tracked"), of("running_mean"));
    assert_eq!((count.dtype(), count.shape(), count.data()), (Dtype::I64, &[][..], &[0; 8][..]));
    assert_eq!((mean.dtype(), mean.shape()), (Dtype::F32, &[8][..]));
}

#[test]
fn weights_that_are_not_those_of_the_configuration_are_named() {
    let dir = TempDir::new().unwrap();
    let (config, fresh) = (mini(), chain(&mini(), None).unwrap());
    ResNetWriter::new(config.clone()).write(&fresh, &ParamBuffers::of(&fresh, 7), dir.path()).unwrap();
    let refused = |config: ResNetConfig| {
        fs::write(dir.path().join(CONFIG), serde_json::to_vec(&config).unwrap()).unwrap();
        hydra_core::with_causes(&ResNetDir::open(dir.path()).unwrap_err())
    };
    let fewer = ResNetConfig { depths: vec![1, 1, 2], ..config.clone() };
    assert!(refused(fewer).contains("encoder.stages.1.layers.1"), "a block more in the files");
    let stages = ResNetConfig { depths: vec![1, 2], hidden_sizes: vec![8, 16], ..config.clone() };
    assert!(refused(stages).contains("`depths` is 2, expected 3"));
    let wide = ResNetConfig { hidden_sizes: vec![8, 16, 48], ..config };
    let refused = refused(wide);
    assert!(refused.contains("has shape [32, 16, 1, 1], expected [48, 16, 1, 1]"), "{refused}");
}
