//! Strong scaling: the same models on 1 to 64 devices, with 12, 48 and 1,000 models.

mod common;

use std::fmt::Write as _;

use common::{Run, Series, plot};
use hydra_sched::{Draw, Policy, ShardedLrtf, ShardedLrtfEager, SimulationOptions, simulate};

const DEVICES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let run = Run::new("scaling")?;
    let mut rows =
        String::from("models,policy,devices,makespan_s,lower_bound_s,speedup,speedup_of_bound,utilization\n");
    let mut text = String::from(
        "Speedup over one device of drawn models of 4 to 16 shards, 100 to 400 shard tasks, promotions of 0.05 s and \
         an optimizer of a twentieth of a minibatch's compute, of which the host has one. *Possible* is what the lower \
         bound allows: with few models, the longest one and the number of models decide, and with many on more than \
         twenty devices the host's optimizer. It takes steps in the order in which they come, so that on more devices \
         than it keeps up with the models that end last wait behind the others.\n\n| models | policy |",
    );
    DEVICES.iter().try_for_each(|devices| write!(text, " {devices} |"))?;
    write!(text, "\n| --- | --- |{}", " --- |".repeat(DEVICES.len()))?;
    let mut lines = Vec::new();
    for models in [12, 48, 1_000] {
        let draw = Draw {
            models: (models, models),
            devices: (1, 1),
            shards: (4, 16),
            shard_tasks: (100, 400),
            promote_s: 0.05,
            optimizer: 0.05,
            ..Draw::default()
        };
        let workload = draw.workload(7);
        let policies: [Box<dyn Policy>; 2] = [Box::new(ShardedLrtfEager), Box::new(ShardedLrtf)];
        for mut policy in policies {
            let mut line =
                Series { name: format!("{models} models, {}", &policy.name()[8..]), points: Vec::new() };
            let (mut one_s, mut possible) = (0.0, String::new());
            write!(text, "\n| {models} | {} |", policy.name())?;
            for devices in DEVICES {
                let result =
                    simulate(&workload.on_devices(devices), &mut *policy, SimulationOptions::default())?;
                one_s = if devices == 1 { result.makespan_s } else { one_s };
                let (speedup, most) = (one_s / result.makespan_s, one_s / result.bounds.best_s());
                let utilization = result.utilization().iter().sum::<f64>() / devices as f64;
                line.points.push((devices as f64, speedup));
                write!(text, " {speedup:.2} |")?;
                write!(possible, " {most:.2} |")?;
                writeln!(
                    rows,
                    "{models},{},{devices},{:.4},{:.4},{speedup:.4},{most:.4},{utilization:.4}",
                    result.policy,
                    result.makespan_s,
                    result.bounds.best_s()
                )?;
            }
            if result_is_last(policy.name()) {
                write!(text, "\n| {models} | possible |{possible}")?;
            }
            lines.push(line);
        }
    }
    text.push('\n');
    run.write("rows.csv", &rows)?;
    run.write("scaling.svg", &plot("Strong scaling", ("devices", "speedup"), true, &lines))?;
    run.summary("Strong scaling", &text)?;
    Ok(())
}

/// Returns whether this is the last policy, after which the possible speedup, equal for all policies, is
/// printed.
fn result_is_last(policy: &str) -> bool {
    policy == ShardedLrtf.name()
}
