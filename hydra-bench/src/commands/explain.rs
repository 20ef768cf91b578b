//! `hydra explain`: what a run would need, move and take, before it is run.

use crate::run_dir::{CommandName, RunSpec};
use crate::session::{Environment, run};
use crate::settings::{OUTPUT, PartSettings, RunSettings, flags};
use crate::terminal::Outcome;
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;

/// `hydra explain`.
#[derive(Debug, Args)]
#[command(mut_arg("batch", |flag| flag.default_value("8").help("Minibatch sizes, separated by commas")))]
#[command(mut_arg("lr", |flag| flag.default_value("3e-4").help("Learning rates, separated by commas")))]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    pub(crate) settings: RunSettings,
    #[command(flatten)]
    pub(crate) part: PartSettings,
    /// Explain what a run directory's spec.toml says; only --part, --only and --json may stand beside it
    #[arg(long, value_name = "FILE", conflicts_with_all = flags::names::<RunSettings>())]
    pub(crate) spec: Option<PathBuf>,
    /// Print the needs and the prediction as JSON, alone on standard output
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
}

/// Explains the run.
pub(crate) fn run(args: ExplainArgs, around: &Environment) -> Result<Outcome> {
    let around = &around.planning();
    let spec = match &args.spec {
        Some(file) => RunSpec::load(file, &around.machine)?,
        None => RunSpec::new(CommandName::Train, args.settings, &around.machine)?,
    };
    let spec = if args.part.is_none() { spec } else { spec.of_part(args.part)? };
    run::explain(spec, args.json, around)
}
