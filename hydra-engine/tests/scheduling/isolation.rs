//! Isolation: a failure in one task does not affect others, and tasks that cannot work are refused before anything
//! trains.

use crate::common::{Fragile, PLENTY, Points, Read, Settings, adamw, gpt2_chain, mlp_chain, spirals, tokens};
use hydra_core::optimizer::Sgd;
use hydra_core::{
    Batch, ByteSize, Chain, Dataset, DatasetError, FloatType, HostActivation, HostTensor, Length,
    OptimizerSpec, TaskId, TrainSpec,
};
use hydra_engine::{
    CheckpointEvery, EngineError, EvaluationTask, Observer, RunEvent, StopFlag, TaskState, TrainTask, plain,
};
use hydra_models::mlp;
use hydra_sched::{ModelIndex, ModelView, Policy, PolicyKind, Priority, View};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

fn linear(inputs: usize, outputs: usize, device: &burn::tensor::Device) -> burn::nn::Linear {
    burn::nn::LinearConfig::new(inputs, outputs).init(device)
}

fn fragile_chain() -> Arc<Chain> {
    let device = burn::tensor::Device::flex();
    let dense = |i, o| mlp::Dense { linear: linear(i, o, &device) };
    let chain = Chain::builder("fragile")
        .layer("dense", dense(2, 4))
        .layer("fragile", Fragile { limit: 100.0 })
        .layer("classifier", crate::common::Classifier { linear: linear(4, 3, &device) });
    Arc::new(chain.build().expect("a chain"))
}

fn steps(n: usize) -> TrainSpec {
    TrainSpec { length: Length::Steps(n), shuffle: false, clip: None, ..adamw(4) }
}

#[test]
fn a_panic_and_a_bad_loss_harm_no_other_task() {
    let good = || TrainTask::new("good", gpt2_chain(), tokens(11, 1), steps(6));
    let explosive = OptimizerSpec::from(Sgd { lr: 1e30, momentum: 0.0, weight_decay: 0.0 });
    let spec = TrainSpec { optimizer: explosive, ..steps(6) };
    let mut run = Settings { devices: 2, ..Settings::default() }.orchestrator();
    run.submit(
        TrainTask::new(
            "panics",
            fragile_chain(),
            Arc::new(Points { len: 24, bad: 12, panics: false }),
            steps(6),
        )
        .cuts(vec![1]),
    )
    .unwrap();
    run.submit(TrainTask::new("explodes", gpt2_chain(), tokens(11, 1), spec).cuts(vec![2, 4])).unwrap();
    run.submit(good().cuts(vec![1, 2])).unwrap();
    let report = run.run().expect("the run goes on");
    let [panics, explodes, survivor] = &report.tasks[..] else { panic!("three tasks") };

    assert_eq!((panics.state, panics.losses.len()), (TaskState::Failed, 3));
    let message = panics.error.as_deref().unwrap();
    assert!(message.contains("step 3") && message.contains("met "), "{message}");
    assert_eq!(explodes.state, TaskState::Failed);
    let message = explodes.error.as_deref().unwrap();
    assert!(message.contains("the loss is") && message.contains("at step"), "{message}");
    let plain = plain::train(&gpt2_chain(), tokens(11, 1).as_ref(), &steps(6)).unwrap();
    assert_eq!((survivor.state, survivor.error.as_deref()), (TaskState::Done, None));
    assert_eq!(survivor.weights_sha256, Some(plain.weights_sha256));
    assert!(!report.all_done());
}

#[test]
fn a_layer_that_fails_on_the_first_batch_is_refused_before_anything_trains() {
    let mut run = Settings::default().orchestrator();
    run.submit(TrainTask::new(
        "panics",
        fragile_chain(),
        Arc::new(Points { len: 24, bad: 0, panics: false }),
        steps(6),
    ))
    .unwrap();
    let message = chain_of(&run.admit().unwrap_err());
    assert!(message.contains("task `panics`") && message.contains("fragile"), "{message}");
}

fn chain_of(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain_of(source)),
        None => error.to_string(),
    }
}

