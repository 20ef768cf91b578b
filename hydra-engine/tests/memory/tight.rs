//! Edge cases: budgets without headroom, unusual chains, and failing code of a task.

use crate::common::{
    Fragile, Points, Read, Settings, adamw, cnn_chain, gpt2_chain, mlp_chain, spirals, tokens,
};
use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::Device;
use hydra_core::optimizer::Sgd;
use hydra_core::{
    Activation, Bandwidth, ByteSize, Chain, Dataset, DeviceId, Forward, HostActivation, HostTensor, Length,
    MemoryProbe, ModelWriter, OptimizerSpec, ParamBufferReader, Pass, TrainSpec, WeightError,
};
use hydra_engine::{
    DeviceSpec, EngineError, EvaluationTask, Observer, Orchestrator, RunEvent, RunReport, Span, TaskState,
    TrainTask, Work, plain,
};
use hydra_models::{cnn, mlp};
use hydra_spill::alloc::{AllocatorProbe, MAX_DEVICES};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// The result of `f`. A run that hangs fails the test.
fn in_time<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(f()));
    receiver.recv_timeout(Duration::from_secs(300)).expect("the run hangs")
}

fn linear(inputs: usize, outputs: usize) -> burn::nn::Linear {
    LinearConfig::new(inputs, outputs).init(&Device::flex())
}

fn dense(inputs: usize, outputs: usize) -> mlp::Dense {
    mlp::Dense { linear: linear(inputs, outputs) }
}

fn head(inputs: usize) -> crate::common::Classifier {
    crate::common::Classifier { linear: linear(inputs, 3) }
}

fn spec(batch: usize, steps: usize) -> TrainSpec {
    TrainSpec { length: Length::Steps(steps), ..TrainSpec::new(OptimizerSpec::adamw(1e-3), batch) }
}

/// A layer that stops gradients.
#[derive(Module, Debug)]
struct Wall {
    #[module(skip)]
    unused: usize,
}

impl Forward for Wall {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        Activation::of(x.into_float::<2>().detach())
    }
}

/// A layer that returns its matrix for any input.
#[derive(Module, Debug)]
struct Prompt {
    linear: burn::nn::Linear,
}

impl Forward for Prompt {
    fn forward(&self, _: Activation, _: &Pass) -> Activation {
        Activation::of(self.linear.weight.val())
    }
}

/// A layer whose working memory is a multiple of its input.
#[derive(Module, Debug)]
struct Swell {
    #[module(skip)]
    times: usize,
}

impl Forward for Swell {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let x = x.into_float::<2>();
        let [rows, columns] = x.dims();
        let swollen = x.repeat_dim(1, self.times).reshape([rows, self.times, columns]);
        Activation::of(swollen.sum_dim(1).reshape([rows, columns]))
    }
}

fn swelling(times: usize) -> Arc<Chain> {
    let chain = Chain::builder("swelling").layer("a", dense(2, 16)).layer("b", Swell { times });
    Arc::new(chain.layer("c", head(16)).build().unwrap())
}

#[test]
fn chains_that_differ_in_nothing_but_what_they_compute_are_measured_each() {
    in_own_process!();
    let admit = |times: &[usize], memory: u64| {
        let mut run = Settings { memory: ByteSize(memory), ..Settings::default() }.orchestrator();
        for (index, times) in times.iter().enumerate() {
            run.submit(TrainTask::new(format!("{index}"), swelling(*times), spirals(), spec(20, 2))).unwrap();
        }
        run.admit().map(|run| run.admission().clone())
    };
    let least = |times: usize| admit(&[times], 64 << 20).unwrap().tasks[0].plan.min_device_memory_bytes;
    let (light, heavy) = (least(1), least(4000));
    assert!(heavy > light + (1 << 20), "{light} {heavy}");
    let between = light.midpoint(heavy);
    assert!(admit(&[1], between).is_ok());
    assert!(admit(&[4000], between).is_err());
    let error = admit(&[1, 4000], between).unwrap_err();
    assert!(matches!(&error, EngineError::Task { task, .. } if task == "1"), "{error}");
}

