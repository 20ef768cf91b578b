//! AdamW with moments in 8 bits: the bits of the plain loop, which steps block by block, in every tier and after
//! interruptions. A buffer of these chains has quantized parameters and small ones with `f32` moments.

use crate::common::{Settings, StopAfter, adamw, config, spirals, tokens};
use hydra_core::optimizer::{AdamW, AdamW8bit};
use hydra_core::{
    ByteSize, Chain, Dataset, FloatType, LARGE_PARAM, Length, OptimizerSpec, TrainSpec, with_causes,
};
use hydra_engine::{
    Checkpoint, CheckpointEvery, EngineError, OptimizerPlacement, Orchestrator, Place, RunReport, StopFlag,
    TaskState, TrainTask, plain,
};
use hydra_models::gpt2::{self, Gpt2Config};
use hydra_models::mlp;
use std::sync::Arc;
use tempfile::TempDir;

/// A GPT-2 whose matrices are quantized, with partial blocks.
fn gpt2(float: FloatType) -> Arc<Chain> {
    let config = Gpt2Config { n_embd: 66, n_head: 2, vocab_size: 70, ..config() };
    Arc::new(gpt2::chain(&config, None).expect("a chain").with_float_type(float))
}

/// A perceptron with a matrix of several pieces on the disk.
fn perceptron() -> Arc<Chain> {
    Arc::new(mlp::chain(&[2, 600, 601], 3).expect("a chain"))
}

fn data() -> Arc<dyn Dataset> {
    tokens(11, 1)
}

fn spec(optimizer: impl Into<OptimizerSpec>) -> TrainSpec {
    let spec = TrainSpec { length: Length::Steps(5), accumulate: 2, ..adamw(6) };
    TrainSpec { optimizer: optimizer.into(), ..spec }
}

fn rule() -> AdamW8bit {
    AdamW8bit(AdamW::new(3e-3))
}

fn task(chain: &Arc<Chain>, spec: TrainSpec) -> TrainTask {
    TrainTask::new("task", chain.clone(), data(), spec)
}

fn agrees(report: &RunReport, plain: &plain::PlainRun, what: &str) {
    let task = &report.tasks[0];
    assert_eq!((task.error.as_deref(), task.state), (None, TaskState::Done), "{what}");
    assert_eq!(task.weights_sha256.as_deref(), Some(plain.weights_sha256.as_str()), "{what}");
    assert!(report.host_peak_bytes <= report.host_admitted_bytes, "{what}");
}

#[test]
fn moments_in_8_bits_give_the_bits_of_the_plain_loop_however_a_model_is_cut() {
    for float in [FloatType::F32, FloatType::Bf16] {
        let chain = gpt2(float);
        let large = |len: usize| len >= LARGE_PARAM;
        let mixed = chain.buffers().iter().filter(|buffer| {
            buffer.params.iter().any(|param| large(param.len))
                && buffer.params.iter().any(|param| !large(param.len))
        });
        assert!(mixed.count() >= 3);
        let plain = plain::train(&chain, data().as_ref(), &spec(rule())).expect("the plain loop");
        let wide = plain::train(&chain, data().as_ref(), &spec(AdamW::new(3e-3))).expect("the plain loop");
        assert_ne!(plain.weights_sha256, wide.weights_sha256);
        for (cuts, devices, threads) in
            [(None, 1, 2), (Some(vec![2, 4]), 2, 1), (Some((1..chain.layers().len()).collect()), 2, 2)]
        {
            let settings = Settings { cuts, devices, threads, ..Settings::default() };
            let report = settings.run(task(&chain, spec(rule())));
            agrees(&report, &plain, &format!("{settings:?}"));
            assert_eq!(report.tasks[0].losses, plain.losses);
        }
    }
}

#[test]
fn they_take_a_quarter_of_the_memory_of_floats() {
    let chain = perceptron();
    let admitted = |optimizer: OptimizerSpec| {
        let spec = TrainSpec { clip: None, accumulate: 1, ..spec(optimizer) };
        let report = Settings::default().run(TrainTask::new("task", chain.clone(), spirals(), spec));
        assert_eq!(report.tasks[0].state, TaskState::Done);
        assert!(report.host_peak_bytes <= report.host_admitted_bytes);
        report.host_admitted_bytes
    };
    let params: u64 = chain.buffers().iter().map(|buffer| buffer.moment_bytes()).sum();
    let saved = admitted(AdamW::new(1e-3).into()) - admitted(AdamW8bit(AdamW::new(1e-3)).into());
    let share = saved as f64 / (2 * params) as f64;
    assert!((0.73..0.75).contains(&share), "{saved} bytes of two moments of {params} were saved");
}

