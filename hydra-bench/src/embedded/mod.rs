//! Runs command lines inside another program: the same flags and runs as on a terminal.
//!
//! The module reads arguments and starts their command by [`hydra_run::embedded`]. It never prints, never handles interrupts, and
//! is independent of the embedding language.

mod keywords;

pub use keywords::{Hint, Keyword, hint, keywords, renamed};

use crate::cli::{Cli, Command};
use crate::commands::select;
use hydra_run::control::Control;
use hydra_run::embedded::{self, Failure, Kind, OwnModel, Running, TextMetric};
use hydra_run::session::{Environment, Registered};
use hydra_run::terminal::Show;
use std::ffi::OsString;
use std::sync::Arc;

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
    embedded::start(move |around| cli.run(around), own, metric)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_argument_is_named_without_words_about_command_lines() {
        let error = start(["select", "--device-memory=lots"].map(OsString::from), [], None).unwrap_err();
        assert_eq!((error.kind, error.keyword.as_deref()), (Kind::Usage, Some("device_memory")));
        let message = error.message;
        assert!(message.starts_with("invalid value 'lots'") && !message.contains("Usage"), "{message}");
        assert!(!message.contains("more information"), "{message}");
    }
}
