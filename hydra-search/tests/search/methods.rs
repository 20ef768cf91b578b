//! Characteristic properties of each method.

use crate::machine::{Nature, Result, run, search};
use hydra_search::{Action, Configuration, Search, Spec, TrialId, Value, Whole};

fn spec(text: &str) -> Spec {
    Spec::from_toml(text).unwrap()
}

/// Trial i is a function of the seed and of i: neither of the number of trials nor of the method.
#[test]
fn draws_belong_to_the_seed_and_their_number() {
    let drawn = |method: &str, trials: usize, seed| -> Vec<Configuration> {
        let text =
            format!("search = '{method}'\nsteps = 9\ntrials = {trials}\nspace = {{ lr = 'log:1e-5..1' }}");
        let (search, _) = run(&spec(&text), seed, Nature::KIND);
        search.trials().map(|trial| trial.settings.clone()).collect()
    };
    let many = drawn("random", 20, 1);
    assert_eq!(drawn("random", 5, 1), many[..5]);
    for method in ["halving", "asha"] {
        assert_eq!(drawn(method, 20, 1), many);
    }
    assert_ne!(drawn("random", 20, 2), many);
}

fn asha(workers: usize) -> Spec {
    let text = "search = 'asha'\nsteps = 81\ntrials = 60\nspace = { lr = 'log:1e-5..1' }";
    spec(&format!("workers = {workers}\n{text}"))
}

#[test]
fn asha_is_a_function_of_its_virtual_workers() {
    let result = |workers| Result::of(&run(&asha(workers), 4, Nature::KIND).0);
    for workers in [1, 2, 7, 30] {
        assert_eq!(result(workers), result(workers));
    }
    assert_ne!(result(1), result(30), "more workers start more trials before the first advance");
}

/// Algorithm 2 by hand: one worker, eta = 3, rungs at 1, 3 and 9, losses that rise with the number of the trial.
#[test]
fn one_worker_advances_one_as_soon_as_a_third_can() {
    let text = "search = 'asha'\nsteps = 9\ntrials = 9\nworkers = 1\nspace = { lr = 'log:1e-5..1' }";
    let mut search = Search::new(&spec(text), 0, Box::new(Whole { steps: 9 })).unwrap();
    let mut done = Vec::new();
    while search.outcome().is_none() {
        for action in search.actions() {
            if let Action::Start { trial, until, .. } | Action::Continue { trial, until } = action {
                done.push((trial.0, until));
                search.report(trial, until, trial.0 as f64).unwrap();
            }
        }
    }
    let expected = [
        (0, 1),
        (1, 1),
        (2, 1),
        (0, 3),
        (3, 1),
        (4, 1),
        (5, 1),
        (1, 3),
        (6, 1),
        (7, 1),
        (8, 1),
        (2, 3),
        (0, 9),
    ];
    assert_eq!(done, expected);
    assert_eq!(search.outcome().unwrap().best, Some(TrialId(0)));
}

/// Two workers whose losses arrive in either order do the same.
#[test]
fn asha_waits_for_virtual_time() {
    let text = "search = 'asha'\nsteps = 9\ntrials = 9\nworkers = 2\nspace = { lr = 'log:1e-5..1' }";
    let mut search = Search::new(&spec(text), 0, Box::new(Whole { steps: 9 })).unwrap();
    assert_eq!(search.actions().len(), 2);
    search.report(TrialId(1), 1, 1.0).unwrap();
    assert!(search.actions().is_empty(), "worker 0 ends at the same virtual time");
    search.report(TrialId(0), 1, 2.0).unwrap();
    let begun: Vec<TrialId> = search.actions().iter().map(Action::trial).collect();
    assert_eq!(begun, [TrialId(2), TrialId(3)]);
}

fn pbt(trials: usize, seed: u64) -> (Search, Vec<Action>) {
    let text = format!(
        "search = 'pbt'\nsteps = 50\ninterval = 10\ntrials = {trials}\nspace = {{ lr = 'log:1e-5..1', batch = [8, 16] }}"
    );
    let (search, machine) = run(&spec(&text), seed, Nature::KIND);
    (search, machine.actions)
}

