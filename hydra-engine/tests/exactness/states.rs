//! Running statistics: the observations of each microbatch are applied once, in order, for all cuts, devices, replicas, stores
//! and interruptions, and evaluations read the result.

use crate::common::{PLENTY, Settings, StopAfter, adamw, spirals};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, activation};
use hydra_core::{
    Activation, ByteSize, Chain, ChainBuilder, FloatType, Forward, Length, Pass, Sampler, TrainSpec,
    WeightError, WeightSource, gather,
};
use hydra_engine::{Checkpoint, EngineError, EvaluationTask, StopFlag, TaskReport, TrainTask, plain};
use hydra_models::BatchNorm;
use hydra_models::mlp::{Classifier, Dense};
use hydra_models::objective::SingleLabel;
use proptest::prelude::*;
use std::sync::Arc;
use tempfile::TempDir;

/// A batch normalization of the input, by itself.
#[derive(Module, Debug)]
struct Normed {
    norm: BatchNorm,
}

impl Forward for Normed {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        Activation::of(self.norm.forward(x.into_float::<2>(), pass))
    }
}

/// A linear layer, a batch normalization and a ReLU.
#[derive(Module, Debug)]
struct Hidden {
    linear: Linear,
    norm: BatchNorm,
}

impl Hidden {
    fn new(inputs: usize, outputs: usize) -> Self {
        Self { linear: linear(inputs, outputs), norm: BatchNorm::with(outputs, 1e-3, 0.3) }
    }
}

impl Forward for Hidden {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let x = self.linear.forward(x.into_float::<2>());
        Activation::of(activation::relu(self.norm.forward(x, pass)))
    }
}

fn linear(inputs: usize, outputs: usize) -> Linear {
    LinearConfig::new(inputs, outputs).init(&Device::flex())
}

fn perceptron() -> Chain {
    layers().build().expect("a chain")
}

fn layers() -> ChainBuilder {
    let chain = Chain::builder("normed").layer("in", Normed { norm: BatchNorm::new(2) });
    let chain = chain.layer("a", Hidden::new(2, 16)).layer("b", Hidden::new(16, 16));
    let chain = chain.layer("out", Classifier { linear: linear(16, 3) });
    chain.objective(SingleLabel { classes: 3 })
}

fn chain() -> Arc<Chain> {
    Arc::new(perceptron())
}

/// Sixty points in batches of 13: the last minibatch of an epoch has eight.
fn spec(accumulate: usize) -> TrainSpec {
    TrainSpec { length: Length::Steps(7), accumulate, ..adamw(13) }
}

fn task(chain: &Arc<Chain>, spec: &TrainSpec) -> TrainTask {
    TrainTask::new("task", chain.clone(), spirals(), spec.clone())
}

/// The buffer of state of a layer of the trained chain, without gaps, by parameter.
fn states(chain: &Chain, buffers: &[Vec<f32>], layer: &str) -> Vec<Vec<f32>> {
    let is_of = |name: &str| name.split('.').next() == Some(layer);
    let params = chain.buffers().iter().zip(buffers).flat_map(|(layout, values)| {
        let states = layout.params.iter().filter(move |param| param.state.is_some() && is_of(&param.name));
        states.map(|param| values[param.range()].to_vec())
    });
    params.collect()
}

fn agrees(chain: &Arc<Chain>, settings: &Settings, spec: &TrainSpec) {
    let plain = plain::train(chain, spirals().as_ref(), spec).expect("the plain loop");
    let report = settings.task(task(chain, spec));
    assert_eq!((report.error, &report.losses), (None, &plain.losses), "{settings:?}");
    assert_eq!(report.weights_sha256, Some(plain.weights_sha256), "{settings:?}");
}

#[test]
fn the_statistics_of_the_input_follow_its_microbatches_as_in_pytorch() {
    let (chain, data) = (chain(), spirals());
    for (accumulate, clip) in [(1, Some(0.7)), (3, Some(0.7)), (3, None)] {
        let spec = TrainSpec { clip, ..spec(accumulate) };
        let trained = plain::train(&chain, data.as_ref(), &spec).expect("the plain loop");
        let mut sampler = Sampler::new(data.len(), spec.batch, spec.seed, spec.shuffle);
        let (mut mean, mut variance, mut count) = ([0.0f64; 2], [1.0f64; 2], 0.0f32);
        for step in 0..7 {
            for items in spec.microbatches(&sampler.items(step)) {
                let batch = gather(data.as_ref(), items).expect("points");
                let values = batch.inputs.parts[0].as_f32();
                let n = items.len() as f64;
                for column in 0..2 {
                    let of: Vec<f64> = values.iter().skip(column).step_by(2).map(|x| f64::from(*x)).collect();
                    let center = of.iter().sum::<f64>() / n;
                    let squares: f64 = of.iter().map(|x| (x - center).powi(2)).sum();
                    mean[column] = 0.1 * center + 0.9 * mean[column];
                    variance[column] = 0.1 * squares / (n - 1.0) + 0.9 * variance[column];
                }
                count += 1.0;
            }
        }
        let found = states(&chain, &trained.buffers, "in");
        for (found, expected) in found.iter().zip([mean, variance]) {
            for (found, expected) in found.iter().zip(expected) {
                assert!((f64::from(*found) - expected).abs() < 1e-6, "{found} for {expected}");
            }
        }
        assert_eq!(found[2], [count], "minibatches and their microbatches");
    }
}

