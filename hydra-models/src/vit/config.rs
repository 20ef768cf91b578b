//! Vision transformer configurations, as in Hugging Face's `config.json`.

use crate::ModelError;
use crate::family::supported::{self, DEEPEST, MOST_IDS, WIDEST};
use crate::family::{Classes, NamedConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A vision transformer's configuration, with the names and defaults of Transformers. Unknown keys are kept and written
/// back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VitConfig {
    /// The model type; `vit`.
    pub model_type: String,
    /// The Transformers classes of the weights; any if empty.
    pub architectures: Option<Vec<String>>,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The number of blocks.
    pub num_hidden_layers: usize,
    /// The number of attention heads; it divides `hidden_size`.
    pub num_attention_heads: usize,
    /// The width of the feed-forward networks.
    pub intermediate_size: usize,
    /// The activation function of the feed-forward networks.
    pub hidden_act: String,
    /// The dropout probability after the embeddings and before a residual is added.
    pub hidden_dropout_prob: f64,
    /// The dropout probability of attention weights.
    pub attention_probs_dropout_prob: f64,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// The epsilon of layer normalizations.
    pub layer_norm_eps: f64,
    /// The side of an image in pixels.
    pub image_size: usize,
    /// The side of a patch in pixels; it divides `image_size`.
    pub patch_size: usize,
    /// The number of colour channels.
    pub num_channels: usize,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The classes.
    #[serde(flatten)]
    pub labels: Classes,
    /// Unknown keys of the file.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for VitConfig {
    fn default() -> Self {
        Self {
            model_type: String::new(),
            architectures: None,
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            intermediate_size: 3072,
            hidden_act: "gelu".to_owned(),
            hidden_dropout_prob: 0.0,
            attention_probs_dropout_prob: 0.0,
            initializer_range: 0.02,
            layer_norm_eps: 1e-12,
            image_size: 224,
            patch_size: 16,
            num_channels: 3,
            qkv_bias: true,
            labels: Classes::default(),
            other: Map::new(),
        }
    }
}

/// The presets.
pub(super) const PRESETS: [NamedConfig<VitConfig>; 2] = [
    NamedConfig::new("vit-base", "ViT-B/16 for images of 224 pixels", || {
        Ok(VitConfig { labels: Classes::numbered(1000), ..VitConfig::base() })
    }),
    NamedConfig::new("vit-tiny", "3 blocks of width 48 for images of 32 pixels", || {
        Ok(VitConfig {
            hidden_size: 48,
            num_hidden_layers: 3,
            num_attention_heads: 3,
            intermediate_size: 96,
            image_size: 32,
            patch_size: 8,
            labels: Classes::numbered(10),
            ..VitConfig::base()
        })
    }),
];

const ARCHITECTURES: [&str; 2] = ["ViTForImageClassification", "ViTModel"];

impl VitConfig {
    fn base() -> Self {
        Self { model_type: "vit".to_owned(), ..Self::default() }
    }

    /// The preset `name`, one of the family's [presets](crate::family::Family::presets).
    ///
    /// # Errors
    /// An unknown name.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        NamedConfig::find(&PRESETS, name)
    }

    /// The number of patches in an image.
    pub fn patches(&self) -> usize {
        (self.image_size / self.patch_size).pow(2)
    }

    /// Checks that the configuration is valid and has the same meaning as in Transformers.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn validate(&self) -> Result<(), ModelError> {
        supported::check_type(&self.model_type, "vit")?;
        supported::check_not_quantized(&self.other)?;
        supported::check_architectures(self.architectures.as_deref(), &ARCHITECTURES)?;
        self.validate_sizes()?;
        self.validate_numbers()?;
        supported::check_activation("hidden_act", &self.hidden_act)
    }

    fn validate_sizes(&self) -> Result<(), ModelError> {
        supported::check_sizes(&[
            ("hidden_size", self.hidden_size, WIDEST),
            ("num_hidden_layers", self.num_hidden_layers, DEEPEST),
            ("num_attention_heads", self.num_attention_heads, WIDEST),
            ("intermediate_size", self.intermediate_size, 4 * WIDEST),
            ("image_size", self.image_size, 1 << 15),
            ("patch_size", self.patch_size, 1 << 15),
            ("num_channels", self.num_channels, 1 << 10),
            ("id2label", self.labels.count(), MOST_IDS),
        ])?;
        let (heads, width) = (self.num_attention_heads, self.hidden_size);
        supported::check_divisor(("num_attention_heads", heads), ("hidden_size", width))?;
        supported::check_divisor(("patch_size", self.patch_size), ("image_size", self.image_size))
    }

    fn validate_numbers(&self) -> Result<(), ModelError> {
        supported::check_dropouts(&[
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
        ])?;
        supported::check_positive(&[
            ("layer_norm_eps", self.layer_norm_eps),
            ("initializer_range", self.initializer_range),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tiny() -> VitConfig {
        VitConfig::preset("vit-tiny").unwrap()
    }

    #[test]
    fn presets_are_valid_and_files_are_read_and_written_with_all_keys() {
        for preset in PRESETS.map(|named| named.preset()) {
            VitConfig::preset(preset.name).unwrap().validate().unwrap();
        }
        assert!(VitConfig::preset("vit-x").unwrap_err().to_string().contains("expected vit-base, vit-tiny"));
        let text = json!({"model_type": "vit", "id2label": {"0": "cat"}, "label2id": {"cat": 0}, "mine": 7});
        let read: VitConfig = serde_json::from_value(text).unwrap();
        assert_eq!((read.labels.names(), &read.labels.label2id["cat"]), (vec!["cat".to_owned()], &json!(0)));
        let written = serde_json::to_value(&read).unwrap();
        assert_eq!((&written["mine"], &written["id2label"]["0"]), (&json!(7), &json!("cat")));
        assert!(written.get("labels").is_none() && written.get("other").is_none());
    }

    #[test]
    fn what_cannot_be_built_is_named() {
        let quantized = Map::from_iter([("quantization_config".to_owned(), json!({"quant_method": "bnb"}))]);
        for (config, expected) in [
            (VitConfig { model_type: "deit".into(), ..tiny() }, "`model_type` is deit, expected vit"),
            (VitConfig { model_type: String::new(), ..tiny() }, "`model_type` is missing"),
            (
                VitConfig { architectures: Some(vec!["ViTMAEModel".into()]), ..tiny() },
                "`architectures` is ViTMAEModel, expected ViTForImageClassification or ViTModel",
            ),
            (
                VitConfig { other: quantized, ..tiny() },
                "`quantization_config` is bnb, expected unquantized weights",
            ),
            (VitConfig { hidden_size: 0, ..tiny() }, "`hidden_size` is 0, expected at least 1"),
            (VitConfig { labels: Classes::numbered(0), ..tiny() }, "`id2label` is 0"),
            (
                VitConfig { num_attention_heads: 5, ..tiny() },
                "`num_attention_heads` is 5, expected a divisor of hidden_size (48)",
            ),
            (
                VitConfig { patch_size: 5, ..tiny() },
                "`patch_size` is 5, expected a divisor of image_size (32)",
            ),
            (VitConfig { hidden_act: "silu".into(), ..tiny() }, "`hidden_act` is silu, expected gelu_new"),
            (VitConfig { hidden_dropout_prob: 1.0, ..tiny() }, "`hidden_dropout_prob` is 1"),
            (VitConfig { layer_norm_eps: 0.0, ..tiny() }, "`layer_norm_eps` is 0"),
        ] {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
