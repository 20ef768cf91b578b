//! Estimates of the time that tasks take: what one of them has shown holds for all that compute the same.

use crate::common::{Settings, adamw, gpt2_chain, tokens};
use hydra_core::{Length, TrainSpec};
use hydra_engine::TrainTask;
use hydra_sched::{ModelIndex, ModelView, Policy, PolicyKind, Priority, View};
use std::sync::{Arc, Mutex};

/// The tasks that could be claimed, each with the seconds that it is expected to take.
type Left = Vec<(usize, f64)>;

/// Takes the first task that was submitted, and writes down what all of them have left.
struct Watching(Arc<Mutex<Vec<Left>>>);

impl Policy for Watching {
    fn name(&self) -> &'static str {
        "watching"
    }

    fn priority(&self, model: &ModelView) -> Priority {
        PolicyKind::Fifo.build(0).priority(model)
    }

    fn choose(&mut self, view: &View<'_>) -> Option<ModelIndex> {
        let left = view.claimable.iter().map(|model| (model.model.0, model.remaining_s)).collect();
        self.0.lock().expect("the views").push(left);
        view.claimable.first().map(|model| model.model)
    }
}

#[test]
fn what_one_task_shows_all_with_its_plan_are_expected_to_take() {
    let views = Arc::new(Mutex::new(Vec::new()));
    let mut run = Settings::default().orchestrator().own_policy(Box::new(Watching(views.clone())));
    let spec = |batch| TrainSpec { length: Length::Steps(2), ..adamw(batch) };
    for (name, batch) in [("one", 2), ("alike", 2), ("alike too", 2), ("other", 4)] {
        run.submit(TrainTask::new(name, gpt2_chain(), tokens(11, 1), spec(batch)).cuts(vec![1, 3])).unwrap();
    }
    assert!(run.run().unwrap().all_done());

    // The first task has all of its shard tasks before another one begins, unless it waits for its own step.
    let views = views.lock().unwrap();
    let of = |task: usize| views.iter().filter_map(move |view| Some(view.iter().find(|of| of.0 == task)?.1));
    let before_any = |task: usize| of(task).next().unwrap();
    let untouched = |task: usize| -> Vec<f64> {
        let first =
            views.iter().position(|view| view.first().is_some_and(|of| of.0 != 0)).unwrap_or(views.len());
        let views = views[..first].iter();
        views.filter_map(|view| Some(view.iter().find(|of| of.0 == task)?.1)).collect()
    };
    let [alike, too, other] = [1, 2, 3].map(untouched);
    assert_eq!(alike, too, "tasks with one plan that have not begun are expected to take the same");
    assert!(
        alike.iter().any(|s| *s != before_any(1)),
        "what the first one took is what they will take: {alike:?}"
    );
    assert!(other.iter().all(|s| *s == before_any(3)), "another batch is another plan: {other:?}");
}
