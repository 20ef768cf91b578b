//! Tasks that are queued until they fit in host memory, and tasks that never fit.

use crate::common::{Settings, adamw, gpt2_chain, mlp_chain, spirals, tokens};
use hydra_core::{ByteSize, Length, TaskId, TrainSpec};
use hydra_engine::{
    Checkpoint, EngineError, Observer, Orchestrator, RunEvent, RunReport, StopFlag, TaskState, TrainTask,
    plain,
};
use hydra_sched::PolicyKind;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

const TASKS: usize = 12;

fn spec(index: usize) -> TrainSpec {
    TrainSpec { seed: index as u64, length: Length::Steps(2 + index % 3), ..adamw(3) }
}

fn task(index: usize) -> TrainTask {
    TrainTask::new(format!("{index}"), gpt2_chain(), tokens(7, 1), spec(index)).cuts(vec![1, 2, 3, 4])
}

/// The weights hash of plain training.
fn alone(index: usize) -> String {
    plain::train(&gpt2_chain(), tokens(7, 1).as_ref(), &spec(index)).unwrap().weights_sha256
}

/// Tasks that have started and not ended: their number, its maximum, and all tasks in their order.
#[derive(Default)]
struct StartedTasks {
    now: BTreeSet<TaskId>,
    most: usize,
    order: Vec<usize>,
}

struct Watch(Arc<Mutex<StartedTasks>>);

impl Observer for Watch {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let mut begun = self.0.lock().unwrap();
        match event {
            RunEvent::Began { task, .. } => {
                assert!(begun.now.insert(*task), "a task starts once");
                begun.order.push(task.0);
                begun.most = begun.most.max(begun.now.len());
            }
            RunEvent::Ended { task, .. } => {
                begun.now.remove(task);
            }
            _ => {}
        }
    }
}

fn run(
    settings: &Settings,
    host: u64,
    set: impl FnOnce(Orchestrator) -> Orchestrator,
) -> (RunReport, StartedTasks) {
    let begun = Arc::new(Mutex::new(StartedTasks::default()));
    let orchestrator = settings.orchestrator().host_memory(ByteSize(host));
    let mut run = set(orchestrator.observer(Box::new(Watch(begun.clone()))));
    for index in 0..TASKS {
        run.submit(task(index)).unwrap();
    }
    let report = run.run().unwrap();
    let begun = std::mem::take(&mut *begun.lock().unwrap());
    (report, begun)
}

/// Host bytes of the masters of a task, and of the task within a minibatch.
fn needs() -> (u64, u64) {
    let mut run = Settings::default().orchestrator();
    run.submit(task(0)).unwrap();
    let admission = run.admit().unwrap().admission().clone();
    (admission.tasks[0].storage.master_bytes, admission.tasks[0].memory.active_bytes)
}

/// The host bytes named by the error of a refused run.
fn needed(error: EngineError) -> u64 {
    match error {
        EngineError::HostMemory { needed, .. } => needed,
        other => panic!("{other}"),
    }
}

/// The least host bytes with which a task trains without a disk.
fn least() -> u64 {
    let mut run = Settings::default().orchestrator().host_memory(ByteSize(1)).queued(1);
    run.submit(task(0)).unwrap();
    needed(run.admit().unwrap_err())
}

fn check(report: &RunReport) {
    for (index, task) in report.tasks.iter().enumerate() {
        assert_eq!((task.state, &task.error), (TaskState::Done, &None));
        assert_eq!(task.weights_sha256, Some(alone(index)), "task {index}");
    }
    assert!(report.host_peak_bytes <= report.host_budget_bytes, "{report:?}");
    assert_eq!(report.tasks.len(), TASKS);
}

#[test]
fn tasks_that_wait_have_the_bits_that_they_have_alone() {
    let (masters, active) = needs();
    for (devices, policy) in
        [(1, PolicyKind::ShardedLrtf), (2, PolicyKind::ShardedLrtf), (2, PolicyKind::Random)]
    {
        let settings = Settings { devices, policy, ..Settings::default() };
        let host = 3 * (masters + active);
        let (report, begun) = run(&settings, host, |run| run.queued(usize::MAX));
        check(&report);
        assert_eq!((begun.most, begun.order.len()), (3, TASKS));
        assert!(report.replay_s.is_none(), "the simulator's tasks do not wait");
    }
}

#[test]
fn the_longest_begin_first() {
    let (masters, active) = needs();
    let settings = Settings { policy: PolicyKind::ShardedLrtf, ..Settings::default() };
    let (_, begun) = run(&settings, masters + active, |run| run.queued(usize::MAX));
    let minibatches: Vec<usize> = begun.order.iter().map(|index| 2 + index % 3).collect();
    assert_eq!((begun.most, &minibatches[..4]), (1, &[4; 4][..]), "{:?}", begun.order);
    assert!(minibatches.is_sorted_by(|a, b| a >= b), "{minibatches:?}");
}

#[test]
fn no_more_begin_than_are_let_whatever_room_there_is() {
    for concurrent in [1, 2, TASKS] {
        let (report, begun) = run(&Settings::default(), 1 << 40, |run| run.queued(concurrent));
        check(&report);
        assert_eq!(begun.most, concurrent);
    }
}

