//! The places of results.

use super::CheckpointSettings;
use clap::Args;
use std::path::PathBuf;

/// The heading of flags about what is written and printed.
pub(crate) const OUTPUT: &str = "Output";

/// The run directory and what is written there.
#[derive(Debug, Args)]
#[command(next_help_heading = OUTPUT)]
pub(crate) struct OutSettings {
    /// The run directory [default: runs/<command>-<the next free number>]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Replace the run in the run directory
    #[arg(long)]
    pub(crate) force: bool,
    /// Print what would run and what it needs, and stop, leaving no file behind
    #[arg(long, conflicts_with = "record")]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) results: ResultSettings,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointSettings,
}

/// The results that a run gives beside its directory.
#[derive(Debug, Args)]
#[command(next_help_heading = OUTPUT)]
pub(crate) struct ResultSettings {
    /// Write the measured costs of what is trained as a workload that `hydra simulate` replays; the run directory has it too
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Print the final report as JSON, alone on standard output
    #[arg(long)]
    pub(crate) json: bool,
}