#[test]
fn what_cannot_fit_is_refused_with_the_numbers() {
    let submit = |settings: Settings, task: TrainTask| {
        let mut run = settings.orchestrator();
        run.submit(task).unwrap();
        chain_of(&run.admit().unwrap_err())
    };
    let task = || TrainTask::new("task", gpt2_chain(), tokens(11, 1), steps(2));
    let small = submit(Settings { memory: ByteSize(70_000), ..Settings::default() }, task());
    assert!(small.contains("layer `") && small.contains("70000 bytes"), "{small}");
    for cuts in [vec![0], vec![3, 2], vec![9]] {
        let bad = submit(Settings::default(), task().cuts(cuts.clone()));
        assert!(bad.contains(&format!("{cuts:?}")), "{bad}");
    }
    let mut run = Settings::default().orchestrator().host_memory(ByteSize(10_000));
    run.submit(task()).unwrap();
    assert!(matches!(run.admit(), Err(EngineError::HostMemory { budget: 10_000, .. })));
}

#[test]
fn bad_submissions_are_named() {
    let mut run = Settings::default().orchestrator();
    let task = |name: &str| TrainTask::new(name, mlp_chain(), spirals(), steps(1));
    run.submit(task("a")).unwrap();
    assert!(matches!(run.submit(task("a")), Err(EngineError::DuplicateTask { name }) if name == "a"));
    let spec = TrainSpec { optimizer: OptimizerSpec::adamw(f64::NAN), ..steps(1) };
    let bad = run.submit(TrainTask::new("b", mlp_chain(), spirals(), spec)).unwrap_err();
    assert!(
        chain_of(&bad).contains("task `b` was refused") && chain_of(&bad).contains("learning rate"),
        "{bad}"
    );
    assert!(matches!(Settings::default().orchestrator().run(), Err(EngineError::NoTask)));
}

/// Stops the run after some minibatches and records its events.
struct Stopper {
    flag: StopFlag,
    after: usize,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Observer for Stopper {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let mut seen = self.seen.lock().unwrap();
        match event {
            RunEvent::Minibatch { task, step, .. } => {
                seen.push(format!("minibatch {step} of {task}"));
                if seen.len() == self.after {
                    self.flag.stop();
                }
            }
            RunEvent::Ended { state, .. } => seen.push(format!("{state:?}")),
            _ => {}
        }
    }
}

#[test]
fn a_stop_finishes_minibatches_and_keeps_what_was_trained() {
    let flag = StopFlag::new();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let observer = Stopper { flag: flag.clone(), after: 5, seen: seen.clone() };
    let settings = Settings { devices: 2, ..Settings::default() };
    let mut run = settings.orchestrator().stop_flag(flag).observer(Box::new(observer));
    for name in ["one", "two", "three"] {
        let task = TrainTask::new(name, gpt2_chain(), tokens(11, 1), steps(400)).cuts(vec![1, 3]);
        run.submit(task.validation(tokens(3, 1))).unwrap();
    }
    let report = run.run().unwrap();
    for task in &report.tasks {
        assert_eq!(task.state, TaskState::Stopped);
        assert!(task.losses.len() < 400 && task.trained.steps == task.losses.len());
        let so_far = steps(400.min(task.trained.steps.max(1)));
        if task.trained.steps > 0 {
            let plain = plain::train(&gpt2_chain(), tokens(11, 1).as_ref(), &so_far).unwrap();
            assert_eq!(task.weights_sha256, Some(plain.weights_sha256), "{} steps", task.trained.steps);
        }
    }
    assert_eq!(seen.lock().unwrap().iter().filter(|line| *line == "Stopped").count(), 3);
}

#[test]
fn evaluation_is_the_mean_over_all_terms() {
    let data = tokens(7, 3);
    let settings = Settings { memory: PLENTY, ..Settings::default() };
    let of = |batch| {
        let task = EvaluationTask { chain: gpt2_chain(), data: data.clone(), batch, seed: 0 };
        settings.orchestrator().evaluate(task).unwrap()
    };
    let (one, many) = (of(1), of(3));
    assert_eq!((one.loss_targets, many.loss_targets), (7 * 11, 7 * 11));
    assert!((one.loss - many.loss).abs() < 1e-6, "{} against {}", one.loss, many.loss);
    assert!((one.perplexity.unwrap() - one.loss.exp()).abs() < 1e-9);
}

