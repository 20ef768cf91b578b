//! Run control: tasks are paused, resumed, forked and added, and each has the bits of plain training.

use crate::common::{Settings, adamw, gpt2_chain, tokens};
use burn::tensor::Device;
use hydra_core::schedule::Linear;
use hydra_core::{ByteSize, Chain, Dataset, Length, OptimizerSpec, Schedule, TrainSpec};
use hydra_engine::{
    Checkpoint, Command, CommandError, Observer, Orchestrator, RunControl, RunEvent, RunReport, TaskReport,
    TaskState, TrainTask, plain,
};
use hydra_sched::PolicyKind;
use proptest::prelude::*;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// The parts that all tasks of a run share.
struct Parts {
    chain: Arc<Chain>,
    data: Arc<dyn Dataset>,
}

impl Parts {
    fn new() -> Self {
        Self { chain: gpt2_chain(), data: tokens(9, 1) }
    }

    fn task(&self, name: &str, spec: TrainSpec) -> TrainTask {
        TrainTask::new(name, self.chain.clone(), self.data.clone(), spec).cuts(vec![1, 3])
    }

    fn plain(&self, spec: &TrainSpec) -> String {
        plain::train(&self.chain, self.data.as_ref(), spec).unwrap().weights_sha256
    }

    fn plain_fork(&self, first: (&TrainSpec, usize), spec: &TrainSpec) -> plain::PlainRun {
        plain::train_forked(&self.chain, self.data.as_ref(), first, spec, &Device::flex()).unwrap()
    }
}

fn spec(steps: usize) -> TrainSpec {
    TrainSpec { length: Length::Steps(steps), ..adamw(3) }
}

/// The same with another rate, and a schedule that depends on the length.
fn other(steps: usize) -> TrainSpec {
    TrainSpec { optimizer: OptimizerSpec::adamw(7e-4), schedule: Schedule::new(Linear, 1), ..spec(steps) }
}

/// Calls a function at every pause, with the task's name and minibatches.
struct Driver<F>(F, RunControl);

impl<F: FnMut(usize, usize, &RunControl) + Send> Observer for Driver<F> {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if let RunEvent::Paused { task, step, .. } = event {
            (self.0)(task.0, *step, &self.1);
        }
    }
}

fn controlled(
    settings: &Settings,
    set: impl FnOnce(Orchestrator, &RunControl) -> Orchestrator,
    at_pause: impl FnMut(usize, usize, &RunControl) + Send + 'static,
) -> RunReport {
    let control = RunControl::new();
    let run = settings.orchestrator().control(&control);
    let run = run.observer(Box::new(Driver(at_pause, control.clone())));
    set(run, &control).run().unwrap()
}

fn named<'a>(report: &'a RunReport, name: &str) -> &'a TaskReport {
    report.tasks.iter().find(|task| task.name == name).unwrap()
}

fn go_on(task: &str, until: Option<usize>) -> Command {
    Command::Continue { task: task.to_owned(), until }
}

fn with(mut run: Orchestrator, tasks: impl IntoIterator<Item = TrainTask>) -> Orchestrator {
    tasks.into_iter().for_each(|task| assert!(run.submit(task).is_ok()));
    run
}

#[test]
fn a_task_that_pauses_has_the_bits_of_one_that_does_not() {
    let parts = Parts::new();
    let pauses = Arc::new(Mutex::new(Vec::new()));
    for devices in [1, 2] {
        let heard = pauses.clone();
        let settings = Settings { devices, ..Settings::default() };
        let tasks = [parts.task("a", spec(4)).until(0), parts.task("b", spec(5)).until(2)];
        let report = controlled(
            &settings,
            |run, control| {
                drop(control.send(go_on("a", Some(1))));
                with(run, tasks)
            },
            move |task, step, control| {
                heard.lock().unwrap().push((task, step));
                let name = ["a", "b"][task];
                drop(control.send(go_on(name, Some(step + 2).filter(|step| *step < 4))));
            },
        );
        for (name, steps) in [("a", 4), ("b", 5)] {
            let task = named(&report, name);
            assert_eq!((task.state, task.trained.steps), (TaskState::Done, steps));
            assert_eq!(task.weights_sha256, Some(parts.plain(&spec(steps))));
        }
        let mut heard = std::mem::take(&mut *pauses.lock().unwrap());
        heard.sort_unstable();
        assert_eq!(heard, [(0, 1), (0, 3), (1, 2)]);
    }
}