#[test]
fn they_live_on_the_disk_and_go_on_from_checkpoints() {
    for (chain, data, accumulate) in [(gpt2(FloatType::Bf16), data(), 2), (perceptron(), spirals(), 1)] {
        let spec = TrainSpec { accumulate, clip: None, ..spec(rule()) };
        let plain = plain::train(&chain, data.as_ref(), &spec).expect("the plain loop");
        let scratch = TempDir::new().expect("a directory");
        let file = scratch.path().join("checkpoint.safetensors");
        let task = || {
            let task = TrainTask::new("task", chain.clone(), data.clone(), spec.clone());
            task.cuts(vec![1, 2]).checkpoint_to(file.clone())
        };
        let submitted = |mut run: Orchestrator, task: TrainTask| {
            run.submit(task).expect("a task");
            run.run().expect("a run")
        };
        let settings = Settings { cuts: Some(vec![1, 2]), ..Settings::default() };
        let whole = submitted(settings.orchestrator(), task());
        agrees(&whole, &plain, "in host memory");
        let on_disk = |host: u64| {
            let run = settings.orchestrator().host_memory(ByteSize(host));
            run.disk(scratch.path().to_owned(), ByteSize::mib(64))
        };
        let mut tiny = on_disk(1);
        tiny.submit(task()).expect("a task");
        let least = match tiny.admit() {
            Err(EngineError::HostMemory { needed, .. }) => needed,
            other => panic!("expected too little host memory, found {other:?}"),
        };
        // On the disk, in host memory and on the disk again.
        for (leg, host) in [least, 1 << 30].into_iter().enumerate() {
            let stop = StopFlag::new();
            let run = on_disk(host).checkpoint_every(CheckpointEvery::Minibatches(1));
            let run = run.stop_flag(stop.clone()).observer(Box::new(StopAfter(stop, 1)));
            let again = || Checkpoint::open(&file).expect("a checkpoint");
            let report = submitted(run, if leg == 0 { task() } else { task().resume_from(again()) });
            assert_eq!((report.tasks[0].state, &report.tasks[0].error), (TaskState::Stopped, &None));
            assert_eq!(report.tasks[0].plan.disk_bytes > 0, leg == 0);
        }
        let checkpoint = Checkpoint::open(&file).expect("a checkpoint");
        let report = submitted(on_disk(least), task().resume_from(checkpoint));
        assert!(report.tasks[0].plan.disk_bytes > 0 && report.tasks[0].checkpoints.resumed_at >= Some(2));
        agrees(&report, &plain, "on the disk, resumed");
    }
}

#[test]
fn moments_of_one_encoding_are_not_read_as_those_of_another() {
    let dir = TempDir::new().expect("a directory");
    let files = ["narrow", "wide"].map(|name| dir.path().join(name));
    let chain = gpt2(FloatType::F32);
    let rules = || [OptimizerSpec::from(rule()), AdamW::new(3e-3).into()];
    for (file, rule) in files.iter().zip(rules()) {
        let stop = StopFlag::new();
        let run = Settings::default().orchestrator().checkpoint_every(CheckpointEvery::Minibatches(1));
        let mut run = run.stop_flag(stop.clone()).observer(Box::new(StopAfter(stop, 2)));
        run.submit(task(&chain, spec(rule)).checkpoint_to(file.clone())).expect("a task");
        assert_eq!(run.run().expect("a run").tasks[0].state, TaskState::Stopped);
    }
    let [narrow, wide] = files.each_ref().map(|file| file.metadata().expect("a file").len());
    assert!(narrow * 2 < wide + (wide >> 4), "{narrow} bytes, with floats {wide}");
    for (file, rule) in files.iter().zip(rules().into_iter().rev()) {
        let open = || Checkpoint::open(file).expect("a checkpoint");
        for task in [
            task(&chain, spec(rule.clone())).resume_from(open()),
            task(&chain, spec(rule.clone())).fork_from(open()),
        ] {
            let mut run = Settings::default().orchestrator();
            run.submit(task).expect("a task");
            let error = with_causes(&run.run().expect_err("a refusal"));
            assert!(error.contains("optimizer") && error.contains("adamw8bit"), "{error}");
        }
        // Weights alone go on with any optimizer.
        let report = Settings::default().task(task(&chain, spec(rule)).weights_from(open()));
        assert_eq!((report.state, report.error), (TaskState::Done, None));
    }
}

#[test]
fn they_are_stepped_on_a_device() {
    let spec = TrainSpec { clip: None, ..spec(rule()) };
    for float in [FloatType::F32, FloatType::Bf16] {
        let chain = gpt2(float);
        let plain = plain::train(&chain, data().as_ref(), &spec).expect("the plain loop");
        let run = Settings::default().orchestrator().optimizer_placement(OptimizerPlacement::Device);
        let mut run = run.checkpoint_every(CheckpointEvery::Minibatches(1));
        let dir = TempDir::new().expect("a directory");
        run.submit(task(&chain, spec.clone()).checkpoint_to(dir.path().join("file"))).expect("a task");
        let report = run.run().expect("a run");
        assert_eq!(report.tasks[0].plan.optimizer.on, Place::Device);
        agrees(&report, &plain, "on the device");
    }
}
