//! Trained progress is never lost: a run resumed from any checkpoint, on other devices and with other budgets, gives
//! the bits of an uninterrupted run.

use crate::common::{
    self, PLENTY, Settings, adamw, adapted_chain, gpt2_chain, last_layers, mlp_chain, plus_standing_bytes,
    spirals, tokens,
};
use hydra_core::optimizer::Sgd;
use hydra_core::{
    Chain, FloatType, Length, Metric, ModelWriter, OptimizerSpec, ParamBufferReader, TrainSpec, WeightError,
};
use hydra_engine::{
    Checkpoint, CheckpointEvery, Evaluation, Observer, RunEvent, StopFlag, TaskReport, TaskState, TrainTask,
    plain,
};
use hydra_models::generation::{
    Generated, KvCache, KvCacheForm, Limits, NextToken, Prompt, Sampling, Sequences,
};
use hydra_models::gpt2::{Gpt2Config, Gpt2Writer};
use hydra_sched::PolicyKind;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;

/// Eleven blocks in batches of four with clipping, microbatches and dropout, and evaluations in between.
fn spec() -> TrainSpec {
    TrainSpec { length: Length::Steps(7), accumulate: 2, eval_every: Some(2), ..adamw(4) }
}

fn task(spec: &TrainSpec) -> TrainTask {
    let task = TrainTask::new("task", gpt2_chain(), tokens(11, 1), spec.clone());
    task.validation(tokens(6, 2)).test(tokens(5, 3))
}

/// Copies a checkpoint after each write: each copy is the file of a run that is killed at that moment.
struct Copies {
    file: PathBuf,
    copies: Arc<Mutex<Vec<PathBuf>>>,
}

impl Observer for Copies {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if let RunEvent::Checkpointed { .. } = event {
            let mut copies = self.copies.lock().unwrap();
            let copy = self.file.with_extension(format!("{:02}", copies.len()));
            fs::copy(&self.file, &copy).unwrap();
            copies.push(copy);
        }
    }
}

/// Runs a task with a checkpoint after every minibatch; returns the report and copies of all of them.
fn kept(settings: &Settings, task: TrainTask, dir: &Path) -> (TaskReport, Vec<PathBuf>) {
    kept_every(CheckpointEvery::Minibatches(1), settings, task, dir)
}

fn kept_every(
    every: CheckpointEvery,
    settings: &Settings,
    task: TrainTask,
    dir: &Path,
) -> (TaskReport, Vec<PathBuf>) {
    let file = dir.join("task.safetensors");
    let copies = Arc::new(Mutex::new(Vec::new()));
    let observer = Copies { file: file.clone(), copies: copies.clone() };
    let mut run = settings.orchestrator().checkpoint_every(every);
    run = run.observer(Box::new(observer));
    run.submit(task.checkpoint_to(file)).unwrap();
    let report = run.run().unwrap().tasks.remove(0);
    let copies = std::mem::take(&mut *copies.lock().unwrap());
    (report, copies)
}

/// The parts of a report that must be equal for a resumed run.
fn outcome(report: &TaskReport) -> impl PartialEq + std::fmt::Debug + use<> {
    let bits: Vec<u64> = report.losses.iter().map(|loss| loss.to_bits()).collect();
    let evaluations =
        [&report.validations.initial_validation, &report.validation, &report.test].map(Clone::clone);
    let weights = report.weights_sha256.clone();
    (
        report.state,
        report.error.clone(),
        bits,
        evaluations,
        report.validations.evaluations.clone(),
        report.validations.best_step,
        weights,
    )
}

fn resumed(settings: &Settings, task: TrainTask, from: &Path) -> TaskReport {
    settings.task(task.resume_from(Checkpoint::open(from).unwrap()))
}

#[test]
fn from_every_checkpoint_the_bits_are_those_of_the_whole_run() {
    let dir = TempDir::new().unwrap();
    let whole = Settings::default().task(task(&spec()));
    let cut = Settings { cuts: Some(vec![2]), ..Settings::default() };
    let (report, copies) = kept(&cut, task(&spec()), dir.path());
    assert_eq!(outcome(&report), outcome(&whole), "keeping changes nothing");
    assert_eq!(copies.len(), 7, "the last one stands before the last evaluation");
    let elsewhere = [
        Settings { cuts: Some(vec![1, 2, 3]), devices: 2, others: 1, ..Settings::default() },
        Settings { threads: 2, prefetch: false, zero_copy: true, ..Settings::default() },
    ];
    for (index, copy) in copies.iter().enumerate() {
        let checkpoint = Checkpoint::open(copy).unwrap();
        assert_eq!((checkpoint.step(), checkpoint.steps(), checkpoint.is_finished()), (index + 1, 7, false));
        let report = resumed(&elsewhere[index % 2], task(&spec()), copy);
        assert_eq!(outcome(&report), outcome(&whole), "from {}", copy.display());
        assert_eq!(report.checkpoints.resumed_at, Some(index + 1));
    }
}

