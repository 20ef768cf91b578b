//! Encoder presets, with the published sizes.

use super::EncoderConfig;
use crate::ModelError;
use crate::family::NamedConfig;
use std::path::Path;

/// Parses the `config.json` of a preset.
fn parsed(json: &str) -> Result<EncoderConfig, ModelError> {
    let path = Path::new("preset");
    let file = serde_json::from_str(json);
    EncoderConfig::from_json(path, file.map_err(|source| ModelError::Json { path: path.to_owned(), source })?)
}

/// The presets, each with its `config.json`.
pub(super) const PRESETS: [NamedConfig<EncoderConfig>; 5] = [
    NamedConfig::new("bert-base-uncased", "BERT, 109 million parameters, a classifier of texts", || {
        parsed(BERT)
    }),
    NamedConfig::new(
        "distilbert-base-uncased",
        "DistilBERT, 67 million parameters, a classifier of texts",
        || parsed(DISTILBERT),
    ),
    NamedConfig::new("roberta-base", "RoBERTa, 125 million parameters, a classifier of texts", || {
        parsed(ROBERTA)
    }),
    NamedConfig::new("modernbert-base", "ModernBERT, 150 million parameters, a classifier of texts", || {
        parsed(MODERNBERT)
    }),
    NamedConfig::new(
        "bytes-bert-tiny",
        "2 BERT blocks of width 64 over bytes, a classifier of texts",
        || parsed(BYTES),
    ),
];

const BERT: &str = r#"{
    "model_type": "bert", "vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072,
    "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 512, "type_vocab_size": 2,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "initializer_range": 0.02, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "pad_token_id": 0
}"#;

const DISTILBERT: &str = r#"{
    "model_type": "distilbert", "vocab_size": 30522, "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12,
    "max_position_embeddings": 512, "activation": "gelu", "initializer_range": 0.02, "dropout": 0.1,
    "attention_dropout": 0.1, "seq_classif_dropout": 0.2, "qa_dropout": 0.1, "sinusoidal_pos_embds": false,
    "pad_token_id": 0
}"#;

const ROBERTA: &str = r#"{
    "model_type": "roberta", "vocab_size": 50265, "hidden_size": 768, "intermediate_size": 3072,
    "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 514, "type_vocab_size": 1,
    "hidden_act": "gelu", "layer_norm_eps": 1e-05, "initializer_range": 0.02, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2
}"#;

const MODERNBERT: &str = r#"{
    "model_type": "modernbert", "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152,
    "num_hidden_layers": 22, "num_attention_heads": 12, "max_position_embeddings": 8192,
    "hidden_activation": "gelu", "norm_eps": 1e-05, "initializer_range": 0.02, "attention_dropout": 0.0,
    "embedding_dropout": 0.0, "mlp_dropout": 0.0, "classifier_dropout": 0.0, "classifier_pooling": "mean",
    "global_attn_every_n_layers": 3, "local_attention": 128, "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0, "pad_token_id": 50283, "bos_token_id": 50281, "eos_token_id": 50282,
    "cls_token_id": 50281, "sep_token_id": 50282
}"#;

const BYTES: &str = r#"{
    "model_type": "bert", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128, "type_vocab_size": 2,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "initializer_range": 0.02, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "pad_token_id": 0
}"#;

impl EncoderConfig {
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
    use crate::encoder::chain;

    /// Expected counts are those of Transformers' `..ForSequenceClassification` with two labels.
    #[test]
    fn presets_have_as_many_parameters_as_published() {
        let parameters = |name| {
            let config = EncoderConfig::preset(name).unwrap();
            config.validate().unwrap();
            chain(&config, None).unwrap().parameters()
        };
        assert_eq!(
            PRESETS.map(|named| parameters(named.preset().name)),
            [109_483_778, 66_955_010, 124_647_170, 149_606_402, 96_066]
        );
        let error = EncoderConfig::preset("bert-9").unwrap_err().to_string();
        assert!(error.starts_with("`bert-9` is not a model: expected bert-base-uncased, "), "{error}");
    }
}
