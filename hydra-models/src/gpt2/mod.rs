//! GPT-2 as a chain: the embedding, one layer per block, and the head with its loss.
//!
//! Modules and parameters are named as in Transformers, so [`hf_name`] only exchanges a prefix. The head shares the
//! token embedding's table: one parameter that both layers name.

mod architecture;
mod block;
mod config;
mod embed;
mod head;

pub use crate::parts::{Linear, Norm, Table};
pub use architecture::{Gpt2, Gpt2Dir, Gpt2Writer};
pub use block::{Gpt2Block, Mlp, SelfAttention};
pub use config::Gpt2Config;
pub use embed::Embed;
pub use head::{Head, logits};

use crate::ModelError;
use crate::lora::{Adaptation, AdaptedLayers, transformer, unties};
use crate::parts::vocabulary::{in_part, named, rows};
use crate::parts::{ScoreHead, is_score};
use crate::pretrained;
use hydra_core::Chain;
use std::ops::Range;

/// The chain of a GPT-2: layers `embed`, `h.0` to `h.{n_layer - 1}` and `head`. Initial weights come from `source`, or
/// from the task's seed with the distributions of Transformers (but other random numbers).
///
/// Inputs are ids `[batch, tokens]`, and the targets are the same ids: the head shifts them, so the loss is a mean over
/// `batch * (tokens - 1)` loss targets, or fewer if some are [ignored](crate::ops::IGNORED). A second input `[batch,
/// tokens]` gives each token's position in its example; rows then hold several examples that do not attend to each
/// other. The targets of a [classifier](Gpt2Config::head) are labels and the [`Sequences`](crate::parts::Sequences) of
/// the only row. If the vocabulary is [split](Gpt2Config::vocabulary_parts), the layers `embed.0`, `embed.N` and so on, and
/// `head.0`, `head.N`, each have the table's rows starting at that number.
///
/// # Errors
/// A value of `config` that [`Gpt2Config::validate`] rejects.
pub fn chain(config: &Gpt2Config, source: Option<Gpt2Dir>) -> Result<Chain, ModelError> {
    pretrained::chain(config, source)
}

/// The layers of a chain, with trained adapters if there is an adaptation. The head has its own table if adapter
/// settings train it or the embedding in full.
fn layers(config: &Gpt2Config, adaptation: Option<Adaptation<'_>>) -> Result<AdaptedLayers, ModelError> {
    config.validate()?;
    let untied = adaptation.is_some_and(|with| unties(with.lora, with.adapting));
    let blocks = (0..config.n_layer).map(|index| (format!("h.{index}"), Gpt2Block::new(config, index)));
    let name = (name(config), description(config));
    let rows: Vec<Range<usize>> = rows(config.vocab_size, config.vocabulary_parts).collect();
    let embed: Vec<Embed> = rows.iter().map(|rows| Embed::new(config, rows)).collect();
    if config.head.is_classifier() {
        let norm = Norm::new(config.n_embd, config.layer_norm_epsilon);
        let score = ScoreHead::new(norm, config.n_embd, config.head.outputs(), config.initializer_range);
        let (embed, head) = (named("embed", &rows, embed), [("head".to_owned(), score)]);
        return Ok(transformer(name, embed, blocks, head, adaptation)?.classifier(&config.head));
    }
    let head = rows.iter().zip(&embed).map(|(rows, Embed { wte, .. })| {
        let own = untied.then(|| Table::new(rows.len(), config.n_embd));
        Head::new(config, rows, own.as_ref().unwrap_or(wte))
    });
    let head: Vec<Head> = head.collect();
    let (embed, head) = (named("embed", &rows, embed), named("head", &rows, head));
    Ok(transformer(name, embed, blocks, head, adaptation)?.language_model())
}

/// Everything besides names and shapes that costs and results depend on.
fn description(config: &Gpt2Config) -> String {
    format!(
        "dropout {} {} {}, epsilon {}, chunk {}, attention scale {} {}{}",
        config.embd_pdrop,
        config.resid_pdrop,
        config.attn_pdrop,
        config.layer_norm_epsilon,
        config.chunk_rows(),
        config.scale_attn_weights,
        config.scale_attn_by_inverse_layer_idx,
        config.head.description(),
    )
}

/// A name that distinguishes chains with equal parameter shapes but different computations.
fn name(config: &Gpt2Config) -> String {
    let Gpt2Config { n_layer, n_embd, n_head, activation_function, .. } = config;
    format!("gpt2-{n_layer}x{n_embd}-{n_head}-heads-{activation_function}")
}

/// The Hugging Face name of a parameter of a [`chain`]: `embed.wte.weight` becomes `transformer.wte.weight`, and
/// `h.0.ln_1.bias` becomes `transformer.h.0.ln_1.bias`. A head's own table is `lm_head.weight`, and a classifier's
/// parameters are `transformer.ln_f.weight` and so on, and `score.weight`.
pub fn hf_name(param: &str) -> String {
    let whole = || param.strip_prefix("embed.").or_else(|| param.strip_prefix("head.")).unwrap_or(param);
    let own = in_part(param).map_or_else(whole, |(_, own)| own);
    match own.strip_prefix("wte.") {
        Some(own) if param.starts_with("head.") => format!("lm_head.{own}"),
        None if is_score(param) => own.to_owned(),
        None if param.starts_with("head.norm.") => format!("transformer.ln_f.{}", &own["norm.".len()..]),
        _ => format!("transformer.{own}"),
    }
}

/// A parameter's first row in the token table if it is a slice of it, else 0.
fn first_row(param: &str) -> usize {
    in_part(param).filter(|(_, own)| own.starts_with("wte.")).map_or(0, |(row, _)| row)
}

