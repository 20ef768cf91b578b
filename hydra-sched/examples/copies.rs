//! The parameter cache of devices: promoted bytes without a cache and with each replacement rule, relative to
//! the fewest bytes of any replacement in the same schedule; and the same for drawn workloads under a policy
//! that keeps models where they are cached, and one that does not. Reads the workloads in the folder of its
//! results; writes `rows.csv`, `drawn.csv`, a plot and a summary.

mod common;

use std::fmt::Write as _;
use std::fs;

use common::{Run, quantile};
use hydra_sched::{Draw, PolicyKind, Replacement, Simulation, SimulationOptions, Workload, simulate};

const WORKLOADS: [&str; 3] = ["accumulation", "evaluations", "frozen"];
/// `None` without a cache.
const RULES: [Option<Replacement>; 3] = [None, Some(Replacement::LeastRecent), Some(Replacement::NextUse)];
/// The number of workloads of each drawn setting.
const WORKLOADS_DRAWN: u64 = 192;
const COLOURS: [&str; 3] = ["#999999", "#c8553d", "#1b6ca8"];

/// The outcome of a rule on a workload.
struct Row {
    rule: &'static str,
    promoted: f64,
    fewest: f64,
    run: Simulation,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let run = Run::in_folder("copies", "cached-copies")?;
    let mut text = String::from(TEXT);
    let mut csv =
        String::from("workload,copies,promoted_bytes,fewest_bytes,promotions,promotions_saved,makespan_s\n");
    let mut groups = Vec::new();
    for name in WORKLOADS {
        let workload = Workload::from_json(&fs::read_to_string(run.path(&format!("{name}.json")))?)?;
        let rows = RULES.map(|rule| row(&workload, rule, PolicyKind::default()));
        let rows = rows.into_iter().collect::<Result<Vec<Row>, _>>()?;
        for Row { rule, promoted, fewest, run } in &rows {
            let Simulation { promotions, promotions_saved: saved, makespan_s, .. } = run;
            writeln!(
                text,
                "| [{name}]({name}.json) | {rule} | {:.2} GB | {:.4} | {promotions} | {saved} | {makespan_s:.2} s |",
                promoted / 1e9,
                promoted / fewest
            )?;
            writeln!(csv, "{name},{rule},{promoted},{fewest},{promotions},{saved},{makespan_s:.6}")?;
        }
        groups.push((name, rows));
    }
    run.write("rows.csv", &csv)?;
    run.write("copies.svg", &plot(&groups))?;
    text += AFTER;
    text += &drawn(&run)?;
    run.summary("The parameter cache of devices", &text)?;
    Ok(())
}

/// The models of a drawn setting.
#[derive(Clone, Copy, PartialEq)]
enum Models {
    Equal,
    Unlike,
}

/// Returns the rows of the table of drawn workloads.
fn drawn(run: &Run) -> Result<String, Box<dyn std::error::Error>> {
    let mut text = String::from(DRAWN);
    let mut csv = String::from("setting,policy,seed,models,devices,promoted_bytes,fewest_bytes,makespan_s\n");
    for (setting, models) in [("equal models", Models::Equal), ("heavy tails", Models::Unlike)] {
        let mut eager = Vec::new();
        for kind in [PolicyKind::ShardedLrtfEager, PolicyKind::ShardedLrtf] {
            let mut rows = Vec::new();
            for seed in 0..WORKLOADS_DRAWN {
                let workload = keeping_copies(seed, models);
                let Row { promoted, fewest, run, .. } = row(&workload, Some(Replacement::NextUse), kind)?;
                let (models, devices, makespan_s) =
                    (workload.tasks.len(), workload.devices.len(), run.makespan_s);
                writeln!(
                    csv,
                    "{setting},{kind},{seed},{models},{devices},{promoted},{fewest},{makespan_s:.6}"
                )?;
                rows.push((promoted / fewest, promoted, makespan_s));
            }
            if eager.is_empty() {
                eager.clone_from(&rows);
            }
            let sorted = |of: &dyn Fn(usize) -> f64| {
                let mut sorted: Vec<f64> = (0..rows.len()).map(of).collect();
                sorted.sort_by(f64::total_cmp);
                sorted
            };
            let over = sorted(&|index| rows[index].0);
            let [median, p90, worst] = [0.5, 0.9, 1.0].map(|share| quantile(&over, share));
            let many = over.iter().filter(|over| **over > 1.05).count();
            let bytes = quantile(&sorted(&|index| rows[index].1 / eager[index].1), 0.5);
            let spans = sorted(&|index| rows[index].2 / eager[index].2);
            let (span, longest) = (quantile(&spans, 0.5), quantile(&spans, 1.0));
            writeln!(
                text,
                "| {setting} | {kind} | {median:.4} | {p90:.4} | {worst:.4} | {many} | {bytes:.3} | {span:.4} | \
                 {longest:.4} |"
            )?;
        }
    }
    run.write("drawn.csv", &csv)?;
    Ok(text)
}

