//! Tasks with master weights, moments and gradients resident on a device, stepped there: the bits are those of the
//! plain loop, and no parameters are transferred. Here the device is a CPU with memory of its own, stepped with the
//! host's arithmetic; `gpu.rs` tests a GPU.

use crate::common::{
    Fragile, Points, Settings, StopAfter, adamw, config, gpt2_chain, mlp_chain, spirals, tokens,
};
use hydra_core::optimizer::Sgd;
use hydra_core::{ByteSize, Chain, Decay, FloatType, Length, OptimizerSpec, TrainSpec};
use hydra_engine::{
    Checkpoint, EngineError, OptimizerPlacement, Orchestrator, Place, RunReport, StopFlag, TaskState,
    TrainTask, Transfers, plain,
};
use hydra_models::{gpt2, mlp};
use std::sync::Arc;

fn spec() -> TrainSpec {
    TrainSpec { length: Length::Steps(5), clip: None, ..adamw(4) }
}

fn task(name: &str, spec: &TrainSpec) -> TrainTask {
    task_in(FloatType::F32, name, spec)
}

fn task_in(float: FloatType, name: &str, spec: &TrainSpec) -> TrainTask {
    TrainTask::new(name, gpt2_in(float), tokens(11, 1), spec.clone())
}

fn gpt2_in(float: FloatType) -> Arc<Chain> {
    Arc::new(gpt2::chain(&config(), None).expect("a chain").with_float_type(float))
}

fn on_device(settings: &Settings) -> Orchestrator {
    settings.orchestrator().optimizer_placement(OptimizerPlacement::Device)
}

fn run(settings: &Settings, tasks: impl IntoIterator<Item = TrainTask>) -> RunReport {
    let mut run = on_device(settings);
    for task in tasks {
        run.submit(task).expect("a task");
    }
    run.run().expect("a run")
}

fn agrees(report: &RunReport, plain: &plain::PlainRun, what: &str) {
    let task = &report.tasks[0];
    assert_eq!((task.error.as_deref(), task.state), (None, TaskState::Done), "{what}");
    assert_eq!((task.plan.optimizer.on, task.plan.optimizer.exact), (Place::Device, true), "{what}");
    assert_eq!(task.losses, plain.losses, "{what}");
    assert_eq!(task.weights_sha256.as_deref(), Some(plain.weights_sha256.as_str()), "{what}");
    let device = &report.devices[0];
    assert!(device.peak_measured && device.peak_bytes <= device.budget_bytes, "{what}");
}

#[test]
fn a_task_that_lives_on_the_device_equals_the_plain_loop() {
    agrees_in(FloatType::F32);
}

#[test]
fn so_does_one_in_16_bits() {
    [FloatType::Bf16, FloatType::F16].into_iter().for_each(agrees_in);
}

fn agrees_in(float: FloatType) {
    let sgd = |momentum| OptimizerSpec::from(Sgd { lr: 0.05, momentum, weight_decay: 0.01 });
    let specs = [
        spec(),
        TrainSpec { accumulate: 3, ..spec() },
        TrainSpec { optimizer: sgd(0.9), ..spec() },
        TrainSpec { optimizer: sgd(0.0), accumulate: 2, ..spec() },
        TrainSpec { decay: Decay::Matrices, seed: 9, ..spec() },
    ];
    for (index, spec) in specs.iter().enumerate() {
        let plain = plain::train(&gpt2_in(float), tokens(11, 1).as_ref(), spec).expect("the plain loop");
        for (cuts, prefetch) in [(vec![], true), (vec![1, 3], true), (vec![2], false)] {
            let settings = Settings { prefetch, ..Settings::default() };
            let other = TrainSpec { seed: 5, ..spec.clone() };
            let first = task_in(float, "task", spec).cuts(cuts.clone());
            let report = run(&settings, [first, task("other", &other)]);
            agrees(&report, &plain, &format!("{float}, spec {index}, cuts {cuts:?}, prefetch {prefetch}"));
        }
    }
}

#[test]
fn two_streams_and_a_small_model_equal_the_plain_loop() {
    let spec = TrainSpec { accumulate: 2, ..spec() };
    let narrow = mlp::two_stream_chain(8, 2, 3).unwrap().with_float_type(FloatType::Bf16);
    for chain in [mlp_chain(), Arc::new(mlp::two_stream_chain(8, 2, 3).unwrap()), Arc::new(narrow)] {
        let plain = plain::train(&chain, spirals().as_ref(), &spec).expect("the plain loop");
        let task = TrainTask::new("task", chain, spirals(), spec.clone()).cuts(vec![1]);
        agrees(&run(&Settings::default(), [task]), &plain, "a small model");
    }
}

