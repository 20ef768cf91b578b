//! Master weights on the disk change no bit: for all divisions between host memory and disk, a task's losses and
//! final weights are those of the plain loop, and no reservation fails.

use crate::common::{self, Settings, adamw, mlp_chain, plus_standing_bytes, spirals, tokens};
use bytes::Bytes;
use hydra_core::optimizer::Sgd;
use hydra_core::{
    ByteSize, Chain, FloatType, Length, ModelWriter, OptimizerSpec, ParamBufferReader, TaskId, TrainSpec,
    WeightError,
};
use hydra_engine::{
    Checkpoint, CheckpointEvery, EngineError, EvaluationTask, Observer, Orchestrator, RunEvent, RunReport,
    TaskReport, TaskState, TierMemory, TrainTask, plain,
};
use hydra_models::gpt2::{self, Gpt2Config, Gpt2Writer};
use hydra_models::mlp;
use hydra_sched::PolicyKind;
use hydra_spill::SpillError;
use proptest::prelude::*;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;
use tempfile::TempDir;

const PLENTY: ByteSize = ByteSize::mib(64);

/// A GPT-2 of ten layers with dropout everywhere.
fn config() -> Gpt2Config {
    Gpt2Config { n_layer: 8, ..common::config() }
}

fn gpt2_chain() -> Arc<Chain> {
    static CHAIN: OnceLock<Arc<Chain>> = OnceLock::new();
    CHAIN.get_or_init(|| Arc::new(gpt2::chain(&config(), None).expect("a chain"))).clone()
}

/// Eleven blocks in batches of four: the last minibatch of an epoch is smaller. Clipping and dropout are on.
fn spec() -> TrainSpec {
    TrainSpec { length: Length::Steps(5), ..adamw(4) }
}

fn task(spec: &TrainSpec) -> TrainTask {
    TrainTask::new("task", gpt2_chain(), tokens(11, 1), spec.clone())
}

/// The tasks of a run: this one, cut as the settings require, and others.
fn tasks(settings: &Settings, task: &TrainTask) -> Vec<TrainTask> {
    let first = settings.cuts.iter().fold(task.clone(), |task, cuts| task.cuts(cuts.clone()));
    let other = |other: usize| {
        let spec = TrainSpec { seed: 99 + other as u64, ..adamw(3) };
        TrainTask::new(format!("other-{other}"), gpt2_chain(), tokens(7, other as u32), spec)
    };
    std::iter::once(first).chain((0..settings.others).map(other)).collect()
}

fn submitted(run: Orchestrator, settings: &Settings, task: &TrainTask) -> Orchestrator {
    let mut run = run;
    for task in tasks(settings, task) {
        run.submit(task).expect("a task");
    }
    run
}

/// The smallest host memory of a run with a disk, and the smallest with all master weights in host memory.
fn bounds(settings: &Settings, task: &TrainTask) -> (u64, u64) {
    let with = |disk: bool| {
        let run = settings.orchestrator().host_memory(ByteSize(1));
        let run = if disk { run.disk("nowhere".into(), PLENTY) } else { run };
        match submitted(run, settings, task).admit() {
            Err(EngineError::HostMemory { needed, .. }) => needed,
            other => panic!("expected too little host memory, found {other:?}"),
        }
    };
    (with(true), with(false))
}

/// Runs a task, with others, in this much host memory.
fn run(settings: &Settings, task: &TrainTask, host: u64) -> RunReport {
    let dir = TempDir::new().expect("a directory");
    let run = settings.orchestrator().host_memory(ByteSize(host)).disk(dir.path().to_owned(), PLENTY);
    let mut run = submitted(run, settings, task).admit().expect("it fits");
    run.reserve_disk().expect("room");
    assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 0, "files have no name");
    #[cfg(target_os = "linux")]
    let space: u64 =
        common::scratch_files(dir.path()).iter().map(|file| fs::metadata(file).expect("a file").len()).sum();
    let report = run.start().expect("a run");
    #[cfg(target_os = "linux")]
    assert_eq!(
        space,
        report.tasks.iter().map(|task| task.plan.disk_bytes).sum::<u64>(),
        "space for what lives there"
    );
    assert!(report.host_peak_bytes <= report.host_budget_bytes, "{report:?}");
    assert!(report.host_admitted_bytes <= report.host_budget_bytes, "{report:?}");
    assert!(report.tasks.iter().all(|task| task.error.is_none()), "{:?}", report.tasks);
    report
}

