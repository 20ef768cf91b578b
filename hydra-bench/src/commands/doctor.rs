//! `hydra doctor`: the requirements of GPUs, and whether this machine meets them.

use anyhow::Result;
use clap::Args;
use hydra_run::machine::{DoctorReport, Findings, Machine};
use hydra_run::terminal::{Outcome, print};

/// `hydra doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print the report as JSON, and nothing else, on standard output
    #[arg(long)]
    json: bool,
}

/// Inspects the machine and prints the report.
pub(crate) fn run(args: &DoctorArgs, machine: &Machine) -> Result<Outcome> {
    let report = DoctorReport::from_findings(Findings::look(machine));
    print(&match args.json {
        true => format!("{}\n", serde_json::to_string_pretty(&report)?),
        false => report.to_string(),
    })?;
    Ok(if report.usable { Outcome::Done } else { Outcome::Failed })
}
