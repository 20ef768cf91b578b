//! Simulates and times policies, and draws their schedules.

use anyhow::Result;
use hydra_run::plots::colour::Palette;
use hydra_run::plots::schedule::{self, Timeline};
use hydra_sched::{
    Claimable, LowerBounds, ModelIndex, ModelView, Policy, PolicyKind, Priority, Request, Simulation,
    SimulationOptions, Workload, simulate,
};
use std::time::{Duration, Instant};

/// A policy that measures the time of its decisions.
struct TimedPolicy {
    policy: Box<dyn Policy>,
    spent: Duration,
}

impl Policy for TimedPolicy {
    fn name(&self) -> &'static str {
        self.policy.name()
    }

    fn priority(&self, model: &ModelView) -> Priority {
        self.policy.priority(model)
    }

    fn waits(&self) -> bool {
        self.policy.waits()
    }

    fn pick(&mut self, request: &Request, from: &dyn Claimable) -> Option<ModelIndex> {
        let asked = Instant::now();
        let picked = self.policy.pick(request, from);
        self.spent += asked.elapsed();
        picked
    }
}

/// A simulation, and the measured mean nanoseconds of a decision, including the clock's overhead.
pub(crate) struct Measured {
    pub(crate) run: Simulation,
    pub(crate) decision_ns: f64,
}

/// Simulates a policy. `seed` is the seed of the random policy.
pub(crate) fn measure(
    workload: &Workload,
    policy: PolicyKind,
    seed: u64,
    options: SimulationOptions,
) -> Result<Measured> {
    let mut timed = TimedPolicy { policy: policy.build(seed), spent: Duration::ZERO };
    let run = simulate(workload, &mut timed, options)?;
    let decision_ns = timed.spent.as_nanos() as f64 / run.decisions.max(1) as f64;
    Ok(Measured { run, decision_ns })
}

/// Returns the name of the largest lower bound.
pub(crate) fn largest(bounds: &LowerBounds) -> &'static str {
    let all = [
        ("chain", bounds.chain_s),
        ("work", bounds.work_s),
        ("level", bounds.level_s),
        ("link", bounds.link_s),
        ("host", bounds.host_s),
        ("packing", bounds.packing_s),
        ("turns", bounds.time_slices_s),
    ];
    let largest = all.into_iter().reduce(|best, bound| if bound.1 > best.1 { bound } else { best });
    largest.map_or("", |(name, _)| name)
}

/// Draws the Gantt chart of a simulation with recorded spans.
pub(crate) fn gantt(workload: &Workload, run: &Simulation) -> Result<String> {
    let devices = workload.devices.len();
    let timeline = Timeline::simulated(format!("Simulated under {}", run.policy), devices, &run.spans);
    let devices: Vec<String> = (0..devices).map(|device| format!("device {device}")).collect();
    let tasks: Vec<String> = workload.tasks.iter().map(|task| task.name.clone()).collect();
    schedule::draw(&timeline, &devices, &run.utilization(), &tasks, &Palette::default())
}

/// Returns the mean of numbers, 0 if there are none.
pub(crate) fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_changes_nothing() {
        // A random workload on which waiting pays, and one with varying times.
        let drawn = hydra_sched::Draw::default().workload(3);
        for workload in [&drawn, &serde_json::from_str(crate::simulator::UNEQUAL).unwrap()] {
            for policy in PolicyKind::ALL {
                let watched = measure(workload, policy, 7, SimulationOptions::default()).unwrap();
                let alone = simulate(workload, &mut *policy.build(7), SimulationOptions::default()).unwrap();
                assert_eq!(watched.run, alone);
                assert!(watched.decision_ns > 0.0);
            }
        }
        let options = SimulationOptions::default();
        let makespan_s = |kind| measure(&drawn, kind, 7, options).unwrap().run.makespan_s;
        assert!(makespan_s(PolicyKind::ShardedLrtf) != makespan_s(PolicyKind::ShardedLrtfEager));
    }

    #[test]
    fn the_largest_bound_is_named() {
        let bounds = LowerBounds { chain_s: 1.0, work_s: 3.0, level_s: 3.0, ..LowerBounds::default() };
        assert_eq!(largest(&bounds), "work");
    }
}
