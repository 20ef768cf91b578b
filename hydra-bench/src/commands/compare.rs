//! `hydra compare`: training strategies and scheduling policies on one workload.

use crate::simulator::{
    CopiesRow, Measured, SimulatorArgs, compare_copies, gantt, largest, load, mean, measure,
};
use anyhow::{Context, Result};
use clap::Args;
use hydra_core::ByteSize;
use hydra_run::plots::bars::{self, Bar};
use hydra_run::plots::schedule;
use hydra_run::run_dir::{check_not_read, could_not, remove_file};
use hydra_run::settings::values;
use hydra_run::terminal::{Outcome, Table, Unit, fixed, print, tell};
use hydra_sched::{
    LowerBounds, PolicyKind, PowerModel, Row, SimulationOptions, Strategy, TaskCost, Workload, compare,
};
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};

/// The files in the directory of `--out`.
const FILES: [&str; 6] =
    ["compare.json", "runtime.svg", "utilization.svg", "policies.svg", "copies.svg", "schedule.svg"];

/// `hydra compare`.
#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    #[command(flatten)]
    pub(crate) simulator: SimulatorArgs,
    /// Power draw of a device while it computes, in watts
    #[arg(long, value_name = "W", default_value = "300", value_parser = values::watts, allow_hyphen_values = true)]
    pub(crate) busy_watts: f64,
    /// Power draw of an idle device, in watts
    #[arg(long, value_name = "W", default_value = "60", value_parser = values::watts, allow_hyphen_values = true)]
    pub(crate) idle_watts: f64,
    /// Write the result as JSON, and plots of it, into this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Print the result as JSON, and nothing else, on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// Compares, draws and prints.
pub(crate) fn run(args: &CompareArgs) -> Result<Outcome> {
    if let Some(dir) = &args.out {
        let read: [(&str, &Path); 1] = [("--workload", &args.simulator.workload)];
        FILES.iter().try_for_each(|name| check_not_read("--out", &dir.join(name), &read))?;
    }
    let workload = load(&args.simulator)?;
    let power = PowerModel { busy_w: args.busy_watts, idle_w: args.idle_watts };
    let rows = compare(&workload, false)?;
    let seed = args.simulator.seed.unwrap_or(0);
    let drawn = args.out.is_some() && drawable(&workload);
    let (mut policies, mut plot) = (Vec::new(), None);
    for policy in PolicyKind::ALL {
        let record = drawn && policy == PolicyKind::default();
        let options = SimulationOptions { record, ..SimulationOptions::default() };
        let measured = measure(&workload, policy, seed, options)?;
        if record {
            plot = Some(gantt(&workload, &measured.run)?);
        }
        policies.push(PolicyRow::new(policy, &measured));
    }
    let copies = compare_copies(&workload, seed)?;
    let report = ComparisonReport::new(&workload, power, &rows, (policies, copies))?;
    let json = serde_json::to_string_pretty(&report).context("the result could not be written as JSON")?;
    print(&if args.json { format!("{json}\n") } else { report.render() })?;
    if let Some(dir) = &args.out {
        report.write(dir, &json, plot.as_deref())?;
    }
    Ok(Outcome::Done)
}

/// Returns true if the schedule can be drawn; prints a note with the reason if not.
fn drawable(workload: &Workload) -> bool {
    let checked = schedule::check_size(workload.devices.len(), workload.shard_tasks());
    if let Err(error) = &checked {
        tell(&format!("note: schedule.svg is not drawn: {error}"));
    }
    checked.is_ok()
}

#[derive(Debug, Serialize)]
struct ComparisonReport {
    devices: usize,
    tasks: usize,
    shard_tasks: u64,
    /// The parts of the workload that the strategies ignore and the policies simulate.
    strategies_leave_out: Vec<&'static str>,
    power: PowerModel,
    /// The lower bound for the policies; strategies may follow other rules than the simulator.
    lower_bound_s: f64,
    bounds: LowerBounds,
    strategies: Vec<StrategyRow>,
    policies: Vec<PolicyRow>,
    /// Caches of parameters under the default policy, if devices have them.
    copies: Vec<CopiesRow>,
}

#[derive(Debug, Serialize)]
struct StrategyRow {
    strategy: &'static str,
    #[serde(flatten)]
    figures: Option<Figures>,
    does_not_fit: Option<String>,
    assumptions: &'static str,
    leaves_idle: &'static str,
}