fn agrees(settings: &Settings, task: &TrainTask, (chain, spec): (&Arc<Chain>, &TrainSpec), host: u64) {
    let data = if task_is_mlp(chain) { spirals() } else { tokens(11, 1) };
    let plain = plain::train(chain, data.as_ref(), spec).expect("the plain loop");
    let report = run(settings, task, host).tasks.remove(0);
    assert_eq!(report.losses, plain.losses, "{settings:?} in {host}");
    assert_eq!(report.weights_sha256, Some(plain.weights_sha256), "{settings:?} in {host}");
}

fn task_is_mlp(chain: &Chain) -> bool {
    chain.name().contains("mlp")
}

#[test]
fn all_masters_on_the_disk_equal_the_plain_loop() {
    for cuts in [vec![], vec![5], vec![1, 2, 4, 6, 7, 9]] {
        let settings = Settings { cuts: Some(cuts), ..Settings::default() };
        let task = task(&TrainSpec { clip: None, ..spec() });
        let (least, all) = bounds(&settings, &task);
        assert!(least < all, "{least} of {all}");
        agrees(&settings, &task, (&gpt2_chain(), &TrainSpec { clip: None, ..spec() }), least);
    }
}

#[test]
fn every_byte_on_the_disk_is_accounted_for() {
    let settings = Settings { cuts: Some(vec![1, 2, 4, 6, 7, 9]), others: 1, ..Settings::default() };
    let task = task(&spec());
    let (least, all) = bounds(&settings, &task);
    let whole = run(&settings, &task, all);
    let moved = |report: &RunReport| (report.transfers.disk_read_bytes, report.transfers.disk_written_bytes);
    assert_eq!((moved(&whole), whole.tasks[0].plan.disk_bytes), ((0, 0), 0), "what fits stays");
    let part = run(&settings, &task, (least + all) / 2);
    let tight = run(&settings, &task, least);
    let on_disk = |report: &RunReport| report.tasks.iter().map(|task| task.plan.disk_bytes).sum::<u64>();
    assert!(0 < on_disk(&part) && on_disk(&part) < on_disk(&tight), "{part:?}\n{tight:?}");
    for report in [&part, &tight] {
        let (read, written) = moved(report);
        assert!(read > written && written > on_disk(report), "{report:?}");
    }
    let masters = gpt2_chain().buffers().iter().map(|buffer| 3 * buffer.master_bytes()).sum::<u64>();
    assert!(masters < on_disk(&tight) && on_disk(&tight) <= 2 * masters, "{} of {masters}", on_disk(&tight));
    let hashes = |report: &RunReport| {
        report.tasks.iter().map(|task| task.weights_sha256.clone().expect("a hash")).collect::<Vec<_>>()
    };
    assert_eq!((hashes(&part), hashes(&tight)), (hashes(&whole), hashes(&whole)));
}

#[test]
fn masters_leave_before_a_device_has_nothing_to_do() {
    let settings =
        Settings { devices: 2, others: 1, cuts: Some(vec![1, 2, 4, 6, 7, 9]), ..Settings::default() };
    let task = task(&spec());
    // Memory for all master weights and for one model within a minibatch.
    let (_, host) = bounds(&settings, &task);
    let admitted = |disk: Option<ByteSize>| {
        let run = settings.orchestrator().host_memory(ByteSize(host));
        let run = disk.into_iter().fold(run, |run, budget| run.disk("nowhere".into(), budget));
        let run = submitted(run, &settings, &task).admit().expect("it fits");
        let admission = run.admission();
        (admission.active_models, admission.disk_bytes > 0)
    };
    assert_eq!(admitted(None), (1, false));
    assert_eq!(admitted(Some(PLENTY)), (2, true));
    assert_eq!(admitted(Some(ByteSize(1000))), (1, false), "a disk that is too small");
    agrees(&settings, &task, (&gpt2_chain(), &spec()), host);
}

