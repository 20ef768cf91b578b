//! The places of results.

use super::{CheckpointSettings, WatchSettings};
use crate::terminal::{Show, interactive};
use clap::{Args, ValueEnum};
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
    /// Show on standard error how far the run is
    #[arg(long, value_enum, value_name = "HOW", default_value = "auto")]
    pub(crate) progress: ProgressArg,
    #[command(flatten)]
    pub(crate) watching: WatchSettings,
}

/// `--progress`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProgressArg {
    /// Bars on a terminal, and lines in a pipe
    Auto,
    /// A bar for the whole and for each task that matters
    Bars,
    /// A line for each evaluation, for each task that ends, and every ten seconds for the whole
    Lines,
    /// Nothing but errors, notes and warnings
    None,
}

impl ProgressArg {
    pub(crate) fn show(self) -> Show {
        match self {
            Self::Bars => Show::Bars,
            Self::Auto if interactive() => Show::Bars,
            Self::Auto | Self::Lines => Show::Lines,
            Self::None => Show::Nothing,
        }
    }
}