#[test]
fn frozen_layers_keep_their_weights() {
    let device = burn::tensor::Device::flex();
    let chain = Chain::builder("frozen")
        .frozen("a", mlp::Dense { linear: linear(2, 8, &device) })
        .frozen("b", mlp::Dense { linear: linear(8, 8, &device) })
        .layer("c", mlp::Dense { linear: linear(8, 8, &device) })
        .layer("d", crate::common::Classifier { linear: linear(8, 3, &device) });
    let chain = Arc::new(chain.build().unwrap());
    let spec = steps(5);
    let plain = plain::train(&chain, spirals().as_ref(), &spec).unwrap();
    let start =
        plain::train(&chain, spirals().as_ref(), &TrainSpec { length: Length::Steps(1), ..spec.clone() })
            .unwrap();
    assert_eq!(plain.buffers[0], start.buffers[0]);
    assert_ne!(plain.buffers[2], start.buffers[2]);
    for cuts in [vec![1, 2, 3], vec![3], vec![2]] {
        let settings = Settings { cuts: Some(cuts), devices: 2, ..Settings::default() };
        let report = settings.task(TrainTask::new("task", chain.clone(), spirals(), spec.clone()));
        assert_eq!((report.error, report.weights_sha256), (None, Some(plain.weights_sha256.clone())));
    }
}

/// Points whose batches differ from the request.
struct Askew {
    points: Points,
    spoil: fn(&mut Batch),
}

impl Dataset for Askew {
    fn name(&self) -> &str {
        "askew"
    }

    fn len(&self) -> usize {
        self.points.len
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        let mut batch = self.points.batch(items)?;
        if items.contains(&9) {
            (self.spoil)(&mut batch);
        }
        Ok(batch)
    }
}

