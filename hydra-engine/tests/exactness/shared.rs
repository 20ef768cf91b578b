//! Frozen buffers that several tasks share: stored once, promoted once for all readers, without changing the bits of
//! a task.

use crate::common::Classifier;
use crate::common::{Adapted, Settings, StopAfter, adamw, spirals};
use burn::nn::LinearConfig;
use burn::tensor::Device;
use bytes::Bytes;
use hydra_core::{
    Bandwidth, ByteSize, Chain, DeviceBytes, FileVersion, FloatType, Length, OptimizerSpec, SeededInit,
    TrainSpec, WeightError, WeightSource,
};
use hydra_engine::{
    Checkpoint, CheckpointEvery, DeviceSpec, OptimizerPlacement, Orchestrator, Place, RunReport, StopFlag,
    TaskState, TrainTask, plain,
};
use hydra_models::mlp::Dense;
use hydra_spill::{DeviceLink, Direction, LinkError};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tempfile::TempDir;

const WIDTH: usize = 64;
const TASKS: usize = 4;

/// A file of weights whose values do not depend on the seed. It changes after `reads` reads.
#[derive(Clone)]
struct File {
    name: Option<&'static str>,
    reads: Arc<AtomicUsize>,
    stays: usize,
    /// The file on the disk, if the source names it.
    path: Option<PathBuf>,
    /// Whether the file changes after each read.
    is_written: bool,
}

impl File {
    fn called(name: &'static str) -> Self {
        Self { name: Some(name), reads: Arc::default(), stays: usize::MAX, path: None, is_written: false }
    }

    /// A file without an identity.
    fn silent() -> Self {
        Self { name: None, ..Self::called("") }
    }
}

impl WeightSource for File {
    fn fill(&self, chain: &Chain, buffer: usize, _: u64, out: &mut [f32]) -> Result<(), WeightError> {
        SeededInit.fill(chain, buffer, 77, out)?;
        // The third layer is the one that changes.
        if buffer == 2 && self.reads.fetch_add(1, Relaxed) >= self.stays {
            out[chain.buffers()[2].params[1].range()].fill(0.5);
        }
        if let Some(path) = self.path.as_ref().filter(|_| self.is_written && buffer == 2) {
            fs::write(path, vec![0; self.reads.load(Relaxed)]).expect("a file");
        }
        Ok(())
    }

    fn files_of(&self, _: &Chain, _: usize) -> Option<BTreeSet<FileVersion>> {
        let path = self.path.as_ref()?;
        Some(BTreeSet::from([FileVersion::new(path, &path.metadata().ok()?)]))
    }

    fn origin(&self, _: &Chain, _: usize, _: u64) -> Option<String> {
        self.name.map(str::to_owned)
    }
}

/// A perceptron of nine layers; the last two are trained.
fn chain_of(file: File) -> Chain {
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Device::flex());
    let dense = |inputs, outputs| Dense { linear: linear(inputs, outputs) };
    let builder = Chain::builder("wide").layer("in", dense(2, WIDTH)).weights(file);
    let builder = (0..6).fold(builder, |builder, k| builder.layer(format!("b.{k}"), dense(WIDTH, WIDTH)));
    // Narrower than the frozen layers.
    let builder = builder.layer("last", dense(WIDTH, WIDTH / 2));
    let head = Classifier { linear: linear(WIDTH / 2, 3) };
    let chain = builder.layer("head", head).metrics(["accuracy"]);
    chain.build().and_then(|chain| chain.training_only(&["last", "head"])).expect("a chain")
}

fn chain(file: File) -> Arc<Chain> {
    Arc::new(chain_of(file))
}

fn bytes(chain: &Chain, trained: bool) -> u64 {
    chain.buffers().iter().filter(|buffer| buffer.trained == trained).map(|buffer| buffer.bytes()).sum()
}

fn spec(index: usize) -> TrainSpec {
    let optimizer = OptimizerSpec::adamw(1e-3 * (1.0 + index as f64));
    let length = Length::Steps(3 + index % 2);
    TrainSpec { optimizer, length, seed: index as u64, clip: None, ..adamw(8) }
}

fn task(index: usize, chain: &Arc<Chain>) -> TrainTask {
    TrainTask::new(format!("{index}"), chain.clone(), spirals(), spec(index))
}

