//! The paper's mixed-integer program, solved by general solvers, for comparison.

use super::program::{Program, ShardTask};
use super::{SimulationOptions, Workload, simulate, without_transfers};
use crate::policy::PolicyKind;

/// Returns the minimum makespan by the mixed-integer program in docs/scheduling.md, in which promotions and
/// optimizers take no time, solved by microlp; `None` if the solver gives up, and for a workload that
/// violates a rule of [`Workload::check`].
///
/// The program has a binary variable for each shard task and device and for each pair of shard tasks of
/// different models. It is used to check [`exact`](crate::exact()).
#[cfg(feature = "milp")]
pub fn milp_makespan_s(workload: &Workload) -> Option<f64> {
    use microlp::{ComparisonOp, OptimizationDirection, Problem, SolveOutcome, Variable};
    let program = Formulation::of(workload)?;
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let variable = |column: &Column| match column.kind {
        Kind::Time { least_s } => problem.add_var(column.cost, (least_s, f64::INFINITY)),
        Kind::Binary => problem.add_binary_var(column.cost),
    };
    let variables: Vec<Variable> = program.columns.iter().map(variable).collect();
    for row in &program.rows {
        let terms: Vec<(Variable, f64)> =
            row.terms.iter().map(|(index, f)| (variables[*index], *f)).collect();
        let rule = if row.equal { ComparisonOp::Eq } else { ComparisonOp::Ge };
        problem.add_constraint(terms.as_slice(), rule, row.least);
    }
    match problem.solve().ok()? {
        SolveOutcome::Solution(solution) => Some(solution.objective()),
        SolveOutcome::Interrupted(_) => None,
    }
}

/// The same, solved by HiGHS on one thread; `None` if no optimum is proven within this many nodes of its
/// branch and bound.
#[cfg(feature = "highs")]
pub fn highs_makespan_s(workload: &Workload, most_nodes: i32) -> Option<f64> {
    use highs::{Col, HighsModelStatus, RowProblem, Sense};
    let program = Formulation::of(workload)?;
    let mut problem = RowProblem::default();
    let column = |column: &Column| match column.kind {
        Kind::Time { least_s } => problem.add_column(column.cost, least_s..),
        Kind::Binary => problem.add_integer_column(column.cost, 0..=1),
    };
    let columns: Vec<Col> = program.columns.iter().map(column).collect();
    for row in &program.rows {
        let terms: Vec<(Col, f64)> = row.terms.iter().map(|(index, f)| (columns[*index], *f)).collect();
        match row.equal {
            true => problem.add_row(row.least..=row.least, terms),
            false => problem.add_row(row.least.., terms),
        };
    }
    let mut model = problem.try_optimise(Sense::Minimise).ok()?;
    model.make_quiet();
    model.try_set_option("threads", 1).ok()?;
    model.try_set_option("mip_max_nodes", most_nodes).ok()?;
    for tolerance in ["mip_rel_gap", "mip_abs_gap"] {
        model.try_set_option(tolerance, 0.0).ok()?;
    }
    for tolerance in ["mip_feasibility_tolerance", "primal_feasibility_tolerance"] {
        model.try_set_option(tolerance, 1e-9).ok()?;
    }
    let solved = model.try_solve().ok()?;
    (solved.status() == HighsModelStatus::Optimal).then(|| solved.objective_value())
}

/// The program as columns and rows, independent of the solver: the sum of the costs is minimized.
struct Formulation {
    columns: Vec<Column>,
    rows: Vec<Row>,
    horizon_s: f64,
}

struct Column {
    kind: Kind,
    cost: f64,
}

enum Kind {
    Time { least_s: f64 },
    Binary,
}

/// A linear combination of columns that is at least `least`, or equal to it.
struct Row {
    terms: Vec<(usize, f64)>,
    least: f64,
    equal: bool,
}

/// A shard task with the indices of its columns.
struct Task {
    model: usize,
    /// Seconds, per device.
    seconds: Vec<f64>,
    start: usize,
    /// Per device: the column that is 1 if it runs there.
    on: Vec<usize>,
}

impl Formulation {
    fn of(workload: &Workload) -> Option<Self> {
        let horizon_s = horizon_s(workload)?;
        let mut program = Self { columns: Vec::new(), rows: Vec::new(), horizon_s };
        let end = program.column(Kind::Time { least_s: 0.0 }, 1.0);
        let tasks = program.tasks(workload);
        for (index, task) in tasks.iter().enumerate() {
            let one = task.on.iter().map(|on| (*on, 1.0)).collect();
            program.rows.push(Row { terms: one, least: 1.0, equal: true });
            // The end of the run is no earlier than that of the task.
            program.at_least(after(task, end), 0.0);
            if let Some(next) = tasks.get(index + 1).filter(|next| next.model == task.model) {
                program.at_least(after(task, next.start), 0.0);
            }
            for other in tasks[index + 1..].iter().filter(|other| other.model != task.model) {
                program.isolate(task, other);
            }
        }
        Some(program)
    }

    fn column(&mut self, kind: Kind, cost: f64) -> usize {
        self.columns.push(Column { kind, cost });
        self.columns.len() - 1
    }

