//! `hydra report`: the leaderboard of a finished run.

use crate::args::ReportArgs;
use crate::error::{Outcome, print};
use crate::leaderboard::Report;
use crate::rundir::read_report;
use anyhow::{Context, Result};

/// Prints the report of a run directory.
pub(crate) fn run(args: &ReportArgs) -> Result<Outcome> {
    let text = read_report(&args.dir)?;
    let report = Report::parse(&text)
        .with_context(|| format!("the report in `{}` cannot be shown", args.dir.display()))?;
    print(&if args.json { text } else { report.render() })?;
    Ok(Outcome::Done)
}
