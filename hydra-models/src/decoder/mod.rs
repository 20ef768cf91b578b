//! Decoders of Transformers as chains: Llama, Mistral, Qwen2 and Qwen3, all described by one configuration. The chain
//! is the embedding, one layer per block, and the head with its loss.
//!
//! Modules and parameters are named as in Transformers, so [`hf_name`] only exchanges a prefix, and weights are laid
//! out as in its files.

mod architecture;
mod block;
mod config;
mod embed;
mod head;
mod json;
mod presets;

pub use architecture::{Decoder, DecoderDir, DecoderWriter};
pub use block::{Attention, DecoderBlock, Mlp};
pub use config::{DecoderConfig, LayerType, ModelType, Rope};
pub use embed::Embed;
pub use head::{Head, logits};

use crate::ModelError;
use crate::lora::{Adaptation, AdaptedLayers, transformer, unties};
use crate::parts::vocabulary::{in_part, named, rows};
use crate::parts::{Norm, ScoreHead, is_score};
use crate::pretrained;
use hydra_core::Chain;
use std::ops::Range;

/// The chain of a decoder: layers `embed`, `layers.0`, `layers.1` and so on, and `head`. Initial weights come from
/// `source`, or from the task's seed with the distributions of Transformers (but other random numbers).
///
/// Inputs are ids `[batch, tokens]`, and the targets are the same ids: the head shifts them, so the loss is a mean over
/// `batch * (tokens - 1)` loss targets, or fewer if some are [ignored](crate::ops::IGNORED). A second input `[batch,
/// tokens]` gives each token's position in its example; rows then hold several examples that do not attend to each
/// other. The targets of a [classifier](DecoderConfig::head) are labels and the [`Sequences`](crate::parts::Sequences)
/// of the only row. If the vocabulary is [split](DecoderConfig::vocabulary_parts), the layers `embed.0`, `embed.N` and so on, and
/// `head.0`, `head.N`, each have a table's rows starting at that number. A tied head shares the token embedding's
/// table: one parameter that both layers name.
///
/// # Errors
/// A value of `config` that [`DecoderConfig::validate`] rejects.
pub fn chain(config: &DecoderConfig, source: Option<DecoderDir>) -> Result<Chain, ModelError> {
    pretrained::chain(config, source)
}

/// The layers of a chain, with trained adapters if there is an adaptation.
fn layers(config: &DecoderConfig, adaptation: Option<Adaptation<'_>>) -> Result<AdaptedLayers, ModelError> {
    config.validate()?;
    let untied = adaptation.is_some_and(|with| unties(with.lora, with.adapting));
    let tie_word_embeddings = config.tie_word_embeddings && !untied;
    let config = &DecoderConfig { tie_word_embeddings, ..config.clone() };
    let blocks = (0..config.num_hidden_layers)
        .map(|index| (format!("layers.{index}"), DecoderBlock::new(config, index)));
    let name = (name(config), description(config));
    let rows: Vec<Range<usize>> = rows(config.vocab_size, config.vocabulary_parts).collect();
    let embed: Vec<Embed> = rows.iter().map(|rows| Embed::new(config, rows)).collect();
    if config.head.is_classifier() {
        let (norm, width) = (Norm::rms(config.hidden_size, config.rms_norm_eps), config.hidden_size);
        let score = ScoreHead::new(norm, width, config.head.outputs(), config.initializer_range);
        let (embed, head) = (named("embed", &rows, embed), [("head".to_owned(), score)]);
        return Ok(transformer(name, embed, blocks, head, adaptation)?.classifier(&config.head));
    }
    let head = rows.iter().zip(&embed).map(|(rows, embed)| Head::new(config, rows, &embed.embed_tokens));
    let head: Vec<Head> = head.collect();
    let (embed, head) = (named("embed", &rows, embed), named("head", &rows, head));
    Ok(transformer(name, embed, blocks, head, adaptation)?.language_model())
}

/// Everything besides names and shapes that costs and results depend on.
fn description(config: &DecoderConfig) -> String {
    let windows = (0..config.num_hidden_layers).map(|index| match config.window(index) {
        Some(window) => window.to_string(),
        None => "-".to_owned(),
    });
    format!(
        "{:?}, dropout {}, epsilon {}, chunk {}, windows {}{}",
        config.rope,
        config.attention_dropout,
        config.rms_norm_eps,
        config.chunk_rows(),
        windows.collect::<Vec<_>>().join(" "),
        config.head.description(),
    )
}

/// A name that distinguishes chains with equal parameter shapes but different computations.
fn name(config: &DecoderConfig) -> String {
    let DecoderConfig { model_type, num_hidden_layers, hidden_size, .. } = config;
    let (heads, key_heads) = (config.num_attention_heads, config.num_key_value_heads);
    format!("{}-{num_hidden_layers}x{hidden_size}-{heads}-{key_heads}-heads", model_type.name())
}