fn cut() -> Settings {
    Settings { cuts: Some((1..9).collect()), ..Settings::default() }
}

/// Runs tasks of these chains.
fn run(orchestrator: Orchestrator, settings: &Settings, chains: &[Arc<Chain>]) -> RunReport {
    submitted(orchestrator, settings, chains).run().expect("a run")
}

fn submitted(mut run: Orchestrator, settings: &Settings, chains: &[Arc<Chain>]) -> Orchestrator {
    for (index, chain) in chains.iter().enumerate() {
        let task = task(index, chain);
        let task = settings.cuts.iter().cloned().fold(task, TrainTask::cuts);
        run.submit(task).expect("a task");
    }
    run
}

/// Chains of one file, and as many that are not known to be equal.
fn together_and_apart() -> [Vec<Arc<Chain>>; 2] {
    let file = File::called("base");
    [vec![chain(file); TASKS], (0..TASKS).map(|_| chain(File::silent())).collect()]
}

/// The hashes of the plain loop's results for each task.
fn alone() -> &'static [String; TASKS] {
    static HASHES: OnceLock<[String; TASKS]> = OnceLock::new();
    HASHES.get_or_init(|| {
        std::array::from_fn(|index| {
            let run = plain::train(&chain(File::silent()), spirals().as_ref(), &spec(index));
            run.expect("the plain loop").weights_sha256
        })
    })
}

fn check(report: &RunReport) {
    for (task, expected) in report.tasks.iter().zip(alone()) {
        assert_eq!((task.state, &task.error), (TaskState::Done, &None), "{}", task.name);
        assert_eq!(task.weights_sha256.as_ref(), Some(expected), "{}", task.name);
    }
    assert_eq!(report.tasks.len(), TASKS);
    assert!(report.host_peak_bytes <= report.host_admitted_bytes);
}

#[test]
fn a_base_is_stored_once_and_promoted_once_for_all_of_its_tasks() {
    let [together, apart] = together_and_apart();
    let base = bytes(&together[0], false);
    let reports = [&together, &apart].map(|chains| run(cut().orchestrator(), &cut(), chains));
    reports.iter().for_each(check);
    let [one, each] = reports;
    let others = (TASKS as u64 - 1) * base;
    // A task that starts later reads the largest buffer in addition to that of the store, before any model is within
    // a minibatch.
    assert_eq!(each.host_admitted_bytes - one.host_admitted_bytes, others);
    assert_eq!(each.transfers.parameter_bytes - one.transfers.parameter_bytes, others);
    let read = |report: &RunReport| report.transfers.parameter_bytes + report.transfers.cached_bytes;
    assert_eq!(read(&one), read(&each), "what tasks read is what it was");
}

#[test]
fn host_memory_is_one_base_and_what_each_task_trains() {
    let [together, _] = together_and_apart();
    let admitted = submitted(cut().orchestrator(), &cut(), &together).admit().expect("it fits");
    let admission = admitted.admission();
    let (base, trained) = (bytes(&together[0], false), bytes(&together[0], true));
    assert_eq!(admission.shared_bytes(), base);
    for task in &admission.tasks {
        assert_eq!((task.storage.shared_bytes, task.storage.master_bytes), (base, base + 3 * trained));
    }
    let masters = base + TASKS as u64 * 3 * trained;
    let active = admission.tasks.iter().map(|task| task.memory.active_bytes).sum::<u64>();
    assert!(admission.host_admitted_bytes <= masters + active + admission.host_ahead_bytes, "{admission:?}");
    // With the least memory, one model is within a minibatch, or one buffer is compared.
    let largest = together[0].buffers().iter().map(|buffer| buffer.bytes()).max().expect("images");
    let active = admission.tasks.iter().map(|task| task.memory.active_bytes).max().expect("tasks");
    let least = masters + active.max(largest);
    let fits = |bytes: u64| {
        let run = cut().orchestrator().host_memory(ByteSize(bytes));
        submitted(run, &cut(), &together).admit().is_ok()
    };
    assert!(fits(least) && !fits(masters));
    check(&run(cut().orchestrator().host_memory(ByteSize(least)), &cut(), &together));
}

/// A device's link that counts the uploaded bytes of the base, by the length of its buffers.
struct Counts {
    link: Arc<dyn DeviceLink>,
    buffer: usize,
    promoted: Arc<AtomicU64>,
}

