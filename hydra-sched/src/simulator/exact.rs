//! The minimum makespan of small cases.
//!
//! The problem is that of the paper's MILP: chains of shard tasks, at most one of a model and one of a device
//! at a time, without interruption; promotions and optimizers take no time. A depth-first branch and bound
//! solves it. docs/scheduling.md states the MILP itself, and how the two were compared.
//!
//! Shard tasks are placed in the order of their starts. This finds some shortest schedule: take one, list its
//! shard tasks by start, and place each as early as the earlier ones allow; no start becomes later. At any
//! start, idle devices of the same speed are interchangeable, so one of each speed is tried.

use std::collections::BTreeSet;

use super::{LowerBounds, SimulationError, SimulationOptions, Workload, simulate};
use crate::policy::PolicyKind;
use crate::policy::claimable::ordered;

/// The result of a search for the minimum makespan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exact {
    /// The minimum makespan found, in seconds.
    pub makespan_s: f64,
    /// Whether it is proven to be the minimum; false if the search was given up.
    pub proven: bool,
    /// The number of partial schedules that were examined.
    pub nodes: u64,
}

/// Returns the minimum makespan of a workload in which promotions and optimizers take no time, giving up
/// after `most_nodes` partial schedules.
///
/// A million partial schedules take about a second; a dozen shard tasks on two or three devices need far
/// fewer. With more than a thousand shard tasks nothing is searched, and the result is Sharded-LRTF's, proven
/// only if it equals the lower bound.
///
/// # Errors
/// [`SimulationError::Workload`] if the workload violates a rule of [`Workload::check`].
pub fn exact(workload: &Workload, most_nodes: u64) -> Result<Exact, SimulationError> {
    let mut free = without_transfers(workload);
    free.tasks.iter_mut().for_each(|task| task.estimate_factor = 1.0);
    let options = SimulationOptions { prefetch: false, record: false };
    let first = simulate(&free, &mut *PolicyKind::ShardedLrtf.build(0), options)?;
    if free.shard_tasks() > MOST_SHARD_TASKS {
        let proven = first.gap() <= 1.0 + 1e-12;
        return Ok(Exact { makespan_s: first.makespan_s, proven, nodes: 0 });
    }
    let mut search = Search::new(&free, first.makespan_s, &first.bounds, most_nodes);
    search.go(f64::NEG_INFINITY);
    Ok(Exact { makespan_s: search.best_s, proven: search.nodes < most_nodes, nodes: search.nodes })
}

/// Returns the workload in the paper's model: transfers in both directions, their latencies and optimizers
/// take no time, and host memory and processors are unlimited.
pub fn without_transfers(workload: &Workload) -> Workload {
    let mut free = Workload { host_bytes: None, processors: None, ..workload.clone() };
    for task in &mut free.tasks {
        (task.optimizer_s, task.step_wait_s) = (0.0, 0.0);
        for shard in &mut task.shards {
            (shard.promote_s, shard.download_s, shard.gradients_s) = (Some(0.0), 0.0, 0.0);
        }
    }
    free.devices.iter_mut().for_each(|device| device.latency_s = 0.0);
    free
}

/// One model: the seconds of its shard tasks at speed 1.
struct Chain {
    seconds: Vec<f64>,
    /// Seconds from each shard task to the end.
    rest: Vec<f64>,
    placed: usize,
    /// The earliest start of its next shard task.
    ready_s: f64,
}

struct Search {
    chains: Vec<Chain>,
    speeds: Vec<f64>,
    free_s: Vec<f64>,
    fastest: f64,
    best_s: f64,
    bound_s: f64,
    nodes: u64,
    most_nodes: u64,
    /// States that led to no improvement, so that other orders of the same tasks do not either.
    seen: BTreeSet<Vec<u64>>,
}

/// The search depth equals the number of shard tasks.
const MOST_SHARD_TASKS: u64 = 1_000;

/// The maximum number of remembered states.
const MOST_SEEN: usize = 200_000;

impl Search {
    fn new(workload: &Workload, best_s: f64, bounds: &LowerBounds, most_nodes: u64) -> Self {
        let chains = (0..workload.tasks.len()).map(|task| chain(workload, task)).collect();
        let speeds: Vec<f64> = workload.devices.iter().map(|device| device.speed).collect();
        Self {
            chains,
            free_s: vec![0.0; speeds.len()],
            fastest: speeds.iter().copied().fold(0.0, f64::max),
            speeds,
            best_s,
            bound_s: bounds.best_s(),
            nodes: 0,
            most_nodes,
            seen: BTreeSet::new(),
        }
    }

