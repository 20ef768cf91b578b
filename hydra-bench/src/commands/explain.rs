//! `hydra explain`: the predicted memory, traffic and time of a run.

use anyhow::Result;
use clap::Args;
use hydra_run::run_dir::{CommandName, RunSpec};
use hydra_run::session::{Environment, run};
use hydra_run::settings::{OUTPUT, PartSettings, RunSettings, flags};
use hydra_run::terminal::Outcome;
use std::path::PathBuf;

/// `hydra explain`.
#[derive(Debug, Args)]
#[command(mut_arg("batch", |flag| flag.default_value("8").help("Minibatch size: items in one optimizer step, over all microbatches and devices; several, separated by commas, make a grid")))]
#[command(mut_arg("lr", |flag| flag.default_value("3e-4").help("Peak learning rate; several, separated by commas, make a grid")))]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    pub(crate) settings: RunSettings,
    #[command(flatten)]
    pub(crate) part: PartSettings,
    /// Explain the run of this spec.toml of a run directory; can be combined only with --part, --only and --json
    #[arg(long, value_name = "FILE", conflicts_with_all = flags::names::<RunSettings>())]
    pub(crate) spec: Option<PathBuf>,
    /// Print the memory and the prediction as JSON, and nothing else, on standard output
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
