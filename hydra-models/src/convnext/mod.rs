//! ConvNeXt (Liu et al., "A ConvNet for the 2020s", 2022) of Transformers with a classifier, as a chain: the patch
//! embeddings, one layer per block and per downsampling between two stages, and the head with its loss.
//!
//! Modules and parameters are named as in Transformers' files, so [`hf_name`] only exchanges a prefix, and weights are
//! laid out as in the files.

mod architecture;
mod config;
mod layers;

pub use architecture::{ConvNext, ConvNextDir, ConvNextWriter};
pub use config::ConvNextConfig;
pub use layers::{ConvNextBlock, ConvNextEmbeddings, Depthwise, Downsampling};

use crate::ModelError;
use crate::objective::SingleLabel;
use crate::parts::{ImageHead, ImagePooling};
use crate::pretrained;
use hydra_core::{Chain, ChainBuilder};

/// The chain of a ConvNeXt: layers `embeddings`, `stages.0.layers.0` and so on, `stages.1.downsampling_layer`,
/// `stages.1.layers.0` and so on, and `head`. Initial weights come from `source`, or from the task's seed with the
/// standard deviations of Transformers.
///
/// Inputs are images `[items, channels, side, side]`, normalized by the model's preprocessor, and the targets their
/// classes `[items]`. Evaluations measure accuracy.
///
/// # Errors
/// A value of `config` that [`ConvNextConfig::validate`] rejects.
pub fn chain(config: &ConvNextConfig, source: Option<ConvNextDir>) -> Result<Chain, ModelError> {
    pretrained::chain(config, source)
}

/// The layers of a chain.
fn layers(config: &ConvNextConfig) -> Result<ChainBuilder, ModelError> {
    config.validate()?;
    let mut chain = Chain::builder(name(config))
        .description(description(config))
        .layer("embeddings", ConvNextEmbeddings::new(config));
    let mut number = 0;
    for (stage, depth) in config.depths.iter().enumerate() {
        if stage > 0 {
            chain =
                chain.layer(format!("stages.{stage}.downsampling_layer"), Downsampling::new(config, stage));
        }
        for block in 0..*depth {
            chain = chain
                .layer(format!("stages.{stage}.layers.{block}"), ConvNextBlock::new(config, stage, number));
            number += 1;
        }
    }
    let (width, classes) = (config.hidden_sizes[config.num_stages - 1], config.labels.count());
    let head = ImageHead::new(ImagePooling::ChannelsLast, width, classes);
    let head = head.normalized(config.layer_norm_eps, config.initializer_range);
    Ok(chain.layer("head", head).objective(SingleLabel { classes }))
}

/// Everything besides names and shapes that costs and results depend on.
fn description(config: &ConvNextConfig) -> String {
    format!(
        "drop path {}, epsilon {}, patches of {}",
        config.drop_path_rate, config.layer_norm_eps, config.patch_size
    )
}

/// A name that distinguishes chains with equal parameter shapes but different computations.
fn name(config: &ConvNextConfig) -> String {
    let join = |numbers: &[usize]| numbers.iter().map(usize::to_string).collect::<Vec<_>>().join("-");
    format!("convnext-{}x{}-{}", join(&config.depths), join(&config.hidden_sizes), config.hidden_act)
}

