//! `hydra watch`: a run in a terminal, whatever state it is in.

use crate::terminal::Outcome;
use crate::terminal_dashboard;
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;

/// `hydra watch`.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// A run directory, also of a run that is under way or was killed
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
}

/// Watches until `q`.
pub(crate) fn run(args: &WatchArgs) -> Result<Outcome> {
    terminal_dashboard::watch(&args.dir)?;
    Ok(Outcome::Done)
}
