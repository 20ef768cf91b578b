//! Tasks that start equal share one evaluation before training, with the same bits as each has alone.

use crate::common::Classifier;
use crate::common::{Fragile, Points, Read, Settings, adamw, gpt2_chain, mlp_chain, spirals, tokens};
use burn::nn::LinearConfig;
use burn::tensor::Device;
use hydra_core::{Chain, Dataset, DatasetError, FloatType, Length, OptimizerSpec, TaskId, TrainSpec};
use hydra_engine::{
    Checkpoint, CheckpointEvery, Evaluation, EvaluationKind, Observer, Orchestrator, RunEvent, RunReport,
    StopFlag, TaskReport, TaskState, TrainTask, Work,
};
use hydra_models::mlp::Dense;
use hydra_models::weights::{SafetensorsSource, SafetensorsWriter};
use hydra_sched::PolicyKind;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;

/// Batches of the evaluation before training: ten blocks in batches of three.
const BATCHES: usize = 4;

fn spec(rate: f64) -> TrainSpec {
    let optimizer = OptimizerSpec::adamw(rate);
    TrainSpec { length: Length::Steps(3), ..TrainSpec { optimizer, ..adamw(3) } }
}

/// The properties that equal tasks share.
#[derive(Clone)]
struct Equal {
    chain: Arc<Chain>,
    validation: Arc<dyn Dataset>,
}

impl Equal {
    fn new() -> Self {
        Self { chain: gpt2_chain(), validation: tokens(10, 2) }
    }

    /// A task with this name, seed and learning rate.
    fn task(&self, name: &str, seed: u64, rate: f64) -> TrainTask {
        let spec = TrainSpec { seed, ..spec(rate) };
        let task = TrainTask::new(name, self.chain.clone(), tokens(7, 1), spec);
        task.validation(self.validation.clone()).cuts(vec![2])
    }

    /// Equal tasks with different learning rates.
    fn tasks(&self, count: usize) -> Vec<TrainTask> {
        (0..count).map(|i| self.task(&format!("equal-{i}"), 0, 1e-3 * (i + 1) as f64)).collect()
    }
}

/// The events of a run: evaluation shard tasks before training, and the results of that evaluation, by task.
#[derive(Default)]
struct SeenEvents {
    shard_tasks: Vec<usize>,
    results: Vec<(usize, Evaluation)>,
    trained: Vec<usize>,
}

struct RecordEvents<F>(Arc<Mutex<SeenEvents>>, F);

impl<F: FnMut(&RunEvent<'_>) + Send> Observer for RecordEvents<F> {
    fn observe(&mut self, event: &RunEvent<'_>) {
        (self.1)(event);
        let mut seen = self.0.lock().unwrap();
        match event {
            RunEvent::Span(span) if span.work == Work::Evaluate && span.step == 0 => {
                seen.shard_tasks.push(span.task.0);
            }
            RunEvent::Evaluated { task, kind: EvaluationKind::Initial, step: 0, result, .. } => {
                assert!(!seen.trained.contains(&task.0), "it is reported before the first minibatch");
                seen.results.push((task.0, result.clone()));
            }
            RunEvent::Minibatch { task, .. } => seen.trained.push(task.0),
            _ => {}
        }
    }
}