#[test]
fn evaluations_go_on_too() {
    let dir = TempDir::new().unwrap();
    let whole = Settings::default().task(task(&spec()));
    let cut = Settings { cuts: Some(vec![2]), ..Settings::default() };
    let always = CheckpointEvery::Time(Duration::ZERO);
    let (report, copies) = kept_every(always, &cut, task(&spec()), dir.path());
    assert_eq!(outcome(&report), outcome(&whole));
    // Before each of 7 minibatches, each of 3 batches of 5 evaluations on the validation data but the very first,
    // each of 3 of the test, and while the best weights are restored.
    assert_eq!(copies.len(), 7 + 14 + 3 + 1);
    for copy in &copies {
        let report = resumed(&Settings { devices: 2, ..cut.clone() }, task(&spec()), copy);
        assert_eq!(outcome(&report), outcome(&whole), "from {}", copy.display());
    }
}

/// A task whose evaluations generate tokens and are compared by them. `on_token` is called after each token.
fn generating(on_token: impl Fn() + Send + Sync + 'static) -> TrainTask {
    let form = KvCacheForm { blocks: 3, key_heads: 2, head_width: 8, float: FloatType::F32, longest: 16 };
    let cache = KvCache::new(form);
    // Two of the four sequences are in the cache at a time.
    let limits = Limits {
        new_tokens: 4,
        positions: 12,
        ends: Vec::new(),
        cache_bytes: form.bytes(12),
        item_sequences: 64,
    };
    let prompts = (1..5).map(|id| Prompt { ids: vec![id, 7 * id], sample: 0 }).collect();
    let on_token = move |_: usize, _: &Generated| {
        on_token();
        false
    };
    let sum = |made: &[Generated]| {
        let of = |made: &Generated| made.logprob + made.ids.iter().sum::<u32>() as f64;
        Ok((vec![made.iter().map(of).sum()], None))
    };
    let sequences = Sequences::new(prompts, limits, Sampling::default(), cache.clone(), on_token);
    let sequences = Arc::new(sequences.judged(vec![Metric::higher("sum")], sum));
    let mut config = common::config();
    config.head.cache = Some(cache);
    let chain = hydra_models::gpt2::chain(&config, None).unwrap().evaluated_only();
    let chain = NextToken::of(chain, sequences.clone()).unwrap();
    task(&TrainSpec { metric: Some("sum".to_owned()), ..spec() }).rounds(Arc::new(chain), sequences)
}

#[test]
fn evaluations_in_rounds_begin_again_with_the_first_round() {
    let dir = TempDir::new().unwrap();
    let whole = Settings::default().task(generating(|| ()));
    let metric = |(_, result): &(usize, Evaluation)| result.metrics["sum"];
    let metrics: Vec<f64> = whole.validations.evaluations.iter().map(metric).collect();
    assert!(metrics.len() == 4 && metrics.iter().all(|metric| metric.is_finite()), "{metrics:?}");
    let without = Settings::default().task(task(&spec()));
    assert_eq!(whole.losses, without.losses, "what is generated changes no bit of the training");
    let several = Settings { cuts: Some(vec![1, 3]), devices: 2, ..Settings::default() };
    assert_eq!(outcome(&several.task(generating(|| ()))), outcome(&whole));
    let cut = Settings { cuts: Some(vec![2]), ..Settings::default() };
    let always = CheckpointEvery::Time(Duration::ZERO);
    let (report, copies) = kept_every(always, &cut, generating(|| ()), dir.path());
    assert_eq!(outcome(&report), outcome(&whole));
    // As without rounds, and at least before the rounds of each of 4 evaluations.
    assert!(copies.len() >= 7 + 14 + 3 + 1 + 4, "{}", copies.len());
    for copy in &copies {
        let report = resumed(&Settings::default(), generating(|| ()), copy);
        assert_eq!(outcome(&report), outcome(&whole), "from {}", copy.display());
    }
}

