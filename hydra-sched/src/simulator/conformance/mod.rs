//! A conformance suite for [`Policy`] implementations.
//!
//! The built-in policies pass it, and so should a custom policy before it is used: the simulator and the
//! engine rely on these rules:
//!
//! - the choice is one of the claimable models, or none if there is none;
//! - a device is held back only for a model that [`Request`] names, and only by a policy whose
//!   [`Policy::waits`] returns true; if it returns false, the models to wait for in [`Request`] have no
//!   effect;
//! - the choice is a function of the views and of the seed, independent of the order of the models in a view,
//!   of clocks and of shared random generators;
//! - [`Policy::priority`] depends only on the model, neither on where it is cached nor on earlier choices;
//! - a list ([`Policy::choose`]) and a [`Queue`] give the same choices, decision after decision;
//! - on small workloads [`simulate()`] completes every shard task; the same seed gives the same schedule; and
//!   a schedule without waiting is within Graham's bound (R. L. Graham, "Bounds on Multiprocessing Timing
//!   Anomalies", 1969).
//!
//! The cases are drawn from a fixed seed, so that a run of the suite can be repeated, and `proptest` shrinks
//! a case that violates a rule. Outside of this crate's tests the suite is available with the feature
//! `conformance`:
//!
//! ```toml
//! [dev-dependencies]
//! hydra-sched = { path = "../hydra-sched", features = ["conformance"] }
//! ```
//!
//! # Example
//! ```
//! use hydra_sched::{ModelView, Policy, Priority, conformance};
//!
//! /// Takes the model with the lowest next shard, and the longest of those.
//! struct Lowest;
//!
//! impl Policy for Lowest {
//!     fn name(&self) -> &'static str {
//!         "lowest"
//!     }
//!
//!     fn priority(&self, model: &ModelView) -> Priority {
//!         Priority::least_first(model.next_shard as f64, model)
//!     }
//! }
//!
//! conformance::run(&|_seed| Box::new(Lowest));
//! ```

use std::fmt::Debug;

use proptest::prelude::*;
use proptest::test_runner::{
    Config, RngAlgorithm, TestCaseError, TestCaseResult, TestError, TestRng, TestRunner,
};
use thiserror::Error;

use self::cases::{Decision, any_decision};
use crate::policy::{ModelIndex, ModelView, Policy, Request, View};
use crate::simulator::{Queue, Simulation, SimulationOptions, Workload, simulate, without_transfers};

mod cases;

pub(crate) use cases::any_workload;

/// The suite's models have indices below this; a policy with per-model state must support this many.
pub const MODELS: usize = 32;

/// The number of cases per rule.
const CASES: u32 = 256;

/// A rule that a policy violates.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the policy `{policy}` breaks the rule that {rule}: {found}. The smallest case found is {case}")]
pub struct Broken {
    /// The policy's name.
    pub policy: &'static str,
    /// The rule, as a clause.
    pub rule: &'static str,
    /// The violation.
    pub found: String,
    /// The case, in `Debug` format.
    pub case: String,
}

/// Checks a policy against every rule. `build` builds it from a seed, as
/// [`PolicyKind::build`](crate::PolicyKind::build) does; a deterministic policy ignores the seed.
///
/// # Panics
/// With the result of [`check`], if the policy violates a rule.
pub fn run(build: &dyn Fn(u64) -> Box<dyn Policy>) {
    if let Err(broken) = check(build) {
        panic!("{broken}");
    }
}

