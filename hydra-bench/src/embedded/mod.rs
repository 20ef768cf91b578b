//! Commands inside of another program: the same flags and the same runs, with results, events and errors as values.
//! It may touch the command line, and what a command tells of itself.
//! It never prints, never listens to interrupts, and knows of no other language.

mod events;
mod failure;
mod keywords;

pub use events::{Events, Next};
pub use failure::{Failure, Kind};
pub use keywords::{Hint, Keyword, hint, keywords};

use crate::cli::{Cli, Command};
use crate::commands::select;
use crate::control::Control;
use crate::machine::kind;
use crate::run_dir::{Journal, Merged, Report, is_taken, is_unfinished, read_report};
use crate::session::Environment;
use crate::terminal::{Outcome, Show, log, panics};
use std::ffi::OsString;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Once, OnceLock};
use std::time::Duration;

/// The end of a command that did what it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All was done.
    Done,
    /// Tasks failed, or files could not be written.
    Failed,
    /// The run or a task was stopped before its end.
    Stopped,
}

/// A command that runs on a thread of its own.
#[derive(Clone, Debug)]
pub struct Running {
    control: Control,
    end: Arc<OnceLock<Result<End, Failure>>>,
}

/// Starts the command that the arguments say, without the program's name before them. Its results are JSON if they say
/// `--json`.
///
/// Device memory is measured in a program that installs the counting allocator of `hydra-spill`.
///
/// # Errors
/// Arguments that the command line does not take, and a thread that could not be started.
pub fn start(arguments: impl IntoIterator<Item = OsString>) -> Result<Running, Failure> {
    let arguments = std::iter::once(OsString::from("hydra")).chain(arguments);
    let cli = Cli::read(arguments).map_err(|error| Failure::of_arguments(&error))?;
    let running = Running { control: Control::default(), end: Arc::default() };
    let of_thread = running.clone();
    // The name keeps the panic hook quiet: a panic is an error of this command.
    let thread = std::thread::Builder::new().name("hydra-command".to_owned()).stack_size(STACK);
    thread.spawn(move || of_thread.run(cli)).map_err(|error| Failure::of_thread(&error))?;
    Ok(running)
}

/// What bits depend on beside a run, as JSON: the program, the system that it was built for, and the processor.
pub fn machine() -> String {
    kind().to_string()
}

/// The `spec.toml` with which a grid of these settings would begin on this machine. Appended `[tasks]` make it that of a part.
///
/// # Errors
/// Arguments that are not those of `select`, and inputs that cannot be read.
pub fn spec(arguments: impl IntoIterator<Item = OsString>) -> Result<String, Failure> {
    let arguments = ["hydra", "select"].map(OsString::from).into_iter().chain(arguments);
    let cli = Cli::read(arguments).map_err(|error| Failure::of_arguments(&error))?;
    let around = Environment::look(Show::Nothing).inside(Control::default());
    let spec = match cli.command {
        Some(Command::Select(args)) => select::spec(*args, &around),
        _ => return Err(Failure::new(Kind::Usage, "only a grid has a spec".to_owned())),
    };
    spec.map_err(|error| Failure::of_command(&error))
}

/// The stack of a command, which is that of a program's first thread.
const STACK: usize = 8 << 20;

impl Running {
    fn run(&self, cli: Cli) {
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
            Err(panic) => Err(Failure::of_panic(panic.as_ref())),
        };
        // What goes with the surroundings, such as the entry of the machine-wide reservations, goes before anyone hears of the end.
        drop(around);
        let _ = self.end.set(end);
        self.control.end();
    }

    /// Stops the run at the end of the minibatches that have begun. What was trained is written and reported.
    pub fn stop(&self) {
        self.control.stop_flag().stop();
    }

    /// Stops a task at the end of the minibatch that has begun, as [`stop`](Self::stop) stops all: whoever goes on with the run
    /// goes on with it. A name that no task has does nothing.
    pub fn stop_task(&self, name: &str) {
        self.control.task(name).stop();
    }

    /// Gives the run a command, a line of JSON such as `hydra ctl` sends, and returns its answer, which is one too. A run that has
    /// just begun listens soon: gives nothing if it does not within this time, or has ended.
    pub fn run_command(&self, line: &str, patience: Duration) -> Option<String> {
        self.control.ask(line, patience)
    }

    /// Waits for the end, but at most so long; gives nothing if it has not come.
    pub fn wait(&self, patience: Duration) -> Option<&Result<End, Failure>> {
        drop(self.control.until(patience, |state| state.ended));
        self.end.get()
    }

    /// Waits until the command knows its run directory, but at most so long; gives nothing if it does not, or has none.
    pub fn directory(&self, patience: Duration) -> Option<PathBuf> {
        self.control.until(patience, |state| state.ended || state.directory.is_some()).directory.clone()
    }

    /// Waits until the run has begun to train or the command has ended, but at most so long, and returns whether it has.
    pub fn begun(&self, patience: Duration) -> bool {
        let state = self.control.until(patience, |state| state.ended || state.lines.is_some());
        state.ended || state.lines.is_some()
    }

    /// The events of the run from its beginning, which are the lines of its `metrics.jsonl`.
    pub fn events(&self) -> Events {
        Events::new(self.control.clone())
    }

    /// The result of a command that has ended, as the program would have printed it.
    pub fn output(&self) -> String {
        self.control.state().output.clone()
    }

    /// What went wrong beside the result, a line each: tasks that failed, files that could not be written.
    pub fn errors(&self) -> Vec<String> {
        self.control.state().errors.clone()
    }
}

/// The report of a run directory as JSON, also of a run that is under way, with what is known of its tasks, or of several
/// together; the tasks are in the order of the leaderboard, each with its `rank`, or without where it has none.
///
/// # Errors
/// A directory without a run, and a report that cannot be read.
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
