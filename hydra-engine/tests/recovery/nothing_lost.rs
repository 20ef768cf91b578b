//! A task that fails keeps its trained progress.

use crate::common::Classifier;
use crate::common::{Fragile, PLENTY, Points, Read, Settings, adamw, mlp_chain, spirals};
use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::Device;
use hydra_core::{
    Activation, Bandwidth, Chain, Dataset, DatasetError, DeviceId, Forward, Length, MemoryProbe, ModelWriter,
    ParamBufferReader, Pass, TrainSpec, WeightError,
};
use hydra_engine::{
    Checkpoint, CheckpointEvery, DeviceSpec, Observer, Orchestrator, RunEvent, TaskReport, TaskState,
    TrainTask, plain,
};
use hydra_models::mlp::Dense;
use hydra_models::weights::SafetensorsWriter;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tempfile::TempDir;

fn spec(steps: usize) -> TrainSpec {
    TrainSpec { length: Length::Steps(steps), clip: None, ..adamw(8) }
}

/// Data that is readable until a switch is set.
fn flaky(data: Arc<dyn Dataset>, gone: Arc<AtomicBool>) -> Arc<dyn Dataset> {
    let how = move |data: &dyn Dataset, items: &[usize]| match gone.load(Relaxed) {
        true => Err(DatasetError::OutOfRange { dataset: "flaky".to_owned(), index: items[0], len: 0 }),
        false => data.batch(items),
    };
    Arc::new(Read { data, how })
}

/// Makes the data unreadable after a number of minibatches.
struct Takes {
    after: usize,
    gone: Arc<AtomicBool>,
}

impl Observer for Takes {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::Minibatch { step, .. } if step + 1 == self.after) {
            self.gone.store(true, Relaxed);
        }
    }
}

struct Case<'a> {
    spec: TrainSpec,
    settings: Settings,
    dir: &'a Path,
    gone: Arc<AtomicBool>,
}

impl Case<'_> {
    fn task(&self) -> TrainTask {
        let data = flaky(spirals(), self.gone.clone());
        let task = TrainTask::new("task", mlp_chain(), data, self.spec.clone());
        task.validation(spirals()).test(spirals())
    }

    fn run(&self, task: TrainTask, after: usize) -> TaskReport {
        let mut run = self.settings.orchestrator();
        run = run.observer(Box::new(Takes { after, gone: self.gone.clone() }));
        // None is due by itself.
        run = run.checkpoint_every(CheckpointEvery::Time(Duration::from_secs(3600)));
        run.submit(task.cuts(self.settings.cuts.clone().unwrap())).unwrap();
        run.run().unwrap().tasks.remove(0)
    }
}

#[test]
fn data_that_cannot_be_read_any_more_ends_a_task_with_what_it_had_trained() {
    for (eval_every, accumulate, cuts) in [(None, 1, vec![]), (None, 2, vec![1, 2]), (Some(1), 1, vec![2])] {
        let dir = TempDir::new().unwrap();
        let spec = TrainSpec { eval_every, accumulate, ..spec(9) };
        let settings = Settings { cuts: Some(cuts), devices: 2, ..Settings::default() };
        let case = Case { spec: spec.clone(), settings, dir: dir.path(), gone: Arc::default() };
        let file = case.dir.join("task.safetensors");
        let out = case.dir.join("model");
        let task = || {
            let task = case.task().checkpoint_to(file.clone());
            task.write_to(Arc::new(SafetensorsWriter), out.clone())
        };
        let failed = case.run(task(), 4);
        assert_eq!(failed.state, TaskState::Failed, "{failed:?}");
        let error = failed.error.as_deref().unwrap();
        assert!(error.contains("flaky"), "{error}");
        // Batches that were read ahead are still trained.
        let trained = failed.losses.len();
        assert!((4..9).contains(&trained), "{trained}");
        assert_eq!(Checkpoint::open(&file).unwrap().step(), trained);
        assert_eq!(failed.model_dir.as_deref(), Some(out.as_path()));
        assert!(out.join("model.safetensors").is_file());
        let steps = failed.validations.best_step.unwrap_or(trained);
        let short = TrainSpec { length: Length::Steps(steps), eval_every: None, ..spec.clone() };
        let plain = plain::train(&mlp_chain(), spirals().as_ref(), &short).unwrap();
        assert_eq!(failed.weights_sha256.as_ref(), Some(&plain.weights_sha256), "after {steps} steps");
        // The data is back.
        case.gone.store(false, Relaxed);
        let resumed = case.run(task().resume_from(Checkpoint::open(&file).unwrap()), 99);
        let whole = case.run(case.task(), 99);
        assert_eq!((resumed.state, resumed.error), (TaskState::Done, None));
        assert_eq!((resumed.losses, resumed.weights_sha256), (whole.losses, whole.weights_sha256));
    }
}

