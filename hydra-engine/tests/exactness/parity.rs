//! Ten training steps compared with Hugging Face Transformers, spilled over shards. Reference models of GPT-2, of
//! ConvNeXt, of ResNet and of a vision transformer with adapters are in the repository, with the tests of `hydra-models`;
//! others, next to the repository, are used if present.

use crate::common::Settings;
use hydra_core::optimizer::Sgd;
use hydra_core::schedule::{Constant, Cosine, Linear};
use hydra_core::{
    Batch, Chain, Dataset, DatasetError, HostActivation, HostTensor, Length, OptimizerSpec, Schedule,
    TrainSpec,
};
use hydra_engine::{TrainTask, plain};
use hydra_models::convnext::{self, ConvNextDir};
use hydra_models::data::{BlockSpec, TokenBlocks};
use hydra_models::decoder::{self, DecoderDir};
use hydra_models::family;
use hydra_models::gpt2::{self, Gpt2Dir};
use hydra_models::lora::AdapterDir;
use hydra_models::resnet::{self, ResNetDir};
use hydra_models::vit::{self, VitDir};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn parity(name: &str) -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = [here.join("../hydra-models/tests/fixtures/parity"), here.join("../../shared/parity")];
    let found = folders.iter().map(|folder| folder.join(name)).find(|dir| dir.is_dir());
    if found.is_none() {
        assert!(
            !["tiny", "convnext_tiny", "resnet_basic", "resnet_bottleneck", "vit_lora_tiny"].contains(&name),
            "it is in the repository"
        );
        println!("skipped: {name} is not in the repository, and not in {}", folders[1].display());
    }
    found
}

/// Images and their classes, the batches of all steps in order.
struct Images {
    /// `[channels, height, width]`.
    shape: Vec<usize>,
    pixels: Vec<f32>,
    classes: Vec<i32>,
}

impl Dataset for Images {
    fn name(&self) -> &str {
        "images"
    }

    fn len(&self) -> usize {
        self.classes.len()
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        let (size, n) = (self.shape.iter().product::<usize>(), items.len());
        let pixels = items.iter().flat_map(|item| &self.pixels[item * size..(item + 1) * size]).copied();
        let inputs = HostTensor::float(pixels.collect(), [&[n], self.shape.as_slice()].concat());
        let targets = HostTensor::int(items.iter().map(|item| self.classes[*item]).collect(), [n]);
        let (inputs, targets) = (HostActivation::of(inputs), HostActivation::of(targets));
        Ok(Batch { inputs, targets, items: n, loss_targets: n, units: n })
    }
}

/// The batches of the reference, `[step, item, ..]`: token ids or images; and the number of values per item.
fn batches(dir: &Path) -> (Arc<dyn Dataset>, usize) {
    let bytes = std::fs::read(dir.join("inputs.safetensors")).expect("the inputs");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let words = |view: safetensors::tensor::TensorView<'_>| -> Vec<i64> {
        let words = view.data().chunks_exact(8);
        words.map(|b| i64::from_le_bytes(b.try_into().expect("eight bytes"))).collect()
    };
    if let Ok(pixels) = file.tensor("pixel_values") {
        let [_, items, shape @ ..] = pixels.shape() else { panic!("five dimensions") };
        let (items, shape) = (*items, shape.to_vec());
        let classes = words(file.tensor("labels").expect("labels")).into_iter().map(|class| class as i32);
        let pixels = pixels.data().chunks_exact(4);
        let pixels = pixels.map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect();
        return (Arc::new(Images { shape, pixels, classes: classes.collect() }), items);
    }
    let ids = file.tensor("input_ids").expect("input_ids");
    let [_, items, context] = *ids.shape() else { panic!("three dimensions") };
    let spec = BlockSpec { context, vocab_size: 257 };
    let ids = words(ids).into_iter().map(|id| u32::try_from(id).expect("an id"));
    let tokens: Vec<u32> = ids.collect();
    (Arc::new(TokenBlocks::new(tokens, spec).expect("blocks")), items)
}

