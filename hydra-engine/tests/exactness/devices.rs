//! Data-parallel replicas: several devices train one model on different microbatches at the same time, without
//! changing a bit.

use crate::common::Classifier;
use crate::common::{Settings, adamw, gpt2_chain, points, tokens};
use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::Device;
use hydra_core::{
    Activation, Batch, ByteSize, Chain, Dataset, DatasetError, Forward, HostActivation, HostTensor, Length,
    Pass, TrainSpec,
};
use hydra_engine::{Observer, RunEvent, RunReport, Span, TaskReport, TrainTask, Work, plain};
use hydra_models::mlp::Dense;
use hydra_sched::PolicyKind;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Minibatches with this many microbatches; the last one of an epoch is smaller. Clipping and dropout are on.
fn spec(accumulate: usize) -> TrainSpec {
    TrainSpec { length: Length::Steps(4), accumulate, ..adamw(5) }
}

fn task(spec: &TrainSpec) -> TrainTask {
    let task = TrainTask::new("task", gpt2_chain(), tokens(13, 1), spec.clone());
    task.validation(tokens(9, 3)).test(tokens(7, 2))
}

fn agrees(settings: &Settings, spec: &TrainSpec) {
    let plain = plain::train(&gpt2_chain(), tokens(13, 1).as_ref(), spec).expect("the plain loop");
    let report = settings.task(task(spec));
    assert_eq!(report.error, None, "{settings:?}");
    assert_eq!(report.losses, plain.losses, "{settings:?}");
    assert_eq!(report.weights_sha256, Some(plain.weights_sha256), "{settings:?}");
}

#[test]
fn any_number_of_devices_equals_the_plain_loop() {
    for devices in 1..=4 {
        for cuts in [None, Some(vec![2]), Some(vec![1, 2, 3, 4])] {
            let settings = Settings { devices, cuts, ..Settings::default() };
            agrees(&settings, &spec(4));
            agrees(&settings, &TrainSpec { clip: None, ..spec(3) });
        }
    }
}

/// The results that a run must not change.
fn outcome(task: &TaskReport) -> String {
    format!(
        "{:?} {:?} {:?} {:?} {:?} {:?}",
        task.error, task.losses, task.validations, task.validation, task.test, task.weights_sha256
    )
}

/// The results of a task with periodic evaluations, one microbatch pass after the other on one device.
fn reference(accumulate: usize) -> String {
    static OUTCOMES: Mutex<BTreeMap<usize, String>> = Mutex::new(BTreeMap::new());
    let mut outcomes = OUTCOMES.lock().unwrap_or_else(PoisonError::into_inner);
    let alone = || {
        outcome(&Settings { microbatch_group: Some(1), ..Settings::default() }.task(evaluated(accumulate)))
    };
    outcomes.entry(accumulate).or_insert_with(alone).clone()
}

fn evaluated(accumulate: usize) -> TrainTask {
    task(&TrainSpec { eval_every: Some(3), ..spec(accumulate) })
}