/// Forks "child" off "a", which pauses at 2, and "grandchild" off that.
fn fork_twice(settings: &Settings, parts: &Parts, dir: &Path, change: &TrainSpec) -> RunReport {
    let files = [dir.join("a-2"), dir.join("child-4")];
    let forks = [parts.task("child", change.clone()).until(4), parts.task("grandchild", spec(6))];
    let first = parts.task("a", spec(5)).until(2);
    let control = RunControl::new();
    let run = settings.orchestrator().control(&control);
    let run = with(run, [first, parts.task("b", spec(3))]);
    let forker = std::thread::spawn(move || {
        for (fork, (file, parent)) in forks.into_iter().zip(files.into_iter().zip(["a", "child"])) {
            let at = Some(if parent == "a" { 2 } else { 4 });
            let save = Command::Save { task: parent.to_owned(), at, file: file.clone() };
            let step = control.send(save).wait().unwrap().step;
            assert_eq!(Some(step), at);
            let fork = fork.fork_from(Checkpoint::open(&file).unwrap());
            let task = Box::new(fork);
            control.send(Command::Submit { task, like: parent.to_owned() }).wait().unwrap();
            control.send(go_on(parent, None)).wait().unwrap();
        }
    });
    let report = run.run().unwrap();
    forker.join().unwrap();
    report
}

#[test]
fn a_fork_has_the_bits_of_the_plain_loop_that_does_the_same() {
    let parts = Parts::new();
    for (devices, change) in [(1, spec(5)), (2, other(7))] {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings { devices, ..Settings::default() };
        let report = fork_twice(&settings, &parts, dir.path(), &change);
        assert!(report.all_done(), "{report:?}");
        assert_eq!(
            named(&report, "a").weights_sha256,
            Some(parts.plain(&spec(5))),
            "the parent is not touched"
        );
        assert_eq!(named(&report, "b").weights_sha256, Some(parts.plain(&spec(3))));
        let child = parts.plain_fork((&spec(5), 2), &change);
        assert_eq!(named(&report, "child").weights_sha256.as_ref(), Some(&child.weights_sha256));
        assert_eq!(named(&report, "child").losses, child.losses);
        if change == spec(5) {
            assert_eq!(named(&report, "child").weights_sha256, named(&report, "a").weights_sha256);
            let grandchild = parts.plain_fork((&spec(5), 4), &spec(6));
            assert_eq!(named(&report, "grandchild").weights_sha256, Some(grandchild.weights_sha256));
        }
    }
}

#[test]
fn a_task_that_is_added_has_the_bits_that_it_has_alone() {
    let parts = Parts::new();
    let new = parts.task("new", TrainSpec { seed: 3, ..other(4) });
    let report = controlled(
        &Settings::default(),
        |run, _| with(run, [parts.task("a", spec(3)).until(1)]),
        move |_, _, control| {
            drop(control.send(Command::Submit { task: Box::new(new.clone()), like: "a".to_owned() }));
            drop(control.send(go_on("a", None)));
        },
    );
    assert!(report.all_done());
    assert_eq!(named(&report, "a").weights_sha256, Some(parts.plain(&spec(3))));
    let alone = parts.plain(&TrainSpec { seed: 3, ..other(4) });
    assert_eq!(named(&report, "new").weights_sha256, Some(alone));
}

/// A task that starts when another has ended, because memory fits one, is recorded with it.
#[test]
fn a_task_that_is_added_and_waits_for_room_is_recorded() {
    let parts = Parts::new();
    let (new, host) = (parts.task("new", spec(2)), memory_for(&parts, 1));
    let report = controlled(
        &Settings::default(),
        |run, _| with(run.host_memory(host), [parts.task("a", spec(3)).until(1)]),
        move |_, _, control| {
            drop(control.send(Command::Submit { task: Box::new(new.clone()), like: "a".to_owned() }));
            drop(control.send(go_on("a", None)));
        },
    );
    assert!(report.all_done());
    let workload = report.workload.expect("what was trained is recorded");
    let trained: Vec<(&str, u64)> =
        workload.tasks.iter().map(|task| (task.name.as_str(), task.minibatches)).collect();
    assert_eq!(trained, [("a", 3), ("new", 2)]);
}

