//! The number of minibatches that a search trains.

use crate::machine::{Machine, Nature, run};
use hydra_search::{Action, Search, Spec, TrialId, TrialState, Whole, brackets, rungs};

const UNIT: usize = 100;

fn halving() -> Spec {
    let text = "search = 'halving'\ntrials = 27\nsteps = 2700\neta = 3\nspace = { lr = 'log:1e-5..1e-2' }";
    Spec::from_toml(text).unwrap()
}

/// Rungs of 1, 3, 9 and 27 parts: 27 + 9 * 2 + 3 * 6 + 18 = 81 parts of the grid's 27 * 27.
#[test]
fn halving_takes_a_ninth_of_the_grid() {
    let (search, machine) = run(&halving(), 1, Nature::KIND);
    let grid = 27 * halving().steps;
    assert_eq!(machine.work, 81 * UNIT);
    assert_eq!(search.work().trained * 9, grid);
    let at = |step| search.trials().filter(|trial| trial.losses.contains_key(&(step * UNIT))).count();
    assert_eq!([1, 3, 9, 27].map(at), [27, 9, 3, 1]);
    let standing = |wanted| search.trials().filter(|trial| trial.standing == wanted).count();
    assert_eq!((standing(TrialState::Finished), standing(TrialState::Stopped)), (1, 26));
}

/// The best by loss at each rung, according to sorting.
#[test]
fn halving_advances_what_sorting_would() {
    let (search, _) = run(&halving(), 2, Nature::KIND);
    let mut at: Vec<TrialId> = (0..27).map(TrialId).collect();
    for (step, keep) in [(100, 9), (300, 3), (900, 1)] {
        at.sort_by_key(|trial| (search.trial(*trial).unwrap().losses[&step], *trial));
        at.truncate(keep);
        let next = 3 * step;
        let there: Vec<TrialId> = search
            .trials()
            .filter(|trial| trial.losses.contains_key(&next))
            .map(|trial| trial.trial)
            .collect();
        let mut expected = at.clone();
        expected.sort_unstable();
        assert_eq!(there, expected);
    }
    assert_eq!(search.outcome().unwrap().best, Some(at[0]));
}

/// The rungs of every plan stay within a share of `(rungs) / trials` of the grid.
#[test]
fn rungs_cost_at_most_one_round_of_the_last_one_each() {
    for trials in 1..100 {
        for steps in [7, 81, 1_000] {
            let halvings = (0..5).rfind(|s| 3usize.pow(*s) <= trials.min(steps)).unwrap();
            let plan = rungs(trials, steps, 3, halvings);
            let mut before = 0;
            let mut work = 0;
            for rung in &plan {
                assert!(rung.trials > 0 && rung.step > before, "{plan:?}");
                work += rung.trials * (rung.step - before);
                before = rung.step;
            }
            assert_eq!(before, steps);
            // Each rung trains at most trials / 3^i times steps / 3^(s - i).
            assert!(work <= plan.len() * trials * steps / 3usize.pow(halvings), "{trials} {steps}");
        }
    }
}

/// Decisions are made as soon as they are certain: once 18 losses are known to be worse, the best of the others need
/// not wait.
#[test]
fn decisions_do_not_wait_for_the_whole_rung() {
    let spec = halving();
    let mut search = Search::new(&spec, 1, Box::new(Whole { steps: spec.steps })).unwrap();
    assert_eq!(search.actions().len(), 27);
    for trial in 0..18 {
        search.report(TrialId(trial), UNIT, 100.0 - trial as f64).unwrap();
    }
    let stop = |trial| Action::Stop { trial: TrialId(trial) };
    assert_eq!(
        search.actions(),
        (0..9).rev().map(stop).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>()
    );
    search.report(TrialId(18), UNIT, 0.0).unwrap();
    let next = search.actions();
    assert_eq!(next, [Action::Continue { trial: TrialId(18), until: 3 * UNIT }, stop(9)]);
}

/// Hyperband with R = 81 trains at most the minibatches of its brackets, and fewer where they stop early.
#[test]
fn hyperband_takes_what_its_brackets_say() {
    let text = "search = 'hyperband'\nsteps = 81\ntrials = 143\nspace = { lr = 'log:1e-5..1e-2' }";
    let spec = Spec::from_toml(text).unwrap();
    let (search, machine) = run(&spec, 1, Nature::KIND);
    assert_eq!(search.trials().len(), 81 + 34 + 15 + 8 + 5);
    let bracket = |rungs: &Vec<hydra_search::RungPlan>| {
        let steps = [0].into_iter().chain(rungs.iter().map(|rung| rung.step));
        rungs.iter().zip(steps).map(|(rung, before)| rung.trials * (rung.step - before)).sum::<usize>()
    };
    assert_eq!(machine.work, brackets(81, 3, 4).iter().map(bracket).sum::<usize>());
    let finished = search.trials().filter(|trial| trial.standing == TrialState::Finished).count();
    assert_eq!(finished, 1 + 1 + 1 + 2 + 5);
}

#[test]
fn a_grid_and_a_random_search_train_everything() {
    let grid = "search = 'grid'\nsteps = 10\nspace = { lr = [1, 2, 3], batch = [8, 16] }\n[[trial]]\nlr = 9\n[[trial]]\nlr = 1\nbatch = 8";
    let (search, machine) = run(&Spec::from_toml(grid).unwrap(), 0, Nature::KIND);
    assert_eq!((search.trials().len(), machine.work), (1 + 6, 70));
    assert_eq!(search.repeats().len(), 1, "the grid has what was given");
    let random = "search = 'random'\nsteps = 10\ntrials = 30\nspace = { lr = [1, 2, 3], batch = [8, 16] }";
    let (search, machine) = run(&Spec::from_toml(random).unwrap(), 0, Nature::KIND);
    assert_eq!((search.trials().len(), search.repeats().len(), machine.work), (6, 24, 60));
    let mut machine = Machine::new(Nature::KIND, 10);
    let text = "search = 'grid'\nsteps = 10\n[[trial]]\nlr = 9\n[[trial]]\nlr = 9.0";
    let mut alone = Search::new(&Spec::from_toml(text).unwrap(), 0, Box::new(Whole { steps: 10 })).unwrap();
    machine.run(&mut alone, |_| 0);
    assert_eq!((alone.trials().len(), alone.repeats().len()), (1, 1));
}
