//! Errors: their exit statuses, and how they are printed.

use anyhow::Context;
use std::cell::Cell;
use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

/// The exit status of an interrupted run: 128 plus the number of SIGINT.
pub(crate) const INTERRUPTED: u8 = 130;

/// A wrong command line whose values can all be parsed.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Usage {
    message: String,
    #[source]
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl Usage {
    /// An error of usage with this message.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), source: None }
    }

    /// A usage error found by another crate.
    pub fn from_error(error: impl Error + Send + Sync + 'static) -> Self {
        Self { message: "invalid setting".to_owned(), source: Some(Box::new(error)) }
    }
}

/// The run was interrupted before it started.
#[derive(Debug, thiserror::Error)]
#[error("interrupted before anything was trained")]
pub(crate) struct Interrupted;

/// The end of a command that returned no error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything was done: exit status 0.
    Done,
    /// Something failed: exit status 1.
    Failed,
    /// The command was interrupted: exit status 130.
    Interrupted,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::SUCCESS,
            Outcome::Failed => Self::FAILURE,
            Outcome::Interrupted => Self::from(INTERRUPTED),
        }
    }
}

/// The exit status of an error: 2 when the command line is wrong, 130 after an interrupt, 1 otherwise.
pub fn status(error: &anyhow::Error) -> u8 {
    if error.chain().any(|cause| cause.is::<Usage>()) {
        return 2;
    }
    if error.is::<Interrupted>() { INTERRUPTED } else { 1 }
}

/// The error and its causes, a line each.
pub fn render(error: &anyhow::Error) -> String {
    let mut text = format!("error: {error}\n");
    for cause in error.chain().skip(1) {
        text.push_str(&format!("  caused by: {cause}\n"));
    }
    text
}

thread_local! {
    /// True while this thread repeats work whose notes were printed before.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` and suppresses the notes that this thread prints during it, because they were printed before.
pub fn quietly<T>(work: impl FnOnce() -> T) -> T {
    struct Restored(bool);
    impl Drop for Restored {
        fn drop(&mut self) {
            QUIET.set(self.0);
        }
    }
    let _restored = Restored(QUIET.replace(true));
    work()
}

/// Prints a line on standard error. Write errors, such as a full disk, are ignored.
pub fn tell(line: &str) {
    if QUIET.get() {
        return;
    }
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Writes to standard output. A closed pipe (`hydra report DIR | head`) is not an error.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("standard output could not be written"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_printed_and_decide_the_status() {
        let usage = anyhow::Error::new(Usage::new("no such thing")).context("the spec cannot be run");
        assert_eq!(render(&usage), "error: the spec cannot be run\n  caused by: no such thing\n");
        assert_eq!(status(&usage), 2);
        assert_eq!(status(&Interrupted.into()), 130);
        let file = std::fs::read("/nonexistent").context("no file").unwrap_err();
        assert_eq!(status(&file), 1);
        assert!(render(&file).starts_with("error: no file\n  caused by: "));
    }
}