/// The task whose plan is used may have ended before the run was resumed, and needs no memory then.
#[test]
fn a_task_may_be_added_like_one_that_was_finished_when_the_run_began() {
    let (parts, dir) = (Parts::new(), tempfile::tempdir().unwrap());
    let file = dir.path().join("over.safetensors");
    let over = || parts.task("over", spec(2)).checkpoint_to(file.clone());
    assert!(with(Settings::default().orchestrator(), [over()]).run().unwrap().all_done());
    for listens in [false, true] {
        let control = RunControl::new();
        let run = Settings::default().orchestrator();
        let run = if listens { run.listen(&control) } else { run.control(&control) };
        let over = over().resume_from(Checkpoint::open(&file).unwrap());
        let run = with(run, [over, parts.task("a", spec(3)).until(1)]).admit().unwrap();
        let task = Box::new(parts.task("new", TrainSpec { seed: 8, ..spec(3) }));
        let commands = std::thread::spawn(move || {
            control.send(Command::Submit { task, like: "over".to_owned() }).wait().unwrap();
            control.send(go_on("a", None)).wait().unwrap();
        });
        let report = run.start().unwrap();
        commands.join().unwrap();
        assert!(report.all_done(), "{:?}", report.tasks.iter().map(|task| &task.error).collect::<Vec<_>>());
        let plain = parts.plain(&TrainSpec { seed: 8, ..spec(3) });
        assert_eq!(named(&report, "new").weights_sha256, Some(plain));
    }
}

/// A batch size and an optimizer that no task of the run had at the start, on one device and on two; a shape that was
/// only measured is not trained.
#[test]
fn a_task_of_a_shape_that_was_measured_has_the_bits_that_it_has_alone() {
    let parts = Parts::new();
    let momentum = |seed| TrainSpec { seed, optimizer: OptimizerSpec::sgd(1e-2), ..adamw(5) };
    let few = |spec: TrainSpec| TrainSpec { length: Length::Steps(3), ..spec };
    for devices in [1, 2] {
        let new = parts.task("new", few(momentum(3)));
        let report = controlled(
            &Settings { devices, ..Settings::default() },
            |mut run, _| {
                run.submit_shape(parts.task("shape", few(momentum(1)))).unwrap();
                assert!(run.submit_shape(parts.task("shape", spec(3))).is_err(), "a name stands for one");
                with(run, [parts.task("a", spec(3)).until(1)])
            },
            move |_, _, control| {
                drop(control.send(Command::Submit { task: Box::new(new.clone()), like: "shape".to_owned() }));
                drop(control.send(go_on("a", None)));
            },
        );
        assert!(report.all_done() && report.tasks.len() == 2);
        assert_eq!(named(&report, "a").weights_sha256, Some(parts.plain(&spec(3))));
        assert_eq!(named(&report, "new").weights_sha256, Some(parts.plain(&few(momentum(3)))));
    }
}

/// Host memory for this many tasks at a time.
fn memory_for(parts: &Parts, tasks: u64) -> ByteSize {
    let mut run = Settings::default().orchestrator();
    run.submit(parts.task("any", spec(3))).unwrap();
    let admission = run.admit().unwrap().admission().clone();
    ByteSize(tasks * (admission.tasks[0].storage.master_bytes + admission.tasks[0].memory.active_bytes))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    /// Five tasks pause at random points in memory for two: paused tasks release their memory for queued ones, and
    /// come back.
    #[test]
    fn paused_tasks_make_room_and_come_back(
        devices in 1_usize..3,
        random in any::<bool>(),
        steps in prop::collection::vec(1_usize..5, 5),
        stride in 1_usize..3,
        stops in any::<bool>(),
    ) {
        let (parts, dir) = (Parts::new(), tempfile::tempdir().unwrap());
        let policy = if random { PolicyKind::Random } else { PolicyKind::ShardedLrtf };
        let settings = Settings { devices, policy, ..Settings::default() };
        let name = |task: usize| format!("task-{task}");
        let tasks: Vec<TrainTask> = steps.iter().enumerate().map(|(index, steps)| {
            let task = parts.task(&name(index), TrainSpec { seed: index as u64, ..spec(*steps) });
            task.checkpoint_to(dir.path().join(name(index))).until(stride)
        }).collect();
        let mut left = steps.iter().filter(|steps| **steps > stride).count();
        let ends = steps.clone();
        let mut paused = Vec::new();
        let memory = memory_for(&parts, 2);
        let report = controlled(
            &settings,
            |run, _| with(run.host_memory(memory).queued(usize::MAX), tasks),
            move |task, step, control| {
                paused.push((task, step));
                left -= 1;
                if left == 0 {
                    // No task continues before all have come here.
                    if stops {
                        // Some have master weights, some have released them, some are about to.
                        let (task, _) = paused.remove(0);
                        drop(control.send(Command::Stop { task: name(task) }));
                    }
                    for (task, step) in paused.drain(..) {
                        let until = Some(step + stride).filter(|until| *until < ends[task]);
                        left += usize::from(until.is_some());
                        drop(control.send(go_on(&name(task), until)));
                    }
                }
            },
        );
        prop_assert!(report.host_peak_bytes <= memory.bytes());
        for (index, steps) in steps.iter().enumerate() {
            let task = &report.tasks[index];
            if task.state == TaskState::Stopped {
                prop_assert!(stops && task.trained.steps < *steps && task.trained.steps % stride == 0);
                // A task without master weights when it stops is not hashed.
                let until = TrainSpec { seed: index as u64, ..spec(task.trained.steps) };
                prop_assert!(task.weights_sha256.iter().all(|hash| *hash == parts.plain(&until)));
                continue;
            }
            prop_assert_eq!((task.state, task.trained.steps), (TaskState::Done, *steps), "{:?}", task.error);
            let alone = parts.plain(&TrainSpec { seed: index as u64, ..spec(*steps) });
            prop_assert_eq!(task.weights_sha256.as_ref(), Some(&alone));
        }
    }
}

