//! `hydra select`: trains and ranks a grid of configurations, or a search.

use anyhow::{Context, Result, ensure};
use clap::Args;
use hydra_run::run_dir::{CommandName, RunSpec, read_commands};
use hydra_run::session::{Environment, run};
use hydra_run::settings::{OutSettings, PartSettings, RunSettings, flags};
use hydra_run::terminal::{Outcome, Usage, tell};
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
    /// Run the spec.toml of a run directory instead of flags; can be combined only with --out, --force, --dry-run, --record,
    /// --json, --progress, --checkpoint-every, --replay, --part or --only, and the flags of monitoring
    #[arg(long, value_name = "FILE", conflicts_with_all = flags::names::<RunSettings>())]
    pub(crate) spec: Option<PathBuf>,
    /// Apply the commands in the control.jsonl of another run, each after the same minibatch as there
    #[arg(long, value_name = "FILE")]
    pub(crate) replay: Option<PathBuf>,
}

/// Trains the grid or the search.
pub(crate) fn run(args: SelectArgs, around: &Environment) -> Result<Outcome> {
    let around = &around.planning();
    let (spec, out) = spec_and_output(args, around)?;
    run::run(spec, &out, around)
}

/// The `spec.toml` of the run on this machine.
pub(crate) fn spec(args: SelectArgs, around: &Environment) -> Result<String> {
    let around = &around.planning();
    let (spec, out) = spec_and_output(args, around)?;
    run::initial_spec(spec.checkpointed(out.checkpoints), around)
}

fn spec_and_output(args: SelectArgs, around: &Environment) -> Result<(RunSpec, OutSettings)> {
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
            Usage::new("--replay controls tasks, and the tasks of a search are controlled by it; leave one of the two out").into()
        );
    }
    let shown = file.display();
    ensure!(
        file.is_file(),
        Usage::new(format!(
            "--replay `{shown}`: there is no such file; pass the control.jsonl of a run directory"
        ))
    );
    spec.replaying(read_commands(file)?)
        .with_context(|| format!("the commands in `{shown}` cannot be replayed"))
}
