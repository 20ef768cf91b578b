//! Runs commands inside another program: the same flags and runs, with results, events and errors as values.
//!
//! The module uses the command line and the run's control handle. It never prints, never handles interrupts, and is independent
//! of the embedding language.

mod events;
mod failure;
mod keywords;

pub use crate::control::TextMetric;
pub use crate::session::OwnModel;
pub use events::{Events, Next};
pub use failure::{Failure, Kind};
pub use keywords::{Hint, Keyword, hint, keywords, renamed};

use crate::cli::{Cli, Command};
use crate::commands::select;
use crate::control::Control;
use crate::machine::kind;
use crate::run_dir::{Journal, Merged, Report, is_taken, is_unfinished, read_report};
use crate::session::{Environment, Registered};
use crate::terminal::{Outcome, Show, log, panics};
use std::ffi::OsString;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Once, OnceLock};
use std::time::Duration;

/// The end of a command without an error of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Everything was done.
    Done,
    /// Tasks failed, or files could not be written.
    Failed,
    /// The run or a task was stopped before its end.
    Stopped,
}

/// A command running on its own thread.
#[derive(Clone, Debug)]
pub struct Running {
    control: Control,
    end: Arc<OnceLock<Result<End, Failure>>>,
}

/// Starts a command with these arguments, without the program's name. Its results are JSON if the arguments include `--json`.
/// The command finds `own`, models of this program, by the names in its `--model` and `--data`, or in those of the run that it
/// resumes. `metric` is a metric of generated texts that `--metric` may name.
///
/// Device memory is measured only in a program that installs the counting allocator of `hydra-spill`.
///
/// # Errors
/// If the arguments are invalid, or the thread cannot be started.
pub fn start(
    arguments: impl IntoIterator<Item = OsString>,
    own: impl IntoIterator<Item = Arc<OwnModel>>,
    metric: Option<TextMetric>,
) -> Result<Running, Failure> {
    let arguments = std::iter::once(OsString::from("hydra")).chain(arguments);
    let cli = Cli::read(arguments).map_err(|error| Failure::of_arguments(&error))?;
    let running = Running { control: Control::new(metric), end: Arc::default() };
    let of_thread = running.clone();
    // The name keeps the panic hook quiet: a panic is an error of this command.
    let thread = std::thread::Builder::new().name("hydra-command".to_owned()).stack_size(STACK);
    let own: Vec<Arc<OwnModel>> = own.into_iter().collect();
    thread.spawn(move || of_thread.run(cli, own)).map_err(|error| Failure::of_thread(&error))?;
    Ok(running)
}

/// Returns the program, its target system and the processor as JSON. The bits of results depend on them in addition to the run.
pub fn machine() -> String {
    kind().to_string()
}

/// Returns the `spec.toml` of a grid with these settings on this machine. Append `[tasks]` to restrict it to a part. `own` are the
/// models of this program that the arguments name, as in [`start`].
///
/// # Errors
/// If the arguments are not valid for `select`, or inputs cannot be read.
pub fn spec(
    arguments: impl IntoIterator<Item = OsString>,
    own: impl IntoIterator<Item = Arc<OwnModel>>,
) -> Result<String, Failure> {
    let _own: Vec<Registered> = own.into_iter().map(Registered::new).collect();
    let arguments = ["hydra", "select"].map(OsString::from).into_iter().chain(arguments);
    let cli = Cli::read(arguments).map_err(|error| Failure::of_arguments(&error))?;
    let around = Environment::look(Show::Nothing).inside(Control::default());
    let spec = match cli.command {
        Some(Command::Select(args)) => select::spec(*args, &around),
        _ => {
            return Err(Failure::new(
                Kind::Usage,
                "only a grid has a spec: pass the arguments of `hydra select`".to_owned(),
            ));
        }
    };
    spec.map_err(|error| Failure::of_command(&error))
}

/// The stack size of a command, equal to that of a program's main thread.
const STACK: usize = 8 << 20;

