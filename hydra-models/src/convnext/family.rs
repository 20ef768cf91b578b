//! ConvNeXt as a model family.

use super::config::PRESETS;
use super::{ConvNextConfig, ConvNextDir, ConvNextWriter, chain, hf_name};
use crate::ModelError;
use crate::family::{Adapting, Family, Model, Preset, Reads};
use crate::lora::{AdapterDir, Lora, Plan};
use crate::weights::SaveForm;
use hydra_core::{Chain, ModelWriter};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The ConvNeXt family.
pub struct ConvNextFamily;

impl Family for ConvNextFamily {
    fn model_types(&self) -> &'static [&'static str] {
        &["convnext"]
    }

    fn presets(&self) -> Vec<Preset> {
        PRESETS.into()
    }

    fn preset(&self, name: &str) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(ConvNext::new(ConvNextConfig::preset(name)?)))
    }

    fn configured(&self, file: &Path) -> Result<Box<dyn Model>, ModelError> {
        Ok(Box::new(ConvNext::new(ConvNextConfig::read(file)?)))
    }

    fn open(&self, directory: &Path) -> Result<Box<dyn Model>, ModelError> {
        let weights = ConvNextDir::open(directory)?;
        Ok(Box::new(ConvNext { config: weights.config().clone(), weights: Some(weights) }))
    }
}

/// A ConvNeXt described by a configuration or a directory.
#[derive(Clone, Debug)]
pub struct ConvNext {
    config: ConvNextConfig,
    weights: Option<ConvNextDir>,
}

impl ConvNext {
    /// A model without weights.
    pub fn new(config: ConvNextConfig) -> Self {
        Self { config, weights: None }
    }
}

impl Model for ConvNext {
    fn reads(&self) -> Reads {
        Reads::Images { side: self.config.image_size, channels: self.config.num_channels }
    }

    fn number_classes(&mut self, names: &[String]) -> Result<Vec<i32>, ModelError> {
        self.config.labels.number(self.weights.as_ref().map(ConvNextDir::directory), names)
    }

    /// Sets the drop path rate; the model has no other dropout.
    fn set_dropout(&mut self, probability: f64) {
        self.config.drop_path_rate = probability;
    }

    fn description(&self) -> Result<Value, ModelError> {
        let config = ConvNextConfig { other: Map::new(), ..self.config.clone() };
        serde_json::to_value(&config).map_err(|source| ModelError::Describe { source })
    }

    fn chain(&self) -> Result<Chain, ModelError> {
        chain(&self.config, self.weights.clone())
    }

    fn writer(&self, saved: SaveForm) -> Arc<dyn ModelWriter> {
        let source = self.weights.as_ref().map(|weights| weights.directory().to_owned());
        Arc::new(ConvNextWriter::new(self.config.clone()).with_source(source).saved_as(saved))
    }

    fn adapted(&self, _: &Lora, _: Option<AdapterDir>) -> Result<Chain, ModelError> {
        Err(ModelError::NoAdapters { model_type: "convnext" })
    }

    fn plan(&self, _: &Lora) -> Result<Plan, ModelError> {
        Err(ModelError::NoAdapters { model_type: "convnext" })
    }

    fn adapting(&self) -> Adapting {
        Adapting::new(&[], hf_name)
    }

    fn directory(&self) -> Option<&Path> {
        self.weights.as_ref().map(ConvNextDir::directory)
    }

    fn files(&self) -> Vec<PathBuf> {
        self.weights.iter().flat_map(|weights| weights.files().map(PathBuf::from)).collect()
    }

    /// The number of positions is fixed by the image size; `tokens` is ignored.
    fn flops(&self, _: usize) -> f64 {
        let config = &self.config;
        let size = |stage: usize| config.hidden_sizes[stage] as f64;
        let places = |stage: usize| (config.side(stage) as f64).powi(2);
        // The embedding's input, the image, gets no gradient.
        let patch = (config.num_channels * config.patch_size.pow(2)) as f64;
        let mut flops = 4.0 * places(0) * patch * size(0);
        for (stage, depth) in config.depths.iter().enumerate() {
            let block = 49.0 * size(stage) + 8.0 * size(stage) * size(stage);
            flops += 6.0 * places(stage) * block * *depth as f64;
            if stage > 0 {
                flops += 6.0 * places(stage) * 4.0 * size(stage - 1) * size(stage);
            }
        }
        flops + 6.0 * size(config.num_stages - 1) * config.labels.count() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_of_a_step_is_counted() {
        let model = ConvNext::new(ConvNextConfig::preset("convnext-mini").unwrap());
        let block = |places: usize, width: usize| 6 * places * (49 * width + 8 * width * width);
        let halving = |places: usize, inputs: usize, outputs: usize| 6 * places * 4 * inputs * outputs;
        let ends = 4 * 256 * 12 * 16 + 6 * 64 * 10;
        let blocks = block(256, 16) + block(64, 32) + 2 * block(16, 64);
        let expected = ends + blocks + halving(64, 16, 32) + halving(16, 32, 64);
        assert_eq!(model.flops(1), expected as f64);
        // Liu et al. report 4.5 G multiplications for a forward pass.
        let tiny = ConvNext::new(ConvNextConfig::preset("convnext-tiny-224").unwrap()).flops(1);
        assert!((tiny / 6.0 / 4.5e9 - 1.0).abs() < 0.02, "{tiny}");
    }

    #[test]
    fn classes_are_those_of_the_data_and_dropout_is_of_paths() {
        let mut model = ConvNext::new(ConvNextConfig::preset("convnext-mini").unwrap());
        let names: Vec<String> = ["cat", "dog"].map(str::to_owned).into();
        assert_eq!(model.number_classes(&names).unwrap(), [0, 1]);
        model.set_dropout(0.25);
        assert_eq!((model.config.labels.names(), model.config.drop_path_rate), (names, 0.25));
        let described = model.description().unwrap();
        assert_eq!(
            (&described["id2label"]["1"], &described["drop_path_rate"]),
            (&"dog".into(), &0.25.into())
        );
    }
}