#[test]
fn every_option_of_a_spec_equals_the_plain_loop_from_the_disk() {
    let base = TrainSpec { clip: None, ..spec() };
    let sgd = |momentum| OptimizerSpec::from(Sgd { lr: 0.05, momentum, weight_decay: 0.01 });
    let specs = [
        base.clone(),
        TrainSpec { accumulate: 3, ..base.clone() },
        TrainSpec { accumulate: 2, clip: Some(0.5), ..base.clone() },
        TrainSpec { optimizer: sgd(0.0), ..base.clone() },
        TrainSpec { optimizer: sgd(0.9), length: Length::Epochs(1), ..base },
    ];
    let settings = Settings { cuts: Some(vec![1, 3, 6, 8]), devices: 2, others: 2, ..Settings::default() };
    for spec in specs {
        let task = task(&spec);
        agrees(&settings, &task, (&gpt2_chain(), &spec), bounds(&settings, &task).0);
    }
}

#[test]
fn other_chains_and_types_of_floats_train_from_the_disk() {
    let narrow = gpt2::chain(&config(), None).expect("a chain").with_float_type(FloatType::Bf16);
    let chains = [(Arc::new(narrow), tokens(11, 1)), (mlp_chain(), spirals())];
    for (chain, data) in chains {
        let spec = TrainSpec { clip: None, ..spec() };
        let task = TrainTask::new("task", chain.clone(), data, spec.clone());
        for zero_copy in [false, true] {
            let cuts = if chain.layers().len() > 5 { vec![1, 3, 4, 7] } else { vec![1, 2] };
            let settings = Settings { cuts: Some(cuts), zero_copy, ..Settings::default() };
            let (least, all) = bounds(&settings, &task);
            agrees(&settings, &task, (&chain, &spec), least);
            agrees(&settings, &task, (&chain, &spec), (least + all) / 2);
        }
    }
}

fn best_of(report: &TaskReport) -> impl PartialEq + std::fmt::Debug + use<> {
    let evaluations =
        [&report.validations.initial_validation, &report.validation, &report.test].map(Clone::clone);
    let periodic = report.validations.evaluations.clone();
    (
        report.losses.clone(),
        evaluations,
        periodic,
        report.validations.best_step,
        report.weights_sha256.clone(),
    )
}

fn evaluated() -> TrainTask {
    let spec = TrainSpec { eval_every: Some(2), accumulate: 2, ..spec() };
    task(&spec).validation(tokens(5, 3)).test(tokens(4, 2))
}

#[test]
fn best_weights_are_put_back_on_the_disk() {
    let whole = Settings::default().task(evaluated());
    assert!(whole.validations.best_step.is_some());
    for zero_copy in [false, true] {
        let settings = Settings { cuts: Some(vec![2, 5, 7]), zero_copy, ..Settings::default() };
        let (least, all) = bounds(&settings, &evaluated());
        let report = run(&settings, &evaluated(), least).tasks.remove(0);
        assert!(report.plan.disk_bytes > 0);
        assert_eq!(best_of(&report), best_of(&whole));
        let report = run(&settings, &evaluated(), least.midpoint(all)).tasks.remove(0);
        assert_eq!(best_of(&report), best_of(&whole));
    }
}

#[test]
fn best_weights_take_host_memory_only_where_they_are_used() {
    let settings = Settings { cuts: Some(vec![2, 5, 7]), ..Settings::default() };
    let without = task(&TrainSpec { accumulate: 2, ..spec() }).validation(tokens(5, 3)).test(tokens(4, 2));
    let [with, without] = [evaluated(), without].map(|task| bounds(&settings, &task));
    let largest = gpt2_chain().buffers().iter().map(|buffer| buffer.moment_bytes()).max().expect("an image");
    let all: u64 = gpt2_chain().buffers().iter().map(|buffer| buffer.moment_bytes()).sum();
    assert_eq!(with.1 - without.1, all, "in host memory they are a copy");
    // One buffer at the optimizer and one at the writer.
    assert!(with.0 - without.0 <= 2 * largest, "{with:?} {without:?}, an image of {largest}");
}

