//! ResNet (He et al., "Deep Residual Learning for Image Recognition", 2016) of Transformers with a classifier, as a chain: the
//! first convolution with its pooling, one layer per block, and the head with its loss. Batch normalizations keep running
//! statistics, which follow the microbatches in training and normalize in evaluations.
//!
//! Modules and parameters are named as in Transformers' files, so [`hf_name`] only adds a prefix, and weights are laid out as in
//! the files.

mod architecture;
mod config;
mod layers;

pub use architecture::{ResNet, ResNetDir, ResNetWriter};
pub use config::ResNetConfig;
pub use layers::{ConvLayer, Convolution, Embedder, ResNetBlock};

use crate::ModelError;
use crate::objective::SingleLabel;
use crate::parts::{ImageHead, ImagePooling};
use crate::pretrained;
use hydra_core::{Chain, ChainBuilder};

/// The chain of a ResNet: layers `embedder`, `stages.0.layers.0` and so on, and `head`. Initial weights come from `source`, or
/// from the task's seed with the distributions of Transformers.
///
/// Inputs are images `[items, channels, side, side]`, normalized by the model's preprocessor, and the targets their
/// classes `[items]`. Evaluations measure accuracy.
///
/// # Errors
/// A value of `config` that [`ResNetConfig::validate`] rejects.
pub fn chain(config: &ResNetConfig, source: Option<ResNetDir>) -> Result<Chain, ModelError> {
    pretrained::chain(config, source)
}

/// The layers of a chain.
fn layers(config: &ResNetConfig) -> Result<ChainBuilder, ModelError> {
    config.validate()?;
    let mut chain = Chain::builder(name(config))
        .description(format!("images of {}", config.image_side()))
        .layer("embedder", Embedder::new(config));
    for (stage, depth) in config.depths.iter().enumerate() {
        for block in 0..*depth {
            chain =
                chain.layer(format!("stages.{stage}.layers.{block}"), ResNetBlock::new(config, stage, block));
        }
    }
    let (width, classes) = (config.hidden_sizes.last().copied().unwrap_or(1), config.labels.count());
    let head = ImageHead::new(ImagePooling::ChannelsFirst, width, classes);
    Ok(chain.layer("head", head).objective(SingleLabel { classes }))
}

/// A name that distinguishes chains with equal parameter shapes but different computations.
fn name(config: &ResNetConfig) -> String {
    let join = |numbers: &[usize]| numbers.iter().map(usize::to_string).collect::<Vec<_>>().join("-");
    let halves = |is: bool, place: &str| if is { format!("-{place}") } else { String::new() };
    format!(
        "resnet-{}-{}x{}-{}{}{}",
        config.layer_type,
        join(&config.depths),
        join(&config.hidden_sizes),
        config.hidden_act,
        halves(config.downsample_in_first_stage, "first"),
        halves(config.downsample_in_bottleneck, "early")
    )
}

/// The name of a [`chain`]'s parameter in Hugging Face's files: `embedder.embedder.convolution.weight` becomes
/// `resnet.embedder.embedder.convolution.weight`, `stages.1.layers.0.shortcut.convolution.weight` becomes
/// `resnet.encoder.stages.1.layers.0.shortcut.convolution.weight`, and `head.classifier.bias` becomes `classifier.1.bias`.
pub fn hf_name(param: &str) -> String {
    match param.split_once('.') {
        Some(("stages", _)) => format!("resnet.encoder.{param}"),
        Some(("head", own)) => own.replace("classifier.", "classifier.1."),
        _ => format!("resnet.{param}"),
    }
}

#[cfg(test)]
mod tests {
    mod writer;

    use super::*;
    use crate::cnn::Waves;
    use crate::synthetic::testing::{assert_deviations, backward, descend, shards_agree, with_threads};
    use hydra_core::{Batch, Dataset, FloatType};

    fn mini() -> ResNetConfig {
        ResNetConfig::preset("resnet-mini").unwrap()
    }

    fn images() -> Waves {
        Waves::new(1, 12, 3, 32, 4)
    }

    fn batch() -> Batch {
        images().batch(&[0, 1, 2, 3, 4, 7, 11]).unwrap()
    }

    /// Models that together cover all options.
    fn models() -> [ResNetConfig; 3] {
        let bottleneck = ResNetConfig { layer_type: "bottleneck".into(), ..mini() };
        let early = ResNetConfig {
            downsample_in_first_stage: true,
            downsample_in_bottleneck: true,
            hidden_act: "gelu".into(),
            ..bottleneck.clone()
        };
        [mini(), bottleneck, early]
    }

