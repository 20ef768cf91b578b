//! The vision transformer (Dosovitskiy et al., 2021) of Transformers with a classifier, as a chain: the patch
//! embeddings, one layer per block, and the head with its loss.
//!
//! Modules and parameters are named as in Transformers' files, so [`hf_name`] only exchanges a prefix, and weights are
//! laid out as in the files.

mod architecture;
mod block;
mod config;
mod embeddings;

pub use architecture::{Vit, VitDir, VitWriter};
pub use block::{DenseLayer, SelfAttention, VitAttention, VitBlock};
pub use config::VitConfig;
pub use embeddings::{PatchEmbeddings, VitEmbeddings};

use crate::ModelError;
use crate::lora::{Adaptation, AdaptedLayers, transformer};
use crate::objective::SingleLabel;
use crate::parts::{ImageHead, ImagePooling};
use crate::pretrained;
use hydra_core::Chain;

/// The chain of a vision transformer: layers `embeddings`, `layer.0`, `layer.1` and so on, and `head`. Initial weights
/// come from `source`, or from the task's seed with the standard deviations of Transformers (from untruncated normal
/// distributions).
///
/// Inputs are images `[items, channels, side, side]`, normalized by the model's preprocessor, and the targets their
/// classes `[items]`. Evaluations measure accuracy.
///
/// # Errors
/// A value of `config` that [`VitConfig::validate`] rejects.
pub fn chain(config: &VitConfig, source: Option<VitDir>) -> Result<Chain, ModelError> {
    pretrained::chain(config, source)
}

/// The layers of a chain, with trained adapters if there is an adaptation.
fn layers(config: &VitConfig, adaptation: Option<Adaptation<'_>>) -> Result<AdaptedLayers, ModelError> {
    config.validate()?;
    let blocks =
        (0..config.num_hidden_layers).map(|index| (format!("layer.{index}"), VitBlock::new(config, index)));
    let head = ImageHead::new(ImagePooling::ClassToken, config.hidden_size, config.labels.count());
    let head = head.normalized(config.layer_norm_eps, config.initializer_range);
    let embed = VitEmbeddings::new(config);
    let (embed, head) = ([("embeddings".to_owned(), embed)], [("head".to_owned(), head)]);
    let layers = transformer((name(config), description(config)), embed, blocks, head, adaptation)?;
    let objective = SingleLabel { classes: config.labels.count() };
    Ok(AdaptedLayers { chain: layers.chain.objective(objective), ..layers })
}

/// Everything besides names and shapes that costs and results depend on.
fn description(config: &VitConfig) -> String {
    format!(
        "dropout {} {}, epsilon {}, patches of {}, the last block ends in the class token",
        config.hidden_dropout_prob,
        config.attention_probs_dropout_prob,
        config.layer_norm_eps,
        config.patch_size,
    )
}

/// A name that distinguishes chains with equal parameter shapes but different computations.
fn name(config: &VitConfig) -> String {
    let VitConfig { num_hidden_layers, hidden_size, num_attention_heads, hidden_act, .. } = config;
    format!("vit-{num_hidden_layers}x{hidden_size}-{num_attention_heads}-heads-{hidden_act}")
}

/// The name of a [`chain`]'s parameter in Hugging Face's files: `embeddings.cls_token` becomes
/// `vit.embeddings.cls_token`, `layer.0.output.dense.bias` becomes `vit.encoder.layer.0.output.dense.bias`,
/// `head.layernorm.bias` becomes `vit.layernorm.bias`, and `head.classifier.bias` becomes `classifier.bias`.
pub fn hf_name(param: &str) -> String {
    match param.split_once('.') {
        Some(("layer", _)) => format!("vit.encoder.{param}"),
        Some(("head", own)) if own.starts_with("classifier.") => own.to_owned(),
        Some(("head", own)) => format!("vit.{own}"),
        _ => format!("vit.{param}"),
    }
}

/// A parameter's name in memory in Transformers 5, which PEFT uses for adapters; files keep the older names of
/// [`hf_name`].
pub fn module_name(param: &str) -> String {
    let names = [
        ("vit.encoder.layer.", "vit.layers."),
        ("attention.attention.query.", "attention.q_proj."),
        ("attention.attention.key.", "attention.k_proj."),
        ("attention.attention.value.", "attention.v_proj."),
        ("attention.output.dense.", "attention.o_proj."),
        ("intermediate.dense.", "mlp.fc1."),
        ("output.dense.", "mlp.fc2."),
    ];
    names.iter().fold(hf_name(param), |name, (file, memory)| name.replace(file, memory))
}

/// A target module's name in Transformers 5, from that name or the older name in files: `query` becomes `q_proj`.
pub fn module_target(target: &str) -> &str {
    match target {
        "query" => "q_proj",
        "key" => "k_proj",
        "value" => "v_proj",
        "attention.output.dense" => "o_proj",
        "intermediate.dense" => "fc1",
        _ => target,
    }
}