impl DeviceLink for Counts {
    fn name(&self) -> &str {
        self.link.name()
    }

    fn zero_copy(&self) -> bool {
        self.link.zero_copy()
    }

    fn frees_each(&self) -> bool {
        self.link.frees_each()
    }

    fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        if host.len() == self.buffer {
            self.promoted.fetch_add(host.len() as u64, Relaxed);
        }
        self.link.upload(host)
    }

    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError> {
        self.link.download(device)
    }

    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError> {
        self.link.download_into(device, out)
    }

    fn moved(&self, direction: Direction) -> u64 {
        self.link.moved(direction)
    }
}

/// The bytes of the base that these tasks promote, on devices behind a simulated link.
fn promoted(chains: &[Arc<Chain>], memory: ByteSize, devices: usize) -> u64 {
    let (promoted, buffer) = (Arc::new(AtomicU64::new(0)), chains[0].buffers()[1].bytes() as usize);
    let device = DeviceSpec::cpu(memory).with_link(Bandwidth(1e9), Duration::from_micros(10));
    let counted = promoted.clone();
    let link = move |_: &DeviceSpec, link| -> Arc<dyn DeviceLink> {
        Arc::new(Counts { link, buffer, promoted: counted.clone() })
    };
    let orchestrator = Orchestrator::new(device.times(devices)).expect("devices").own_link(link);
    check(&run(orchestrator, &cut(), chains));
    promoted.load(Relaxed)
}

#[test]
fn a_device_with_room_for_one_base_promotes_it_for_all() {
    let [together, apart] = together_and_apart();
    let base = bytes(&together[0], false);
    let admitted = submitted(cut().orchestrator(), &cut(), &apart).admit().expect("it fits");
    let least = admitted.admission().tasks[0].plan.min_device_memory_bytes;
    let one_base = ByteSize(least + base + base / 4);
    for (memory, devices) in [(one_base, 1), (one_base, 2), (Settings::default().memory, 1)] {
        let one = promoted(&together, memory, devices) as f64;
        assert!(one <= 1.15 * devices as f64 * base as f64, "{one} of {base} on {devices} devices");
        if devices == 1 {
            let each = promoted(&apart, memory, devices) as f64;
            assert!(one <= 1.15 / TASKS as f64 * each, "{one} of {each}");
        }
    }
}

#[test]
fn adapters_of_one_base_train_as_alone() {
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Device::flex());
    let chain = |rank: usize| {
        let builder = Chain::builder("adapted").frozen("in", Dense { linear: linear(2, WIDTH) });
        let adapted = || Adapted::new(WIDTH, rank);
        let builder = builder.layer("a", adapted()).layer("b", adapted()).layer("c", adapted());
        let builder = builder.frozen("d", Dense { linear: linear(WIDTH, WIDTH) });
        let head = Classifier { linear: linear(WIDTH, 3) };
        Arc::new(builder.layer("out", head).metrics(["accuracy"]).build().expect("a chain"))
    };
    let ranks = [2, 4, 2, 8];
    let spec = TrainSpec { length: Length::Steps(4), eval_every: Some(2), ..adamw(8) };
    let tasks = ranks.map(|rank| (chain(rank), spec.clone()));
    let settings = Settings { devices: 2, cuts: Some(vec![1, 2, 3, 4]), ..Settings::default() };
    let mut run = settings.orchestrator();
    for (index, (chain, spec)) in tasks.iter().enumerate() {
        let task = TrainTask::new(format!("{index}"), chain.clone(), spirals(), spec.clone());
        run.submit(task.validation(spirals()).cuts(vec![1, 2, 3, 4])).expect("a task");
    }
    let admitted = run.admit().expect("it fits");
    let base = bytes(&tasks[0].0, false);
    assert_eq!(admitted.admission().shared_bytes(), base);
    let report = admitted.start().expect("a run");
    for (task, (chain, spec)) in report.tasks.iter().zip(&tasks) {
        let steps = task.validations.best_step.expect("evaluations");
        let spec = TrainSpec { length: Length::Steps(steps), eval_every: None, ..spec.clone() };
        let plain = plain::train(chain, spirals().as_ref(), &spec).expect("the plain loop");
        assert_eq!(task.weights_sha256, Some(plain.weights_sha256), "{}", task.name);
    }
}