#[test]
fn commands_that_cannot_be_carried_out_say_why_and_change_nothing() {
    let parts = Parts::new();
    let refused = Arc::new(Mutex::new(Vec::new()));
    let answers = refused.clone();
    let shape = parts.task("batch", TrainSpec { length: Length::Steps(3), ..adamw(2) });
    let twice = parts.task("a", spec(3));
    let report = controlled(
        &Settings::default(),
        |run, _| with(run, [parts.task("a", spec(4)).until(2)]),
        move |_, _, control| {
            let pause = |at| Command::Pause { task: "a".to_owned(), at: Some(at) };
            let submit =
                |task: &TrainTask| Command::Submit { task: Box::new(task.clone()), like: "a".to_owned() };
            let commands = [
                pause(1),
                pause(4),
                Command::Stop { task: "c".to_owned() },
                submit(&shape),
                submit(&twice),
                go_on("a", Some(1)),
                go_on("a", Some(9)),
            ];
            answers.lock().unwrap().extend(commands.map(|command| control.send(command)));
            drop(control.send(go_on("a", None)));
        },
    );
    assert_eq!(report.tasks[0].weights_sha256, Some(parts.plain(&spec(4))));
    let answers = std::mem::take(&mut *refused.lock().unwrap());
    let said: Vec<String> =
        answers.into_iter().map(|answer| answer.wait().unwrap_err().to_string()).collect();
    for (said, expected) in said.iter().zip([
        "minibatch 1 is out of range for task `a`: expected 2 to 3",
        "minibatch 4 is out of range for task `a`: expected 2 to 3",
        "no task is called `c`: the tasks of the run are a",
        "task `batch` cannot use the plan of `a`: its batch differs",
        "two tasks are called `a`",
        "minibatch 1 is out of range for task `a`",
        "minibatch 9 is out of range for task `a`",
    ]) {
        assert!(said.starts_with(expected), "{said}");
    }
}

#[test]
fn a_paused_task_can_be_stopped_and_what_it_has_is_kept() {
    let parts = Parts::new();
    let report = controlled(
        &Settings::default(),
        |run, _| with(run, [parts.task("a", spec(4)).until(2), parts.task("b", spec(2))]),
        |_, _, control| drop(control.send(Command::Stop { task: "a".to_owned() })),
    );
    let stopped = named(&report, "a");
    assert_eq!((stopped.state, stopped.trained.steps), (TaskState::Stopped, 2));
    assert_eq!(
        stopped.weights_sha256,
        Some(parts.plain(&spec(2))),
        "a constant rate does not depend on the length"
    );
    assert_eq!(named(&report, "b").state, TaskState::Done);
}

#[test]
fn a_fork_of_what_is_not_the_same_is_refused() {
    let (parts, dir) = (Parts::new(), tempfile::tempdir().unwrap());
    let file = dir.path().join("state");
    let control = RunControl::new();
    let run = with(Settings::default().orchestrator().control(&control), [parts.task("a", spec(4)).until(1)]);
    let fork = parts.task("fork", TrainSpec { seed: 9, ..spec(4) });
    let commands = std::thread::spawn(move || {
        let save = Command::Save { task: "a".to_owned(), at: Some(1), file: file.clone() };
        control.send(save).wait().unwrap();
        let task = Box::new(fork.fork_from(Checkpoint::open(&file).unwrap()));
        let refused = control.send(Command::Submit { task, like: "a".to_owned() }).wait().unwrap_err();
        control.send(go_on("a", None)).wait().unwrap();
        refused
    });
    assert!(run.run().unwrap().all_done());
    let refused = commands.join().unwrap();
    assert!(matches!(refused, CommandError::Engine(_)) && refused.to_string().contains("seed"), "{refused}");
}

