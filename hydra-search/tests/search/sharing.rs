//! Trials with equal prefixes are trained once, and have the losses that each has alone.

use crate::machine::{Machine, Nature, Result, run, search};
use hydra_search::{Action, Loss, Search, Spec, TrialId, TrialState, Whole};
use proptest::prelude::*;

const METHODS: [&str; 5] = ["grid", "random", "halving", "hyperband", "asha"];

fn spec(method: &str, trials: usize, steps: usize) -> Spec {
    let trials = if method == "grid" { String::new() } else { format!("trials = {trials}\n") };
    let space = "lr = [0.1, 0.2]\ndecay = [0, 6, 12, 24]\nseed = [0, 1]";
    Spec::from_toml(&format!("search = '{method}'\nsteps = {steps}\n{trials}[space]\n{space}")).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_trial_has_the_losses_that_it_has_alone(
        method in proptest::sample::select(METHODS.to_vec()),
        trials in 1usize..30,
        steps in 1usize..60,
        failing in prop_oneof![Just(0u64), 30u64..300],
        seed in 0u64..50,
    ) {
        let nature = Nature { failing, ..Nature::KIND };
        let spec = spec(method, trials, steps);
        let (search, machine) = run(&spec, seed, nature);
        for trial in search.trials() {
            let alone = nature.alone(trial.settings, steps);
            for (step, loss) in trial.losses {
                prop_assert_eq!(*loss, alone[*step].map_or(Loss::Lost, Loss::of), "trial {} at {}", trial.trial, step);
            }
        }
        // The same decisions as without sharing, for no more work.
        let mut apart = Search::new(&spec, seed, Box::new(Whole { steps })).unwrap();
        let mut more = Machine::new(nature, steps);
        more.run(&mut apart, |_| 0);
        prop_assert_eq!(apart.outcome(), search.outcome());
        prop_assert_eq!(apart.leaderboard(), search.leaderboard());
        prop_assert!(machine.work <= more.work);
        prop_assert_eq!(search.work().trained, machine.work);
        prop_assert!(search.work().apart >= more.work);
    }
}

#[test]
fn a_grid_over_decays_trains_the_edges_of_its_tree() {
    let spec = spec("grid", 0, 48);
    let (search, machine) = run(&spec, 0, Nature::KIND);
    // Four pairs of rate and seed: 48 once, and the three decays.
    assert_eq!(machine.work, 4 * (48 + 6 + 12 + 24));
    assert_eq!(search.tree().work(&[48; 16]), machine.work);
    assert_eq!(search.work().apart, 16 * 48);
    let forks = machine.actions.iter().filter(|action| matches!(action, Action::Fork { .. })).count();
    assert_eq!(forks, 12);
    assert!(search.trials().all(|trial| trial.standing == TrialState::Finished));
}

#[test]
fn a_trial_that_never_parts_is_not_trained() {
    let spec = spec("halving", 40, 48);
    let (search, machine) = run(&spec, 3, Nature::KIND);
    assert!(!search.repeats().is_empty(), "40 draws of 16 configurations repeat");
    assert!(search.trials().len() <= 16);
    let begun: Vec<TrialId> = machine
        .actions
        .iter()
        .filter(|action| matches!(action, Action::Start { .. } | Action::Fork { .. }))
        .map(Action::trial)
        .collect();
    // At the first rung all decays are the same: one trial of each rate and seed is trained, the others have its
    // loss.
    assert!(begun.len() < search.trials().len());
    assert_eq!(machine.actions.iter().filter(|action| matches!(action, Action::Start { .. })).count(), 4);
    for trial in search.trials().filter(|trial| !begun.contains(&trial.trial)) {
        assert_eq!(trial.standing, TrialState::Stopped);
        let branch = trial.branch.unwrap();
        let parent = search.trial(search.tree().holder(branch.parent, 1)).unwrap();
        assert!(trial.losses.iter().all(|(step, loss)| parent.losses.get(step) == Some(loss)));
    }
}

/// A draw in two brackets is trained once, as far as either requests.
#[test]
fn brackets_share_what_they_both_draw() {
    let spec = Spec::from_toml(
        "search = 'hyperband'\nsteps = 81\ntrials = 143\nspace = { lr = [1, 2, 3, 4, 5, 6] }",
    )
    .unwrap();
    let (search, machine) = run(&spec, 1, Nature::KIND);
    assert!(machine.work <= 6 * 81, "{} minibatches for six configurations", machine.work);
    assert!(search.work().apart > machine.work);
    let starts = machine.actions.iter().filter(|action| matches!(action, Action::Start { .. }));
    let begun: Vec<TrialId> = starts.map(Action::trial).collect();
    assert!(begun.len() <= 6);
    for trial in search.trials() {
        assert_eq!(trial.same_as.is_none(), begun.contains(&trial.trial), "{trial:?}");
        assert_eq!(trial.task, trial.same_as.unwrap_or(trial.trial));
    }
    assert!(!machine.actions.iter().any(|action| matches!(action, Action::Fork { .. })));
}

/// The states of a parent are held as long as a fork may need them, and no longer.
#[test]
fn held_states_end_with_the_search() {
    for method in METHODS {
        let spec = spec(method, 20, 48);
        let mut search = search(&spec, 5);
        let mut machine = Machine::new(Nature::KIND, 48);
        let mut most = 0;
        while search.outcome().is_none() {
            machine.step(&mut search, &mut |jobs| jobs - 1);
            most = most.max(search.held().len());
        }
        assert!(search.held().is_empty(), "{method}: {:?}", search.held());
        assert_eq!(most > 0, ["halving", "hyperband", "asha"].contains(&method), "{method}");
        assert!(Result::of(&search).best.is_some());
    }
}