    /// Places the next shard task, which starts at `last_s` or later, in every way that could lead to an
    /// improvement.
    fn go(&mut self, last_s: f64) {
        // Sums in another order differ in their last bits, which is not an improvement.
        let enough = self.best_s <= self.bound_s * (1.0 + 1e-12);
        if enough || self.nodes >= self.most_nodes {
            return;
        }
        self.nodes += 1;
        if self.chains.iter().all(|chain| chain.placed == chain.seconds.len()) {
            let end_s = self.chains.iter().map(|chain| chain.ready_s).fold(0.0, f64::max);
            self.best_s = self.best_s.min(end_s);
            return;
        }
        if self.bound(last_s) >= self.best_s * (1.0 - 1e-12) || !self.is_new(last_s) {
            return;
        }
        for (start_s, chain, device) in self.moves(last_s) {
            self.place(start_s, chain, device);
        }
    }

    fn place(&mut self, start_s: f64, chain: usize, device: usize) {
        let state = &mut self.chains[chain];
        let before = (state.ready_s, self.free_s[device]);
        let end_s = start_s + state.seconds[state.placed] / self.speeds[device];
        state.placed += 1;
        state.ready_s = end_s;
        self.free_s[device] = end_s;
        self.go(start_s);
        let state = &mut self.chains[chain];
        state.placed -= 1;
        (state.ready_s, self.free_s[device]) = before;
    }

    /// The shard tasks that can be placed next, the longest chains first, so that good schedules are found
    /// early.
    fn moves(&self, last_s: f64) -> Vec<(f64, usize, usize)> {
        let mut devices: Vec<usize> = (0..self.free_s.len()).collect();
        devices.sort_by(|a, b| self.free_s[*a].total_cmp(&self.free_s[*b]));
        let mut moves = Vec::new();
        for (index, chain) in self.chains.iter().enumerate() {
            if chain.placed == chain.seconds.len() {
                continue;
            }
            let mut tried: Vec<f64> = Vec::new();
            for &device in &devices {
                if !tried.contains(&self.speeds[device]) {
                    tried.push(self.speeds[device]);
                    moves.push((chain.ready_s.max(self.free_s[device]).max(last_s), index, device));
                }
            }
        }
        let rest = |chain: usize| self.chains[chain].rest[self.chains[chain].placed];
        moves.sort_by(|a, b| a.0.total_cmp(&b.0).then(rest(b.1).total_cmp(&rest(a.1))));
        moves
    }

    /// A lower bound on all schedules that continue from here.
    fn bound(&self, last_s: f64) -> f64 {
        let free_s = self.free_s.iter().copied().fold(f64::INFINITY, f64::min).max(last_s);
        let (mut left, mut best) = (0.0, 0.0f64);
        for chain in &self.chains {
            let rest = chain.rest.get(chain.placed).copied().unwrap_or(0.0);
            left += rest;
            let start_s = if rest > 0.0 { chain.ready_s.max(free_s) } else { chain.ready_s };
            best = best.max(start_s + rest / self.fastest);
        }
        let devices = self.free_s.iter().zip(&self.speeds);
        let spent: f64 = devices.map(|(free, speed)| free.max(last_s) * speed).sum();
        best.max((spent + left) / self.speeds.iter().sum::<f64>())
    }

    /// Returns whether this state was not examined before. Devices of the same speed are interchangeable.
    fn is_new(&mut self, last_s: f64) -> bool {
        let mut devices: Vec<(u64, u64)> = self
            .free_s
            .iter()
            .zip(&self.speeds)
            .map(|(free, speed)| (ordered(*speed), ordered(free.max(last_s))))
            .collect();
        devices.sort_unstable();
        let chains =
            self.chains.iter().flat_map(|chain| [chain.placed as u64, ordered(chain.ready_s.max(last_s))]);
        let state: Vec<u64> =
            devices.iter().map(|device| device.1).chain(chains).chain([ordered(last_s)]).collect();
        self.seen.len() >= MOST_SEEN || self.seen.insert(state)
    }
}

