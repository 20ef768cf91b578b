//! Tasks with the master weights of some buffers on a device that does not fit all of them, stepped there, while the
//! host steps the others: the bits are those of the plain loop. Here the device is a CPU with memory of its own.

use crate::common::{Settings, StopAfter, adamw, config, tokens};
use hydra_core::optimizer::Sgd;
use hydra_core::{ByteSize, Chain, FloatType, Length, OptimizerSpec, TrainSpec};
use hydra_engine::{
    AdmittedTask, Checkpoint, CheckpointEvery, OptimizerPlacement, Orchestrator, Place, RunReport, StopFlag,
    TaskState, TrainTask, plain,
};
use hydra_models::gpt2::{self, Gpt2Config};
use std::sync::Arc;

fn spec() -> TrainSpec {
    TrainSpec { length: Length::Steps(4), clip: None, ..adamw(4) }
}

/// A GPT-2 whose blocks have 200 KB of parameters each.
fn wide(float: FloatType) -> Arc<Chain> {
    let config = Gpt2Config { n_embd: 64, n_layer: 4, ..config() };
    Arc::new(gpt2::chain(&config, None).expect("a chain").with_float_type(float))
}

fn task(chain: &Arc<Chain>, name: &str, spec: &TrainSpec) -> TrainTask {
    TrainTask::new(name, chain.clone(), tokens(11, 1), spec.clone()).cuts(vec![2, 4])
}

fn partial(memory: ByteSize, tasks: &[TrainTask]) -> Orchestrator {
    let settings = Settings { memory, cache: false, ..Settings::default() };
    let mut run = settings.orchestrator().optimizer_placement(OptimizerPlacement::Partial);
    for task in tasks {
        run.submit(task.clone()).expect("a task");
    }
    run
}

fn admitted(memory: ByteSize, tasks: &[TrainTask]) -> Option<Vec<AdmittedTask>> {
    Some(partial(memory, tasks).admit().ok()?.admission().tasks.clone())
}

/// The bytes of the parameters that are resident.
fn resident_bytes(chain: &Chain, admitted: &[AdmittedTask]) -> u64 {
    let resident = admitted.iter().flat_map(|task| &task.optimizer.resident);
    resident.map(|buffer| chain.buffers()[*buffer].bytes()).sum()
}

/// Device memory in which some buffers of these tasks are resident, and others are not.
fn memory_for_some(chain: &Chain, tasks: &[TrainTask]) -> ByteSize {
    memory_for(chain, tasks, 1)
}

/// The same, with at least `least` bytes resident.
fn memory_for(chain: &Chain, tasks: &[TrainTask], least: u64) -> ByteSize {
    let is_partial = |memory: &ByteSize| {
        let Some(admitted) = admitted(*memory, tasks) else { return false };
        let resident: usize = admitted.iter().map(|task| task.optimizer.resident.len()).sum();
        resident_bytes(chain, &admitted) >= least && resident < tasks.len() * chain.buffers().len()
    };
    let all = (8..160).map(|quarter| ByteSize(quarter << 18));
    all.into_iter().find(is_partial).expect("some memory fits some buffers")
}

fn agrees(report: &RunReport, plain: &plain::PlainRun, on: Place, what: &str) {
    let task = &report.tasks[0];
    assert_eq!((task.error.as_deref(), task.state), (None, TaskState::Done), "{what}");
    assert_eq!((task.plan.optimizer.on, task.plan.optimizer.exact), (on, true), "{what}");
    assert_eq!(task.losses, plain.losses, "{what}");
    assert_eq!(task.weights_sha256.as_deref(), Some(plain.weights_sha256.as_str()), "{what}");
    assert!(report.workload.is_some() && report.replay_s.is_some(), "{what}");
    let device = &report.devices[0];
    assert!(device.peak_measured && device.peak_bytes <= device.budget_bytes, "{what}");
}

#[test]
fn a_task_that_is_partly_on_the_device_equals_the_plain_loop() {
    let sgd = OptimizerSpec::from(Sgd { lr: 0.05, momentum: 0.9, weight_decay: 0.01 });
    let specs = [
        (FloatType::F32, spec(), Place::Partial),
        (FloatType::Bf16, spec(), Place::Partial),
        (FloatType::F32, TrainSpec { optimizer: sgd, ..spec() }, Place::Partial),
        // Everything is trained, and gradients are added up or wait for their norm on the host.
        (FloatType::F32, TrainSpec { accumulate: 3, ..spec() }, Place::Host),
        (FloatType::F32, TrainSpec { clip: Some(1.0), ..spec() }, Place::Host),
    ];
    for (float, spec, on) in specs {
        let chain = wide(float);
        let plain = plain::train(&chain, tokens(11, 1).as_ref(), &spec).expect("the plain loop");
        let other = TrainSpec { seed: 5, ..spec.clone() };
        for tasks in
            [vec![task(&chain, "task", &spec)], vec![task(&chain, "task", &spec), task(&chain, "b", &other)]]
        {
            let memory =
                if on == Place::Partial { memory_for_some(&chain, &tasks) } else { ByteSize::mib(40) };
            let report = partial(memory, &tasks).run().expect("a run");
            agrees(&report, &plain, on, &format!("{float}, {:?}, {} tasks", spec.optimizer, tasks.len()));
        }
    }
}