#[test]
fn a_task_whose_data_was_never_there_writes_no_model() {
    let dir = TempDir::new().unwrap();
    let settings = Settings { cuts: Some(vec![]), ..Settings::default() };
    let spec = TrainSpec { length: Length::Steps(3), ..spec(3) };
    let case = Case { spec, settings, dir: dir.path(), gone: Arc::default() };
    let out = case.dir.join("model");
    // The pilot pass has read it; the first minibatch cannot.
    struct TakesAtOnce(Arc<AtomicBool>);
    impl Observer for TakesAtOnce {
        fn observe(&mut self, event: &RunEvent<'_>) {
            if matches!(event, RunEvent::Admitted(_)) {
                self.0.store(true, Relaxed);
            }
        }
    }
    let mut run = case.settings.orchestrator().observer(Box::new(TakesAtOnce(case.gone.clone())));
    let task = case.task().initial_validation(false).write_to(Arc::new(SafetensorsWriter), out.clone());
    run.submit(task).unwrap();
    let failed = run.run().unwrap().tasks.remove(0);
    assert_eq!((failed.state, failed.losses.len()), (TaskState::Failed, 0));
    assert!(failed.model_dir.is_none() && !out.exists());
}

/// Passes values on, and panics in a backward pass with a value above its limit.
#[derive(Module, Debug)]
struct FragileBack {
    #[module(skip)]
    limit: f32,
}

impl Forward for FragileBack {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let tensor = x.into_float::<2>();
        let largest =
            tensor.clone().inner().abs().max().into_data().try_to_vec::<f32>().expect("a number")[0];
        assert!(!tensor.is_tracked() || largest <= self.limit, "met {largest} on the way back");
        Activation::of(tensor)
    }
}

