//! `hydra explain`: what a run would need, move and take, before it is run.

use crate::run_dir::{CommandName, RunSpec};
use crate::session::{Surroundings, run};
use crate::settings::{OUTPUT, RunSettings};
use crate::terminal::Outcome;
use anyhow::Result;
use clap::Args;

/// `hydra explain`.
#[derive(Debug, Args)]
#[command(mut_arg("batch", |flag| flag.default_value("8").help("Minibatch sizes, separated by commas")))]
#[command(mut_arg("lr", |flag| flag.default_value("3e-4").help("Learning rates, separated by commas")))]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    pub(crate) settings: RunSettings,
    /// Print the needs and the prediction as JSON, alone on standard output
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
}

/// Explains the run.
pub(crate) fn run(args: ExplainArgs, around: &Surroundings) -> Result<Outcome> {
    let around = &around.planning();
    let spec = RunSpec::new(CommandName::Train, args.settings, &around.machine)?;
    run::explain(spec, args.json, around)
}
