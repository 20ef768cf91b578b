//! GPT-2 configurations, as in Hugging Face's `config.json`.

use crate::ModelError;
use crate::family::supported::{self, DEEPEST, MOST_IDS, WIDEST, refuse};
use crate::family::{HeadConfig, NamedConfig};
use crate::parts::chunk_rows;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A GPT-2 configuration, with the names and defaults of Transformers. Unknown keys are kept and written back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpt2Config {
    /// The model type; `gpt2`.
    pub model_type: String,
    /// The head: that of a language model, or of a sequence classifier with its labels.
    #[serde(flatten)]
    pub head: HeadConfig,
    /// The size of the vocabulary.
    pub vocab_size: usize,
    /// The longest sequence in tokens.
    pub n_positions: usize,
    /// The width of the residual stream.
    pub n_embd: usize,
    /// The number of blocks.
    pub n_layer: usize,
    /// The number of attention heads; it divides `n_embd`.
    pub n_head: usize,
    /// The width of the feed-forward networks; four times `n_embd` if absent.
    pub n_inner: Option<usize>,
    /// The activation function of the feed-forward networks.
    pub activation_function: String,
    /// The dropout probability before a residual is added.
    pub resid_pdrop: f64,
    /// The dropout probability after the embedding.
    pub embd_pdrop: f64,
    /// The dropout probability of attention weights.
    pub attn_pdrop: f64,
    /// The epsilon of layer normalizations.
    pub layer_norm_epsilon: f64,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// Whether attention scores are divided by the root of a head's width.
    pub scale_attn_weights: bool,
    /// Whether attention scores are also divided by the layer's number, counted from one.
    pub scale_attn_by_inverse_layer_idx: bool,
    /// Whether attention is reordered for half precision; not supported.
    pub reorder_and_upcast_attn: bool,
    /// Whether blocks attend to an encoder; not supported.
    pub add_cross_attention: bool,
    /// Whether a language model's head shares the embedding's table; false is not supported.
    pub tie_word_embeddings: bool,
    /// The number of layers that the token table is split into, for the embedding and for the head, each with its share
    /// of the rows; 1 keeps it whole. Files never store it, because they have whole tables. Training with another
    /// number of parts differs in the last bits.
    #[serde(skip)]
    pub vocabulary_parts: usize,
    /// Unknown keys of the file.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for Gpt2Config {
    fn default() -> Self {
        Self {
            model_type: String::new(),
            head: HeadConfig::default(),
            vocab_size: 50_257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: "gelu_new".to_owned(),
            resid_pdrop: 0.1,
            embd_pdrop: 0.1,
            attn_pdrop: 0.1,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            reorder_and_upcast_attn: false,
            add_cross_attention: false,
            tie_word_embeddings: true,
            vocabulary_parts: 1,
            other: Map::new(),
        }
    }
}

/// The presets.
pub(super) const PRESETS: [NamedConfig<Gpt2Config>; 7] = [
    NamedConfig::new("gpt2", "GPT-2 small, 124 million parameters", || sized([50_257, 1024, 768, 12, 12])),
    NamedConfig::new("gpt2-medium", "GPT-2 medium, 355 million parameters", || {
        sized([50_257, 1024, 1024, 24, 16])
    }),
    NamedConfig::new("gpt2-large", "GPT-2 large, 774 million parameters", || {
        sized([50_257, 1024, 1280, 36, 20])
    }),
    NamedConfig::new("gpt2-xl", "GPT-2 XL, 1.5 billion parameters", || sized([50_257, 1024, 1600, 48, 25])),
    NamedConfig::new("gpt2-mini", "4 blocks of width 128, GPT-2's vocabulary", || {
        sized([50_257, 256, 128, 4, 4])
    }),
    NamedConfig::new("bytes-tiny", "4 blocks of width 64 over bytes", || sized([256, 128, 64, 4, 4])),
    NamedConfig::new("bytes-small", "6 blocks of width 192 over bytes", || sized([256, 256, 192, 6, 6])),
];

fn sized([vocab_size, n_positions, n_embd, n_layer, n_head]: [usize; 5]) -> Result<Gpt2Config, ModelError> {
    let model_type = "gpt2".to_owned();
    Ok(Gpt2Config { model_type, vocab_size, n_positions, n_embd, n_layer, n_head, ..Gpt2Config::default() })
}

/// The Transformers class with a language model head.
pub(super) const LANGUAGE_MODEL: &str = "GPT2LMHeadModel";
/// The Transformers class with a classifier.
pub(super) const CLASSIFIER: &str = "GPT2ForSequenceClassification";