#[test]
fn a_layer_that_fails_on_the_way_back_leaves_the_best_weights() {
    let dense = |inputs, outputs| Dense { linear: LinearConfig::new(inputs, outputs).init(&Device::flex()) };
    let classifier = Classifier { linear: LinearConfig::new(8, 3).init(&Device::flex()) };
    let chain =
        Chain::builder("fragile").layer("in", dense(2, 8)).layer("fragile", FragileBack { limit: 100.0 });
    let chain = Arc::new(chain.layer("mid", dense(8, 8)).layer("out", classifier).build().unwrap());
    // Minibatches 0, 1 and 2 are good; the fourth is not.
    let task = |steps: usize| {
        let spec = TrainSpec { shuffle: false, eval_every: Some(1), ..spec(steps) };
        let data = Arc::new(Points { len: 48, bad: 24, panics: false });
        let good = Arc::new(Points { len: 24, bad: 24, panics: false });
        TrainTask::new("task", chain.clone(), data, spec).validation(good)
    };
    // When it fails, the gradients of later layers are on their way to the optimizer.
    for (cuts, devices) in [(vec![], 1), (vec![1, 2, 3], 1), (vec![1, 2, 3], 2), (vec![2], 2)] {
        let dir = TempDir::new().unwrap();
        let out = dir.path().join("model");
        let settings = Settings { cuts: Some(cuts.clone()), devices, others: 1, ..Settings::default() };
        // Downloads take longer than the failure.
        let slow = |device: DeviceSpec| device.with_link(Bandwidth(1e9), Duration::from_millis(8));
        let devices = slow(DeviceSpec::cpu(PLENTY)).times(devices);
        let mut run = Orchestrator::new(devices).unwrap();
        run.submit(task(6).cuts(cuts).write_to(Arc::new(SafetensorsWriter), out.clone())).unwrap();
        let failed = run.run().unwrap().tasks.remove(0);
        assert_eq!((failed.state, failed.losses.len() >= 3), (TaskState::Failed, true), "{failed:?}");
        let error = failed.error.as_deref().unwrap();
        assert!(error.contains("on the way back"), "{error}");
        let whole = settings.task(task(3));
        assert_eq!(failed.weights_sha256.as_ref().unwrap(), whole.weights_sha256.as_ref().unwrap());
        assert_eq!(
            (failed.validations.best_step, &failed.validations.evaluations),
            (whole.validations.best_step, &whole.validations.evaluations)
        );
        assert!(out.join("model.safetensors").is_file());
    }
}

#[test]
fn a_layer_that_fails_on_the_way_forward_leaves_what_was_trained() {
    let dense = |inputs, outputs| Dense { linear: LinearConfig::new(inputs, outputs).init(&Device::flex()) };
    let classifier = Classifier { linear: LinearConfig::new(8, 3).init(&Device::flex()) };
    let chain = Chain::builder("fragile").layer("in", dense(2, 8)).layer("fragile", Fragile { limit: 100.0 });
    let chain = Arc::new(chain.layer("mid", dense(8, 8)).layer("out", classifier).build().unwrap());
    for (cuts, devices, accumulate) in
        [(vec![], 1, 1), (vec![1, 2, 3], 2, 1), (vec![2], 1, 4), (vec![3], 2, 2)]
    {
        let dir = TempDir::new().unwrap();
        let (file, out) = (dir.path().join("task.safetensors"), dir.path().join("model"));
        let spec = |steps| TrainSpec { shuffle: false, accumulate, ..spec(steps) };
        // The second half of the fourth minibatch is bad; minibatches 0, 1 and 2 are good.
        let data = Arc::new(Points { len: 48, bad: 28, panics: false });
        let task = TrainTask::new("task", chain.clone(), data.clone(), spec(6)).checkpoint_to(file.clone());
        let settings = Settings { cuts: Some(cuts), devices, others: 1, ..Settings::default() };
        let failed = settings.task(task.write_to(Arc::new(SafetensorsWriter), out.clone()));
        assert_eq!((failed.state, failed.losses.len()), (TaskState::Failed, 3), "{failed:?}");
        assert!(failed.error.as_deref().unwrap().contains("of step 3: met "), "{failed:?}");
        let plain = plain::train(&chain, data.as_ref(), &spec(3)).unwrap();
        assert_eq!(failed.weights_sha256.as_ref(), Some(&plain.weights_sha256));
        assert!(out.join("model.safetensors").is_file());
        assert_eq!(Checkpoint::open(&file).unwrap().step(), 3);
    }
}

struct Fails;