/// Runs tasks with an observer of their events.
fn run_with(
    orchestrator: Orchestrator,
    tasks: Vec<TrainTask>,
    then: impl FnMut(&RunEvent<'_>) + Send + 'static,
) -> (RunReport, SeenEvents) {
    let seen = Arc::new(Mutex::new(SeenEvents::default()));
    let mut run = orchestrator.observer(Box::new(RecordEvents(seen.clone(), then)));
    for task in tasks {
        run.submit(task).unwrap();
    }
    let report = run.run().unwrap();
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    (report, seen)
}

fn run(settings: &Settings, tasks: Vec<TrainTask>) -> (RunReport, SeenEvents) {
    run_with(settings.orchestrator(), tasks, |_| {})
}

/// The parts of a report that must not depend on other tasks.
fn outcome(report: &TaskReport) -> impl PartialEq + std::fmt::Debug + use<> {
    let losses: Vec<u64> = report.losses.iter().map(|loss| loss.to_bits()).collect();
    let bits = |of: &Option<Evaluation>| of.as_ref().map(|of| (of.loss.to_bits(), of.loss_targets));
    let evaluations = [bits(&report.validations.initial_validation), bits(&report.validation)];
    (report.state, report.error.clone(), losses, evaluations, report.weights_sha256.clone())
}

fn alone(task: TrainTask) -> TaskReport {
    let report = run(&Settings::default(), vec![task]).0.tasks.remove(0);
    assert!(report.validations.initial_validation_by.is_empty());
    report
}

/// The reports of tasks that each run alone.
fn each_alone(tasks: &[TrainTask]) -> Vec<TaskReport> {
    tasks.iter().cloned().map(alone).collect()
}

fn check(report: &RunReport, alone: &[TaskReport]) {
    assert_eq!(report.tasks.len(), alone.len());
    for (found, expected) in report.tasks.iter().zip(alone) {
        assert_eq!(outcome(found), outcome(expected), "{}", found.name);
    }
}

fn by(report: &RunReport, task: usize) -> Vec<&str> {
    report.tasks[task].validations.initial_validation_by.iter().map(String::as_str).collect()
}

#[test]
fn equal_tasks_are_evaluated_once_to_the_bits_of_each_alone() {
    let equal = Equal::new();
    let mut tasks = equal.tasks(2);
    tasks.insert(1, equal.task("other seed", 7, 1e-3));
    tasks.push(TrainTask::new("no validation", gpt2_chain(), tokens(7, 1), spec(1e-3)));
    let alone = each_alone(&tasks);
    for settings in [
        Settings::default(),
        Settings { prefetch: false, ..Settings::default() },
        Settings { devices: 2, ..Settings::default() },
        Settings { devices: 3, policy: PolicyKind::Random, threads: 2, ..Settings::default() },
        Settings { devices: 2, policy: PolicyKind::Fifo, prefetch: false, ..Settings::default() },
    ] {
        let (report, seen) = run(&settings, tasks.clone());
        check(&report, &alone);
        let of = |tasks: &[usize]| seen.shard_tasks.iter().filter(|task| tasks.contains(task)).count();
        assert_eq!([of(&[0, 2]), of(&[1]), of(&[3])], [2 * BATCHES, 2 * BATCHES, 0], "{settings:?}");
        let mut reported: Vec<usize> = seen.results.iter().map(|(task, _)| *task).collect();
        reported.sort_unstable();
        assert_eq!(reported, [0, 1, 2], "each task's result is reported once");
        assert!(by(&report, 1).is_empty());
        if settings.devices == 1 {
            // The task that evaluates computes all batches.
            let one = if of(&[0]) > 0 { "equal-0" } else { "equal-1" };
            let marks = [by(&report, 0), by(&report, 2)];
            let expected = if one == "equal-0" { [vec![], vec![one]] } else { [vec![one], vec![]] };
            assert_eq!(marks, expected);
        }
    }
}

#[test]
fn many_divide_an_evaluation_among_as_many_as_there_are_devices() {
    let tasks = Equal::new().tasks(6);
    let alone = each_alone(&tasks);
    for devices in [1, 2] {
        let (report, seen) = run(&Settings { devices, ..Settings::default() }, tasks.clone());
        check(&report, &alone);
        assert_eq!(seen.shard_tasks.len(), 2 * BATCHES);
        let mut evaluated = seen.shard_tasks.clone();
        evaluated.sort_unstable();
        evaluated.dedup();
        assert!(evaluated.len() <= devices, "{evaluated:?}");
        assert_eq!(by(&report, 5).len(), evaluated.len());
    }
}

#[test]
fn what_is_not_known_to_be_equal_is_evaluated_each() {
    let equal = Equal::new();
    let narrow = hydra_models::gpt2::chain(&crate::common::config(), None).unwrap();
    let narrow = Arc::new(narrow.with_float_type(FloatType::Bf16));
    let batch = TrainSpec { batch: 4, ..spec(1e-3) };
    let others: [(&str, TrainTask, usize); 5] = [
        ("another seed", equal.task("b", 1, 1e-3), BATCHES),
        ("other batches", TrainTask::new("b", equal.chain.clone(), tokens(7, 1), batch), 3),
        ("data of one's own", equal.task("b", 0, 1e-3).validation(tokens(10, 2)), BATCHES),
        ("floats", Equal { chain: narrow, ..equal.clone() }.task("b", 0, 1e-3), BATCHES),
        ("no evaluation", equal.task("b", 0, 1e-3).initial_validation(false), 0),
    ];
    for (what, other, batches) in others {
        let other = if what == "other batches" { other.validation(equal.validation.clone()) } else { other };
        let tasks = vec![equal.task("a", 0, 1e-3), other.cuts(vec![2])];
        let alone = each_alone(&tasks);
        let (report, seen) = run(&Settings::default(), tasks.clone());
        check(&report, &alone);
        assert_eq!(seen.shard_tasks.len(), 2 * (BATCHES + batches), "{what}");
        assert!(by(&report, 0).is_empty() && by(&report, 1).is_empty(), "{what}");
    }
    // These layers have no cost keys.
    let data: Arc<dyn Dataset> = spirals();
    let task = |name: &str, chain: Arc<Chain>| {
        let spec = TrainSpec { batch: 16, ..spec(1e-3) };
        TrainTask::new(name, chain, spirals(), spec).validation(data.clone()).cuts(vec![])
    };
    let chain = mlp_chain();
    let whole = data.len().div_ceil(16);
    for (other, batches) in [(chain.clone(), whole), (mlp_chain(), 2 * whole)] {
        let tasks = vec![task("a", chain.clone()), task("b", other)];
        let alone = each_alone(&tasks);
        let (report, seen) = run(&Settings::default(), tasks.clone());
        check(&report, &alone);
        assert_eq!(seen.shard_tasks.len(), batches);
    }
}

/// A perceptron with cost keys; its first layer is frozen if `frozen`.
fn noted(frozen: bool, source: Option<&Path>) -> Arc<Chain> {
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Device::flex());
    let (first, builder) =
        (Dense { linear: linear(2, 8) }, Chain::builder("noted").description("rectifiers"));
    let builder = if frozen { builder.frozen("a", first) } else { builder.layer("a", first) };
    let builder = builder.layer("b", Classifier { linear: linear(8, 3) });
    let builder = match source {
        Some(file) => builder.weights(SafetensorsSource::open(file).unwrap()),
        None => builder,
    };
    Arc::new(builder.build().unwrap())
}

