//! Estimates of task times: times measured for one task apply to all tasks with the same plan.

use crate::common::{Settings, adamw, gpt2_chain, tokens};
use hydra_core::{Length, TrainSpec};
use hydra_engine::TrainTask;
use hydra_sched::{ModelIndex, ModelView, Policy, PolicyKind, Priority, View};
use std::sync::{Arc, Mutex};

/// The seconds that each task has left.
type Left = Vec<f64>;

/// Chooses the first task once all `tasks` tasks can be claimed, twice; after that any first task. Records the
/// remaining seconds of all.
struct Watching {
    tasks: usize,
    seen: Arc<Mutex<Vec<Left>>>,
}

impl Policy for Watching {
    fn name(&self) -> &'static str {
        "watching"
    }

    fn priority(&self, model: &ModelView) -> Priority {
        PolicyKind::Fifo.build(0).priority(model)
    }

    fn choose(&mut self, view: &View<'_>) -> Option<ModelIndex> {
        let mut seen = self.seen.lock().expect("what was seen");
        let all = view.claimable.len() == self.tasks;
        let chooses = all || seen.len() >= 2;
        if all {
            seen.push(view.claimable.iter().map(|model| model.remaining_s).collect());
        }
        view.claimable.first().map(|model| model.model).filter(|_| chooses)
    }
}

#[test]
fn what_one_task_shows_all_with_its_plan_are_expected_to_take() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let watching = Watching { tasks: 4, seen: seen.clone() };
    // One shard task ends before the next one is claimed.
    let settings = Settings { prefetch: false, ..Settings::default() };
    let mut run = settings.orchestrator().own_policy(Box::new(watching));
    let spec = |batch| TrainSpec { length: Length::Steps(2), ..adamw(batch) };
    for (name, batch) in [("one", 2), ("alike", 2), ("alike too", 2), ("other", 4)] {
        run.submit(TrainTask::new(name, gpt2_chain(), tokens(11, 1), spec(batch)).cuts(vec![1, 3])).unwrap();
    }
    let report = run.run().unwrap();
    assert_eq!((report.policy.as_str(), report.all_done()), ("watching", true));

    let seen = seen.lock().unwrap();
    let [before, after] = &seen[..2] else { panic!("all of them twice: {seen:?}") };
    assert!(before[1] == before[2] && after[1] == after[2], "{before:?} {after:?}");
    assert_ne!(after[1], before[1], "they will take what the first one took");
    assert_eq!(after[3], before[3], "another batch is another plan");
}
