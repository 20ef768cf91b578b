//! A running command and its events. Every wait releases the GIL, and handles signals ten times per second.

use crate::errors::exception;
use crate::torch::{described, own_model};
use hydra_run::embedded::{self, End, Failure, Next, TextMetric};
use pyo3::prelude::*;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The interval at which signals, such as Ctrl-C, are handled during a wait.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Polls until there is an answer or a signal handler raises. Returns `None` after `timeout` seconds.
fn poll<T: Send>(
    py: Python<'_>,
    timeout: Option<f64>,
    mut attempt: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    // A timeout beyond the range of the clock is infinite.
    let timeout = timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok());
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let patience = left.unwrap_or(SIGNAL_INTERVAL).min(SIGNAL_INTERVAL);
        if let Some(answer) = py.detach(|| attempt(patience)) {
            return Ok(Some(answer));
        }
        py.check_signals()?;
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(None);
        }
    }
}

/// Starts a command, given its command line arguments, a model of this program that they name, and a metric: its name, whether
/// larger values are better, and a function of prompt, text and reference.
#[pyfunction]
#[pyo3(signature = (arguments, own=None, metric=None))]
pub(crate) fn start(
    py: Python<'_>,
    arguments: Vec<OsString>,
    own: Option<Bound<'_, PyAny>>,
    metric: Option<(String, bool, Py<PyAny>)>,
) -> PyResult<Running> {
    let own = own.map(|own| own_model(&own)).transpose()?.map(Arc::new);
    let metric = metric.map(|(name, higher_is_better, function)| TextMetric {
        name,
        higher_is_better,
        score: Arc::new(move |prompt, text, reference| {
            let value = Python::try_attach(|py| {
                let value = function.call1(py, (prompt, text, reference));
                let value = value.and_then(|value| value.extract::<f64>(py));
                value.map_err(|error| described(py, &error).into())
            });
            value.unwrap_or_else(|| Err("the interpreter has ended".into()))
        }),
    });
    let started = py.detach(|| hydra_bench::embedded::start(arguments, own, metric));
    started.map(Running).map_err(|failure| exception(py, &failure))
}

/// Returns the report of one or several run directories as JSON, with the tasks in the order of the leaderboard.
#[pyfunction]
pub(crate) fn report(py: Python<'_>, directories: Vec<PathBuf>) -> PyResult<String> {
    py.detach(|| embedded::report(&directories)).map_err(|failure| exception(py, &failure))
}

/// Returns the merged report of the runs of one grid as JSON, also if one run has trained it all.
#[pyfunction]
pub(crate) fn merged_report(py: Python<'_>, directories: Vec<PathBuf>) -> PyResult<String> {
    py.detach(|| embedded::merged_report(&directories)).map_err(|failure| exception(py, &failure))
}

/// Returns the `spec.toml` of a grid, given the arguments of `select` and a model of this program that they name.
#[pyfunction]
#[pyo3(signature = (arguments, own=None))]
pub(crate) fn spec(
    py: Python<'_>,
    arguments: Vec<OsString>,
    own: Option<Bound<'_, PyAny>>,
) -> PyResult<String> {
    let own = own.map(|own| own_model(&own)).transpose()?.map(Arc::new);
    py.detach(|| hydra_bench::embedded::spec(arguments, own)).map_err(|failure| exception(py, &failure))
}

/// Returns the version, the operating system and the processor as JSON.
#[pyfunction]
pub(crate) fn machine() -> String {
    embedded::machine()
}

/// A command that runs on its own thread.
#[pyclass(frozen, module = "hydra_train._native")]
pub(crate) struct Running(embedded::Running);

#[pymethods]
impl Running {
    /// Stops the run at the end of the current minibatches.
    fn stop(&self) {
        self.0.stop();
    }

    /// Stops a task at the end of its current minibatch. A resumed run continues it.
    fn stop_task(&self, name: &str) {
        self.0.stop_task(name);
    }

    /// Sends a run control command as a line of JSON, and returns the answer; `None` if the run has ended.
    fn command(&self, py: Python<'_>, line: String) -> PyResult<Option<String>> {
        let send = |patience| {
            // Checked before the command: a run that had ended before it does not answer.
            let ended = self.0.wait(Duration::ZERO).is_some();
            let answer = self.0.run_command(&line, patience);
            (ended || answer.is_some()).then_some(answer)
        };
        poll(py, None, send).map(Option::flatten)
    }

    /// Waits for the end and returns `done`, `failed` or `stopped`; `None` after `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<&'static str>> {
        let end = poll(py, timeout, |patience| self.0.wait(patience).cloned())?;
        end.transpose().map(|end| end.map(word)).map_err(|failure: Failure| exception(py, &failure))
    }

    /// Waits until the run has started training or the command has ended. Returns false after `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn begun(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let begun = poll(py, timeout, |patience| self.0.begun(patience).then_some(()))?;
        Ok(begun.is_some())
    }

    /// Waits for the run directory; `None` if the command has ended without one.
    fn directory(&self, py: Python<'_>) -> PyResult<Option<PathBuf>> {
        let known = |patience| {
            // Checked before the directory: what is not known at the end never will be.
            let ended = self.0.wait(Duration::ZERO).is_some();
            let found = self.0.directory(patience);
            (ended || found.is_some()).then_some(found)
        };
        poll(py, None, known).map(Option::flatten)
    }

    /// Returns an iterator over the events, from the first one.
    fn events(&self) -> Events {
        Events(self.0.events())
    }

    /// Returns the result of an ended command, as JSON or as a table.
    fn output(&self) -> String {
        self.0.output()
    }

    /// Returns the warnings and errors, one line each.
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

/// An iterator over the events of a run, each a JSON object.
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
        Ok(poll(py, None, next)?.transpose()?.flatten())
    }
}
