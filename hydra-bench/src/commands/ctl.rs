//! `hydra ctl`: the status of a run in progress, and commands to it.

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, Subcommand};
use hydra_run::control_socket::ask;
use hydra_run::run_dir::{RunCommand, SOCKET, SPEC, is_taken};
use hydra_run::session::Environment;
use hydra_run::settings::{ForkSettings, flags::RawFlags, values};
use hydra_run::terminal::{Outcome, Table, Usage};
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// `hydra ctl`.
#[derive(Debug, Args)]
pub(crate) struct CtlArgs {
    /// The directory of a run in progress
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    #[command(subcommand)]
    command: Ctl,
    /// Print the answer as JSON, and nothing else, on standard output
    #[arg(long, global = true)]
    json: bool,
}

/// The requests to a run.
#[derive(Debug, Subcommand)]
enum Ctl {
    /// Print the state of each task: minibatches, losses, and the task that it was forked from
    Status,
    /// Pause a task after its current minibatch, or after minibatch N
    Pause {
        #[command(flatten)]
        task: TaskArg,
        #[command(flatten)]
        place: At,
    },
    /// Resume a paused task: to its end, or until it has trained N minibatches
    Resume {
        #[command(flatten)]
        task: TaskArg,
        /// Pause again when the task has trained N minibatches in all
        #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
        until: Option<usize>,
    },
    /// End a task after its current minibatch, or after minibatch N, and save its model
    Stop {
        #[command(flatten)]
        task: TaskArg,
        #[command(flatten)]
        place: At,
    },
    /// End a task, if it is unfinished, and delete its files; it stays on the leaderboard
    Delete {
        #[command(flatten)]
        task: TaskArg,
        #[command(flatten)]
        place: At,
    },
    /// Train a task for more minibatches: it ends, and a new task continues it with the longer schedule
    Extend {
        #[command(flatten)]
        task: TaskArg,
        /// New total number of minibatches
        #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
        steps: usize,
        #[command(flatten)]
        place: At,
        #[command(flatten)]
        name: Name,
    },
    /// Start a new task from the state of another, with other settings; the other task continues unchanged
    #[command(after_help = AFTER_FORK)]
    Fork {
        #[command(flatten)]
        task: TaskArg,
        #[command(flatten)]
        place: At,
        #[command(flatten)]
        name: Name,
        /// Copy only the weights: fresh optimizer state, and the data from its start
        #[arg(long)]
        weights_only: bool,
        #[command(flatten)]
        changes: RawFlags<ForkSettings>,
    },
}

/// The end of the help of `hydra ctl DIR fork`, which shares its flags, and their defaults, with other commands.
const AFTER_FORK: &str =
    "Flags that are not given keep the settings of the task that is forked, not the defaults above.";

#[derive(Debug, Args)]
struct TaskArg {
    /// The name of a task, as on the leaderboard
    #[arg(value_name = "TASK")]
    task: String,
}

#[derive(Debug, Args)]
struct At {
    /// Take effect after minibatch N of the task [default: after the current one]
    #[arg(long, value_name = "N", value_parser = values::warmup, allow_hyphen_values = true)]
    at: Option<usize>,
}

#[derive(Debug, Args)]
struct Name {
    /// Name of the new task [default: the other task's name with a number]
    #[arg(long)]
    name: Option<String>,
}

