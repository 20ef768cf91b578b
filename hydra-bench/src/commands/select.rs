//! `hydra select`: a grid of configurations is trained and ranked.

use crate::run_dir::{CommandName, RunSpec, read_commands};
use crate::session::{Environment, run};
use crate::settings::{OutSettings, PartSettings, RunSettings, flags};
use crate::terminal::{Outcome, Usage, tell};
use anyhow::{Context, Result, ensure};
use clap::Args;
use std::path::{Path, PathBuf};

/// `hydra select`.
#[derive(Debug, Args)]
pub(crate) struct SelectArgs {
    #[command(flatten)]
    pub(crate) settings: RunSettings,
    #[command(flatten)]
    pub(crate) part: PartSettings,
    #[command(flatten)]
    pub(crate) out: OutSettings,
    /// Run what a run directory's spec.toml says; only --out, --force, --dry-run, --record, --json, --progress, --checkpoint-every, --replay, --part or --only, and those that watch may stand beside it
    #[arg(long, value_name = "FILE", conflicts_with_all = flags::names::<RunSettings>())]
    pub(crate) spec: Option<PathBuf>,
    /// Steer the run as another one was: with the commands in its control.jsonl, each where it took effect there
    #[arg(long, value_name = "FILE")]
    pub(crate) replay: Option<PathBuf>,
}

/// Trains the grid.
pub(crate) fn run(args: SelectArgs, around: &Environment) -> Result<Outcome> {
    let around = &around.planning();
    let (spec, out) = asked(args, around)?;
    run::run(spec, &out, around)
}

/// The `spec.toml` of the run, as it would begin here.
pub(crate) fn spec(args: SelectArgs, around: &Environment) -> Result<String> {
    let around = &around.planning();
    let (spec, out) = asked(args, around)?;
    run::begun(spec.checkpointed(out.checkpoints), around)
}

fn asked(args: SelectArgs, around: &Environment) -> Result<(RunSpec, OutSettings)> {
    let spec = match &args.spec {
        Some(file) => RunSpec::load(file, &around.machine)?,
        None => {
            let (settings, note) = args.settings.with_defaults();
            let spec = RunSpec::new(CommandName::Select, settings, &around.machine)?;
            note.as_deref().into_iter().for_each(tell);
            spec
        }
    };
    let spec = if args.part.is_none() { spec } else { spec.of_part(args.part)? };
    let spec = match &args.replay {
        Some(file) => replaying(spec, file)?,
        None => spec,
    };
    Ok((spec, args.out))
}

/// The spec with the commands of another run.
fn replaying(spec: RunSpec, file: &Path) -> Result<RunSpec> {
    if !spec.search.is_none() {
        return Err(
            Usage::new("--replay steers tasks, and a search owns its own: leave one of both out").into()
        );
    }
    let shown = file.display();
    ensure!(
        file.is_file(),
        Usage::new(format!("--replay `{shown}` is no file: give the control.jsonl of a run directory"))
    );
    spec.replaying(read_commands(file)?)
        .with_context(|| format!("the run cannot be steered as `{shown}` says"))
}