prop_compose! {
    fn settings()(
        devices in 1usize..=4,
        threads in 1usize..=2,
        cuts in prop::option::of(prop::collection::btree_set(1usize..5, 0..=4)),
        policy in prop::sample::select(PolicyKind::ALL.to_vec()),
        microbatch_group in prop::option::of(0usize..5),
        replicas in prop::option::of(1usize..=3),
        (prefetch, cache) in any::<(bool, bool)>(),
        others in 0usize..=2,
    ) -> Settings {
        let cuts = cuts.map(|cuts| cuts.into_iter().collect());
        Settings { devices, threads, cuts, policy, microbatch_group, replicas, prefetch, cache, others, ..Settings::default() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn no_number_of_devices_changes_a_bit(settings in settings(), accumulate in 1usize..=5) {
        let settings = Settings { microbatch_group: settings.microbatch_group.map(|microbatch_group| 1 + microbatch_group % accumulate), ..settings };
        prop_assert_eq!(outcome(&settings.task(evaluated(accumulate))), reference(accumulate));
    }
}

#[test]
fn in_less_host_memory_fewer_devices_compute_a_model_and_none_takes_more() {
    let admitted = |host: u64| {
        let mut run = Settings { devices: 4, cuts: None, ..Settings::default() }.orchestrator();
        run = run.host_memory(ByteSize(host));
        run.submit(evaluated(4).cuts(vec![1, 2, 3])).expect("a task");
        run.admit()
    };
    let replicas = |host: u64| admitted(host).map(|run| run.admission().tasks[0].replicas);
    let most = admitted(1 << 32).expect("it fits").admission().host_admitted_bytes;
    let (mut too_few, mut least) = (0, most);
    while least - too_few > 1024 {
        let middle = too_few.midpoint(least);
        *(if replicas(middle).is_ok() { &mut least } else { &mut too_few }) = middle;
    }
    let budgets = (0..=16).map(|part| least + (most - least) * part / 16);
    let mut found = Vec::new();
    for budget in budgets {
        let run = admitted(budget).expect("it fits");
        let replicas = run.admission().tasks[0].replicas;
        if found.last() != Some(&replicas) {
            found.push(replicas);
            let report = run.start().expect("a run");
            assert_eq!(outcome(&report.tasks[0]), reference(4), "{replicas} in {budget}");
            assert!(report.host_peak_bytes <= budget, "{report:?}");
        }
    }
    assert_eq!(found, [1, 2, 4]);
}

/// A barrier for the first arrivals.
#[derive(Debug)]
struct Rendezvous {
    /// How many are missing; none while no arrival is expected.
    missing: Mutex<usize>,
    came: Condvar,
}

impl Rendezvous {
    fn expect(&self, count: usize) {
        *self.missing.lock().unwrap_or_else(PoisonError::into_inner) = count;
    }

    fn come(&self) {
        let mut missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner);
        if *missing == 0 {
            return;
        }
        *missing -= 1;
        self.came.notify_all();
        let minute = Duration::from_secs(60);
        let waited = self.came.wait_timeout_while(missing, minute, |missing| *missing > 0);
        let (missing, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        assert!(!waited.timed_out(), "{missing} more did not come");
    }
}

/// A layer that continues when other microbatches have reached it too.
#[derive(Module, Debug)]
struct Meets {
    #[module(skip)]
    rendezvous: Arc<Rendezvous>,
}

impl Forward for Meets {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        self.rendezvous.come();
        x
    }
}

fn meets(rendezvous: &Arc<Rendezvous>) -> Arc<Chain> {
    let dense = |inputs, outputs| Dense { linear: LinearConfig::new(inputs, outputs).init(&Device::flex()) };
    let classifier = Classifier { linear: LinearConfig::new(8, 3).init(&Device::flex()) };
    let chain = Chain::builder("meets")
        .layer("in", dense(2, 8))
        .layer("meet", Meets { rendezvous: rendezvous.clone() });
    Arc::new(chain.layer("mid", dense(8, 8)).layer("out", classifier).build().expect("a chain"))
}

/// Points with two coordinates; those of item `nan` are not numbers.
struct Points {
    len: usize,
    nan: Option<usize>,
}

impl Dataset for Points {
    fn name(&self) -> &str {
        "points"
    }

    fn len(&self) -> usize {
        self.len
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        let batch = points(self.len, items, |_| false);
        let is_nan = |place: usize| Some(items[place / 2]) == self.nan;
        let numbers = batch.inputs.parts[0].as_f32().iter().enumerate();
        let numbers = numbers.map(|(place, x)| if is_nan(place) { f32::NAN } else { *x }).collect();
        let inputs = HostActivation::of(HostTensor::float(numbers, [items.len(), 2]));
        Ok(Batch { inputs, ..batch })
    }
}

fn numbers(len: usize) -> Arc<dyn Dataset> {
    Arc::new(Points { len, nan: None })
}

/// Keeps the spans of shard tasks.
struct Spans(Arc<Mutex<Vec<Span>>>);

impl Observer for Spans {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if let RunEvent::Span(span) = event
            && matches!(span.work, Work::Forward | Work::Backward | Work::Evaluate)
        {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(*span);
        }
    }
}

/// The number of devices, out of `devices` with one thread each, that compute at the same time.
fn at_once(devices: usize) -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(devices)
}

/// Runs the task so that the first shard tasks of as many microbatches, or batches, as can compute at the same time
/// wait for each other.
fn run_together(devices: usize, rendezvous: &Arc<Rendezvous>, task: TrainTask) -> (RunReport, Vec<Span>) {
    let spans = Arc::new(Mutex::new(Vec::new()));
    let mut run = Settings { devices, ..Settings::default() }.orchestrator();
    run = run.observer(Box::new(Spans(spans.clone())));
    run.submit(task).expect("a task");
    let run = run.admit().expect("it fits");
    assert_eq!(run.admission().tasks[0].replicas, devices);
    rendezvous.expect(at_once(devices));
    let report = run.start().expect("a run");
    let spans = std::mem::take(&mut *spans.lock().unwrap_or_else(PoisonError::into_inner));
    (report, spans)
}

