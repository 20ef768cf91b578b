//! `hydra report`: the leaderboard of a finished run.

use crate::run_dir::directory::read_report;
use crate::run_dir::leaderboard::Report;
use crate::settings::args::ReportArgs;
use crate::terminal::error::{Outcome, print};
use anyhow::{Context, Result};

/// Prints the report of a run directory.
pub(crate) fn run(args: &ReportArgs) -> Result<Outcome> {
    let text = read_report(&args.dir)?;
    let report = Report::parse(&text)
        .with_context(|| format!("the report in `{}` cannot be shown", args.dir.display()))?;
    print(&if args.json { text } else { report.render() })?;
    Ok(Outcome::Done)
}