#[test]
fn a_checkpoint_of_masters_on_the_disk_goes_on_anywhere() {
    let dir = TempDir::new().expect("a directory");
    let file = dir.path().join("task.safetensors");
    let kept = || evaluated().checkpoint_to(file.clone());
    let whole = Settings::default().task(evaluated());
    let cut = Settings { cuts: Some(vec![1, 3, 6, 8]), devices: 2, others: 1, ..Settings::default() };
    let (least, all) = bounds(&cut, &kept());
    // Each leg is stopped after some minibatches: on the disk, in host memory, and on the disk again.
    for (leg, host) in [least, all, (least + all) / 2].into_iter().enumerate() {
        let stop = hydra_engine::StopFlag::new();
        let task = match file.exists() {
            true => kept().resume_from(Checkpoint::open(&file).expect("a checkpoint")),
            false => kept(),
        };
        let scratch = TempDir::new().expect("a directory");
        let run = cut.orchestrator().host_memory(ByteSize(host)).disk(scratch.path().to_owned(), PLENTY);
        let run = run.checkpoint_every(CheckpointEvery::Minibatches(1)).stop_flag(stop.clone());
        let run = run.observer(Box::new(StopAt { step: leg + 1, stop }));
        let report = submitted(run, &cut, &task).run().expect("a run").tasks.remove(0);
        assert_eq!((report.state, report.error), (TaskState::Stopped, None), "leg {leg}");
    }
    let task = evaluated().resume_from(Checkpoint::open(&file).expect("a checkpoint"));
    let settings = Settings { cuts: Some(vec![2, 6]), ..Settings::default() };
    let report = run(&settings, &task, bounds(&settings, &task).0).tasks.remove(0);
    assert!(report.plan.disk_bytes > 0 && report.checkpoints.resumed_at >= Some(2), "{report:?}");
    assert_eq!(best_of(&report), best_of(&whole));
}

/// A chain whose tied table has nearly all of its parameters, several pieces of them.
fn wide_chain() -> Arc<Chain> {
    static CHAIN: OnceLock<Arc<Chain>> = OnceLock::new();
    let config = || Gpt2Config { n_layer: 1, vocab_size: 140_000, ..common::config() };
    CHAIN.get_or_init(|| Arc::new(gpt2::chain(&config(), None).expect("a chain"))).clone()
}

fn table_bytes() -> u64 {
    wide_chain().buffers().iter().map(|buffer| buffer.moment_bytes()).max().expect("an image")
}

#[test]
fn a_tied_table_on_the_disk_takes_less_host_memory_than_in_it() {
    let spec = TrainSpec { clip: None, length: Length::Steps(3), ..spec() };
    let task = TrainTask::new("task", wide_chain(), tokens(11, 1), spec.clone());
    let settings = Settings { cuts: Some(vec![1, 2]), ..Settings::default() };
    let (least, _) = bounds(&settings, &task);
    // Its parameters are promoted and written, and the head's gradient waits for the embedding's; master weights are
    // stepped in pieces. In host memory master weights and gradients are five times the table.
    let piece = 12 * hydra_spill::PIECE as u64;
    assert!(least < 4 * table_bytes() + piece + 100_000, "{least}, a table of {}", table_bytes());
    assert!(4 * table_bytes() + piece + 100_000 < 5 * table_bytes());
    agrees(&settings, &task, (&wide_chain(), &spec), least);
    let report = run(&settings, &task, least);
    assert!(report.tasks[0].plan.disk_bytes > 3 * table_bytes(), "{report:?}");
}

#[test]
fn a_table_of_several_pieces_is_kept_restored_and_goes_on() {
    let dir = TempDir::new().expect("a directory");
    let file = dir.path().join("task.safetensors");
    let task = || {
        let spec = TrainSpec { eval_every: Some(1), accumulate: 2, length: Length::Steps(3), ..spec() };
        TrainTask::new("task", wide_chain(), tokens(11, 1), spec).validation(tokens(3, 3)).test(tokens(2, 2))
    };
    let whole = Settings::default().task(task());
    let settings = Settings { cuts: Some(vec![1, 2]), ..Settings::default() };
    let (least, _) = bounds(&settings, &task());
    let stop = hydra_engine::StopFlag::new();
    let run_to = settings.orchestrator().host_memory(ByteSize(least)).disk(dir.path().to_owned(), PLENTY);
    let run_to = run_to.checkpoint_every(CheckpointEvery::Minibatches(1)).stop_flag(stop.clone());
    let run_to = run_to.observer(Box::new(StopAt { step: 2, stop }));
    let stopped = submitted(run_to, &settings, &task().checkpoint_to(file.clone())).run().expect("a run");
    assert_eq!((stopped.tasks[0].state, &stopped.tasks[0].error), (TaskState::Stopped, &None));
    let resumed = task().resume_from(Checkpoint::open(&file).expect("a checkpoint"));
    let (again, _) = bounds(&settings, &resumed);
    assert_eq!(again, least, "what was admitted is admitted when it goes on");
    let report = run(&settings, &resumed, least).tasks.remove(0);
    assert!(report.plan.disk_bytes > 0 && report.checkpoints.resumed_at >= Some(1), "{report:?}");
    assert_eq!(best_of(&report), best_of(&whole));
}

