//! ConvNeXt configurations, as in Hugging Face's `config.json`.

use crate::ModelError;
use crate::family::supported::{self, DEEPEST, MOST_IDS, MOST_STAGES, WIDEST, refuse};
use crate::family::{Classes, NamedConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A ConvNeXt's configuration, with the names and defaults of Transformers. Unknown keys are kept and written back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConvNextConfig {
    /// The model type; `convnext`.
    pub model_type: String,
    /// The Transformers classes of the weights; any if empty.
    pub architectures: Option<Vec<String>>,
    /// The number of colour channels.
    pub num_channels: usize,
    /// The side of an image in pixels.
    pub image_size: usize,
    /// The side of a patch in pixels.
    pub patch_size: usize,
    /// The number of stages; each but the first halves the image.
    pub num_stages: usize,
    /// The channels of each stage.
    pub hidden_sizes: Vec<usize>,
    /// The number of blocks of each stage.
    pub depths: Vec<usize>,
    /// The activation function of the blocks.
    pub hidden_act: String,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// The epsilon of the last layer normalization; that of all others is 1e-6.
    pub layer_norm_eps: f64,
    /// The initial layer scale, which multiplies a block's output before the residual is added; not above 0: no layer
    /// scale.
    pub layer_scale_init_value: f64,
    /// The probability of dropping the last block for an item in training; it grows linearly from 0 at the first block
    /// (Huang et al., "Deep Networks with Stochastic Depth", 2016).
    pub drop_path_rate: f64,
    /// The classes.
    #[serde(flatten)]
    pub labels: Classes,
    /// Unknown keys of the file.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for ConvNextConfig {
    fn default() -> Self {
        Self {
            model_type: String::new(),
            architectures: None,
            num_channels: 3,
            image_size: 224,
            patch_size: 4,
            num_stages: 4,
            hidden_sizes: vec![96, 192, 384, 768],
            depths: vec![3, 3, 9, 3],
            hidden_act: "gelu".to_owned(),
            initializer_range: 0.02,
            layer_norm_eps: 1e-12,
            layer_scale_init_value: 1e-6,
            drop_path_rate: 0.0,
            labels: Classes::default(),
            other: Map::new(),
        }
    }
}

/// The presets.
pub(super) const PRESETS: [NamedConfig<ConvNextConfig>; 2] = [
    NamedConfig::new("convnext-tiny-224", "ConvNeXt-T for images of 224 pixels", || {
        Ok(ConvNextConfig { labels: Classes::numbered(1000), ..ConvNextConfig::base() })
    }),
    NamedConfig::new("convnext-mini", "4 blocks of 16 to 64 channels for images of 32 pixels", || {
        Ok(ConvNextConfig {
            image_size: 32,
            patch_size: 2,
            num_stages: 3,
            hidden_sizes: vec![16, 32, 64],
            depths: vec![1, 1, 2],
            // With this few blocks, layer scale does not have to start near zero.
            layer_scale_init_value: 0.1,
            labels: Classes::numbered(10),
            ..ConvNextConfig::base()
        })
    }),
];

const ARCHITECTURES: [&str; 2] = ["ConvNextForImageClassification", "ConvNextModel"];

impl ConvNextConfig {
    fn base() -> Self {
        Self { model_type: "convnext".to_owned(), ..Self::default() }
    }

