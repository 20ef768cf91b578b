//! `hydra simulate`: the makespan of a scheduling policy on a workload, in virtual time.

use crate::simulator::{Measured, SimulatorArgs, gantt, largest, load, mean, measure};
use anyhow::{Context, Result};
use clap::Args;
use hydra_core::ByteSize;
use hydra_run::plots::canvas::one_line;
use hydra_run::plots::schedule;
use hydra_run::run_dir::{check_not_read, could_not};
use hydra_run::settings::policy_help;
use hydra_run::terminal::{Outcome, Table, Unit, fixed, print};
use hydra_sched::{LowerBounds, PolicyKind, SimulationOptions, TaskCost, Workload};
use serde::Serialize;
use std::fs;
use std::path::PathBuf;

/// The largest number of tasks that are printed; `--json` has all.
const SHOWN_TASKS: usize = 24;
/// The largest number of devices that are printed; `--json` has all.
const SHOWN_DEVICES: usize = 8;

/// `hydra simulate`.
#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    #[command(flatten)]
    pub(crate) simulator: SimulatorArgs,
    #[arg(long, value_name = "POLICY", default_value_t, hide_default_value = true, help = policy_help(&PolicyKind::ALL))]
    pub(crate) policy: PolicyKind,
    /// Do not prefetch: copy a shard's parameters to its device only when the device is idle, without double buffering
    #[arg(long)]
    pub(crate) no_prefetch: bool,
    /// Draw the schedule as a Gantt chart into this file
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) gantt: Option<PathBuf>,
    /// Print the result as JSON, and nothing else, on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// Simulates, draws and prints.
pub(crate) fn run(args: &SimulateArgs) -> Result<Outcome> {
    if let Some(file) = &args.gantt {
        check_not_read("--gantt", file, &[("--workload", &args.simulator.workload)])?;
    }
    let workload = load(&args.simulator)?;
    if args.gantt.is_some() {
        schedule::check_size(workload.devices.len(), workload.shard_tasks())
            .context("--gantt cannot draw this workload")?;
    }
    let options = SimulationOptions { prefetch: !args.no_prefetch, record: args.gantt.is_some() };
    let measured = measure(&workload, args.policy, args.simulator.seed.unwrap_or(0), options)?;
    let report = SimulationReport::new(&workload, args, &measured);
    // The result is printed first, in case the plot cannot be written.
    let json = || serde_json::to_string_pretty(&report).context("the result could not be written as JSON");
    print(&if args.json { json()? + "\n" } else { report.render() })?;
    if let Some(file) = &args.gantt {
        let svg = gantt(&workload, &measured.run)?;
        fs::write(file, svg).with_context(|| format!("the plot {}", could_not(file, "written")))?;
    }
    Ok(Outcome::Done)
}

#[derive(Debug, Serialize)]
struct SimulationReport<'a> {
    policy: &'static str,
    seed: u64,
    prefetch: bool,
    devices: usize,
    makespan_s: f64,
    first_start_s: f64,
    lower_bound_s: f64,
    over_bound: f64,
    bounds: LowerBounds,
    utilization: Vec<f64>,
    shard_tasks: u64,
    #[serde(flatten)]
    promoted: PromotedBytes,
    #[serde(flatten)]
    decided: Decided,
    tasks: Vec<SimulatedTask<'a>>,
}

/// The promotions of a simulation.
#[derive(Debug, Serialize)]
struct PromotedBytes {
    promotions: u64,
    promotions_saved: u64,
    promotion_wait_s: f64,
    /// `null` if the size of a shard is not known.
    promoted_bytes: Option<u64>,
}

/// The decisions of the policy, and the mean time of one.
#[derive(Debug, Serialize)]
struct Decided {
    decisions: u64,
    decision_ns: f64,
}

#[derive(Debug, Serialize)]
struct SimulatedTask<'a> {
    name: &'a str,
    arrival_s: f64,
    finished_s: f64,
}

impl<'a> SimulationReport<'a> {
    fn new(workload: &'a Workload, args: &SimulateArgs, Measured { run, decision_ns }: &Measured) -> Self {
        let task = |(task, finished_s): (&'a TaskCost, &f64)| SimulatedTask {
            name: &task.name,
            arrival_s: task.arrival_s,
            finished_s: *finished_s,
        };
        let (promotions, promotions_saved) = (run.promotions, run.promotions_saved);
        Self {
            policy: args.policy.name(),
            seed: args.simulator.seed.unwrap_or(0),
            prefetch: !args.no_prefetch,
            devices: workload.devices.len(),
            makespan_s: run.makespan_s,
            first_start_s: run.first_start_s,
            lower_bound_s: run.bounds.best_s(),
            over_bound: run.gap(),
            bounds: run.bounds,
            utilization: run.utilization(),
            shard_tasks: run.shard_tasks,
            promoted: PromotedBytes {
                promotions,
                promotions_saved,
                promotion_wait_s: run.promotion_wait_s,
                promoted_bytes: run.promoted_bytes,
            },
            decided: Decided { decisions: run.decisions, decision_ns: *decision_ns },
            tasks: workload.tasks.iter().zip(&run.finished_s).map(task).collect(),
        }
    }

    fn render(&self) -> String {
        let unit = Unit::of(self.makespan_s);
        let mut table = Table::new(["<", "<"]);
        let mut row = |name: &str, text: String| table.row(vec![name.to_owned(), text]);
        row("makespan", unit.show(self.makespan_s));
        let (bound, name) = (unit.show(self.lower_bound_s), largest(&self.bounds));
        let over = fixed(self.over_bound, 4);
        row("lower bound", format!("{bound} ({name}); the makespan is {over} times that"));
        row("utilization", self.utilization_text());
        let PromotedBytes { promotions, promotions_saved: saved, promotion_wait_s, promoted_bytes } =
            self.promoted;
        let wait = Unit::of(promotion_wait_s).show(promotion_wait_s);
        row(
            "promotions",
            format!("{promotions}, and {saved} saved by caching; devices waited {wait} for them"),
        );
        if let Some(bytes) = promoted_bytes {
            row("promoted", ByteSize(bytes).to_string());
        }
        let Decided { decisions, decision_ns } = self.decided;
        row("decisions", format!("{decisions}, {decision_ns:.0} ns each (measured)"));
        let Self { policy, shard_tasks, devices, .. } = self;
        let (count, tasks, body) = (self.tasks.len(), self.tasks_text(unit), table.render());
        let prefetch = if self.prefetch { "" } else { ", without prefetching" };
        // The table has an empty heading.
        let body = body.trim_start_matches('\n');
        format!(
            "{policy}: {count} tasks with {shard_tasks} shard tasks on {devices} devices{prefetch}\n{body}\n{tasks}"
        )
    }

    fn utilization_text(&self) -> String {
        let share = |share: &f64| format!("{:.1}%", 100.0 * share);
        let each: Vec<String> = self.utilization.iter().take(SHOWN_DEVICES).map(share).collect();
        let all = share(&mean(&self.utilization));
        let more = if self.utilization.len() > SHOWN_DEVICES { " ..." } else { "" };
        format!("{all} on average; {}{more}", each.join(" "))
    }

    fn tasks_text(&self, unit: Unit) -> String {
        let mut table = Table::new(["<task", ">done after"]);
        for task in self.tasks.iter().take(SHOWN_TASKS) {
            table.row(vec![one_line(task.name), unit.show(task.finished_s)]);
        }
        match self.tasks.len().saturating_sub(SHOWN_TASKS) {
            0 => table.render(),
            more => format!("{}and {more} more\n", table.render()),
        }
    }
}