#[test]
fn groups_of_one_task_on_several_devices_each_find_room() {
    let spec = TrainSpec { eval_every: Some(1), length: Length::Steps(2), ..adamw(12) };
    let chain = Arc::new(mlp::chain(&[2, 1024, 1024, 1024], 3).expect("a chain"));
    let task = TrainTask::new("task", chain, spirals(), spec).validation(spirals());
    let best = best_of(&Settings::default().task(task.clone()));
    let replicas = [(true, 1), (false, 1), (false, 5)].map(|(zero_copy, eighths)| {
        let cuts = Some(vec![1, 2, 3]);
        let settings = Settings { devices: 3, zero_copy, cuts, ..Settings::default() };
        let (least, all) = bounds(&settings, &task);
        let host = least + (all - least) * eighths / 8;
        assert_eq!(best_of(&run(&settings, &task, host).tasks[0]), best, "{settings:?} in {host}");
        let run = settings.orchestrator().host_memory(ByteSize(host)).disk("nowhere".into(), PLENTY);
        let admitted = submitted(run, &settings, &task).admit().expect("it fits");
        let admission = admitted.admission();
        assert!(admission.disk_bytes > 0);
        admission.tasks[0].replicas
    });
    assert_eq!(replicas, [1, 1, 3], "as many as what they read has room for");
}

/// Stops the run when the first task has trained a number of minibatches.
struct StopAt {
    step: usize,
    stop: hydra_engine::StopFlag,
}

impl hydra_engine::Observer for StopAt {
    fn observe(&mut self, event: &hydra_engine::RunEvent<'_>) {
        if let hydra_engine::RunEvent::Minibatch { task, step, .. } = event
            && task.0 == 0
            && step + 1 >= self.step
        {
            self.stop.stop();
        }
    }
}

#[test]
fn a_checkpoint_that_is_damaged_fails_its_task_although_it_was_on_the_disk_already() {
    let dir = TempDir::new().expect("a directory");
    let file = dir.path().join("task.safetensors");
    let mut kept = Settings::default().orchestrator().checkpoint_every(CheckpointEvery::Minibatches(1));
    let stop = hydra_engine::StopFlag::new();
    kept = kept.stop_flag(stop.clone()).observer(Box::new(StopAt { step: 2, stop }));
    kept.submit(evaluated().checkpoint_to(file.clone())).expect("a task");
    kept.run().expect("a run");
    let checkpoint = Checkpoint::open(&file).expect("a checkpoint");
    let mut bytes = fs::read(&file).expect("a file");
    let last = bytes.len() - 3;
    bytes[last] ^= 1;
    fs::write(&file, &bytes).expect("a file");
    let settings = Settings { cuts: Some(vec![2]), others: 1, ..Settings::default() };
    let task = evaluated().resume_from(checkpoint);
    let least = bounds(&settings, &task).0;
    let run = settings.orchestrator().host_memory(ByteSize(least)).disk(dir.path().to_owned(), PLENTY);
    let report = submitted(run, &settings, &task).run().expect("a run");
    let said = report.tasks[0].error.clone().expect("an error");
    assert!(said.contains("is damaged: its checksum is "), "{said}");
    assert_eq!((report.tasks[0].state, report.tasks[1].state), (TaskState::Failed, TaskState::Done));
}