#[test]
fn a_task_that_is_stopped_within_rounds_goes_on() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("task.safetensors");
    let whole = Settings::default().task(generating(|| ()));
    let stop = StopFlag::new();
    let stopping = stop.clone();
    let mut run = Settings::default().orchestrator().stop_flag(stop);
    run.submit(generating(move || stopping.stop()).checkpoint_to(file.clone())).unwrap();
    let stopped = run.run().unwrap().tasks.remove(0);
    assert_eq!((stopped.state, stopped.trained.steps), (TaskState::Stopped, 2), "{:?}", stopped.error);
    assert_eq!(outcome(&resumed(&Settings::default(), generating(|| ()), &file)), outcome(&whole));
}

#[test]
fn every_optimizer_and_kind_of_chain_goes_on() {
    let sgd = |momentum| OptimizerSpec::from(Sgd { lr: 0.05, momentum, weight_decay: 0.01 });
    let base = TrainSpec { length: Length::Steps(4), clip: None, ..adamw(4) };
    let chain = hydra_models::gpt2::chain(&common::config(), None).unwrap();
    let narrow = Arc::new(chain.with_float_type(FloatType::Bf16));
    let gpt2 = |spec: TrainSpec| TrainTask::new("task", gpt2_chain(), tokens(11, 1), spec);
    let tasks = [
        gpt2(base.clone()),
        gpt2(TrainSpec { optimizer: sgd(0.0), ..base.clone() }),
        gpt2(TrainSpec { optimizer: sgd(0.9), accumulate: 3, ..base.clone() }),
        TrainTask::new("bf16", narrow, tokens(11, 1), base.clone()),
        TrainTask::new("perceptron", mlp_chain(), spirals(), TrainSpec { batch: 16, ..base.clone() }),
        TrainTask::new("adapted", adapted_chain(), spirals(), TrainSpec { batch: 16, ..base.clone() }),
        TrainTask::new("last layers", last_layers(), tokens(11, 1), base),
    ];
    for (index, task) in tasks.into_iter().enumerate() {
        let dir = TempDir::new().unwrap();
        let settings = Settings { cuts: Some(vec![2]), ..Settings::default() };
        let (whole, copies) = kept(&settings, task.clone(), dir.path());
        assert_eq!((whole.error.as_deref(), copies.len()), (None, 3), "task {index}");
        for copy in copies {
            let report = resumed(&Settings::default(), task.clone(), &copy);
            assert_eq!(outcome(&report), outcome(&whole), "task {index}");
        }
    }
}

#[test]
fn a_run_that_goes_on_equals_the_plain_loop() {
    let spec = TrainSpec { length: Length::Steps(5), ..adamw(4) };
    let task = || TrainTask::new("task", gpt2_chain(), tokens(11, 1), spec.clone());
    let plain = plain::train(&gpt2_chain(), tokens(11, 1).as_ref(), &spec).unwrap();
    let dir = TempDir::new().unwrap();
    let (_, copies) = kept(&Settings { cuts: Some(vec![3]), ..Settings::default() }, task(), dir.path());
    let report = resumed(&Settings::default(), task(), &copies[2]);
    assert_eq!((&report.losses, report.weights_sha256), (&plain.losses, Some(plain.weights_sha256)));
}

/// Stops the run at the minibatch or evaluation with this number.
struct StopAfter {
    left: usize,
    stop: StopFlag,
}

impl Observer for StopAfter {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::Minibatch { .. } | RunEvent::Evaluated { .. }) {
            self.left = self.left.saturating_sub(1);
            if self.left == 0 {
                self.stop.stop();
            }
        }
    }
}

#[test]
fn a_run_that_is_stopped_again_and_again_comes_to_the_same_end() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("task.safetensors");
    let whole = Settings::default().task(task(&spec()));
    let settings = Settings { cuts: Some(vec![2]), devices: 3, ..Settings::default() };
    let mut stops = 0;
    let last = loop {
        assert!(stops < 20, "a run that is stopped goes nowhere");
        let stop = StopFlag::new();
        let mut task = task(&spec()).checkpoint_to(file.clone());
        if file.exists() {
            task = task.resume_from(Checkpoint::open(&file).unwrap());
        }
        let run = settings.orchestrator().stop_flag(stop.clone());
        let mut run = run.observer(Box::new(StopAfter { left: 2, stop }));
        run.submit(task).unwrap();
        let report = run.run().unwrap().tasks.remove(0);
        match report.state {
            TaskState::Stopped => stops += 1,
            _ => break report,
        }
        assert!(!Checkpoint::open(&file).unwrap().is_finished());
    };
    assert!(stops >= 3, "it was stopped {stops} times");
    assert_eq!(outcome(&last), outcome(&whole));
}

