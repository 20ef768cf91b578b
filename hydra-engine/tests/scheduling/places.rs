//! Policies are given the device on which a model was computed last, which may cache its parameters.

use crate::common::{Settings, adamw, gpt2_chain, tokens};
use hydra_core::{Length, TrainSpec};
use hydra_engine::TrainTask;
use hydra_sched::{ModelIndex, ModelView, Policy, PolicyKind, Priority, View};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Views with a wrong device and the expected one, and counts of views of models that had been claimed before.
#[derive(Default)]
struct Seen {
    wrong: Vec<(ModelView, Option<usize>)>,
    claimed: usize,
    elsewhere: usize,
}

/// Chooses models in turn and records the device of each choice.
struct Remembering {
    /// True if devices cache parameters.
    caches: bool,
    chosen: BTreeMap<ModelIndex, usize>,
    choices: usize,
    seen: Arc<Mutex<Seen>>,
}

impl Policy for Remembering {
    fn name(&self) -> &'static str {
        "remembering"
    }

    fn priority(&self, model: &ModelView) -> Priority {
        PolicyKind::Fifo.build(0).priority(model)
    }

    fn choose(&mut self, view: &View<'_>) -> Option<ModelIndex> {
        let mut seen = self.seen.lock().expect("what was seen");
        for model in view.claimable {
            let chosen = self.chosen.get(&model.model).copied();
            let expected = chosen.filter(|_| self.caches);
            seen.claimed += usize::from(chosen.is_some());
            seen.elsewhere += usize::from(chosen.is_some_and(|device| device != view.request.device));
            if model.ran_on != expected {
                seen.wrong.push((*model, expected));
            }
        }
        self.choices += 1;
        let model = view.claimable.get(self.choices % view.claimable.len().max(1))?.model;
        self.chosen.insert(model, view.request.device);
        Some(model)
    }
}

#[test]
fn a_policy_hears_which_device_committed_to_a_model_last() {
    for caches in [true, false] {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let policy = Remembering { caches, chosen: BTreeMap::new(), choices: 0, seen: seen.clone() };
        let settings = Settings { devices: 2, cache: caches, ..Settings::default() };
        let mut run = settings.orchestrator().own_policy(Box::new(policy));
        let spec = TrainSpec { length: Length::Steps(4), ..adamw(2) };
        for name in ["one", "two", "three", "four", "five"] {
            let task = TrainTask::new(name, gpt2_chain(), tokens(11, 1), spec.clone());
            run.submit(task.cuts(vec![1, 3])).unwrap();
        }
        let report = run.run().unwrap();
        assert_eq!((report.policy.as_str(), report.all_done()), ("remembering", true));
        let seen = seen.lock().unwrap();
        assert!(seen.wrong.is_empty(), "{caches}: {:?}", seen.wrong);
        assert!(seen.claimed > 50 && seen.elsewhere > 0, "{} {}", seen.claimed, seen.elsewhere);
    }
}
