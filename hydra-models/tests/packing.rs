//! Examples packed into one row give the same results as in padded rows of their own, and do not affect each other.

use burn::tensor::{Device, Tensor};
use bytes::Bytes;
use hydra_core::{
    Activation, AnyTensor, BackwardFrom, Batch, Chain, DeviceBytes, HostActivation, HostTensor, Pass,
    backward_range, promote_layers,
};
use hydra_models::data::{Content, Context, LossOn, Split, TokenForm, TokenSource};
use hydra_models::decoder::{self, DecoderConfig, LayerType};
use hydra_models::gpt2::{self, Gpt2Config};
use hydra_models::tokenizer::{Conventions, Tokenizer};
use std::fs;
use std::ops::Range;
use std::sync::Arc;

const CONTEXT: usize = 96;

/// A model without dropout and with larger initial weights.
struct Model {
    chain: Chain,
    buffers: Vec<Bytes>,
    logits: Box<Logits>,
}

type Logits = dyn Fn(&Model, Activation) -> Tensor<3>;

impl Model {
    fn new(chain: Chain, logits: impl Fn(&Self, Activation) -> Tensor<3> + 'static) -> Self {
        let buffer = |index: usize| {
            let mut out = vec![0.0; chain.buffers()[index].elements];
            chain.source().fill(&chain, index, 3, &mut out).unwrap();
            // Larger than usual initial weights, so that attention has a visible effect.
            out.iter_mut().filter(|x| x.abs() < 0.5).for_each(|x| *x *= 8.0);
            Bytes::copy_from_slice(bytemuck::cast_slice(&out))
        };
        let buffers = (0..chain.buffers().len()).map(buffer).collect();
        Self { chain, buffers, logits: Box::new(logits) }
    }

    fn buffer(&self, index: usize) -> DeviceBytes {
        self.buffers[index].clone().into()
    }

    /// The logits of each token of a batch.
    fn logits(&self, inputs: &[HostTensor]) -> Vec<Vec<f32>> {
        let device = Device::flex().autodiff();
        let logits = (self.logits)(self, inputs.iter().map(|part| part.to_device(&device)).collect());
        let vocabulary = logits.dims()[2];
        let logits = AnyTensor::from(logits).into_host();
        logits.as_f32().chunks(vocabulary).map(<[f32]>::to_vec).collect()
    }

    /// The loss, and the gradients of all parameters.
    fn backward(&self, batch: &Batch) -> (f32, Vec<Vec<f32>>) {
        let (plain, last) = (Device::flex(), self.chain.len());
        let device = plain.clone().autodiff();
        let layers = promote_layers(&self.chain, 0..last, &|i| self.buffer(i), &plain, true);
        let pass = Pass::train(Pass::key_of(1, 0, 0), batch.targets.to_device(&device));
        let (x, from) = (batch.inputs.to_device(&device), BackwardFrom::Loss { weight: 1.0 });
        let done = backward_range(layers, 0, x, from, &pass, false);
        let gradients = done.layers.into_iter().flatten();
        let values =
            |gradient: Option<AnyTensor>| gradient.expect("a gradient").into_host().as_f32().to_vec();
        (done.loss.expect("a loss"), gradients.map(values).collect())
    }
}

fn gpt2() -> Model {
    let preset = Gpt2Config::preset("bytes-tiny").unwrap();
    let config = Gpt2Config { embd_pdrop: 0.0, attn_pdrop: 0.0, resid_pdrop: 0.0, ..preset };
    let chain = gpt2::chain(&config, None).unwrap();
    Model::new(chain, move |model, inputs| {
        gpt2::logits(&config, &model.chain, &|i| model.buffer(i), inputs, &Device::flex())
    })
}

fn decoder(change: impl Fn(&mut DecoderConfig)) -> Model {
    let mut config = DecoderConfig::preset("bytes-llama-tiny").unwrap();
    change(&mut config);
    let chain = decoder::chain(&config, None).unwrap();
    Model::new(chain, move |model, inputs| {
        decoder::logits(&config, &model.chain, &|i| model.buffer(i), inputs, &Device::flex())
    })
}

/// A GPT-2, a Llama, and a Llama with a window that is shorter than some examples.
fn models() -> [Model; 3] {
    let slides = |config: &mut DecoderConfig| {
        config.sliding_window = Some(9);
        config.layer_types = Some(vec![LayerType::Sliding; config.num_hidden_layers]);
    };
    [gpt2(), decoder(|_| ()), decoder(slides)]
}

/// Prompts and completions of several lengths, packed or not, as a dataset.
fn dataset(pack: bool) -> Arc<dyn Content> {
    let dir = tempfile::tempdir().unwrap();
    let line = |i: usize| {
        let (prompt, completion) = ("what? ".repeat(i % 4 + 1), format!("{} so ", i * i).repeat(i % 5 + 1));
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\"}}\n")
    };
    fs::write(dir.path().join("train.jsonl"), (0..14).map(line).collect::<String>()).unwrap();
    let source = TokenSource::load(dir.path().to_str().unwrap(), &[]).unwrap();
    let conventions = Conventions::load(&Tokenizer::Bytes, None).unwrap();
    let form = TokenForm {
        tokenizer: &Tokenizer::Bytes,
        conventions: &conventions,
        context: Context::uniform(CONTEXT),
        vocabulary: 256,
        loss_on: LossOn::Completions,
        pack,
    };
    source.splits(&[Split::Train], &form).unwrap().splits.remove(0)
}