#[test]
fn layers_of_a_chain_that_differ_in_nothing_but_what_they_compute_are_measured_each() {
    in_own_process!();
    let chain = Chain::builder("uneven").layer("a", dense(2, 16)).layer("light", Swell { times: 1 });
    let chain = chain.layer("heavy", Swell { times: 4000 }).layer("light again", Swell { times: 1 });
    let chain = Arc::new(chain.layer("c", head(16)).build().unwrap());
    let mut run = Settings::default().orchestrator();
    run.submit(TrainTask::new("task", chain, spirals(), spec(20, 2))).unwrap();
    let plan = run.admit().unwrap().admission().tasks[0].plan.clone();
    let [light, heavy, again] = [1, 2, 3].map(|layer| plan.layers[layer].peak_bytes);
    assert!(heavy > light + (1 << 20) && again < heavy / 2, "{light} {heavy} {again}");
}

/// Burn's dropout, which draws its masks from its own random state.
#[expect(clippy::disallowed_types, reason = "it is what is to be refused")]
#[derive(Module, Debug)]
struct Restless {
    linear: burn::nn::Linear,
    dropout: burn::nn::Dropout,
}

impl Forward for Restless {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        Activation::of(self.dropout.forward(self.linear.forward(x.into_float::<2>())))
    }
}

#[test]
fn a_layer_that_cannot_be_computed_again_is_refused() {
    in_own_process!();
    let dropout = burn::nn::DropoutConfig::new(0.3).init();
    let chain = Chain::builder("restless").layer("restless", Restless { linear: linear(2, 16), dropout });
    let chain = Arc::new(chain.layer("loss", head(16)).build().unwrap());
    let mut run = Settings::default().orchestrator();
    run.submit(TrainTask::new("task", chain, spirals(), spec(20, 2))).unwrap();
    let error = hydra_core::with_causes(&run.run().unwrap_err());
    assert!(error.contains("layer `restless` of chain `restless` gives another output"), "{error}");
    assert!(error.contains("`pass.site(0).dropout` in Rust, with PyTorch's functions in Python"), "{error}");
}

fn points(len: usize) -> Arc<dyn Dataset> {
    Arc::new(Points { len, bad: usize::MAX, panics: false })
}

fn least(chain: &Arc<Chain>, data: &Arc<dyn Dataset>, spec: &TrainSpec) -> u64 {
    let mut run = Settings::default().orchestrator();
    run.submit(TrainTask::new("task", chain.clone(), data.clone(), spec.clone())).unwrap();
    run.admit().unwrap().admission().tasks[0].plan.min_device_memory_bytes
}

fn all_done(report: &RunReport) {
    for task in &report.tasks {
        assert_eq!((task.state, task.error.as_deref()), (TaskState::Done, None), "{}", task.name);
    }
    for device in &report.devices {
        assert!(device.peak_measured && device.peak_bytes <= device.budget_bytes, "{device:?}");
    }
}

/// Trains one and two tasks to the bits of the plain loop, with little more device memory than the least.
fn trains_in_the_least_memory(chain: &Arc<Chain>, data: &Arc<dyn Dataset>, spec: &TrainSpec) {
    let least = least(chain, data, spec);
    let plain = plain::train(chain, data.as_ref(), spec).unwrap();
    for (tasks, prefetch, memory) in
        [(1, true, least + least / 50), (2, true, least + least / 6), (1, false, least + least / 50)]
    {
        let settings = Settings { memory: ByteSize(memory), prefetch, ..Settings::default() };
        let mut run = settings.orchestrator();
        for index in 0..tasks {
            let name = format!("task {index}");
            run.submit(TrainTask::new(name, chain.clone(), data.clone(), spec.clone())).unwrap();
        }
        let report = in_time(move || run.run().unwrap());
        all_done(&report);
        assert!(report.tasks.iter().all(|t| t.weights_sha256.as_ref() == Some(&plain.weights_sha256)));
    }
}

