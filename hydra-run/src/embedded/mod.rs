//! Runs a command inside another program: its end, its events and its errors as values.
//!
//! The module uses the environment of a command and the control state. It never reads arguments, never prints, never handles
//! interrupts, and is independent of the embedding language.

mod events;
mod failure;

pub use crate::control::TextMetric;
pub use crate::session::OwnModel;
pub use events::{Events, Next};
pub use failure::{Failure, Kind};

use crate::control::Control;
use crate::machine::kind;
use crate::run_dir::{Journal, Merged, Report, is_taken, is_unfinished, read_report};
use crate::session::{Environment, Registered};
use crate::terminal::{Outcome, Show, log, panics};
use hydra_spill::alloc::ReturnsFreed;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
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

/// Starts `command` on its own thread. It finds `own`, models of this program, by the names in its settings, or in those of the run
/// that it resumes. `metric` is a metric of generated texts that the settings may name.
///
/// Device memory is measured only in a program that installs the counting allocator of `hydra-spill`.
///
/// # Errors
/// If the thread cannot be started.
pub fn start(
    command: impl FnOnce(&Environment) -> anyhow::Result<Outcome> + Send + 'static,
    own: impl IntoIterator<Item = Arc<OwnModel>>,
    metric: Option<TextMetric>,
) -> Result<Running, Failure> {
    let running = Running { control: Control::new(metric), end: Arc::default() };
    let of_thread = running.clone();
    // The name keeps the panic hook quiet: a panic is an error of this command.
    let thread = std::thread::Builder::new().name("hydra-command".to_owned()).stack_size(STACK);
    let own: Vec<Arc<OwnModel>> = own.into_iter().collect();
    thread.spawn(move || of_thread.run(command, own)).map_err(|error| Failure::of_thread(&error))?;
    Ok(running)
}

/// Returns the program, its target system and the processor as JSON. The bits of results depend on them in addition to the run.
pub fn machine() -> String {
    kind().to_string()
}

/// The stack size of a command, equal to that of a program's main thread.
const STACK: usize = 8 << 20;

impl Running {
    fn run(&self, command: impl FnOnce(&Environment) -> anyhow::Result<Outcome>, own: Vec<Arc<OwnModel>>) {
        let own: Vec<Registered> = own.into_iter().map(Registered::new).collect();
        let around = Environment::look(Show::Nothing).inside(self.control.clone());
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            log::to(&around.terminal);
            panics::keep_workers_quiet();
        });
        let result = catch_unwind(AssertUnwindSafe(|| command(&around)));
        let end = match result {
            Ok(Ok(Outcome::Done)) => Ok(End::Done),
            Ok(Ok(Outcome::Failed)) => Ok(End::Failed),
            Ok(Ok(Outcome::Interrupted)) => Ok(End::Stopped),
            Ok(Err(error)) => Err(Failure::of_command(&error)),
            Err(panic) => Err(Failure::from_panic(panic.as_ref())),
        };
        // The environment is dropped, with its reservation, before the end is published.
        drop((around, own));
        // The program gets the memory that the command freed, which the allocator would keep for the next minibatch.
        drop(ReturnsFreed::start());
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
    let text = match directories {
        [directory] => report_of_one(directory),
        several => merged(several),
    };
    ranked(text)
}

/// Returns the merged report of the runs of one grid as [`report`] does, also if one run has trained it all.
///
/// # Errors
/// If a directory has no run, or its report cannot be read.
pub fn merged_report(directories: &[PathBuf]) -> Result<String, Failure> {
    ranked(merged(directories))
}

fn report_of_one(directory: &Path) -> anyhow::Result<String> {
    if is_unfinished(directory) {
        return Journal::read(directory)?.to_json(is_taken(directory));
    }
    read_report(directory)
}

fn merged(directories: &[PathBuf]) -> anyhow::Result<String> {
    Merged::read(directories)?.to_json()
}

fn ranked(text: anyhow::Result<String>) -> Result<String, Failure> {
    text.and_then(|text| Report::with_ranks(&text)).map_err(|error| Failure::of_command(&error))
}