#[test]
fn with_room_for_all_nobody_waits() {
    let (report, begun) = run(&Settings::default(), 1 << 40, |run| run.queued(usize::MAX));
    check(&report);
    assert_eq!((begun.most, begun.order), (TASKS, (0..TASKS).collect()));
}

#[test]
fn masters_on_the_disk_begin_in_turn_too() {
    let (masters, active) = needs();
    let dir = tempfile::tempdir().unwrap();
    let settings = Settings { devices: 2, ..Settings::default() };
    let on_disk = |run: Orchestrator| run.disk(dir.path().to_owned(), ByteSize::mib(64));
    let (report, begun) = run(&settings, 4 * masters + active, on_disk);
    check(&report);
    assert_eq!(begun.most, TASKS, "tasks that fit on the disk do not wait");
    // Less than a task takes whose masters are all in host memory.
    let mut tight = on_disk(Settings::default().orchestrator()).host_memory(ByteSize(1)).queued(2);
    tight.submit(task(0)).unwrap();
    let host = needed(tight.admit().unwrap_err());
    assert!(host < least(), "{host} {}", least());
    let (report, begun) = run(&Settings::default(), host, |run| on_disk(run).queued(2));
    check(&report);
    assert!(begun.most <= 2 && report.transfers.disk_read_bytes > 0, "{report:?}");
}

#[test]
fn what_waits_at_a_stop_ends_with_nothing_and_a_run_that_goes_on_trains_it() {
    let (masters, active) = needs();
    let dir = tempfile::tempdir().unwrap();
    let file = |index: usize| dir.path().join(format!("{index}.ckpt"));
    let go = |stop: Option<StopFlag>| {
        let run = Settings::default().orchestrator().host_memory(ByteSize(2 * (masters + active)));
        let mut run = run.queued(usize::MAX);
        if let Some(stop) = stop {
            run = run.observer(Box::new(StopAtFirst(stop.clone()))).stop_flag(stop);
        }
        for index in 0..TASKS {
            let mut task = task(index).checkpoint_to(file(index));
            if file(index).exists() {
                task = task.resume_from(Checkpoint::open(file(index)).unwrap());
            }
            run.submit(task).unwrap();
        }
        run.run().unwrap()
    };
    let stopped = go(Some(StopFlag::new()));
    let states = |state| stopped.tasks.iter().filter(|task| task.state == state).count();
    assert_eq!(states(TaskState::Stopped), TASKS, "{stopped:?}");
    let nothing = |task: &&hydra_engine::TaskReport| task.weights_sha256.is_none() && task.trained.steps == 0;
    assert_eq!(stopped.tasks.iter().filter(nothing).count(), TASKS - 2, "{stopped:?}");
    let whole = go(None);
    check(&whole);
}

/// Stops the run after its first minibatch.
struct StopAtFirst(StopFlag);

impl Observer for StopAtFirst {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::Minibatch { .. }) {
            self.0.stop();
        }
    }
}

#[test]
fn a_task_that_can_never_fit_is_left_out_and_the_others_run() {
    let small = || TrainTask::new("small", mlp_chain(), spirals(), spec(0));
    let submit = |host: u64, memory: ByteSize, leave_out: bool, tasks: Vec<TrainTask>| {
        let run = Settings { memory, ..Settings::default() }.orchestrator().host_memory(ByteSize(host));
        let run = run.queued(usize::MAX);
        let mut run = if leave_out { run.leave_out_what_never_fits() } else { run };
        for task in tasks {
            run.submit(task).unwrap();
        }
        run.run()
    };
    let (little, plenty) = (least() - 1, 1 << 40);
    let on_device = |task: TrainTask| {
        let mut run = Settings::default().orchestrator();
        run.submit(task).unwrap();
        run.admit().unwrap().admission().tasks[0].plan.min_device_memory_bytes
    };
    let (tight, wide) =
        (ByteSize(on_device(small()).midpoint(on_device(task(0)))), Settings::default().memory);
    let expected = plain::train(&mlp_chain(), spirals().as_ref(), &spec(0)).unwrap().weights_sha256;
    for (host, memory, reason) in [(little, wide, "the run needs"), (plenty, tight, "does not fit")] {
        let config = serde_json::json!({ "lr": 1 });
        let tasks = || vec![task(0).config(config.clone()), small(), task(1)];
        assert!(submit(host, memory, false, tasks()).is_err(), "no task asked for less");
        let report = submit(host, memory, true, tasks()).unwrap();
        let names: Vec<&str> = report.skipped.iter().map(|task| task.name.as_str()).collect();
        assert_eq!((names, &report.skipped[0].config), (vec!["0", "1"], &config));
        assert!(report.skipped.iter().all(|task| task.reason.contains(reason)), "{report:?}");
        assert_eq!(report.tasks.len(), 1);
        assert_eq!(report.tasks[0].weights_sha256.as_ref(), Some(&expected));
        assert!(!report.all_done());
        assert!(submit(host, memory, true, vec![task(0), task(1)]).is_err(), "nothing would be left");
    }
    let error = submit(little, wide, true, vec![task(0)]).unwrap_err();
    let EngineError::Task { task, source } = error else { panic!("{error}") };
    assert_eq!(task, "0");
    assert!(matches!(*source, EngineError::HostMemory { needed, tasks: 1, .. } if needed == little + 1));
}