#[test]
fn a_model_that_several_devices_compute_goes_on_from_every_checkpoint_on_any_number_of_them() {
    let dir = TempDir::new().unwrap();
    let spec = TrainSpec { accumulate: 4, batch: 5, ..spec() };
    let on = |devices| Settings { cuts: Some(vec![2]), devices, ..Settings::default() };
    let whole = on(1).task(task(&spec));
    let (report, copies) = kept_every(CheckpointEvery::Time(Duration::ZERO), &on(3), task(&spec), dir.path());
    assert_eq!(outcome(&report), outcome(&whole));
    assert!(copies.len() > 7, "{}", copies.len());
    for (index, copy) in copies.iter().enumerate() {
        let report = resumed(&on([1, 2, 4][index % 3]), task(&spec), copy);
        assert_eq!(outcome(&report), outcome(&whole), "from {}", copy.display());
    }
}

/// Stops the run at the last minibatch.
struct StopAtLast(StopFlag);

impl Observer for StopAtLast {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::Minibatch { step, steps, .. } if step + 1 == *steps) {
            self.0.stop();
        }
    }
}

#[test]
fn a_task_that_lacks_its_last_evaluation_is_not_finished() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("task.safetensors");
    let task = || TrainTask::new("task", gpt2_chain(), tokens(11, 1), spec()).validation(tokens(6, 2));
    let whole = Settings::default().task(task());
    let stop = StopFlag::new();
    let run = Settings::default().orchestrator().stop_flag(stop.clone());
    let mut run = run.observer(Box::new(StopAtLast(stop)));
    run.submit(task().checkpoint_to(file.clone())).unwrap();
    let stopped = run.run().unwrap().tasks.remove(0);
    assert_eq!((stopped.state, stopped.trained.steps), (TaskState::Stopped, 7));
    assert!(!Checkpoint::open(&file).unwrap().is_finished());
    assert_eq!(outcome(&resumed(&Settings::default(), task(), &file)), outcome(&whole));
}

/// Counts the checkpoints of each task, and delays minibatches for longer than a checkpoint takes.
struct Count {
    counts: Arc<Mutex<Vec<usize>>>,
    dir: PathBuf,
}

impl Count {
    /// True while a checkpoint is partly written, under another name until it is complete.
    fn is_writing(&self) -> bool {
        let files = fs::read_dir(&self.dir).unwrap();
        files.flatten().any(|file| file.path().extension().is_some_and(|end| end == "part"))
    }
}

impl Observer for Count {
    #[expect(clippy::disallowed_methods, reason = "a minibatch of this model is faster than any disk")]
    fn observe(&mut self, event: &RunEvent<'_>) {
        match event {
            RunEvent::Checkpointed { task, .. } => self.counts.lock().unwrap()[task.0] += 1,
            RunEvent::Minibatch { .. } => {
                std::thread::sleep(Duration::from_millis(10));
                let pause = |_| std::thread::sleep(Duration::from_millis(1));
                (0..60_000).take_while(|_| self.is_writing()).for_each(pause);
            }
            _ => {}
        }
    }
}

#[test]
fn a_task_that_waits_for_others_does_not_keep_them_from_being_kept() {
    let dir = TempDir::new().unwrap();
    let counts = Arc::new(Mutex::new(vec![0; 3]));
    let settings = Settings { policy: PolicyKind::Fifo, ..Settings::default() };
    let run = settings.orchestrator().checkpoint_every(CheckpointEvery::Time(Duration::ZERO));
    let mut run = run.observer(Box::new(Count { counts: counts.clone(), dir: dir.path().to_owned() }));
    for index in 0..3 {
        let spec = TrainSpec { length: Length::Steps(20), ..adamw(4) };
        let task = TrainTask::new(format!("task-{index}"), gpt2_chain(), tokens(11, 1), spec);
        run.submit(task.checkpoint_to(dir.path().join(format!("{index}.safetensors")))).unwrap();
    }
    assert!(run.run().unwrap().all_done());
    let counts = counts.lock().unwrap();
    assert!(counts.iter().all(|count| *count >= 2), "{counts:?}");
}

