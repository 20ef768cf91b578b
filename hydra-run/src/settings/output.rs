//! Where results are written, and how progress is shown.

use super::{CheckpointSettings, WatchSettings};
use crate::terminal::{Show, interactive};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// The help heading of flags about output.
pub const OUTPUT: &str = "Output";

/// The run directory and its contents.
#[derive(Debug, Args)]
#[command(next_help_heading = OUTPUT)]
pub struct OutSettings {
    /// The run directory.
    #[arg(long, value_name = "DIR", help = "Run directory [default: runs/<command>-<next unused number>]")]
    pub(crate) out: Option<PathBuf>,
    /// Replace the run that the run directory holds
    #[arg(long)]
    pub(crate) force: bool,
    /// Print the tasks, their memory and the predicted time, then stop without writing a file
    #[arg(long, conflicts_with = "record")]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) results: ResultSettings,
    /// When checkpoints are written.
    #[command(flatten)]
    pub checkpoints: CheckpointSettings,
}

/// The results of a run outside its directory.
#[derive(Debug, Args)]
#[command(next_help_heading = OUTPUT)]
pub struct ResultSettings {
    /// Also write the measured costs of the tasks, as a workload for `hydra simulate` and `hydra compare`, to this file; the run
    /// directory has a copy
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Print the final report as JSON, and nothing else, on standard output
    #[arg(long)]
    pub json: bool,
    /// How progress is shown on standard error
    #[arg(long, value_enum, value_name = "HOW", default_value = "auto")]
    pub(crate) progress: ProgressArg,
    /// The dashboard and the trackers.
    #[command(flatten)]
    pub watching: WatchSettings,
}

/// `--progress`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProgressArg {
    /// Bars on a terminal, lines elsewhere
    Auto,
    /// A bar for the whole run and for each of its main tasks
    Bars,
    /// A line for each evaluation and each finished task, and every ten seconds for the whole run
    Lines,
    /// Only errors, notes and warnings
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