/// The Hugging Face name of a parameter of a [`chain`]: `embed.embed_tokens.weight` becomes
/// `model.embed_tokens.weight`, `layers.0.mlp.up_proj.weight` becomes `model.layers.0.mlp.up_proj.weight`, and
/// `head.lm_head.weight` becomes `lm_head.weight`, as `head.score.weight` of a classifier becomes `score.weight`.
pub fn hf_name(param: &str) -> String {
    let layer = ["embed.", "head."].into_iter().find_map(|layer| Some((layer, param.strip_prefix(layer)?)));
    let (layer, own) = layer.unwrap_or(("", param));
    let own = in_part(param).map_or(own, |(_, own)| own);
    match layer {
        "head." if own.starts_with("lm_head.") || is_score(param) => own.to_owned(),
        _ => format!("model.{own}"),
    }
}

/// A parameter's first row in its table if it is a slice of one, else 0.
fn first_row(param: &str) -> usize {
    in_part(param).filter(|(_, own)| !own.starts_with("norm.")).map_or(0, |(row, _)| row)
}

#[cfg(test)]
mod testing {
    pub use crate::weights::testing::{Broken, ParamBuffers};

    use super::DecoderConfig;

    /// A model of a few hundred parameters with these keys replaced.
    pub fn config(keys: serde_json::Value) -> DecoderConfig {
        let file = serde_json::json!({
            "model_type": "llama", "vocab_size": 11, "max_position_embeddings": 64, "hidden_size": 8,
            "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "tie_word_embeddings": false,
        });
        let (serde_json::Value::Object(mut file), serde_json::Value::Object(keys)) = (file, keys) else {
            panic!("objects");
        };
        file.extend(keys);
        DecoderConfig::from_json(file).unwrap()
    }
}

#[cfg(test)]
mod tests {
    mod vocabulary;
    mod weights;
    mod writer;

    use super::*;
    use crate::synthetic::testing::{assert_deviations, backward, bf16_agrees, shards_agree, with_threads};
    use hydra_core::{Batch, HostActivation, HostTensor};
    use serde_json::json;
    use std::collections::BTreeSet;

