//! The shape of a vision transformer, as Hugging Face's `config.json` describes it.

use crate::ModelError;
use crate::family::Preset;
use crate::parts::Activate;
use crate::weights::{in_file, read_json};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::Path;

/// A vision transformer's configuration, with the names and defaults of Hugging Face transformers. Keys that are not
/// known here are kept and written back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VitConfig {
    /// The family of models; `vit`.
    pub model_type: String,
    /// The classes that the weights were made for; any when empty.
    pub architectures: Option<Vec<String>>,
    /// The width of the residual.
    pub hidden_size: usize,
    /// The number of blocks.
    pub num_hidden_layers: usize,
    /// The number of attention heads; it divides `hidden_size`.
    pub num_attention_heads: usize,
    /// The width of the blocks' networks.
    pub intermediate_size: usize,
    /// The activation between the networks' maps.
    pub hidden_act: String,
    /// The probability of dropout after the embeddings and before a residual is added.
    pub hidden_dropout_prob: f64,
    /// The probability of dropout of attention weights.
    pub attention_probs_dropout_prob: f64,
    /// The standard deviation of first values.
    pub initializer_range: f64,
    /// The number that is added to the variance in layer normalizations.
    pub layer_norm_eps: f64,
    /// The side of a picture in pixels.
    pub image_size: usize,
    /// The side of a patch in pixels; it divides `image_size`.
    pub patch_size: usize,
    /// The colours of a pixel.
    pub num_channels: usize,
    /// True if the maps to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// The names of the classes by their numbers.
    pub id2label: Map<String, Value>,
    /// The numbers of the classes by their names.
    pub label2id: Map<String, Value>,
    /// All other keys of the file.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Names for so many classes, and their numbers, as transformers gives them.
fn labels(classes: usize) -> [Map<String, Value>; 2] {
    let name = |class: usize| format!("LABEL_{class}");
    let names = (0..classes).map(|class| (class.to_string(), json!(name(class))));
    [names.collect(), (0..classes).map(|class| (name(class), json!(class))).collect()]
}

impl Default for VitConfig {
    fn default() -> Self {
        let [id2label, label2id] = labels(2);
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
            id2label,
            label2id,
            other: Map::new(),
        }
    }
}

/// The models that have names.
pub const PRESETS: [Preset; 2] = [
    Preset { name: "vit-base", description: "ViT-B/16 for pictures of 224 pixels" },
    Preset { name: "vit-tiny", description: "3 blocks of width 48 for pictures of 32 pixels" },
];

/// With these, the bytes of all parameters and of their optimizer's state are a number of 64 bits.
const WIDEST: usize = 1 << 20;
const DEEPEST: usize = 1 << 12;
const MOST_CLASSES: usize = i32::MAX as usize;

const ARCHITECTURES: [&str; 2] = ["ViTForImageClassification", "ViTModel"];