#[test]
fn the_worst_fifth_of_a_population_is_replaced_by_forks_of_the_best() {
    let (search, actions) = pbt(10, 1);
    let forks: Vec<_> = actions
        .iter()
        .filter_map(|action| match action {
            Action::Fork { trial, parent, at, settings, until } => {
                Some((*trial, *parent, *at, settings, *until))
            }
            _ => None,
        })
        .collect();
    assert_eq!(forks.len(), 2 * 4, "two of ten, after 10, 20, 30 and 40");
    let stops = actions.iter().filter(|action| matches!(action, Action::Stop { .. })).count();
    assert_eq!(stops, forks.len());
    for (_, parent, at, settings, until) in forks {
        assert_eq!((at % 10, until), (0, at + 10));
        let of = search.trial(parent).unwrap();
        let mut losses: Vec<_> = search.trials().filter_map(|trial| trial.losses.get(&at).copied()).collect();
        losses.sort_unstable();
        assert!(of.losses[&at] <= losses[1], "the parent is one of the two best");
        let rate = |settings: &Configuration| settings.get("lr").and_then(Value::number).unwrap();
        assert_ne!(rate(settings), rate(of.settings));
        assert_eq!(
            settings.get("batch"),
            of.settings.get("batch"),
            "lists are not explored unless they are named"
        );
    }
    let at_the_end = search.trials().filter(|trial| trial.losses.contains_key(&50)).count();
    assert_eq!(at_the_end, 10);
}

/// The replacement of a member is a function of the seed, the member and the interval.
#[test]
fn populations_differ_by_their_seeds() {
    let settings = |seed| pbt(10, seed).0.trials().map(|trial| trial.settings.clone()).collect::<Vec<_>>();
    assert_eq!(settings(1), settings(1));
    assert_ne!(settings(1), settings(2));
}

/// Two members that are replaced after one interval draw their parents independently, and so do the intervals.
#[test]
fn members_and_intervals_draw_apart() {
    let (mut members, mut intervals) = (0, 0);
    for seed in 0..50 {
        let forks: Vec<(TrialId, usize)> = pbt(10, seed)
            .1
            .iter()
            .filter_map(|action| match action {
                Action::Fork { parent, at, .. } => Some((*parent, *at)),
                _ => None,
            })
            .collect();
        let pairs = || forks.chunks(2).map(|pair| (pair[0], pair[1]));
        assert!(pairs().all(|(one, other)| one.1 == other.1));
        members += pairs().filter(|(one, other)| one.0 != other.0).count();
        intervals += usize::from(
            pairs().any(|(one, other)| one.0 == other.0) && pairs().any(|(one, other)| one.0 != other.0),
        );
    }
    assert!((70..130).contains(&members), "half of 200 pairs have two parents: {members}");
    assert!(intervals > 25, "{intervals} of 50");
}

/// A quarter is drawn anew, the others go up or down by a fifth.
#[test]
fn settings_are_perturbed_or_drawn_anew() {
    let (mut up, mut down, mut anew) = (0, 0, 0);
    for seed in 0..50 {
        let (search, actions) = pbt(10, seed);
        for action in &actions {
            if let Action::Fork { parent, settings, .. } = action {
                let rate = |settings: &Configuration| settings.get("lr").and_then(Value::number).unwrap();
                let factor = rate(settings) / rate(search.trial(*parent).unwrap().settings);
                let near = |other: f64| (factor - other).abs() < 1e-9;
                *(if near(1.2) {
                    &mut up
                } else if near(0.8) {
                    &mut down
                } else {
                    &mut anew
                }) += 1;
            }
        }
    }
    assert_eq!(up + down + anew, 50 * 8);
    assert!((120..180).contains(&up) && (120..180).contains(&down), "{up} {down} {anew}");
    assert!((70..130).contains(&anew), "{anew}");
}