impl Gpt2Config {
    /// The preset `name`, one of the family's [presets](crate::family::Family::presets).
    ///
    /// # Errors
    /// An unknown name.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        NamedConfig::find(&PRESETS, name)
    }

    /// The width of the feed-forward networks.
    pub fn inner(&self) -> usize {
        self.n_inner.unwrap_or(self.n_embd.saturating_mul(4))
    }

    /// The number of tokens whose logits the head computes at a time on a CPU: 256, or fewer for large vocabularies, so
    /// that a chunk of logits takes at most 64 MiB. It is a constant of the model because it determines the order in which
    /// gradients are summed.
    pub fn chunk_rows(&self) -> usize {
        chunk_rows(self.vocab_size)
    }

    /// The factor on the attention scores of the block at `index`.
    pub fn attention_scale(&self, index: usize) -> f64 {
        let width = (self.n_embd / self.n_head) as f64;
        let scale = if self.scale_attn_weights { 1.0 / width.sqrt() } else { 1.0 };
        if self.scale_attn_by_inverse_layer_idx { scale / (index + 1) as f64 } else { scale }
    }

    /// Checks that the configuration is valid and has the same meaning as in Transformers.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn validate(&self) -> Result<(), ModelError> {
        supported::check_type(&self.model_type, "gpt2")?;
        supported::check_not_quantized(&self.other)?;
        self.head.validate(&[LANGUAGE_MODEL, "GPT2Model", CLASSIFIER])?;
        self.validate_sizes()?;
        self.validate_other_names()?;
        self.validate_numbers()?;
        self.validate_options()
    }

    fn validate_sizes(&self) -> Result<(), ModelError> {
        supported::check_sizes(&[
            ("vocab_size", self.vocab_size, MOST_IDS),
            ("n_positions", self.n_positions, MOST_IDS),
            ("n_embd", self.n_embd, WIDEST),
            ("n_layer", self.n_layer, DEEPEST),
            ("n_head", self.n_head, WIDEST),
            ("n_inner", self.inner(), 4 * WIDEST),
        ])?;
        supported::check_parts(self.vocabulary_parts, self.vocab_size)?;
        if self.n_positions < 2 {
            return Err(refuse(
                "n_positions",
                self.n_positions,
                "at least 2, so that a token can be predicted",
            ));
        }
        if !self.n_embd.is_multiple_of(self.n_head) {
            let expected = format!("a divisor of n_embd, which is {}", self.n_embd);
            return Err(refuse("n_head", self.n_head, expected));
        }
        Ok(())
    }

    /// Checks alternative names that Transformers accepts for the same values.
    fn validate_other_names(&self) -> Result<(), ModelError> {
        let names = [
            ("hidden_size", "n_embd", self.n_embd),
            ("max_position_embeddings", "n_positions", self.n_positions),
            ("num_attention_heads", "n_head", self.n_head),
            ("num_hidden_layers", "n_layer", self.n_layer),
        ];
        for (name, own, value) in names {
            match self.other.get(name) {
                Some(found) if found.as_u64() != Some(value as u64) => {
                    let expected = format!("{value}, the value of `{own}`: set only `{own}`");
                    return Err(refuse(name, found, expected));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn validate_numbers(&self) -> Result<(), ModelError> {
        supported::check_dropouts(&[
            ("resid_pdrop", self.resid_pdrop),
            ("embd_pdrop", self.embd_pdrop),
            ("attn_pdrop", self.attn_pdrop),
        ])?;
        supported::check_positive(&[
            ("layer_norm_epsilon", self.layer_norm_epsilon),
            ("initializer_range", self.initializer_range),
        ])
    }

    fn validate_options(&self) -> Result<(), ModelError> {
        supported::check_activation("activation_function", &self.activation_function)?;
        let options = [
            ("reorder_and_upcast_attn", self.reorder_and_upcast_attn, false),
            ("add_cross_attention", self.add_cross_attention, false),
            // A classifier has no table to tie.
            ("tie_word_embeddings", self.tie_word_embeddings || self.head.is_classifier(), true),
        ];
        match options.into_iter().find(|(_, found, supported)| found != supported) {
            Some((name, found, supported)) => {
                Err(refuse(name, found, format!("{supported}, the only supported value")))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_valid() {
        for preset in PRESETS.map(|named| named.preset()) {
            Gpt2Config::preset(preset.name).unwrap().validate().unwrap();
        }
        let error = Gpt2Config::preset("gpt3").unwrap_err().to_string();
        assert!(error.starts_with("`gpt3` is not a model: expected gpt2, gpt2-medium,"), "{error}");
    }

    #[test]
    fn unknown_keys_are_kept_and_absent_ones_have_defaults() {
        let text = r#"{"model_type": "gpt2", "n_layer": 2, "n_inner": null, "resid_pdrop": 0, "summary_type": "cls_index", "task_specific_params": {"a": [1, 2.5]}}"#;
        let config: Gpt2Config = serde_json::from_str(text).unwrap();
        config.validate().unwrap();
        assert_eq!((config.n_layer, config.n_head, config.inner(), config.resid_pdrop), (2, 12, 3072, 0.0));
        let back: Value = serde_json::to_value(&config).unwrap();
        assert_eq!(back["summary_type"], "cls_index");
        assert_eq!(back["task_specific_params"], serde_json::json!({"a": [1, 2.5]}));
        assert_eq!(serde_json::from_value::<Gpt2Config>(back).unwrap(), config);
    }

    fn base() -> Gpt2Config {
        Gpt2Config::preset("bytes-tiny").unwrap()
    }

    fn refused(bad: &[(Gpt2Config, &str)]) {
        for (config, message) in bad {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }

    fn of_class(class: &str) -> Gpt2Config {
        let head = HeadConfig { architectures: Some(vec![class.to_owned()]), ..HeadConfig::default() };
        Gpt2Config { head, ..base() }
    }

    #[test]
    fn what_cannot_be_built_is_named() {
        let bad = [
            (Gpt2Config { model_type: "llama".into(), ..base() }, "`model_type` is llama, expected gpt2"),
            (Gpt2Config { model_type: String::new(), ..base() }, "`model_type` is missing"),
            (
                of_class("GPT2ForTokenClassification"),
                "`architectures` is GPT2ForTokenClassification, expected GPT2LMHeadModel or GPT2Model or GPT2ForSeq",
            ),
            (Gpt2Config { vocab_size: 0, ..base() }, "`vocab_size` is 0"),
            (Gpt2Config { n_inner: Some(0), ..base() }, "`n_inner` is 0"),
            (Gpt2Config { n_positions: 1, ..base() }, "`n_positions` is 1"),
            (Gpt2Config { n_head: 7, ..base() }, "`n_head` is 7, expected a divisor of n_embd, which is 64"),
            (Gpt2Config { attn_pdrop: 1.0, ..base() }, "`attn_pdrop` is 1"),
            (Gpt2Config { embd_pdrop: f64::NAN, ..base() }, "`embd_pdrop` is NaN"),
            (Gpt2Config { layer_norm_epsilon: 0.0, ..base() }, "`layer_norm_epsilon` is 0"),
            (Gpt2Config { activation_function: "silu".into(), ..base() }, "`activation_function` is silu"),
            (Gpt2Config { reorder_and_upcast_attn: true, ..base() }, "`reorder_and_upcast_attn` is true"),
            (Gpt2Config { add_cross_attention: true, ..base() }, "`add_cross_attention` is true"),
            (Gpt2Config { tie_word_embeddings: false, ..base() }, "`tie_word_embeddings` is false"),
        ];
        refused(&bad);
    }

    #[test]
    fn sizes_that_no_machine_has_are_refused() {
        let bad = [
            (Gpt2Config { vocab_size: usize::MAX, ..base() }, "`vocab_size` is"),
            (Gpt2Config { n_positions: 1 << 31, ..base() }, "`n_positions` is 2147483648, expected at most"),
            (
                Gpt2Config { n_embd: 1 << 62, ..base() },
                "`n_embd` is 4611686018427387904, expected at most 1048576",
            ),
            (Gpt2Config { n_layer: usize::MAX, ..base() }, "`n_layer` is"),
            (Gpt2Config { n_inner: Some(1 << 40), ..base() }, "`n_inner` is 1099511627776, expected at most"),
        ];
        refused(&bad);
        let (vocab_size, n_positions, n_embd) = (MOST_IDS, MOST_IDS, WIDEST);
        let largest = Gpt2Config { vocab_size, n_positions, n_embd, n_layer: DEEPEST, ..base() };
        largest.validate().unwrap();
        let parameters = (vocab_size + n_positions) as u128 * n_embd as u128 + (DEEPEST as u128 * (13 << 40));
        assert!(parameters * 16 < 1 << 63, "{parameters}");
        // A chain allocates nothing, and no size overflows.
        let wide = crate::gpt2::chain(&Gpt2Config { n_layer: 2, ..largest }, None).unwrap();
        assert!(wide.parameters() > 24 << 40);
    }

    #[test]
    fn other_names_of_a_size_must_agree() {
        let config = |name: &str, value: usize| {
            let mut config = base();
            config.other.insert(name.to_owned(), value.into());
            config
        };
        for (name, own, value) in [
            ("hidden_size", "n_embd", 64),
            ("max_position_embeddings", "n_positions", 128),
            ("num_attention_heads", "n_head", 4),
            ("num_hidden_layers", "n_layer", 4),
        ] {
            config(name, value).validate().unwrap();
            let error = config(name, 2).validate().unwrap_err().to_string();
            assert_eq!(
                error,
                format!("`{name}` is 2, expected {value}, the value of `{own}`: set only `{own}`")
            );
        }
    }

    #[test]
    fn chunks_of_logits_stay_small() {
        let rows = |vocab_size| Gpt2Config { vocab_size, ..Gpt2Config::default() }.chunk_rows();
        assert_eq!((rows(256), rows(50_257), rows(250_000)), (256, 256, 67));
    }

    #[test]
    fn attention_scales_follow_the_configuration() {
        let config = Gpt2Config { n_embd: 64, n_head: 4, ..Gpt2Config::default() };
        assert_eq!(config.attention_scale(1), 0.25);
        let config = Gpt2Config { scale_attn_by_inverse_layer_idx: true, ..config };
        assert_eq!(config.attention_scale(1), 0.125);
        assert_eq!(Gpt2Config { scale_attn_weights: false, ..config }.attention_scale(1), 0.5);
    }
}