#[test]
fn what_is_paused_stops_where_nobody_is_left_to_let_it_go_on() {
    let parts = Parts::new();
    let run = Settings::default().orchestrator().control(&RunControl::new());
    let report = with(run, [parts.task("a", spec(4)).until(2), parts.task("b", spec(3))]).run().unwrap();
    assert_eq!((report.tasks[0].state, report.tasks[0].trained.steps), (TaskState::Stopped, 2));
    assert_eq!(report.tasks[1].weights_sha256, Some(parts.plain(&spec(3))));
}

#[test]
fn a_task_that_ends_before_its_length_has_the_bits_of_the_plain_loop_until_there() {
    let parts = Parts::new();
    for devices in [1, 2] {
        let settings = Settings { devices, ..Settings::default() };
        let places = Arc::new(Mutex::new(Vec::new()));
        let heard = places.clone();
        let tasks = [parts.task("a", spec(5)).until(2), parts.task("b", spec(4)).ends_at(3)];
        let report = controlled(
            &settings,
            |run, _| with(run, tasks),
            move |_, _, control| {
                let (task, at) = ("a".to_owned(), Some(4));
                let place = |at| Command::Place { task: task.clone(), at };
                let commands = [
                    place(None),
                    place(at),
                    place(Some(5)),
                    Command::End { task: task.clone(), at },
                    place(Some(4)),
                ];
                heard.lock().unwrap().extend(commands.map(|command| control.send(command)));
                drop(control.send(go_on("a", None)));
            },
        );
        for (name, steps) in [("a", 4), ("b", 3)] {
            let task = named(&report, name);
            assert_eq!((task.state, task.trained.steps), (TaskState::Stopped, steps));
            assert_eq!(task.weights_sha256, Some(parts.plain(&spec(steps))));
        }
        let answers = std::mem::take(&mut *places.lock().unwrap());
        let steps: Vec<Option<usize>> =
            answers.into_iter().map(|answer| answer.wait().ok().map(|effect| effect.step)).collect();
        assert_eq!(steps, [Some(2), Some(4), None, Some(4), Some(4)]);
    }
}

#[test]
fn a_run_that_only_listens_is_admitted_as_one_that_does_not_and_takes_forks_when_there_is_room() {
    let (parts, dir) = (Parts::new(), tempfile::tempdir().unwrap());
    let file = dir.path().join("state");
    let control = RunControl::new();
    let admitted = |run: Orchestrator| {
        let run = with(run, [parts.task("a", spec(5)).until(2), parts.task("b", spec(3))]).admit().unwrap();
        (run.admission().host_admitted_bytes, run)
    };
    let (alone, _) = admitted(Settings::default().orchestrator());
    let (bytes, run) = admitted(Settings::default().orchestrator().listen(&control));
    assert_eq!(bytes, alone);
    let forks = [("as-it-was", spec(5)), ("fresh", TrainSpec { seed: 5, ..spec(2) })];
    let forks = forks.map(|(name, spec)| parts.task(name, spec));
    let commands = std::thread::spawn(move || {
        let save = Command::Save { task: "a".to_owned(), at: Some(2), file: file.clone() };
        control.send(save).wait().unwrap();
        let [fork, fresh] = forks;
        let state = || Checkpoint::open(&file).unwrap();
        for task in [fork.fork_from(state()), fresh.weights_from(state())] {
            let like = "a".to_owned();
            let asked = Command::Check { task: Box::new(task.clone()), like: like.clone() };
            control.send(asked).wait().unwrap();
            control.send(Command::Submit { task: Box::new(task), like }).wait().unwrap();
        }
        control.send(go_on("a", None)).wait().unwrap();
    });
    let report = run.start().unwrap();
    commands.join().unwrap();
    assert!(report.all_done() && report.replay_s.is_none());
    assert!(report.host_peak_bytes <= bytes);
    assert_eq!(named(&report, "as-it-was").weights_sha256, Some(parts.plain(&spec(5))));
    let fresh = named(&report, "fresh");
    assert_eq!(fresh.trained.steps, 2);
    let begun = plain::train_from(
        &parts.chain,
        parts.data.as_ref(),
        (&spec(5), 2),
        &TrainSpec { seed: 5, ..spec(2) },
        &Device::flex(),
    );
    assert_eq!(fresh.weights_sha256, Some(begun.unwrap().weights_sha256));
}