#[test]
fn parameters_go_up_once_and_gradients_never_come_down() {
    let moved_in = |float: FloatType, placement: OptimizerPlacement, steps: usize, cuts: &[usize]| {
        let mut run = Settings::default().orchestrator().optimizer_placement(placement);
        let spec = TrainSpec { length: Length::Steps(steps), ..spec() };
        run.submit(task_in(float, "task", &spec).cuts(cuts.to_vec())).unwrap();
        run.run().unwrap().transfers
    };
    let moved = |placement, steps, cuts| moved_in(FloatType::F32, placement, steps, cuts);
    let masters: u64 = gpt2_chain().buffers().iter().map(|buffer| buffer.bytes()).sum();
    let there = |steps, cuts| moved(OptimizerPlacement::Device, steps, cuts);
    let (few, many) = (there(2, &[]), there(12, &[]));
    assert!(few.promoted_bytes >= 3 * masters, "parameters and two moments");
    assert!(many.promoted_bytes - few.promoted_bytes < masters / 4, "only batches go up");
    assert_eq!(many.demoted_bytes, few.demoted_bytes, "nothing comes down but the trained weights");
    let narrow = |steps| moved_in(FloatType::Bf16, OptimizerPlacement::Device, steps, &[]);
    let (few_narrow, many_narrow) = (narrow(2), narrow(12));
    assert!(few_narrow.promoted_bytes >= 3 * masters + masters / 2, "and what they are rounded to");
    assert!(many_narrow.promoted_bytes - few_narrow.promoted_bytes < masters / 4, "only batches go up");
    assert_eq!(many_narrow.demoted_bytes, few_narrow.demoted_bytes, "nothing comes down but the masters");
    assert!(few_narrow.demoted_bytes >= masters);
    // Boundary tensors are transferred in both, unless the next shard task takes them on the device, which depends on
    // timing; they are a tenth. So twelve minibatches may even download less than two.
    let beyond = |few: Transfers, many: Transfers| {
        let pairs = [(many.promoted_bytes, few.promoted_bytes), (many.demoted_bytes, few.demoted_bytes)];
        pairs.map(|(many, few)| many as i64 - few as i64)
    };
    let here = |steps, cuts| moved(OptimizerPlacement::Host, steps, cuts);
    let [up, down] = beyond(there(2, &[2]), there(12, &[2]));
    let [up_spilled, down_spilled] = beyond(here(2, &[2]), here(12, &[2]));
    assert!(up_spilled - up >= 8 * masters as i64, "{up} against {up_spilled}");
    let gradients = 4 * gpt2_chain().parameters() as i64;
    assert!(down_spilled - down >= 8 * gradients, "{down} against {down_spilled}");
}

#[test]
fn the_best_weights_are_kept_and_put_back() {
    [FloatType::F32, FloatType::Bf16].into_iter().for_each(best_are_put_back_in);
}

fn best_are_put_back_in(float: FloatType) {
    // A rate so large that the loss rises again.
    let spec = TrainSpec {
        eval_every: Some(1),
        optimizer: OptimizerSpec::adamw(1.0),
        length: Length::Steps(6),
        ..spec()
    };
    let task = || task_in(float, "task", &spec).validation(tokens(5, 3)).test(tokens(4, 2)).cuts(vec![2]);
    let mut host = Settings::default().orchestrator();
    host.submit(task()).unwrap();
    let host = host.run().unwrap().tasks.remove(0);
    let report = run(&Settings::default(), [task()]);
    let there = &report.tasks[0];
    assert_eq!((host.plan.optimizer.on, there.plan.optimizer.on), (Place::Host, Place::Device));
    assert_eq!((there.state, there.error.as_deref()), (TaskState::Done, None));
    assert!(there.validations.best_step.is_some_and(|step| step < 6), "{:?}", there.validations);
    assert_eq!(there.validations.evaluations, host.validations.evaluations);
    assert_eq!(
        (there.validations.best_step, there.validation.clone(), there.test.clone()),
        (host.validations.best_step, host.validation, host.test)
    );
    assert_eq!(there.weights_sha256, host.weights_sha256);
}

#[test]
fn an_interrupted_run_keeps_what_lived_on_the_device() {
    let stop = StopFlag::new();
    let long = TrainSpec { length: Length::Steps(1000), ..spec() };
    let observer = Box::new(StopAfter(stop.clone(), 3));
    let mut run = on_device(&Settings::default()).stop_flag(stop).observer(observer);
    run.submit(task("task", &long)).unwrap();
    let report = run.run().unwrap();
    let stopped = &report.tasks[0];
    assert_eq!(stopped.state, TaskState::Stopped);
    assert!(stopped.trained.steps >= 3 && stopped.trained.steps < 1000);
    let same = TrainSpec { length: Length::Steps(stopped.trained.steps), ..spec() };
    let plain = plain::train(&gpt2_chain(), tokens(11, 1).as_ref(), &same).unwrap();
    assert_eq!(stopped.weights_sha256, Some(plain.weights_sha256));
}

