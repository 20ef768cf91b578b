//! The guarantees of built-in optimizers also hold for a custom one: bitwise equal to the plain loop from
//! the disk, in 16 bits, with clipping, from a checkpoint, and resident on a device.

#[path = "../examples/own_optimizer.rs"]
mod own_optimizer;

use hydra_train::data::TokenBlocks;
use hydra_train::engine::{OptimizerPlacement, Place};
use hydra_train::model::schedule::Curve;
use hydra_train::model::{Settings, TaskId, with_causes};
use hydra_train::prelude::*;
use own_optimizer::{Adagrad, main};
use std::path::Path;
use tempfile::TempDir;

#[test]
fn the_example_does_what_it_says() {
    main().unwrap();
}

/// Seven minibatches in two microbatches each, clipped, on a custom schedule.
fn spec() -> TrainSpec {
    let schedule = Schedule::new(Halves { every: 3 }, 1);
    let spec = TrainSpec { schedule, clip: Some(0.7), accumulate: 2, ..own_optimizer::spec(0.05) };
    TrainSpec { batch: 4, length: Length::Steps(7), ..spec }
}

/// Halves the rate after every `every` steps.
#[derive(Debug)]
struct Halves {
    every: usize,
}

impl Curve for Halves {
    fn name(&self) -> &str {
        "halves"
    }

    fn settings(&self) -> Settings {
        Settings::new().with("every", self.every)
    }

    fn factor(&self, step: usize, _: usize) -> f64 {
        0.5f64.powi((step / self.every) as i32)
    }
}

const CONTEXT: usize = 12;
const PLENTY: ByteSize = ByteSize::mib(256);

/// A GPT-2 of ten layers with dropout everywhere.
fn chain(float: FloatType) -> Arc<Chain> {
    let mut config = Gpt2Config::preset("bytes-tiny").unwrap();
    (config.n_embd, config.n_layer, config.n_head, config.n_positions) = (16, 8, 2, CONTEXT);
    config.vocab_size = 40;
    Arc::new(gpt2::chain(&config, None).unwrap().with_float_type(float))
}

/// Tokens that follow a rule, so that training reduces the loss.
fn data() -> Arc<dyn Dataset> {
    let tokens: Vec<u32> = (0..11 * CONTEXT as u32).map(|i| (i.wrapping_mul(7) ^ (i / 5)) % 40).collect();
    Arc::new(TokenBlocks::new(tokens, BlockSpec { context: CONTEXT, vocab_size: 40 }).unwrap())
}

fn task(chain: &Arc<Chain>, spec: TrainSpec) -> TrainTask {
    TrainTask::new("task", chain.clone(), data(), spec).cuts(vec![1, 3, 6, 8])
}

fn orchestrator(devices: usize) -> Orchestrator {
    Orchestrator::new(DeviceSpec::cpu(PLENTY).threads(1).times(devices)).unwrap()
}

/// A task together with another one, on two devices and a disk, with so little host memory that master
/// weights and moments are on the disk.
fn spilled(chain: &Arc<Chain>, task: &TrainTask, dir: &Path) -> Orchestrator {
    let submitted = |host| {
        let mut run = orchestrator(2).host_memory(ByteSize(host)).disk(dir.to_owned(), PLENTY);
        run.submit(task.clone()).unwrap();
        let other = TrainTask::new("other", chain.clone(), data(), TrainSpec { seed: 9, ..spec() });
        run.submit(other.cuts(vec![1, 3, 6, 8])).unwrap();
        run.checkpoint_every(CheckpointEvery::Minibatches(1))
    };
    match submitted(1).admit() {
        Err(EngineError::HostMemory { needed, .. }) => submitted(needed),
        _ => panic!("one byte will not do"),
    }
}

struct StopAfter(usize, StopFlag);

impl Observer for StopAfter {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::Minibatch { task: TaskId(0), .. }) {
            self.0 = self.0.saturating_sub(1);
            if self.0 == 0 {
                self.1.stop();
            }
        }
    }
}

fn first(run: Orchestrator) -> TaskReport {
    run.run().unwrap().tasks.remove(0)
}

#[test]
fn spilled_to_the_disk_and_from_a_checkpoint_it_has_the_bits_of_the_plain_loop() {
    for float in [FloatType::F32, FloatType::Bf16] {
        let chain = chain(float);
        let plain = plain::train(&chain, data().as_ref(), &spec()).unwrap();
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("task.safetensors");
        let task = task(&chain, spec()).checkpoint_to(file.clone());
        let flag = StopFlag::new();
        let run =
            spilled(&chain, &task, dir.path()).observer(Box::new(StopAfter(3, flag.clone()))).stop_flag(flag);
        let stopped = first(run);
        assert!(stopped.plan.disk_bytes > 0 && stopped.losses.len() < 7, "{stopped:?}");
        let tensors = std::fs::read(&file).unwrap();
        let has = |name: &str| tensors.windows(name.len()).any(|bytes| bytes == name.as_bytes());
        assert!(has("moment1/") && !has("moment2/"));
        let checkpoint = Checkpoint::open(&file).unwrap();
        let resumed = first(spilled(&chain, &task.clone().resume_from(checkpoint), dir.path()));
        assert!(resumed.checkpoints.resumed_at.is_some());
        assert_eq!((&resumed.error, &resumed.losses), (&None, &plain.losses), "{float}");
        assert_eq!(resumed.weights_sha256, Some(plain.weights_sha256), "{float}");
    }
}

#[test]
fn a_checkpoint_of_other_settings_is_refused() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("task.safetensors");
    let flag = StopFlag::new();
    let chain = chain(FloatType::F32);
    let run = spilled(&chain, &task(&chain, spec()).checkpoint_to(file.clone()), dir.path());
    first(run.observer(Box::new(StopAfter(2, flag.clone()))).stop_flag(flag));
    let other = Adagrad { lr: 0.05, eps: 1e-7, weight_decay: 0.01 };
    let slower = Schedule::new(Halves { every: 4 }, 1);
    for (spec, what) in [
        (TrainSpec { optimizer: other.into(), ..spec() }, "optimizer"),
        (TrainSpec { schedule: slower, ..spec() }, "schedule"),
    ] {
        let task = task(&chain, spec).resume_from(Checkpoint::open(&file).unwrap());
        let mut run = orchestrator(1);
        let refused = run.submit(task).and_then(|_| run.run().map(drop)).unwrap_err();
        let said = with_causes(&refused);
        assert!(said.contains(what), "{said}");
    }
}

#[test]
fn on_a_device_that_is_its_home_it_has_the_bits_of_the_plain_loop() {
    let spec = TrainSpec { clip: None, ..spec() };
    let plain = plain::train(&chain(FloatType::F32), data().as_ref(), &spec).unwrap();
    let mut run = orchestrator(1).optimizer_placement(OptimizerPlacement::Device);
    run.submit(task(&chain(FloatType::F32), spec)).unwrap();
    let task = first(run);
    assert_eq!((task.plan.optimizer.on, &task.error), (Place::Device, &None));
    assert_eq!(task.weights_sha256, Some(plain.weights_sha256));
}