    /// Models that together cover all options, of width 64 over bytes.
    fn models() -> Vec<DecoderConfig> {
        let llama3 = json!({
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        });
        let own = [
            json!({"model_type": "llama", "attention_bias": true, "mlp_bias": true, "rope_parameters": llama3}),
            json!({"model_type": "mistral", "sliding_window": 20, "tie_word_embeddings": true}),
            json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 33, "max_window_layers": 1}),
            json!({"model_type": "qwen3", "head_dim": 20, "attention_bias": true}),
        ];
        let sizes = json!({
            "vocab_size": 256, "max_position_embeddings": 128, "hidden_size": 64, "intermediate_size": 176,
            "num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1,
        });
        let with_sizes = |own: serde_json::Value| {
            let mut keys = sizes.as_object().unwrap().clone();
            keys.extend(own.as_object().unwrap().clone());
            testing::config(keys.into())
        };
        own.into_iter().map(with_sizes).collect()
    }

    fn names(config: &DecoderConfig) -> BTreeSet<String> {
        let chain = chain(config, None).unwrap();
        chain.buffers().iter().flat_map(|i| i.params.iter().map(|p| hf_name(&p.name))).collect()
    }

    #[test]
    fn parameters_are_named_as_in_transformers() {
        let [llama, mistral, qwen2, qwen3] = models().try_into().unwrap();
        let has = |config: &DecoderConfig, name: &str| names(config).contains(name);
        assert_eq!(names(&mistral).len(), 1 + 2 * 9 + 1);
        let blocks = ["model.layers.1.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"];
        for name in ["model.embed_tokens.weight", "model.norm.weight"].into_iter().chain(blocks) {
            assert!([&llama, &mistral, &qwen2, &qwen3].iter().all(|config| has(config, name)), "{name}");
        }
        let tells = [
            ("lm_head.weight", [true, false, true, true]),
            ("model.layers.0.self_attn.k_proj.bias", [true, false, true, true]),
            ("model.layers.0.self_attn.o_proj.bias", [true, false, false, true]),
            ("model.layers.0.mlp.down_proj.bias", [true, false, false, false]),
            ("model.layers.1.self_attn.q_norm.weight", [false, false, false, true]),
        ];
        for (name, there) in tells {
            assert_eq!([&llama, &mistral, &qwen2, &qwen3].map(|config| has(config, name)), there, "{name}");
        }
        let chain = chain(&mistral, None).unwrap();
        assert_eq!(
            (chain.len(), chain.buffers()[0].layers.as_slice()),
            (4, &[0, 3][..]),
            "the table is tied"
        );
    }

    #[test]
    fn weights_lie_as_in_the_files_of_transformers() {
        let chain = chain(&models()[3], None).unwrap();
        let shape = |name: &str| {
            let mut params = chain.buffers().iter().flat_map(|buffer| &buffer.params);
            params.find(|param| hf_name(&param.name) == name).unwrap().shape.clone()
        };
        assert_eq!(shape("model.layers.0.self_attn.q_proj.weight"), [80, 64]);
        assert_eq!(shape("model.layers.0.self_attn.v_proj.weight"), [40, 64]);
        assert_eq!(shape("model.layers.0.self_attn.o_proj.weight"), [64, 80]);
        assert_eq!(shape("model.layers.0.mlp.gate_proj.weight"), [176, 64]);
        assert_eq!(shape("model.layers.0.self_attn.k_norm.weight"), [20]);
    }

    fn batch() -> Batch {
        let ids: Vec<i32> = (0..3 * 96).map(|i| (i * 31) % 256).collect();
        let ids = HostActivation::of(HostTensor::int(ids, [3, 96]));
        Batch { inputs: ids.clone(), targets: ids, items: 3, loss_targets: 3 * 95, units: 3 * 96 }
    }

    #[test]
    fn bits_depend_neither_on_cuts_nor_on_threads_with_dropout() {
        for config in models() {
            let (chain, batch) = (chain(&config, None).unwrap(), batch());
            shards_agree(&chain, &batch, &[0, 1, 2, 3, 4]);
            shards_agree(&chain, &batch, &[0, 2, 4]);
            let one = with_threads(1, || backward(&chain, &batch));
            assert_eq!(one, with_threads(3, || backward(&chain, &batch)));
        }
    }

    /// The same with several examples in each row.
    fn packed() -> Batch {
        let positions = [[40, 55, 1], [96, 0, 0], [32, 33, 31]].as_flattened().iter().flat_map(|n| 0..*n);
        let mut batch = batch();
        batch.inputs.parts.push(HostTensor::int(positions.collect(), [3, 96]));
        batch
    }

    #[test]
    fn bits_of_packed_rows_depend_neither_on_cuts_nor_on_threads_with_dropout() {
        for config in models() {
            let (chain, batch) = (chain(&config, None).unwrap(), packed());
            shards_agree(&chain, &batch, &[0, 1, 2, 3, 4]);
            shards_agree(&chain, &batch, &[0, 2, 4]);
            let one = with_threads(1, || backward(&chain, &batch));
            assert_eq!(one, with_threads(3, || backward(&chain, &batch)));
            assert_ne!(one.0, backward(&chain, &self::batch()).0, "positions matter");
        }
    }

    #[test]
    fn every_model_computes_in_bf16_with_dropout() {
        for config in models() {
            bf16_agrees(|| chain(&config, None).unwrap(), &batch(), &[0, 1, 3, 4]);
        }
    }

    #[test]
    fn packed_rows_are_computed_in_bf16_with_dropout() {
        for config in models() {
            bf16_agrees(|| chain(&config, None).unwrap(), &packed(), &[0, 1, 3, 4]);
        }
    }

    #[test]
    fn what_a_layer_computes_is_told_apart() {
        let note = |config: &DecoderConfig, layer: usize| {
            chain(config, None).unwrap().layers()[layer].layer().cost_key().expect("a cost key").text
        };
        let [llama, _, qwen2, _] = models().try_into().unwrap();
        assert_eq!(note(&llama, 1), note(&llama, 2));
        assert_ne!(note(&qwen2, 1), note(&qwen2, 2), "the second has a window");
        let mut other = llama.clone();
        other.rope.theta = 20_000.0;
        assert_ne!(note(&llama, 1), note(&other, 1));
        assert_ne!(chain(&llama, None).unwrap().description(), chain(&other, None).unwrap().description());
    }

    #[test]
    fn uninitialized_layers_know_what_they_need() {
        let chain = chain(&models()[0], None).unwrap();
        let bytes =
            |layer: usize, shape: &[usize]| chain.layers()[layer].layer().working_bytes(&[shape.to_vec()]);
        assert!(bytes(0, &[2, 128]).unwrap() > bytes(0, &[1, 128]).unwrap());
        assert!(bytes(1, &[2, 128, 64]).unwrap() > 16 * 2 * 128 * 64 * 4);
        assert!(bytes(3, &[2, 128, 64]).unwrap() >= 256 * 256 * 4, "a chunk of logits");
        assert_eq!(bytes(1, &[2, 128]), None);
    }

    #[test]
    fn first_values_are_distributed_as_in_transformers() {
        for config in models() {
            assert_deviations(&chain(&config, None).unwrap(), |param| match param.name.as_str() {
                name if name.ends_with("bias") => (0.0, 0.0),
                name if name.contains("norm") => (1.0, 0.0),
                _ => (config.initializer_range, 0.1),
            });
        }
    }
}