impl Running {
    fn run(&self, cli: Cli, own: Vec<Arc<OwnModel>>) {
        let own: Vec<Registered> = own.into_iter().map(Registered::new).collect();
        let around = Environment::look(Show::Nothing).inside(self.control.clone());
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            log::to(&around.terminal);
            panics::keep_workers_quiet();
        });
        let result = catch_unwind(AssertUnwindSafe(|| cli.run(&around)));
        let end = match result {
            Ok(Ok(Outcome::Done)) => Ok(End::Done),
            Ok(Ok(Outcome::Failed)) => Ok(End::Failed),
            Ok(Ok(Outcome::Interrupted)) => Ok(End::Stopped),
            Ok(Err(error)) => Err(Failure::of_command(&error)),
            Err(panic) => Err(Failure::from_panic(panic.as_ref())),
        };
        // The environment is dropped, with its reservation, before the end is published.
        drop((around, own));
        let _ = self.end.set(end);
        self.control.end();
    }

    /// Stops the run at the end of the current minibatches. Trained models are written and reported.
    pub fn stop(&self) {
        self.control.stop_flag().stop();
    }

    /// Stops a task at the end of its current minibatch, as [`stop`](Self::stop) stops all tasks: resuming the run continues it.
    /// Does nothing for an unknown name.
    pub fn stop_task(&self, name: &str) {
        self.control.task(name).stop();
    }

    /// Sends the run a run-control command, a JSON line as sent by `hydra ctl`, and returns the JSON answer. Returns `None` if the
    /// run does not accept commands within `patience`, or has ended.
    pub fn run_command(&self, line: &str, patience: Duration) -> Option<String> {
        self.control.ask(line, patience)
    }

    /// Waits for the end, for at most `patience`. Returns `None` if the command is still running.
    pub fn wait(&self, patience: Duration) -> Option<&Result<End, Failure>> {
        drop(self.control.until(patience, |state| state.ended));
        self.end.get()
    }

    /// Waits until the run directory is known, for at most `patience`. Returns `None` if it is not known, or there is none.
    pub fn directory(&self, patience: Duration) -> Option<PathBuf> {
        self.control.until(patience, |state| state.ended || state.directory.is_some()).directory.clone()
    }

    /// Waits until the run has started training or the command has ended, for at most `patience`. Returns whether it has.
    pub fn begun(&self, patience: Duration) -> bool {
        let state = self.control.until(patience, |state| state.ended || state.lines.is_some());
        state.ended || state.lines.is_some()
    }

    /// Returns the events of the run from its start: the lines of its `metrics.jsonl`.
    pub fn events(&self) -> Events {
        Events::new(self.control.clone())
    }

    /// Returns the result of an ended command, as the command line would print it.
    pub fn output(&self) -> String {
        self.control.state().output.clone()
    }

    /// Returns errors in addition to the result, one per line: failed tasks, and files that could not be written.
    pub fn errors(&self) -> Vec<String> {
        self.control.state().errors.clone()
    }
}

/// Returns the report of a run directory as JSON, also for a running run as far as it has got, or the merged report of several.
/// The tasks are in leaderboard order, each with its `rank`, or `null` if it is not ranked.
///
/// # Errors
/// If a directory has no run, or its report cannot be read.
pub fn report(directories: &[PathBuf]) -> Result<String, Failure> {
    ranked_report(directories).map_err(|error| Failure::of_command(&error))
}

fn ranked_report(directories: &[PathBuf]) -> anyhow::Result<String> {
    let text = match directories {
        [directory] if is_unfinished(directory) => Journal::read(directory)?.to_json(is_taken(directory))?,
        [directory] => read_report(directory)?,
        several => Merged::read(several)?.to_json()?,
    };
    Report::with_ranks(&text)
}

impl Failure {
    fn of_thread(error: &io::Error) -> Self {
        Self::new(Kind::Failed, format!("a thread for the command could not be started: {error}"))
    }
}