#[test]
fn models_are_written_and_evaluated_from_the_disk() {
    let dir = TempDir::new().expect("a directory");
    let settings = Settings { cuts: Some(vec![1, 2, 4, 6, 7, 9]), ..Settings::default() };
    let written = |to: &str| task(&spec()).write_to(Arc::new(Gpt2Writer::new(config())), dir.path().join(to));
    let (least, all) = bounds(&settings, &task(&spec()));
    run(&settings, &written("disk"), least);
    run(&settings, &written("memory"), all);
    let model = |of: &str| fs::read(dir.path().join(of).join("model.safetensors")).expect("a model");
    assert!(model("disk") == model("memory"), "the files are the same");

    // Little device memory, so that the model is cut.
    let settings = Settings { memory: plus_standing_bytes(250_000), ..Settings::default() };
    let evaluate = |host: u64, disk: bool| {
        let run = settings.orchestrator().host_memory(ByteSize(host));
        let run = if disk { run.disk(dir.path().to_owned(), PLENTY) } else { run };
        run.evaluate(EvaluationTask { chain: gpt2_chain(), data: tokens(9, 4), batch: 2, seed: 7 })
    };
    let needed = |disk: bool| match evaluate(1, disk) {
        Err(EngineError::HostMemory { needed, .. }) => needed,
        other => panic!("expected too little host memory, found {other:?}"),
    };
    let (least, all) = (needed(true), needed(false));
    assert!(least < all, "{least} of {all}");
    // Each call measures anew, and may cut a little differently.
    let between = least.midpoint(all);
    assert_eq!(evaluate(between, true).expect("a loss"), evaluate(2 * all, false).expect("a loss"));
}

/// A writer that holds all buffers before it writes, and keeps them for a while.
struct Collects {
    /// Opened when the other task has trained.
    gate: Arc<(Mutex<bool>, Condvar)>,
    kept: Arc<Mutex<Vec<Bytes>>>,
}

impl ModelWriter for Collects {
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, _: &Path) -> Result<(), WeightError> {
        let mut kept = self.kept.lock().expect("a list");
        let read = |buffer: usize| buffers.buffer(buffer).map(|bytes| kept.push(bytes));
        let all = (0..chain.buffers().len()).try_for_each(read);
        let (open, patience) = (self.gate.0.lock().expect("a gate"), Duration::from_secs(60));
        let (open, _) = self.gate.1.wait_timeout_while(open, patience, |open| !*open).expect("a gate");
        assert!(*open, "the other task does not train");
        all
    }
}

/// Opens a gate when the second task has trained its last minibatch.
struct Trained(Arc<(Mutex<bool>, Condvar)>);

impl Observer for Trained {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if let RunEvent::Minibatch { task: TaskId(1), step, steps, .. } = event
            && step + 1 == *steps
        {
            *self.0.0.lock().expect("a gate") = true;
            self.0.1.notify_all();
        }
    }
}

#[test]
fn a_writer_that_holds_what_it_was_given_is_refused_more_and_takes_nothing_from_others() {
    let sizes: Vec<usize> = std::iter::once(2).chain([100; 20]).collect();
    let chain = Arc::new(mlp::chain(&sizes, 3).expect("a chain"));
    let dir = TempDir::new().expect("a directory");
    let (gate, kept) = (Arc::<(Mutex<bool>, Condvar)>::default(), Arc::<Mutex<Vec<Bytes>>>::default());
    let with = |host: u64| {
        let settings = Settings { policy: PolicyKind::Fifo, ..Settings::default() };
        let run = settings.orchestrator().host_memory(ByteSize(host)).disk(dir.path().to_owned(), PLENTY);
        // The other task does not wait for a busy writer, however soon its checkpoint is due.
        let run = run.checkpoint_every(CheckpointEvery::Auto);
        let mut run = run.observer(Box::new(Trained(gate.clone())));
        let task = |name: &str, steps: usize| {
            let spec = TrainSpec { length: Length::Steps(steps), clip: None, ..adamw(4) };
            TrainTask::new(name, chain.clone(), spirals(), spec).cuts((1..chain.len()).collect())
        };
        let collects = Arc::new(Collects { gate: gate.clone(), kept: kept.clone() });
        run.submit(task("collects", 2).write_to(collects, dir.path().join("model"))).expect("a task");
        run.submit(task("other", 12).checkpoint_to(dir.path().join("other.safetensors"))).expect("a task");
        run
    };
    let Err(EngineError::HostMemory { needed, .. }) = with(1).admit() else { panic!("a byte suffices") };
    let report = with(needed).run().expect("a run");
    let [collects, other] = &report.tasks[..] else { panic!("two tasks") };
    assert_eq!((other.state, other.error.as_deref()), (TaskState::Done, None));
    assert_eq!(other.checkpoints.checkpoint_error, None);
    let said = collects.error.clone().expect("an error");
    assert_eq!(collects.state, TaskState::Failed);
    assert!(said.contains("drop each buffer before reading the next"), "{said}");
    let kept = kept.lock().expect("a list").len();
    assert!(0 < kept && kept < chain.buffers().len(), "{kept}");
    assert!(report.host_peak_bytes <= needed, "{report:?}");
}