fn spec(batch: usize, clip: Option<f64>, schedule: Schedule) -> TrainSpec {
    TrainSpec {
        schedule,
        clip,
        shuffle: false,
        length: Length::Steps(10),
        ..TrainSpec::new(OptimizerSpec::adamw(1e-3), batch)
    }
}

/// Asserts that ten steps spilled over three shards give the losses of a file, and the bits of the plain loop.
fn check(dir: &Path, file: &str, chain: Chain, clip: Option<f64>, schedule: Schedule) {
    let (data, batch) = batches(dir);
    let text = std::fs::read_to_string(dir.join(file)).expect("the reference");
    let reference: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let expected: Vec<f64> = serde_json::from_value(reference["losses"].clone()).expect("losses");
    let (chain, spec) = (Arc::new(chain), spec(batch, clip, schedule));
    let plain = plain::train(&chain, data.as_ref(), &spec).expect("the plain loop");
    let settings = Settings { cuts: Some(vec![1, 3]), ..Settings::default() };
    let report = settings.task(TrainTask::new("parity", chain, data, spec));
    assert_eq!(report.error, None);
    let worst = report.losses.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("{} {file}: losses differ by {worst:.2e} at most", dir.display());
    assert_eq!(report.losses.len(), expected.len());
    assert!(worst < 1e-5, "{file}: {:?} against {expected:?}", report.losses);
    assert_eq!(report.losses, plain.losses, "{file}");
    assert_eq!(report.weights_sha256.as_deref(), Some(plain.weights_sha256.as_str()), "{file}");
}

#[test]
fn ten_losses_of_every_variant_agree_with_hugging_face() {
    for name in ["tiny", "tiny_pert"] {
        let Some(dir) = parity(name) else { continue };
        let chain = || {
            let model = Gpt2Dir::open(&dir).expect("a checkpoint");
            gpt2::chain(&model.config().clone(), Some(model)).expect("a chain")
        };
        check(&dir, "train_const.json", chain(), None, Schedule::new(Constant, 0));
        check(&dir, "train_cosine.json", chain(), Some(1.0), Schedule::new(Cosine, 3));
        check(&dir, "train_linear.json", chain(), Some(1.0), Schedule::new(Linear, 3));
    }
}

#[test]
fn ten_losses_of_adapters_agree_with_peft() {
    for name in ["lora_tiny", "vit_lora_tiny"] {
        let Some(dir) = parity(name) else { continue };
        let base = family::load(dir.join("base").to_str().expect("a path")).expect("a checkpoint");
        let adapter = AdapterDir::open(dir.join("adapter")).expect("adapters");
        let chain = base.adapted(adapter.lora(), Some(adapter.clone())).expect("a chain");
        check(&dir, "train.json", chain, Some(1.0), Schedule::new(Cosine, 3));
    }
}

#[test]
fn ten_losses_of_every_decoder_agree_with_hugging_face() {
    for name in ["llama_tiny", "llama3_tiny", "mistral_tiny", "qwen2_tiny", "qwen3_tiny"] {
        let Some(dir) = parity(name) else { continue };
        let model = DecoderDir::open(&dir).expect("a checkpoint");
        let chain = decoder::chain(&model.config().clone(), Some(model)).expect("a chain");
        check(&dir, "train.json", chain, Some(1.0), Schedule::new(Cosine, 3));
    }
}

#[test]
fn ten_losses_of_a_convolutional_network_agree_with_hugging_face() {
    let Some(dir) = parity("convnext_tiny") else { return };
    let model = ConvNextDir::open(&dir).expect("a checkpoint");
    let chain = convnext::chain(&model.config().clone(), Some(model)).expect("a chain");
    check(&dir, "train.json", chain, Some(1.0), Schedule::new(Cosine, 3));
}

