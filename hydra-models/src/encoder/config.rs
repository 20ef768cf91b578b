//! Encoder configurations, as in Hugging Face's `config.json`.

use super::modern::Modern;
use crate::ModelError;
use crate::family::HeadConfig;
use crate::family::supported::{self, DEEPEST, MOST_IDS, WIDEST, refuse};
use crate::pretrained;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// The supported model types.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelType {
    /// BERT, and models of its architecture, such as MiniLM.
    #[default]
    #[serde(rename = "bert")]
    Bert,
    /// RoBERTa.
    #[serde(rename = "roberta")]
    Roberta,
    /// XLM-RoBERTa.
    #[serde(rename = "xlm-roberta")]
    XlmRoberta,
    /// DistilBERT.
    #[serde(rename = "distilbert")]
    DistilBert,
    /// ModernBERT.
    #[serde(rename = "modernbert")]
    ModernBert,
}

/// A key of [`EncoderConfig`] and its name in a file.
type Key = (&'static str, &'static str);

impl ModelType {
    /// The `model_type`s in configurations, in the order of [`ALL`](Self::ALL).
    pub const NAMES: [&str; 5] = ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert"];

    /// All model types.
    pub const ALL: [Self; 5] =
        [Self::Bert, Self::Roberta, Self::XlmRoberta, Self::DistilBert, Self::ModernBert];

    /// The `model_type` in configurations.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// The Transformers class with a classifier.
    pub fn architecture(self) -> &'static str {
        self.architectures()[0]
    }

    /// The Transformers classes whose weights are read.
    fn architectures(self) -> &'static [&'static str] {
        match self {
            Self::Bert => {
                &["BertForSequenceClassification", "BertForMaskedLM", "BertModel", "BertForPreTraining"]
            }
            Self::Roberta => &["RobertaForSequenceClassification", "RobertaForMaskedLM", "RobertaModel"],
            Self::XlmRoberta => {
                &["XLMRobertaForSequenceClassification", "XLMRobertaForMaskedLM", "XLMRobertaModel"]
            }
            Self::DistilBert => {
                &["DistilBertForSequenceClassification", "DistilBertForMaskedLM", "DistilBertModel"]
            }
            Self::ModernBert => {
                &["ModernBertForSequenceClassification", "ModernBertForMaskedLM", "ModernBertModel"]
            }
        }
    }

    /// The keys that have other names in files of this type.
    fn renamed(self) -> &'static [Key] {
        match self {
            Self::DistilBert => &[
                ("hidden_size", "dim"),
                ("num_hidden_layers", "n_layers"),
                ("num_attention_heads", "n_heads"),
                ("intermediate_size", "hidden_dim"),
                ("hidden_act", "activation"),
                ("hidden_dropout_prob", "dropout"),
                ("attention_probs_dropout_prob", "attention_dropout"),
                ("classifier_dropout", "seq_classif_dropout"),
            ],
            Self::ModernBert => &[
                ("hidden_act", "hidden_activation"),
                ("layer_norm_eps", "norm_eps"),
                ("hidden_dropout_prob", "embedding_dropout"),
                ("attention_probs_dropout_prob", "attention_dropout"),
            ],
            _ => &[],
        }
    }

    /// The keys that files of this type do not have.
    fn absent(self) -> &'static [&'static str] {
        match self {
            Self::DistilBert => &["type_vocab_size", "layer_norm_eps"],
            Self::ModernBert => &["type_vocab_size"],
            _ => &[],
        }
    }

    /// The other names of keys that Transformers accepts in files of this type.
    fn aliases(self) -> &'static [Key] {
        if self == Self::DistilBert { &self.renamed()[..3] } else { &[] }
    }
}

