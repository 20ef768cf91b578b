//! Frozen buffers that are stored in 16 bits alone: the same bits as with `f32` master weights, in every tier.

use crate::common::Classifier;
use crate::common::{Settings, StopAfter, adamw, spirals};
use burn::nn::LinearConfig;
use burn::tensor::Device;
use hydra_core::{
    ByteSize, Chain, ChainBuilder, Encoding, FloatType, Length, SeededInit, TrainSpec, WeightError,
    WeightSource,
};
use hydra_engine::{
    Checkpoint, CheckpointEvery, Orchestrator, RunReport, StopFlag, TaskState, TrainTask, plain,
};
use hydra_models::mlp::Dense;
use std::sync::Arc;
use tempfile::TempDir;

const WIDTH: usize = 96;

/// Seeded values rounded to a type, which the source states or not.
#[derive(Clone, Copy)]
struct Rounded {
    values: FloatType,
    stated: FloatType,
}

impl WeightSource for Rounded {
    fn fill(&self, chain: &Chain, buffer: usize, _: u64, out: &mut [f32]) -> Result<(), WeightError> {
        SeededInit.fill(chain, buffer, 77, out)?;
        if self.values == FloatType::F32 {
            // No 16-bit type has them.
            out.iter_mut().for_each(|x| *x *= 1.000_1);
        } else {
            let mut bits = vec![0; out.len()];
            self.values.narrow(out, &mut bits);
            self.values.widen(&bits, out);
        }
        Ok(())
    }

    fn origin(&self, _: &Chain, _: usize, _: u64) -> Option<String> {
        Some("a file".to_owned())
    }

    fn float_type(&self, _: &Chain, _: usize) -> FloatType {
        self.stated
    }
}

/// A perceptron whose last two layers are trained.
fn chain(values: FloatType, stated: FloatType) -> Arc<Chain> {
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Device::flex());
    let dense = |inputs, outputs| Dense { linear: linear(inputs, outputs) };
    let builder = Chain::builder("wide").layer("in", dense(2, WIDTH)).weights(Rounded { values, stated });
    let builder = (0..4).fold(builder, |builder, k| builder.layer(format!("b.{k}"), dense(WIDTH, WIDTH)));
    let chain = builder.layer("head", Classifier { linear: linear(WIDTH, 3) }).metrics(["accuracy"]).build();
    let chain = chain.and_then(|chain| chain.training_only(&["b.3", "head"])).expect("a chain");
    Arc::new(chain.with_float_type(FloatType::Bf16))
}

fn narrow() -> Arc<Chain> {
    chain(FloatType::Bf16, FloatType::Bf16)
}

fn wide() -> Arc<Chain> {
    chain(FloatType::Bf16, FloatType::F32)
}

fn spec(seed: u64) -> TrainSpec {
    TrainSpec { length: Length::Steps(6), accumulate: 2, seed, ..adamw(8) }
}

fn task(name: &str, chain: &Arc<Chain>, seed: u64) -> TrainTask {
    TrainTask::new(name, chain.clone(), spirals(), spec(seed))
}

fn hash(report: &RunReport, task: usize) -> &str {
    let task = &report.tasks[task];
    assert_eq!((task.state, &task.error), (TaskState::Done, &None), "{}", task.name);
    task.weights_sha256.as_deref().expect("a hash")
}

fn host_bytes(report: &RunReport) -> u64 {
    assert!(report.host_peak_bytes <= report.host_admitted_bytes);
    report.host_peak_bytes
}

