//! The command line `hydra`: its commands, its output and its run directories.
//!
//! [`run`] executes a command line, and [`embedded`] does so inside another program. Modules import modules below them in this
//! table, never above:
//!
//! | module | contents |
//! | --- | --- |
//! | `embedded` | the commands inside another program, as the Python package runs them |
//! | `cli` | the command line and its help |
//! | `commands` | the commands, one file each |
//! | `checklist`, `simulator` | the items of `check`; the shared code of `simulate` and `compare` |
//! | `session` | loading of models and data, the orchestrator, and a run of its tasks |
//! | `dashboard` | runs in a browser: the server and the dashboard's files |
//! | `terminal_dashboard` | a run in a terminal |
//! | `trackers` | experiment trackers: TensorBoard and MLflow |
//! | `run_dir` | the run directory: its files, the spec, the logs |
//! | `settings` | groups of flags, which are also the tables of `spec.toml` |
//! | `machine`, `plots` | memory, devices and drivers of the machine; plots of runs |
//! | `terminal` | errors and exit statuses, the log, progress, tables |
//! | `control_socket` | the socket that receives the commands of run control |
//! | `control` | the state that a command shares with an embedding program |
//!
//! Invariant: this crate computes nothing that a result depends on. It parses flags, passes them to the engine, and shows the
//! results.
#![forbid(unsafe_code)]

mod checklist;
mod cli;
mod commands;
mod control;
mod control_socket;
mod dashboard;
pub mod embedded;
mod machine;
mod plots;
mod run_dir;
mod session;
mod settings;
mod simulator;
mod terminal;
mod terminal_dashboard;
mod trackers;

use cli::Cli;
use session::orchestrator::Environment;
use std::ffi::OsString;
use std::process::ExitCode;
use terminal::{Show, error, interactive, log, panics};

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