    #[test]
    fn parameters_are_named_and_counted_as_in_transformers() {
        let counts = [("resnet-18", 11_689_512), ("resnet-50", 25_557_032)];
        for (name, parameters) in counts {
            let chain = chain(&ResNetConfig::preset(name).unwrap(), None).unwrap();
            assert_eq!(chain.parameters(), parameters, "{name}, as torchvision counts them");
        }
        let large = chain(&ResNetConfig::preset("resnet-50").unwrap(), None).unwrap();
        let names: Vec<String> =
            large.buffers().iter().flat_map(|i| i.params.iter().map(|p| hf_name(&p.name))).collect();
        for name in [
            "resnet.embedder.embedder.convolution.weight",
            "resnet.embedder.embedder.normalization.num_batches_tracked",
            "resnet.encoder.stages.0.layers.0.shortcut.normalization.running_var",
            "resnet.encoder.stages.3.layers.2.layer.2.convolution.weight",
            "resnet.encoder.stages.2.layers.5.layer.1.normalization.running_mean",
            "classifier.1.bias",
        ] {
            assert!(names.iter().any(|found| found == name), "{name}");
        }
        assert_eq!((names.len(), large.len()), (53 * 6 + 2, 18));
    }

    #[test]
    fn bits_depend_neither_on_cuts_nor_on_threads() {
        for config in models() {
            let (chain, batch) = (chain(&config, None).unwrap(), batch());
            shards_agree(&chain, &batch, &[0, 1, 2, 3, 4, 5, 6, 7]);
            shards_agree(&chain, &batch, &[0, 3, 7]);
            let one = with_threads(1, || backward(&chain, &batch));
            assert_eq!(one, with_threads(3, || backward(&chain, &batch)));
            assert!(one.1.iter().all(|g| g.iter().any(|x| *x != 0.0)), "the loss reaches every parameter");
        }
    }

    /// The gradients of all parameters, without observations.
    fn gradients(chain: &Chain, all: Vec<Vec<f32>>) -> Vec<f32> {
        let params = chain.layers().iter().flat_map(|layer| &layer.params);
        let is_state = params.map(|at| chain.buffers()[at.buffer].params[at.slot].state.is_some());
        all.into_iter().zip(is_state).filter(|(_, is_state)| !is_state).flat_map(|(of, _)| of).collect()
    }

    #[test]
    fn networks_compute_in_bf16() {
        for config in models() {
            let (wide, batch) = (chain(&config, None).unwrap(), batch());
            let narrow = chain(&config, None).unwrap().with_float_type(FloatType::Bf16);
            shards_agree(&narrow, &batch, &[0, 1, 3, 5, 7]);
            let (expected, found) = (backward(&wide, &batch), with_threads(1, || backward(&narrow, &batch)));
            assert_eq!(found, with_threads(3, || backward(&narrow, &batch)));
            assert!((found.0 - expected.0).abs() < 0.01 * expected.0, "{} for {}", found.0, expected.0);
            let [a, b] = [expected.1, found.1].map(|of| gradients(&wide, of));
            let dot = |a: &[f32], b: &[f32]| -> f64 {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            // Normalizations by few values amplify rounding: PyTorch's gradients have cosines of 0.96 and 0.97.
            let cosine = dot(&a, &b) / (dot(&a, &a) * dot(&b, &b)).sqrt();
            assert!(cosine > 0.9, "{}: {cosine}", narrow.name());
        }
        let narrow = chain(&mini(), None).unwrap().with_float_type(FloatType::Bf16);
        let (first, last) = descend(&narrow, &images(), 60, 0.1);
        assert!(last < 0.5 * first, "{first} to {last}");
    }

    #[test]
    fn a_network_learns_its_images() {
        let (first, last) = descend(&chain(&mini(), None).unwrap(), &images(), 60, 0.1);
        assert!(last < 0.5 * first, "{first} to {last}");
    }

    #[test]
    fn uninitialized_layers_know_what_they_need() {
        let chain = chain(&mini(), None).unwrap();
        let bytes =
            |layer: usize, shape: &[usize]| chain.layers()[layer].layer().working_bytes(&[shape.to_vec()]);
        assert!(bytes(0, &[2, 3, 32, 32]).unwrap() > 2 * 8 * 16 * 16 * 4);
        assert!(bytes(1, &[2, 8, 8, 8]).unwrap() > 8 * 2 * 8 * 8 * 8 * 4);
        assert!(bytes(6, &[2, 32, 2, 2]).unwrap() > 0);
        assert_eq!(bytes(1, &[2, 17]), None);
        let key = |layer: usize| chain.layers()[layer].layer().cost_key();
        assert!(key(1).is_some() && key(3) == key(5) && key(2) != key(3));
    }

    #[test]
    fn first_values_are_distributed_as_in_transformers() {
        assert_deviations(&chain(&mini(), None).unwrap(), |param| {
            let expected = match (param.name.as_str(), &param.shape[..]) {
                (_, [outputs, _, side, _]) => (2.0 / (outputs * side * side) as f64).sqrt(),
                (name, _) if name.starts_with("head.") => 1.0 / (3.0f64 * 32.0).sqrt(),
                (name, _) if name.ends_with("running_var") || name.ends_with("weight") => 1.0,
                _ => 0.0,
            };
            (expected, if param.len < 50 { 0.5 } else { 0.2 })
        });
    }
}
