//! ConvNeXt as an architecture.

use super::config::PRESETS;
use super::{ConvNextConfig, hf_name, layers};
use crate::ModelError;
use crate::family::supported::read_config;
use crate::family::{Adapting, Classes, NamedConfig, Reads, TaskType};
use crate::lora::{Adaptation, AdaptedLayers};
use crate::pretrained::{Architecture, PretrainedDir, PretrainedModel, PretrainedWriter, keys};
use crate::weights::Naming;
use serde_json::{Map, Value};
use std::path::Path;

/// A ConvNeXt described by a configuration or a directory.
pub type ConvNext = PretrainedModel<ConvNextConfig>;

/// A directory with a ConvNeXt.
pub type ConvNextDir = PretrainedDir<ConvNextConfig>;

/// Writes a ConvNeXt.
pub type ConvNextWriter = PretrainedWriter<ConvNextConfig>;

impl Architecture for ConvNextConfig {
    const MODEL_TYPES: &'static [&'static str] = &["convnext"];

    const PRESETS: &'static [NamedConfig<Self>] = &PRESETS;

    fn read(file: &Path) -> Result<Self, ModelError> {
        read_config(file, Self::validate)
    }

    fn description(&self) -> Result<Value, ModelError> {
        Ok(Value::Object(keys(&Self { other: Map::new(), ..self.clone() })?))
    }

    fn class(&self, _: TaskType) -> &'static str {
        "ConvNextForImageClassification"
    }

    fn naming(&self) -> Naming {
        Naming::new("convnext.", "encoder.stages.", "num_stages", hf_name)
    }

    fn depth(&self) -> usize {
        self.num_stages
    }

    fn layers(&self, _: Option<Adaptation<'_>>) -> Result<AdaptedLayers, ModelError> {
        Ok(AdaptedLayers { chain: layers(self)?, plan: None })
    }

    fn reads(&self) -> Reads {
        Reads::Images { side: self.image_size, channels: self.num_channels }
    }

    fn classes_mut(&mut self) -> Option<&mut Classes> {
        Some(&mut self.labels)
    }

    /// Sets the drop path rate; the model has no other dropout.
    fn set_dropout(&mut self, probability: f64) {
        self.drop_path_rate = probability;
    }

    fn adapting(&self) -> Adapting {
        Adapting::new(&[], hf_name)
    }

    /// The number of positions is fixed by the image size; `tokens` is ignored.
    fn flops(&self, _: usize) -> f64 {
        let size = |stage: usize| self.hidden_sizes[stage] as f64;
        let places = |stage: usize| (self.side(stage) as f64).powi(2);
        // The embedding's input, the image, gets no gradient.
        let patch = (self.num_channels * self.patch_size.pow(2)) as f64;
        let mut flops = 4.0 * places(0) * patch * size(0);
        for (stage, depth) in self.depths.iter().enumerate() {
            let block = 49.0 * size(stage) + 8.0 * size(stage) * size(stage);
            flops += 6.0 * places(stage) * block * *depth as f64;
            if stage > 0 {
                flops += 6.0 * places(stage) * 4.0 * size(stage - 1) * size(stage);
            }
        }
        flops + 6.0 * size(self.num_stages - 1) * self.labels.count() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Model;

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
        assert_eq!((model.config().labels.names(), model.config().drop_path_rate), (names, 0.25));
        let described = model.description().unwrap();
        assert_eq!(
            (&described["id2label"]["1"], &described["drop_path_rate"]),
            (&"dog".into(), &0.25.into())
        );
    }
}