/// Sends the request to the run and prints its answer.
pub(crate) fn run(args: CtlArgs, around: &Environment) -> Result<Outcome> {
    let CtlArgs { dir, command, json } = args;
    check_dir(&dir)?;
    let run_command = run_command(command);
    let line = match &run_command {
        Some(run_command) => {
            serde_json::to_string(run_command).context("the command could not be written as JSON")?
        }
        None => json!({ "command": "status" }).to_string(),
    };
    let answer = ask(&dir.join(SOCKET), &line).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => anyhow!("the run in `{}` ended before it answered", dir.display()),
        _ if is_taken(&dir) => anyhow!(error).context(format!("the run in `{}` cannot be reached", dir.display())),
        _ => anyhow!(
            "no run is in progress in `{0}`; hydra report {0} prints its results so far, and hydra resume {0} continues it if tasks \
             are left",
            dir.display()
        ),
    })?;
    let value: Value = serde_json::from_str(&answer).context("the run's answer is not JSON")?;
    if value["ok"] != true {
        let why = value["error"].as_str().unwrap_or("the run gave no reason").to_owned();
        if json {
            around.print(&format!("{answer}\n"))?;
        }
        bail!(why);
    }
    around.print(&match (&run_command, json) {
        (_, true) => format!("{answer}\n"),
        (Some(run_command), _) => said(run_command, &value),
        (None, _) => table(&value),
    })?;
    Ok(Outcome::Done)
}

fn check_dir(dir: &Path) -> Result<()> {
    let shown = dir.display();
    ensure!(
        dir.is_dir(),
        Usage::new(format!("`{shown}` is not a run directory: there is no such directory"))
    );
    ensure!(
        dir.join(SPEC).is_file(),
        Usage::new(format!("`{shown}` is not a run directory: it has no {SPEC}"))
    );
    Ok(())
}

/// The command in the form that the run reads; none for a status request.
fn run_command(command: Ctl) -> Option<RunCommand> {
    Some(match command {
        Ctl::Status => return None,
        Ctl::Pause { task, place } => RunCommand::Pause { task: task.task, at: place.at },
        Ctl::Resume { task, until } => RunCommand::Resume { task: task.task, until, at: None },
        Ctl::Stop { task, place } => RunCommand::Stop { task: task.task, at: place.at },
        Ctl::Delete { task, place } => RunCommand::Delete { task: task.task, at: place.at },
        Ctl::Extend { task, steps, place, name } => {
            RunCommand::Extend { task: task.task, steps, at: place.at, name: name.name }
        }
        Ctl::Fork { task, place, name, weights_only, changes } => {
            let (task, changes) = (task.task, changes.texts);
            RunCommand::Fork { task, at: place.at, changes, weights_only, name: name.name }
        }
    })
}

/// The effect of a command as a sentence.
fn said(run_command: &RunCommand, answer: &Value) -> String {
    let (task, at) = (answer["task"].as_str().unwrap_or_default(), &answer["at"]);
    let what = match run_command {
        RunCommand::Pause { .. } => format!("`{task}` pauses after {at} minibatches"),
        RunCommand::Resume { until: Some(until), .. } => {
            format!("`{task}` resumes until it has trained {until} minibatches")
        }
        RunCommand::Resume { .. } => format!("`{task}` resumes after {at} minibatches"),
        RunCommand::Stop { .. } => format!("`{task}` ends after {at} minibatches"),
        RunCommand::Delete { .. } => {
            format!("`{task}` ends after {at} minibatches, and its files are deleted")
        }
        RunCommand::Extend { task: of, steps, .. } => {
            format!("`{of}` ends after {at} minibatches, and `{task}` continues it to {steps}")
        }
        RunCommand::Fork { task: of, .. } => {
            format!("`{task}` starts from `{of}` after {at} minibatches")
        }
    };
    format!("{what}\n")
}

/// The tasks of a run as a table.
fn table(status: &Value) -> String {
    let mut table =
        Table::new("<task|<state|>minibatches|>training loss|>validation loss|<forked from".split('|'));
    for task in status["tasks"].as_array().into_iter().flatten() {
        let text = |key: &str| task[key].as_str().unwrap_or("-").to_owned();
        let loss = |key: &str| task[key].as_f64().map_or("-".to_owned(), |loss| format!("{loss:.4}"));
        let from = task["parent"].as_str().map(|parent| format!("{parent} after {}", task["forked_at"]));
        let state = if task["deleted"] == true { "deleted".to_owned() } else { text("state") };
        table.row(vec![
            text("task"),
            state,
            format!("{} of {}", task["minibatch"], task["minibatches"]),
            loss("train_loss"),
            loss("validation_loss"),
            from.unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    table.render()
}