#[test]
fn models_with_large_activations_train_in_the_least_memory() {
    in_own_process!();
    let wide = Arc::new(mlp::chain(&[2, 8, 8, 8, 8, 8], 3).unwrap());
    trains_in_the_least_memory(&wide, &points(16_384), &spec(8192, 4));
}

#[test]
fn convolutions_train_in_the_least_memory() {
    in_own_process!();
    let images: Arc<dyn Dataset> = Arc::new(cnn::Waves::new(1, 32, 3, 16, 10));
    trains_in_the_least_memory(&cnn_chain(), &images, &spec(16, 2));
}

/// Shapes, graph nodes and tensor handles count as device memory too.
#[test]
fn many_small_tensors_stay_within_the_budget() {
    in_own_process!();
    let chain = Arc::new(mlp::chain(&[2; 200], 3).unwrap());
    let (data, spec) = (points(16), spec(4, 3));
    let mut run = Settings::default().orchestrator();
    run.submit(TrainTask::new("task", chain.clone(), data.clone(), spec.clone())).unwrap();
    let memory = ByteSize(run.admit().unwrap().admission().tasks[0].plan.single_shard_bytes);
    // Slow downloads wait on the device as far as memory allows.
    let slow = |device: DeviceSpec| device.with_link(Bandwidth(1e6), Duration::ZERO);
    let devices = vec![slow(DeviceSpec::cpu(memory))];
    let mut run = Orchestrator::new(devices).unwrap();
    for index in 0..4 {
        run.submit(TrainTask::new(format!("task {index}"), chain.clone(), data.clone(), spec.clone()))
            .unwrap();
    }
    all_done(&in_time(move || run.run().unwrap()));
}

#[test]
fn a_gradient_that_stops_midway_stops_in_every_cut() {
    in_own_process!();
    let chain =
        Chain::builder("wall").layer("a", dense(2, 8)).layer("wall", Wall { unused: 0 }).layer("c", head(8));
    let chain = Arc::new(chain.build().unwrap());
    let spec = spec(4, 6);
    let plain = plain::train(&chain, points(24).as_ref(), &spec).unwrap();
    for cuts in [vec![], vec![1], vec![2], vec![1, 2]] {
        for prefetch in [true, false] {
            let settings = Settings { cuts: Some(cuts.clone()), prefetch, ..Settings::default() };
            let report = settings.task(TrainTask::new("task", chain.clone(), points(24), spec.clone()));
            assert_eq!((report.error, report.weights_sha256), (None, Some(plain.weights_sha256.clone())));
        }
    }
}

#[test]
fn a_layer_may_give_its_parameters_away() {
    in_own_process!();
    let chain =
        Chain::builder("prompt").layer("a", dense(2, 4)).layer("prompt", Prompt { linear: linear(4, 8) });
    let chain = Arc::new(chain.layer("b", dense(8, 8)).layer("c", head(8)).build().unwrap());
    let spec = spec(4, 6);
    let plain = plain::train(&chain, points(24).as_ref(), &spec).unwrap();
    for (cuts, zero_copy) in [(vec![], true), (vec![1, 2], true), (vec![2, 3], true), (vec![2], false)] {
        let settings = Settings { cuts: Some(cuts), zero_copy, ..Settings::default() };
        let task = TrainTask::new("task", chain.clone(), points(24), spec.clone()).validation(points(8));
        let report = settings.task(task);
        assert_eq!((report.error, report.weights_sha256), (None, Some(plain.weights_sha256.clone())));
    }
}

#[test]
fn shards_without_parameters_and_small_datasets_train() {
    in_own_process!();
    let pass_on = || Fragile { limit: 1e9 };
    let chain = Chain::builder("gaps").layer("p0", pass_on()).layer("a", dense(2, 8)).layer("p1", pass_on());
    let chain =
        Arc::new(chain.layer("b", dense(8, 8)).layer("p2", pass_on()).layer("c", head(8)).build().unwrap());
    for (items, batch, accumulate, clip) in [(24, 4, 1, None), (3, 8, 4, Some(0.1)), (10, 4, 3, None)] {
        let spec = TrainSpec { accumulate, clip, ..spec(batch, 7) };
        let plain = plain::train(&chain, points(items).as_ref(), &spec).unwrap();
        for cuts in [vec![1], vec![1, 2, 3, 4, 5], vec![2, 3]] {
            let settings = Settings { cuts: Some(cuts), devices: 2, ..Settings::default() };
            let task = TrainTask::new("task", chain.clone(), points(items), spec.clone()).test(points(5));
            let report = in_time(move || settings.task(task));
            assert_eq!((report.error, report.losses), (None, plain.losses.clone()));
            assert_eq!(report.weights_sha256.as_ref(), Some(&plain.weights_sha256));
        }
    }
}