/// Like [`run`], but returns the violated rule.
///
/// # Errors
/// [`Broken`], with the first rule that the policy violates.
pub fn check(build: &dyn Fn(u64) -> Box<dyn Policy>) -> Result<(), Broken> {
    let suite = Suite { build, policy: build(0).name() };
    let decision = || any_decision(0..12);
    suite.holds("it has one name", any::<u64>(), |seed| suite.has_one_name(seed))?;
    suite.holds("it takes one of the claimable models", decision(), |of| suite.takes_a_claimable_one(&of))?;
    let shuffled = any_decision(1..12).prop_flat_map(|of| {
        let shuffled = Just(of.claimable.clone()).prop_shuffle();
        (Just(of), shuffled)
    });
    let rule = "its choice is a function of the view and of its seed";
    suite.holds(rule, shuffled, |(of, shuffled)| suite.is_a_function(&of, &shuffled))?;
    let rule = "it holds a device back only for a model that it waits for";
    suite.holds(rule, decision(), |of| suite.waits_as_it_says(&of))?;
    let rule = "a model's priority depends only on the model";
    suite.holds(rule, any_decision(1..12), |of| suite.orders_by_the_model_alone(&of))?;
    let changes =
        prop::collection::vec((any_decision(1..20), prop::collection::vec(any::<bool>(), 20)), 1..6);
    let rule = "a list and a queue give the same choice";
    suite.holds(rule, (changes, any::<u64>()), |(changes, seed)| suite.queues_as_it_lists(&changes, seed))?;
    let rule = "no device is left idle if there is nothing to wait for";
    let free = (any_workload(), 1..5usize, any::<u64>());
    suite.holds(rule, free, |(workload, devices, seed)| {
        suite.leaves_no_device_idle(&workload, devices, seed)
    })?;
    let simulated = (any_workload(), any::<bool>(), any::<u64>());
    let rule = "a simulated run does all its work, and the same again";
    suite.holds(rule, simulated, |(workload, prefetch, seed)| suite.simulates(&workload, prefetch, seed))
}

/// A policy under test.
#[derive(Clone, Copy)]
struct Suite<'a> {
    build: &'a dyn Fn(u64) -> Box<dyn Policy>,
    policy: &'static str,
}