#[test]
fn a_finished_task_is_reported_and_not_trained_again() {
    let dir = TempDir::new().unwrap();
    let model = dir.path().join("model");
    let written = |task: TrainTask| task.write_to(Arc::new(Gpt2Writer::new(common::config())), model.clone());
    let (whole, copies) = kept(&Settings::default(), written(task(&spec())), dir.path());
    let file = dir.path().join("task.safetensors");
    let checkpoint = Checkpoint::open(&file).unwrap();
    assert!(checkpoint.is_finished());
    assert!(file.metadata().unwrap().len() < copies[0].metadata().unwrap().len() / 2, "it holds no tensors");
    let report =
        Settings { others: 1, ..Settings::default() }.run(written(task(&spec())).resume_from(checkpoint));
    assert_eq!(outcome(&report.tasks[0]), outcome(&whole));
    assert_eq!(report.tasks[0].model_dir.as_deref(), Some(model.as_path()));
    assert_eq!((report.tasks[0].times.compute_s, report.tasks[1].state), (0.0, TaskState::Done));
    let alone = Settings::default().run(task(&spec()).resume_from(Checkpoint::open(&file).unwrap()));
    assert_eq!((alone.tasks[0].state, alone.makespan_s), (TaskState::Done, 0.0));
}

fn refusal(task: TrainTask) -> String {
    let mut run = Settings::default().orchestrator();
    run.submit(task).unwrap();
    let error = run.admit().unwrap_err();
    let source = std::error::Error::source(&error).expect("a cause");
    source.to_string()
}

#[test]
fn a_checkpoint_of_another_task_is_refused_and_what_differs_is_named() {
    let dir = TempDir::new().unwrap();
    let (_, copies) = kept(&Settings::default(), task(&spec()), dir.path());
    let from = |task: TrainTask| refusal(task.resume_from(Checkpoint::open(&copies[1]).unwrap()));
    let cases = [
        ("seed", task(&TrainSpec { seed: 1, ..spec() })),
        ("training data", TrainTask::new("task", gpt2_chain(), tokens(11, 9), spec())),
        ("validation data", task(&spec()).validation(tokens(6, 7))),
        ("test data", task(&spec()).test(tokens(9, 3))),
        ("validation before training", task(&spec()).initial_validation(false)),
    ];
    for (what, task) in cases {
        let said = from(task);
        assert!(said.contains(&format!("its {what} is ")) && said.contains(".01`"), "{what}: {said}");
    }
    let gpt2 = |change: fn(&mut Gpt2Config)| {
        let mut config = common::config();
        change(&mut config);
        let chain = Arc::new(hydra_models::gpt2::chain(&config, None).unwrap());
        let task = TrainTask::new("task", chain, tokens(11, 1), spec());
        task.validation(tokens(6, 2)).test(tokens(5, 3))
    };
    // Differences that no tensor shows.
    let changes: [fn(&mut Gpt2Config); 3] = [|c| c.n_layer = 2, |c| c.n_head = 4, |c| c.attn_pdrop = 0.3];
    for change in changes {
        let said = from(gpt2(change));
        assert!(said.contains("its architecture is "), "{said}");
    }
}

#[test]
fn a_checkpoint_within_more_validation_data_than_there_is_now_is_refused() {
    let dir = TempDir::new().unwrap();
    let always = CheckpointEvery::Time(Duration::ZERO);
    let (_, copies) = kept_every(always, &Settings::default(), task(&spec()), dir.path());
    for copy in copies {
        let shorter = task(&spec()).validation(tokens(1, 2)).resume_from(Checkpoint::open(copy).unwrap());
        let error = refusal(shorter);
        assert!(error.contains("its validation data is"), "{error}");
    }
}

#[test]
fn two_tasks_are_not_kept_in_one_file() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("task.safetensors");
    let mut run = Settings::default().orchestrator();
    run.submit(task(&spec()).checkpoint_to(file.clone())).unwrap();
    let other = TrainTask::new("other", gpt2_chain(), tokens(11, 1), spec());
    let said = run.submit(other.checkpoint_to(file)).unwrap_err().to_string();
    assert!(said.contains("`task` and `other` both write checkpoints to"), "{said}");
}

fn find(bytes: &[u8], text: &str) -> usize {
    bytes.windows(text.len()).position(|window| window == text.as_bytes()).unwrap()
}