/// Asserts that the first shard tasks of `count` microbatches, or batches, each ran on a different device, and that
/// as many computed at one moment as there are processors, and no more.
fn assert_at_once(spans: &[Span], devices: usize) {
    let first_of = |microbatch_pass: usize| {
        let of = spans.iter().filter(|span| span.microbatch_pass == microbatch_pass);
        of.min_by(|a, b| a.start_s.total_cmp(&b.start_s)).expect("a shard task")
    };
    let firsts: Vec<&Span> = (0..devices).map(first_of).collect();
    let tracks: BTreeSet<String> = firsts.iter().map(|span| format!("{:?}", span.track)).collect();
    assert_eq!(tracks.len(), devices, "{firsts:?}");
    let computing = |at_s: f64| spans.iter().filter(move |of| of.start_s <= at_s && at_s < of.end_s).count();
    assert_eq!(firsts.iter().map(|span| computing(span.start_s)).max(), Some(at_once(devices)), "{firsts:?}");
    assert!(spans.iter().all(|span| computing(span.start_s) <= at_once(devices)), "{spans:?}");
}

#[test]
fn microbatches_of_one_model_compute_at_once() {
    for (devices, cuts) in [(2, vec![]), (2, vec![2]), (3, vec![])] {
        let rendezvous = Arc::new(Rendezvous { missing: Mutex::new(0), came: Condvar::new() });
        let chain = meets(&rendezvous);
        let spec = TrainSpec { length: Length::Steps(2), accumulate: 4, clip: None, ..adamw(12) };
        let task =
            TrainTask::new("task", chain.clone(), numbers(24), spec.clone()).cuts(cuts).microbatch_group(1);
        let (report, spans) = run_together(devices, &rendezvous, task);
        assert_eq!(report.tasks[0].error, None);
        assert_at_once(&spans, devices);
        let plain = plain::train(&chain, numbers(24).as_ref(), &spec).expect("the plain loop");
        assert_eq!(report.tasks[0].losses, plain.losses);
        assert_eq!(report.tasks[0].weights_sha256, Some(plain.weights_sha256));
    }
}

#[test]
fn batches_of_an_evaluation_compute_at_once() {
    let rendezvous = Arc::new(Rendezvous { missing: Mutex::new(0), came: Condvar::new() });
    let chain = meets(&rendezvous);
    let spec = TrainSpec { length: Length::Steps(1), ..adamw(4) };
    let task = || TrainTask::new("task", chain.clone(), numbers(8), spec.clone()).validation(numbers(14));
    let alone = Settings::default().task(task());
    let (report, spans) = run_together(3, &rendezvous, task());
    assert_at_once(&spans, 3);
    assert_eq!(outcome(&report.tasks[0]), outcome(&alone));
}

#[test]
fn a_loss_that_is_no_number_is_that_of_its_minibatch_on_any_number_of_devices() {
    let rendezvous = Arc::new(Rendezvous { missing: Mutex::new(0), came: Condvar::new() });
    let chain = meets(&rendezvous);
    let spec = TrainSpec {
        length: Length::Steps(4),
        accumulate: 4,
        shuffle: false,
        eval_every: Some(1),
        ..adamw(8)
    };
    // In the second of the four microbatches of the third minibatch.
    let data: Arc<dyn Dataset> = Arc::new(Points { len: 32, nan: Some(2 * 8 + 3) });
    let run = |devices: usize, cuts: Vec<usize>| {
        let task = TrainTask::new("task", chain.clone(), data.clone(), spec.clone()).validation(numbers(10));
        Settings { devices, cuts: Some(cuts), ..Settings::default() }.task(task)
    };
    let alone = run(1, vec![]);
    assert!(alone.error.as_deref().is_some_and(|error| error.contains("step 2")), "{:?}", alone.error);
    assert_eq!((alone.losses.len(), alone.weights_sha256.is_some()), (2, true), "the best weights are kept");
    for (devices, cuts) in [(2, vec![]), (2, vec![2]), (4, vec![1, 3])] {
        assert_eq!(outcome(&run(devices, cuts)), outcome(&alone), "{devices}");
    }
}