#[test]
fn weights_are_equal_by_their_values_whatever_is_frozen_and_wherever_they_come_from() {
    let (dir, data) = (TempDir::new().unwrap(), spirals());
    let task = |name: &str, chain: &Arc<Chain>, seed: u64| {
        let spec = TrainSpec { batch: 16, seed, ..spec(1e-3) };
        TrainTask::new(name, chain.clone(), data.clone(), spec).validation(data.clone()).cuts(vec![])
    };
    let file = dir.path().join("model");
    let written = task("first", &noted(false, None), 5).write_to(Arc::new(SafetensorsWriter), file.clone());
    assert_eq!(alone(written).state, TaskState::Done);
    let batches = data.len().div_ceil(16);
    let (drawn, frozen) = (noted(false, None), noted(true, None));
    let (read, frozen_read) = (noted(false, Some(&file)), noted(true, Some(&file)));
    let cases = [
        (vec![task("a", &drawn, 0), task("b", &frozen, 0)], 1),
        (vec![task("a", &drawn, 0), task("b", &frozen, 1)], 2),
        (vec![task("a", &read, 0), task("b", &read, 1), task("c", &frozen_read, 2)], 1),
        (vec![task("a", &read, 0), task("b", &drawn, 0), task("c", &frozen_read, 0)], 2),
    ];
    for (tasks, evaluations) in cases {
        let alone = each_alone(&tasks);
        let (report, seen) = run(&Settings::default(), tasks.clone());
        check(&report, &alone);
        assert_eq!(seen.shard_tasks.len(), evaluations * batches);
    }
}

/// Validation data with one batch whose first read after admission fails.
struct Flaky {
    data: Arc<dyn Dataset>,
    begun: Arc<AtomicBool>,
}

fn flaky() -> Flaky {
    let begun = Arc::new(AtomicBool::new(false));
    let (armed, failed) = (begun.clone(), AtomicBool::new(false));
    let how = move |data: &dyn Dataset, items: &[usize]| {
        if items[0] == 6 && armed.load(Relaxed) && !failed.swap(true, Relaxed) {
            return Err(DatasetError::OutOfRange { dataset: "flaky".to_owned(), index: 6, len: 0 });
        }
        data.batch(items)
    };
    Flaky { data: Arc::new(Read { data: tokens(10, 2), how }), begun }
}