#[test]
fn evaluation_batches_are_no_larger_than_what_was_measured() {
    in_own_process!();
    let chain = Arc::new(mlp::chain(&[2, 64, 64], 3).unwrap());
    let (train, spec) = (points(4), spec(8192, 2));
    let memory = ByteSize(least(&chain, &train, &spec) * 9 / 8);
    let mut run = Settings { memory, ..Settings::default() }.orchestrator();
    run.submit(TrainTask::new("task", chain, train, spec).validation(points(2000))).unwrap();
    all_done(&in_time(move || run.run().unwrap()));
}

#[test]
fn items_of_other_shapes_are_refused() {
    in_own_process!();
    let mut run = Settings::default().orchestrator();
    let other: Arc<dyn Dataset> = Arc::new(cnn::Waves::new(1, 8, 3, 16, 3));
    run.submit(TrainTask::new("task", mlp_chain(), spirals(), spec(4, 1)).validation(other)).unwrap();
    let error = run.admit().unwrap_err();
    assert!(
        matches!(&error, EngineError::Task { source, .. } if matches!(**source, EngineError::ItemShapes { .. }))
    );
}

#[test]
fn a_panic_leaves_nothing_on_the_device() {
    in_own_process!();
    // The default hook may print a backtrace, for which it keeps 30 MB of symbols on the panicking thread.
    std::panic::set_hook(Box::new(|_| {}));
    let in_use = || (0..MAX_DEVICES).map(|i| AllocatorProbe.in_use(DeviceId(i))).sum::<u64>();
    let chain = Chain::builder("fragile").layer("a", dense(2, 256)).layer("a2", dense(256, 256));
    let chain = Arc::new(chain.layer("f", Fragile { limit: 400.0 }).layer("c", head(256)).build().unwrap());
    let spec = TrainSpec { shuffle: false, ..spec(512, 6) };
    let fails = |name: &str| {
        let data = Arc::new(Points { len: 4096, bad: 1024, panics: false });
        TrainTask::new(name, chain.clone(), data, spec.clone())
    };
    let before = in_use();
    let mut run = Settings::default().orchestrator();
    for name in ["one", "two", "three"] {
        run.submit(fails(name)).unwrap();
    }
    let report = run.run().unwrap();
    assert!(report.tasks.iter().all(|t| t.state == TaskState::Failed && t.losses.len() == 2));
    drop(std::panic::take_hook());
    // The pool's threads end by themselves and then free their buffers for matrix products.
    let gone = || in_use() < before + 200_000;
    (0..6000).take_while(|_| !gone()).for_each(|_| std::thread::park_timeout(Duration::from_millis(10)));
    // The graph of one microbatch saves more than half a MiB.
    assert!(gone(), "{before} bytes in use before, {} after", in_use());
}

struct Broken;

impl ModelWriter for Broken {
    fn write(&self, _: &Chain, _: &dyn ParamBufferReader, _: &Path) -> Result<(), WeightError> {
        panic!("the writer gave up")
    }
}