impl StrategyRow {
    /// The idle share of the devices, or what does not fit, with the reason.
    fn why(&self) -> String {
        let Self { strategy, leaves_idle, .. } = self;
        match (&self.figures, &self.does_not_fit) {
            (Some(figures), _) if figures.utilization < 0.9995 => {
                format!("  {strategy} leaves {} idle: {leaves_idle}\n", percent(1.0 - figures.utilization))
            }
            (Some(_), _) => format!("  {strategy} leaves nothing idle\n"),
            (None, Some(why)) => format!("  {strategy} does not fit: {why}\n"),
            (None, None) => String::new(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Figures {
    runtime_s: f64,
    utilization: f64,
    device_hours: f64,
    energy_kwh: f64,
    moved_bytes: Option<u64>,
    sharp_is_faster_by: f64,
}

#[derive(Debug, Serialize)]
struct PolicyRow {
    policy: &'static str,
    makespan_s: f64,
    over_bound: f64,
    utilization: f64,
    promotions: u64,
    promotions_saved: u64,
    decision_ns: f64,
}

impl PolicyRow {
    fn new(policy: PolicyKind, Measured { run, decision_ns }: &Measured) -> Self {
        Self {
            policy: policy.name(),
            makespan_s: run.makespan_s,
            over_bound: run.gap(),
            utilization: mean(&run.utilization()),
            promotions: run.promotions,
            promotions_saved: run.promotions_saved,
            decision_ns: *decision_ns,
        }
    }
}

fn strategy_row(row: &Row, sharp_s: f64, power: PowerModel) -> StrategyRow {
    let figures = row.outcome.as_ref().ok().map(|outcome| Figures {
        runtime_s: outcome.runtime_s,
        utilization: outcome.utilization(),
        device_hours: outcome.device_hours(),
        energy_kwh: outcome.energy_kwh(power),
        moved_bytes: outcome.moved_bytes,
        sharp_is_faster_by: if sharp_s > 0.0 { outcome.runtime_s / sharp_s } else { 1.0 },
    });
    let does_not_fit = row.outcome.as_ref().err().map(ToString::to_string);
    let (strategy, assumptions) = (row.strategy.name(), row.strategy.assumptions());
    StrategyRow { strategy, figures, does_not_fit, assumptions, leaves_idle: row.strategy.leaves_idle() }
}

impl ComparisonReport {
    fn new(
        workload: &Workload,
        power: PowerModel,
        rows: &[Row],
        (policies, copies): (Vec<PolicyRow>, Vec<CopiesRow>),
    ) -> Result<Self> {
        let bounds = LowerBounds::of(workload, true)?;
        let sharp = rows.iter().find(|row| row.strategy == Strategy::Sharp);
        let sharp_s = sharp.and_then(|row| row.outcome.as_ref().ok()).map_or(0.0, |sharp| sharp.runtime_s);
        Ok(Self {
            devices: workload.devices.len(),
            tasks: workload.tasks.len(),
            shard_tasks: workload.shard_tasks(),
            strategies_leave_out: skipped(workload),
            power,
            lower_bound_s: bounds.best_s(),
            bounds,
            strategies: rows.iter().map(|row| strategy_row(row, sharp_s, power)).collect(),
            policies,
            copies,
        })
    }

    fn unit(&self) -> Unit {
        let runtimes = self.strategies.iter().filter_map(|row| row.figures.as_ref()).map(|f| f.runtime_s);
        Unit::of(self.policies.iter().map(|row| row.makespan_s).chain(runtimes).fold(0.0, f64::max))
    }

    fn render(&self) -> String {
        let unit = self.unit();
        let (bound, name) = (unit.show(self.lower_bound_s), largest(&self.bounds));
        let PowerModel { busy_w, idle_w } = self.power;
        let skipped = match self.strategies_leave_out.as_slice() {
            [] => String::new(),
            skipped => format!("The strategies ignore the workload's {}.\n", skipped.join(", ")),
        };
        let why: String = self.strategies.iter().map(StrategyRow::why).collect();
        format!(
            "{} tasks with {} shard tasks on {} devices\n\n{}\nReasons:\n{why}\nEnergy: {busy_w} W for a computing device, {idle_w} W \
             for an idle one. docs/scheduling.md\nlists the assumptions of each strategy, as does the result with --json.\n\
             {skipped}\nPolicies of SHARP; no schedule is shorter than {bound} ({name}):\n\n{}",
            self.tasks,
            self.shard_tasks,
            self.devices,
            self.strategy_table(unit),
            self.policy_table(unit),
        ) + &self.copies_table(unit)
    }

    fn strategy_table(&self, unit: Unit) -> String {
        let names = "<strategy|>runtime|>utilization|>device-hours|>kWh|>speedup of SHARP";
        let mut table = Table::new(names.split('|'));
        for row in &self.strategies {
            let mut cells = vec![row.strategy.to_owned()];
            match &row.figures {
                Some(figures) => cells.extend([
                    unit.show(figures.runtime_s),
                    percent(figures.utilization),
                    significant(figures.device_hours),
                    significant(figures.energy_kwh),
                    fixed(figures.sharp_is_faster_by, 2),
                ]),
                None => cells.extend(["-"; 5].map(str::to_owned)),
            }
            table.row(cells);
        }
        table.render()
    }

    fn policy_table(&self, unit: Unit) -> String {
        let names = "<policy|>makespan|>over the bound|>utilization|>promotions|>saved|>ns per decision";
        let mut table = Table::new(names.split('|'));
        for row in &self.policies {
            table.row(vec![
                row.policy.to_owned(),
                unit.show(row.makespan_s),
                fixed(row.over_bound, 4),
                percent(row.utilization),
                row.promotions.to_string(),
                row.promotions_saved.to_string(),
                format!("{:.0}", row.decision_ns),
            ]);
        }
        table.render()
    }

    fn copies_table(&self, unit: Unit) -> String {
        let names = "<cache|>promoted|>over the minimum|>promotions|>saved|>makespan";
        let mut table = Table::new(names.split('|'));
        for row in &self.copies {
            table.row(vec![
                row.copies.to_owned(),
                ByteSize(row.promoted_bytes).to_string(),
                fixed(row.over_fewest, 4),
                row.promotions.to_string(),
                row.promotions_saved.to_string(),
                unit.show(row.makespan_s),
            ]);
        }
        match self.copies.is_empty() {
            true => String::new(),
            false => format!(
                "\nParameter caches under {}; the minimum is the fewest bytes that any eviction rule promotes in the same \
                 schedule:\n\n{}",
                PolicyKind::default(),
                table.render()
            ),
        }
    }

    /// Writes the result and the plots into a directory, which is created if it is missing.
    fn write(&self, dir: &Path, json: &str, schedule: Option<&str>) -> Result<()> {
        fs::create_dir_all(dir).with_context(|| format!("the directory {}", could_not(dir, "created")))?;
        let write = |name: &str, text: &str| {
            let file = dir.join(name);
            fs::write(&file, text).with_context(|| could_not(&file, "written"))
        };
        let unit = self.unit();
        let on = format!("{} tasks on {} devices", self.tasks, self.devices);
        let runtime = self.bars(|figures| (figures.runtime_s, unit.show(figures.runtime_s)));
        let used = self.bars(|figures| (figures.utilization, percent(figures.utilization)));
        // The bar is the part above the bound; its label has the whole ratio.
        let gap = |row: &PolicyRow| {
            let label = format!("{} times the bound", fixed(row.over_bound, 4));
            Bar { name: row.policy.to_owned(), value: Some((row.over_bound - 1.0).max(0.0)), label }
        };
        let gaps: Vec<Bar> = self.policies.iter().map(gap).collect();
        let bound = format!("{on}; no schedule is shorter than {}", unit.show(self.lower_bound_s));
        write("compare.json", &format!("{json}\n"))?;
        write("runtime.svg", &bars::draw("Runtime of each strategy", &on, None, &runtime)?)?;
        write("utilization.svg", &bars::draw("Utilization of the devices", &on, Some(1.0), &used)?)?;
        let title = "Makespan of each policy above the lower bound";
        write("policies.svg", &bars::draw(title, &bound, None, &gaps)?)?;
        let copies: Vec<Bar> = self.copies.iter().map(copies_bar).collect();
        match copies.is_empty() {
            true => remove_file(&dir.join("copies.svg"))?,
            false => write(
                "copies.svg",
                &bars::draw("Bytes promoted with each parameter cache", &on, None, &copies)?,
            )?,
        }
        match schedule {
            Some(svg) => write("schedule.svg", svg),
            // A schedule of an earlier comparison does not belong to these results.
            None => remove_file(&dir.join("schedule.svg")),
        }
    }

    fn bars(&self, of: impl Fn(&Figures) -> (f64, String)) -> Vec<Bar> {
        let bar = |row: &StrategyRow| {
            let (value, label) = row.figures.as_ref().map(&of).unzip();
            let label = label.unwrap_or_else(|| "does not fit".to_owned());
            Bar { name: row.strategy.to_owned(), value, label }
        };
        self.strategies.iter().map(bar).collect()
    }
}

fn copies_bar(row: &CopiesRow) -> Bar {
    let (promoted, over) = (ByteSize(row.promoted_bytes), fixed(row.over_fewest, 4));
    let label = format!("{promoted}, {over} times the minimum");
    Bar { name: row.copies.to_owned(), value: Some(row.promoted_bytes as f64), label }
}

/// The parts of a workload that [`compare`] ignores.
fn skipped(workload: &Workload) -> Vec<&'static str> {
    let any = |of: fn(&TaskCost) -> bool| workload.tasks.iter().any(of);
    let parts = [
        ("variation", workload.variation.is_some()),
        ("drift", any(|task| task.drift != 0.0)),
        ("wrong estimates", any(|task| task.estimate_factor != 1.0)),
        ("evaluations", any(|task| task.evaluation_passes() > 0)),
    ];
    parts.into_iter().filter_map(|(name, is_used)| is_used.then_some(name)).collect()
}

fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// A number with at least three significant digits.
fn significant(number: f64) -> String {
    let digits = if number > 0.0 { 2.0 - number.log10().floor() } else { 0.0 };
    fixed(number, digits.clamp(0.0, 9.0) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_strategy_is_in_the_manual() {
        let page = include_str!("../../../docs/scheduling.md");
        assert!(Strategy::ALL.iter().all(|strategy| page.contains(&format!("\n| `{strategy}` | "))));
    }

    #[test]
    fn small_numbers_keep_their_digits() {
        assert_eq!([0.0, 1234.5, 12.345, 0.012_345].map(significant), ["0", "1234", "12.3", "0.0123"]);
        assert_eq!([1e9, 1e300].map(significant), ["1.000e9", "1.000e300"]);
    }
}