impl ModelWriter for Fails {
    fn write(&self, _: &Chain, _: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError> {
        Err(WeightError::Write { path: dir.to_owned(), source: "no space is left".into() })
    }
}

#[test]
fn a_later_writer_that_fails_leaves_the_weights_where_they_are() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("task.safetensors");
    let task = || TrainTask::new("task", mlp_chain(), spirals(), spec(3)).checkpoint_to(file.clone());
    let done = Settings::default().task(task());
    let resumed = |task: TrainTask| {
        let from = Checkpoint::open(&file).unwrap();
        Settings::default().task(task.resume_from(from))
    };
    let out = dir.path().join("model");
    let failed = resumed(task().write_to(Arc::new(Fails), out.clone()));
    let error = failed.error.unwrap();
    assert!(error.contains("its weights are in `") && error.ends_with("no space is left"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "the checkpoint and no part of one");
    let written = resumed(task().write_to(Arc::new(SafetensorsWriter), out.clone()));
    assert_eq!((written.state, written.weights_sha256), (TaskState::Done, done.weights_sha256));
    assert!(out.join("model.safetensors").is_file() && Checkpoint::open(&file).unwrap().is_finished());
}

/// A device that returns no more results after a number of shard tasks, over all devices.
struct Dies {
    after: AtomicUsize,
    dead: Mutex<Option<DeviceId>>,
}

impl Dies {
    fn after(shard_tasks: usize) -> Arc<Self> {
        Arc::new(Self { after: shard_tasks.into(), dead: Mutex::default() })
    }

    fn ask(&self, device: DeviceId) {
        let dead = *self.dead.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(dead != Some(device), "the device is gone");
    }
}

impl MemoryProbe for Dies {
    fn measures(&self) -> bool {
        false
    }

    fn in_use(&self, device: DeviceId) -> u64 {
        self.ask(device);
        0
    }

    fn peak(&self, _: DeviceId) -> u64 {
        0
    }

    fn reset_peak(&self, _: DeviceId) {}