#[test]
fn a_file_that_is_damaged_fails_its_task_and_no_other() {
    let dir = TempDir::new().unwrap();
    let (_, copies) = kept(&Settings::default(), task(&spec()), dir.path());
    let checkpoint = Checkpoint::open(&copies[0]).unwrap();
    let mut bytes = fs::read(&copies[0]).unwrap();
    let last = bytes.len() - 3;
    bytes[last] ^= 1;
    fs::write(&copies[0], &bytes).unwrap();
    let report = Settings { others: 1, ..Settings::default() }.run(task(&spec()).resume_from(checkpoint));
    let said = report.tasks[0].error.clone().unwrap();
    assert!(said.contains(".00` is damaged: its checksum is "), "{said}");
    assert_eq!((report.tasks[0].state, report.tasks[1].state), (TaskState::Failed, TaskState::Done));
    fs::copy(&copies[1], &copies[0]).unwrap();
    let other = Checkpoint::open(&copies[2]).unwrap();
    fs::copy(&copies[1], &copies[2]).unwrap();
    let said = Settings::default().task(task(&spec()).resume_from(other)).error.unwrap();
    assert!(said.contains(".02` was replaced while it was open"), "{said}");
    let finished = dir.path().join("task.safetensors");
    let mut changed = fs::read(&finished).unwrap();
    let losses = find(&changed, "losses");
    let digit = losses + changed[losses..].iter().position(u8::is_ascii_digit).unwrap();
    changed[digit] ^= 1;
    fs::write(&finished, changed).unwrap();
    assert!(Checkpoint::open(&finished).unwrap_err().to_string().contains("is damaged"));
    let says = |bytes: &[u8]| {
        fs::write(&copies[0], bytes).unwrap();
        Checkpoint::open(&copies[0]).unwrap_err().to_string()
    };
    assert!(says(&bytes[..last]).contains("bytes, expected"));
    assert!(says(&bytes[..20]).contains("its header claims"));
    assert!(says(b"").contains("it has 0 bytes"));
    assert!(
        says(&[&16_u64.to_le_bytes()[..], b"{}              "].concat()).contains("no `hydra.checkpoint`")
    );
    let text = "\\\"schema\\\":";
    let at = find(&bytes, text);
    bytes[at + text.len()] = b'7';
    assert!(says(&bytes).contains("has format version 7, expected 1"));
    assert!(Checkpoint::open(dir.path().join("none")).unwrap_err().to_string().contains("could not be read"));
}

#[test]
fn a_checkpoint_that_cannot_be_written_is_told_and_training_goes_on() {
    /// Replaces the checkpoints' directory by a file when the first minibatch is trained.
    struct Failures(Arc<Mutex<Vec<String>>>, PathBuf);
    impl Observer for Failures {
        fn observe(&mut self, event: &RunEvent<'_>) {
            match event {
                RunEvent::CheckpointFailed { error, .. } => self.0.lock().unwrap().push((*error).to_owned()),
                RunEvent::Minibatch { step: 0, .. } => {
                    fs::remove_dir_all(&self.1).unwrap();
                    fs::write(&self.1, "").unwrap();
                }
                _ => {}
            }
        }
    }
    let heard_of = Arc::new(Mutex::new(Vec::new()));
    let dir = TempDir::new().unwrap();
    let run = Settings::default().orchestrator().checkpoint_every(CheckpointEvery::Minibatches(3));
    let mut run = run.observer(Box::new(Failures(heard_of.clone(), dir.path().join("file"))));
    run.submit(task(&spec()).checkpoint_to(dir.path().join("file/task.safetensors"))).unwrap();
    let report = run.run().unwrap().tasks.remove(0);
    let error = report.checkpoints.checkpoint_error.as_deref().unwrap();
    assert!(error.contains("file/task.safetensors` could not be written"), "{error}");
    assert_eq!(outcome(&report), outcome(&Settings::default().task(task(&spec()))));
    let heard = heard_of.lock().unwrap();
    assert_eq!(heard.len(), 3, "after three and six minibatches and at the end: {heard:?}");
    drop(heard);
    let always = Settings::default().orchestrator().checkpoint_every(CheckpointEvery::Time(Duration::ZERO));
    let silent = Failures(Arc::default(), dir.path().join("another"));
    let mut always = always.observer(Box::new(silent));
    always.submit(task(&spec()).checkpoint_to(dir.path().join("another/task.safetensors"))).unwrap();
    assert_eq!(always.run().unwrap().tasks[0].state, TaskState::Done, "it is not tried for ever");
    let heard = heard_of.lock().unwrap();
    assert!(
        heard.iter().all(|said| said.contains("file/task.safetensors` could not be written")),
        "{heard:?}"
    );
}

