//! ResNet configurations, as in Hugging Face's `config.json`.

use crate::ModelError;
use crate::family::supported::{self, DEEPEST, MOST_IDS, MOST_STAGES, WIDEST, refuse};
use crate::family::{Classes, NamedConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The side of images, in pixels, of a model whose files do not name it.
const SIDE: usize = 224;

/// A ResNet's configuration, with the names and defaults of Transformers. Unknown keys are kept and written back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResNetConfig {
    /// The model type; `resnet`.
    pub model_type: String,
    /// The Transformers classes of the weights; any if empty.
    pub architectures: Option<Vec<String>>,
    /// The number of colour channels.
    pub num_channels: usize,
    /// The side of an image in pixels; zero in a file that leaves it to the preprocessor's configuration, as those of Transformers
    /// do.
    #[serde(skip_serializing_if = "is_zero")]
    pub image_size: usize,
    /// The side of the images that the preprocessor returns.
    #[serde(skip)]
    pub preprocessed: Option<usize>,
    /// The channels of the first convolution.
    pub embedding_size: usize,
    /// The channels of each stage.
    pub hidden_sizes: Vec<usize>,
    /// The number of blocks of each stage.
    pub depths: Vec<usize>,
    /// `basic`: two convolutions of 3 x 3 in a block; or `bottleneck`: one of 3 x 3 between two of 1 x 1.
    pub layer_type: String,
    /// The activation function after the first convolution and after each block; those within a block are ReLUs.
    pub hidden_act: String,
    /// Whether the first stage halves the image as the others do.
    pub downsample_in_first_stage: bool,
    /// Whether the first convolution of a bottleneck halves the image, instead of the second one.
    pub downsample_in_bottleneck: bool,
    /// The classes.
    #[serde(flatten)]
    pub labels: Classes,
    /// A dropout probability that was set. Only 0 is valid, because there is no dropout.
    #[serde(skip)]
    pub dropout: f64,
    /// Unknown keys of the file.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for ResNetConfig {
    fn default() -> Self {
        Self {
            model_type: String::new(),
            architectures: None,
            num_channels: 3,
            image_size: 0,
            preprocessed: None,
            dropout: 0.0,
            embedding_size: 64,
            hidden_sizes: vec![256, 512, 1024, 2048],
            depths: vec![3, 4, 6, 3],
            layer_type: "bottleneck".to_owned(),
            hidden_act: "relu".to_owned(),
            downsample_in_first_stage: false,
            downsample_in_bottleneck: false,
            labels: Classes::default(),
            other: Map::new(),
        }
    }
}

fn is_zero(size: &usize) -> bool {
    *size == 0
}

/// The presets.
pub(super) const PRESETS: [NamedConfig<ResNetConfig>; 3] = [
    NamedConfig::new("resnet-18", "ResNet-18 for images of 224 pixels", || {
        Ok(ResNetConfig {
            hidden_sizes: vec![64, 128, 256, 512],
            depths: vec![2; 4],
            layer_type: "basic".to_owned(),
            labels: Classes::numbered(1000),
            ..ResNetConfig::base()
        })
    }),
    NamedConfig::new("resnet-50", "ResNet-50 for images of 224 pixels", || {
        Ok(ResNetConfig { labels: Classes::numbered(1000), ..ResNetConfig::base() })
    }),
    NamedConfig::new("resnet-mini", "5 blocks of 8 to 32 channels for images of 32 pixels", || {
        Ok(ResNetConfig {
            image_size: 32,
            embedding_size: 8,
            hidden_sizes: vec![8, 16, 32],
            depths: vec![1, 2, 2],
            layer_type: "basic".to_owned(),
            labels: Classes::numbered(10),
            ..ResNetConfig::base()
        })
    }),
];

/// The channels of a bottleneck's 3 x 3 convolution are those of its output divided by this.
pub(super) const REDUCTION: usize = 4;

const ARCHITECTURES: [&str; 2] = ["ResNetForImageClassification", "ResNetModel"];

impl ResNetConfig {
    fn base() -> Self {
        Self { model_type: "resnet".to_owned(), ..Self::default() }
    }