/// An encoder's configuration, with BERT's names of Transformers; other types have other names in files. Defaults are
/// those of Transformers. Unknown keys are kept and written back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EncoderConfig {
    /// The model type.
    pub model_type: ModelType,
    /// The size of the vocabulary.
    pub vocab_size: usize,
    /// The rows of the position table: the longest sequence in tokens, and the rows that RoBERTa does not use.
    pub max_position_embeddings: usize,
    /// The number of token types; not used by DistilBERT and ModernBERT.
    pub type_vocab_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the feed-forward networks.
    pub intermediate_size: usize,
    /// The number of blocks.
    pub num_hidden_layers: usize,
    /// The number of attention heads; it divides `hidden_size`.
    pub num_attention_heads: usize,
    /// The activation function of the feed-forward networks.
    pub hidden_act: String,
    /// The epsilon of layer normalizations.
    pub layer_norm_eps: f64,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// The dropout probability after the embeddings and before a residual is added; of ModernBERT, after the
    /// embeddings.
    pub hidden_dropout_prob: f64,
    /// The dropout probability of attention weights; of ModernBERT, also of attention's output.
    pub attention_probs_dropout_prob: f64,
    /// The dropout probability in the head; `hidden_dropout_prob` if absent.
    pub classifier_dropout: Option<f64>,
    /// The head.
    #[serde(flatten)]
    pub head: HeadConfig,
    /// The settings that only ModernBERT has.
    #[serde(skip)]
    pub modern: Option<Modern>,
    /// Unknown keys of the file.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for EncoderConfig {
    /// BERT's.
    fn default() -> Self {
        Self {
            model_type: ModelType::Bert,
            vocab_size: 30_522,
            max_position_embeddings: 512,
            type_vocab_size: 2,
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            hidden_act: "gelu".to_owned(),
            layer_norm_eps: 1e-12,
            initializer_range: 0.02,
            hidden_dropout_prob: 0.1,
            attention_probs_dropout_prob: 0.1,
            classifier_dropout: None,
            head: HeadConfig::default(),
            modern: None,
            other: Map::new(),
        }
    }
}

/// A key, whether a value of it is refused, and the expected one.
type Refused = (&'static str, fn(&Value) -> bool, &'static str);

/// Values of other keys that change what a model computes, and are not supported.
const REFUSED: [Refused; 4] = [
    ("is_decoder", is_true, "false: an encoder attends in both directions"),
    ("add_cross_attention", is_true, "false"),
    ("position_embedding_type", |value| value.as_str() != Some("absolute"), "absolute"),
    ("pruned_heads", |value| value.as_object().is_none_or(|heads| !heads.is_empty()), "no pruned heads"),
];

fn is_true(value: &Value) -> bool {
    value.as_bool() != Some(false)
}

impl EncoderConfig {
    /// Transformers' defaults of a model type.
    fn of(model_type: ModelType) -> Self {
        let bert = Self { model_type, ..Self::default() };
        let padding = |id: u32| HeadConfig { pad_token_id: Some(id.into()), ..HeadConfig::default() };
        match model_type {
            ModelType::Bert => Self { head: padding(0), ..bert },
            ModelType::Roberta | ModelType::XlmRoberta => Self { head: padding(1), ..bert },
            ModelType::DistilBert => Self {
                head: padding(0),
                num_hidden_layers: 6,
                classifier_dropout: Some(0.2),
                type_vocab_size: 0,
                ..bert
            },
            ModelType::ModernBert => Self {
                head: padding(50_283),
                vocab_size: 50_368,
                max_position_embeddings: 8192,
                intermediate_size: 1152,
                num_hidden_layers: 22,
                layer_norm_eps: 1e-5,
                hidden_dropout_prob: 0.0,
                attention_probs_dropout_prob: 0.0,
                classifier_dropout: Some(0.0),
                type_vocab_size: 0,
                ..bert
            },
        }
    }

    /// The configuration in a file's keys; `path` is named in errors.
    ///
    /// # Errors
    /// Another model type, or a value of another kind.
    pub(super) fn from_json(path: &Path, file: Map<String, Value>) -> Result<Self, ModelError> {
        let found = file.get("model_type").and_then(Value::as_str).unwrap_or("missing");
        let kind = ModelType::ALL.into_iter().find(|kind| kind.name() == found);
        let kind = kind.ok_or_else(|| refuse("model_type", found, ModelType::NAMES.join(" or ")))?;
        let (mut keys, mut other) = (Self::of(kind).keys()?, Map::new());
        for (name, value) in &file {
            let own = kind.renamed().iter().find(|(_, theirs)| theirs == name);
            let is_unknown = kind.renamed().iter().any(|(own, _)| own == name);
            match own {
                Some((own, _)) => keys.insert((*own).to_owned(), value.clone()),
                None if is_unknown || kind.absent().contains(&name.as_str()) => {
                    other.insert(name.clone(), value.clone())
                }
                None => keys.insert(name.clone(), value.clone()),
            };
        }
        for (own, theirs) in kind.aliases() {
            match (other.get(*own), file.get(*theirs)) {
                (Some(value), None) => drop(keys.insert((*own).to_owned(), value.clone())),
                (Some(value), Some(known)) if value != known => {
                    let expected = format!("{known}, the value of `{theirs}`: set only `{theirs}`");
                    return Err(refuse(own, value, expected));
                }
                _ => {}
            }
        }
        let wrong = |source| ModelError::Json { path: path.to_owned(), source };
        let mut config: Self = serde_json::from_value(Value::Object(keys)).map_err(wrong)?;
        config.other.extend(other);
        if kind == ModelType::ModernBert {
            config.modern = Some(Modern::read(path, &config.other, config.num_hidden_layers)?);
        }
        Ok(config)
    }

