//! ResNet as a model family.

use super::config::PRESETS;
use super::{ResNetConfig, ResNetDir, ResNetWriter, chain, hf_name};
use crate::ModelError;
use crate::family::supported::refuse;
use crate::family::{Adapting, Family, Model, Preset, Reads};
use crate::lora::{AdapterDir, Lora, Plan};
use crate::weights::SaveForm;
use hydra_core::{Chain, ModelWriter};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The ResNet family.
pub struct ResNetFamily;

impl Family for ResNetFamily {
    fn model_types(&self) -> &'static [&'static str] {
        &["resnet"]
    }

    fn presets(&self) -> Vec<Preset> {
        PRESETS.into()
    }

    fn preset(&self, name: &str) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(ResNet::new(ResNetConfig::preset(name)?)))
    }

    fn configured(&self, file: &Path) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(ResNet::new(ResNetConfig::read(file)?)))
    }

    fn open(&self, directory: &Path) -> Result<Box<dyn Model>, ModelError> {
        let weights = ResNetDir::open(directory)?;
        let config = weights.config().clone();
        Ok(Box::new(ResNet { weights: Some(weights), ..ResNet::new(config) }))
    }
}

/// A ResNet described by a configuration or a directory.
#[derive(Clone, Debug)]
pub struct ResNet {
    config: ResNetConfig,
    weights: Option<ResNetDir>,
    /// A probability that was set although there is no dropout.
    dropout: f64,
}

impl ResNet {
    /// A model without weights.
    pub fn new(config: ResNetConfig) -> Self {
        Self { config, weights: None, dropout: 0.0 }
    }
}

impl Model for ResNet {
    fn reads(&self) -> Reads {
        Reads::Images { side: self.config.image_side(), channels: self.config.num_channels }
    }

    fn number_classes(&mut self, names: &[String]) -> Result<Vec<i32>, ModelError> {
        self.config.labels.number(self.weights.as_ref().map(ResNetDir::directory), names)
    }

    /// Without dropout in the model, a chain is then refused, unless the probability is zero.
    fn set_dropout(&mut self, probability: f64) {
        self.dropout = probability;
    }

    fn description(&self) -> Result<Value, ModelError> {
        let image_size = self.config.image_side();
        let config = ResNetConfig { image_size, other: Map::new(), ..self.config.clone() };
        serde_json::to_value(&config).map_err(|source| ModelError::Describe { source })
    }

    fn chain(&self) -> Result<Chain, ModelError> {
        if self.dropout != 0.0 {
            return Err(refuse("dropout", self.dropout, "0, because a ResNet has no dropout"));
        }
        chain(&self.config, self.weights.clone())
    }

    fn writer(&self, saved: SaveForm) -> Arc<dyn ModelWriter> {
        let source = self.weights.as_ref().map(|weights| weights.directory().to_owned());
        Arc::new(ResNetWriter::new(self.config.clone()).with_source(source).saved_as(saved))
    }

    fn adapted(&self, _: &Lora, _: Option<AdapterDir>) -> Result<Chain, ModelError> {
        Err(ModelError::NoAdapters { model_type: "resnet" })
    }

    fn plan(&self, _: &Lora) -> Result<Plan, ModelError> {
        Err(ModelError::NoAdapters { model_type: "resnet" })
    }

    fn adapting(&self) -> Adapting {
        Adapting::new(&[], hf_name)
    }

    fn directory(&self) -> Option<&Path> {
        self.weights.as_ref().map(ResNetDir::directory)
    }

    fn files(&self) -> Vec<PathBuf> {
        self.weights.iter().flat_map(|weights| weights.files().map(PathBuf::from)).collect()
    }

    /// The number of positions is fixed by the image size; `tokens` is ignored.
    fn flops(&self, _: usize) -> f64 {
        let config = &self.config;
        let [channels, first, last, classes] = [
            config.num_channels,
            config.embedding_size,
            config.hidden_sizes.last().copied().unwrap_or(1),
            config.labels.count(),
        ]
        .map(|size| size as f64);
        let square = |side: usize| (side as f64).powi(2);
        // The first convolution's input, the image, gets no gradient.
        let mut flops = 4.0 * 49.0 * channels * first * square(config.image_side().div_ceil(2));
        for (stage, depth) in config.depths.iter().enumerate() {
            flops += (0..*depth).map(|block| 6.0 * config.block_products(stage, block)).sum::<f64>();
        }
        flops + 6.0 * last * classes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_of_a_step_is_counted() {
        // He et al. report 1.8 G and 3.8 G multiplications for a forward pass, with halving in the first convolution of a
        // bottleneck.
        for (name, reported, tolerance) in [("resnet-18", 1.8e9, 0.02), ("resnet-50", 3.8e9, 0.03)] {
            let config =
                ResNetConfig { downsample_in_bottleneck: true, ..ResNetConfig::preset(name).unwrap() };
            let found = ResNet::new(config).flops(1) / 6.0;
            assert!((found / reported - 1.0).abs() < tolerance, "{name}: {found}");
        }
    }

    #[test]
    fn classes_are_those_of_the_data() {
        let mut model = ResNet::new(ResNetConfig::preset("resnet-mini").unwrap());
        let names: Vec<String> = ["cat", "dog"].map(str::to_owned).into();
        assert_eq!(model.number_classes(&names).unwrap(), [0, 1]);
        assert_eq!(model.config.labels.names(), names);
        assert_eq!(model.description().unwrap()["id2label"]["1"], "dog");
    }

    #[test]
    fn a_dropout_that_there_is_not_is_refused() {
        let mut model = ResNet::new(ResNetConfig::preset("resnet-mini").unwrap());
        model.set_dropout(0.1);
        let refused = model.chain().unwrap_err().to_string();
        assert!(refused.contains("`dropout` is 0.1, expected 0"), "{refused}");
        model.set_dropout(0.0);
        assert!(model.chain().is_ok());
    }
}