impl Suite<'_> {
    /// Checks a rule on random cases.
    fn holds<S: Strategy>(
        &self,
        rule: &'static str,
        cases: S,
        test: impl Fn(S::Value) -> TestCaseResult,
    ) -> Result<(), Broken>
    where
        S::Value: Debug,
    {
        // Nothing is read from or kept in files, and no system randomness is used.
        let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
        let numbers = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let (found, case) = match TestRunner::new_with_rng(config, numbers).run(&cases, test) {
            Ok(()) => return Ok(()),
            Err(TestError::Fail(found, case)) => (found, format!("{case:?}")),
            Err(TestError::Abort(found)) => (found, "none".to_owned()),
        };
        Err(Broken { policy: self.policy, rule, found: found.message().to_owned(), case })
    }

    /// Returns the choice of a new policy.
    fn choice(&self, seed: u64, request: Request, claimable: &[ModelView]) -> Option<ModelIndex> {
        (self.build)(seed).choose(&View { request, claimable })
    }

    fn has_one_name(&self, seed: u64) -> TestCaseResult {
        prop_assert_eq!((self.build)(seed).name(), self.policy);
        prop_assert!(!self.policy.is_empty(), "the name is empty");
        Ok(())
    }

    fn takes_a_claimable_one(&self, of: &Decision) -> TestCaseResult {
        if let Some(chosen) = self.choice(of.seed, of.request, &of.claimable) {
            let claimable = of.claimable.iter().any(|model| model.model == chosen);
            prop_assert!(claimable, "{:?} was chosen, which is not claimable", chosen);
        }
        Ok(())
    }

    fn waits_as_it_says(&self, of: &Decision) -> TestCaseResult {
        let chosen = self.choice(of.seed, of.request, &of.claimable);
        let alone = Request::new(of.request.device, of.request.devices, of.request.decision);
        let without = self.choice(of.seed, alone, &of.claimable);
        prop_assert!(
            without.is_some() || of.claimable.is_empty(),
            "none was chosen although there is nothing to wait for"
        );
        let named = of.request.awaited.is_some() || of.request.soon.is_some();
        prop_assert!(
            chosen.is_some() || named || of.claimable.is_empty(),
            "none was chosen although there is no model to wait for"
        );
        if !(self.build)(of.seed).waits() {
            prop_assert_eq!(chosen, without, "models to wait for change the choice, and `waits` is false");
        }
        Ok(())
    }

    fn is_a_function(&self, of: &Decision, shuffled: &[ModelView]) -> TestCaseResult {
        let chosen = self.choice(of.seed, of.request, &of.claimable);
        let again = self.choice(of.seed, of.request, &of.claimable);
        prop_assert_eq!(again, chosen, "the same view and seed gave another choice");
        let turned = self.choice(of.seed, of.request, shuffled);
        prop_assert_eq!(turned, chosen, "the models in another order gave another choice");
        Ok(())
    }

    fn orders_by_the_model_alone(&self, of: &Decision) -> TestCaseResult {
        let mut policy = (self.build)(of.seed);
        let before: Vec<_> = of.claimable.iter().map(|model| policy.priority(model)).collect();
        policy.choose(&View { request: of.request, claimable: &of.claimable });
        for (model, before) in of.claimable.iter().zip(before) {
            prop_assert_eq!(policy.priority(model), before, "an answer changed the order");
            let elsewhere = ModelView { cached: !model.cached, ran_on: None, ..*model };
            prop_assert_eq!(policy.priority(&elsewhere), before, "where a model is cached changed the order");
        }
        Ok(())
    }

    /// Checks that a list and a queue give the same choices while models come and go.
    fn queues_as_it_lists(&self, changes: &[(Decision, Vec<bool>)], seed: u64) -> TestCaseResult {
        let (mut listed, mut queued) = ((self.build)(seed), (self.build)(seed));
        let mut queue = Queue::new(MODELS);
        for (Decision { request, claimable, .. }, there) in changes {
            for (model, there) in claimable.iter().zip(there) {
                // Queues number their models in submission order.
                let view = ModelView { submitted: model.model.0 as u64, ..*model };
                if *there {
                    queue.insert(&*queued, view);
                } else {
                    queue.remove(model.model);
                }
            }
            let claimable: Vec<ModelView> = queue.iter().copied().collect();
            let near = claimable.iter().filter(|model| model.cached).map(|model| model.model);
            let near: Vec<ModelIndex> = near.collect();
            let from_queue = queue.choose(&mut *queued, request, &near);
            prop_assert_eq!(from_queue, listed.choose(&View { request: *request, claimable: &claimable }));
        }
        Ok(())
    }

    /// Without transfers, optimizers and late arrivals, and with each model on one device at a time, no
    /// schedule is shorter than its longest model or all work divided evenly, and one without waiting is
    /// within Graham's bound.
    fn leaves_no_device_idle(&self, workload: &Workload, devices: usize, seed: u64) -> TestCaseResult {
        let mut free = without_transfers(workload).on_devices(devices);
        free.tasks.iter_mut().for_each(|task| (task.arrival_s, task.replicas) = (0.0, 1));
        let options = SimulationOptions { prefetch: false, record: false };
        let run = simulate(&free, &mut *(self.build)(seed), options);
        let run = run.map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(run.decisions, run.shard_tasks, "a device was held back for nothing");
        let (speed, count) = (free.devices[0].speed, devices as f64);
        let longest_s = (0..free.tasks.len()).map(|task| free.task_s(task)).fold(0.0, f64::max) / speed;
        let (total_s, most) = (free.total_s() / speed, run.makespan_s * count * (1.0 + 1e-9));
        prop_assert!(most >= longest_s * count && most >= total_s);
        let graham_s = (total_s + (count - 1.0) * longest_s) * (1.0 + 1e-9);
        prop_assert!(run.makespan_s * count <= graham_s, "a device was left idle");
        Ok(())
    }

    fn simulates(&self, workload: &Workload, prefetch: bool, seed: u64) -> TestCaseResult {
        let options = SimulationOptions { prefetch, record: true };
        let run = || -> Result<Simulation, TestCaseError> {
            let run = simulate(workload, &mut *(self.build)(seed), options);
            run.map_err(|error| TestCaseError::fail(error.to_string()))
        };
        let once = run()?;
        prop_assert_eq!(once.shard_tasks, workload.shard_tasks());
        prop_assert!(once.makespan_s >= once.bounds.best_s() * (1.0 - 1e-12));
        prop_assert_eq!(run()?, once, "the same seed gave another run");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Claimable, PolicyKind, Priority};

    fn keeps_the_rules(kind: PolicyKind) {
        run(&|seed| kind.build(seed));
    }

    /// One test per policy, so that they run concurrently.
    macro_rules! every_policy {
        ($($name:ident: $kind:ident),* $(,)?) => {
            $(
                #[test]
                fn $name() {
                    keeps_the_rules(PolicyKind::$kind);
                }
            )*

            #[test]
            fn none_is_left_out() {
                assert_eq!([$(PolicyKind::$kind),*], PolicyKind::ALL);
            }
        };
    }

    every_policy! {
        sharded_lrtf: ShardedLrtf,
        sharded_lrtf_eager: ShardedLrtfEager,
        fifo: Fifo,
        srtf: Srtf,
        random: Random,
        round_robin: RoundRobin,
        sharded_lrtf_local: ShardedLrtfLocal,
    }

    /// A policy that violates the named rule, and otherwise takes the longest model.
    #[derive(Default)]
    struct Breaks {
        name: &'static str,
        waits: bool,
        asked: u64,
        seed: u64,
    }

    impl Policy for Breaks {
        fn name(&self) -> &'static str {
            if self.name == "named anew" && self.seed % 2 == 1 { "odd" } else { self.name }
        }

        fn priority(&self, model: &ModelView) -> Priority {
            let key = match self.name {
                "by copies" => f64::from(u8::from(model.cached)),
                "by answers" if self.asked % 2 == 1 => -model.remaining_s,
                _ => model.remaining_s,
            };
            Priority::greatest_first(key, model)
        }

        fn waits(&self) -> bool {
            self.waits
        }

        fn pick(&mut self, request: &Request, from: &dyn Claimable) -> Option<ModelIndex> {
            self.asked += 1;
            let first = from.first().map(|model| model.model);
            match self.name {
                "takes any" => Some(ModelIndex(0)),
                "takes none" => None,
                "waits in secret" if request.awaited.is_some() => None,
                "waits for the first device" if request.device == 0 => None,
                // A random decision has a number far above those of a small run.
                "leaves all work to one" if request.device > 0 && request.decision < 1_000 => None,
                "as others do" => {
                    // Simulates a shared random generator.
                    static SHARED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
                    let rank =
                        SHARED.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % from.count().max(1);
                    from.nth_submitted(rank).map(|model| model.model)
                }
                "in turn" if self.asked > 3 && from.count() > 1 => {
                    from.nth_submitted(self.asked as usize % 2).map(|m| m.model)
                }
                _ => first,
            }
        }
    }

    fn broken(name: &'static str, waits: bool) -> Broken {
        check(&|seed| Box::new(Breaks { name, waits, seed, asked: 0 })).expect_err(name)
    }

    #[test]
    fn every_rule_is_found_broken() {
        let cases = [
            ("", false, "it has one name"),
            ("named anew", false, "it has one name"),
            ("takes any", false, "one of the claimable"),
            ("takes none", true, "holds a device back only"),
            ("waits in secret", false, "holds a device back only"),
            ("waits for the first device", true, "holds a device back only"),
            ("as others do", false, "a function of the view"),
            ("by answers", false, "depends only on the model"),
            ("by copies", false, "depends only on the model"),
            ("leaves all work to one", false, "no device is left idle"),
        ];
        for (name, waits, rule) in cases {
            let broken = broken(name, waits);
            let said = broken.to_string();
            assert!(broken.rule.contains(rule), "{name}: {said}");
            assert!(said.contains(&format!("`{name}`")) && said.contains(&broken.case), "{said}");
        }
    }

    /// Waiting for a named model is allowed in a policy that declares it, and so is a memory of earlier
    /// choices.
    #[test]
    fn what_is_right_passes() {
        for (name, waits) in [("sound", false), ("waits in secret", true), ("in turn", false)] {
            run(&|seed| Box::new(Breaks { name, waits, seed, asked: 0 }));
        }
    }

    #[test]
    #[should_panic(expected = "the policy `takes none` breaks the rule that it holds a device back only")]
    fn run_panics_with_the_rule() {
        run(&|_| Box::new(Breaks { name: "takes none", ..Breaks::default() }));
    }

    /// The smallest case of a policy that always takes the first model: no model at all.
    #[test]
    fn the_case_is_made_small_and_is_the_same_each_time() {
        let found = broken("takes any", false);
        assert!(found.case.contains("claimable: []"), "{found}");
        assert_eq!(broken("takes any", false), found);
    }

    proptest! {
        /// Earlier choices do not affect the choice, except for round robin.
        #[test]
        fn the_own_policies_remember_nothing(of in any_decision(1..12), before in any_decision(1..12)) {
            for kind in PolicyKind::ALL.into_iter().filter(|kind| *kind != PolicyKind::RoundRobin) {
                let mut policy = kind.build(of.seed);
                policy.choose(&View { request: before.request, claimable: &before.claimable });
                let view = View { request: of.request, claimable: &of.claimable };
                prop_assert_eq!(policy.choose(&view), kind.build(of.seed).choose(&view));
            }
        }
    }
}
