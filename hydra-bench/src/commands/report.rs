//! `hydra report`: the leaderboard of a finished run.

use crate::run_dir::{Report, read_report};
use crate::terminal::{Outcome, print};
use anyhow::{Context, Result};
use clap::Args;
use std::path::PathBuf;

/// `hydra report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// A run directory
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Print the report as JSON, alone on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// Prints the report of a run directory.
pub(crate) fn run(args: &ReportArgs) -> Result<Outcome> {
    let text = read_report(&args.dir)?;
    let report = Report::parse(&text)
        .with_context(|| format!("the report in `{}` cannot be shown", args.dir.display()))?;
    print(&if args.json { text } else { report.render() })?;
    Ok(Outcome::Done)
}