#[test]
fn shards_equal_the_plain_loop() {
    let chain = chain();
    for accumulate in [1, 3] {
        for clip in [None, Some(0.7)] {
            let spec = TrainSpec { clip, ..spec(accumulate) };
            for settings in [
                Settings::default(),
                Settings { cuts: Some(vec![1, 2, 3]), ..Settings::default() },
                Settings { cuts: Some(vec![2]), prefetch: false, threads: 2, ..Settings::default() },
                Settings { cuts: Some(vec![1, 3]), devices: 2, others: 1, ..Settings::default() },
                Settings { cuts: Some(vec![1, 2]), zero_copy: true, ..Settings::default() },
            ] {
                agrees(&chain, &settings, &spec);
            }
        }
    }
    for float in [FloatType::Bf16, FloatType::F16] {
        let chain = Arc::new(perceptron().with_float_type(float));
        agrees(&chain, &Settings { cuts: Some(vec![1, 2, 3]), ..Settings::default() }, &spec(3));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
    #[test]
    fn no_number_of_devices_changes_a_bit(
        devices in 1usize..=3,
        cuts in prop::collection::btree_set(1usize..4, 0..=3),
        microbatch_group in prop::option::of(1usize..=4),
        replicas in prop::option::of(1usize..=3),
        (zero_copy, cache) in any::<(bool, bool)>(),
    ) {
        let cuts = Some(cuts.into_iter().collect());
        agrees(&chain(), &Settings { devices, cuts, microbatch_group, replicas, zero_copy, cache, ..Settings::default() }, &spec(4));
    }
}

#[test]
fn little_host_memory_and_the_disk_change_no_bit() {
    let chain = chain();
    for spec in [spec(3), TrainSpec { clip: None, ..spec(1) }] {
        let plain = plain::train(&chain, spirals().as_ref(), &spec).expect("the plain loop");
        let settings = Settings { cuts: Some(vec![1, 2]), ..Settings::default() };
        let cut = || task(&chain, &spec).cuts(vec![1, 2]);
        let dir = TempDir::new().expect("a directory");
        let run = |host: u64| {
            let run = settings.orchestrator().host_memory(ByteSize(host));
            let mut run = run.disk(dir.path().to_owned(), PLENTY);
            run.submit(cut()).expect("a task");
            run.admit()
        };
        let least = match run(1) {
            Err(EngineError::HostMemory { needed, .. }) => needed,
            other => panic!("expected too little host memory, found {other:?}"),
        };
        let report = run(least).expect("it fits").start().expect("a run");
        assert!(report.tasks[0].plan.disk_bytes > 0 && report.host_peak_bytes <= least, "{report:?}");
        assert_eq!(report.tasks[0].weights_sha256.as_ref(), Some(&plain.weights_sha256));
    }
}

/// The parts of a report that must be equal for a resumed run.
fn outcome(report: &TaskReport) -> impl PartialEq + std::fmt::Debug + use<> {
    let validations = &report.validations;
    let evaluations = (validations.evaluations.clone(), report.validation.clone(), report.test.clone());
    (report.error.clone(), report.losses.clone(), evaluations, report.weights_sha256.clone())
}

#[test]
fn a_run_that_was_stopped_goes_on_and_the_best_statistics_are_put_back() {
    let (chain, dir) = (chain(), TempDir::new().expect("a directory"));
    let spec = TrainSpec { eval_every: Some(2), ..spec(3) };
    let whole = || task(&chain, &spec).validation(spirals()).test(spirals());
    let expected = Settings::default().task(whole());
    let cut = Settings { cuts: Some(vec![1, 2, 3]), devices: 2, ..Settings::default() };
    assert_eq!(outcome(&cut.task(whole())), outcome(&expected));
    let best = expected.validations.best_step.expect("evaluations");
    let short = TrainSpec { length: Length::Steps(best), eval_every: None, ..spec.clone() };
    let plain = plain::train(&chain, spirals().as_ref(), &short).expect("the plain loop");
    assert_eq!(expected.weights_sha256.as_ref(), Some(&plain.weights_sha256), "those of step {best}");
    for minibatches in [1, 3, 5] {
        let file = dir.path().join(format!("{minibatches}.safetensors"));
        let flag = StopFlag::default();
        let run = cut.orchestrator().stop_flag(flag.clone());
        let mut run = run.observer(Box::new(StopAfter(flag, minibatches)));
        run.submit(whole().checkpoint_to(file.clone())).expect("a task");
        run.run().expect("a run");
        let checkpoint = Checkpoint::open(&file).expect("a checkpoint");
        assert!(checkpoint.step() < 7, "{}", checkpoint.step());
        let report = Settings::default().task(whole().resume_from(checkpoint));
        assert_eq!(outcome(&report), outcome(&expected), "after {minibatches}");
    }
}

/// The values of a trained model.
struct Trained(Vec<Vec<f32>>);

impl WeightSource for Trained {
    fn fill(&self, _: &Chain, buffer: usize, _: u64, out: &mut [f32]) -> Result<(), WeightError> {
        out.copy_from_slice(&self.0[buffer]);
        Ok(())
    }
}

#[test]
fn evaluations_read_the_statistics_whatever_their_batches_are() {
    let (chain, spec) = (chain(), spec(2));
    let plain = plain::train(&chain, spirals().as_ref(), &spec).expect("the plain loop");
    let tested = Settings::default().task(task(&chain, &spec).test(spirals())).test.expect("a test").loss;
    let evaluated = |buffers: Vec<Vec<f32>>, batch: usize| {
        let run = Settings::default().orchestrator();
        let chain = layers().weights(Trained(buffers)).build().expect("a chain").evaluated_only();
        let chain = Arc::new(chain);
        run.evaluate(EvaluationTask { chain, data: spirals(), batch, seed: 0 }).expect("an evaluation").loss
    };
    let trained = |batch| evaluated(plain.buffers.clone(), batch);
    assert_eq!(trained(7), tested, "the batches of the test");
    for batch in [1, 60] {
        let found = trained(batch);
        assert!((found - tested).abs() < 1e-6, "{found} for {tested}: an item has no statistics of its own");
    }
    let mut first = plain.buffers.clone();
    for (layout, values) in chain.buffers().iter().zip(&mut first).filter(|(layout, _)| layout.is_state()) {
        layout.params.iter().for_each(|param| values[param.range()].fill(1.0));
    }
    assert!((evaluated(first, 7) - tested).abs() > 1e-3, "other statistics give another loss");
}

#[test]
fn frozen_statistics_are_kept_and_read() {
    let (spec, data) = (spec(3), spirals());
    let head = perceptron().training_only(&["b", "out"]).expect("layers");
    let frozen = Chain::builder("normed").frozen("in", Normed { norm: BatchNorm::new(2) });
    let burn = Normed { norm: BatchNorm::new(2) }.no_grad();
    let burn = Chain::builder("normed").layer("in", burn);
    let rest = |chain: ChainBuilder| {
        let chain = chain.layer("a", Hidden::new(2, 16)).layer("b", Hidden::new(16, 16));
        let chain = chain.layer("out", Classifier { linear: linear(16, 3) });
        chain.objective(SingleLabel { classes: 3 }).build().expect("a chain")
    };
    let plain_input = Chain::builder("plain").layer("in", Dense { linear: linear(2, 2) });
    assert!(rest(plain_input).first_trained() == 0);
    for (chain, first) in [(head, 2), (rest(frozen), 1), (rest(burn), 1)] {
        let chain = Arc::new(chain);
        assert_eq!(chain.first_trained(), first);
        let trained = plain::train(&chain, data.as_ref(), &spec).expect("the plain loop");
        let [mean, variance, count] = &states(&chain, &trained.buffers, "in")[..] else {
            panic!("statistics")
        };
        assert_eq!((&mean[..], &variance[..], &count[..]), (&[0.0; 2][..], &[1.0; 2][..], &[0.0][..]));
        assert_eq!(states(&chain, &trained.buffers, "b")[2], [21.0], "those of a trained layer move");
        for cuts in [vec![], vec![1, 2, 3]] {
            agrees(&chain, &Settings { cuts: Some(cuts), devices: 2, ..Settings::default() }, &spec);
        }
    }
}

#[test]
fn a_frozen_normalization_is_the_identity_where_its_statistics_are_those_of_no_batch() {
    // Means of zero and variances of one, with a weight of one: inputs are scaled by 1 / sqrt(1 + epsilon).
    let x = hydra_core::HostTensor::float(vec![3.0, -1.0, 0.5, 2.0], [2, 2]);
    let device = Device::flex();
    let chain = perceptron().training_only(&["out"]).expect("a layer");
    let buffer = |buffer: usize| {
        let mut values = vec![0.0; chain.buffers()[buffer].elements];
        chain.source().fill(&chain, buffer, 1, &mut values).expect("values");
        let elements = values.len();
        hydra_core::DeviceBytes::from(hydra_core::HostTensor::float(values, [elements]).bytes)
    };
    let layers = hydra_core::promote_layers(&chain, 0..1, &buffer, &device, true);
    let passes =
        [Pass::train(Pass::key_of(1, 2, 3), Activation::default()), Pass::evaluate(Activation::default())];
    for pass in passes {
        let input = Activation::of(x.to_device(&device.clone().autodiff()));
        let y = hydra_core::forward_range(&layers, 0, input, &pass).part(0).into_host();
        let scaled: Vec<f32> = x.as_f32().iter().map(|x| x / 1.00001f32.sqrt()).collect();
        for (found, expected) in y.as_f32().iter().zip(&scaled) {
            assert!((found - expected).abs() < 1e-6, "{found} for {expected}");
        }
    }
}
