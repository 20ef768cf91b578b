//! Decoder configurations, as in Hugging Face's `config.json`.

use crate::ModelError;
use crate::family::HeadConfig;
use crate::family::supported::{
    DEEPEST, MOST_IDS, WIDEST, check_dropouts, check_parts, check_positive, check_sizes, refuse,
};
use crate::ops::{Rotary, RotaryScaling};
use crate::parts::chunk_rows;
use serde_json::{Map, Value};

/// The supported model types; all consist of the same layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelType {
    /// Llama 1 to 3, and other models of type `llama`, such as SmolLM2.
    Llama,
    /// Mistral 7B.
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3 without experts.
    Qwen3,
}

impl ModelType {
    /// All model types.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// The `model_type`s in configurations, in the order of [`ALL`](Self::ALL).
    pub const NAMES: [&str; 4] = ["llama", "mistral", "qwen2", "qwen3"];

    /// The `model_type` in configurations.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// The Transformers classes with a language model head, without a head, and with a classifier.
    pub(super) fn architectures(self) -> [&'static str; 3] {
        match self {
            Self::Llama => ["LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"],
            Self::Mistral => ["MistralForCausalLM", "MistralModel", "MistralForSequenceClassification"],
            Self::Qwen2 => ["Qwen2ForCausalLM", "Qwen2Model", "Qwen2ForSequenceClassification"],
            Self::Qwen3 => ["Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification"],
        }
    }
}

/// The tokens that a block attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerType {
    /// All earlier tokens.
    Full,
    /// Those within [`DecoderConfig::sliding_window`].
    Sliding,
}

/// The rotary position embedding of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f64,
    /// The scaling of the frequencies.
    pub scaling: RotaryScaling,
}

/// A decoder's configuration, with the names and defaults of Transformers, which depend on the model type. Unknown keys
/// are kept and written back.
///
/// It is read and written as JSON (`serde`). [`rope`](Self::rope) combines `rope_theta` and `rope_scaling` of older
/// files, or `rope_parameters` of Transformers 5.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// The model type.
    pub model_type: ModelType,
    /// The head: that of a language model, or of a sequence classifier with its labels.
    pub head: HeadConfig,
    /// The size of the vocabulary.
    pub vocab_size: usize,
    /// The longest sequence in tokens.
    pub max_position_embeddings: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the feed-forward networks.
    pub intermediate_size: usize,
    /// The number of blocks.
    pub num_hidden_layers: usize,
    /// The number of query heads.
    pub num_attention_heads: usize,
    /// The number of key and value heads; it divides the number of query heads.
    pub num_key_value_heads: usize,
    /// The width of a head; even.
    pub head_dim: usize,
    /// The activation function of the gates.
    pub hidden_act: String,
    /// The epsilon of normalizations.
    pub rms_norm_eps: f64,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// The dropout probability of attention weights.
    pub attention_dropout: f64,
    /// Whether attention's linear layers have biases; only used by Llama and Qwen3.
    pub attention_bias: bool,
    /// Whether the feed-forward networks' linear layers have biases; only used by Llama.
    pub mlp_bias: bool,
    /// Whether a language model's head shares the embedding's table.
    pub tie_word_embeddings: bool,
    /// The rotary position embedding.
    pub rope: Rope,
    /// The maximum number of tokens, including itself, that a token attends to in blocks of type
    /// [`Sliding`](LayerType::Sliding). `None`: all blocks attend to all earlier tokens.
    pub sliding_window: Option<usize>,
    /// The first block with the window, if there are no `layer_types`.
    pub max_window_layers: usize,
    /// The type of each block, if the file lists them.
    pub layer_types: Option<Vec<LayerType>>,
    /// The number of layers that the embedding's table and the head's table are split into, each with its share of the
    /// rows; 1 keeps a table whole. Files never store it, because they have whole tables. Training with another number
    /// of parts differs in the last bits.
    pub vocabulary_parts: usize,
    /// The file as read; changed fields are overwritten when it is written.
    pub other: Map<String, Value>,
}

/// Two names of the same function.
const ACTIVATIONS: [&str; 2] = ["silu", "swish"];

impl DecoderConfig {
    /// The number of tokens whose logits the head computes at a time: 256, or fewer for large vocabularies, so that a
    /// chunk of logits takes at most 64 MiB. It is a constant of the model because it determines the order in which
    /// gradients are summed.
    pub fn chunk_rows(&self) -> usize {
        chunk_rows(self.vocab_size)
    }

    /// The window of the block at `index`, if it has one.
    pub fn window(&self, index: usize) -> Option<usize> {
        let slides = match &self.layer_types {
            Some(types) => types.get(index) == Some(&LayerType::Sliding),
            None => index >= self.max_window_layers,
        };
        self.sliding_window.filter(|_| slides)
    }

    /// Returns whether the query, key and value projections have biases.
    pub fn has_qkv_bias(&self) -> bool {
        self.model_type == ModelType::Qwen2 || self.has_output_bias()
    }

