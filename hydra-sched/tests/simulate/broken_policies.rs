//! The simulator reports policies that violate the rules of their trait, instead of results.

use hydra_sched::{
    Claimable, ModelIndex, ModelView, Policy, PolicyKind, Priority, Request, ShardCost, SimulationError,
    SimulationOptions, TaskCost, Workload, simulate,
};

/// Takes the longest model for a number of decisions, and then always gives the same answer.
struct Broken {
    sound: u64,
    answer: Option<ModelIndex>,
}

impl Policy for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn priority(&self, model: &ModelView) -> Priority {
        Priority::longest(model)
    }

    fn pick(&mut self, request: &Request, from: &dyn Claimable) -> Option<ModelIndex> {
        if request.decision < self.sound { from.first().map(|model| model.model) } else { self.answer }
    }
}

/// Two models on one device, with five shard tasks each. The first one arrives late.
fn workload() -> Workload {
    let shards = |of: f64| vec![ShardCost::new(of, 2.0 * of, 0.5); 3];
    let mut late = TaskCost::new("late", 1, shards(1.0));
    late.arrival_s = 100.0;
    let tasks = vec![late, TaskCost::new("early", 1, shards(2.0))];
    Workload::new(tasks, Vec::new()).on_devices(1)
}

fn run(sound: u64, answer: Option<usize>, prefetch: bool) -> SimulationError {
    let mut policy = Broken { sound, answer: answer.map(ModelIndex) };
    let options = SimulationOptions { prefetch, record: false };
    simulate(&workload(), &mut policy, options).expect_err("the policy is broken")
}

#[test]
fn a_policy_that_never_takes_a_model_is_stuck() {
    for prefetch in [true, false] {
        let error = run(0, None, prefetch);
        let said = error.to_string();
        let SimulationError::Stuck { policy, at_s, decisions, left, shard_tasks, count, claimable } = error
        else {
            panic!("{said}")
        };
        // A decision is made when each model arrives; after that no event is left.
        assert_eq!((policy, at_s, decisions), ("broken", 100.0, 2));
        assert_eq!((left, shard_tasks, count), (10, 10, 2));
        assert_eq!(claimable, [ModelIndex(0), ModelIndex(1)]);
        for part in
            ["`broken`", "10 of 10 shard tasks are left", "one of 2 (model 0, 1)", "`Request::awaited`"]
        {
            assert!(said.contains(part), "`{part}` is not in: {said}");
        }
    }
}

#[test]
fn a_policy_that_stops_in_the_middle_is_stuck_there() {
    let SimulationError::Stuck { left, .. } = run(7, None, true) else { panic!("it is stuck") };
    assert_eq!(left, 3);
}

/// Model 0 exists and has not arrived; 999 does not exist.
#[test]
fn a_model_that_cannot_be_claimed_is_refused() {
    for (answer, words) in [(0, "model 0 (task `late`)"), (999, "model 999, which is not in the workload")] {
        for prefetch in [true, false] {
            let error = run(0, Some(answer), prefetch);
            let said = error.to_string();
            let SimulationError::NotClaimable {
                policy,
                decision,
                device,
                at_s,
                found,
                task,
                count,
                claimable,
            } = error
            else {
                panic!("{said}")
            };
            assert_eq!((policy, decision, device, at_s), ("broken", 0, 0, 0.0));
            assert_eq!((found, task.is_some()), (ModelIndex(answer), answer == 0));
            assert_eq!((count, claimable), (1, vec![ModelIndex(1)]));
            for part in ["`broken`", words, "one of 1 (model 1)", "`Policy::pick` must"] {
                assert!(said.contains(part), "`{part}` is not in: {said}");
            }
        }
    }
}

/// The model was claimed before, by the requesting device or by another one; a completed model cannot
/// be claimed either.
#[test]
fn a_model_that_is_claimed_or_done_is_refused() {
    let mut workload = workload();
    workload.tasks[0].arrival_s = 0.0;
    for devices in [1, 2, 3] {
        for (model, prefetch) in [(0, true), (0, false), (1, true), (1, false)] {
            let mut policy = Broken { sound: 0, answer: Some(ModelIndex(model)) };
            let options = SimulationOptions { prefetch, record: false };
            let run = simulate(&workload.on_devices(devices), &mut policy, options);
            let Err(SimulationError::NotClaimable { found, .. }) = run else { panic!("{devices}: {run:?}") };
            assert_eq!(found, ModelIndex(model));
        }
    }
}

/// Many models are counted, and a few are named.
#[test]
fn few_of_many_models_are_named() {
    let tasks = (0..20).map(|task| TaskCost::new(task.to_string(), 1, vec![ShardCost::new(0.0, 1.0, 0.0)]));
    let workload = Workload::new(tasks.collect(), Vec::new());
    let mut policy = Broken { sound: 0, answer: None };
    let run = simulate(&workload.on_devices(2), &mut policy, SimulationOptions::default());
    let said = run.expect_err("it is stuck").to_string();
    assert!(said.contains("one of 20 (model 0, 1, 2, 3, 4, 5, 6, 7, ...)"), "{said}");
}

/// Waiting for something in progress is allowed: the default policy does it.
#[test]
fn a_policy_may_wait_for_what_is_under_way() {
    let mut workload = workload();
    workload.tasks.iter_mut().for_each(|task| (task.minibatches, task.optimizer_s) = (5, 3.0));
    let mut policy = PolicyKind::ShardedLrtf.build(0);
    let run = simulate(&workload, &mut *policy, SimulationOptions::default()).expect("it waits, and goes on");
    assert_eq!(run.shard_tasks, 50);
}