    /// The keys by BERT's names, without unknown ones.
    fn keys(&self) -> Result<Map<String, Value>, ModelError> {
        pretrained::keys(&Self { other: Map::new(), ..self.clone() })
    }

    /// The keys of a file.
    ///
    /// # Errors
    /// Numbers that JSON cannot represent.
    pub(super) fn to_json(&self) -> Result<Map<String, Value>, ModelError> {
        let (kind, mut file) = (self.model_type, self.other.clone());
        for (name, value) in self.keys()? {
            if kind.absent().contains(&name.as_str()) {
                continue;
            }
            let renamed = kind.renamed().iter().find(|(own, _)| *own == name);
            file.insert(renamed.map_or(name, |(_, theirs)| (*theirs).to_owned()), value);
        }
        if let Some(modern) = &self.modern {
            file.insert("mlp_dropout".to_owned(), modern.mlp_dropout.into());
        }
        Ok(file)
    }

    /// The number of rows of the position table before the one of a sequence's first token.
    pub fn first_position(&self) -> usize {
        match self.model_type {
            ModelType::Roberta | ModelType::XlmRoberta => self.head.padding().unwrap_or(0) as usize + 1,
            _ => 0,
        }
    }

    /// The longest sequence in tokens.
    pub fn longest(&self) -> usize {
        self.max_position_embeddings.saturating_sub(self.first_position())
    }

    /// The dropout probability in the head.
    pub fn head_dropout(&self) -> f64 {
        self.classifier_dropout.unwrap_or(self.hidden_dropout_prob)
    }