fn chain(workload: &Workload, task: usize) -> Chain {
    let cost = &workload.tasks[task];
    let seconds: Vec<f64> = cost.tasks_from(0).map(|of| workload.shard_task_s(task, &of)).collect();
    let mut rest = seconds.clone();
    (1..rest.len()).rev().for_each(|later| rest[later - 1] += rest[later]);
    Chain { seconds, rest, placed: 0, ready_s: cost.arrival_s }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulator::{DeviceCost, Draw, ShardCost, TaskCost};

    fn jobs(seconds: &[f64], devices: usize) -> Workload {
        let task = |(index, s): (usize, &f64)| {
            TaskCost::new(index.to_string(), 1, vec![ShardCost::new(0.0, *s, 0.0)])
        };
        let tasks = seconds.iter().enumerate().map(task).collect();
        Workload::new(tasks, vec![DeviceCost::default(); devices])
    }

    fn small() -> Draw {
        Draw { models: (2, 4), devices: (2, 3), shards: (1, 2), shard_tasks: (1, 4), ..Draw::default() }
    }

    /// Graham's worst case of longest-first: 11, while 9 is possible.
    #[test]
    fn finds_what_longest_first_misses() {
        let workload = jobs(&[5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0], 3);
        let options = SimulationOptions { prefetch: false, record: false };
        let lrtf = simulate(&workload, &mut crate::policy::ShardedLrtfEager, options).unwrap();
        assert_eq!(lrtf.makespan_s, 11.0);
        let exact = exact(&workload, 1_000_000).unwrap();
        assert_eq!((exact.makespan_s, exact.proven), (9.0, true));
    }

    /// The best schedule may leave a device idle: the long job waits for the fast one.
    #[test]
    fn unequal_devices_may_be_left_idle() {
        let mut workload = jobs(&[10.0, 1.0], 2);
        workload.devices[0].speed = 10.0;
        assert_eq!(exact(&workload, 1_000).unwrap().makespan_s, 1.0);
    }

    /// A recorded run has latencies and downloads. The paper's model has neither, and neither may the initial
    /// schedule of the search, which is the result if nothing is searched.
    #[test]
    fn a_recorded_run_takes_the_time_of_its_shard_tasks() {
        let mut workload = jobs(&[1.0], 2);
        let first = ShardCost { download_s: 0.25, ..ShardCost::new(1.0, 2.0, 0.5) };
        workload.tasks[0].shards.insert(0, first);
        workload.tasks[0].optimizer_s = 0.125;
        workload.devices.iter_mut().for_each(|device| device.latency_s = 0.5);
        for minibatches in [1, 500] {
            workload.tasks[0].minibatches = minibatches;
            let found = exact(&workload, 1_000).unwrap();
            assert_eq!((found.makespan_s, found.proven), (4.0 * minibatches as f64, true));
        }
    }

    /// The optimum is between the bounds and every policy's schedule.
    #[test]
    fn lies_between_the_bounds_and_the_policies() {
        for seed in 0..60 {
            let workload = small().workload(seed);
            let exact = exact(&workload, 200_000).unwrap();
            let bounds = LowerBounds::of(&workload, false).unwrap();
            assert!(exact.makespan_s >= bounds.best_s() * (1.0 - 1e-9));
            for kind in PolicyKind::ALL {
                let options = SimulationOptions { prefetch: false, record: false };
                let result = simulate(&workload, &mut *kind.build(seed), options).unwrap();
                assert!(result.makespan_s >= exact.makespan_s * (1.0 - 1e-9), "seed {seed} {kind}");
            }
        }
    }

    /// Enumerating all schedules of small workloads without pruning gives the same optimum.
    #[test]
    fn agrees_with_trying_everything() {
        let draw = Draw { models: (2, 3), devices: (2, 2), shard_tasks: (1, 3), ..small() };
        for seed in 0..40 {
            let mut workload = draw.workload(seed);
            if workload.shard_tasks() > 8 {
                continue;
            }
            if seed % 3 == 0 {
                workload.devices[1].speed = 2.0;
            }
            let speeds: Vec<f64> = workload.devices.iter().map(|device| device.speed).collect();
            let mut chains: Vec<Chain> =
                (0..workload.tasks.len()).map(|task| chain(&workload, task)).collect();
            let mut free_s = vec![0.0; workload.devices.len()];
            let brute = everything(&mut chains, &mut free_s, &speeds);
            let found = exact(&workload, 1_000_000).unwrap();
            assert!(
                found.proven && (found.makespan_s - brute).abs() < 1e-9,
                "seed {seed}: {found:?} {brute}"
            );
        }
    }

    /// All assignments in all orders, each shard task as early as its model and its device allow.
    fn everything(chains: &mut [Chain], free_s: &mut [f64], speeds: &[f64]) -> f64 {
        let mut best = f64::INFINITY;
        for index in 0..chains.len() {
            if chains[index].placed == chains[index].seconds.len() {
                continue;
            }
            for device in 0..free_s.len() {
                let before = (chains[index].ready_s, free_s[device]);
                let seconds = chains[index].seconds[chains[index].placed] / speeds[device];
                let end_s = before.0.max(before.1) + seconds;
                (chains[index].ready_s, free_s[device]) = (end_s, end_s);
                chains[index].placed += 1;
                best = best.min(everything(chains, free_s, speeds));
                chains[index].placed -= 1;
                (chains[index].ready_s, free_s[device]) = before;
            }
        }
        if best.is_finite() { best } else { chains.iter().map(|c| c.ready_s).fold(0.0, f64::max) }
    }

    #[test]
    fn a_large_case_is_not_searched() {
        let large = exact(&Draw::default().workload(1), 1_000_000).unwrap();
        assert_eq!(large.nodes, 0);
        let even = exact(&jobs(&[1.0; 2_000], 2), 1_000_000).unwrap();
        assert_eq!((even.makespan_s, even.proven), (1_000.0, true));
    }

    #[test]
    fn a_search_that_is_given_up_says_so() {
        let found = exact(&jobs(&[5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0], 3), 10).unwrap();
        assert!(!found.proven && found.makespan_s <= 11.0);
    }
}