/// A drawn workload on devices with a parameter cache, each with memory for 3, 4.5 or 6 tenths of all shards.
/// Of each model none, one, two or three quarters are frozen, and a minibatch has one to four microbatches.
fn keeping_copies(seed: u64, models: Models) -> Workload {
    const BYTES: u64 = 100_000_000;
    let draw = Draw {
        models: (3, 10),
        devices: (2, 4),
        shards: (4, 12),
        shard_tasks: (150, 600),
        forward_s: (0.002, 0.02),
        optimizer: 0.2,
        ..Draw::default()
    };
    let mut workload = draw.workload(seed);
    let first = workload.tasks[0].clone();
    for task in &mut workload.tasks {
        if models == Models::Equal {
            *task = hydra_sched::TaskCost { name: task.name.clone(), ..first.clone() };
        }
        task.microbatches = 1 + seed % 4;
        task.minibatches = task.minibatches.div_ceil(task.microbatches);
        task.first_trained = task.shards.len() * (seed as usize / 4 % 4) / 4;
        for shard in &mut task.shards {
            (shard.promote_s, shard.bytes) = (None, Some(BYTES));
        }
    }
    let shards: usize = workload.tasks.iter().map(|task| task.shards.len()).sum();
    let capacity = (shards as u64 * (6 + 3 * (seed % 3)) / 20).max(3);
    for device in &mut workload.devices {
        (device.memory_bytes, device.link_bytes_per_s) = (Some(capacity * BYTES), Some(12e9));
    }
    workload
}

fn row(
    workload: &Workload,
    rule: Option<Replacement>,
    policy: PolicyKind,
) -> Result<Row, Box<dyn std::error::Error>> {
    let mut workload = workload.clone();
    for device in &mut workload.devices {
        (device.keeps_copies, device.replacement) = (rule.is_some(), rule.unwrap_or_default());
    }
    let options = SimulationOptions { record: true, ..SimulationOptions::default() };
    let run = simulate(&workload, &mut *policy.build(0), options)?;
    let bytes = run.promoted_bytes.zip(run.fewest_bytes(&workload));
    let (promoted, fewest) =
        bytes.ok_or("the bytes of every shard and the memory of every device are stated")?;
    let rule = rule.map_or("none", Replacement::name);
    Ok(Row { rule, promoted: promoted as f64, fewest: fewest as f64, run })
}

/// Plots a bar for each rule, with a line at the fewest bytes; the bar without a cache has the full length.
fn plot(groups: &[(&str, Vec<Row>)]) -> String {
    const LEFT: f64 = 150.0;
    const WIDTH: f64 = 480.0;
    let height = 40 + groups.len() * 110;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 900 {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"16\" y=\"24\" \
         font-size=\"15\">Promoted bytes, and the fewest of any replacement (black)</text>\n"
    );
    for (group, (name, rows)) in groups.iter().enumerate() {
        let top = 40.0 + 110.0 * group as f64;
        let most = rows.iter().map(|row| row.promoted).fold(0.0, f64::max);
        let _ = writeln!(svg, "<text x=\"16\" y=\"{}\" font-size=\"14\">{name}</text>", top + 16.0);
        for (index, (row, colour)) in rows.iter().zip(COLOURS).enumerate() {
            let y = top + 22.0 + 26.0 * index as f64;
            let (long, fewest) = (WIDTH * row.promoted / most, LEFT + WIDTH * row.fewest / most);
            let label =
                format!("{:.1} GB, {:.3} times the fewest", row.promoted / 1e9, row.promoted / row.fewest);
            let _ = writeln!(
                svg,
                "<text x=\"32\" y=\"{0}\">{1}</text><rect x=\"{LEFT}\" y=\"{y}\" width=\"{long:.1}\" height=\"18\" \
                 fill=\"{colour}\"/><line x1=\"{fewest:.1}\" x2=\"{fewest:.1}\" y1=\"{y}\" y2=\"{2}\" \
                 stroke=\"black\" stroke-width=\"2\"/><text x=\"{3:.1}\" y=\"{0}\">{label}</text>",
                y + 13.0,
                row.rule,
                y + 18.0,
                LEFT + WIDTH * (row.promoted.max(row.fewest) / most) + 8.0
            );
        }
    }
    svg + "</svg>\n"
}

const TEXT: &str = "Promoted bytes of parameters without a cache on the device, with replacement of the least recently used copy, \
and with replacement of the copy that is worth least by what is known of the future. *Over the fewest* is \
relative to the best possible replacement, which knows the whole resulting schedule: Belady's optimum, because all copies of a \
workload have one size. Virtual time, under the default policy.\n\n\
- *accumulation*: GPT-2 XL in 16 shards of three blocks, four microbatches a minibatch, on a device with memory for half \
of it.\n\
- *evaluations*: two GPT-2 medium in 12 shards, evaluated on 16 batches after every four minibatches, on a device \
with memory for half of them.\n\
- *frozen*: four models of eight shards, the lower half of them frozen, two microbatches a minibatch, on two devices with \
memory for half of the shards each.\n\n\
![The same as bars](copies.svg)\n\n\
| workload | copies | promoted | over the fewest | promotions | saved | makespan |\n\
| --- | --- | --- | --- | --- | --- | --- |\n";

const AFTER: &str = "\nThe future of one model is known, and so is that of models that alternate on one device. On two devices it is not \
certain which of them computes a model next, which the optimum knows: the policy keeps a model where it is cached as \
long as the remaining times are nearly equal.\n\n\
`hydra compare --workload FILE` says the same of any workload on devices that keep copies.\n";

const DRAWN: &str = "\n## Drawn workloads\n\n\
3 to 10 models of 4 to 12 shards on 2 to 4 devices, seeds from 0 on, 192 of each setting: with none, one, two or three quarters \
of each model frozen, one to four microbatches a minibatch, and memory on each device for 0.3, 0.45 or 0.6 of all shards. In \
*equal models* all are equal, as in a grid, and in *heavy tails* each is drawn independently. *Over the fewest* as above; bytes and \
makespan are relative to those of `sharded-lrtf-eager`, which ignores the cache.\n\n\
| setting | policy | over the fewest: median | p90 | worst | over 1.05 | bytes, median | makespan, median | worst |\n\
| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