    fn at_least(&mut self, terms: Vec<(usize, f64)>, least: f64) {
        self.rows.push(Row { terms, least, equal: false });
    }

    fn tasks(&mut self, workload: &Workload) -> Vec<Task> {
        let mut tasks = Vec::new();
        for (model, cost) in workload.tasks.iter().enumerate() {
            for ShardTask { minibatch, kind, shard, .. } in Program::of(cost).tasks() {
                let seconds = workload.seconds(model, minibatch, kind, shard);
                tasks.push(Task {
                    model,
                    seconds: workload.devices.iter().map(|device| seconds / device.speed).collect(),
                    start: self.column(Kind::Time { least_s: cost.arrival_s }, 0.0),
                    on: workload.devices.iter().map(|_| self.column(Kind::Binary, 0.0)).collect(),
                });
            }
        }
        tasks
    }

    /// Two shard tasks on one device: one ends before the other starts.
    fn isolate(&mut self, a: &Task, b: &Task) {
        let a_first = self.column(Kind::Binary, 0.0);
        let horizon_s = self.horizon_s;
        for device in 0..a.on.len() {
            let both = [(a.on[device], -horizon_s), (b.on[device], -horizon_s)];
            let mut first = vec![(b.start, 1.0), (a.start, -1.0), (a_first, -horizon_s)];
            first.extend(both);
            self.at_least(first, a.seconds[device] - 3.0 * horizon_s);
            let mut second = vec![(a.start, 1.0), (b.start, -1.0), (a_first, horizon_s)];
            second.extend(both);
            self.at_least(second, b.seconds[device] - 2.0 * horizon_s);
        }
    }
}

/// A time by which everything can be over: Sharded-LRTF's makespan, with some slack for rounding.
fn horizon_s(workload: &Workload) -> Option<f64> {
    let options = SimulationOptions { prefetch: false, record: false };
    let run = simulate(&without_transfers(workload), &mut *PolicyKind::ShardedLrtf.build(0), options);
    Some(run.ok()?.makespan_s * (1.0 + 1e-6))
}

/// The time from the task's end to `then`.
fn after(task: &Task, then: usize) -> Vec<(usize, f64)> {
    let on = task.on.iter().zip(&task.seconds).map(|(on, seconds)| (*on, -seconds));
    [(then, 1.0), (task.start, -1.0)].into_iter().chain(on).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulator::{Draw, exact};

    /// Cases with at most this many shard tasks; in every third one of the devices is twice as fast.
    fn small(draw: Draw, seeds: u64, most: u64) -> impl Iterator<Item = (u64, Workload)> {
        let cases = (0..seeds).map(move |seed| (seed, draw.workload(seed)));
        cases.filter(move |(_, workload)| workload.shard_tasks() <= most).map(|(seed, mut workload)| {
            if seed % 3 == 0 {
                workload.devices[1].speed = 2.0;
            }
            (seed, workload)
        })
    }

    fn draw() -> Draw {
        Draw { models: (2, 3), devices: (2, 2), shards: (1, 2), shard_tasks: (1, 3), ..Draw::default() }
    }

    /// Checks that the solver finds the optimum of Hydra's own search.
    fn agrees(
        cases: impl Iterator<Item = (u64, Workload)>,
        solve: impl Fn(&Workload) -> Option<f64>,
    ) -> usize {
        let compared = cases.map(|(seed, workload)| {
            let found = exact(&workload, 1_000_000).unwrap();
            let milp_s = solve(&workload).unwrap();
            let close = (found.makespan_s - milp_s).abs() < 1e-6 * found.makespan_s;
            assert!(found.proven && close, "seed {seed}: {found:?} {milp_s}");
        });
        compared.count()
    }

    #[cfg(feature = "milp")]
    #[test]
    fn microlp_and_the_search_agree() {
        let compared = agrees(small(draw(), 60, 6), milp_makespan_s);
        assert!(compared >= 10, "{compared}");
    }

    #[cfg(feature = "highs")]
    #[test]
    fn highs_and_the_search_agree() {
        let larger = Draw { models: (2, 4), devices: (2, 3), shard_tasks: (1, 4), ..draw() };
        let compared = agrees(small(larger, 60, 9), |workload| highs_makespan_s(workload, 1_000_000));
        assert!(compared >= 20, "{compared}");
    }

    /// Graham's worst case of longest-first, seven jobs on three devices: 9, not 11.
    #[cfg(feature = "highs")]
    #[test]
    fn highs_finds_what_longest_first_misses() {
        use crate::simulator::{DeviceCost, ShardCost, TaskCost};
        let job =
            |(index, s): (usize, f64)| TaskCost::new(index.to_string(), 1, vec![ShardCost::new(0.0, s, 0.0)]);
        let tasks = [5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0].into_iter().enumerate().map(job).collect();
        let workload = Workload::new(tasks, vec![DeviceCost::default(); 3]);
        assert!((highs_makespan_s(&workload, 1_000_000).unwrap() - 9.0).abs() < 1e-6);
        assert_eq!(highs_makespan_s(&Workload { tasks: Vec::new(), ..workload }, 1), None);
    }
}