#[test]
fn tasks_that_begin_later_find_what_is_there() {
    let [together, _] = together_and_apart();
    let (base, trained) = (bytes(&together[0], false), bytes(&together[0], true));
    for concurrent in [1, 2] {
        let host = base + 2 * (3 * trained + 64 * 1024);
        let orchestrator = cut().orchestrator().host_memory(ByteSize(host)).queued(concurrent);
        check(&run(orchestrator, &cut(), &together));
    }
    // Without memory for a second base, two of them load theirs one after the other.
    let other = chain(File::called("another"));
    let chains = [&together[0], &other, &together[0], &other].map(Arc::clone);
    let host = base + 3 * trained + 96 * 1024;
    check(&run(cut().orchestrator().host_memory(ByteSize(host)).queued(usize::MAX), &cut(), &chains));
}

#[test]
fn what_is_shared_can_live_on_the_disk() {
    let dir = TempDir::new().expect("a directory");
    let [together, apart] = together_and_apart();
    let settings = Settings { devices: 2, ..cut() };
    let run_in = |host: u64, chains: &[Arc<Chain>]| {
        let run = settings.orchestrator().host_memory(ByteSize(host));
        submitted(run.disk(dir.path().to_owned(), ByteSize::mib(64)), &settings, chains)
    };
    let on_disk = |host: u64, chains: &[Arc<Chain>]| {
        run_in(host, chains).admit().ok().map(|run| run.admission().disk_bytes)
    };
    // The smallest host memory in which it fits.
    let (mut least, mut most) = (0, 4 << 20);
    while most - least > 1024 {
        let middle = u64::midpoint(least, most);
        *(if on_disk(middle, &together).is_some() { &mut most } else { &mut least }) = middle;
    }
    let base = bytes(&together[0], false);
    let found = on_disk(most, &together).expect("it fits");
    let trained = TASKS as u64 * 3 * bytes(&together[0], true);
    assert!(trained < found && found <= base + trained, "{found} of {base} and {trained}");
    for host in [most, most + base / 2, most + base] {
        check(&run_in(host, &together).run().expect("a run"));
    }
    check(&run_in(most + base, &apart).run().expect("a run"));
}

#[test]
fn a_base_whose_files_stay_the_same_is_read_once() {
    let dir = TempDir::new().expect("a directory");
    let path = dir.path().join("base");
    fs::write(&path, "0").expect("a file");
    let reads = |path: Option<&PathBuf>, is_written: bool| {
        let file = File { path: path.cloned(), is_written, ..File::called("base") };
        let chains = vec![chain(file.clone()); TASKS];
        let admitted = submitted(cut().orchestrator(), &cut(), &chains).admit().expect("it fits");
        let before = file.reads.load(Relaxed);
        check(&admitted.start().expect("a run"));
        file.reads.load(Relaxed) - before
    };
    assert_eq!([reads(Some(&path), false), reads(Some(&path), true), reads(None, false)], [1, TASKS, TASKS]);
    let gone = dir.path().join("gone");
    assert_eq!(reads(Some(&gone), false), TASKS, "a file that cannot be examined");
}

#[test]
fn a_task_takes_over_a_base_without_memory_to_read_it_again() {
    let dir = TempDir::new().expect("a directory");
    let path = dir.path().join("base");
    fs::write(&path, "0").expect("a file");
    let file = File { path: Some(path), ..File::called("base") };
    let chains = vec![chain(file.clone()); TASKS];
    let run_in = |host: u64| {
        let run = cut().orchestrator().host_memory(ByteSize(host)).queued(usize::MAX);
        submitted(run, &cut(), &chains).admit()
    };
    // The least host memory for one task after the other.
    let (mut least, mut most) = (0, 4 << 20);
    while most - least > 256 {
        let middle = u64::midpoint(least, most);
        *(if run_in(middle).is_ok() { &mut most } else { &mut least }) = middle;
    }
    let admitted = run_in(most).expect("it fits");
    let before = file.reads.load(Relaxed);
    check(&admitted.start().expect("a run"));
    assert_eq!(file.reads.load(Relaxed) - before, 1);
}