#[test]
fn a_writer_and_a_dataset_that_panic_fail_their_task_only() {
    in_own_process!();
    let report = in_time(|| {
        let mut run = Settings::default().orchestrator();
        let task = |name: &str| TrainTask::new(name, mlp_chain(), spirals(), spec(8, 3));
        run.submit(task("writes").write_to(Arc::new(Broken), "nowhere".into())).unwrap();
        let unreadable = Arc::new(Points { len: 24, bad: 12, panics: true });
        let in_order = TrainSpec { shuffle: false, ..spec(4, 6) };
        run.submit(TrainTask::new("reads", mlp_chain(), unreadable, in_order)).unwrap();
        run.submit(task("good")).unwrap();
        run.run().unwrap()
    });
    let [writes, reads, good] = &report.tasks[..] else { panic!("three tasks") };
    assert_eq!(
        (writes.state, reads.state, good.state),
        (TaskState::Failed, TaskState::Failed, TaskState::Done)
    );
    assert!(writes.error.as_deref().unwrap().contains("the writer gave up"));
    assert!(reads.error.as_deref().unwrap().contains("unreadable items"));
}

#[test]
fn a_host_with_room_for_masters_alone_is_refused() {
    in_own_process!();
    let run = || {
        let mut run = Settings::default().orchestrator();
        run.submit(TrainTask::new("task", mlp_chain(), spirals(), spec(8, 3))).unwrap();
        run
    };
    let masters = run().admit().unwrap().admission().tasks[0].storage.master_bytes;
    let result = in_time(move || run().host_memory(ByteSize(masters + 10)).run());
    assert!(matches!(result, Err(EngineError::HostMemory { .. })));
}

#[test]
fn a_host_with_room_for_one_model_at_a_time_trains_all() {
    in_own_process!();
    let sgd = OptimizerSpec::from(Sgd { lr: 0.01, momentum: 0.0, weight_decay: 0.0 });
    let spec = TrainSpec { optimizer: sgd, eval_every: Some(2), ..spec(4, 4) };
    let settings = Settings { devices: 2, ..Settings::default() };
    let run = || {
        let mut run = settings.orchestrator();
        for index in 0..3 {
            let task = TrainTask::new(format!("task {index}"), gpt2_chain(), tokens(11, 1), spec.clone());
            run.submit(task.validation(tokens(3, 1)).cuts(vec![1, 2, 3])).unwrap();
        }
        run
    };
    let refused = run().host_memory(ByteSize(1)).admit().map(drop);
    let Err(EngineError::HostMemory { needed, .. }) = refused else { panic!("a byte suffices") };
    let tight = run().host_memory(ByteSize(needed)).admit().unwrap();
    assert_eq!(tight.admission().active_models, 1);
    all_done(&in_time(move || tight.start().unwrap()));
}

/// Collects every span.
struct Spans(Arc<Mutex<Vec<Span>>>);

impl Observer for Spans {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if let RunEvent::Span(span) = event {
            self.0.lock().unwrap().push(*span);
        }
    }
}

#[test]
fn in_little_host_memory_gradients_wait_for_the_optimizer_shard_by_shard() {
    in_own_process!();
    let (chain, data, spec) = (gpt2_chain(), tokens(11, 1), spec(4, 6));
    let shards: Vec<_> = (0..5).map(|layer| layer..layer + 1).collect();
    let settings = Settings::default();
    let spans = Arc::new(Mutex::new(Vec::new()));
    let run = |host: ByteSize| {
        let mut run = settings.orchestrator().host_memory(host).observer(Box::new(Spans(spans.clone())));
        let task = TrainTask::new("task", chain.clone(), data.clone(), spec.clone());
        run.submit(task.cuts(vec![1, 2, 3, 4])).unwrap();
        run
    };
    let plenty = run(ByteSize::mib(64)).admit().unwrap().admission().clone();
    let all = plenty.tasks[0].storage.master_bytes + plenty.tasks[0].memory.active_bytes;
    let Err(EngineError::HostMemory { needed: least, .. }) = run(ByteSize(1)).admit() else { panic!() };
    assert!(least + (16 << 10) < all, "one block and no three: {least} of {all}");
    let plain = plain::train(&chain, data.as_ref(), &spec).unwrap();
    for host in [least, least.midpoint(all), all] {
        spans.lock().unwrap().clear();
        let tight = run(ByteSize(host));
        let report = in_time(move || tight.run().unwrap());
        all_done(&report);
        assert_eq!(report.tasks[0].losses, plain.losses);
        assert_eq!(report.tasks[0].weights_sha256.as_ref(), Some(&plain.weights_sha256));
        assert!(report.host_peak_bytes <= host, "{report:?}");
        if host > least {
            continue;
        }
        // A block is promoted for its backward pass after the optimizer has stepped the block behind it, not while
        // that block computes.
        let spans = spans.lock().unwrap();
        let of =
            |work: Work, step: usize| spans.iter().filter(move |span| span.work == work && span.step == step);
        for step in 0..6 {
            for block in 1..3 {
                let promoted = of(Work::Promote, step).filter(|span| span.shard == block);
                let begins = promoted.map(|span| span.start_s).fold(0.0, f64::max);
                let behind: Vec<usize> = chain.buffers_of(shards[block + 1].clone());
                let stepped = of(Work::Step, step).filter(|span| behind.contains(&span.shard));
                assert!(stepped.clone().count() > 0 && stepped.clone().all(|span| span.end_s <= begins));
            }
        }
    }
}

