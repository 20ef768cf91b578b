//! Decoder presets, with the published sizes.

use super::DecoderConfig;
use crate::ModelError;
use crate::family::NamedConfig;

/// Parses the `config.json` of a preset.
fn parsed(json: &str) -> Result<DecoderConfig, ModelError> {
    let file = serde_json::from_str(json);
    DecoderConfig::from_json(file.map_err(|source| ModelError::Json { path: "preset".into(), source })?)
}

/// The presets, each with its `config.json`.
pub(super) const PRESETS: [NamedConfig<DecoderConfig>; 5] = [
    NamedConfig::new("smollm2-135m", "SmolLM2, 135 million parameters", || parsed(SMOLLM2)),
    NamedConfig::new("qwen2.5-0.5b", "Qwen2.5, 494 million parameters", || parsed(QWEN2)),
    NamedConfig::new("llama-3.2-1b", "Llama 3.2, 1.2 billion parameters", || parsed(LLAMA32)),
    NamedConfig::new("llama-3.1-8b", "Llama 3.1, 8.0 billion parameters", || parsed(LLAMA31)),
    NamedConfig::new("bytes-llama-tiny", "4 Llama blocks of width 64 over bytes", || parsed(BYTES)),
];

const SMOLLM2: &str = r#"{
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "initializer_range": 0.041666666666666664,
    "rope_theta": 100000, "rope_scaling": null, "tie_word_embeddings": true, "hidden_act": "silu",
    "attention_bias": false, "attention_dropout": 0.0, "mlp_bias": false, "bos_token_id": 0, "eos_token_id": 0
}"#;

const QWEN2: &str = r#"{
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "initializer_range": 0.02,
    "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": false, "max_window_layers": 24,
    "tie_word_embeddings": true, "hidden_act": "silu", "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151643
}"#;

const LLAMA31: &str = r#"{
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "initializer_range": 0.02,
    "rope_theta": 500000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    },
    "tie_word_embeddings": false, "hidden_act": "silu", "attention_bias": false, "attention_dropout": 0.0,
    "mlp_bias": false, "bos_token_id": 128000, "eos_token_id": 128001
}"#;

const LLAMA32: &str = r#"{
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "initializer_range": 0.02,
    "rope_theta": 500000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    },
    "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false, "attention_dropout": 0.0,
    "mlp_bias": false, "bos_token_id": 128000, "eos_token_id": 128001
}"#;

// The end-of-text ids are null: if absent, Transformers assumes those of Llama 1, which are bytes here.
const BYTES: &str = r#"{
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-05, "initializer_range": 0.02,
    "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu",
    "attention_bias": false, "attention_dropout": 0.0, "mlp_bias": false,
    "bos_token_id": null, "eos_token_id": null, "pad_token_id": null
}"#;

impl DecoderConfig {
    /// The preset `name`, one of the family's [presets](crate::family::Family::presets).
    ///
    /// # Errors
    /// An unknown name.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        NamedConfig::find(&PRESETS, name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::chain;

    #[test]
    fn presets_have_as_many_parameters_as_published() {
        let parameters = |name| {
            let config = DecoderConfig::preset(name).unwrap();
            config.validate().unwrap();
            chain(&config, None).unwrap().parameters()
        };
        assert_eq!(
            PRESETS.map(|named| parameters(named.preset().name)),
            [
                134_515_008,
                494_032_768,
                1_235_814_400,
                8_030_261_248,
                // Table, blocks and norms.
                256 * 64 + 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176 + 2 * 64) + 64,
            ]
        );
        let error = DecoderConfig::preset("llama-9").unwrap_err().to_string();
        assert!(error.starts_with("`llama-9` is not a model: expected smollm2-135m, "), "{error}");
    }
}