    /// Returns whether attention's output projection has a bias.
    pub fn has_output_bias(&self) -> bool {
        matches!(self.model_type, ModelType::Llama | ModelType::Qwen3) && self.attention_bias
    }

    /// Returns whether the feed-forward networks have biases.
    pub fn has_mlp_bias(&self) -> bool {
        self.model_type == ModelType::Llama && self.mlp_bias
    }

    /// Returns whether the queries and keys of each head are normalized.
    pub fn has_head_norms(&self) -> bool {
        self.model_type == ModelType::Qwen3
    }

    /// The rotary embedding of queries and keys.
    pub(super) fn rotary(&self) -> Rotary {
        Rotary::new(self.head_dim, self.rope.theta, self.rope.scaling)
    }

    /// Checks that the configuration is valid and has the same meaning as in Transformers.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn validate(&self) -> Result<(), ModelError> {
        self.head.validate(&self.model_type.architectures())?;
        self.validate_sizes()?;
        self.validate_heads()?;
        self.validate_windows()?;
        self.validate_numbers()?;
        self.validate_rope()?;
        match ACTIVATIONS.contains(&self.hidden_act.as_str()) {
            true => Ok(()),
            false => Err(refuse("hidden_act", &self.hidden_act, ACTIVATIONS.join(" or "))),
        }
    }

    fn validate_sizes(&self) -> Result<(), ModelError> {
        check_sizes(&[
            ("vocab_size", self.vocab_size, MOST_IDS),
            ("max_position_embeddings", self.max_position_embeddings, MOST_IDS),
            ("hidden_size", self.hidden_size, WIDEST),
            ("intermediate_size", self.intermediate_size, 4 * WIDEST),
            ("num_hidden_layers", self.num_hidden_layers, DEEPEST),
            ("num_attention_heads", self.num_attention_heads, WIDEST),
            ("num_key_value_heads", self.num_key_value_heads, WIDEST),
            ("head_dim", self.head_dim, WIDEST),
        ])?;
        check_parts(self.vocabulary_parts, self.vocab_size)?;
        if self.max_position_embeddings < 2 {
            let expected = "at least 2, so that a token can be predicted";
            return Err(refuse("max_position_embeddings", self.max_position_embeddings, expected));
        }
        Ok(())
    }

    fn validate_heads(&self) -> Result<(), ModelError> {
        let (heads, key_heads, width) = (self.num_attention_heads, self.num_key_value_heads, self.head_dim);
        if !heads.is_multiple_of(key_heads) {
            let expected = format!("a divisor of num_attention_heads, which is {heads}");
            return Err(refuse("num_key_value_heads", key_heads, expected));
        }
        if !width.is_multiple_of(2) {
            let expected = "an even number, because the rotary embedding rotates pairs (the default is \
                            hidden_size over num_attention_heads)";
            return Err(refuse("head_dim", width, expected));
        }
        if heads * width > 4 * WIDEST {
            let expected = format!("at most {} with {heads} heads", 4 * WIDEST / heads);
            return Err(refuse("head_dim", width, expected));
        }
        Ok(())
    }

    fn validate_windows(&self) -> Result<(), ModelError> {
        if self.sliding_window == Some(0) {
            return Err(refuse("sliding_window", 0, "at least 1, or null for no window"));
        }
        let Some(types) = &self.layer_types else { return Ok(()) };
        if types.len() != self.num_hidden_layers {
            let expected =
                format!("one type for each of the {} blocks (num_hidden_layers)", self.num_hidden_layers);
            return Err(refuse("layer_types", format!("a list of {}", types.len()), expected));
        }
        if types.contains(&LayerType::Sliding) && self.sliding_window.is_none() {
            let expected =
                "full_attention only, because there is no sliding_window (or use_sliding_window is false)";
            return Err(refuse("layer_types", "sliding_attention for some blocks", expected));
        }
        Ok(())
    }

    fn validate_numbers(&self) -> Result<(), ModelError> {
        check_dropouts(&[("attention_dropout", self.attention_dropout)])?;
        check_positive(&[("rms_norm_eps", self.rms_norm_eps), ("initializer_range", self.initializer_range)])
    }

    fn validate_rope(&self) -> Result<(), ModelError> {
        check_positive(&[("rope_theta", self.rope.theta)])?;
        let RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } =
            self.rope.scaling
        else {
            return Ok(());
        };
        let (low, high) = (("low_freq_factor", low_freq_factor), ("high_freq_factor", high_freq_factor));
        check_positive(&[("factor", factor), low, high])?;
        if high_freq_factor <= low_freq_factor {
            let expected = format!("more than low_freq_factor, which is {low_freq_factor}");
            return Err(refuse("high_freq_factor", high_freq_factor, expected));
        }
        match original_positions {
            0 => Err(refuse("original_max_position_embeddings", 0, "at least 1")),
            _ => Ok(()),
        }
    }
}