    /// The preset `name`, one of the family's [presets](crate::family::Family::presets).
    ///
    /// # Errors
    /// An unknown name.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        NamedConfig::find(&PRESETS, name)
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.depths.iter().sum()
    }

    /// The probability of dropping this block for an item.
    pub fn drop_path(&self, block: usize) -> f64 {
        match self.blocks() {
            0 | 1 => 0.0,
            blocks => self.drop_path_rate * block as f64 / (blocks - 1) as f64,
        }
    }

    /// The side of this stage's feature maps.
    pub fn side(&self, stage: usize) -> usize {
        // A convolution without padding drops the remainder after its last whole window.
        (0..stage).fold(self.image_size / self.patch_size, |side, _| side / 2)
    }

    /// Checks that the configuration is valid and has the same meaning as in Transformers.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn validate(&self) -> Result<(), ModelError> {
        supported::check_type(&self.model_type, "convnext")?;
        supported::check_not_quantized(&self.other)?;
        supported::check_architectures(self.architectures.as_deref(), &ARCHITECTURES)?;
        self.validate_sizes()?;
        supported::check_dropouts(&[("drop_path_rate", self.drop_path_rate)])?;
        supported::check_positive(&[
            ("layer_norm_eps", self.layer_norm_eps),
            ("initializer_range", self.initializer_range),
        ])?;
        if !self.layer_scale_init_value.is_finite() {
            return Err(refuse("layer_scale_init_value", self.layer_scale_init_value, "a number"));
        }
        supported::check_activation("hidden_act", &self.hidden_act)
    }

    fn validate_sizes(&self) -> Result<(), ModelError> {
        supported::check_sizes(&[
            ("image_size", self.image_size, 1 << 15),
            ("patch_size", self.patch_size, 1 << 15),
            ("num_channels", self.num_channels, 1 << 10),
            ("num_stages", self.num_stages, MOST_STAGES),
            ("id2label", self.labels.count(), MOST_IDS),
        ])?;
        let lists =
            [("hidden_sizes", &*self.hidden_sizes, 1..=WIDEST), ("depths", &*self.depths, 1..=DEEPEST)];
        supported::check_stages((self.num_stages, "num_stages"), lists)?;
        match self.side(self.num_stages - 1) {
            0 => {
                let least = self.patch_size << (self.num_stages - 1);
                let expected =
                    format!("at least {least}: patch_size, doubled for each stage after the first");
                Err(refuse("image_size", self.image_size, expected))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn mini() -> ConvNextConfig {
        ConvNextConfig::preset("convnext-mini").unwrap()
    }

    #[test]
    fn presets_are_valid_and_files_are_read_and_written_with_all_keys() {
        for preset in PRESETS.map(|named| named.preset()) {
            ConvNextConfig::preset(preset.name).unwrap().validate().unwrap();
        }
        assert!(ConvNextConfig::preset("resnet").unwrap_err().to_string().contains("expected convnext-tiny"));
        let text =
            json!({"model_type": "convnext", "depths": [1, 1, 1, 1], "id2label": {"0": "cat"}, "mine": 7});
        let read: ConvNextConfig = serde_json::from_value(text).unwrap();
        assert_eq!((read.labels.names(), read.blocks()), (vec!["cat".to_owned()], 4));
        let written = serde_json::to_value(&read).unwrap();
        assert_eq!((&written["mine"], &written["id2label"]["0"]), (&7.into(), &"cat".into()));
        assert!(written.get("labels").is_none() && written.get("other").is_none());
    }

    #[test]
    fn stages_halve_and_paths_are_dropped_more_and_more() {
        let tiny =
            ConvNextConfig { drop_path_rate: 0.34, ..ConvNextConfig::preset("convnext-tiny-224").unwrap() };
        assert_eq!([0, 1, 2, 3].map(|stage| tiny.side(stage)), [56, 28, 14, 7]);
        assert_eq!((tiny.blocks(), tiny.drop_path(0), tiny.drop_path(17)), (18, 0.0, 0.34));
        assert!((tiny.drop_path(1) - 0.02).abs() < 1e-12);
        assert_eq!(ConvNextConfig { image_size: 31, ..mini() }.side(2), 3);
    }

    #[test]
    fn what_cannot_be_built_is_named() {
        let quantized = Map::from_iter([("quantization_config".to_owned(), json!({"quant_method": "bnb"}))]);
        for (config, expected) in [
            (
                ConvNextConfig { model_type: "convnextv2".into(), ..mini() },
                "`model_type` is convnextv2, expected",
            ),
            (ConvNextConfig { model_type: String::new(), ..mini() }, "`model_type` is missing"),
            (
                ConvNextConfig { architectures: Some(vec!["ConvNextBackbone".into()]), ..mini() },
                "`architectures` is ConvNextBackbone, expected ConvNextForImageClassification or ConvNextModel",
            ),
            (
                ConvNextConfig { other: quantized, ..mini() },
                "`quantization_config` is bnb, expected unquantized weights",
            ),
            (ConvNextConfig { patch_size: 0, ..mini() }, "`patch_size` is 0, expected at least 1"),
            (
                ConvNextConfig { depths: vec![1, 1], ..mini() },
                "`depths` is a list of 2, expected one for each",
            ),
            (
                ConvNextConfig { hidden_sizes: vec![8, 0, 8], ..mini() },
                "`hidden_sizes` is a list with 0, expected",
            ),
            (ConvNextConfig { image_size: 7, ..mini() }, "`image_size` is 7, expected at least 8"),
            (ConvNextConfig { labels: Classes::numbered(0), ..mini() }, "`id2label` is 0"),
            (
                ConvNextConfig { hidden_act: "silu".into(), ..mini() },
                "`hidden_act` is silu, expected gelu_new",
            ),
            (ConvNextConfig { drop_path_rate: 1.0, ..mini() }, "`drop_path_rate` is 1"),
            (ConvNextConfig { layer_norm_eps: 0.0, ..mini() }, "`layer_norm_eps` is 0"),
            (
                ConvNextConfig { layer_scale_init_value: f64::NAN, ..mini() },
                "`layer_scale_init_value` is NaN, expected a number",
            ),
        ] {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
