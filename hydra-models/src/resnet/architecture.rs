//! ResNet as an architecture.

use super::config::PRESETS;
use super::{ResNetConfig, hf_name, layers};
use crate::ModelError;
use crate::data::preprocessed_side;
use crate::family::{Adapting, Classes, NamedConfig, Reads, TaskType};
use crate::lora::{Adaptation, AdaptedLayers};
use crate::pretrained::{Architecture, PretrainedDir, PretrainedModel, PretrainedWriter, keys};
use crate::weights::{Naming, in_file, read_json};
use serde_json::{Map, Value};
use std::path::Path;

/// A ResNet described by a configuration or a directory.
pub type ResNet = PretrainedModel<ResNetConfig>;

/// A directory with a ResNet.
pub type ResNetDir = PretrainedDir<ResNetConfig>;

/// Writes a ResNet.
pub type ResNetWriter = PretrainedWriter<ResNetConfig>;

impl Architecture for ResNetConfig {
    const MODEL_TYPES: &'static [&'static str] = &["resnet"];

    const PRESETS: &'static [NamedConfig<Self>] = &PRESETS;

    /// The side of images that the file does not name is that of the preprocessor's configuration next to it, or 224.
    fn read(file: &Path) -> Result<Self, ModelError> {
        let mut config: Self = read_json(file)?;
        if config.image_size == 0 {
            config.preprocessed = preprocessed_side(file.parent())?;
        }
        config.validate().map_err(|source| in_file(file, source))?;
        Ok(config)
    }

    fn description(&self) -> Result<Value, ModelError> {
        let image_size = self.image_side();
        Ok(Value::Object(keys(&Self { image_size, other: Map::new(), ..self.clone() })?))
    }

    fn class(&self, _: TaskType) -> &'static str {
        "ResNetForImageClassification"
    }

    fn naming(&self) -> Naming {
        Naming::new("resnet.", "encoder.stages.", "depths", hf_name)
    }

    fn depth(&self) -> usize {
        self.depths.len()
    }

    fn layers(&self, _: Option<Adaptation<'_>>) -> Result<AdaptedLayers, ModelError> {
        Ok(AdaptedLayers { chain: layers(self)?, plan: None })
    }

    fn reads(&self) -> Reads {
        Reads::Images { side: self.image_side(), channels: self.num_channels }
    }

    fn classes_mut(&mut self) -> Option<&mut Classes> {
        Some(&mut self.labels)
    }

    fn set_dropout(&mut self, probability: f64) {
        self.dropout = probability;
    }

    fn adapting(&self) -> Adapting {
        Adapting::new(&[], hf_name)
    }

    /// The number of positions is fixed by the image size; `tokens` is ignored.
    fn flops(&self, _: usize) -> f64 {
        let [channels, first, last, classes] = [
            self.num_channels,
            self.embedding_size,
            self.hidden_sizes.last().copied().unwrap_or(1),
            self.labels.count(),
        ]
        .map(|size| size as f64);
        let square = |side: usize| (side as f64).powi(2);
        // The first convolution's input, the image, gets no gradient.
        let mut flops = 4.0 * 49.0 * channels * first * square(self.image_side().div_ceil(2));
        for (stage, depth) in self.depths.iter().enumerate() {
            flops += (0..*depth).map(|block| 6.0 * self.block_products(stage, block)).sum::<f64>();
        }
        flops + 6.0 * last * classes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Model;

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
        assert_eq!(model.config().labels.names(), names);
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