#[test]
fn models_of_different_sizes_keep_to_what_was_admitted() {
    in_own_process!();
    let settings = Settings { devices: 2, ..Settings::default() };
    let run = || {
        let mut run = settings.orchestrator();
        for (index, batch) in [11, 4, 2, 2].into_iter().enumerate() {
            let (name, spec) = (format!("task {index}"), spec(batch, 4));
            let task = TrainTask::new(name, gpt2_chain(), tokens(11, 1), spec);
            run.submit(task.cuts(vec![1, 2, 3])).unwrap();
        }
        run
    };
    let admission = run().admit().unwrap().admission().clone();
    let active: Vec<u64> = admission.tasks.iter().map(|t| t.memory.active_bytes).collect();
    assert!(active[0] > active[1] && active[1] > active[2], "{active:?}");
    let masters: u64 = admission.tasks.iter().map(|t| t.storage.master_bytes).sum();
    // Memory for the largest model alone, or for two of the smallest.
    let host = ByteSize(masters + active[0].max(2 * active[2]));
    let tight = run().host_memory(host).admit().unwrap();
    assert!(2 * active[2] > active[0], "{active:?}");
    assert_eq!(tight.admission().active_models, 2);
    let report = in_time(move || tight.start().unwrap());
    all_done(&report);
    assert!(report.host_peak_bytes <= report.host_admitted_bytes, "{report:?}");
    assert!(report.host_admitted_bytes <= host.bytes(), "{report:?}");
}

#[test]
fn what_ends_and_what_is_read_ahead_takes_no_more_than_was_admitted() {
    in_own_process!();
    let run = |host: Option<u64>| {
        let mut run = Settings::default().orchestrator();
        run = host.into_iter().fold(run, |run, host| run.host_memory(ByteSize(host)));
        // The masters of the first task soon make way for one more model.
        for (index, steps) in [3, 30, 30, 30].into_iter().enumerate() {
            let (name, spec) = (format!("task {index}"), spec(16, steps));
            let task =
                TrainTask::new(name, gpt2_chain(), tokens(40, 1), TrainSpec { clip: Some(1.0), ..spec });
            run.submit(task.cuts(vec![1, 2, 3])).unwrap();
        }
        run
    };
    let needs = run(None).admit().unwrap().admission().clone();
    let masters: u64 = needs.tasks.iter().map(|task| task.storage.master_bytes).sum();
    let active = needs.tasks[0].memory.active_bytes;
    for more in [0, active / 2, active - 1] {
        let host = masters + active + more;
        let tight = run(Some(host)).admit().unwrap();
        assert_eq!(tight.admission().active_models, 1);
        let report = in_time(move || tight.start().unwrap());
        all_done(&report);
        let (peak, admitted) = (report.host_peak_bytes, report.host_admitted_bytes);
        assert!(peak <= admitted && admitted <= host, "{peak} of {admitted} of {host}");
        assert_eq!(report.host_budget_bytes, host);
    }
}

