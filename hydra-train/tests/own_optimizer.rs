//! What holds for the optimizers that come with Hydra holds for one that a user brings: the plain loop's bits from
//! the disk, in 16 bits, with clipping, from a checkpoint, and on a device that is the task's home.

#[path = "../../hydra-engine/tests/common/mod.rs"]
mod common;
#[path = "../examples/own_optimizer.rs"]
mod own_optimizer;

use common::{Settings, gpt2_chain, tokens};
use hydra_core::schedule::Curve;
use hydra_core::{ByteSize, Chain, Dataset, FloatType, Length, Schedule, TrainSpec};
use hydra_engine::{
    Checkpoint, CheckpointEvery, EngineError, Observer, OptimizerPlacement, Orchestrator, Place, RunEvent,
    StopFlag, TaskReport, TrainTask, plain,
};
use own_optimizer::{Adagrad, main};
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

#[test]
fn the_example_does_what_it_says() {
    main().unwrap();
}

/// Seven minibatches in two microbatches each, clipped, on a schedule of one's own.
fn spec() -> TrainSpec {
    let schedule = Schedule::new(Halves { every: 3 }, 1);
    let spec = TrainSpec { schedule, clip: Some(0.7), accumulate: 2, ..own_optimizer::spec(0.05) };
    TrainSpec { batch: 4, length: Length::Steps(7), ..spec }
}

/// Half the rate after every so many steps.
#[derive(Debug)]
struct Halves {
    every: usize,
}

impl Curve for Halves {
    fn name(&self) -> &str {
        "halves"
    }

    fn settings(&self) -> hydra_core::Settings {
        hydra_core::Settings::new().with("every", self.every)
    }

    fn factor(&self, step: usize, _: usize) -> f64 {
        0.5f64.powi((step / self.every) as i32)
    }
}

fn data() -> Arc<dyn Dataset> {
    tokens(11, 1)
}

fn task(chain: &Arc<Chain>, spec: TrainSpec) -> TrainTask {
    TrainTask::new("task", chain.clone(), data(), spec).cuts(vec![1, 3])
}

/// Two devices and a disk, with so little host memory that masters and moments are on the disk.
fn spilled(task: &TrainTask, dir: &Path) -> Orchestrator {
    let settings = Settings { devices: 2, ..Settings::default() };
    let disk =
        |host| settings.orchestrator().host_memory(ByteSize(host)).disk(dir.to_owned(), common::PLENTY);
    let mut least = disk(1);
    least.submit(task.clone()).unwrap();
    let Err(EngineError::HostMemory { needed, .. }) = least.admit() else { panic!("one byte will not do") };
    let mut run = disk(needed).checkpoint_every(CheckpointEvery::Minibatches(1));
    run.submit(task.clone()).unwrap();
    run
}

struct StopAfter(usize, StopFlag);

impl Observer for StopAfter {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::Minibatch { .. }) {
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
        let chain = hydra_models::gpt2::chain(&common::config(), None).unwrap();
        let chain = Arc::new(chain.with_float_type(float));
        let plain = plain::train(&chain, data().as_ref(), &spec()).unwrap();
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("task.safetensors");
        let task = task(&chain, spec()).checkpoint_to(file.clone());
        let flag = StopFlag::new();
        let run = spilled(&task, dir.path()).observer(Box::new(StopAfter(3, flag.clone()))).stop_flag(flag);
        let stopped = first(run);
        assert!(stopped.plan.disk_bytes > 0 && stopped.losses.len() < 7, "{stopped:?}");
        let tensors = std::fs::read(&file).unwrap();
        let has = |name: &str| tensors.windows(name.len()).any(|bytes| bytes == name.as_bytes());
        assert!(has("moment1/") && !has("moment2/"));
        let checkpoint = Checkpoint::open(&file).unwrap();
        let resumed = first(spilled(&task.clone().resume_from(checkpoint), dir.path()));
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
    let run = spilled(&task(&gpt2_chain(), spec()).checkpoint_to(file.clone()), dir.path());
    first(run.observer(Box::new(StopAfter(2, flag.clone()))).stop_flag(flag));
    let other = Adagrad { lr: 0.05, eps: 1e-7, weight_decay: 0.01 };
    let slower = Schedule::new(Halves { every: 4 }, 1);
    for (spec, what) in [
        (TrainSpec { optimizer: other.into(), ..spec() }, "optimizer"),
        (TrainSpec { schedule: slower, ..spec() }, "schedule"),
    ] {
        let task = task(&gpt2_chain(), spec).resume_from(Checkpoint::open(&file).unwrap());
        let mut run = Settings::default().orchestrator();
        let refused = run.submit(task).and_then(|_| run.run().map(drop)).unwrap_err();
        let said = hydra_core::with_causes(&refused);
        assert!(said.contains(what), "{said}");
    }
}

#[test]
fn on_a_device_that_is_its_home_it_has_the_bits_of_the_plain_loop() {
    let spec = TrainSpec { clip: None, ..spec() };
    let plain = plain::train(&gpt2_chain(), data().as_ref(), &spec).unwrap();
    let run = Settings::default().orchestrator().optimizer_placement(OptimizerPlacement::Device);
    let mut run = run;
    run.submit(task(&gpt2_chain(), spec)).unwrap();
    let task = first(run);
    assert_eq!((task.plan.optimizer.on, &task.error), (Place::Device, &None));
    assert_eq!(task.weights_sha256, Some(plain.weights_sha256));
}