#[test]
fn what_cannot_be_is_refused_before_anything_trains() {
    let settings = Settings { cuts: Some(vec![1, 2, 4, 6, 7, 9]), ..Settings::default() };
    let task = task(&spec());
    let (least, all) = bounds(&settings, &task);
    let dir = TempDir::new().expect("a directory");
    let refused = |host: u64, disk: Option<(&Path, ByteSize)>| {
        let run = settings.orchestrator().host_memory(ByteSize(host));
        let run = match disk {
            Some((dir, budget)) => run.disk(dir.to_owned(), budget),
            None => run,
        };
        submitted(run, &settings, &task).run().expect_err("it does not fit")
    };
    let without = refused(all - 1, None).to_string();
    assert!(without.contains("of host memory") && without.contains("the budget is "), "{without}");
    let tight = refused(least - 1, Some((dir.path(), PLENTY))).to_string();
    assert!(tight.contains(" of working memory to read and write them, "), "{tight}");
    let small = refused(least, Some((dir.path(), ByteSize(1000))));
    assert!(matches!(small, EngineError::DiskMemory { budget: 1000, .. }), "{small}");
    assert!(small.to_string().contains(&format!("on the disk `{}`", dir.path().display())), "{small}");
    let missing = dir.path().join("missing");
    let missing = refused(least, Some((&missing, PLENTY)));
    assert!(matches!(missing, EngineError::Spill(SpillError::DiskHeadroom { .. })), "{missing}");
}

#[test]
fn as_many_models_are_within_a_minibatch_as_the_smallest_of_them_have_room() {
    let with = |host: u64| {
        let mut run =
            Settings { devices: 2, ..Settings::default() }.orchestrator().host_memory(ByteSize(host));
        run.submit(task(&spec())).expect("a task");
        for small in ["one", "two"] {
            run.submit(TrainTask::new(small, mlp_chain(), spirals(), spec())).expect("a task");
        }
        run.admit().map(|run| run.admission().clone())
    };
    let Err(EngineError::HostMemory { needed, .. }) = with(1) else { panic!("a byte suffices") };
    let admission = with(needed).expect("it fits");
    assert_eq!((admission.active_models, admission.host_admitted_bytes), (2, needed));
}

#[test]
fn what_no_memory_could_hold_is_refused_with_the_numbers() {
    // Memory for the batches of a minibatch, which overflows the byte count.
    let spec = TrainSpec { batch: usize::MAX, accumulate: usize::MAX, ..spec() };
    let settings = Settings { devices: 2, others: 1, cuts: Some(vec![1, 5]), ..Settings::default() };
    let first = task(&spec);
    let second = TrainTask::new("as large", gpt2_chain(), tokens(7, 2), spec);
    for disk in [false, true] {
        let run = settings.orchestrator().host_memory(PLENTY);
        let run = if disk { run.disk("nowhere".into(), PLENTY) } else { run };
        let mut run = submitted(run, &settings, &first);
        run.submit(second.clone()).expect("a task");
        let refused = run.admit().expect_err("it does not fit");
        assert!(matches!(refused, EngineError::HostMemory { needed: u64::MAX, .. }), "{refused}");
    }
}

fn plain_hash() -> &'static str {
    static HASH: OnceLock<String> = OnceLock::new();
    HASH.get_or_init(|| {
        plain::train(&gpt2_chain(), tokens(11, 1).as_ref(), &spec()).expect("plain").weights_sha256
    })
}