#[cfg(test)]
mod testing {
    pub use crate::weights::testing::{Broken, ParamBuffers};

    use super::Gpt2Config;

    /// A model of a few hundred parameters.
    pub fn config() -> Gpt2Config {
        let (vocab_size, n_positions, n_embd, n_layer, n_head) = (11, 6, 4, 2, 2);
        let base = Gpt2Config::preset("bytes-tiny").unwrap();
        Gpt2Config { vocab_size, n_positions, n_embd, n_layer, n_head, ..base }
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
    use std::collections::BTreeSet;

    fn tiny() -> Gpt2Config {
        Gpt2Config::preset("bytes-tiny").unwrap()
    }

    #[test]
    fn parameters_are_named_and_counted_as_in_transformers() {
        let chain = chain(&tiny(), None).unwrap();
        let names: BTreeSet<String> =
            chain.buffers().iter().flat_map(|i| i.params.iter().map(|p| hf_name(&p.name))).collect();
        assert_eq!(names.len(), 2 + 12 * 4 + 2);
        for name in ["wte.weight", "wpe.weight", "h.3.attn.c_attn.weight", "h.0.mlp.c_proj.bias", "ln_f.bias"]
        {
            assert!(names.contains(&format!("transformer.{name}")), "{name}");
        }
        assert_eq!(chain.len(), 6);
        assert_eq!(chain.buffers()[0].layers, [0, 5], "the table is tied");
    }

    #[test]
    fn the_smallest_gpt2_has_as_many_parameters_as_published() {
        let chain = chain(&Gpt2Config::preset("gpt2").unwrap(), None).unwrap();
        assert_eq!(chain.parameters(), 124_439_808);
    }

    fn batch() -> Batch {
        let ids: Vec<i32> = (0..4 * 128).map(|i| (i * 31) % 256).collect();
        let ids = HostActivation::of(HostTensor::int(ids, [4, 128]));
        Batch { inputs: ids.clone(), targets: ids, items: 4, loss_targets: 4 * 127, units: 4 * 128 }
    }

    /// The same with several examples in each row.
    fn packed() -> Batch {
        let rows = [[40, 87, 1], [128, 0, 0], [32, 33, 63], [64, 32, 32]];
        let positions = rows.as_flattened().iter().flat_map(|n| 0..*n).collect();
        let mut batch = batch();
        batch.inputs.parts.push(HostTensor::int(positions, [4, 128]));
        batch
    }

    #[test]
    fn bits_of_packed_rows_depend_neither_on_cuts_nor_on_threads_with_dropout() {
        let (chain, batch) = (chain(&tiny(), None).unwrap(), packed());
        shards_agree(&chain, &batch, &[0, 1, 2, 3, 4, 5, 6]);
        shards_agree(&chain, &batch, &[0, 3, 6]);
        let one = with_threads(1, || backward(&chain, &batch));
        assert_eq!(one, with_threads(3, || backward(&chain, &batch)));
        assert_ne!(one.0, backward(&chain, &self::batch()).0, "positions matter");
    }

    #[test]
    fn packed_rows_are_computed_in_bf16_with_dropout() {
        bf16_agrees(|| chain(&tiny(), None).unwrap(), &packed(), &[0, 1, 3, 5, 6]);
    }

    #[test]
    fn every_activation_computes_in_bf16_with_dropout() {
        for activation in ["gelu_new", "gelu", "relu"] {
            let config = Gpt2Config { activation_function: activation.to_owned(), ..tiny() };
            bf16_agrees(|| chain(&config, None).unwrap(), &batch(), &[0, 1, 3, 5, 6]);
        }
        let config = Gpt2Config { embd_pdrop: 0.0, attn_pdrop: 0.0, resid_pdrop: 0.0, ..tiny() };
        bf16_agrees(|| chain(&config, None).unwrap(), &batch(), &[0, 2, 6]);
    }

    #[test]
    fn bits_depend_neither_on_cuts_nor_on_threads_with_dropout() {
        let (chain, batch) = (chain(&tiny(), None).unwrap(), batch());
        shards_agree(&chain, &batch, &[0, 1, 2, 3, 4, 5, 6]);
        shards_agree(&chain, &batch, &[0, 3, 6]);
        // Large enough for Burn's matrix products to use several threads.
        let one = with_threads(1, || backward(&chain, &batch));
        assert_eq!(one, with_threads(3, || backward(&chain, &batch)));
    }

    #[test]
    fn uninitialized_layers_know_what_they_need() {
        let chain = chain(&tiny(), None).unwrap();
        let bytes =
            |layer: usize, shape: &[usize]| chain.layers()[layer].layer().working_bytes(&[shape.to_vec()]);
        assert!(bytes(0, &[2, 128]).unwrap() > bytes(0, &[1, 128]).unwrap());
        assert!(bytes(1, &[2, 128, 64]).unwrap() > 16 * 2 * 128 * 64 * 4);
        assert!(bytes(5, &[2, 128, 64]).unwrap() >= 256 * 256 * 4, "a chunk of logits");
        assert_eq!(bytes(1, &[2, 128]), None);
    }

    #[test]
    fn first_values_are_distributed_as_in_transformers() {
        let config = tiny();
        let outward = 0.02 / (2.0 * config.n_layer as f64).sqrt();
        assert_deviations(&chain(&config, None).unwrap(), |param| match param.name.as_str() {
            name if name.ends_with("bias") => (0.0, 0.0),
            name if name.contains("ln_") => (1.0, 0.0),
            name if name.ends_with("c_proj.weight") => (outward, 0.1),
            _ => (0.02, 0.1),
        });
    }
}
