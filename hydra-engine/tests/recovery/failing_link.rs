//! Copies that fail, each in its own run: the run ends, other tasks are not affected, and the task's progress is
//! kept.

use crate::common::{PLENTY, adamw, mlp_chain, spirals};
use bytes::Bytes;
use hydra_core::{DeviceBytes, Length, TrainSpec};
use hydra_engine::{
    Checkpoint, CheckpointEvery, DeviceSpec, EngineError, Observer, OptimizerPlacement, Orchestrator,
    RunEvent, RunReport, TaskReport, TaskState, TrainTask,
};
use hydra_models::weights::SafetensorsWriter;
use hydra_spill::{DeviceLink, Direction, LinkError, SpillError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use tempfile::TempDir;

/// The copies that fail, counted over all devices.
struct Fault {
    direction: Direction,
    /// Copies in this direction before the one that fails.
    after: usize,
    /// The device's link fails for good from then on.
    for_good: bool,
    copies: AtomicUsize,
    dead: Mutex<Option<String>>,
}

impl Fault {
    fn new(direction: Direction, after: usize, for_good: bool) -> Arc<Self> {
        Arc::new(Self { direction, after, for_good, copies: AtomicUsize::new(0), dead: Mutex::default() })
    }

    fn copies(&self) -> usize {
        self.copies.load(Relaxed)
    }

    fn happened(&self) -> bool {
        self.copies() > self.after
    }

    /// True if this copy of the device fails.
    fn strikes(&self, device: &str, direction: Direction) -> bool {
        let mut dead = self.dead.lock().unwrap_or_else(PoisonError::into_inner);
        if dead.as_deref() == Some(device) {
            return true;
        }
        let strikes = direction == self.direction && self.copies.fetch_add(1, Relaxed) == self.after;
        if strikes && self.for_good {
            *dead = Some(device.to_owned());
        }
        strikes
    }
}

/// A device's link up to the fault.
struct Breaks {
    link: Arc<dyn DeviceLink>,
    device: String,
    fault: Arc<Fault>,
}

impl Breaks {
    fn attempt(&self, direction: Direction, bytes: usize) -> Result<(), LinkError> {
        if !self.fault.strikes(&self.device, direction) {
            return Ok(());
        }
        let (link, bytes) = (self.name().to_owned(), bytes as u64);
        Err(LinkError::Transfer { link, direction, bytes, source: "the wire is cut".into() })
    }
}

impl DeviceLink for Breaks {
    fn name(&self) -> &str {
        self.link.name()
    }

    fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        self.attempt(Direction::Upload, host.len())?;
        self.link.upload(host)
    }

    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError> {
        self.attempt(Direction::Download, device.len())?;
        self.link.download(device)
    }

    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError> {
        self.attempt(Direction::Download, device.len())?;
        self.link.download_into(device, out)
    }

    fn moved(&self, direction: Direction) -> u64 {
        self.link.moved(direction)
    }
}

/// Tasks with a checkpoint after every minibatch, and its directory.
struct Case {
    devices: usize,
    accumulate: usize,
    eval_every: Option<usize>,
    prefetch: bool,
    placement: OptimizerPlacement,
    /// Checkpoints of the last run that were not written.
    unkept: Arc<AtomicUsize>,
    dir: TempDir,
}

/// Counts checkpoints that are not written.
struct Unkept(Arc<AtomicUsize>);

impl Observer for Unkept {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::CheckpointFailed { .. }) {
            self.0.fetch_add(1, Relaxed);
        }
    }
}

const STEPS: usize = 4;

/// Of 150 to 400 copies; a number that no shard's or minibatch's copies are a multiple of.
const STRIDE: usize = 11;

impl Case {
    fn new(devices: usize, accumulate: usize, eval_every: Option<usize>, prefetch: bool) -> Self {
        let placement = OptimizerPlacement::Host;
        let (unkept, dir) = (Arc::default(), TempDir::new().unwrap());
        Self { devices, accumulate, eval_every, prefetch, placement, unkept, dir }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.safetensors"))
    }

