//! A command that runs, and its events. Whatever waits releases the interpreter's lock, and hears signals ten times a second.

use crate::errors::exception;
use hydra_bench::embedded::{self, End, Failure, Next};
use pyo3::prelude::*;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Signals, such as that of Ctrl-C, are heard so often while something waits.
const HEARD_EVERY: Duration = Duration::from_millis(100);

/// Asks again and again until there is an answer or a signal's handler raises; gives nothing when `timeout` seconds are over.
fn answered<T: Send>(
    py: Python<'_>,
    timeout: Option<f64>,
    mut ask: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    // What is too long for a clock is for ever.
    let timeout = timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok());
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let patience = left.unwrap_or(HEARD_EVERY).min(HEARD_EVERY);
        if let Some(answer) = py.detach(|| ask(patience)) {
            return Ok(Some(answer));
        }
        py.check_signals()?;
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(None);
        }
    }
}

/// Starts the command that the arguments say.
#[pyfunction]
pub(crate) fn start(py: Python<'_>, arguments: Vec<OsString>) -> PyResult<Running> {
    let started = py.detach(|| embedded::start(arguments));
    started.map(Running).map_err(|failure| exception(py, &failure))
}

/// The report of a run directory as JSON, or of several together, with its tasks in the order of the leaderboard.
#[pyfunction]
pub(crate) fn report(py: Python<'_>, directories: Vec<PathBuf>) -> PyResult<String> {
    py.detach(|| embedded::report(&directories)).map_err(|failure| exception(py, &failure))
}

/// The `spec.toml` with which a grid would begin here, by the arguments of `select`.
#[pyfunction]
pub(crate) fn spec(py: Python<'_>, arguments: Vec<OsString>) -> PyResult<String> {
    py.detach(|| embedded::spec(arguments)).map_err(|failure| exception(py, &failure))
}

/// The program, its system and the processor, as JSON.
#[pyfunction]
pub(crate) fn machine() -> String {
    embedded::machine()
}

/// A command on a thread of its own.
#[pyclass(frozen, module = "hydra_train._native")]
pub(crate) struct Running(embedded::Running);

#[pymethods]
impl Running {
    /// Stops the run at the end of the minibatches that have begun.
    fn stop(&self) {
        self.0.stop();
    }

    /// Stops a task at the end of the minibatch that has begun; whoever goes on with the run goes on with it.
    fn stop_task(&self, name: &str) {
        self.0.stop_task(name);
    }

    /// Gives the run a command as a line of JSON and returns its answer; nothing of a run that has ended.
    fn steer(&self, py: Python<'_>, line: String) -> PyResult<Option<String>> {
        let ask = |patience| {
            // Asked first: a run that had ended before it was asked does not answer any more.
            let ended = self.0.wait(Duration::ZERO).is_some();
            let answer = self.0.run_command(&line, patience);
            (ended || answer.is_some()).then_some(answer)
        };
        answered(py, None, ask).map(Option::flatten)
    }

    /// Waits for the end: `done`, `failed` or `stopped`, or nothing where it does not come in `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<&'static str>> {
        let end = answered(py, timeout, |patience| self.0.wait(patience).cloned())?;
        end.transpose().map(|end| end.map(word)).map_err(|failure: Failure| exception(py, &failure))
    }

    /// Waits until the run has begun to train or the command has ended; returns whether it has within `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn begun(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let begun = answered(py, timeout, |patience| self.0.begun(patience).then_some(()))?;
        Ok(begun.is_some())
    }

    /// Waits for the run directory; gives nothing of a command that has ended without one.
    fn directory(&self, py: Python<'_>) -> PyResult<Option<PathBuf>> {
        let known = |patience| {
            // Asked first: what is not known at the end never will be.
            let ended = self.0.wait(Duration::ZERO).is_some();
            let found = self.0.directory(patience);
            (ended || found.is_some()).then_some(found)
        };
        answered(py, None, known).map(Option::flatten)
    }

    /// The events, from the first one.
    fn events(&self) -> Events {
        Events(self.0.events())
    }

    /// The result of a command that has ended, as JSON or as a table.
    fn output(&self) -> String {
        self.0.output()
    }

    /// What went wrong beside the result, a line each.
    fn errors(&self) -> Vec<String> {
        self.0.errors()
    }
}

fn word(end: End) -> &'static str {
    match end {
        End::Done => "done",
        End::Failed => "failed",
        End::Stopped => "stopped",
    }
}

/// The events of a run, each an object of JSON.
#[pyclass(module = "hydra_train._native")]
pub(crate) struct Events(embedded::Events);

#[pymethods]
impl Events {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<String>> {
        let next = |patience| match self.0.next(patience) {
            Ok(Next::Event(event)) => Some(Ok(Some(event))),
            Ok(Next::Later) => None,
            Ok(Next::End) => Some(Ok(None)),
            Err(error) => Some(Err(error)),
        };
        Ok(answered(py, None, next)?.transpose()?.flatten())
    }
}
