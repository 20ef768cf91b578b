//! The copies that stay on devices: what is promoted where none stays, and under each rule of which one goes, over the
//! fewest bytes that any choice would promote in the same schedule. Reads the workloads beside its results; writes
//! `rows.csv`, a picture and a summary.

mod common;

use std::fmt::Write as _;
use std::fs;

use common::Run;
use hydra_sched::{PolicyKind, Replacement, Simulation, SimulationOptions, Workload, simulate};

const WORKLOADS: [&str; 3] = ["accumulation", "evaluations", "frozen"];
/// `None` where no copy stays.
const RULES: [Option<Replacement>; 3] = [None, Some(Replacement::LeastRecent), Some(Replacement::NextUse)];
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
        let rows = RULES.map(|rule| row(&workload, rule));
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
    run.write("copies.svg", &picture(&groups))?;
    run.summary("Copies that stay on devices", &(text + AFTER))?;
    Ok(())
}

fn row(workload: &Workload, rule: Option<Replacement>) -> Result<Row, Box<dyn std::error::Error>> {
    let mut workload = workload.clone();
    for device in &mut workload.devices {
        (device.keeps_copies, device.replacement) = (rule.is_some(), rule.unwrap_or_default());
    }
    let options = SimulationOptions { record: true, ..SimulationOptions::default() };
    let run = simulate(&workload, &mut *PolicyKind::default().build(0), options)?;
    let bytes = run.promoted_bytes.zip(run.fewest_bytes(&workload));
    let (promoted, fewest) =
        bytes.ok_or("the bytes of every shard and the memory of every device are stated")?;
    let rule = rule.map_or("none", Replacement::name);
    Ok(Row { rule, promoted: promoted as f64, fewest: fewest as f64, run })
}

/// A bar for each rule, and on each a line at the fewest bytes, a workload's as long as what is promoted without copies.
fn picture(groups: &[(&str, Vec<Row>)]) -> String {
    const LEFT: f64 = 150.0;
    const WIDTH: f64 = 480.0;
    let height = 40 + groups.len() * 110;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 900 {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"16\" y=\"24\" \
         font-size=\"15\">Bytes promoted, and the fewest that any choice of copies would promote (black)</text>\n"
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

const TEXT: &str = "Bytes of parameters that are promoted where no copy stays on a device, where the copy goes that was used \
longest ago, and where the one goes that is worth least by what is known of the future. *Over the fewest* is \
over what no choice could do better, had it known the whole schedule that came of it: Belady's optimum, for all copies of a \
workload are of one size. Virtual time, under the default policy.\n\n\
- *accumulation*: GPT-2 XL in 16 shards of three blocks, four microbatches a minibatch, on a device with room for half \
of it.\n\
- *evaluations*: two GPT-2 medium in 12 shards, of which 16 batches are evaluated after every four minibatches, on a device \
with room for half of them.\n\
- *frozen*: four models of eight shards, the lower half of them frozen, two microbatches a minibatch, on two devices with \
room for half of the shards each.\n\n\
![The same as bars](copies.svg)\n\n\
| workload | copies | promoted | over the fewest | promotions | saved | makespan |\n\
| --- | --- | --- | --- | --- | --- | --- |\n";

const AFTER: &str = "\nOne model's future is known, and so is that of models which take turns on one device. On two devices it is not \
known which of them computes a model next, which the optimum knows.\n\n\
`hydra compare --workload FILE` says the same of any workload on devices that keep copies.\n";