#[test]
fn frozen_buffers_in_16_bits_train_to_the_same_bits_in_less_memory() {
    let (narrow, wide) = (narrow(), wide());
    let frozen: Vec<_> = narrow.buffers().iter().filter(|buffer| !buffer.trained).collect();
    assert!(frozen.iter().all(|buffer| buffer.encoding == Encoding::Narrow) && frozen.len() == 4);
    let saved: u64 = frozen.iter().map(|buffer| buffer.moment_bytes()).sum();
    let masters = |chain: &Chain| chain.buffers().iter().map(|buffer| buffer.master_bytes()).sum::<u64>();
    assert_eq!(masters(&narrow) + saved, masters(&wide));
    let plain = plain::train(&wide, spirals().as_ref(), &spec(1)).expect("the plain loop").weights_sha256;
    for cuts in [None, Some(vec![2, 4]), Some((1..6).collect())] {
        for devices in [1, 2] {
            let settings = Settings { cuts: cuts.clone(), devices, ..Settings::default() };
            let [ours, theirs] = [&narrow, &wide].map(|chain| settings.run(task("a", chain, 1)));
            assert_eq!(hash(&ours, 0), plain, "{settings:?}");
            assert_eq!(hash(&theirs, 0), plain, "{settings:?}");
            assert_eq!(ours.tasks[0].losses, theirs.tasks[0].losses);
            assert!(host_bytes(&ours) < host_bytes(&theirs), "{} bytes of {saved} saved", host_bytes(&ours));
        }
    }
}

#[test]
fn they_are_shared_and_live_on_the_disk() {
    let dir = TempDir::new().expect("a directory");
    let plain =
        |seed| plain::train(&wide(), spirals().as_ref(), &spec(seed)).expect("the plain loop").weights_sha256;
    let settings = Settings { cuts: Some(vec![2, 4]), ..Settings::default() };
    let submitted = |mut run: Orchestrator| {
        for seed in 1..4 {
            let task = task(&format!("{seed}"), &narrow(), seed).cuts(vec![2, 4]);
            run.submit(task).expect("a task");
        }
        run
    };
    let whole = submitted(settings.orchestrator()).run().expect("a run");
    let least = whole.host_admitted_bytes / 2;
    let mut on_disk = 0;
    for host in [whole.host_admitted_bytes, least] {
        let run = settings
            .orchestrator()
            .host_memory(ByteSize(host))
            .disk(dir.path().to_owned(), ByteSize::mib(64));
        let report = submitted(run).run().expect("a run");
        (0..3).for_each(|task| assert_eq!(hash(&report, task), plain(task as u64 + 1), "{host} bytes"));
        host_bytes(&report);
        on_disk += report.tasks.iter().map(|task| task.plan.disk_bytes).sum::<u64>();
    }
    assert!(on_disk > 0, "nothing was on the disk");
}

#[test]
fn a_run_that_is_stopped_resumes_to_the_same_bits_with_either_encoding() {
    let plain = plain::train(&wide(), spirals().as_ref(), &spec(1)).expect("the plain loop").weights_sha256;
    for (before, after) in [(narrow(), narrow()), (narrow(), wide()), (wide(), narrow())] {
        let dir = TempDir::new().expect("a directory");
        let file = dir.path().join("checkpoint.safetensors");
        let settings = Settings { cuts: Some(vec![2, 4]), ..Settings::default() };
        let of = |chain: &Arc<Chain>| task("a", chain, 1).cuts(vec![2, 4]).checkpoint_to(file.clone());
        let stop = StopFlag::new();
        let run = settings.orchestrator().checkpoint_every(CheckpointEvery::Minibatches(1));
        let mut run = run.stop_flag(stop.clone()).observer(Box::new(StopAfter(stop, 2)));
        run.submit(of(&before)).expect("a task");
        assert_eq!(run.run().expect("a run").tasks[0].state, TaskState::Stopped);
        let checkpoint = Checkpoint::open(&file).expect("a checkpoint");
        let mut run = settings.orchestrator();
        run.submit(of(&after).resume_from(checkpoint)).expect("a task");
        let report = run.run().expect("a run");
        assert!(report.tasks[0].checkpoints.resumed_at.is_some_and(|step| step > 0));
        assert_eq!(hash(&report, 0), plain);
    }
}