    fn trim(&self, device: DeviceId, _: u64) {
        if self.after.fetch_sub(1, Relaxed) == 1 {
            *self.dead.lock().unwrap_or_else(PoisonError::into_inner) = Some(device);
        }
        self.ask(device);
    }
}

#[test]
fn the_run_goes_on_without_a_device_that_is_gone() {
    for prefetch in [true, false] {
        let settings = Settings { devices: 2, prefetch, ..Settings::default() };
        let mut run = settings.orchestrator().probe(Dies::after(7));
        for index in 0..8 {
            let task = TrainTask::new(format!("task {index}"), mlp_chain(), spirals(), spec(6));
            run.submit(task.cuts(vec![1])).unwrap();
        }
        let report = run.run().unwrap();
        let failed: Vec<_> = report.tasks.iter().filter(|task| task.state == TaskState::Failed).collect();
        // Shard tasks computed and promoted meanwhile.
        assert!((1..=1 + usize::from(prefetch)).contains(&failed.len()), "{report:?}");
        for task in failed {
            let error = task.error.as_deref().unwrap();
            assert!(error.starts_with("the device `cpu:") && error.contains("has failed"), "{error}");
        }
        let plain = plain::train(&mlp_chain(), spirals().as_ref(), &spec(6)).unwrap();
        for task in report.tasks.iter().filter(|task| task.state != TaskState::Failed) {
            assert_eq!(task.weights_sha256.as_ref(), Some(&plain.weights_sha256));
        }
    }
}

/// Shard tasks of the failed device end the minibatch, including its microbatches on other devices.
#[test]
fn a_model_that_several_devices_compute_keeps_what_it_trained_when_one_of_them_is_gone() {
    let spec = TrainSpec { accumulate: 4, ..spec(6) };
    let plain = plain::train(&mlp_chain(), spirals().as_ref(), &spec).unwrap();
    let settings = Settings { devices: 3, ..Settings::default() };
    for after in [5, 8, 13, 22, 30] {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("task.safetensors");
        let task = || TrainTask::new("task", mlp_chain(), spirals(), spec.clone()).cuts(vec![1]);
        let run = settings.orchestrator().checkpoint_every(CheckpointEvery::Minibatches(1));
        let mut run = run.probe(Dies::after(after));
        run.submit(task().checkpoint_to(file.clone())).unwrap();
        let failed = run.run().unwrap().tasks.remove(0);
        assert_eq!(failed.state, TaskState::Failed, "{after}: {failed:?}");
        assert!(failed.error.as_deref().unwrap().contains("has failed"), "{failed:?}");
        assert_eq!(failed.losses, plain.losses[..failed.losses.len()], "{after}");
        // The first checkpoint may still be in progress.
        assert!(file.exists() || failed.losses.len() <= 1, "{after}: {failed:?}");
        if file.exists() {
            let report = settings.task(task().resume_from(Checkpoint::open(&file).unwrap()));
            assert_eq!(report.weights_sha256.as_ref(), Some(&plain.weights_sha256), "{after}");
        }
    }
}

#[test]
fn tasks_that_share_an_evaluation_go_on_without_a_device_or_end_without_any() {
    let (chain, data) = (mlp_chain(), spirals());
    let run = |devices: usize, after: usize| {
        let settings = Settings { devices, ..Settings::default() };
        let mut run = settings.orchestrator().probe(Dies::after(after));
        for index in 0..8 {
            let task = TrainTask::new(format!("task {index}"), chain.clone(), data.clone(), spec(6));
            run.submit(task.validation(data.clone()).cuts(vec![1])).unwrap();
        }
        run.run().unwrap()
    };
    let whole = run(2, usize::MAX);
    // In the middle of the evaluation.
    for after in [3, 4, 7] {
        let report = run(2, after);
        let failed = report.tasks.iter().filter(|task| task.state == TaskState::Failed).count();
        assert!((1..=2).contains(&failed), "{report:?}");
        let done = |task: &&TaskReport| task.state == TaskState::Done;
        for (task, expected) in report.tasks.iter().zip(&whole.tasks).filter(|(task, _)| done(task)) {
            assert_eq!(task.validations.initial_validation, expected.validations.initial_validation);
            assert_eq!(task.weights_sha256, expected.weights_sha256);
        }
        let report = run(1, after);
        assert!(report.tasks.iter().all(|task| task.state == TaskState::Failed), "{report:?}");
    }
}

#[test]
fn without_any_device_tasks_end_with_what_they_had() {
    let dir = TempDir::new().unwrap();
    let mut run = Settings::default().orchestrator().probe(Dies::after(42));
    // None is due by itself.
    run = run.checkpoint_every(CheckpointEvery::Time(Duration::from_secs(3600)));
    let file = |index: usize| dir.path().join(format!("{index}.safetensors"));
    let task = |index: usize| {
        let task = TrainTask::new(format!("task {index}"), mlp_chain(), spirals(), spec(30));
        task.cuts(vec![]).checkpoint_to(file(index))
    };
    for index in 0..4 {
        let out = dir.path().join(format!("model {index}"));
        run.submit(task(index).write_to(Arc::new(SafetensorsWriter), out)).unwrap();
    }
    let report = run.run().unwrap();
    assert!(report.tasks.iter().all(|task| task.state == TaskState::Failed), "{report:?}");
    let errors =
        |what: &str| report.tasks.iter().filter(|t| t.error.as_deref().unwrap().contains(what)).count();
    assert!(errors("has failed and is not used") >= 1 && errors("no device is left") >= 1, "{report:?}");
    // A model of one shard has no partly stepped minibatch: all of them continue from there.
    let kept: Vec<usize> = (0..4).filter(|index| file(*index).exists()).collect();
    let trained: Vec<usize> = (0..4).filter(|index| report.tasks[*index].trained.steps > 0).collect();
    assert!(!trained.is_empty() && kept == trained, "{report:?}");
    let plain = plain::train(&mlp_chain(), spirals().as_ref(), &spec(30)).unwrap();
    for index in kept {
        assert!(report.tasks[index].model_dir.is_some());
        let resumed =
            Settings::default().task(task(index).resume_from(Checkpoint::open(file(index)).unwrap()));
        assert_eq!(
            (resumed.checkpoints.resumed_at > Some(0), resumed.weights_sha256.as_ref()),
            (true, Some(&plain.weights_sha256))
        );
    }
}
