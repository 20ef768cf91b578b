//! What a command that runs inside of another program shares with it: where it writes, how far it is, when it is to stop.
//! It may touch the engine's stop flags; of this crate it imports nothing.
//! It never reads a file and never decides what is trained.

use hydra_engine::StopFlag;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The end of a command's state that the command holds, and the program around it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Control(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    stop: StopFlag,
    state: Mutex<State>,
    changed: Condvar,
}

/// What answers the commands of a run, lines of JSON, as its socket does.
type Answer = Arc<dyn Fn(&str) -> String + Send + Sync>;

/// What the command has told.
#[derive(Default)]
pub(crate) struct State {
    /// The run directory, once the command knows which.
    pub(crate) directory: Option<PathBuf>,
    /// The lines of `metrics.jsonl`, once it is open.
    pub(crate) lines: Option<Lines>,
    /// The result, as the program would have printed it.
    pub(crate) output: String,
    /// What went wrong beside it, a line each.
    pub(crate) errors: Vec<String>,
    /// True if the command has come to its end.
    pub(crate) ended: bool,
    tasks: BTreeMap<String, StopFlag>,
    /// What steers the run, while it goes on.
    answer: Option<Answer>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { directory, ended, .. } = self;
        f.debug_struct("State").field("directory", directory).field("ended", ended).finish_non_exhaustive()
    }
}

/// The part of `metrics.jsonl` that a run has written, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lines {
    /// Its beginning: what is before it is of earlier parts of the run.
    pub(crate) first: u64,
    /// The end of its whole lines.
    pub(crate) whole: u64,
}

impl Control {
    /// The flag that stops the whole run.
    pub(crate) fn stop_flag(&self) -> StopFlag {
        self.0.stop.clone()
    }

    /// The flag that stops a task, which need not have been submitted yet.
    pub(crate) fn task(&self, name: &str) -> StopFlag {
        self.state().tasks.entry(name.to_owned()).or_default().clone()
    }

    pub(crate) fn in_directory(&self, path: &Path) {
        // The program may go to another directory meanwhile.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        self.tell(|state| state.directory = Some(path));
    }

    /// `metrics.jsonl` has whole lines up to here; those before the first time it is told are of earlier parts of the run.
    pub(crate) fn written(&self, whole: u64) {
        self.tell(|state| state.lines.get_or_insert(Lines { first: whole, whole }).whole = whole);
    }

    /// The run is steered by lines that this answers.
    pub(crate) fn listen(&self, answer: impl Fn(&str) -> String + Send + Sync + 'static) {
        self.tell(|state| state.answer = Some(Arc::new(answer)));
    }

    /// The run is over, and is steered no more.
    pub(crate) fn listen_no_more(&self) {
        self.tell(|state| state.answer = None);
    }

    /// Steers the run once it can be, but gives nothing if it has ended, or if that takes longer.
    pub(crate) fn ask(&self, line: &str, patience: Duration) -> Option<String> {
        let answer = self.until(patience, |state| state.ended || state.answer.is_some()).answer.clone();
        // It may take a while, and the run tells of itself meanwhile.
        answer.map(|answer| answer(line))
    }

    pub(crate) fn print(&self, text: &str) {
        self.tell(|state| state.output.push_str(text));
    }

    pub(crate) fn errors(&self, lines: impl IntoIterator<Item = String>) {
        self.tell(|state| state.errors.extend(lines));
    }

    pub(crate) fn end(&self) {
        self.tell(|state| state.ended = true);
    }

    fn tell(&self, what: impl FnOnce(&mut State)) {
        what(&mut self.state());
        self.0.changed.notify_all();
    }

    /// What the command has told so far.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done` says so, but at most so long, and returns what the command has told then.
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
    fn what_is_told_is_known_and_ends_the_waiting() {
        let (control, told) = (Control::default(), Control::default());
        assert!(!control.until(Duration::ZERO, |state| state.ended).ended);
        let (other, here) = (told.clone(), std::path::absolute("here").unwrap());
        let teller = std::thread::spawn(move || {
            other.in_directory(Path::new("here"));
            other.written(10);
            other.written(30);
            other.print("{}");
            other.end();
        });
        // Whatever is told wakes who waits; only the end is enough.
        let state = told.until(Duration::MAX, |state| state.ended);
        assert_eq!((state.directory.as_deref(), state.output.as_str()), (Some(here.as_path()), "{}"));
        assert_eq!(state.lines, Some(Lines { first: 10, whole: 30 }));
        drop(state);
        teller.join().unwrap();
    }

    #[test]
    fn commands_are_answered_while_the_run_goes_on() {
        let control = Control::default();
        assert_eq!(control.ask("a", Duration::ZERO), None);
        control.listen(|line| format!("<{line}>"));
        assert_eq!(control.ask("a", Duration::MAX).as_deref(), Some("<a>"));
        control.listen_no_more();
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