#[test]
fn a_base_that_changes_during_a_run_fails_who_reads_it_then() {
    let file = File::called("base.safetensors");
    let chains = vec![chain(file.clone()); TASKS];
    drop(submitted(cut().orchestrator(), &cut(), &chains).admit().expect("it fits"));
    // It changes after the pilot pass and the first task have read it.
    let changing = File { reads: Arc::default(), stays: file.reads.load(Relaxed) + 1, ..file };
    let report = run(cut().orchestrator(), &cut(), &vec![chain(changing); TASKS]);
    assert_eq!(
        (report.tasks[0].state, &report.tasks[0].weights_sha256),
        (TaskState::Done, &Some(alone()[0].clone()))
    );
    for task in &report.tasks[1..] {
        let error = task.error.as_deref().expect("an error");
        assert_eq!(task.state, TaskState::Failed);
        assert!(error.contains("`b.1.linear.bias` from base.safetensors have changed"), "{error}");
    }
}

#[test]
fn what_differs_is_not_shared_and_right_all_the_same() {
    let file = File::called("base");
    let narrow = Arc::new(chain_of(file.clone()).with_float_type(FloatType::Bf16));
    let wide = chain(file);
    let chains = [wide.clone(), narrow.clone(), wide, narrow.clone()];
    let report = run(cut().orchestrator(), &cut(), &chains);
    for (index, task) in report.tasks.iter().enumerate() {
        let plain = plain::train(&chains[index], spirals().as_ref(), &spec(index)).expect("the plain loop");
        assert_eq!(
            (task.state, task.weights_sha256.as_ref()),
            (TaskState::Done, Some(&plain.weights_sha256))
        );
    }
    let admitted = submitted(cut().orchestrator(), &cut(), &chains).admit().expect("it fits");
    let stored = |float: u64| (4 + float) * bytes(&chains[0], false) / 4;
    assert_eq!(admitted.admission().shared_bytes(), stored(0) + stored(2));
}

#[test]
fn device_homed_tasks_have_one_base_on_their_device() {
    let [together, apart] = together_and_apart();
    let settings = Settings { cuts: Some(vec![4]), ..Settings::default() };
    // Peaks depend on what overlaps; a second base would leave two thirds of the others.
    let part = 0.75;
    let places = [(OptimizerPlacement::Device, Place::Device), (OptimizerPlacement::Partial, Place::Partial)];
    for (placement, place) in places {
        let device_resident = || settings.orchestrator().optimizer_placement(placement);
        let reports = [&together, &apart].map(|chains| run(device_resident(), &settings, chains));
        let base = bytes(&together[0], false);
        let [one, each] = reports.each_ref().map(|report| report.devices[0].peak_bytes);
        let others = ((TASKS as u64 - 1) * base) as f64;
        assert!((each - one) as f64 > others * part, "{place:?}: {one} of {each}, where a base has {base}");
        for task in reports.iter().flat_map(|report| &report.tasks) {
            assert_eq!((task.error.as_deref(), task.plan.optimizer.on), (None, place));
        }
        reports.iter().for_each(check);
    }
}

/// Runs the tasks until `minibatches` of them have been trained, with checkpoints in a directory, and then the rest;
/// the checkpoint of the task `anew` is removed.
fn interrupted(
    orchestrator: impl Fn() -> Orchestrator,
    (settings, chains): (&Settings, &[Arc<Chain>]),
    minibatches: usize,
    anew: usize,
) -> RunReport {
    let dir = TempDir::new().expect("a directory");
    let submitted = |resumes: bool| {
        let mut run = orchestrator().checkpoint_every(CheckpointEvery::Minibatches(1));
        for (index, chain) in chains.iter().enumerate() {
            let file = dir.path().join(format!("{index}.safetensors"));
            let task = settings.cuts.iter().cloned().fold(task(index, chain), TrainTask::cuts);
            let kept = resumes && index != anew && file.exists();
            let task = if kept { task.resume_from(Checkpoint::open(&file).expect("whole")) } else { task };
            run.submit(task.checkpoint_to(file)).expect("a task");
        }
        run
    };
    let stop = StopFlag::new();
    let first = submitted(false).stop_flag(stop.clone()).observer(Box::new(StopAfter(stop, minibatches)));
    first.run().expect("a run");
    submitted(true).run().expect("a run")
}