#[test]
fn a_population_without_a_number_left_ends() {
    let nature = Nature { lost: 1, ..Nature::KIND };
    let text = "search = 'pbt'\nsteps = 50\ninterval = 10\ntrials = 4\nspace = { lr = 'log:1e-5..1' }";
    let (search, machine) = run(&spec(text), 1, nature);
    assert_eq!((search.outcome().unwrap().best, machine.work), (None, 40));
    assert!(machine.actions.iter().all(|action| !matches!(action, Action::Fork { .. })));
}

/// A smooth surface with one minimum, to measure every method; steps do not matter.
fn surface(settings: &Configuration) -> f64 {
    let number = |name: &str| settings.get(name).and_then(Value::number).unwrap_or(0.0);
    let optimizer =
        if settings.get("optimizer") == Some(&"sgd".into()) { 0.5 + number("momentum") } else { 0.0 };
    (number("lr").log10() + 2.5).powi(2)
        + (4.0 * (number("dropout") - 0.1)).powi(2)
        + (number("layers") - 6.0).abs() / 4.0
        + optimizer
}

fn least(method: &str, trials: usize, seed: u64) -> f64 {
    let text = format!(
        "search = '{method}'\nsteps = 1\ntrials = {trials}\n[space]\nlr = 'log:1e-5..1'\ndropout = 'uniform:0..0.5'\n\
         layers = 'int:1..12'\noptimizer = ['adamw', 'sgd']\nmomentum = {{ uniform = [0, 0.9], when = {{ optimizer = 'sgd' }} }}"
    );
    let mut search = Search::new(&spec(&text), seed, Box::new(Whole { steps: 1 })).unwrap();
    let mut least = f64::INFINITY;
    while search.outcome().is_none() {
        for action in search.actions() {
            let trial = action.trial();
            let loss = surface(search.trial(trial).unwrap().settings);
            least = least.min(loss);
            search.report(trial, 1, loss).unwrap();
        }
    }
    least
}

/// With the same number of trials, the estimator finds better settings than chance, in the mean over a fixed set of
/// seeds.
#[test]
fn the_estimator_beats_chance() {
    let mean = |method| (0..100).map(|seed| least(method, 60, seed)).sum::<f64>() / 100.0;
    let (tpe, random) = (mean("tpe"), mean("random"));
    assert!(tpe < 0.6 * random, "{tpe} against {random}");
    let wins = (0..100).filter(|seed| least("tpe", 60, *seed) <= least("random", 60, *seed)).count();
    assert!(wins >= 75, "{wins} of 100");
}

/// The estimator proposes according to earlier losses; losses that are not numbers count as the worst.
#[test]
fn lost_trials_are_bad_ones() {
    let text = "search = 'tpe'\nsteps = 1\ntrials = 60\nstartup = 20\nspace = { x = 'uniform:0..1' }";
    let mut search = Search::new(&spec(text), 3, Box::new(Whole { steps: 1 })).unwrap();
    let mut proposed = Vec::new();
    while search.outcome().is_none() {
        for action in search.actions() {
            let trial = action.trial();
            let x = search.trial(trial).unwrap().settings.get("x").and_then(Value::number).unwrap();
            if trial.0 >= 20 {
                proposed.push(x);
            }
            search.report(trial, 1, if x > 0.5 { f64::NAN } else { 1.0 }).unwrap();
        }
    }
    let below = proposed.iter().filter(|x| **x <= 0.5).count();
    assert!(below > 30, "{below} of 40 where losses are numbers");
}

/// The winner has the smallest loss among the trials trained furthest, ties by number; a failed one never wins.
#[test]
fn the_winner_came_furthest() {
    let text = "search = 'random'\nsteps = 5\ntrials = 4\nspace = { lr = 'log:1e-5..1' }";
    let mut search = search(&spec(text), 0);
    search.actions();
    search.report(TrialId(3), 5, 1.0).unwrap();
    search.report(TrialId(2), 5, 1.0).unwrap();
    search.fail(TrialId(0), 4).unwrap();
    assert_eq!(search.outcome(), None);
    search.report(TrialId(1), 5, f64::NEG_INFINITY).unwrap();
    assert_eq!(search.leaderboard(), [TrialId(2), TrialId(3)]);
    assert_eq!(search.outcome().unwrap().best, Some(TrialId(2)));
}