/// The name of a [`chain`]'s parameter in Hugging Face's files: `embeddings.layernorm.bias` becomes
/// `convnext.embeddings.layernorm.bias`, `stages.1.layers.0.pwconv1.bias` becomes
/// `convnext.encoder.stages.1.layers.0.pwconv1.bias`, `stages.1.downsampling_layer.norm.bias` and `.reduction.bias`
/// become `convnext.encoder.stages.1.downsampling_layer.0.bias` and `.1.bias`, `head.layernorm.bias` becomes
/// `convnext.layernorm.bias`, and `head.classifier.bias` becomes `classifier.bias`.
pub fn hf_name(param: &str) -> String {
    match param.split_once('.') {
        Some(("stages", _)) => {
            let numbered = [(".downsampling_layer.norm.", 0), (".downsampling_layer.reduction.", 1)];
            let param = numbered.iter().fold(param.to_owned(), |param, (own, number)| {
                param.replace(own, &format!(".downsampling_layer.{number}."))
            });
            format!("convnext.encoder.{param}")
        }
        Some(("head", own)) if own.starts_with("classifier.") => own.to_owned(),
        Some(("head", own)) => format!("convnext.{own}"),
        _ => format!("convnext.{param}"),
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
    use hydra_core::{Batch, Dataset, Pass};

    fn mini() -> ConvNextConfig {
        ConvNextConfig::preset("convnext-mini").unwrap()
    }

    fn images() -> Waves {
        Waves::new(1, 12, 3, 32, 4)
    }

    fn batch() -> Batch {
        images().batch(&[0, 1, 2, 3, 4, 7, 11]).unwrap()
    }

    /// Models that together cover all options.
    fn models() -> [ConvNextConfig; 3] {
        let dropping = ConvNextConfig { drop_path_rate: 0.4, hidden_act: "gelu_new".into(), ..mini() };
        let sizes = vec![5, 40, 70];
        let odd =
            ConvNextConfig { layer_scale_init_value: 0.0, hidden_sizes: sizes, patch_size: 3, ..mini() };
        [mini(), dropping, odd]
    }

    #[test]
    fn parameters_are_named_and_counted_as_in_transformers() {
        let tiny = chain(&ConvNextConfig::preset("convnext-tiny-224").unwrap(), None).unwrap();
        assert_eq!(tiny.parameters(), 28_589_128);
        let names: Vec<String> =
            tiny.buffers().iter().flat_map(|i| i.params.iter().map(|p| hf_name(&p.name))).collect();
        for name in [
            "convnext.embeddings.patch_embeddings.weight",
            "convnext.embeddings.layernorm.bias",
            "convnext.encoder.stages.3.downsampling_layer.0.weight",
            "convnext.encoder.stages.1.downsampling_layer.1.bias",
            "convnext.encoder.stages.2.layers.8.layer_scale_parameter",
            "convnext.encoder.stages.0.layers.0.dwconv.weight",
            "convnext.encoder.stages.0.layers.2.pwconv2.bias",
            "convnext.layernorm.weight",
            "classifier.bias",
        ] {
            assert!(names.iter().any(|found| found == name), "{name}");
        }
        assert_eq!(names.len(), 4 + 3 * 4 + 18 * 9 + 4);
        assert_eq!(tiny.len(), 1 + 3 + 18 + 1);
    }

    #[test]
    fn bits_depend_neither_on_cuts_nor_on_threads() {
        for config in models() {
            let (chain, batch) = (chain(&config, None).unwrap(), batch());
            shards_agree(&chain, &batch, &[0, 1, 2, 3, 4, 5, 6, 7, 8]);
            shards_agree(&chain, &batch, &[0, 3, 8]);
            let one = with_threads(1, || backward(&chain, &batch));
            assert_eq!(one, with_threads(3, || backward(&chain, &batch)));
            assert!(one.1.iter().all(|g| g.iter().any(|x| *x != 0.0)), "the loss reaches every parameter");
        }
    }

    #[test]
    fn networks_compute_in_bf16() {
        for config in models() {
            bf16_agrees(|| chain(&config, None).unwrap(), &batch(), &[0, 1, 3, 5, 8]);
        }
    }

    #[test]
    fn a_network_learns_its_images() {
        let config = ConvNextConfig { layer_scale_init_value: 1.0, ..mini() };
        let (first, last) = descend(&chain(&config, None).unwrap(), &images(), 150, 0.3);
        // Guessing among four classes costs 1.386.
        assert!(first > 2.0 && last < 1.3, "{first} to {last}");
    }

    #[test]
    fn a_dropped_path_leaves_an_item_as_it_was_and_evaluations_drop_none() {
        use burn::tensor::Device;
        use hydra_core::{Activation, AnyTensor, HostTensor, forward_range, promote_layers};
        let config = ConvNextConfig { drop_path_rate: 0.5, layer_scale_init_value: 1.0, ..mini() };
        let chain = chain(&config, None).unwrap();
        // The last block.
        let (index, places, channels) = (6, 8 * 8, 64);
        let mut values = vec![0.0; chain.buffers()[index].elements];
        chain.source().fill(&chain, index, 1, &mut values).unwrap();
        let buffer: bytes::Bytes = bytes::Bytes::copy_from_slice(bytemuck::cast_slice(&values));
        let plain = Device::flex();
        let layers = promote_layers(&chain, index..index + 1, &|_| buffer.clone().into(), &plain, false);
        let input: Vec<f32> = (0..32 * places * channels).map(|i| (i % 17) as f32 - 8.0).collect();
        let run = |pass: &Pass| {
            let x =
                HostTensor::float(input.clone(), [32, 8, 8, channels]).to_device(&plain.clone().autodiff());
            let y: AnyTensor = forward_range(&layers, index, Activation::of(x), pass).part(0);
            y.into_host().as_f32().to_vec()
        };
        let full = run(&Pass::evaluate(Activation::default()));
        let trained = run(&Pass::train(Pass::key_of(1, 2, 3), Activation::default()));
        let size = places * channels;
        let mut dropped = 0;
        for item in 0..32 {
            let range = item * size..(item + 1) * size;
            if trained[range.clone()] == input[range.clone()] {
                dropped += 1;
                continue;
            }
            for i in range {
                let (added, doubled) = (full[i] - input[i], trained[i] - input[i]);
                assert!((2.0 * added - doubled).abs() < 1e-4, "{added} {doubled}");
            }
        }
        assert!((8..24).contains(&dropped), "{dropped} of 32");
    }

    #[test]
    fn uninitialized_layers_know_what_they_need() {
        let chain = chain(&mini(), None).unwrap();
        let bytes =
            |layer: usize, shape: &[usize]| chain.layers()[layer].layer().working_bytes(&[shape.to_vec()]);
        assert!(bytes(0, &[2, 3, 32, 32]).unwrap() > 2 * 3 * 32 * 32 * 4);
        assert!(bytes(1, &[2, 16, 16, 16]).unwrap() > 16 * 2 * 16 * 16 * 16 * 4);
        assert!(bytes(2, &[2, 16, 16, 16]).unwrap() > 0 && bytes(7, &[2, 4, 4, 64]).unwrap() > 0);
        assert_eq!(bytes(1, &[2, 17]), None);
        let note = |layer: usize| chain.layers()[layer].layer().cost_key();
        assert!(note(5).is_some() && note(5) == note(6), "equal blocks are measured once");
    }

    #[test]
    fn first_values_are_distributed_as_in_transformers() {
        assert_deviations(&chain(&mini(), None).unwrap(), |param| match param.name.as_str() {
            name if name.ends_with("bias") => (0.0, 0.0),
            name if name.contains("norm") => (1.0, 0.0),
            name if name.ends_with("layer_scale_parameter") => (0.1, 0.01),
            _ => (0.02, 0.2),
        });
    }
}
