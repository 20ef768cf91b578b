//! The state that an embedded command shares with the program around it: its run directory, its progress, its stop flags.
//! It may touch the engine's stop flags; of this crate it imports nothing.
//! It never reads a file and never decides what is trained.

use hydra_engine::StopFlag;
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A handle to the state that a command shares with the program around it.
#[derive(Clone, Debug, Default)]
pub struct Control(Arc<SharedControl>);

/// A metric that the program around a command computes.
#[derive(Clone)]
pub struct TextMetric {
    /// Its name, by which `--metric` selects it.
    pub name: String,
    /// Whether larger values are better.
    pub higher_is_better: bool,
    /// The value for a prompt, the text that was generated, and the reference, in this order. The metric is the mean over the
    /// validation rows.
    #[expect(clippy::type_complexity, reason = "a function of three texts")]
    pub score: Arc<dyn Fn(&str, &str, &str) -> Result<f64, Box<dyn Error + Send + Sync>> + Send + Sync>,
}

impl fmt::Debug for TextMetric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TextMetric").field(&self.name).finish()
    }
}

#[derive(Debug, Default)]
struct SharedControl {
    stop: StopFlag,
    metric: Option<TextMetric>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Answers run control commands, which are lines of JSON, as the control socket does.
type Answer = Arc<dyn Fn(&str) -> String + Send + Sync>;

/// The state that the command has published.
#[derive(Default)]
pub struct State {
    /// The run directory, once it is known.
    pub(crate) directory: Option<PathBuf>,
    /// The lines of `metrics.jsonl`, once it is open.
    pub(crate) lines: Option<LogRange>,
    /// The result, as the command line prints it.
    pub output: String,
    /// The warnings and errors, one line each.
    pub(crate) errors: Vec<String>,
    /// True if the command has ended.
    pub(crate) ended: bool,
    tasks: BTreeMap<String, StopFlag>,
    /// The handler of run control commands, during the run.
    answer: Option<Answer>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { directory, ended, .. } = self;
        f.debug_struct("State").field("directory", directory).field("ended", ended).finish_non_exhaustive()
    }
}

/// The part of `metrics.jsonl` that this command has written, as byte offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogRange {
    /// The start; lines before it are of earlier parts of the run.
    pub(crate) first: u64,
    /// The end of the last complete line.
    pub(crate) whole: u64,
}

impl Control {
    /// Returns the state of a command whose program computes a metric.
    pub fn new(metric: Option<TextMetric>) -> Self {
        Self(Arc::new(SharedControl { metric, ..SharedControl::default() }))
    }

    /// Returns the metric that the program computes, if any.
    pub(crate) fn metric(&self) -> Option<&TextMetric> {
        self.0.metric.as_ref()
    }

    /// Returns the flag that stops the whole run.
    pub fn stop_flag(&self) -> StopFlag {
        self.0.stop.clone()
    }

    /// Returns the flag that stops a task, which may be submitted later.
    pub(crate) fn task(&self, name: &str) -> StopFlag {
        self.state().tasks.entry(name.to_owned()).or_default().clone()
    }

    /// Sets the run directory.
    pub fn in_directory(&self, path: &Path) {
        // The program may change its working directory later.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        self.update(|state| state.directory = Some(path));
    }

    /// Sets the end of the complete lines of `metrics.jsonl`. The first call also sets their start: lines before it are of
    /// earlier parts of the run.
    pub(crate) fn written(&self, whole: u64) {
        self.update(|state| state.lines.get_or_insert(LogRange { first: whole, whole }).whole = whole);
    }

    /// Sets the handler of run control commands.
    pub(crate) fn listen(&self, answer: impl Fn(&str) -> String + Send + Sync + 'static) {
        self.update(|state| state.answer = Some(Arc::new(answer)));
    }

    /// Removes the handler of run control commands, at the end of the run.
    pub(crate) fn stop_listening(&self) {
        self.update(|state| state.answer = None);
    }

    /// Sends a command to the run once it has a handler, and returns the answer; `None` if the run has ended, or has no handler
    /// within `patience`.
    pub(crate) fn ask(&self, line: &str, patience: Duration) -> Option<String> {
        let answer = self.until(patience, |state| state.ended || state.answer.is_some()).answer.clone();
        // Outside the lock: the answer may take long, and the run publishes its state meanwhile.
        answer.map(|answer| answer(line))
    }

    /// Appends to the result.
    pub(crate) fn print(&self, text: &str) {
        self.update(|state| state.output.push_str(text));
    }

    /// Appends warnings and errors.
    pub(crate) fn errors(&self, lines: impl IntoIterator<Item = String>) {
        self.update(|state| state.errors.extend(lines));
    }

    /// Marks the command as ended.
    pub(crate) fn end(&self) {
        self.update(|state| state.ended = true);
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.0.changed.notify_all();
    }

    /// Returns the current state.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done` returns true, for at most `patience`, and returns the state.
    pub(crate) fn until(&self, patience: Duration, done: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let end = Instant::now().checked_add(patience);
        let mut state = self.state();
        loop {
            let left = end.map_or(patience, |end| end.saturating_duration_since(Instant::now()));
            if done(&state) || left.is_zero() {
                return state;
            }
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_is_visible_and_ends_the_waiting() {
        let (control, updated) = (Control::default(), Control::default());
        assert!(!control.until(Duration::ZERO, |state| state.ended).ended);
        let (other, here) = (updated.clone(), std::path::absolute("here").unwrap());
        let updating = std::thread::spawn(move || {
            other.in_directory(Path::new("here"));
            other.written(10);
            other.written(30);
            other.print("{}");
            other.end();
        });
        // Every update wakes the waiting thread; only the end satisfies it.
        let state = updated.until(Duration::MAX, |state| state.ended);
        assert_eq!((state.directory.as_deref(), state.output.as_str()), (Some(here.as_path()), "{}"));
        assert_eq!(state.lines, Some(LogRange { first: 10, whole: 30 }));
        drop(state);
        updating.join().unwrap();
    }

    #[test]
    fn commands_are_answered_while_the_run_goes_on() {
        let control = Control::default();
        assert_eq!(control.ask("a", Duration::ZERO), None);
        control.listen(|line| format!("<{line}>"));
        assert_eq!(control.ask("a", Duration::MAX).as_deref(), Some("<a>"));
        control.stop_listening();
        control.end();
        assert_eq!(control.ask("a", Duration::MAX), None);
    }

    #[test]
    fn a_task_has_one_flag_before_and_after_it_is_submitted() {
        let control = Control::default();
        control.task("one").stop();
        assert!(control.task("one").is_stopped());
        assert!(!control.task("two").is_stopped() && !control.stop_flag().is_stopped());
    }
}
