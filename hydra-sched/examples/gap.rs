//! The gap of policies to the lower bound on 1,000 drawn workloads, and that of Sharded-LRTF to the
//! optimum on small ones. Writes `rows.csv`, plots and a summary.

mod common;

use std::fmt::Write as _;
use std::io;

use common::{Run, distribution, plot, quantile};
use hydra_sched::{
    Draw, LowerBounds, Policy, PolicyKind, ShardedLrtf, ShardedLrtfEager, SimulationOptions, Variation,
    Workload, exact, simulate,
};

const WORKLOADS: u64 = 1_000;
const SMALL: u64 = 400;

/// A policy in a setting.
struct Case {
    setting: &'static str,
    draw: Draw,
    prefetch: bool,
    policy: fn(u64) -> Box<dyn Policy>,
    /// The change to the drawn workload.
    change: fn(&mut Workload),
}

fn cases() -> Vec<Case> {
    let plain = Draw::default();
    let full = Draw { promote_s: 0.05, optimizer: 0.05, ..plain };
    let lrtf: fn(u64) -> Box<dyn Policy> = |_| Box::new(ShardedLrtf);
    let eager: fn(u64) -> Box<dyn Policy> = |_| Box::new(ShardedLrtfEager);
    let case = |setting, draw, prefetch, policy| Case { setting, draw, prefetch, policy, change: |_| {} };
    let changed = |setting, change| Case { setting, draw: full, prefetch: true, policy: lrtf, change };
    vec![
        case("decide when free", plain, false, lrtf),
        case("decide when free", plain, false, |_| PolicyKind::Fifo.build(0)),
        case("decide when free", plain, false, |_| PolicyKind::Srtf.build(0)),
        case("decide when free", plain, false, |seed| PolicyKind::Random.build(seed)),
        case("decide when free", plain, false, |_| PolicyKind::RoundRobin.build(0)),
        case("double buffering", full, true, lrtf),
        case("double buffering", full, true, eager),
        case("double buffering", full, true, |_| PolicyKind::Fifo.build(0)),
        changed("estimates wrong by 2", |workload| {
            for (index, task) in workload.tasks.iter_mut().enumerate() {
                task.estimate_factor = if index % 2 == 0 { 2.0 } else { 0.5 };
            }
        }),
        changed("half of the costs drift to double", |workload| {
            workload.tasks.iter_mut().step_by(2).for_each(|task| task.drift = 1.0);
        }),
        changed("times vary by half", |workload| {
            workload.variation = Some(Variation { seed: 1, relative: 0.5 });
        }),
    ]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let run = Run::new("gap")?;
    let mut rows =
        String::from("setting,policy,seed,models,devices,shard_tasks,makespan_s,lower_bound_s,gap\n");
    let mut text = format!(
        "Makespan over the best lower bound on {WORKLOADS} drawn workloads (`Draw::default()`): 2 to 64 models of 1 to \
         50 shards, heavy-tailed lengths of 100 to 5,000 shard tasks, 1 to 16 devices and never more than models. \
         *Decide when free*: nothing to promote, the paper's model. *Double buffering*: devices commit to the next \
         shard task when one starts; each promotion takes 0.05 s (the shortest forward takes 0.08 s) and the host \
         optimizer a twentieth of a minibatch's compute. The last three add initial estimates that are wrong by a factor of two \
         in either direction, costs that grow, and times drawn between half and one and a half of the stated ones; the \
         policy learns of them only from finished shard tasks, while the bound knows them.\n\n\
         | setting | policy | median | p90 | p99 | worst |\n| --- | --- | --- | --- | --- | --- |\n"
    );
    let mut lines = Vec::new();
    for case in cases() {
        let (gaps, name) = gaps(&case, &mut rows)?;
        let [median, p90, p99] = [0.5, 0.9, 0.99].map(|share| quantile(&gaps, share));
        let worst = gaps[gaps.len() - 1];
        writeln!(text, "| {} | {name} | {median:.4} | {p90:.4} | {p99:.4} | {worst:.4} |", case.setting)?;
        lines.push(distribution(format!("{}: {name}", case.setting), &gaps));
    }
    run.write(
        "gap.svg",
        &plot("Makespan over the lower bound", ("gap", "share of workloads"), false, &lines),
    )?;
    run.write("rows.csv", &rows)?;
    text += &optimum(&run)?;
    run.summary("Gaps of the policies", &text)?;
    Ok(())
}