#[cfg(test)]
mod tests {
    mod writer;

    use super::*;
    use crate::cnn::Waves;
    use crate::synthetic::testing::{
        assert_deviations, backward, bf16_agrees, descend, shards_agree, with_threads,
    };
    use hydra_core::{Batch, Dataset};

    #[test]
    fn names_in_memory_are_those_of_transformers_5() {
        for (own, expected) in [
            (
                "layer.0.attention.attention.query.lora.a.weight",
                "vit.layers.0.attention.q_proj.lora.a.weight",
            ),
            ("layer.1.attention.output.dense.bias", "vit.layers.1.attention.o_proj.bias"),
            ("layer.1.intermediate.dense.bias", "vit.layers.1.mlp.fc1.bias"),
            ("layer.11.output.dense.weight", "vit.layers.11.mlp.fc2.weight"),
            ("layer.2.layernorm_before.weight", "vit.layers.2.layernorm_before.weight"),
            ("head.classifier.weight", "classifier.weight"),
        ] {
            assert_eq!(module_name(own), expected);
        }
    }

    fn tiny() -> VitConfig {
        VitConfig::preset("vit-tiny").unwrap()
    }

    fn images() -> Waves {
        Waves::new(1, 12, 3, 32, 4)
    }

    fn batch() -> Batch {
        images().batch(&[0, 1, 2, 3, 4, 7, 11]).unwrap()
    }

    fn models() -> [VitConfig; 2] {
        let dropout = VitConfig { hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1, ..tiny() };
        [VitConfig { qkv_bias: false, hidden_act: "gelu_new".into(), ..tiny() }, dropout]
    }

    #[test]
    fn parameters_are_named_and_counted_as_in_transformers() {
        let base = chain(&VitConfig::preset("vit-base").unwrap(), None).unwrap();
        assert_eq!(base.parameters(), 86_567_656);
        let names: Vec<String> =
            base.buffers().iter().flat_map(|i| i.params.iter().map(|p| hf_name(&p.name))).collect();
        for name in [
            "vit.embeddings.cls_token",
            "vit.embeddings.position_embeddings",
            "vit.embeddings.patch_embeddings.projection.weight",
            "vit.encoder.layer.11.attention.attention.query.bias",
            "vit.encoder.layer.0.attention.output.dense.weight",
            "vit.encoder.layer.0.intermediate.dense.weight",
            "vit.encoder.layer.0.layernorm_before.weight",
            "vit.layernorm.bias",
            "classifier.weight",
        ] {
            assert!(names.iter().any(|found| found == name), "{name}");
        }
        assert_eq!(names.len(), 4 + 12 * 16 + 4);
    }

    #[test]
    fn bits_depend_neither_on_cuts_nor_on_threads() {
        for config in models() {
            let (chain, batch) = (chain(&config, None).unwrap(), batch());
            shards_agree(&chain, &batch, &[0, 1, 2, 3, 4, 5]);
            shards_agree(&chain, &batch, &[0, 3, 5]);
            let one = with_threads(1, || backward(&chain, &batch));
            assert_eq!(one, with_threads(3, || backward(&chain, &batch)));
        }
    }

    #[test]
    fn vision_transformers_compute_in_bf16() {
        for config in models() {
            // The gradient of a key bias is only rounding noise: it adds the same to all scores of a query.
            let config = VitConfig { qkv_bias: false, ..config };
            bf16_agrees(|| chain(&config, None).unwrap(), &batch(), &[0, 1, 3, 5]);
        }
    }

    #[test]
    fn a_vision_transformer_learns_its_images() {
        let (first, last) = descend(&chain(&tiny(), None).unwrap(), &images(), 40, 0.1);
        assert!(last < 0.5 * first, "{first} to {last}");
    }

    #[test]
    fn uninitialized_layers_know_what_they_need() {
        let chain = chain(&tiny(), None).unwrap();
        let bytes =
            |layer: usize, shape: &[usize]| chain.layers()[layer].layer().working_bytes(&[shape.to_vec()]);
        assert!(bytes(0, &[2, 3, 32, 32]).unwrap() > 2 * 3 * 32 * 32 * 4);
        assert!(bytes(1, &[2, 17, 48]).unwrap() > 16 * 2 * 17 * 48 * 4);
        assert_eq!(bytes(1, &[2, 17]), None);
        let note = |layer: usize| chain.layers()[layer].layer().cost_key();
        assert!(note(1).is_some() && note(1) == note(2));
    }

    #[test]
    fn first_values_are_distributed_as_in_transformers() {
        assert_deviations(&chain(&tiny(), None).unwrap(), |param| match param.name.as_str() {
            name if name.ends_with("bias") => (0.0, 0.0),
            name if name.contains("layernorm") => (1.0, 0.0),
            _ => (0.02, 0.2),
        });
    }
}