#[test]
fn what_a_task_that_fails_has_not_evaluated_others_do() {
    for (devices, prefetch) in [(1, true), (1, false), (2, true)] {
        let Flaky { data, begun } = flaky();
        let equal = Equal { validation: data, ..Equal::new() };
        let settings = Settings { devices, prefetch, ..Settings::default() };
        let (report, seen) = run_with(settings.orchestrator(), equal.tasks(4), move |event| {
            if matches!(event, RunEvent::Admitted(_)) {
                begun.store(true, Relaxed);
            }
        });
        let failed: Vec<&TaskReport> =
            report.tasks.iter().filter(|task| task.state == TaskState::Failed).collect();
        assert_eq!(failed.len(), 1, "{report:?}");
        assert!(failed[0].error.as_deref().unwrap().contains("flaky"), "{failed:?}");
        assert!(failed[0].validations.initial_validation.is_none());
        // The batch that could not be read was not computed.
        assert_eq!(seen.shard_tasks.len(), 2 * BATCHES);
        let whole = each_alone(&Equal { validation: tokens(10, 2), ..equal }.tasks(4));
        let done = |task: &TaskReport| task.state == TaskState::Done;
        for (task, expected) in report.tasks.iter().zip(&whole).filter(|(task, _)| done(task)) {
            assert_eq!(outcome(task), outcome(expected));
        }
    }
}

#[test]
fn an_evaluation_that_fails_fails_for_every_task_as_for_each_alone() {
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Device::flex());
    let chain = Chain::builder("fragile")
        .layer("dense", Dense { linear: linear(2, 4) })
        .layer("fragile", Fragile { limit: 100.0 })
        .layer("classifier", Classifier { linear: linear(4, 3) });
    let chain = Arc::new(chain.build().unwrap());
    let validation: Arc<dyn Dataset> = Arc::new(Points { len: 24, bad: 14, panics: false });
    let task = |index: usize| {
        let good = Arc::new(Points { len: 24, bad: 24, panics: false });
        let spec = TrainSpec { batch: 4, clip: None, ..spec(1e-3 * (index + 1) as f64) };
        TrainTask::new(format!("{index}"), chain.clone(), good, spec)
            .validation(validation.clone())
            .cuts(vec![1])
    };
    let tasks: Vec<TrainTask> = (0..3).map(task).collect();
    let alone = each_alone(&tasks);
    let (report, _) = run(&Settings::default(), tasks.clone());
    check(&report, &alone);
    assert!(report.tasks.iter().all(|task| task.state == TaskState::Failed), "{report:?}");
    let (report, _) = run(&Settings { devices: 2, ..Settings::default() }, tasks);
    for task in &report.tasks {
        assert_eq!((task.state, task.trained.steps), (TaskState::Failed, 0));
        assert!(task.error.as_deref().unwrap().contains("the evaluation of step 0: met "), "{task:?}");
    }
}

#[test]
fn what_a_task_that_is_stopped_has_not_evaluated_others_do() {
    for devices in [1, 2] {
        let tasks = Equal::new().tasks(4);
        let flags: Vec<StopFlag> = (0..4).map(|_| StopFlag::new()).collect();
        let stopped = Arc::new(Mutex::new(None));
        let with_flags = tasks.iter().zip(&flags).map(|(task, flag)| task.clone().stop_flag(flag.clone()));
        let first = stopped.clone();
        let (flags, with_flags) = (flags.clone(), with_flags.collect());
        let settings = Settings { devices, ..Settings::default() };
        let (report, seen) = run_with(settings.orchestrator(), with_flags, move |event| {
            if let RunEvent::Evaluating { task: TaskId(task), .. } = event {
                let mut first = first.lock().unwrap();
                if first.is_none() {
                    *first = Some(*task);
                    flags[*task].stop();
                }
            }
        });
        let stopped = stopped.lock().unwrap().unwrap();
        // Batches that were computing are finished and not repeated by others.
        assert_eq!(seen.shard_tasks.len(), 2 * BATCHES);
        for (index, task) in report.tasks.iter().enumerate() {
            match index == stopped {
                true => assert_eq!((task.state, task.trained.steps), (TaskState::Stopped, 0)),
                false => {
                    assert_eq!(outcome(task), outcome(&alone(tasks[index].clone())));
                    assert!(task.validations.initial_validation_by.contains(&report.tasks[stopped].name));
                }
            }
        }
    }
}

