//! The default policy's gap to the lower bound if one model is longer than an even share of all work. Writes
//! `rows.csv`, the first twelve workloads for `hydra simulate`, and a summary.

mod common;

use std::fmt::Write as _;

use common::{Run, quantile};
use hydra_sched::{Draw, PolicyKind, SimulationOptions, simulate};

/// The number of workloads of each setting.
const WORKLOADS: usize = 120;
/// The number of workloads that are written to files.
const WRITTEN: usize = 12;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let run = Run::new("tails")?;
    let few = Draw::few_devices();
    let many = Draw { promote_s: few.promote_s, optimizer: few.optimizer, ..Draw::default() };
    let mut rows = String::from("setting,policy,seed,models,devices,makespan_s,lower_bound_s,gap\n");
    let mut text = String::from(TEXT);
    let mut files = String::from("\n| workload | sharded-lrtf | sharded-lrtf-eager |\n| --- | --- | --- |\n");
    for (setting, draw) in [("few devices", few), ("many devices", many), ("no transfers", Draw::default())] {
        let workloads: Vec<_> = draw.with_a_long_model().take(WORKLOADS).collect();
        let mut all_gaps = Vec::new();
        for kind in [PolicyKind::ShardedLrtf, PolicyKind::ShardedLrtfEager] {
            let mut gaps = Vec::new();
            for (seed, workload) in &workloads {
                let result = simulate(workload, &mut *kind.build(0), SimulationOptions::default())?;
                let (models, devices) = (workload.tasks.len(), workload.devices.len());
                let (makespan_s, bound_s, gap) = (result.makespan_s, result.bounds.best_s(), result.gap());
                writeln!(
                    rows,
                    "{setting},{kind},{seed},{models},{devices},{makespan_s:.6},{bound_s:.6},{gap:.6}"
                )?;
                gaps.push(gap);
            }
            let mut sorted = gaps.clone();
            sorted.sort_by(f64::total_cmp);
            let over = |most: f64| gaps.iter().filter(|gap| **gap > most).count();
            let [median, p90, worst] = [0.5, 0.9, 1.0].map(|share| quantile(&sorted, share));
            writeln!(
                text,
                "| {setting} | {kind} | {median:.4} | {p90:.4} | {worst:.4} | {} | {} |",
                over(1.01),
                over(1.05)
            )?;
            all_gaps.push(gaps);
        }
        if setting == "few devices" {
            for (index, (seed, workload)) in workloads.iter().enumerate().take(WRITTEN) {
                run.write(&format!("workload-{seed}.json"), &workload.to_json())?;
                let [default, eager] = [0, 1].map(|policy: usize| all_gaps[policy][index]);
                writeln!(
                    files,
                    "| [workload-{seed}.json](workload-{seed}.json) | {default:.4} | {eager:.4} |"
                )?;
            }
        }
    }
    run.write("rows.csv", &rows)?;
    run.summary("Heavy tails", &(text + FILES + &files))?;
    Ok(())
}

const TEXT: &str = "Makespan over the best lower bound on drawn workloads in which one model is longer than an even share \
of all work on the devices, with the defaults of `hydra simulate`: the first 120 of each setting, from seed 0 on. *Few \
devices*: 3 to 16 models of 1 to 12 shards on 2 to 4 devices, promotions of 0.05 s, and a host optimizer of a twentieth \
of a minibatch's compute. *Many devices*: the same with 2 to 64 models of 1 to 50 shards on 1 to 16 devices. *No \
transfers*: as many devices, nothing to promote and nothing to step.\n\n\
| setting | policy | median | p90 | worst | over 1.01 | over 1.05 |\n| --- | --- | --- | --- | --- | --- | --- |\n";

const FILES: &str = "\nThe remaining gap of `sharded-lrtf` is the wait of the long model's steps for those of others \
in the host's single queue, which no policy controls.\n\n\
## The first twelve on few devices\n\n\
`cargo run -p hydra-bench -- simulate --workload hydra-bench/runs/sched-tails/workload-SEED.json` says the same of each.\n";