#[test]
fn what_is_left_of_interrupted_tasks_shares_a_base_too() {
    let [together, _] = together_and_apart();
    let (base, trained) = (bytes(&together[0], false), bytes(&together[0], true));
    let host = ByteSize(base + TASKS as u64 * 3 * trained + 96 * 1024);
    let orchestrator = || cut().orchestrator().host_memory(host);
    for minibatches in [1, 5, 9] {
        let report = interrupted(orchestrator, (&cut(), &together), minibatches, 1);
        check(&report);
        let resumed = report.tasks.iter().filter(|task| task.checkpoints.resumed_at.is_some()).count();
        assert!(resumed > 0 && report.tasks[1].checkpoints.resumed_at.is_none());
    }
}

#[test]
fn a_damaged_checkpoint_harms_no_task_that_shares_with_it() {
    let dir = TempDir::new().expect("a directory");
    let [together, _] = together_and_apart();
    let file = dir.path().join("task.safetensors");
    let stop = StopFlag::new();
    let run = cut().orchestrator().stop_flag(stop.clone()).observer(Box::new(StopAfter(stop, 1)));
    let mut run = run.checkpoint_every(CheckpointEvery::Minibatches(1));
    run.submit(task(0, &together[0]).checkpoint_to(file.clone())).expect("a task");
    run.run().expect("a run");
    let checkpoint = Checkpoint::open(&file).expect("a checkpoint");
    // In the initial values, which are those of the base.
    let mut content = std::fs::read(&file).expect("a file");
    let header = u64::from_le_bytes(content[..8].try_into().expect("a prefix")) as usize;
    content[8 + header + 1] ^= 1;
    std::fs::write(&file, &content).expect("a file");
    let mut run = cut().orchestrator();
    run.submit(task(0, &together[0]).resume_from(checkpoint)).expect("a task");
    run.submit(task(1, &together[0])).expect("a task");
    run.submit(task(2, &together[0])).expect("a task");
    let tasks = run.run().expect("a run").tasks;
    let error = tasks[0].error.as_deref().expect("an error");
    assert!(tasks[0].state == TaskState::Failed && error.contains("is damaged"), "{error}");
    for (task, expected) in tasks.iter().zip(alone()).skip(1) {
        assert_eq!((&task.error, task.weights_sha256.as_ref()), (&None, Some(expected)));
    }
}

#[test]
fn the_base_of_a_checkpoint_is_compared_with_that_of_the_file() {
    let dir = TempDir::new().expect("a directory");
    let (path, checkpoint) = (dir.path().join("base"), dir.path().join("0.safetensors"));
    fs::write(&path, "0").expect("a file");
    let chain_of = |stays| chain(File { path: Some(path.clone()), stays, ..File::called("base") });
    // The file had other values when the task started.
    let (before, now) = (chain_of(0), chain_of(usize::MAX));
    let stop = StopFlag::new();
    let run = cut().orchestrator().stop_flag(stop.clone()).observer(Box::new(StopAfter(stop, 1)));
    let mut run = run.checkpoint_every(CheckpointEvery::Minibatches(1));
    run.submit(task(0, &before).checkpoint_to(checkpoint.clone())).expect("a task");
    assert_eq!(run.run().expect("a run").tasks[0].state, TaskState::Stopped);
    let mut run = cut().orchestrator();
    let resumed = Checkpoint::open(checkpoint).expect("a checkpoint");
    run.submit(task(0, &now).resume_from(resumed)).expect("a task");
    run.submit(task(1, &now)).expect("a task");
    let admitted = run.admit().expect("it fits");
    assert_eq!(admitted.admission().shared_bytes(), bytes(&now, false));
    let report = admitted.start().expect("a run");
    let plain = plain::train(&before, spirals().as_ref(), &spec(0)).expect("the plain loop");
    let [resumed, fresh] = &report.tasks[..] else { panic!("{report:?}") };
    assert_eq!((&resumed.error, &resumed.weights_sha256), (&None, &Some(plain.weights_sha256)));
    let error = fresh.error.as_deref().expect("an error");
    assert_eq!(fresh.state, TaskState::Failed);
    assert!(error.contains("`b.1.linear.bias`"), "{error}");
}