prop_compose! {
    fn settings()(
        devices in 1usize..=2,
        threads in 1usize..=2,
        zero_copy: bool,
        cuts in prop::collection::btree_set(1usize..10, 0..=6),
        policy in prop::sample::select(PolicyKind::ALL.to_vec()),
        prefetch: bool,
        others in 0usize..=2,
    ) -> Settings {
        let cuts = Some(cuts.into_iter().collect());
        Settings { devices, threads, zero_copy, cuts, policy, prefetch, others, ..Settings::default() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
    #[test]
    fn no_setting_and_no_budget_changes_a_bit(settings in settings(), share in 0_u64..=100) {
        let task = task(&spec());
        let (least, all) = bounds(&settings, &task);
        let report = run(&settings, &task, least + (all - least) * share / 100);
        prop_assert_eq!(report.tasks[0].weights_sha256.as_deref(), Some(plain_hash()));
    }
}

/// A memory event of a run.
#[derive(Debug)]
struct Told {
    tiers: Vec<TierMemory>,
    at_s: f64,
    /// True if something was computed after it.
    then_computed: bool,
}

/// Records the memory events of a run.
#[derive(Clone, Default)]
struct Tiers(Arc<Mutex<Vec<Told>>>);

impl Observer for Tiers {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let mut told = self.0.lock().unwrap();
        match event {
            RunEvent::Memory { tiers, at_s } => {
                told.push(Told { tiers: tiers.to_vec(), at_s: *at_s, then_computed: false });
            }
            RunEvent::Minibatch { .. } | RunEvent::Evaluated { .. } | RunEvent::Evaluating { .. } => {
                told.iter_mut().for_each(|before| before.then_computed = true);
            }
            _ => {}
        }
    }
}

#[test]
fn a_run_tells_how_much_of_each_tier_is_reserved() {
    let dir = TempDir::new().expect("a directory");
    let settings = Settings { devices: 2, cuts: Some(vec![2, 6]), others: 1, ..Settings::default() };
    let host = bounds(&settings, &evaluated()).0;
    let heard = Tiers::default();
    let run = settings.orchestrator().host_memory(ByteSize(host)).disk(dir.path().to_owned(), PLENTY);
    let run = run.observer(Box::new(heard.clone()));
    let report = submitted(run, &settings, &evaluated()).run().expect("a run");
    let told = heard.0.lock().unwrap();

    let (first, last) = (&told[0], &told[told.len() - 1]);
    assert!(
        first.then_computed && !last.then_computed,
        "the first before anything is computed, the last when all is"
    );
    let times: Vec<f64> = told.iter().map(|told| told.at_s).collect();
    // The last one comes when the run ends.
    assert!(times[..times.len() - 1].windows(2).all(|pair| pair[1] - pair[0] >= 0.5), "{times:?}");
    let names = ["host memory", "disk", "cpu:0", "cpu:1"];
    let budgets = [host, PLENTY.bytes(), settings.memory.bytes(), settings.memory.bytes()];
    for Told { tiers, .. } in told.iter() {
        assert_eq!(tiers.iter().map(|tier| tier.name.as_str()).collect::<Vec<_>>(), names);
        assert_eq!(tiers.iter().map(|tier| tier.budget_bytes).collect::<Vec<_>>(), budgets);
        let within = |tier: &TierMemory| {
            tier.reserved_bytes <= tier.peak_bytes && tier.peak_bytes <= tier.budget_bytes
        };
        assert!(tiers.iter().all(within), "{tiers:?}");
    }
    let disk: u64 = report.tasks.iter().map(|task| task.plan.disk_bytes).sum();
    assert!(disk > 0);
    assert_eq!(first.tiers[1].reserved_bytes, disk);
    assert!(last.tiers[1].reserved_bytes < disk, "tasks that end leave the disk");
    // Reservations between two events are in the peak of one of them.
    let most = |tier: usize| told.iter().map(|told| told.tiers[tier].peak_bytes).max().unwrap();
    assert_eq!(most(0), report.host_peak_bytes);
    let came_and_went = |tier: &TierMemory| tier.peak_bytes > tier.reserved_bytes;
    let computing = |tier: usize| told.iter().any(|told| came_and_went(&told.tiers[tier]));
    assert!(computing(2) || computing(3), "shard tasks have given back what they reserved: {told:?}");
}