    fn out(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn task(&self, name: &str, seed: u64) -> TrainTask {
        let (accumulate, eval_every) = (self.accumulate, self.eval_every);
        let spec =
            TrainSpec { length: Length::Steps(STEPS), clip: None, accumulate, eval_every, seed, ..adamw(8) };
        let task = TrainTask::new(name, mlp_chain(), spirals(), spec).validation(spirals()).cuts(vec![1, 3]);
        task.checkpoint_to(self.file(name)).write_to(Arc::new(SafetensorsWriter), self.out(name))
    }

    fn orchestrator(&self) -> Orchestrator {
        let run = Orchestrator::new(DeviceSpec::cpu(PLENTY).times(self.devices)).unwrap();
        let run = run.prefetch(self.prefetch).optimizer_placement(self.placement);
        run.checkpoint_every(CheckpointEvery::Minibatches(1))
    }

    /// New tasks with these names, with this fault.
    fn run(&self, names: &[impl AsRef<str>], fault: &Arc<Fault>) -> RunReport {
        self.try_run(names, fault).unwrap()
    }

    fn try_run(&self, names: &[impl AsRef<str>], fault: &Arc<Fault>) -> Result<RunReport, EngineError> {
        for name in names.iter().map(AsRef::as_ref) {
            let _ = (std::fs::remove_file(self.file(name)), std::fs::remove_dir_all(self.out(name)));
        }
        let fault = fault.clone();
        let mut run = self.orchestrator().own_link(move |device, link| {
            Arc::new(Breaks { link, device: device.name.clone(), fault: fault.clone() })
        });
        self.unkept.store(0, Relaxed);
        run = run.observer(Box::new(Unkept(self.unkept.clone())));
        for (name, seed) in names.iter().zip(1..) {
            run.submit(self.task(name.as_ref(), seed)).unwrap();
        }
        run.run()
    }

    fn resumed(&self, task: &TaskReport, seed: u64) -> TaskReport {
        let mut run = self.orchestrator();
        let from = Checkpoint::open(self.file(&task.name)).unwrap();
        run.submit(self.task(&task.name, seed).resume_from(from)).unwrap();
        run.run().unwrap().tasks.remove(0)
    }

    /// Asserts that every task ended as in `whole`, or failed because of the fault and kept its progress; returns how
    /// many failed.
    fn check(&self, report: &RunReport, whole: &RunReport, what: &str) -> usize {
        let mut failed = 0;
        for ((task, whole), seed) in report.tasks.iter().zip(&whole.tasks).zip(1..) {
            if task.state == TaskState::Done {
                same(task, whole, what);
                continue;
            }
            failed += 1;
            assert_eq!(task.state, TaskState::Failed, "{what}");
            let error = task.error.as_deref().unwrap();
            assert!(
                error.contains("the wire is cut") || error.contains("no device is left"),
                "{what}: {error}"
            );
            assert_eq!(task.losses, whole.losses[..task.losses.len()], "{what}");
            let kept = self.file(&task.name).exists();
            // The checkpoint of a minibatch may still be in progress when the next one fails.
            assert!(kept || task.losses.len() <= 1, "{what}: {task:?}");
            assert_eq!(task.model_dir.is_some(), has_model(&self.out(&task.name)), "{what}");
            if kept {
                same(&self.resumed(task, seed), whole, what);
            }
        }
        failed
    }
}

fn has_model(dir: &Path) -> bool {
    dir.join("model.safetensors").is_file()
}

fn same(task: &TaskReport, whole: &TaskReport, what: &str) {
    assert_eq!((task.state, task.error.as_deref()), (TaskState::Done, None), "{what}");
    assert_eq!(task.losses, whole.losses, "{what}");
    assert_eq!(task.weights_sha256, whole.weights_sha256, "{what}");
}

/// One in `STRIDE` of the copies of a run fails, each in its own run.
fn a_copy_fails(case: &Case) {
    for direction in [Direction::Upload, Direction::Download] {
        let none = Fault::new(direction, usize::MAX, false);
        let whole = case.run(&["a", "b"], &none);
        let copies = none.copies();
        assert!(copies > 8 * STEPS, "{copies}");
        for after in (0..copies).step_by(STRIDE) {
            let fault = Fault::new(direction, after, false);
            let what = format!("copy {after} of {copies} {direction}");
            let failed = case.check(&case.run(&["a", "b"], &fault), &whole, &what);
            // The end of one task may prevent the last copies of a run.
            assert_eq!(failed, usize::from(fault.happened()), "{what}");
        }
    }
}

#[test]
fn a_copy_that_fails_ends_its_task_alone() {
    a_copy_fails(&Case::new(1, 1, None, true));
}

#[test]
fn so_it_does_on_two_devices() {
    a_copy_fails(&Case::new(2, 1, Some(1), true));
}

#[test]
fn so_it_does_in_the_middle_of_accumulation() {
    a_copy_fails(&Case::new(2, 2, Some(2), false));
}

#[test]
fn so_it_does_where_several_devices_compute_one_model() {
    a_copy_fails(&Case::new(3, 3, Some(2), true));
}

/// A link that fails for good only affects the shard tasks of its device.
#[test]
fn a_device_whose_link_is_dead_is_left_out() {
    for (direction, after) in [
        (Direction::Upload, 30),
        (Direction::Upload, 61),
        (Direction::Download, 20),
        (Direction::Download, 43),
    ] {
        let case = Case::new(2, 1, None, true);
        let names: Vec<String> = (0..10).map(|i| format!("task {i}")).collect();
        let run = |fault: &Arc<Fault>| case.run(&names, fault);
        let whole = run(&Fault::new(direction, usize::MAX, true));
        let report = run(&Fault::new(direction, after, true));
        let what = format!("dead from copy {after} {direction} on");
        let failed = case.check(&report, &whole, &what);
        // Shard tasks computed, promoted, or being downloaded: their number depends on how soon the download thread
        // detects the failure.
        assert!((1..names.len()).contains(&failed), "{what}: {failed} tasks failed: {report:?}");
    }
}

/// Master weights resident on the device are uploaded once; best ones, checkpoints and models are downloaded.
#[test]
fn a_copy_of_what_lives_on_the_device_fails() {
    let case = Case { placement: OptimizerPlacement::Device, ..Case::new(1, 1, Some(1), true) };
    for direction in [Direction::Upload, Direction::Download] {
        let none = Fault::new(direction, usize::MAX, false);
        let whole = case.run(&["a", "b"], &none);
        for after in (0..none.copies()).step_by(STRIDE) {
            let fault = Fault::new(direction, after, false);
            let what = format!("copy {after} {direction}");
            match case.try_run(&["a", "b"], &fault) {
                Ok(report) => {
                    let failed = case.check(&report, &whole, &what);
                    let unkept = case.unkept.load(Relaxed);
                    assert_eq!(failed + unkept, usize::from(fault.happened()), "{what}: {report:?}");
                }
                // In the comparison that tests whether steps there have the host's bits.
                Err(error) => {
                    assert!(matches!(error, EngineError::Spill(SpillError::Link(_))), "{what}: {error}")
                }
            }
        }
    }
}