    /// The preset `name`, one of the family's [presets](crate::family::Family::presets).
    ///
    /// # Errors
    /// An unknown name.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        NamedConfig::find(&PRESETS, name)
    }

    /// The side of an image in pixels.
    pub fn image_side(&self) -> usize {
        match self.image_size {
            0 => self.preprocessed.unwrap_or(SIDE),
            side => side,
        }
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.depths.iter().sum()
    }

    /// Whether blocks are bottlenecks.
    pub fn has_bottlenecks(&self) -> bool {
        self.layer_type == "bottleneck"
    }

    /// The stride of a stage's first block.
    pub fn stride(&self, stage: usize) -> usize {
        if stage > 0 || self.downsample_in_first_stage { 2 } else { 1 }
    }

    /// The channels that a stage reads.
    pub fn inputs(&self, stage: usize) -> usize {
        stage.checked_sub(1).map_or(self.embedding_size, |before| self.hidden_sizes[before])
    }

    /// The side of the feature maps that this stage returns.
    pub fn side(&self, stage: usize) -> usize {
        // The first convolution and the pooling after it halve the image, rounding up.
        let pooled = self.image_side().div_ceil(2).div_ceil(2);
        (0..=stage).fold(pooled, |side, stage| side.div_ceil(self.stride(stage)))
    }

    /// The multiplications of a block's convolutions for an image.
    pub(super) fn block_products(&self, stage: usize, block: usize) -> f64 {
        let (outputs, after) = (self.hidden_sizes[stage], self.side(stage));
        let stride = if block == 0 { self.stride(stage) } else { 1 };
        let inputs = if block == 0 { self.inputs(stage) } else { outputs };
        let before = match (block, stage) {
            (0, 0) => self.image_side().div_ceil(2).div_ceil(2),
            (0, _) => self.side(stage - 1),
            _ => after,
        };
        let product = |from: usize, to: usize, side: usize, places: usize| {
            (from * to * side * side) as f64 * (places as f64).powi(2)
        };
        let shortcut =
            if inputs != outputs || stride != 1 { product(inputs, outputs, 1, after) } else { 0.0 };
        let inner = outputs / REDUCTION;
        let first = if self.downsample_in_bottleneck { after } else { before };
        let own = match self.has_bottlenecks() {
            true => {
                product(inputs, inner, 1, first)
                    + product(inner, inner, 3, after)
                    + product(inner, outputs, 1, after)
            }
            false => product(inputs, outputs, 3, after) + product(outputs, outputs, 3, after),
        };
        shortcut + own
    }

    /// Checks that the configuration is valid and has the same meaning as in Transformers.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn validate(&self) -> Result<(), ModelError> {
        if self.dropout != 0.0 {
            return Err(refuse("dropout", self.dropout, "0, because a ResNet has no dropout"));
        }
        supported::check_type(&self.model_type, "resnet")?;
        supported::check_not_quantized(&self.other)?;
        supported::check_architectures(self.architectures.as_deref(), &ARCHITECTURES)?;
        self.validate_sizes()?;
        if !["basic", "bottleneck"].contains(&self.layer_type.as_str()) {
            return Err(refuse("layer_type", &self.layer_type, "basic or bottleneck"));
        }
        supported::check_activation("hidden_act", &self.hidden_act)
    }

    fn validate_sizes(&self) -> Result<(), ModelError> {
        supported::check_sizes(&[
            ("image_size", self.image_side(), 1 << 15),
            ("num_channels", self.num_channels, 1 << 10),
            ("embedding_size", self.embedding_size, WIDEST),
            ("id2label", self.labels.count(), MOST_IDS),
        ])?;
        let stages = self.hidden_sizes.len();
        if !(1..=MOST_STAGES).contains(&stages) {
            return Err(refuse(
                "hidden_sizes",
                format!("a list of {stages}"),
                format!("1 to {MOST_STAGES} stages"),
            ));
        }
        let least = if self.has_bottlenecks() { REDUCTION } else { 1 };
        let lists =
            [("hidden_sizes", &*self.hidden_sizes, least..=WIDEST), ("depths", &*self.depths, 1..=DEEPEST)];
        supported::check_stages((stages, "hidden_sizes"), lists)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pretrained::Architecture;
    use serde_json::json;
    use std::fs;
    use tempfile::TempDir;

    fn mini() -> ResNetConfig {
        ResNetConfig::preset("resnet-mini").unwrap()
    }

    #[test]
    fn presets_are_valid_and_files_are_read_and_written_with_all_keys() {
        for preset in PRESETS.map(|named| named.preset()) {
            ResNetConfig::preset(preset.name).unwrap().validate().unwrap();
        }
        assert!(ResNetConfig::preset("vgg").unwrap_err().to_string().contains("expected resnet-18"));
        let text =
            json!({"model_type": "resnet", "depths": [1, 1, 1, 1], "id2label": {"0": "cat"}, "mine": 7});
        let read: ResNetConfig = serde_json::from_value(text).unwrap();
        assert_eq!((read.labels.names(), read.blocks()), (vec!["cat".to_owned()], 4));
        let written = serde_json::to_value(&read).unwrap();
        assert_eq!((&written["mine"], &written["id2label"]["0"]), (&7.into(), &"cat".into()));
        assert!(written.get("labels").is_none() && written.get("other").is_none());
    }

    #[test]
    fn the_side_of_images_is_that_of_the_preprocessor() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("config.json");
        let side = || ResNetConfig::read(&path).map(|config| config.image_side());
        fs::write(&path, json!({"model_type": "resnet"}).to_string()).unwrap();
        assert_eq!(side().unwrap(), 224);
        for (size, expected) in
            [(json!({"shortest_edge": 96}), 96), (json!({"height": 48, "width": 48}), 48), (json!(64), 64)]
        {
            let text = json!({"size": size}).to_string();
            fs::write(dir.path().join("preprocessor_config.json"), text).unwrap();
            assert_eq!(side().unwrap(), expected);
        }
        fs::write(&path, json!({"model_type": "resnet", "image_size": 32}).to_string()).unwrap();
        assert_eq!(side().unwrap(), 32);
    }

    #[test]
    fn stages_halve_all_images_but_the_first_one() {
        let large = ResNetConfig::preset("resnet-50").unwrap();
        assert_eq!([0, 1, 2, 3].map(|stage| large.side(stage)), [56, 28, 14, 7]);
        let first = ResNetConfig { downsample_in_first_stage: true, image_size: 30, ..mini() };
        assert_eq!([0, 1, 2].map(|stage| first.side(stage)), [4, 2, 1]);
        assert_eq!([0, 1].map(|stage| (first.inputs(stage), first.stride(stage))), [(8, 2), (8, 2)]);
        assert_eq!(mini().stride(0), 1);
    }

    #[test]
    fn what_cannot_be_built_is_named() {
        let quantized = Map::from_iter([("quantization_config".to_owned(), json!({"quant_method": "bnb"}))]);
        for (config, expected) in [
            (ResNetConfig { model_type: "regnet".into(), ..mini() }, "`model_type` is regnet, expected"),
            (
                ResNetConfig { architectures: Some(vec!["ResNetBackbone".into()]), ..mini() },
                "`architectures` is ResNetBackbone, expected ResNetForImageClassification or ResNetModel",
            ),
            (
                ResNetConfig { other: quantized, ..mini() },
                "`quantization_config` is bnb, expected unquantized weights",
            ),
            (ResNetConfig { embedding_size: 0, ..mini() }, "`embedding_size` is 0, expected at least 1"),
            (ResNetConfig { depths: vec![1, 1], ..mini() }, "`depths` is a list of 2, expected one for each"),
            (
                ResNetConfig { hidden_sizes: vec![8, 0, 8], ..mini() },
                "`hidden_sizes` is a list with 0, expected",
            ),
            (
                ResNetConfig { hidden_sizes: vec![8, 3, 8], layer_type: "bottleneck".into(), ..mini() },
                "`hidden_sizes` is a list with 3, expected numbers from 4",
            ),
            (ResNetConfig { hidden_sizes: vec![], ..mini() }, "`hidden_sizes` is a list of 0"),
            (ResNetConfig { labels: Classes::numbered(0), ..mini() }, "`id2label` is 0"),
            (ResNetConfig { layer_type: "wide".into(), ..mini() }, "`layer_type` is wide, expected basic or"),
            (ResNetConfig { hidden_act: "silu".into(), ..mini() }, "`hidden_act` is silu, expected gelu_new"),
        ] {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