#[test]
fn a_task_that_begins_later_finds_the_evaluation_of_one_that_has_ended() {
    let tasks = Equal::new().tasks(4);
    let alone = each_alone(&tasks);
    for concurrent in [1, 2] {
        for devices in [1, 2] {
            let settings = Settings { devices, ..Settings::default() };
            let (report, seen) = run_with(settings.orchestrator().queued(concurrent), tasks.clone(), |_| {});
            check(&report, &alone);
            assert_eq!(seen.shard_tasks.len(), 2 * BATCHES, "{concurrent} on {devices}");
        }
    }
}

/// Tasks with checkpoints in a directory, which resume from those that exist.
fn kept(tasks: &[TrainTask], dir: &Path) -> Vec<TrainTask> {
    let keep = |(index, task): (usize, &TrainTask)| {
        let file = dir.join(format!("{index}.ckpt"));
        let task = task.clone();
        let task = match file.exists() {
            true => task.resume_from(Checkpoint::open(&file).unwrap()),
            false => task,
        };
        task.checkpoint_to(file)
    };
    tasks.iter().enumerate().map(keep).collect()
}

#[test]
fn an_interrupted_evaluation_goes_on_where_it_was() {
    let tasks = Equal::new().tasks(3);
    let alone = each_alone(&tasks);
    for devices in [1, 2] {
        let dir = TempDir::new().unwrap();
        let settings = Settings { devices, ..Settings::default() };
        let stop = StopFlag::new();
        let orchestrator = settings.orchestrator().stop_flag(stop.clone());
        let (report, first) = run_with(orchestrator, kept(&tasks, dir.path()), move |event| {
            if matches!(event, RunEvent::Evaluating { batch: 1, .. }) {
                stop.stop();
            }
        });
        assert!(report.tasks.iter().all(|task| task.state == TaskState::Stopped), "{report:?}");
        let (report, second) = run(&settings, kept(&tasks, dir.path()));
        check(&report, &alone);
        if devices == 1 {
            assert!(!first.shard_tasks.is_empty() && !second.shard_tasks.is_empty());
            assert_eq!(first.shard_tasks.len() + second.shard_tasks.len(), 2 * BATCHES);
        }
    }
}

/// Copies all checkpoints when one is written: the copy is the state after a kill at that moment.
fn copy(dir: &Path, to: PathBuf) -> PathBuf {
    fs::create_dir(&to).unwrap();
    for file in fs::read_dir(dir).unwrap().flatten().map(|file| file.path()) {
        if file.extension().is_some_and(|end| end == "ckpt") {
            fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
        }
    }
    to
}

#[test]
fn a_run_that_is_killed_anywhere_comes_to_the_same_end() {
    let tasks = Equal::new().tasks(3);
    let alone = each_alone(&tasks);
    let (dir, copies) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let all = Arc::new(Mutex::new(Vec::new()));
    let orchestrator =
        Settings::default().orchestrator().checkpoint_every(CheckpointEvery::Time(Duration::ZERO));
    let (from, to, list) = (dir.path().to_owned(), copies.path().to_owned(), all.clone());
    let (report, seen) = run_with(orchestrator, kept(&tasks, dir.path()), move |event| {
        if matches!(event, RunEvent::Checkpointed { .. }) {
            let mut list = list.lock().unwrap();
            let to = to.join(list.len().to_string());
            list.push(copy(&from, to));
        }
    });
    check(&report, &alone);
    assert_eq!(seen.shard_tasks.len(), 2 * BATCHES);
    let all = std::mem::take(&mut *all.lock().unwrap());
    // Some are in the middle of the evaluation, some after a few tasks have started to train.
    for (index, killed) in all.iter().enumerate().step_by(3) {
        let settings = Settings { devices: 1 + index % 2, ..Settings::default() };
        let (report, seen) = run(&settings, kept(&tasks, killed));
        check(&report, &alone);
        assert!(seen.shard_tasks.len() <= 2 * BATCHES, "{index}");
    }
}