#[test]
fn a_task_that_was_stopped_says_where_its_weights_are_if_its_model_cannot_be_written() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("task.safetensors");
    let writer = Arc::new(Full { full: AtomicBool::new(true), blocks: None });
    let stop = StopFlag::new();
    let run = Settings::default().orchestrator().stop_flag(stop.clone());
    let mut run = run.observer(Box::new(StopAfter { left: 2, stop }));
    let task = task(&spec()).checkpoint_to(file.clone()).write_to(writer, dir.path().join("model"));
    run.submit(task).unwrap();
    let report = run.run().unwrap().tasks.remove(0);
    let error = report.error.unwrap();
    assert_eq!(report.state, TaskState::Failed);
    assert!(error.contains(&format!("its weights are in `{}`", file.display())), "{error}");
    assert!(!Checkpoint::open(&file).unwrap().is_finished());
}

/// A writer whose disk is full until a switch is set.
struct Full {
    full: AtomicBool,
    /// A directory that is replaced by a file.
    blocks: Option<PathBuf>,
}

impl ModelWriter for Full {
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError> {
        if let Some(dir) = &self.blocks {
            fs::remove_dir_all(dir).unwrap();
            fs::write(dir, "a file").unwrap();
        }
        if self.full.load(Relaxed) {
            let source = "no space is left".into();
            return Err(WeightError::Write { path: dir.to_owned(), source });
        }
        Gpt2Writer::new(common::config()).write(chain, buffers, dir)
    }
}

#[test]
fn a_model_that_cannot_be_written_is_in_its_checkpoint() {
    let dir = TempDir::new().unwrap();
    let (file, out) = (dir.path().join("task.safetensors"), dir.path().join("model"));
    let writer = Arc::new(Full { full: AtomicBool::new(true), blocks: None });
    let task = || task(&spec()).checkpoint_to(file.clone()).write_to(writer.clone(), out.clone());
    let failed = Settings { cuts: Some(vec![2]), ..Settings::default() }.task(task());
    assert_eq!(failed.state, TaskState::Failed);
    let error = failed.error.unwrap();
    assert!(error.starts_with("the trained model could not be written; its weights are in `"), "{error}");
    assert!(error.contains(&file.display().to_string()) && error.ends_with("no space is left"), "{error}");
    let checkpoint = Checkpoint::open(&file).unwrap();
    assert_eq!((checkpoint.step(), checkpoint.is_finished()), (7, false));
    writer.full.store(false, Relaxed);
    let report = resumed(&Settings { devices: 2, ..Settings::default() }, task(), &file);
    let whole = Settings::default().task(self::task(&spec()));
    assert_eq!(outcome(&report), outcome(&whole));
    assert_eq!(report.times.compute_s, 0.0, "nothing but writing was left to do");
    assert!(report.model_dir.is_some() && out.join("model.safetensors").is_file());
    assert!(Checkpoint::open(&file).unwrap().is_finished());
}

#[test]
fn a_model_that_finds_room_nowhere_is_told_with_both_causes() {
    let dir = TempDir::new().unwrap();
    let writer = Arc::new(Full { full: AtomicBool::new(true), blocks: Some(dir.path().join("blocked")) });
    let task = task(&spec()).checkpoint_to(dir.path().join("blocked/task.safetensors"));
    let error = Settings::default().task(task.write_to(writer, dir.path().join("model"))).error.unwrap();
    assert!(
        error.contains("and its weights could not be saved in a checkpoint (the checkpoint `"),
        "{error}"
    );
    assert!(error.ends_with("no space is left"), "{error}");
}

#[test]
fn a_checkpoint_is_within_the_budgets_of_a_spilled_run() {
    // The least memory that the chain trains in; nothing is held back while a checkpoint is written.
    let dir = TempDir::new().unwrap();
    let spec = TrainSpec { length: Length::Steps(3), ..adamw(4) };
    let settings = Settings { memory: plus_standing_bytes(1 << 20), ..Settings::default() };
    let task = || TrainTask::new("task", gpt2_chain(), tokens(11, 1), spec.clone());
    let (report, copies) = kept(&settings, task(), dir.path());
    assert_eq!((report.state, copies.len()), (TaskState::Done, 2), "{:?}", report.error);
    assert_eq!(
        outcome(&resumed(&Settings { memory: PLENTY, ..settings }, task(), &copies[1])),
        outcome(&report)
    );
}