#[test]
fn a_task_that_fails_beside_it_harms_nothing() {
    let linear = burn::nn::LinearConfig::new(2, 3).init(&burn::tensor::Device::flex());
    let chain = Chain::builder("fragile")
        .layer("fragile", Fragile { limit: 10.0 })
        .layer("head", crate::common::Classifier { linear })
        .build()
        .unwrap();
    let data = Arc::new(Points { len: 24, bad: 12, panics: false });
    let plain = plain::train(&gpt2_chain(), tokens(11, 1).as_ref(), &spec()).unwrap();
    let bad = TrainSpec { shuffle: false, ..spec() };
    let report = run(
        &Settings::default(),
        [task("task", &spec()).cuts(vec![2]), TrainTask::new("bad", Arc::new(chain), data, bad)],
    );
    agrees(&report, &plain, "with a task that fails");
    let failed = &report.tasks[1];
    assert!(failed.state == TaskState::Failed && failed.error.as_deref().unwrap().contains("above 10"));
}

#[test]
fn what_cannot_live_on_the_device_is_refused_on_request() {
    let refused = |settings: &Settings, spec: TrainSpec| {
        let mut run = on_device(settings);
        run.submit(task("task", &spec)).unwrap();
        let error = run.admit().unwrap_err();
        assert!(matches!(&error, EngineError::OptimizerPlacement { task, .. } if task == "task"), "{error}");
        error.to_string()
    };
    let two = Settings { devices: 2, ..Settings::default() };
    assert!(refused(&two, spec()).contains("the run has 2 devices"));
    let clipped = refused(&Settings::default(), TrainSpec { clip: Some(1.0), ..spec() });
    assert!(clipped.contains("the norm of all gradients"), "{clipped}");
}

#[test]
fn what_does_not_fit_is_refused_on_request() {
    // Four models with three copies of 8 MB each, on a device with memory for one in training.
    let settings = Settings { memory: ByteSize::mib(88), ..Settings::default() };
    let chain = Arc::new(mlp::chain(&[2, 1448, 1448], 3).unwrap());
    let with = |placement| {
        let mut run = settings.orchestrator().optimizer_placement(placement);
        for name in ["a", "b", "c", "d"] {
            let spec = TrainSpec { length: Length::Steps(1), ..spec() };
            run.submit(TrainTask::new(name, chain.clone(), spirals(), spec)).unwrap();
        }
        run
    };
    let refused = with(OptimizerPlacement::Device).run().unwrap_err().to_string();
    assert!(refused.contains("task `a`") && refused.contains("everything would take"), "{refused}");
    // A CPU is used only on request.
    let admitted = with(OptimizerPlacement::Auto).admit().unwrap();
    assert!(
        admitted
            .admission()
            .tasks
            .iter()
            .all(|task| task.optimizer.on == Place::Host && task.optimizer.exact)
    );
}

#[test]
fn a_task_is_kept_from_the_device_and_goes_on_there_or_on_the_host() {
    let spec = TrainSpec { eval_every: Some(2), ..spec() };
    for float in [FloatType::F32, FloatType::Bf16] {
        let task = || task_in(float, "task", &spec).validation(tokens(6, 2)).cuts(vec![2]);
        let whole = run(&Settings::default(), [task()]);
        let dir = tempfile::TempDir::new().unwrap();
        let file = dir.path().join("task.safetensors");
        let stop = StopFlag::new();
        let kept = on_device(&Settings::default()).stop_flag(stop.clone());
        let mut kept = kept.observer(Box::new(StopAfter(stop, 3)));
        kept.submit(task().checkpoint_to(file.clone())).unwrap();
        assert_eq!(kept.run().unwrap().tasks[0].state, TaskState::Stopped);
        for placement in [OptimizerPlacement::Device, OptimizerPlacement::Host] {
            let checkpoint = Checkpoint::open(&file).unwrap();
            let mut on = Settings::default().orchestrator().optimizer_placement(placement);
            on.submit(task().resume_from(checkpoint)).unwrap();
            let (report, whole) = (&on.run().unwrap().tasks[0], &whole.tasks[0]);
            assert!(
                report.checkpoints.resumed_at.is_some_and(|step| step >= 3),
                "{float} {placement:?}: {:?}",
                report.error
            );
            assert_eq!(report.weights_sha256, whole.weights_sha256, "{float} {placement:?}");
            assert_eq!(
                (&report.losses, report.validations.best_step),
                (&whole.losses, whole.validations.best_step),
                "{float}"
            );
        }
    }
}
