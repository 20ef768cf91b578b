//! `hydra select`: a grid of configurations is trained and ranked.

use crate::run_dir::{CommandName, RunSpec};
use crate::session::{Surroundings, run};
use crate::settings::{OutSettings, RunSettings, flags};
use crate::terminal::Outcome;
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;

/// `hydra select`.
#[derive(Debug, Args)]
pub(crate) struct SelectArgs {
    #[command(flatten)]
    pub(crate) settings: RunSettings,
    #[command(flatten)]
    pub(crate) out: OutSettings,
    /// Run what a run directory's spec.toml says; only --out, --force, --dry-run, --record, --json, --progress, --checkpoint-every and those that watch may stand beside it
    #[arg(long, value_name = "FILE", conflicts_with_all = flags::names::<RunSettings>())]
    pub(crate) spec: Option<PathBuf>,
}

/// Trains the grid.
pub(crate) fn run(args: SelectArgs, around: &Surroundings) -> Result<Outcome> {
    let around = &around.planning();
    let spec = match &args.spec {
        Some(file) => RunSpec::load(file, &around.machine)?,
        None => RunSpec::new(CommandName::Select, args.settings.with_grid(), &around.machine)?,
    };
    run::run(spec, &args.out, around)
}