#[test]
fn a_batch_that_is_not_what_was_asked_for_fails_its_task_with_what_is_wrong() {
    type Spoil = (fn(&mut Batch), &'static str);
    let spoils: [Spoil; 3] = [
        (|batch| batch.items = 999, "has `items` = 999"),
        (|batch| batch.loss_targets = 0, "has no targets for the loss to average over"),
        (
            |batch| batch.inputs = HostActivation::of(HostTensor::float(vec![0.0; 2], [1, 2])),
            "has inputs of 1 items",
        ),
    ];
    for (spoil, expected) in spoils {
        let data = Arc::new(Askew { points: Points { len: 12, bad: 99, panics: false }, spoil });
        let mut run = Settings::default().orchestrator();
        run.submit(TrainTask::new("bad", mlp_chain(), data.clone(), steps(4))).unwrap();
        run.submit(TrainTask::new("good", mlp_chain(), spirals(), steps(4))).unwrap();
        let report = run.run().unwrap();
        let message = report.tasks[0].error.as_deref().unwrap();
        assert!(message.contains("dataset `askew` was asked for 4 items, starting with item 8"), "{message}");
        assert!(message.contains(expected), "{message}");
        assert_eq!((report.tasks[0].losses.len(), report.tasks[1].state), (2, TaskState::Done));
        let plain = plain::train(&mlp_chain(), data.as_ref(), &steps(4)).unwrap_err();
        assert!(chain_of(&plain).contains(expected), "{plain}");
    }
}

#[test]
fn inputs_that_layers_do_not_get_are_refused() {
    type Spoil = (fn(&mut Batch), &'static str);
    let spoils: [Spoil; 2] = [
        (|batch| batch.inputs.parts[0].dtype = burn::tensor::DType::F64, "has inputs of F64"),
        (|batch| batch.inputs.parts[0].bytes.truncate(4), "shape [12, 2] in 4 bytes"),
    ];
    let bf16 = || Arc::new(mlp::chain(&[2, 16], 3).unwrap().with_float_type(FloatType::Bf16));
    for (spoil, expected) in spoils {
        for chain in [mlp_chain(), bf16()] {
            let data = Arc::new(Askew { points: Points { len: 12, bad: 99, panics: false }, spoil });
            let mut run = Settings::default().orchestrator();
            run.submit(TrainTask::new("bad", chain, data, TrainSpec { batch: 12, ..steps(4) })).unwrap();
            let error = run.run().unwrap_err();
            assert!(chain_of(&error).contains(expected), "{error}");
        }
    }
}

#[test]
fn a_dataset_without_an_end_is_trained_on_unless_it_is_to_be_shuffled() {
    let endless = || Arc::new(Points { len: usize::MAX, bad: usize::MAX, panics: false });
    let run = |spec: TrainSpec| {
        let mut run = Settings::default().orchestrator();
        run.submit(TrainTask::new("endless", mlp_chain(), endless(), spec)).unwrap();
        run
    };
    let report = run(steps(3)).run().unwrap();
    assert_eq!((report.tasks[0].state, report.tasks[0].losses.len()), (TaskState::Done, 3));
    let refused = chain_of(&run(TrainSpec { shuffle: true, ..steps(3) }).run().unwrap_err());
    assert!(refused.contains("task `endless`") && refused.contains("`shuffle` is true"), "{refused}");
    let epochs = run(TrainSpec { length: Length::Epochs(3), ..steps(1) });
    assert_eq!(epochs.admit().unwrap().admission().tasks[0].steps, 3 << 62);
}

#[test]
fn a_loss_that_is_no_number_says_where() {
    let nan = |batch: &mut Batch| {
        batch.inputs =
            HostActivation::of(HostTensor::float(vec![f32::NAN; 2 * batch.items], [batch.items, 2]));
    };
    let bad = || Arc::new(Askew { points: Points { len: 12, bad: 99, panics: false }, spoil: nan });
    let run = |task: TrainTask| {
        let mut run = Settings::default().orchestrator();
        run.submit(task).unwrap();
        run.run().unwrap().tasks.remove(0).error.unwrap()
    };
    let trained = run(TrainTask::new("bad", mlp_chain(), bad(), steps(4)));
    assert_eq!(
        trained,
        "the loss is NaN at step 2: lower the learning rate, add warmup or clip the gradient"
    );
    let whole = TrainSpec { batch: 12, ..steps(4) };
    let first = run(TrainTask::new("bad", mlp_chain(), bad(), whole));
    assert!(first.contains("at step 0, before any update"), "{first}");
    let valid = TrainTask::new("bad", mlp_chain(), spirals(), steps(4)).validation(bad());
    let valid = run(valid.initial_validation(false));
    assert!(valid.starts_with("the loss on dataset `askew` is NaN after 4 minibatches: check"), "{valid}");
}

/// An observer that panics after the second minibatch.
struct Nervous(Arc<Mutex<usize>>);

impl Observer for Nervous {
    fn observe(&mut self, event: &RunEvent<'_>) {
        *self.0.lock().unwrap() += 1;
        if let RunEvent::Minibatch { step: 1, .. } = event {
            panic!("no more of this");
        }
    }
}

#[test]
fn an_observer_that_panics_is_told_nothing_more_and_the_run_goes_on() {
    let heard = Arc::new(Mutex::new(0));
    let mut run = Settings::default().orchestrator().observer(Box::new(Nervous(heard.clone())));
    run.submit(TrainTask::new("task", mlp_chain(), spirals(), steps(20))).unwrap();
    let report = run.run().unwrap();
    assert_eq!((report.tasks[0].state, report.tasks[0].losses.len()), (TaskState::Done, 20));
    let heard = *heard.lock().unwrap();
    assert!(0 < heard && heard < 20, "{heard}");
}

#[test]
fn the_plain_loop_gives_an_error_where_a_layer_panics() {
    let data = Points { len: 24, bad: 0, panics: false };
    let error = plain::train(&fragile_chain(), &data, &steps(6)).unwrap_err();
    assert!(matches!(&error, EngineError::Panicked { what: "the plain loop", .. }), "{error}");
}

/// Stops the first of two tasks after three minibatches.
struct StopFirst(StopFlag);

impl Observer for StopFirst {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if let RunEvent::Minibatch { task: TaskId(0), step: 2, .. } = event {
            self.0.stop();
        }
    }
}

#[test]
fn one_task_is_stopped_and_the_others_go_on() {
    let flag = StopFlag::new();
    let mut run = Settings::default().orchestrator().observer(Box::new(StopFirst(flag.clone())));
    let task = |name: &str| TrainTask::new(name, mlp_chain(), spirals(), steps(400));
    run.submit(task("first").stop_flag(flag)).unwrap();
    run.submit(task("second")).unwrap();
    let report = run.run().unwrap();
    let [first, second] = &report.tasks[..] else { panic!("two tasks") };
    assert_eq!((first.state, second.state), (TaskState::Stopped, TaskState::Done));
    assert!((3..400).contains(&first.losses.len()), "{}", first.losses.len());
    let shorter = plain::train(&mlp_chain(), spirals().as_ref(), &steps(first.losses.len())).unwrap();
    assert_eq!(first.weights_sha256, Some(shorter.weights_sha256));
    assert_eq!(second.losses.len(), 400);
}

/// A policy made of functions: the model that it chooses, and whether it waits for any.
struct CustomPolicy(fn(&View<'_>) -> Option<ModelIndex>, fn() -> bool);

impl Policy for CustomPolicy {
    fn name(&self) -> &'static str {
        "custom"
    }

    fn priority(&self, model: &ModelView) -> Priority {
        PolicyKind::Fifo.build(0).priority(model)
    }

    fn waits(&self) -> bool {
        (self.1)()
    }

    fn choose(&mut self, view: &View<'_>) -> Option<ModelIndex> {
        (self.0)(view)
    }
}

#[test]
fn a_policy_of_ones_own_chooses_and_one_that_is_none_is_dismissed() {
    let plain = plain::train(&gpt2_chain(), tokens(11, 1).as_ref(), &steps(6)).unwrap();
    let answers = [
        (CustomPolicy(|view| view.claimable.last().map(|model| model.model), || false), "custom"),
        (CustomPolicy(|_| None, || false), "sharded-lrtf"),
        (CustomPolicy(|_| Some(ModelIndex(0)), || false), "sharded-lrtf"),
        (CustomPolicy(|_| Some(ModelIndex(999)), || false), "sharded-lrtf"),
        (CustomPolicy(|_| panic!("no idea"), || false), "sharded-lrtf"),
        (CustomPolicy(|_| None, || panic!("no idea")), "sharded-lrtf"),
    ];
    for (policy, name) in answers {
        let mut run = Settings { devices: 2, ..Settings::default() }.orchestrator();
        run = run.own_policy(Box::new(policy));
        for task in ["one", "two", "three"] {
            run.submit(TrainTask::new(task, gpt2_chain(), tokens(11, 1), steps(6)).cuts(vec![1, 3])).unwrap();
        }
        let report = run.run().unwrap();
        assert_eq!((report.policy.as_str(), report.all_done()), (name, true));
        assert!(report.tasks.iter().all(|task| task.weights_sha256.as_ref() == Some(&plain.weights_sha256)));
    }
}

/// A gate that one thread waits for and another opens.
type Gate = Arc<(Mutex<bool>, Condvar)>;

fn open(gate: &Gate) {
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
}

/// Waits for the gate with a timeout and returns whether it opened.
fn opens(gate: &Gate) -> bool {
    let patience = Duration::from_secs(60);
    let (open, _) = gate.1.wait_timeout_while(gate.0.lock().unwrap(), patience, |open| !*open).unwrap();
    *open
}

/// The items of the third minibatch.
const THIRD: [usize; 4] = [8, 9, 10, 11];

/// Points whose third minibatch can be read only after a gate opens.
struct Late {
    points: Points,
    gate: Gate,
}

impl Late {
    fn behind(gate: &Gate) -> Arc<Self> {
        Arc::new(Self { points: Points { len: 16, bad: 99, panics: false }, gate: gate.clone() })
    }
}

impl Dataset for Late {
    fn name(&self) -> &str {
        "late"
    }

    fn len(&self) -> usize {
        self.points.len
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        assert!(items != THIRD || opens(&self.gate), "what was to happen waits for this dataset");
        self.points.batch(items)
    }
}

/// Opens the gate on an event.
struct Opens(Gate, fn(&RunEvent<'_>) -> bool);

impl Observer for Opens {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if (self.1)(event) {
            open(&self.0);
        }
    }
}

/// The weights hash of the plain loop on the same points.
fn plain_hash(n: usize) -> Option<String> {
    let points = Points { len: 16, bad: 99, panics: false };
    Some(plain::train(&mlp_chain(), &points, &steps(n)).unwrap().weights_sha256)
}

#[test]
fn a_dataset_that_takes_long_keeps_no_other_task_waiting() {
    let gate = Gate::default();
    let ended = |event: &RunEvent<'_>| matches!(event, RunEvent::Ended { task: TaskId(1), .. });
    let mut run = Settings::default().orchestrator().observer(Box::new(Opens(gate.clone(), ended)));
    run.submit(TrainTask::new("late", mlp_chain(), Late::behind(&gate), steps(4))).unwrap();
    run.submit(TrainTask::new("other", mlp_chain(), spirals(), steps(40))).unwrap();
    let report = run.run().unwrap();
    assert!(report.all_done(), "{:?}", report.tasks[0].error);
    assert_eq!(report.tasks[0].weights_sha256, plain_hash(4));
}

#[test]
fn a_dataset_that_takes_long_keeps_none_of_many_tasks_waiting() {
    let gate = Gate::default();
    let ended = |event: &RunEvent<'_>| matches!(event, RunEvent::Ended { task: TaskId(16), .. });
    let mut run = Settings::default().orchestrator().observer(Box::new(Opens(gate.clone(), ended)));
    // The longest task goes first.
    run.submit(TrainTask::new("late", mlp_chain(), Late::behind(&gate), steps(8))).unwrap();
    for other in 1..17 {
        run.submit(TrainTask::new(format!("other {other}"), mlp_chain(), spirals(), steps(4))).unwrap();
    }
    let report = run.run().unwrap();
    assert!(report.all_done(), "{:?}", report.tasks[0].error);
    assert_eq!(report.tasks[0].weights_sha256, plain_hash(8));
}

#[test]
fn a_task_that_only_reads_takes_no_room_of_a_model_within_a_minibatch() {
    let gate = Gate::default();
    let ended = |event: &RunEvent<'_>| matches!(event, RunEvent::Ended { task: TaskId(1), .. });
    let run = || {
        let mut run = Settings::default().orchestrator().observer(Box::new(Opens(gate.clone(), ended)));
        run.submit(TrainTask::new("late", mlp_chain(), Late::behind(&gate), steps(8))).unwrap();
        run.submit(TrainTask::new("other", mlp_chain(), spirals(), steps(4))).unwrap();
        run
    };
    let needs = run().admit().unwrap().admission().clone();
    let masters: u64 = needs.tasks.iter().map(|task| task.storage.master_bytes).sum();
    // One model within a minibatch, and a batch of each task.
    let tight =
        run().host_memory(ByteSize(masters + needs.tasks[0].memory.active_bytes + 1024)).admit().unwrap();
    assert_eq!(tight.admission().active_models, 1);
    let report = tight.start().unwrap();
    assert!(report.all_done(), "{:?}", report.tasks[0].error);
    assert_eq!(report.tasks[0].weights_sha256, plain_hash(8));
}

#[test]
fn a_checkpoint_does_not_wait_for_the_next_batch() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Gate::default();
    let kept = |event: &RunEvent<'_>| matches!(event, RunEvent::Checkpointed { step: 2, .. });
    let run = Settings::default().orchestrator().observer(Box::new(Opens(gate.clone(), kept)));
    let mut run = run.checkpoint_every(CheckpointEvery::Minibatches(1));
    let task = TrainTask::new("late", mlp_chain(), Late::behind(&gate), steps(4));
    run.submit(task.checkpoint_to(dir.path().join("late.safetensors"))).unwrap();
    let report = run.run().unwrap();
    assert!(report.all_done(), "{:?}", report.tasks[0].error);
    assert_eq!(report.tasks[0].weights_sha256, plain_hash(4));
}

#[test]
fn a_dataset_that_does_not_return_keeps_no_run_from_ending() {
    let gate = Gate::default();
    let stop = StopFlag::new();
    // The task is stopped when items are read that never become available during the run.
    let stops = stop.clone();
    let how = move |late: &dyn Dataset, items: &[usize]| {
        if items == THIRD {
            stops.stop();
        }
        late.batch(items)
    };
    let data = Arc::new(Read { data: Late::behind(&gate), how });
    let mut run = Settings::default().orchestrator();
    let task = TrainTask::new("stuck", mlp_chain(), data.clone(), steps(8)).stop_flag(stop);
    run.submit(task).unwrap();
    let report = run.run().unwrap();
    assert!(!*gate.0.lock().unwrap() && Arc::strong_count(&data) > 1, "it still reads");
    let [task] = &report.tasks[..] else { panic!("a task") };
    assert_eq!((task.state, task.losses.len(), task.error.as_deref()), (TaskState::Stopped, 2, None));
    assert_eq!(task.weights_sha256, plain_hash(2));
    // The thread ends when the dataset returns, and drops it.
    open(&gate);
    let read = || Arc::strong_count(&data) == 1;
    (0..6000).take_while(|_| !read()).for_each(|_| std::thread::park_timeout(Duration::from_millis(10)));
    assert!(read());
}
