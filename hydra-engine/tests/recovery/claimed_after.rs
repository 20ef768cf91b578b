//! A shard task that fails while the next one is claimed or cannot be read: all earlier results count.

use crate::common::Classifier;
use crate::common::{self, Settings, adamw};
use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::Device;
use hydra_core::{Activation, Batch, Chain, Dataset, DatasetError, Forward, Length, Pass, TrainSpec};
use hydra_engine::{Checkpoint, TaskState, TrainTask, plain};
use hydra_models::mlp::Dense;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tempfile::TempDir;

/// Points; some are out of range, and some cannot be read.
#[derive(Clone)]
struct Points {
    len: usize,
    bad: Range<usize>,
    unreadable: Range<usize>,
}

impl Dataset for Points {
    fn name(&self) -> &str {
        "points"
    }

    fn len(&self) -> usize {
        self.len
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        if let Some(index) = items.iter().find(|item| self.unreadable.contains(item)) {
            return Err(DatasetError::OutOfRange { dataset: "points".to_owned(), index: *index, len: 0 });
        }
        Ok(common::points(self.len, items, |item| self.bad.contains(&item)))
    }
}

/// Passes values on, slowly, so that the next shard task is claimed meanwhile; fails if a value is out of range, and
/// once in the evaluation that `FAILS` counts down to.
#[derive(Module, Debug)]
struct Slow {
    #[module(skip)]
    milliseconds: u64,
}

static FAILS: AtomicUsize = AtomicUsize::new(0);

impl Forward for Slow {
    #[expect(clippy::disallowed_methods, reason = "a fake of a slow layer")]
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let tensor = x.into_float::<2>();
        let largest =
            tensor.clone().inner().abs().max().into_data().try_to_vec::<f32>().expect("a number")[0];
        let once = || FAILS.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)) == Ok(1);
        let fails = largest > 100.0 || !pass.is_training() && once();
        std::thread::sleep(Duration::from_millis(self.milliseconds * if fails { 8 } else { 1 }));
        assert!(!fails, "met {largest}");
        Activation::of(tensor)
    }
}

fn spec(steps: usize) -> TrainSpec {
    TrainSpec { length: Length::Steps(steps), clip: None, shuffle: false, ..adamw(8) }
}

fn chain(frozen: bool) -> Arc<Chain> {
    let dense = |inputs, outputs| Dense { linear: LinearConfig::new(inputs, outputs).init(&Device::flex()) };
    let classifier = Classifier { linear: LinearConfig::new(8, 3).init(&Device::flex()) };
    let chain = Chain::builder("slow");
    let chain = match frozen {
        true => chain.frozen("in", dense(2, 8)),
        false => chain.layer("in", dense(2, 8)),
    };
    let chain = chain.layer("slow", Slow { milliseconds: 20 }).layer("mid", dense(8, 8));
    Arc::new(chain.layer("out", classifier).build().expect("a chain"))
}

fn good(len: usize) -> Points {
    Points { len, bad: 0..0, unreadable: 0..0 }
}

fn whole() -> Settings {
    Settings { cuts: Some(vec![]), ..Settings::default() }
}

struct Files {
    _dir: TempDir,
    file: PathBuf,
}

impl Files {
    fn new() -> Self {
        let dir = TempDir::new().expect("a directory");
        let file = dir.path().join("task.safetensors");
        Self { _dir: dir, file }
    }

    fn kept(&self) -> Checkpoint {
        Checkpoint::open(&self.file).expect("a checkpoint")
    }
}

#[test]
fn half_a_minibatch_is_none() {
    let files = Files::new();
    let spec = TrainSpec { accumulate: 2, ..spec(6) };
    // Minibatch 3 is items 24..32; only its first half is bad.
    let data = Arc::new(Points { bad: 24..28, ..good(48) });
    let task = TrainTask::new("task", chain(false), data.clone(), spec.clone());
    let failed = whole().task(task.checkpoint_to(files.file.clone()));
    assert_eq!((failed.state, failed.losses.len(), files.kept().step()), (TaskState::Failed, 3, 3));
    let three = TrainSpec { length: Length::Steps(3), ..spec };
    let plain = plain::train(&chain(false), data.as_ref(), &three).unwrap();
    assert_eq!((failed.losses, failed.weights_sha256), (plain.losses, Some(plain.weights_sha256)));
}

#[test]
fn half_an_evaluation_is_none() {
    // Three batches of evaluation after two minibatches; one fails once. With two shards the next shard task is
    // claimed when it fails.
    let spec = TrainSpec { eval_every: Some(2), ..spec(4) };
    let task = || {
        let task = TrainTask::new("task", chain(false), Arc::new(good(48)), spec.clone());
        task.validation(Arc::new(good(24))).initial_validation(false)
    };
    let expected = whole().task(task());
    let cut = Settings { cuts: Some(vec![2]), ..whole() };
    for (settings, fails) in [(whole(), 1), (cut.clone(), 1), (cut, 3)] {
        let files = Files::new();
        // The pilot pass does not evaluate a chain without metrics.
        FAILS.store(fails, Relaxed);
        let failed = settings.task(task().checkpoint_to(files.file.clone()));
        FAILS.store(0, Relaxed);
        assert_eq!(
            (failed.state, failed.losses.len(), failed.validations.best_step),
            (TaskState::Failed, 2, None)
        );
        assert!(failed.validations.evaluations.is_empty(), "{:?}", failed.validations.evaluations);
        let resumed = settings.task(task().resume_from(files.kept()));
        assert_eq!((resumed.state, &resumed.losses), (TaskState::Done, &expected.losses));
        assert_eq!(resumed.validations.evaluations, expected.validations.evaluations, "{fails}");
        assert_eq!(resumed.weights_sha256, expected.weights_sha256);
    }
}

#[test]
fn a_shard_task_that_fails_when_the_next_minibatch_cannot_be_read_ends_the_task() {
    // The first shard is frozen, so its forward of the next minibatch does not wait for this one's step.
    let task = || {
        let data = Arc::new(Points { bad: 24..32, unreadable: 32..48, ..good(48) });
        TrainTask::new("task", chain(true), data, spec(6))
    };
    let (sender, receiver) = mpsc::channel();
    let settings = Settings { cuts: Some(vec![1]), ..Settings::default() };
    std::thread::spawn(move || drop(sender.send(settings.task(task()))));
    let failed = receiver.recv_timeout(Duration::from_secs(300)).expect("the run hangs");
    assert_eq!((failed.state, failed.losses.len()), (TaskState::Failed, 3));
    let three = plain::train(&chain(true), &good(48), &spec(3)).unwrap();
    assert_eq!(failed.weights_sha256, Some(three.weights_sha256));
}