fn gaps(case: &Case, rows: &mut String) -> Result<(Vec<f64>, &'static str), Box<dyn std::error::Error>> {
    let mut gaps = Vec::new();
    let mut name = "";
    for seed in 0..WORKLOADS {
        let mut workload = case.draw.workload(seed);
        (case.change)(&mut workload);
        let options = SimulationOptions { prefetch: case.prefetch, record: false };
        let result = simulate(&workload, &mut *(case.policy)(seed), options)?;
        name = result.policy;
        let (models, devices, gap) = (workload.tasks.len(), workload.devices.len(), result.gap());
        writeln!(
            rows,
            "{},{name},{seed},{models},{devices},{},{:.6},{:.6},{gap:.6}",
            case.setting,
            result.shard_tasks,
            result.makespan_s,
            result.bounds.best_s()
        )?;
        gaps.push(gap);
    }
    gaps.sort_by(f64::total_cmp);
    Ok((gaps, name))
}

fn optimum(run: &Run) -> io::Result<String> {
    let draw =
        Draw { models: (2, 5), devices: (2, 3), shards: (1, 3), shard_tasks: (1, 6), ..Draw::default() };
    let mut rows = String::from(
        "seed,models,devices,shard_tasks,optimum_s,lrtf_s,lower_bound_s,lrtf_gap,bound_gap,nodes\n",
    );
    let (mut lrtf, mut bound, mut given_up) = (Vec::new(), Vec::new(), 0);
    for seed in 0..SMALL {
        let workload = draw.workload(seed);
        let options = SimulationOptions { prefetch: false, record: false };
        let found = exact(&workload, 100_000).map_err(io::Error::other)?;
        if !found.proven {
            given_up += 1;
            continue;
        }
        let result = simulate(&workload, &mut ShardedLrtf, options).map_err(io::Error::other)?;
        let bound_s = LowerBounds::of(&workload, false).map_err(io::Error::other)?.best_s();
        let gaps = (result.makespan_s / found.makespan_s, found.makespan_s / bound_s);
        let _ = writeln!(
            rows,
            "{seed},{},{},{},{:.6},{:.6},{bound_s:.6},{:.6},{:.6},{}",
            workload.tasks.len(),
            workload.devices.len(),
            workload.shard_tasks(),
            found.makespan_s,
            result.makespan_s,
            gaps.0,
            gaps.1,
            found.nodes
        );
        lrtf.push(gaps.0);
        bound.push(gaps.1);
    }
    lrtf.sort_by(f64::total_cmp);
    bound.sort_by(f64::total_cmp);
    let best = lrtf.iter().filter(|gap| **gap <= 1.0 + 1e-9).count();
    let lines = [
        distribution("Sharded-LRTF over optimum".into(), &lrtf),
        distribution("optimum over bound".into(), &bound),
    ];
    run.write("optimum.svg", &plot("Small cases", ("ratio", "share of cases"), false, &lines))?;
    run.write("optimum.csv", &rows)?;
    let line = |name: &str, gaps: &[f64]| {
        let [median, p90, p99, worst] = [0.5, 0.9, 0.99, 1.0].map(|share| quantile(gaps, share));
        format!("| {name} | {median:.4} | {p90:.4} | {p99:.4} | {worst:.4} |\n")
    };
    Ok(format!(
        "\n## Against the optimum\n\n{} small cases of 2 to 5 models with 1 to 6 shard tasks each, on 2 or 3 devices, \
         solved to proven optimality ({given_up} more of {SMALL} were given up after 100,000 partial schedules). \
         Sharded-LRTF is optimal in {best} of them. With so few shard tasks a model, one shard task more or less is a \
         large part of the makespan.\n\n| ratio | median | p90 | p99 | worst |\n| --- | --- | --- | --- | --- |\n{}{}",
        lrtf.len(),
        line("Sharded-LRTF over the optimum", &lrtf),
        line("the optimum over the lower bound", &bound)
    ))
}
