//! The paper's mixed-integer program, solved by a general solver, to compare with.

use microlp::{ComparisonOp, OptimizationDirection, Problem, SolveOutcome, Variable};

use crate::Workload;

/// A shard task with its variables.
struct Task {
    model: usize,
    /// Seconds, per device.
    seconds: Vec<f64>,
    start: Variable,
    /// Whether it runs on this device, per device.
    on: Vec<Variable>,
}

/// The shortest makespan by the mixed-integer program in docs/scheduling.md, where promotions and
/// optimizers take no time; `None` when the solver gives up.
///
/// The program has a binary variable for each shard task and device and for each two shard tasks of
/// different models. It is there to check [`exact`](crate::exact()).
pub fn milp_makespan_s(workload: &Workload) -> Option<f64> {
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let end = problem.add_var(1.0, (0.0, f64::INFINITY));
    let tasks = tasks(&mut problem, workload);
    let longest = |task: &Task| task.seconds.iter().copied().fold(0.0, f64::max);
    let late = workload.tasks.iter().map(|task| task.arrival_s).fold(0.0, f64::max);
    let horizon = late + tasks.iter().map(longest).sum::<f64>();
    for (index, task) in tasks.iter().enumerate() {
        let one: Vec<(Variable, f64)> = task.on.iter().map(|on| (*on, 1.0)).collect();
        problem.add_constraint(one.as_slice(), ComparisonOp::Eq, 1.0);
        // The end of the run is no earlier than that of the task.
        problem.add_constraint(after(task, end).as_slice(), ComparisonOp::Ge, 0.0);
        if let Some(next) = tasks.get(index + 1).filter(|next| next.model == task.model) {
            problem.add_constraint(after(task, next.start).as_slice(), ComparisonOp::Ge, 0.0);
        }
        for other in tasks[index + 1..].iter().filter(|other| other.model != task.model) {
            isolate(&mut problem, task, other, horizon);
        }
    }
    match problem.solve().ok()? {
        SolveOutcome::Solution(solution) => Some(solution.objective()),
        SolveOutcome::Interrupted(_) => None,
    }
}

fn tasks(problem: &mut Problem, workload: &Workload) -> Vec<Task> {
    let mut tasks = Vec::new();
    for (model, cost) in workload.tasks.iter().enumerate() {
        for minibatch in 0..cost.minibatches {
            for (kind, shard) in cost.sweep() {
                let seconds = workload.seconds(model, minibatch, kind, shard);
                tasks.push(Task {
                    model,
                    seconds: workload.devices.iter().map(|device| seconds / device.speed).collect(),
                    start: problem.add_var(0.0, (cost.arrival_s, f64::INFINITY)),
                    on: workload.devices.iter().map(|_| problem.add_binary_var(0.0)).collect(),
                });
            }
        }
    }
    tasks
}

/// The time from the task's end to `then`.
fn after(task: &Task, then: Variable) -> Vec<(Variable, f64)> {
    let on = task.on.iter().zip(&task.seconds).map(|(on, seconds)| (*on, -seconds));
    [(then, 1.0), (task.start, -1.0)].into_iter().chain(on).collect()
}

/// Two shard tasks on one device: one ends before the other starts.
fn isolate(problem: &mut Problem, a: &Task, b: &Task, horizon: f64) {
    let a_first = problem.add_binary_var(0.0);
    for device in 0..a.on.len() {
        let both = [(a.on[device], -horizon), (b.on[device], -horizon)];
        let mut first = vec![(b.start, 1.0), (a.start, -1.0), (a_first, -horizon)];
        first.extend(both);
        problem.add_constraint(first.as_slice(), ComparisonOp::Ge, a.seconds[device] - 3.0 * horizon);
        let mut second = vec![(a.start, 1.0), (b.start, -1.0), (a_first, horizon)];
        second.extend(both);
        problem.add_constraint(second.as_slice(), ComparisonOp::Ge, b.seconds[device] - 2.0 * horizon);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Draw, exact};

    /// The general solver and the search of our own find the same optimum.
    #[test]
    fn the_program_and_the_search_agree() {
        let draw =
            Draw { models: (2, 3), devices: (2, 2), shards: (1, 2), shard_tasks: (1, 3), ..Draw::default() };
        let mut compared = 0;
        for seed in 0..60 {
            let mut workload = draw.workload(seed);
            if workload.shard_tasks() > 6 {
                continue;
            }
            if seed % 3 == 0 {
                workload.devices[1].speed = 2.0;
            }
            let found = exact(&workload, 1_000_000).unwrap();
            let milp_s = milp_makespan_s(&workload).unwrap();
            assert!(
                found.proven && (found.makespan_s - milp_s).abs() < 1e-6,
                "seed {seed}: {found:?} {milp_s}"
            );
            compared += 1;
        }
        assert!(compared >= 10, "{compared}");
    }
}
