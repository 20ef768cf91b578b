//! The decisions of a search do not depend on the order in which losses arrive, on the number of concurrent trials,
//! or on interruptions.

use crate::machine::{Machine, Nature, Result, hash, run, search};
use hydra_search::{Method, Spec};
use proptest::prelude::*;

/// Specs of every method over a space in which draws repeat and trials share prefixes.
fn specs() -> impl Strategy<Value = Spec> {
    let space = |wide: bool| {
        let wide = if wide { "x = 'uniform:0..1'\n" } else { "" };
        let text = format!(
            "lr = [0.1, 0.2, 0.4]\ndecay = [0, 5, 20]\n{wide}y = {{ int = [0, 1], when = {{ lr = 0.1 }} }}"
        );
        toml::from_str(&text).expect("a space")
    };
    let numbers = (1usize..25, 1usize..60, 2usize..4, 1usize..20, 1usize..6, any::<bool>());
    (proptest::sample::select(Method::ALL.to_vec()), numbers).prop_map(move |(method, numbers)| {
        let (trials, steps, eta, few, workers, wide) = numbers;
        let rungs = matches!(method, Method::Halving | Method::Hyperband | Method::Asha);
        let of = |own: bool, value: usize| own.then_some(value);
        Spec {
            search: method,
            steps,
            trials: of(method != Method::Grid, trials),
            eta: of(rungs, eta),
            first_rung: of(rungs, few.div_ceil(5).min(steps)),
            workers: of(method == Method::Asha, workers),
            interval: of(method == Method::Pbt, few.min(steps)),
            explore: (method == Method::Pbt).then(|| vec!["lr".to_owned()]),
            startup: of(method == Method::Tpe, 3),
            at_once: of(method == Method::Tpe, workers),
            space: space(wide && method != Method::Grid),
            ..Spec::default()
        }
    })
}

fn natures() -> impl Strategy<Value = Nature> {
    let of = |(losses, lost, failing)| Nature { losses, lost, failing };
    prop_oneof![
        Just(Nature::KIND),
        (1u64..6, 0u64..5, 0u64..40).prop_map(of),
        (Just(1u64 << 50), 0u64..5, 0u64..200).prop_map(of),
    ]
}

/// Picks one of the first `devices` jobs, so that as many run concurrently.
fn picks(order: u64, devices: usize) -> impl FnMut(usize) -> usize {
    let mut count = 0;
    move |jobs| {
        count += 1;
        (hash(order, count) % jobs.min(devices) as u64) as usize
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn neither_order_nor_devices_decide(
        spec in specs(),
        nature in natures(),
        seed in 0u64..100,
        orders in proptest::collection::vec((any::<u64>(), 1usize..40), 3),
    ) {
        let (first, machine) = run(&spec, seed, nature);
        let expected = Result::of(&first);
        prop_assert_eq!(expected.trained, machine.work);
        for (order, devices) in orders {
            let mut other = search(&spec, seed);
            let mut again = Machine::new(nature, spec.steps);
            again.run(&mut other, picks(order, devices));
            prop_assert_eq!(&Result::of(&other), &expected);
            prop_assert_eq!(again.work, machine.work);
        }
    }

    /// Killed after a random number of reports, replayed from the log, and continued from the kept states.
    #[test]
    fn a_search_goes_on_where_it_was_killed(
        spec in specs(),
        nature in natures(),
        seed in 0u64..100,
        order in any::<u64>(),
        kills in proptest::collection::vec(0usize..30, 1..4),
    ) {
        let (first, _) = run(&spec, seed, nature);
        let expected = Result::of(&first);
        let mut machine = Machine::new(nature, spec.steps);
        let mut killed = search(&spec, seed);
        let mut pick = picks(order, 8);
        for reports in kills {
            for _ in 0..reports {
                if killed.outcome().is_none() {
                    machine.step(&mut killed, &mut pick);
                }
            }
            // The log survives as lines of JSON.
            let log: Vec<String> = machine.reports.iter().map(|report| serde_json::to_string(report).unwrap()).collect();
            let log: Vec<_> = log.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
            prop_assert_eq!(&log, &machine.reports);
            killed = search(&spec, seed);
            killed.replay(&log).unwrap();
            machine.resume(&killed);
        }
        machine.run(&mut killed, pick);
        prop_assert_eq!(&Result::of(&killed), &expected);
    }

    /// A report may be repeated, and only with the same loss.
    #[test]
    fn a_report_counts_once(spec in specs(), seed in 0u64..100) {
        let (mut search, machine) = run(&spec, seed, Nature::KIND);
        let expected = Result::of(&search);
        for report in &machine.reports {
            search.take(report).unwrap();
        }
        prop_assert!(search.actions().is_empty());
        prop_assert_eq!(&Result::of(&search), &expected);
        if let Some(hydra_search::Report::Loss { trial, step, loss: Some(loss) }) = machine.reports.first().copied() {
            let error = search.report(trial, step, loss + 1.0).unwrap_err().to_string();
            prop_assert!(error.contains("training is exact"), "{}", error);
            prop_assert!(search.report(trial, step + 1_000, 0.0).is_err());
            prop_assert!(search.report(hydra_search::TrialId(9_999), step, 0.0).is_err());
        }
        prop_assert_eq!(&Result::of(&search), &expected);
    }
}