    /// Checks that the configuration is valid and has the same meaning as in Transformers.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn validate(&self) -> Result<(), ModelError> {
        supported::check_not_quantized(&self.other)?;
        self.head.validate(self.model_type.architectures())?;
        self.validate_sizes()?;
        self.validate_numbers()?;
        for (name, refuses, expected) in REFUSED {
            if let Some(found) = self.other.get(name).filter(|found| !found.is_null() && refuses(found)) {
                return Err(refuse(name, found, expected));
            }
        }
        supported::check_activation("hidden_act", &self.hidden_act)
    }

    fn validate_sizes(&self) -> Result<(), ModelError> {
        supported::check_sizes(&[
            ("vocab_size", self.vocab_size, MOST_IDS),
            ("max_position_embeddings", self.max_position_embeddings, MOST_IDS),
            ("hidden_size", self.hidden_size, WIDEST),
            ("intermediate_size", self.intermediate_size, 4 * WIDEST),
            ("num_hidden_layers", self.num_hidden_layers, DEEPEST),
            ("num_attention_heads", self.num_attention_heads, WIDEST),
            ("id2label", self.head.outputs(), MOST_IDS),
        ])?;
        let has_types = !self.model_type.absent().contains(&"type_vocab_size");
        if has_types {
            supported::check_sizes(&[("type_vocab_size", self.type_vocab_size, WIDEST)])?;
        }
        let (heads, width) = (self.num_attention_heads, self.hidden_size);
        supported::check_divisor(("num_attention_heads", heads), ("hidden_size", width))?;
        let head_width = width / heads;
        if self.modern.is_some() && !head_width.is_multiple_of(2) {
            let expected = format!("a divisor of hidden_size ({}) into even heads", self.hidden_size);
            return Err(refuse("num_attention_heads", self.num_attention_heads, expected));
        }
        match self.longest() {
            0 => Err(refuse(
                "max_position_embeddings",
                self.max_position_embeddings,
                format!("more than the {} rows that pad_token_id leaves unused", self.first_position()),
            )),
            _ => Ok(()),
        }
    }

    fn validate_numbers(&self) -> Result<(), ModelError> {
        supported::check_dropouts(&[
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
            ("classifier_dropout", self.head_dropout()),
            ("mlp_dropout", self.modern.as_ref().map_or(0.0, |modern| modern.mlp_dropout)),
        ])?;
        supported::check_positive(&[
            ("layer_norm_eps", self.layer_norm_eps),
            ("initializer_range", self.initializer_range),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::config;
    use super::*;
    use serde_json::json;

    fn object(value: Value) -> Map<String, Value> {
        serde_json::from_value(value).unwrap()
    }

    /// The messages of the error of a configuration.
    fn refusal(keys: Value) -> String {
        let config = EncoderConfig::from_json(Path::new("config.json"), object(keys));
        let error = config.and_then(|config| config.validate()).unwrap_err();
        hydra_core::with_causes(&error)
    }

    #[test]
    fn files_of_every_type_are_read_and_written_with_their_own_names_and_all_keys() {
        for kind in ModelType::NAMES {
            let mut config = config(json!({"model_type": kind, "mine": 7, "id2label": {"0": "a", "1": "b"}}));
            config.validate().unwrap();
            assert_eq!((config.hidden_size, config.num_hidden_layers, config.vocab_size), (16, 3, 40));
            config.attention_probs_dropout_prob = 0.25;
            let file = config.to_json().unwrap();
            assert_eq!((&file["mine"], &file["id2label"]["1"]), (&json!(7), &json!("b")));
            assert!(!file.contains_key("modern") && !file.contains_key("head"));
            let own = match kind {
                "distilbert" => {
                    assert!(!file.contains_key("hidden_size") && !file.contains_key("type_vocab_size"));
                    assert_eq!((&file["dim"], &file["seq_classif_dropout"]), (&json!(16), &json!(0.2)));
                    "attention_dropout"
                }
                "modernbert" => {
                    assert!(file["norm_eps"] == 1e-5 && !file.contains_key("layer_norm_eps"));
                    "attention_dropout"
                }
                _ => "attention_probs_dropout_prob",
            };
            assert_eq!(file[own], 0.25);
            let again = EncoderConfig::from_json(Path::new("c"), file).unwrap();
            let other = again.other.clone();
            assert_eq!(again, EncoderConfig { other, ..config });
        }
    }

    #[test]
    fn keys_that_transformers_does_not_read_are_kept_and_not_used() {
        let keys = json!({"model_type": "modernbert", "layer_norm_eps": 0.5, "norm_eps": 1e-3});
        let config = config(keys);
        assert_eq!((config.layer_norm_eps, &config.other["layer_norm_eps"]), (1e-3, &json!(0.5)));
        assert_eq!(config.to_json().unwrap()["layer_norm_eps"], 0.5);
        let alias = EncoderConfig::from_json(
            Path::new("c"),
            object(json!({"model_type": "distilbert", "hidden_size": 24})),
        );
        assert_eq!(alias.unwrap().hidden_size, 24);
        let both = refusal(json!({"model_type": "distilbert", "hidden_size": 24, "dim": 12}));
        assert!(both.contains("`hidden_size` is 24, expected 12, the value of `dim`"), "{both}");
    }

    #[test]
    fn positions_of_roberta_begin_after_the_padding() {
        let roberta = config(json!({"model_type": "xlm-roberta", "max_position_embeddings": 34}));
        assert_eq!((roberta.first_position(), roberta.longest()), (2, 32));
        let bert = config(json!({"max_position_embeddings": 34}));
        assert_eq!((bert.first_position(), bert.longest(), bert.head_dropout()), (0, 34, 0.0));
    }

    #[test]
    fn what_cannot_be_built_is_named() {
        for (keys, expected) in [
            (json!({}), "`model_type` is missing, expected bert or roberta"),
            (json!({"model_type": "electra"}), "`model_type` is electra"),
            (json!({"model_type": "bert", "hidden_size": "wide"}), "config.json"),
            (json!({"model_type": "bert", "is_decoder": true}), "`is_decoder` is true, expected false"),
            (json!({"model_type": "bert", "position_embedding_type": "relative_key"}), "expected absolute"),
            (json!({"model_type": "bert", "pruned_heads": {"0": [1]}}), "expected no pruned heads"),
            (json!({"model_type": "bert", "hidden_act": "quick_gelu"}), "`hidden_act` is quick_gelu"),
            (json!({"model_type": "bert", "num_attention_heads": 7}), "a divisor of hidden_size (768)"),
            (json!({"model_type": "bert", "hidden_dropout_prob": 1.0}), "`hidden_dropout_prob` is 1"),
            (
                json!({"model_type": "bert", "architectures": ["RobertaModel"]}),
                "BertForSequenceClassification",
            ),
            (json!({"model_type": "roberta", "max_position_embeddings": 2}), "more than the 2 rows"),
            (json!({"model_type": "bert", "id2label": {}}), "`id2label` is 0"),
            (
                json!({"model_type": "bert", "quantization_config": {"quant_method": "bnb"}}),
                "`quantization_config` is bnb",
            ),
            (json!({"model_type": "modernbert", "classifier_pooling": "max"}), "config.json"),
            (json!({"model_type": "modernbert", "layer_types": ["full_attention"]}), "22 layer types"),
            (json!({"model_type": "modernbert", "rope_scaling": {"type": "yarn"}}), "`rope_scaling`"),
        ] {
            let found = refusal(keys.clone());
            assert!(found.contains(expected), "{keys}: {found}");
        }
    }
}
