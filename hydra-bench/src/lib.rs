//! The command line `hydra`: its commands and the paper's experiments. Runs are in [`hydra_run`].
//!
//! [`run`] executes a command line, and [`embedded`] does so inside another program. Modules import modules below them in this
//! table, never above:
//!
//! | module | contents |
//! | --- | --- |
//! | `embedded` | command lines inside another program, as the Python package runs them |
//! | `cli` | the command line and its help |
//! | `commands` | the commands, one file each |
//! | `checklist`, `simulator` | the items of `check`; the shared code of `simulate` and `compare` |
//! | `terminal_dashboard` | a run in a terminal |
//!
//! Invariant: this crate computes nothing that a result depends on. It parses flags, passes them on, and shows the results.
#![forbid(unsafe_code)]

mod checklist;
mod cli;
mod commands;
pub mod embedded;
mod simulator;
mod terminal_dashboard;

use cli::Cli;
use hydra_run::session::Environment;
use hydra_run::terminal::{Show, error, interactive, log, panics};
use std::ffi::OsString;
use std::process::ExitCode;

/// Executes a command line, the program's name first, and returns the exit status: 0 if everything succeeded, 1 if something
/// failed, 2 if the command line is wrong, 130 if the run was interrupted.
///
/// Device memory is measured only in a program that installs the counting allocator of `hydra-spill`.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let is_bare = arguments.len() <= 1;
    let cli = match Cli::read(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are errors of the parser, too. A failure to print them is ignored.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    // Runs choose their progress display with `--progress`; other commands draw bars on a terminal.
    let show = if interactive() { Show::Bars } else { Show::Nothing };
    let around = Environment::look(show);
    log::to(&around.terminal);
    panics::keep_workers_quiet();
    if is_bare {
        cli::announce();
    }
    match cli.run(&around) {
        Ok(outcome) => outcome.into(),
        Err(error) => {
            error::tell(error::render(&error).trim_end());
            ExitCode::from(error::status(&error))
        }
    }
}