#[test]
fn ten_losses_of_a_vision_transformer_agree_with_hugging_face() {
    let Some(dir) = parity("vit_tiny") else { return };
    let model = VitDir::open(&dir).expect("a checkpoint");
    let chain = vit::chain(&model.config().clone(), Some(model)).expect("a chain");
    check(&dir, "train.json", chain, Some(1.0), Schedule::new(Cosine, 3));
}

/// The states of a trained chain by their Hugging Face names.
fn statistics(chain: &Chain, buffers: &[Vec<f32>]) -> BTreeMap<String, Vec<f32>> {
    let buffers = chain.buffers().iter().zip(buffers);
    let states = buffers.flat_map(|(layout, values)| {
        let states = layout.params.iter().filter(|param| param.state.is_some());
        states.map(move |param| (resnet::hf_name(&param.name), values[param.range()].to_vec()))
    });
    states.collect()
}

#[test]
fn twelve_losses_evaluations_and_statistics_of_residual_networks_agree_with_hugging_face() {
    let sgd = OptimizerSpec::from(Sgd { lr: 1e-2, momentum: 0.9, weight_decay: 0.0 });
    for name in ["resnet_basic", "resnet_bottleneck"] {
        let Some(dir) = parity(name) else { continue };
        let text = std::fs::read_to_string(dir.join("train.json")).expect("the reference");
        let reference: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        for (file, optimizer) in [("adamw", OptimizerSpec::adamw(1e-3)), ("sgd", sgd.clone())] {
            let model = ResNetDir::open(&dir).expect("a checkpoint");
            let chain = Arc::new(resnet::chain(&model.config().clone(), Some(model)).expect("a chain"));
            let (data, batch) = batches(&dir);
            let read = |key: &str| -> Vec<f64> {
                serde_json::from_value(reference[file][key].clone()).expect("numbers")
            };
            let (losses, evaluations) = (read("losses"), read("evaluations"));
            for (steps, evaluation) in [6, 12].into_iter().zip(evaluations) {
                let length = Length::Steps(steps);
                let spec = TrainSpec {
                    accumulate: 2,
                    optimizer: optimizer.clone(),
                    length,
                    ..spec(batch, None, Schedule::default())
                };
                let settings = Settings { cuts: Some(vec![1, 3]), devices: 2, ..Settings::default() };
                let task = TrainTask::new("parity", chain.clone(), data.clone(), spec.clone());
                let report = settings.task(task.test(data.clone()));
                assert_eq!(report.error, None);
                let worst = report.losses.iter().zip(&losses).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(report.losses.len() == steps && worst < 1e-5, "{:?} for {losses:?}", report.losses);
                let tested = report.test.expect("a test").loss;
                assert!((tested - evaluation).abs() < 1e-5, "{name} {file}: {tested} for {evaluation}");
                let plain = plain::train(&chain, data.as_ref(), &spec).expect("the plain loop");
                assert_eq!(report.weights_sha256, Some(plain.weights_sha256), "{name} {file}");
                if steps == 12 {
                    println!("{name} {file}: losses differ by {worst:.1e}");
                    assert_statistics(
                        &statistics(&chain, &plain.buffers),
                        &dir.join(format!("{file}.safetensors")),
                    );
                }
            }
        }
    }
}

/// Asserts that states equal those of a file.
fn assert_statistics(found: &BTreeMap<String, Vec<f32>>, file: &Path) {
    let bytes = std::fs::read(file).expect("statistics");
    let expected = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    assert_eq!(found.len(), expected.len());
    for (name, view) in expected.tensors() {
        let expected: Vec<f32> = bytemuck::pod_collect_to_vec(view.data());
        let error = found[&name].iter().zip(&expected).map(|(a, b)| (a - b).abs() / (1.0 + b.abs()));
        let error = error.fold(0.0, f32::max);
        assert!(
            found[&name].len() == expected.len() && error < 1e-5,
            "{name}: {:?} for {expected:?}",
            found[&name]
        );
    }
}
