//! Encoders of Transformers with a classifier of sequences, as chains: BERT (Devlin et al., 2019) and MiniLM, RoBERTa and
//! XLM-RoBERTa, DistilBERT, and ModernBERT, all described by one configuration. The chain is the embeddings, one layer
//! per block, and the head.
//!
//! Weights are laid out as in Transformers' files; [`ModelType::hf_name`] maps the names of parameters.

mod architecture;
mod block;
mod config;
mod embeddings;
mod head;
mod modern;
mod names;
mod presets;

pub use architecture::{Encoder, EncoderDir, EncoderWriter};
pub use block::EncoderBlock;
pub use config::{EncoderConfig, ModelType};
pub use embeddings::Embeddings;
pub use head::ClassificationHead;
pub use modern::{Modern, Pooling};

use crate::ModelError;
use crate::lora::{Adaptation, AdaptedLayers, transformer};
use crate::parts::Norm;
use crate::pretrained;
use hydra_core::Chain;

/// The chain of an encoder: layers `embeddings`, `layer.0`, `layer.1` and so on, and `head`. Initial weights come from
/// `source`, or from the task's seed with the standard deviations of Transformers (from untruncated normal
/// distributions, and also for the rows of the padding token).
///
/// A batch is one row of several sequences, one after the other, which do not attend to each other. Inputs are ids `[1,
/// tokens]`, each token's position in its sequence, and for BERT optionally its type, likewise. Targets are the labels,
/// and the [`Sequences`](crate::parts::Sequences) of the row. A padding token within a text is a token as any other.
///
/// # Errors
/// A value of `config` that [`EncoderConfig::validate`] rejects.
pub fn chain(config: &EncoderConfig, source: Option<EncoderDir>) -> Result<Chain, ModelError> {
    pretrained::chain(config, source)
}

/// The layers of a chain, with trained adapters if there is an adaptation.
fn layers(config: &EncoderConfig, adaptation: Option<Adaptation<'_>>) -> Result<AdaptedLayers, ModelError> {
    config.validate()?;
    let blocks = (0..config.num_hidden_layers)
        .map(|index| (format!("layer.{index}"), EncoderBlock::new(config, index)));
    let embeddings = [("embeddings".to_owned(), Embeddings::new(config))];
    let head = [("head".to_owned(), ClassificationHead::new(config))];
    let layers = transformer((name(config), description(config)), embeddings, blocks, head, adaptation)?;
    Ok(layers.classifier(&config.head))
}

/// Everything besides names and shapes that costs and results depend on.
fn description(config: &EncoderConfig) -> String {
    format!(
        "dropout {} {} {}, epsilon {}, first position {}, {:?}{}",
        config.hidden_dropout_prob,
        config.attention_probs_dropout_prob,
        config.head_dropout(),
        config.layer_norm_eps,
        config.first_position(),
        config.modern,
        if config.pooling() == Pooling::First { ", the last block ends in first tokens" } else { "" },
    )
}

/// A name that distinguishes chains with equal parameter shapes but different computations.
fn name(config: &EncoderConfig) -> String {
    let EncoderConfig { model_type, num_hidden_layers, hidden_size, num_attention_heads, hidden_act, .. } =
        config;
    format!(
        "{}-{num_hidden_layers}x{hidden_size}-{num_attention_heads}-heads-{hidden_act}",
        model_type.name()
    )
}

impl EncoderConfig {
    /// A normalization without values.
    fn norm(&self) -> Norm {
        match self.modern.as_ref().is_none_or(|modern| modern.norm_bias) {
            true => Norm::new(self.hidden_size, self.layer_norm_eps),
            false => Norm::without_bias(self.hidden_size, self.layer_norm_eps),
        }
    }

    /// What the head reads of each sequence.
    fn pooling(&self) -> Pooling {
        self.modern.as_ref().map_or(Pooling::First, |modern| modern.classifier_pooling)
    }

    /// The standard deviation of the initial weights of projections into the residual stream.
    fn outward_deviation(&self) -> f64 {
        match self.modern {
            Some(_) => self.initializer_range / (2.0 * self.num_hidden_layers as f64).sqrt(),
            None => self.initializer_range,
        }
    }
}

#[cfg(test)]
mod testing {
    use super::EncoderConfig;
    use crate::synthetic::testing::texts;
    use hydra_core::{Batch, Dataset, DatasetError};
    use serde_json::{Map, Value, json};
    use std::path::Path;

