//! How llama.cpp lays out a model: its settings, and the names and shapes of its tensors.

use super::GgufError;
use super::file::Value;
use crate::decoder::{self, DecoderConfig, ModelType};
use crate::gpt2::{self, Gpt2Config};
use crate::ops::RotaryScaling;
use std::f64::consts::TAU;

/// A model as llama.cpp reads it.
#[derive(Clone, Debug)]
pub struct GgufLayout {
    /// The architecture, which is also the prefix of the settings' keys.
    pub(super) architecture: &'static str,
    /// The settings by their keys without the prefix.
    pub(super) settings: Vec<(&'static str, Value)>,
    /// The number of ids.
    pub(super) vocabulary: usize,
    /// The Transformers name of a parameter of the chain.
    pub(super) transformers: fn(&str) -> String,
    /// The names of tensors: a part of Transformers' name and llama.cpp's.
    names: &'static [(&'static str, &'static str)],
    /// The prefix of Transformers' names of blocks.
    blocks: &'static str,
    /// The number of query heads and of key heads.
    heads: [usize; 2],
    /// Tensors that Transformers computes instead of storing them.
    pub(super) computed: Vec<(String, Vec<f32>)>,
    /// What llama.cpp computes in another way, each as a sentence without an end.
    pub(super) notes: Vec<String>,
    /// The configured ids of special tokens by their names: `bos`, `eos`, `unk` and `pad`.
    pub(super) special: Vec<(&'static str, u32)>,
}

/// What is done with the values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transform {
    Keep,
    /// `[in, out]` becomes `[out, in]`.
    Transpose,
    /// The rows of each of these heads alternate between the first and the second half, as for a rotary embedding of
    /// neighbours.
    Heads(usize),
}

const DECODER: &[(&str, &str)] = &[
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

const GPT2: &[(&str, &str)] = &[
    ("transformer.wte", "token_embd"),
    ("transformer.wpe", "position_embd"),
    ("transformer.ln_f", "output_norm"),
    ("lm_head", "output"),
    ("ln_1", "attn_norm"),
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("ln_2", "ffn_norm"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
];

impl GgufLayout {
    /// The name of a tensor, by its Transformers name: `model.layers.3.mlp.up_proj.weight` becomes
    /// `blk.3.ffn_up.weight`.
    pub(super) fn name(&self, tensor: &str) -> Option<String> {
        let (module, own) = tensor.rsplit_once('.')?;
        let in_block = module.strip_prefix(self.blocks).and_then(|rest| rest.split_once('.'));
        let (block, module) = match in_block {
            Some((block, module)) => (format!("blk.{block}."), module),
            None => (String::new(), module),
        };
        let (_, name) = self.names.iter().find(|(theirs, _)| *theirs == module)?;
        Some(format!("{block}{name}.{own}"))
    }

    /// What is done with a tensor of this Transformers name.
    pub(super) fn transform(&self, tensor: &str) -> Transform {
        let [queries, keys] = self.heads;
        let is = |module: &str| tensor.contains(module);
        match self.architecture {
            "gpt2" if is(".c_") && tensor.ends_with(".weight") => Transform::Transpose,
            "llama" if is(".q_proj.") => Transform::Heads(queries),
            "llama" if is(".k_proj.") => Transform::Heads(keys),
            _ => Transform::Keep,
        }
    }
}

/// The layout of a Llama, Mistral or Qwen.
///
/// # Errors
/// A classifier, or settings that llama.cpp does not compute.
pub(crate) fn of_decoder(config: &DecoderConfig) -> Result<GgufLayout, GgufError> {
    if config.head.is_classifier() {
        return Err(GgufError::Architecture { found: "a classifier".to_owned() });
    }
    let architecture = match config.model_type {
        ModelType::Llama | ModelType::Mistral => "llama",
        ModelType::Qwen2 => "qwen2",
        ModelType::Qwen3 => "qwen3",
    };
    if config.model_type == ModelType::Qwen3 && config.attention_bias {
        return Err(GgufError::Setting {
            name: "attention_bias",
            found: "true".to_owned(),
            expected: "false",
        });
    }
    let computed = match config.rope.scaling {
        RotaryScaling::Default => Vec::new(),
        scaling if architecture == "llama" => {
            vec![("rope_freqs.weight".to_owned(), factors(config.head_dim, config.rope.theta, scaling))]
        }
        RotaryScaling::Llama3 { .. } => {
            let found = "llama3".to_owned();
            return Err(GgufError::Setting { name: "rope_type", found, expected: "default" });
        }
    };
    let count = |value: usize| Value::Count(value as u32);
    let settings = vec![
        ("vocab_size", count(config.vocab_size)),
        ("context_length", count(config.max_position_embeddings)),
        ("embedding_length", count(config.hidden_size)),
        ("block_count", count(config.num_hidden_layers)),
        ("feed_forward_length", count(config.intermediate_size)),
        ("attention.head_count", count(config.num_attention_heads)),
        ("attention.head_count_kv", count(config.num_key_value_heads)),
        ("attention.key_length", count(config.head_dim)),
        ("attention.value_length", count(config.head_dim)),
        ("attention.layer_norm_rms_epsilon", Value::Number(config.rms_norm_eps as f32)),
        ("rope.dimension_count", count(config.head_dim)),
        ("rope.freq_base", Value::Number(config.rope.theta as f32)),
    ];
    let window = (0..config.num_hidden_layers).filter_map(|block| config.window(block)).min();
    let window = window.filter(|window| *window < config.max_position_embeddings).map(|window| {
        format!("llama.cpp computes the model without its window: tokens attend to more than {window} tokens in longer texts")
    });
    Ok(GgufLayout {
        architecture,
        settings,
        vocabulary: config.vocab_size,
        transformers: decoder::hf_name,
        names: DECODER,
        blocks: "model.layers.",
        heads: [config.num_attention_heads, config.num_key_value_heads],
        computed,
        notes: window.into_iter().collect(),
        special: special(&config.other, config.head.padding()),
    })
}

/// The layout of a GPT-2.
///
/// # Errors
/// A classifier, or settings that llama.cpp does not compute.
pub(crate) fn of_gpt2(config: &Gpt2Config) -> Result<GgufLayout, GgufError> {
    if config.head.is_classifier() {
        return Err(GgufError::Architecture { found: "a classifier".to_owned() });
    }
    let setting = |name, found: String, expected| Err(GgufError::Setting { name, found, expected });
    if !["gelu_new", "gelu_fast", "gelu_pytorch_tanh"].contains(&config.activation_function.as_str()) {
        return setting("activation_function", config.activation_function.clone(), "gelu_new");
    }
    if !config.scale_attn_weights {
        return setting("scale_attn_weights", "false".to_owned(), "true");
    }
    if config.scale_attn_by_inverse_layer_idx {
        return setting("scale_attn_by_inverse_layer_idx", "true".to_owned(), "false");
    }
    let count = |value: usize| Value::Count(value as u32);
    let settings = vec![
        ("vocab_size", count(config.vocab_size)),
        ("context_length", count(config.n_positions)),
        ("embedding_length", count(config.n_embd)),
        ("block_count", count(config.n_layer)),
        ("feed_forward_length", count(config.inner())),
        ("attention.head_count", count(config.n_head)),
        ("attention.layer_norm_epsilon", Value::Number(config.layer_norm_epsilon as f32)),
    ];
    Ok(GgufLayout {
        architecture: "gpt2",
        settings,
        vocabulary: config.vocab_size,
        transformers: gpt2::hf_name,
        names: GPT2,
        blocks: "transformer.h.",
        heads: [config.n_head; 2],
        computed: Vec::new(),
        notes: Vec::new(),
        special: special(&config.other, config.head.padding()),
    })
}

/// The ids of special tokens in a configuration. A list has no id of its own.
fn special(
    config: &serde_json::Map<String, serde_json::Value>,
    padding: Option<u32>,
) -> Vec<(&'static str, u32)> {
    let id =
        |key: &str| config.get(key).and_then(serde_json::Value::as_u64).and_then(|id| u32::try_from(id).ok());
    let found = [("bos", id("bos_token_id")), ("eos", id("eos_token_id")), ("pad", padding)];
    found.into_iter().filter_map(|(name, id)| Some((name, id?))).collect()
}

/// The factors by which Llama 3's scaling stretches the wave of each pair of a head.
fn factors(width: usize, theta: f64, scaling: RotaryScaling) -> Vec<f32> {
    let RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } = scaling
    else {
        return vec![1.0; width / 2];
    };
    let of_pair = |pair: usize| {
        let wave = TAU * theta.powf(2.0 * pair as f64 / width as f64);
        let turns = original_positions as f64 / wave;
        let smooth = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
        (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
    };
    (0..width / 2).map(of_pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(keys: serde_json::Value) -> DecoderConfig {
        let mut file = json!({
            "model_type": "llama", "vocab_size": 11, "max_position_embeddings": 64, "hidden_size": 8, "intermediate_size": 12,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1
        });
        file.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        serde_json::from_value(file).unwrap()
    }

    #[test]
    fn tensors_have_llama_cpps_names_and_layout() {
        let llama = of_decoder(&config(json!({}))).unwrap();
        let name = |tensor: &str| llama.name(tensor).unwrap();
        assert_eq!(name("model.layers.1.mlp.up_proj.weight"), "blk.1.ffn_up.weight");
        assert_eq!(name("model.layers.0.self_attn.q_proj.bias"), "blk.0.attn_q.bias");
        assert_eq!(name("model.norm.weight"), "output_norm.weight");
        assert_eq!(llama.name("model.layers.0.mlp.experts.weight"), None);
        let transform = |tensor: &str| llama.transform(&format!("model.layers.0.self_attn.{tensor}"));
        assert_eq!(
            [transform("q_proj.weight"), transform("k_proj.bias"), transform("v_proj.weight")],
            [Transform::Heads(2), Transform::Heads(1), Transform::Keep]
        );
        let qwen = of_decoder(&config(json!({"model_type": "qwen2"}))).unwrap();
        assert_eq!(qwen.transform("model.layers.0.self_attn.q_proj.weight"), Transform::Keep);
        let gpt2 = of_gpt2(&Gpt2Config::preset("bytes-tiny").unwrap()).unwrap();
        assert_eq!(gpt2.name("transformer.h.3.attn.c_attn.weight").unwrap(), "blk.3.attn_qkv.weight");
        assert_eq!(gpt2.transform("transformer.h.3.attn.c_attn.weight"), Transform::Transpose);
        assert_eq!(gpt2.transform("transformer.h.3.attn.c_attn.bias"), Transform::Keep);
    }

    #[test]
    fn what_llama_cpp_computes_otherwise_is_refused_or_noted() {
        let refused = |keys| of_decoder(&config(keys)).unwrap_err().to_string();
        let message = refused(json!({"architectures": ["LlamaForSequenceClassification"]}));
        assert!(message.contains("a classifier") && message.contains("safetensors"), "{message}");
        assert!(
            refused(json!({"model_type": "qwen3", "attention_bias": true}))
                .contains("`attention_bias` is true")
        );
        let relu = Gpt2Config {
            activation_function: "relu".to_owned(),
            ..Gpt2Config::preset("bytes-tiny").unwrap()
        };
        assert!(of_gpt2(&relu).unwrap_err().to_string().contains("`activation_function` is relu"));
        let notes = |window: usize| {
            of_decoder(&config(json!({"model_type": "mistral", "sliding_window": window}))).unwrap().notes
        };
        assert!(notes(16)[0].contains("more than 16 tokens") && notes(64).is_empty());
    }

    #[test]
    fn long_waves_are_stretched_by_the_factor() {
        let scaling = RotaryScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 8192,
        };
        let found = factors(128, 500_000.0, scaling);
        assert_eq!((found.len(), found[0], found[63]), (64, 1.0, 8.0));
        // llama.cpp's converter computes the same for these pairs.
        for (pair, expected) in
            [(28, 1.0), (29, 1.207_483_9), (30, 1.553_414_6), (34, 5.257_326_6), (35, 8.0)]
        {
            assert!((found[pair] - expected).abs() < 1e-6, "{pair}: {}", found[pair]);
        }
        assert!(found.windows(2).all(|pair| pair[0] <= pair[1]));
    }
}
