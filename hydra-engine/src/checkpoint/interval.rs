//! The interval of [`CheckpointEvery::Auto`](super::CheckpointEvery::Auto), a function of measured times.

/// The largest share of the run time that a kill loses.
const LOST: f64 = 1.0 / 20.0;
/// The largest share of time that the checkpoint writer is busy.
const AT_WORK: f64 = 1.0 / 100.0;
/// The shortest interval, and the longest one if checkpoints are cheap, in seconds.
const SHORTEST_S: f64 = 2.0;
const LONGEST_S: f64 = 600.0;
/// The write rate in bytes per second for the estimate of the first checkpoint.
const BYTES_PER_S: f64 = 1e9;

/// The seconds between checkpoints of a task that has run for `run_s`, if its last checkpoint took `cost_s` and
/// `tasks` tasks share the writer.
///
/// It is a twentieth of the task's run time, but long enough that the checkpoints of all tasks together take less
/// than a hundredth of the time. If both are impossible, the second rule wins.
pub(crate) fn interval_s(run_s: f64, cost_s: f64, tasks: usize) -> f64 {
    let affordable = cost_s * tasks.max(1) as f64 / AT_WORK;
    (run_s * LOST).clamp(SHORTEST_S, LONGEST_S).max(affordable)
}

/// Estimated seconds of a checkpoint of `bytes` bytes, before the first measurement.
pub(crate) fn estimated_cost_s(bytes: u64) -> f64 {
    bytes as f64 / BYTES_PER_S
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A task's checkpoints over a run: start and duration of each.
    fn checkpoints(
        steps: &[f64],
        costs: &[f64],
        tasks: usize,
        estimated: f64,
    ) -> (Vec<(f64, f64)>, f64, f64) {
        let (mut now, mut last, mut cost, mut lost) = (0.0, 0.0, estimated, 0.0_f64);
        let mut written: Vec<(f64, f64)> = Vec::new();
        for step in steps.iter().cycle().take(20_000) {
            now += step;
            let affordable = cost * tasks as f64 / AT_WORK <= (now * LOST).clamp(SHORTEST_S, LONGEST_S);
            if now > SHORTEST_S / LOST && affordable {
                // A minibatch ends before the task is saved.
                lost = lost.max((now - last - step) / now);
            }
            if now - last >= interval_s(now, cost, tasks) {
                cost = costs[written.len() % costs.len()];
                written.push((now, cost));
                now += cost;
                last = now;
            }
        }
        (written, now, lost)
    }

    #[test]
    fn the_first_ones_are_early_and_later_ones_no_rarer_than_every_ten_minutes() {
        let days = [0.0, 10.0, 60.0, 600.0, 7200.0, 86_400.0];
        assert_eq!(days.map(|run_s| interval_s(run_s, 0.01, 1)), [2.0, 2.0, 3.0, 30.0, 360.0, 600.0]);
        assert_eq!(interval_s(0.0, estimated_cost_s(3 << 20), 12).round(), 4.0);
        assert_eq!(interval_s(86_400.0, 20.0, 1), 2000.0);
    }

    proptest! {
        #[test]
        fn checkpoints_take_less_than_a_hundredth_but_for_the_last(
            steps in prop::collection::vec(0.01..30.0_f64, 1..9),
            costs in prop::collection::vec(0.001..20.0_f64, 1..9),
            tasks in 1..20_usize,
        ) {
            let (written, run_s, _) = checkpoints(&steps, &costs, tasks, costs[0]);
            let but_last = written.len().saturating_sub(1);
            let spent: f64 = written[..but_last].iter().map(|(_, cost)| cost * tasks as f64).sum();
            prop_assert!(spent <= run_s * AT_WORK, "{spent} of {run_s}");
        }

        #[test]
        fn a_kill_loses_a_twentieth_where_checkpoints_are_cheap(
            steps in prop::collection::vec(0.01..30.0_f64, 1..9),
            cost in 0.001..1.0_f64,
            tasks in 1..5_usize,
        ) {
            let (_, _, lost) = checkpoints(&steps, &[cost], tasks, cost);
            prop_assert!(lost <= LOST + 1e-9, "{lost}");
        }

        #[test]
        fn it_grows_with_what_it_depends_on(
            run_s in 0.0..1e6_f64, more_s in 0.0..1e6_f64, cost_s in 0.0..1e3_f64, tasks in 0..99_usize,
        ) {
            let interval = interval_s(run_s, cost_s, tasks);
            prop_assert!(interval >= SHORTEST_S);
            prop_assert!(interval_s(run_s + more_s, cost_s, tasks) >= interval);
            prop_assert!(interval_s(run_s, cost_s + more_s, tasks) >= interval);
            prop_assert!(interval_s(run_s, cost_s, tasks + 1) >= interval);
        }
    }
}