impl VitConfig {
    /// The model called `name`, one of [`PRESETS`].
    ///
    /// # Errors
    /// A name that no preset has.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        let base = Self { model_type: "vit".to_owned(), layer_norm_eps: 1e-12, ..Self::default() };
        match name {
            "vit-base" => Ok(base.with_classes(1000)),
            "vit-tiny" => Ok(Self {
                hidden_size: 48,
                num_hidden_layers: 3,
                num_attention_heads: 3,
                intermediate_size: 96,
                image_size: 32,
                patch_size: 8,
                ..base
            }
            .with_classes(10)),
            _ => {
                let known = PRESETS.iter().map(|preset| preset.name).collect();
                Err(ModelError::UnknownPreset { found: name.to_owned(), known })
            }
        }
    }

    /// Reads a `config.json`, and checks it.
    ///
    /// # Errors
    /// A file that cannot be read or is no such JSON, and one that describes a model that is not supported.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        let config: Self = read_json(path)?;
        config.validate().map_err(|source| in_file(path, source))?;
        Ok(config)
    }

    /// The same for so many classes, which get names like `LABEL_0` if there were not as many.
    pub fn with_classes(mut self, classes: usize) -> Self {
        if self.classes() != classes {
            [self.id2label, self.label2id] = labels(classes);
        }
        self
    }

    /// The same for classes of these names, numbered in this order.
    pub fn with_class_names(mut self, names: &[String]) -> Self {
        let numbered = || names.iter().enumerate();
        self.id2label = numbered().map(|(class, name)| (class.to_string(), json!(name))).collect();
        self.label2id = numbered().map(|(class, name)| (name.clone(), json!(class))).collect();
        self
    }

    /// The names of the classes by their numbers; a number without a name is its own.
    pub fn class_names(&self) -> Vec<String> {
        let name = |class: usize| {
            let number = class.to_string();
            self.id2label.get(&number).and_then(Value::as_str).map(str::to_owned).unwrap_or(number)
        };
        (0..self.classes()).map(name).collect()
    }

    /// Returns whether the classes have no names but those that transformers makes of numbers.
    pub fn has_unnamed_classes(&self) -> bool {
        self.id2label == labels(self.classes())[0]
    }

    /// The numbers of classes of these names, if the model has all of them; where its classes have no names, those of as
    /// many classes as it has.
    pub fn numbers_of(&self, names: &[String]) -> Option<Vec<i32>> {
        let known = self.class_names();
        let number = |name: &String| known.iter().position(|known| known == name).map(|at| at as i32);
        let unnamed = self.has_unnamed_classes() && names.len() == self.classes();
        names
            .iter()
            .map(number)
            .collect::<Option<Vec<i32>>>()
            .or_else(|| unnamed.then(|| (0..names.len() as i32).collect()))
    }

    /// The number of classes.
    pub fn classes(&self) -> usize {
        self.id2label.len()
    }

    /// The patches of a picture.
    pub fn patches(&self) -> usize {
        (self.image_size / self.patch_size).pow(2)
    }

    /// Checks that a model of this configuration can be built and means what transformers means by it.
    ///
    /// # Errors
    /// The first value that cannot.
    pub fn validate(&self) -> Result<(), ModelError> {
        self.validate_family()?;
        self.validate_sizes()?;
        self.validate_numbers()?;
        match Activate::named(&self.hidden_act) {
            Some(_) => Ok(()),
            None => Err(refuse("hidden_act", &self.hidden_act, Activate::NAMES.join(", "))),
        }
    }

    fn validate_family(&self) -> Result<(), ModelError> {
        if self.model_type != "vit" {
            let found = if self.model_type.is_empty() { "missing" } else { &self.model_type };
            return Err(refuse("model_type", found, "vit"));
        }
        if let Some(found) = self.other.get("quantization_config").filter(|found| !found.is_null()) {
            let method =
                found.get("quant_method").and_then(Value::as_str).unwrap_or("a method without a name");
            let expected = "weights that are not quantized, in F32, F16 or BF16: take the original model";
            return Err(refuse("quantization_config", method, expected));
        }
        match &self.architectures {
            Some(found)
                if !found.is_empty() && !found.iter().any(|a| ARCHITECTURES.contains(&a.as_str())) =>
            {
                Err(refuse("architectures", found.join(", "), ARCHITECTURES.join(" or ")))
            }
            _ => Ok(()),
        }
    }

    fn validate_sizes(&self) -> Result<(), ModelError> {
        let sizes = [
            ("hidden_size", self.hidden_size, WIDEST),
            ("num_hidden_layers", self.num_hidden_layers, DEEPEST),
            ("num_attention_heads", self.num_attention_heads, WIDEST),
            ("intermediate_size", self.intermediate_size, 4 * WIDEST),
            ("image_size", self.image_size, 1 << 15),
            ("patch_size", self.patch_size, 1 << 15),
            ("num_channels", self.num_channels, 1 << 10),
            ("id2label", self.classes(), MOST_CLASSES),
        ];
        if let Some((name, size, most)) = sizes.iter().find(|(_, size, most)| !(1..=*most).contains(size)) {
            let expected = if *size == 0 { "at least 1".to_owned() } else { format!("at most {most}") };
            return Err(refuse(name, size, expected));
        }
        let divisors = [
            ("num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size),
            ("patch_size", self.patch_size, "image_size", self.image_size),
        ];
        match divisors.into_iter().find(|(_, part, _, whole)| !whole.is_multiple_of(*part)) {
            Some((name, part, of, whole)) => {
                Err(refuse(name, part, format!("a divisor of {of}, which is {whole}")))
            }
            None => Ok(()),
        }
    }

    fn validate_numbers(&self) -> Result<(), ModelError> {
        let dropouts = [
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
        ];
        if let Some((name, found)) = dropouts.into_iter().find(|(_, p)| !(0.0..1.0).contains(p)) {
            return Err(refuse(name, found, "at least 0 and below 1"));
        }
        let numbers =
            [("layer_norm_eps", self.layer_norm_eps), ("initializer_range", self.initializer_range)];
        match numbers.into_iter().find(|(_, x)| !(x.is_finite() && *x > 0.0)) {
            Some((name, found)) => Err(refuse(name, found, "a number above 0")),
            None => Ok(()),
        }
    }
}

fn refuse(name: &'static str, found: impl ToString, expected: impl Into<String>) -> ModelError {
    ModelError::Config { name, found: found.to_string(), expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> VitConfig {
        VitConfig::preset("vit-tiny").unwrap()
    }

    #[test]
    fn presets_are_valid_and_classes_have_names() {
        for preset in PRESETS {
            VitConfig::preset(preset.name).unwrap().validate().unwrap();
        }
        let named = VitConfig { id2label: labels(10)[0].clone(), ..tiny() };
        let mut cats = named.clone();
        cats.id2label.insert("0".to_owned(), json!("cat"));
        assert_eq!(cats.clone().with_classes(10), cats, "as many as there were keep their names");
        let fewer = cats.with_classes(3);
        assert_eq!(
            (fewer.classes(), &fewer.id2label["0"], &fewer.label2id["LABEL_2"]),
            (3, &json!("LABEL_0"), &json!(2))
        );
        assert!(VitConfig::preset("vit-x").unwrap_err().to_string().contains("expected vit-base, vit-tiny"));
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
            (VitConfig { other: quantized, ..tiny() }, "`quantization_config` is bnb, expected weights that"),
            (VitConfig { hidden_size: 0, ..tiny() }, "`hidden_size` is 0, expected at least 1"),
            (VitConfig { id2label: Map::new(), ..tiny() }, "`id2label` is 0"),
            (
                VitConfig { num_attention_heads: 5, ..tiny() },
                "`num_attention_heads` is 5, expected a divisor of hidden_size, which is 48",
            ),
            (
                VitConfig { patch_size: 5, ..tiny() },
                "`patch_size` is 5, expected a divisor of image_size, which is 32",
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