#[test]
fn an_evaluation_needs_no_memory_for_gradients() {
    in_own_process!();
    let run = |host: u64| {
        let run = Settings::default().orchestrator().host_memory(ByteSize(host));
        in_time(move || {
            run.evaluate(EvaluationTask { chain: gpt2_chain(), data: tokens(3, 1), batch: 1, seed: 7 })
        })
    };
    let Err(EngineError::HostMemory { masters, active, .. }) = run(1) else { panic!("a byte suffices") };
    assert!(active < masters / 2, "{active} beside {masters} of masters, which are as large as gradients");
    assert!(run(masters + active).unwrap().loss > 0.0);
}

#[test]
fn what_is_estimated_counts_every_evaluation() {
    in_own_process!();
    let dir = tempfile::tempdir().unwrap();
    let admitted = |every: Option<usize>| {
        let mut run = Settings::default().orchestrator().plans(dir.path().to_owned());
        let spec = TrainSpec { eval_every: every, ..spec(4, 8) };
        let task = TrainTask::new("task", gpt2_chain(), tokens(11, 1), spec);
        run.submit(task.validation(tokens(40, 2)).initial_validation(false)).unwrap();
        run.admit().unwrap().admission().tasks[0].clone()
    };
    let once = admitted(None);
    // With the same plan the costs are the same.
    once.plan.save(&dir.path().join("plan.json")).unwrap();
    let forward: f64 = once.plan.shards.iter().map(|shard| shard.forward_s).sum();
    // Eight evaluations of ten batches instead of one.
    let more = admitted(Some(1)).estimated_s - once.estimated_s;
    assert!(forward > 0.0 && (more / (70.0 * forward) - 1.0).abs() < 1e-9, "{more} of {forward}");
}

/// A device that fails after a number of shard tasks.
struct Dies {
    after: AtomicUsize,
}

impl MemoryProbe for Dies {
    fn measures(&self) -> bool {
        false
    }

    fn in_use(&self, _: DeviceId) -> u64 {
        0
    }

    fn peak(&self, _: DeviceId) -> u64 {
        0
    }

    fn reset_peak(&self, _: DeviceId) {}

    fn trim(&self, _: DeviceId, _: u64) {
        assert!(self.after.fetch_sub(1, Relaxed) != 1, "the device is gone");
    }
}

#[test]
fn a_worker_that_panics_between_shard_tasks_fails_its_task_and_the_run_ends() {
    in_own_process!();
    let report = in_time(|| {
        let mut run = Settings::default().orchestrator().probe(Arc::new(Dies { after: 5.into() }));
        for name in ["first", "second"] {
            run.submit(TrainTask::new(name, mlp_chain(), spirals(), spec(8, 6)).cuts(vec![1])).unwrap();
        }
        run.run().unwrap()
    });
    let failed: Vec<_> = report.tasks.iter().filter(|task| task.state == TaskState::Failed).collect();
    assert_eq!((failed.len(), report.tasks.len()), (1, 2), "{report:?}");
    assert!(failed[0].error.as_deref().unwrap().contains("the device is gone"), "{failed:?}");
}

#[test]
fn weights_that_are_no_numbers_are_not_handed_out_as_a_model() {
    in_own_process!();
    let optimizer = OptimizerSpec::from(Sgd { lr: 1e40, momentum: 0.0, weight_decay: 0.0 });
    let spec = TrainSpec { optimizer, ..spec(8, 1) };
    let run = || Settings::default().task(TrainTask::new("task", mlp_chain(), spirals(), spec));
    let report = in_time(run);
    // The single loss is computed before the step.
    assert_eq!((report.state, report.losses.len()), (TaskState::Failed, 1));
    let error = report.error.unwrap();
    assert!(error.starts_with("the trained weights of `") && error.contains("are not finite"), "{error}");
}

/// Data whose inputs are NaN from item `bad` on.
fn spoilt(data: Arc<dyn Dataset>, bad: usize) -> Arc<dyn Dataset> {
    let how = move |data: &dyn Dataset, items: &[usize]| {
        let mut batch = data.batch(items)?;
        if items.iter().any(|item| *item >= bad) {
            let shape = batch.inputs.parts[0].shape.clone();
            let values = vec![f32::NAN; shape.iter().product()];
            batch.inputs = HostActivation::of(HostTensor::float(values, shape));
        }
        Ok(batch)
    };
    Arc::new(Read { data, how })
}