#[test]
fn a_checkpoint_that_can_never_be_written_refuses_the_run() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    for path in [dir.path().to_owned(), dir.path().join("file").join("x"), PathBuf::new()] {
        let mut run = Settings::default().orchestrator();
        run.submit(task(&spec()).checkpoint_to(path.clone())).unwrap();
        let error = hydra_core::with_causes(&run.run().unwrap_err());
        assert!(error.starts_with("task `task` was refused"), "{error}");
        assert!(
            error.contains(&format!("the checkpoint `{}` could not be written", path.display())),
            "{error}"
        );
    }
}

#[test]
fn without_a_written_model_the_last_checkpoint_has_the_weights() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("kept").join("task.safetensors");
    let mut run = Settings::default().orchestrator();
    run.submit(task(&spec()).checkpoint_to(file.clone())).unwrap();
    let report = run.run().unwrap().tasks.remove(0);
    assert_eq!(report.checkpoints.checkpoint_error, None);
    let bytes = fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let chain = gpt2_chain();
    assert!(!tensors.names().iter().any(|name| name.starts_with("moment")), "they are not stepped again");
    let model = dir.path().join("model");
    Settings::default()
        .task(task(&spec()).write_to(Arc::new(Gpt2Writer::new(common::config())), model.clone()));
    let written = fs::read(model.join("model.safetensors")).unwrap();
    let written = safetensors::SafeTensors::deserialize(&written).unwrap();
    let sorted = |tensors: &safetensors::SafeTensors<'_>| {
        let mut all: Vec<Vec<u8>> =
            tensors.tensors().into_iter().map(|(_, tensor)| tensor.data().to_vec()).collect();
        all.sort();
        all
    };
    assert_eq!(tensors.len(), chain.buffers().iter().map(|buffer| buffer.params.len()).sum::<usize>());
    assert_eq!(sorted(&tensors), sorted(&written), "they are the weights that a writer writes");
    // It is still the checkpoint of a finished task.
    let checkpoint = Checkpoint::open(&file).unwrap();
    assert!(checkpoint.is_finished());
    let mut again = Settings::default().orchestrator();
    again.submit(task(&spec()).resume_from(checkpoint)).unwrap();
    let again = again.run().unwrap().tasks.remove(0);
    assert_eq!((&again.weights_sha256, &again.losses), (&report.weights_sha256, &report.losses));
    // A later writer writes the trained weights.
    let later = dir.path().join("later");
    let writer = Arc::new(Gpt2Writer::new(common::config()));
    let mut run = Settings::default().orchestrator();
    let checkpoint = Checkpoint::open(&file).unwrap();
    run.submit(task(&spec()).resume_from(checkpoint).write_to(writer, later.clone())).unwrap();
    let report = run.run().unwrap().tasks.remove(0);
    assert_eq!((report.state, report.times.compute_s, &report.losses), (TaskState::Done, 0.0, &again.losses));
    assert_eq!((report.weights_sha256, report.model_dir), (again.weights_sha256, Some(later.clone())));
    assert!(
        fs::read(later.join("model.safetensors")).unwrap()
            == fs::read(model.join("model.safetensors")).unwrap()
    );
}

/// Stops one task when it has trained a number of minibatches.
struct StopFirst(StopFlag, usize);

impl Observer for StopFirst {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if let RunEvent::Minibatch { task, step, .. } = event
            && (task.0, *step) == (0, self.1)
        {
            self.0.stop();
        }
    }
}

#[test]
fn a_task_that_was_stopped_by_itself_goes_on_to_the_bits_of_the_whole_run() {
    let whole = Settings::default().task(task(&spec()));
    for after in 0..5 {
        let dir = TempDir::new().unwrap();
        let (file, flag) = (dir.path().join("task.safetensors"), StopFlag::new());
        let run = Settings { others: 0, ..Settings::default() }.orchestrator();
        let mut run = run.observer(Box::new(StopFirst(flag.clone(), after)));
        run.submit(task(&spec()).checkpoint_to(file.clone()).stop_flag(flag)).unwrap();
        run.submit(TrainTask::new("other", gpt2_chain(), tokens(11, 1), spec())).unwrap();
        let report = run.run().unwrap();
        assert_eq!(report.tasks[1].state, TaskState::Done, "{:?}", report.tasks[1].error);
        let stopped = &report.tasks[0];
        assert_eq!((stopped.state, stopped.losses.len() > after), (TaskState::Stopped, true), "{after}");
        assert_eq!(outcome(&resumed(&Settings::default(), task(&spec()), &file)), outcome(&whole));
    }
}