    /// A model of some thousand parameters without dropout in blocks, with these keys replaced.
    pub fn config(keys: Value) -> EncoderConfig {
        let kind = keys.get("model_type").and_then(Value::as_str).unwrap_or("bert").to_owned();
        let sizes = json!({
            "model_type": kind, "vocab_size": 40, "max_position_embeddings": 34, "initializer_range": 0.2,
        });
        let own = match kind.as_str() {
            "distilbert" => json!({
                "dim": 16, "hidden_dim": 24, "n_layers": 3, "n_heads": 4, "dropout": 0.0,
                "attention_dropout": 0.0,
            }),
            _ => json!({
                "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
            }),
        };
        let more = match kind.as_str() {
            "distilbert" => json!({}),
            "modernbert" => json!({"local_attention": 4, "pad_token_id": 0}),
            "roberta" | "xlm-roberta" => {
                json!({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 1})
            }
            _ => json!({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
        };
        let mut file = Map::new();
        for part in [sizes, own, more, keys] {
            file.extend(part.as_object().unwrap().clone());
        }
        let config = EncoderConfig::from_json(Path::new("config.json"), file);
        config.unwrap_or_else(|error| panic!("{}", hydra_core::with_causes(&error)))
    }

    /// Sequences of three to nine tokens, whose label is whether they hold the token 7.
    pub struct Texts(pub usize);

    impl Dataset for Texts {
        fn name(&self) -> &str {
            "texts"
        }

        fn len(&self) -> usize {
            self.0
        }

        fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
            let text = |item: &usize| -> (i32, Vec<i32>) {
                let label = (item % 2) as i32;
                let token = |at: usize| 8 + ((item * 31 + at * 17) % 32) as i32;
                let mut tokens: Vec<i32> = (0..3 + item % 7).map(token).collect();
                let at = item % tokens.len();
                tokens[at] = if label == 1 { 7 } else { tokens[at] };
                (label, tokens)
            };
            Ok(texts(&items.iter().map(text).collect::<Vec<_>>()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{Texts, config};
    use super::*;
    use crate::parts::class_logits;
    use crate::synthetic::testing::{
        assert_deviations, backward, bf16_agrees_except, descend, shards_agree, texts, with_threads,
    };
    use burn::tensor::Device;
    use hydra_core::{AnyTensor, Batch, Dataset};
    use serde_json::json;

    fn batch() -> Batch {
        Texts(12).batch(&[0, 1, 2, 3, 4, 7, 11]).unwrap()
    }

    fn with_dropout(kind: &str) -> EncoderConfig {
        let mut config = config(json!({"model_type": kind, "classifier_pooling": "mean"}));
        (config.hidden_dropout_prob, config.attention_probs_dropout_prob) = (0.1, 0.1);
        config.classifier_dropout = Some(0.1);
        config.modern.iter_mut().for_each(|modern| modern.mlp_dropout = 0.1);
        config
    }

    #[test]
    fn parameters_are_named_as_in_transformers() {
        for (preset, names) in [
            (
                "bert-base-uncased",
                &[
                    "bert.embeddings.token_type_embeddings.weight",
                    "bert.embeddings.LayerNorm.bias",
                    "bert.encoder.layer.11.attention.output.LayerNorm.weight",
                    "bert.pooler.dense.weight",
                    "classifier.bias",
                ][..],
            ),
            ("roberta-base", &["classifier.dense.weight", "classifier.out_proj.bias"]),
            (
                "distilbert-base-uncased",
                &["distilbert.transformer.layer.5.ffn.lin2.bias", "pre_classifier.weight"],
            ),
            (
                "modernbert-base",
                &["model.layers.21.attn_norm.weight", "model.layers.0.mlp.Wo.weight", "head.norm.weight"],
            ),
        ] {
            let config = EncoderConfig::preset(preset).unwrap();
            let (chain, hf_name) = (chain(&config, None).unwrap(), config.model_type.hf_name());
            let params = chain.buffers().iter().flat_map(|buffer| &buffer.params);
            let found: Vec<String> = params.map(|param| hf_name(&param.name)).collect();
            for name in names {
                assert!(found.iter().any(|found| found == name), "{name} in {found:?}");
            }
            assert!(!found.iter().any(|name| name.contains("layers.0.attn_norm")));
        }
    }

    #[test]
    fn bits_depend_neither_on_cuts_nor_on_threads() {
        for kind in ModelType::NAMES {
            let (chain, batch) = (chain(&with_dropout(kind), None).unwrap(), batch());
            shards_agree(&chain, &batch, &[0, 1, 2, 3, 4, 5]);
            shards_agree(&chain, &batch, &[0, 3, 5]);
            let one = with_threads(1, || backward(&chain, &batch));
            assert_eq!(one, with_threads(3, || backward(&chain, &batch)), "{kind}");
        }
    }

    #[test]
    fn encoders_compute_in_bf16() {
        for kind in ModelType::NAMES {
            let config = with_dropout(kind);
            // The gradient of a key bias is only rounding noise: it adds the same to all scores of a query.
            let is_key = |name: &str| name.ends_with("projections.1.bias");
            bf16_agrees_except(|| chain(&config, None).unwrap(), &batch(), &[0, 1, 3, 5], is_key);
        }
    }

    /// The logits of each of these texts in one row.
    fn logits_of(config: &EncoderConfig, items: &[(i32, Vec<i32>)]) -> Vec<Vec<f32>> {
        let (chain, device) = (chain(config, None).unwrap(), Device::flex());
        let buffers = crate::weights::testing::ParamBuffers::of(&chain, 3);
        let (batch, outputs) = (texts(items), config.head.outputs());
        let parts = |of: &hydra_core::HostActivation| of.to_device(&device.clone().autodiff());
        let data = (parts(&batch.inputs), parts(&batch.targets));
        let found = class_logits(&chain, &|i| buffers.0[i].clone().into(), data, &device);
        AnyTensor::from(found).into_host().as_f32().chunks(outputs).map(<[f32]>::to_vec).collect()
    }

    #[test]
    fn a_sequence_has_the_same_logits_in_any_batch() {
        for kind in ModelType::NAMES {
            let config = config(json!({"model_type": kind, "classifier_pooling": "mean"}));
            let texts: Vec<(i32, Vec<i32>)> = [3, 1, 30, 9]
                .iter()
                .map(|length| (0, (0..*length).map(|i| (i * 7 + length) % 40).collect()))
                .collect();
            let together = logits_of(&config, &texts);
            for (text, found) in texts.iter().zip(&together) {
                let alone = &logits_of(&config, std::slice::from_ref(text))[0];
                let near = found.iter().zip(alone).all(|(a, b)| (a - b).abs() < 1e-5);
                assert!(near, "{kind}: {found:?} for {alone:?}");
            }
        }
    }

    #[test]
    fn token_types_and_both_directions_matter() {
        let (text, changed) = ((0, vec![1, 2, 3, 4]), (0, vec![1, 2, 3, 5]));
        for kind in ModelType::NAMES {
            // The head reads the first token.
            let config = config(json!({"model_type": kind}));
            let of = |text: &(i32, Vec<i32>)| logits_of(&config, std::slice::from_ref(text));
            assert_ne!(of(&text), of(&changed), "{kind}: a token sees those after it");
        }
        let config = config(json!({}));
        let chain = chain(&config, None).unwrap();
        let mut batch = texts(&[text]);
        let plain = backward(&chain, &batch).0;
        let types = |kind| hydra_core::HostTensor::int(vec![0, 0, kind, kind], [1, 4]);
        batch.inputs.parts.push(types(0));
        assert_eq!(backward(&chain, &batch).0, plain, "types are zero if there are none");
        batch.inputs.parts[2] = types(1);
        assert_ne!(backward(&chain, &batch).0, plain);
    }

    #[test]
    fn an_encoder_learns_its_texts() {
        for kind in ["bert", "roberta", "distilbert", "modernbert"] {
            let config = config(json!({"model_type": kind, "seq_classif_dropout": 0.0}));
            let (first, last) = descend(&chain(&config, None).unwrap(), &Texts(24), 60, 0.2);
            assert!(last < 0.5 * first, "{kind}: {first} to {last}");
        }
    }

    #[test]
    fn a_local_block_does_not_see_far_tokens() {
        let config = config(json!({
            "model_type": "modernbert", "num_hidden_layers": 1, "layer_types": ["sliding_attention"],
        }));
        let text = |last: i32| (0, vec![1, 2, 3, last, 5]);
        let of = |text: (i32, Vec<i32>)| logits_of(&config, &[text]);
        assert_eq!(of(text(4)), of(text(9)), "the first token sees two after it");
        assert_ne!(of((0, vec![1, 2, 3])), of((0, vec![1, 2, 4])));
    }

    #[test]
    #[should_panic(expected = "id 34 is not below the table's 34 rows")]
    fn a_sequence_that_is_too_long_is_refused() {
        let config = config(json!({"model_type": "roberta"}));
        logits_of(&config, &[(0, vec![1; 33])]);
    }

    #[test]
    fn uninitialized_layers_know_what_they_need() {
        for kind in ModelType::NAMES {
            let chain = chain(&config(json!({"model_type": kind})), None).unwrap();
            let bytes = |layer: usize, shape: &[usize]| {
                chain.layers()[layer].layer().working_bytes(&[shape.to_vec()])
            };
            assert!(bytes(0, &[1, 20]).unwrap() > 20 * 16 * 4);
            assert!(bytes(1, &[1, 20, 16]).unwrap() > 16 * 20 * 16 * 4);
            assert!(bytes(4, &[1, 20, 16]).unwrap() > 20 * 16 * 4);
            assert_eq!(bytes(1, &[1, 20]), None);
            let key = |layer: usize| chain.layers()[layer].layer().cost_key();
            let alike = kind != "modernbert";
            assert!(key(1).is_some() && (key(1) == key(2)) == alike, "{kind}");
            assert_ne!(key(2), key(3), "{kind}: the last block ends in first tokens");
        }
    }

    #[test]
    fn first_values_are_distributed_as_in_transformers() {
        for kind in ModelType::NAMES {
            let outward = ["output.weight", "outer.weight", "dense.weight"];
            let chain = chain(&config(json!({"model_type": kind})), None).unwrap();
            assert_deviations(&chain, |param| match param.name.as_str() {
                name if name.ends_with("bias") => (0.0, 0.0),
                name if name.ends_with("norm.weight") => (1.0, 0.0),
                _ if param.len < 64 => (0.2, 1.0),
                name if kind == "modernbert" && outward.iter().any(|end| name.ends_with(end)) => {
                    (0.2 / 6f64.sqrt(), 0.2)
                }
                _ => (0.2, 0.2),
            });
        }
    }
}