#[test]
fn drawn_values_of_a_frozen_buffer_are_rounded_to_its_type() {
    let of = |trained: &[&str]| {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Device::flex());
        let builder = Chain::builder("drawn").layer("in", Dense { linear: linear(2, WIDTH) });
        let chain =
            builder.layer("head", Classifier { linear: linear(WIDTH, 3) }).metrics(["accuracy"]).build();
        let chain = chain.and_then(|chain| chain.training_only(trained)).expect("a chain");
        Arc::new(chain.with_float_type(FloatType::Bf16))
    };
    let (chain, all) = (of(&["head"]), of(&["in", "head"]));
    assert_eq!(chain.buffers()[0].encoding, Encoding::Narrow);
    assert_eq!(chain.buffers()[1].encoding, Encoding::Masters);
    assert!(all.buffers().iter().all(|buffer| buffer.encoding == Encoding::Masters), "what is trained");
    let values = |chain: &Chain| {
        let mut values = vec![0.0; chain.buffers()[0].elements];
        SeededInit.fill(chain, 0, 3, &mut values).expect("values");
        values
    };
    let (rounded, drawn) = (values(&chain), values(&all));
    let near = |(rounded, drawn): (&f32, &f32)| (rounded - drawn).abs() <= drawn.abs() / 256.0;
    assert!(rounded != drawn && rounded.iter().zip(&drawn).all(near));
    let plain = plain::train(&chain, spirals().as_ref(), &spec(3)).expect("the plain loop").weights_sha256;
    let cuts = Settings { cuts: Some(vec![1]), ..Settings::default() };
    for settings in [Settings::default(), cuts] {
        assert_eq!(hash(&settings.run(task("a", &chain, 3)), 0), plain);
    }
}

/// Values as an earlier version drew them for frozen buffers: in `f32`.
struct Unrounded;

impl WeightSource for Unrounded {
    fn fill(&self, chain: &Chain, buffer: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError> {
        SeededInit.fill(chain, buffer, seed, out)
    }
}

#[test]
fn a_checkpoint_with_values_that_were_not_rounded_resumes_to_the_same_bits() {
    let of = |builder: ChainBuilder| {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Device::flex());
        let builder = builder.layer("in", Dense { linear: linear(2, WIDTH) });
        let chain =
            builder.layer("head", Classifier { linear: linear(WIDTH, 3) }).metrics(["accuracy"]).build();
        let chain = chain.and_then(|chain| chain.training_only(&["head"])).expect("a chain");
        Arc::new(chain.with_float_type(FloatType::Bf16))
    };
    let (before, after) = (of(Chain::builder("c").weights(Unrounded)), of(Chain::builder("c")));
    assert_eq!(before.buffers()[0].encoding, Encoding::Masters);
    let dir = TempDir::new().expect("a directory");
    let file = dir.path().join("checkpoint.safetensors");
    let stop = StopFlag::new();
    let run = Settings::default().orchestrator().checkpoint_every(CheckpointEvery::Minibatches(1));
    let mut run = run.stop_flag(stop.clone()).observer(Box::new(StopAfter(stop, 2)));
    run.submit(task("a", &before, 3).checkpoint_to(file.clone())).expect("a task");
    assert_eq!(run.run().expect("a run").tasks[0].state, TaskState::Stopped);
    let resumed = || {
        let mut run = Settings::default().orchestrator();
        run.submit(task("a", &after, 3).resume_from(Checkpoint::open(&file).expect("a checkpoint")))?;
        run.run()
    };
    let report = resumed().expect("a run");
    assert!(report.tasks[0].checkpoints.resumed_at.is_some_and(|step| step > 0));
    let plain = plain::train(&after, spirals().as_ref(), &spec(3)).expect("the plain loop").weights_sha256;
    assert_eq!(hash(&report, 0), plain);
}

#[test]
fn a_source_that_states_the_wrong_type_fails_its_task() {
    let report = Settings::default().run(task("a", &chain(FloatType::F32, FloatType::Bf16), 1));
    let task = &report.tasks[0];
    assert_eq!(task.state, TaskState::Failed);
    let error = task.error.as_deref().unwrap_or_default();
    assert!(error.contains("`in.linear.weight` has a value that is no bf16"), "{error}");
}
