//! A policy of another crate: checked by the suite and simulated, through the public API.

use hydra_sched::conformance::{self, Broken};
use hydra_sched::{
    Claimable, Draw, ModelIndex, ModelView, Policy, Priority, Request, SimulationOptions, simulate,
};

/// Takes the models by weighted remaining work, the heaviest first, and stays with the model that it computes
/// if it is among the heaviest half; holds the device back for a model that becomes claimable soon and is
/// heavier than all others.
struct Weighted {
    weights: Vec<f64>,
    /// The return value of `Policy::waits`.
    waits: bool,
}

impl Weighted {
    fn new() -> Self {
        Self {
            weights: (0..conformance::MODELS).map(|model| 1.0 + (model % 3) as f64).collect(),
            waits: true,
        }
    }

    fn weight(&self, model: &ModelView) -> f64 {
        self.weights[model.model.0] * model.remaining_s
    }
}

impl Policy for Weighted {
    fn name(&self) -> &'static str {
        "weighted"
    }

    fn priority(&self, model: &ModelView) -> Priority {
        Priority::greatest_first(self.weight(model), model)
    }

    fn waits(&self) -> bool {
        self.waits
    }

    fn pick(&mut self, request: &Request, from: &dyn Claimable) -> Option<ModelIndex> {
        let heaviest = from.first()?;
        if request.soon.is_some_and(|soon| self.weight(&soon) > self.weight(&heaviest)) {
            return None;
        }
        let lighter = |model: &ModelView| from.iter().filter(|m| self.weight(m) < self.weight(model)).count();
        let stays =
            from.iter().filter(|model| model.continues).find(|model| 2 * lighter(model) >= from.count());
        Some(stays.unwrap_or(heaviest).model)
    }
}

#[test]
fn it_keeps_the_rules() {
    conformance::run(&|_seed| Box::new(Weighted::new()));
}

#[test]
fn what_it_must_not_do_is_found() {
    let secret = || Weighted { waits: false, ..Weighted::new() };
    let Err(Broken { policy, rule, found, .. }) = conformance::check(&|_seed| Box::new(secret())) else {
        panic!("it waits without declaring it")
    };
    assert_eq!((policy, rule), ("weighted", "it holds a device back only for a model that it waits for"));
    assert!(found.contains("`waits` is false"), "{found}");
}

#[test]
fn it_is_simulated() {
    let draw =
        Draw { models: (2, 20), shard_tasks: (20, 200), promote_s: 0.05, optimizer: 0.05, ..Draw::default() };
    for seed in 0..20 {
        let workload = draw.workload(seed);
        for prefetch in [true, false] {
            let options = SimulationOptions { prefetch, record: false };
            let run = simulate(&workload, &mut Weighted::new(), options).expect("it keeps the rules");
            assert_eq!((run.policy, run.shard_tasks), ("weighted", workload.shard_tasks()));
        }
    }
}
