//! `hydra watch`: the terminal dashboard of a run in any state.

use crate::terminal_dashboard;
use anyhow::Result;
use clap::Args;
use hydra_run::terminal::Outcome;
use std::path::PathBuf;

/// `hydra watch`.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// The directory of a run that is in progress, finished or killed
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
}

/// Shows the run until the user presses `q`.
pub(crate) fn run(args: &WatchArgs) -> Result<Outcome> {
    terminal_dashboard::watch(&args.dir)?;
    Ok(Outcome::Done)
}