/// All of them in one batch.
fn batch(pack: bool) -> Batch {
    let data = dataset(pack);
    data.batch(&(0..data.len()).collect::<Vec<_>>()).unwrap()
}

/// A batch with one row per example, padded to the longest example, as by trainers without packing.
fn filled_up(batch: &Batch) -> Batch {
    let rows = examples(batch);
    let filled = |part: &HostTensor, filler: i32| {
        let row = |places: &Range<usize>| {
            let (own, more) = (&part.as_i32()[places.clone()], CONTEXT - places.len());
            own.iter().copied().chain(std::iter::repeat_n(filler, more)).collect::<Vec<_>>()
        };
        HostTensor::int(rows.iter().flat_map(row).collect(), [rows.len(), CONTEXT])
    };
    let (inputs, targets) = (filled(&batch.inputs.parts[0], 0), filled(&batch.targets.parts[0], -1));
    Batch { inputs: HostActivation::of(inputs), targets: HostActivation::of(targets), ..batch.clone() }
}

/// The positions of each example's tokens.
fn examples(batch: &Batch) -> Vec<Range<usize>> {
    let positions = batch.inputs.parts[1].as_i32();
    let starts: Vec<usize> = (0..positions.len()).filter(|at| positions[*at] == 0).collect();
    let ends = starts[1..].iter().copied().chain([positions.len()]);
    starts.iter().copied().zip(ends).map(|(start, end)| start..end).collect()
}

fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = found.iter().zip(expected).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let norm: f64 = expected.iter().map(|&b| square(f64::from(b))).sum();
    (error / norm.max(1e-30)).sqrt()
}

#[test]
fn every_token_of_every_example_is_there_once() {
    let (alone, packed) = (batch(false), batch(true));
    let items = [&alone, &packed].map(|batch| batch.items);
    assert!(items[1] * 2 < items[0], "{items:?}");
    assert_eq!((packed.loss_targets, packed.units), (alone.loss_targets, alone.units));
    let all = |batch: &Batch| {
        let parts = [&batch.inputs.parts[0], &batch.targets.parts[0]].map(HostTensor::as_i32);
        let mut all: Vec<_> =
            examples(batch).into_iter().map(|at| parts.map(|part| part[at.clone()].to_vec())).collect();
        all.sort_unstable();
        all
    };
    assert_eq!(all(&packed), all(&alone));
    assert_eq!(alone.units, alone.inputs.parts[0].as_i32().len(), "nothing is filled up");
}

#[test]
fn logits_are_those_of_each_example_alone() {
    let packed = batch(true);
    assert!(packed.units > 128, "more tokens than these models have positions");
    for model in models() {
        let logits = model.logits(&packed.inputs.parts);
        for places in examples(&packed) {
            let ids = packed.inputs.parts[0].as_i32()[places.clone()].to_vec();
            let alone = model.logits(&[HostTensor::int(ids, [1, places.len()])]);
            let error = distance(&logits[places.clone()].concat(), &alone.concat());
            assert!(error < 3e-6, "{}, {places:?}: {error}", model.chain.name());
        }
    }
}

#[test]
fn loss_and_gradients_are_those_of_examples_in_rows_of_their_own() {
    let alone = batch(false);
    let filled = filled_up(&alone);
    assert!(filled.inputs.parts[0].as_i32().len() > 2 * alone.units);
    for model in models() {
        let (expected, slow) = model.backward(&filled);
        for batch in [&alone, &batch(true)] {
            let (loss, found) = model.backward(batch);
            let name = model.chain.name();
            assert!((loss - expected).abs() < 1e-6 * expected, "{name}: {loss} and {expected}");
            for (i, (found, slow)) in found.iter().zip(&slow).enumerate() {
                let error = distance(found, slow);
                assert!(error < 1e-5, "{name}: {error} for parameter {i}");
            }
        }
    }
}

#[test]
fn an_example_has_the_same_bits_whatever_lies_beside_it() {
    let packed = batch(true);
    for model in models() {
        let before = model.logits(&packed.inputs.parts);
        for changed in examples(&packed).into_iter().step_by(3) {
            let mut ids = packed.inputs.parts[0].as_i32().to_vec();
            ids[changed.clone()].iter_mut().for_each(|id| *id = (*id + 101) % 256);
            let ids = HostTensor::int(ids, packed.inputs.parts[0].shape.clone());
            let after = model.logits(&[ids, packed.inputs.parts[1].clone()]);
            for (place, (before, after)) in before.iter().zip(&after).enumerate() {
                assert_eq!(before != after, changed.contains(&place), "{place} beside {changed:?}");
            }
        }
    }
}
