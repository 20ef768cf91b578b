//! The command line `hydra`: what a user types, sees and finds in a run directory.
//!
//! [`run`] reads the arguments and does what they say, and [`embedded`] does it inside of another program. Rooms import those below them, never one above:
//!
//! | room | what it holds |
//! | --- | --- |
//! | `embedded` | the commands inside of another program, as the Python package runs them |
//! | `cli` | the commands by name, and their help |
//! | `commands` | the commands, one file each |
//! | `checklist`, `simulator` | what `check` tries of a device; what `simulate` and `compare` share |
//! | `session` | the model and the data, the orchestrator, and a run of its tasks |
//! | `page` | runs in a browser: the server, and the page's files |
//! | `screen` | a run in a terminal |
//! | `trackers` | runs in other programs: TensorBoard and MLflow |
//! | `run_dir` | the run directory: its files, the spec, the logs |
//! | `settings` | the flags in groups, which are also the tables of `spec.toml` |
//! | `machine`, `plots` | what the machine has and lacks; schedules, curves and bars |
//! | `terminal` | errors and exit statuses, the log, progress, tables |
//! | `control_socket` | the socket on which a run is steered |
//! | `control` | what a command shares with a program around it |
//!
//! Invariant: this crate never computes anything that a result depends on; it reads flags, hands them to
//! the engine, and shows what came back.
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

/// Does what the arguments say (the first is the program's name) and gives the exit status: 0 when all was
/// done, 1 when something failed, 2 when the command line is wrong, 130 when the run was interrupted.
///
/// Device memory is measured in a program that installs the counting allocator of `hydra-spill`.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let is_bare = arguments.len() <= 1;
    let cli = match Cli::read(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and versions come here too. Where they cannot be printed, nobody is listening.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    // Of a run, a flag says how progress is shown; other commands draw bars where they can.
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
