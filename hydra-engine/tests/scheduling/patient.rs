//! The default policy holds devices back. Every run ends, whatever happens to the model that is waited for.

use crate::common::{Settings, adamw, gpt2_chain, tokens};
use hydra_core::optimizer::Sgd;
use hydra_core::{Length, OptimizerSpec, TrainSpec};
use hydra_engine::{Observer, RunEvent, StopFlag, TaskState, TrainTask};

fn task(name: &str, steps: usize, spec: TrainSpec) -> TrainTask {
    TrainTask::new(name, gpt2_chain(), tokens(11, 1), TrainSpec { length: Length::Steps(steps), ..spec })
}

fn settings(devices: usize, prefetch: bool) -> Settings {
    Settings { devices, prefetch, ..Settings::default() }
}

/// Stops the run after some minibatches of any task.
struct StopAfter(usize, StopFlag);

impl Observer for StopAfter {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if matches!(event, RunEvent::Minibatch { .. }) {
            self.0 = self.0.saturating_sub(1);
            if self.0 == 0 {
                self.1.stop();
            }
        }
    }
}

#[test]
fn a_long_model_among_short_ones_trains_with_all_of_them() {
    for (devices, prefetch) in [(1, true), (2, true), (2, false), (3, true)] {
        let mut run = settings(devices, prefetch).orchestrator();
        run.submit(task("long", 60, adamw(2)).cuts(vec![2])).expect("a task");
        for short in 0..3 {
            run.submit(task(&format!("short-{short}"), 4, adamw(4)).cuts(vec![1, 3])).expect("a task");
        }
        let report = run.run().expect("a run");
        assert!(report.all_done());
        assert_eq!(report.policy, "sharded-lrtf");
        let alone = settings(1, true).task(task("long", 60, adamw(2)));
        assert_eq!(report.tasks[0].weights_sha256, alone.weights_sha256);
    }
}

/// The model that is waited for fails.
#[test]
fn a_long_model_that_diverges_holds_nobody_back() {
    let far = OptimizerSpec::from(Sgd { lr: 1e30, momentum: 0.0, weight_decay: 0.0 });
    let mut run = settings(2, true).orchestrator();
    let broken = TrainSpec { optimizer: far, clip: None, ..adamw(2) };
    run.submit(task("long", 200, broken)).expect("a task");
    run.submit(task("short", 4, adamw(4)).cuts(vec![1, 3])).expect("a task");
    let report = run.run().expect("a run");
    let states: Vec<TaskState> = report.tasks.iter().map(|task| task.state).collect();
    assert_eq!(states, [TaskState::Failed, TaskState::Done]);
}

#[test]
fn a_run_that_is_stopped_ends() {
    for after in [1, 2, 7] {
        let stop = StopFlag::new();
        let mut run = settings(2, true)
            .orchestrator()
            .stop_flag(stop.clone())
            .observer(Box::new(StopAfter(after, stop)));
        run.submit(task("long", 2_000, adamw(2)).cuts(vec![2])).expect("a task");
        run.submit(task("short", 100, adamw(4))).expect("a task");
        let report = run.run().expect("a run");
        assert!(report.tasks.iter().all(|task| task.state == TaskState::Stopped));
        assert_eq!(report.replay_s, None);
    }
}
