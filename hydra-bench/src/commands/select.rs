//! `hydra select`: a grid of configurations is trained and ranked.

use crate::run_dir::{CommandName, RunSpec};
use crate::session::{Surroundings, run};
use crate::settings::{OutSettings, PartSettings, RunSettings, flags};
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
    pub(crate) part: PartSettings,
    #[command(flatten)]
    pub(crate) out: OutSettings,
    /// Run what a run directory's spec.toml says; only --out, --force, --dry-run, --record, --json, --progress and --checkpoint-every may stand beside it, and --part or --only
    #[arg(long, value_name = "FILE", conflicts_with_all = flags::names::<RunSettings>())]
    pub(crate) spec: Option<PathBuf>,
}

/// Trains the grid.
pub(crate) fn run(args: SelectArgs, around: &Surroundings) -> Result<Outcome> {
    let around = &around.planning();
    let (spec, out) = asked(args, around)?;
    run::run(spec, &out, around)
}

/// The `spec.toml` of the run, as it would begin here.
pub(crate) fn spec(args: SelectArgs, around: &Surroundings) -> Result<String> {
    let around = &around.planning();
    let (spec, out) = asked(args, around)?;
    run::begun(spec.checkpointed(out.checkpoints))
}

fn asked(args: SelectArgs, around: &Surroundings) -> Result<(RunSpec, OutSettings)> {
    let spec = match &args.spec {
        Some(file) => RunSpec::load(file, &around.machine)?,
        None => RunSpec::new(CommandName::Select, args.settings.with_grid(), &around.machine)?,
    };
    let spec = if args.part.is_none() { spec } else { spec.of_part(args.part)? };
    Ok((spec, args.out))
}