#[test]
fn checkpoints_of_other_bases_go_on_each_with_its_own() {
    let dir = TempDir::new().expect("a directory");
    let file = |index: usize| dir.path().join(format!("{index}.safetensors"));
    let base = chain(File::called("base"));
    // The same file, with its new values.
    let changed = chain(File { stays: 0, ..File::called("base") });
    for (index, chain) in [&base, &changed].into_iter().enumerate() {
        let stop = StopFlag::new();
        let run = cut().orchestrator().stop_flag(stop.clone()).observer(Box::new(StopAfter(stop, 1)));
        let mut run = run.checkpoint_every(CheckpointEvery::Minibatches(1));
        run.submit(task(index, chain).checkpoint_to(file(index))).expect("a task");
        assert_eq!(run.run().expect("a run").tasks[0].state, TaskState::Stopped);
    }
    let resumed = |indices: &[usize]| {
        let mut run = cut().orchestrator();
        for index in indices {
            let checkpoint = Checkpoint::open(file(*index)).expect("a checkpoint");
            run.submit(task(*index, &base).resume_from(checkpoint)).expect("a task");
        }
        // A task that starts from the beginning has the values of the file.
        run.submit(task(2, &base)).expect("a task");
        run.admit().expect("it fits")
    };
    assert_eq!(resumed(&[0]).admission().shared_bytes(), bytes(&base, false));
    let run = resumed(&[0, 1]);
    assert_eq!(run.admission().shared_bytes(), 0);
    let report = run.start().expect("a run");
    let plain = plain::train(&changed, spirals().as_ref(), &spec(1)).expect("the plain loop");
    let expected = [&alone()[0], &plain.weights_sha256, &alone()[2]];
    for (task, expected) in report.tasks.iter().zip(expected) {
        assert_eq!((&task.error, task.weights_sha256.as_ref()), (&None, Some(expected)), "{}", task.name);
    }
}

/// A run with all settings that must not affect sharing.
#[derive(Clone, Debug)]
struct Drawn {
    settings: Settings,
    /// Quarters of the base that fit on a device beyond its minimum.
    quarters: u64,
    concurrent: Option<usize>,
    /// Sixteenths of the base that may be on the disk instead of in host memory.
    on_disk: Option<u64>,
    stop: usize,
    anew: usize,
}

prop_compose! {
    fn drawn()(
        devices in 1usize..=2,
        threads in 1usize..=2,
        zero_copy: bool,
        cuts in prop::collection::btree_set(1usize..9, 3..=8),
        prefetch: bool,
        cache: bool,
        quarters in 0_u64..=8,
        concurrent in prop::option::of(1usize..=TASKS),
        on_disk in prop::option::of(0_u64..=12),
        stop in 1usize..=14,
        anew in 0usize..=TASKS,
    ) -> Drawn {
        let cuts = Some(cuts.into_iter().collect());
        let settings = Settings { devices, threads, zero_copy, cuts, prefetch, cache, ..Settings::default() };
        Drawn { settings, quarters, concurrent, on_disk, stop, anew }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
    #[test]
    fn no_sharing_changes_a_bit(drawn in drawn()) {
        let dir = TempDir::new().expect("a directory");
        let [together, apart] = together_and_apart();
        let base = bytes(&together[0], false);
        let Drawn { mut settings, quarters, concurrent, on_disk, stop, anew } = drawn;
        // One of them is not known to be equal to the others.
        let chains = [&together[0], &together[0], &apart[0], &together[0]].map(Arc::clone);
        let admitted = submitted(settings.orchestrator(), &settings, &chains).admit().expect("it fits");
        let (plan, host) = (admitted.admission().tasks[0].plan.clone(), admitted.admission().host_admitted_bytes);
        let least = plan.shards.iter().map(|shard| shard.peak_bytes + shard.param_bytes).max().expect("shards");
        settings.memory = ByteSize(2 * least + quarters * base / 4);
        let set = |part: Option<u64>| {
            let run = settings.orchestrator();
            let run = concurrent.into_iter().fold(run, Orchestrator::queued);
            part.into_iter().fold(run, |run, part| {
                let run = run.host_memory(ByteSize(host - part * base / 16));
                run.disk(dir.path().to_owned(), ByteSize::mib(64))
            })
        };
        // Use of the disk takes host memory too, so less may be too little.
        let fits = |part: &u64| submitted(set(Some(*part)), &settings, &chains).admit().is_ok();
        let part = on_disk.and_then(|part| (0..=part).rev().find(fits));
        let orchestrator = || set(part);
        check(&interrupted(orchestrator, (&settings, &chains), stop, anew));
    }
}
