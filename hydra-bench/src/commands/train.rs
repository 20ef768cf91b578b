//! `hydra train`: trains one configuration.

use anyhow::Result;
use clap::{Arg, ArgAction, Args};
use hydra_run::run_dir::{CommandName, RunSpec};
use hydra_run::session::{Environment, run};
use hydra_run::settings::{OutSettings, RunSettings};
use hydra_run::terminal::{Outcome, Usage};

/// `hydra train`.
#[derive(Debug, Args)]
#[command(mut_arg("batch", |flag| one(flag, "N", "8").help("Minibatch size: items in one optimizer step, over all microbatches and devices")))]
#[command(mut_arg("lr", |flag| one(flag, "RATE", "3e-4").help("Peak learning rate")))]
#[command(mut_arg("lora", |flag| flag.value_name("RANK").value_delimiter(None).action(ArgAction::Set).help(RANK)))]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) settings: RunSettings,
    #[command(flatten)]
    pub(crate) out: OutSettings,
}

const RANK: &str =
    "Train LoRA adapters of this rank and freeze the model [default: train the model's own weights]";

/// A flag of a grid, changed to take one value.
fn one(flag: Arg, value_name: &'static str, default: &'static str) -> Arg {
    flag.value_name(value_name).value_delimiter(None).action(ArgAction::Set).default_value(default)
}

/// Trains the configuration.
pub(crate) fn run(args: TrainArgs, around: &Environment) -> Result<Outcome> {
    if !args.settings.search.is_none() || !args.settings.grid.is_empty() {
        let says = "hydra train trains one configuration; use hydra select, which has the same flags, for lists and searches";
        return Err(Usage::new(says).into());
    }
    let around = &around.planning();
    let spec = RunSpec::new(CommandName::Train, args.settings, &around.machine)?;
    run::run(spec, &args.out, around)
}