#[test]
fn a_task_that_diverges_leaves_its_best_weights() {
    in_own_process!();
    let dir = tempfile::tempdir().unwrap();
    // Minibatches 0, 1 and 2 are good; the fourth is not.
    let task = |steps: usize, accumulate: usize| {
        let data = spoilt(spirals(), 24);
        let spec = TrainSpec { shuffle: false, eval_every: Some(1), accumulate, ..spec(8, steps) };
        TrainTask::new("task", mlp_chain(), data, spec).validation(spirals())
    };
    for (cuts, accumulate, devices) in [(vec![], 1, 1), (vec![1], 1, 1), (vec![1, 2], 2, 2)] {
        let settings = Settings { cuts: Some(cuts), devices, others: 1, ..Settings::default() };
        let file = dir.path().join(format!("{accumulate}-{devices}.safetensors"));
        let kept = task(6, accumulate).checkpoint_to(file.clone());
        let (failing, whole) = (settings.clone(), settings);
        let failed = in_time(move || failing.task(kept));
        assert_eq!((failed.state, failed.losses.len()), (TaskState::Failed, 3), "{failed:?}");
        let error = failed.error.as_deref().unwrap();
        assert!(error.starts_with("the loss is NaN at step 3"), "{error}");
        // Exactly the same minibatches.
        let three = task(3, accumulate);
        let whole = in_time(move || whole.task(three));
        assert_eq!(failed.weights_sha256.as_ref().unwrap(), whole.weights_sha256.as_ref().unwrap());
        assert_eq!(
            (failed.validations.best_step, &failed.validations.evaluations),
            (whole.validations.best_step, &whole.validations.evaluations)
        );
        assert!(!file.exists(), "no checkpoint marks it as done");
    }
}

#[test]
fn two_tasks_do_not_write_into_one_directory() {
    in_own_process!();
    let mut run = Settings::default().orchestrator();
    let task = |name: &str, dir: &str| {
        TrainTask::new(name, mlp_chain(), spirals(), spec(8, 1)).write_to(Arc::new(Broken), dir.into())
    };
    run.submit(task("first", "models/one")).unwrap();
    run.submit(task("second", "models/two")).unwrap();
    let same = std::env::current_dir().unwrap().join("models/one");
    let error = run.submit(task("third", same.to_str().unwrap())).unwrap_err();
    assert!(error.to_string().starts_with("the tasks `first` and `third` both write into `"), "{error}");
}

#[test]
fn a_plan_is_used_again_where_what_it_depends_on_is_the_same() {
    in_own_process!();
    let dir = tempfile::tempdir().unwrap();
    let plan = |config: &str| {
        let mut run = Settings::default().orchestrator().plans(dir.path().to_owned()).config(config);
        run.submit(TrainTask::new("task", mlp_chain(), spirals(), adamw(4))).unwrap();
        Ok::<_, EngineError>(run.admit()?.admission().tasks[0].plan.as_ref().clone())
    };
    let file = dir.path().join("plan.json");
    let first = plan("").unwrap();
    first.save(&file).unwrap();
    // Measured times always differ between measurements.
    assert_eq!(plan("").unwrap().layers, first.layers);
    let other = plan("tf32").unwrap();
    assert!(other.fingerprint.config == "tf32" && other.layers != first.layers);

    let mut lax = first.clone();
    lax.rules.margin = 0;
    lax.save(&file).unwrap();
    let again = plan("").unwrap();
    assert_eq!(
        (&again.layers, again.rules),
        (&first.layers, first.rules),
        "its costs are used, with this margin"
    );
    let mut other = first.clone();
    other.layers[0].name = "another".to_owned();
    other.save(&file).unwrap();
    let error = hydra_core::with_causes(&plan("").unwrap_err());
    assert!(error.contains("task `task`") && error.contains("make a new plan"), "{error}");
}