#[test]
fn resident_buffers_are_promoted_once_and_their_gradients_stay() {
    let chain = wide(FloatType::F32);
    let tasks = |steps| [task(&chain, "task", &TrainSpec { length: Length::Steps(steps), ..spec() })];
    // More than a block, so that what depends on timing is small compared with it.
    let memory = memory_for(&chain, &tasks(2), 200_000);
    let moved = |placement, steps| {
        let tasks = tasks(steps);
        let resident = resident_bytes(&chain, &admitted(memory, &tasks).expect("it fits"));
        let report = partial(memory, &tasks).optimizer_placement(placement).run().expect("a run");
        (report.transfers, resident)
    };
    let each_step = |placement| {
        let ((few, resident), (many, _)) = (moved(placement, 2), moved(placement, 10));
        let up = many.promoted_bytes as i64 - few.promoted_bytes as i64;
        let down = many.demoted_bytes as i64 - few.demoted_bytes as i64;
        (up / 8, down / 8, resident as i64)
    };
    let (up_host, down_host, resident) = each_step(OptimizerPlacement::Host);
    let (up, down, _) = each_step(OptimizerPlacement::Partial);
    // Forward and backward promote. Boundary tensors go up and down too, unless the next shard task takes them on the
    // device, which depends on timing; they are a twentieth.
    assert!(up_host - up >= resident * 3 / 2, "{up} bytes a step of {up_host}, {resident} of them resident");
    assert!(down_host - down >= resident * 3 / 4, "{down} bytes a step of {down_host}, {resident} resident");
}

#[test]
fn a_checkpoint_of_it_goes_on_on_the_host_on_the_device_and_in_part() {
    // A rate so large that the loss rises again, so that the best weights are restored.
    let spec = TrainSpec {
        eval_every: Some(1),
        optimizer: OptimizerSpec::adamw(1.0),
        length: Length::Steps(6),
        ..spec()
    };
    for float in [FloatType::F32, FloatType::Bf16] {
        let chain = wide(float);
        let task = || task(&chain, "task", &spec).validation(tokens(5, 3)).test(tokens(4, 2));
        let memory = memory_for_some(&chain, &[task()]);
        let mut host = Settings::default().orchestrator();
        host.submit(task()).unwrap();
        let host = host.run().unwrap().tasks.remove(0);
        let whole = partial(memory, &[task()]).run().unwrap().tasks.remove(0);
        assert_eq!((whole.plan.optimizer.on, whole.error.as_deref()), (Place::Partial, None));
        assert!(whole.validations.best_step.is_some_and(|step| step < 6), "{:?}", whole.validations);
        assert_eq!(whole.validations.evaluations, host.validations.evaluations);
        assert_eq!((&whole.test, &whole.weights_sha256), (&host.test, &host.weights_sha256));
        let dir = tempfile::TempDir::new().unwrap();
        let file = dir.path().join("task.safetensors");
        let stop = StopFlag::new();
        let kept = partial(memory, &[task().checkpoint_to(file.clone())]).stop_flag(stop.clone());
        let kept = kept.checkpoint_every(CheckpointEvery::Minibatches(1));
        let kept = kept.observer(Box::new(StopAfter(stop, 3))).run().unwrap();
        assert_eq!(kept.tasks[0].state, TaskState::Stopped);
        let plenty = Settings::default().memory;
        let places = [
            (OptimizerPlacement::Host, Place::Host, memory),
            (OptimizerPlacement::Partial, Place::Partial, memory),
            (OptimizerPlacement::Device, Place::Device, plenty),
        ];
        for (placement, on, memory) in places {
            let resumed = task().resume_from(Checkpoint::open(&file).unwrap());
            let report =
                partial(memory, &[resumed]).optimizer_placement(placement).run().unwrap().tasks.remove(0);
            assert_eq!((report.plan.optimizer.on, report.error.as_deref()), (on, None), "{float}");
            assert!(report.checkpoints.resumed_at.is_some_and(|step| step >= 3), "{float} {placement:?}");
            assert_eq!(report.weights_sha256, whole.weights_sha256, "{float} {placement:?}");
            assert_eq!(report.losses, whole.losses, "{float} {placement:?}");
        }
    }
}

#[test]
fn where_not_all_tasks_fit_in_host_memory_none_is_partly_on_the_device() {
    let chain = wide(FloatType::F32);
    let tasks: Vec<TrainTask> = ["a", "b", "c"].iter().map(|name| task(&chain, name, &spec())).collect();
    let memory = memory_for_some(&chain, &tasks);
    let plain = plain::train(&chain, tokens(11, 1).as_ref(), &spec()).expect("the plain loop");
    let whole = partial(memory, &tasks).admit().expect("it fits").admission().host_admitted_bytes;
    let short = partial(memory, &tasks).host_memory(ByteSize(whole * 3 / 4)).queued(3);
    let report = short.run().expect("a run");
    let task = &report.tasks[0];
    assert_eq!(
        (task.weights_sha256.as_deref(), task.plan.optimizer.on),
        (Some(plain.weights_sha256.as_str()), Place::Host)
    );
    let why = &report.tasks[0].plan.optimizer.why;
    assert!(why.contains("fit in host memory at the same time"), "{why}");
}
