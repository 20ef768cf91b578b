//! The command line `hydra`: what a user types, sees and finds in a run directory.
//!
//! [`run`] reads the arguments and does what they say. Everything that touches the other crates stands in
//! few places: `workload` (models and texts), `session` (devices and orchestrator) and the commands.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `args`, `parse` | the flags, their help and the readers of their values |
//! | `spec`, `machine`, `procfs` | the spec of a run, every flag resolved; what the machine has |
//! | `workload`, `inputs`, `session` | the model and the texts; their hashes; the devices and the orchestrator |
//! | `train`, `resume`, `eval`, `partition`, `step`, `show` | the commands |
//! | `doctor` | what a GPU needs and what of it is here, for the command and for `--devices` |
//! | `check` | the checklist of a device, with figures |
//! | `simulate`, `compare`, `lab` | the commands of the scheduler's laboratory, and what they share |
//! | `rundir`, `runlog`, `trace` | the run directory, `metrics.jsonl` and the Chrome trace |
//! | `schedule`, `losses`, `bars`, `canvas`, `colour` | the pictures |
//! | `progress`, `leaderboard`, `needs`, `table` | what is printed |
//! | `error`, `log`, `stop` | exit statuses, the log, Ctrl-C |
//!
//! Invariant: this crate never computes anything that a result depends on; it reads flags, hands them to
//! the engine, and shows what came back.
#![forbid(unsafe_code)]

mod checklist;
mod commands;
mod laboratory;
mod machine;
mod pictures;
mod run_dir;
mod session;
mod settings;
mod terminal;

use clap::Parser;
use commands::{check, compare, doctor, eval, partition, report, resume, simulate, step};
use machine::resources::Machine;
use run_dir::spec::RunSpec;
use session::orchestrator::Surroundings;
use session::run;
use settings::args::{Cli, Command};
use std::ffi::OsString;
use std::process::ExitCode;
use terminal::error::{self, Outcome};
use terminal::log;

/// Does what the arguments say (the first is the program's name) and gives the exit status: 0 when all was
/// done, 1 when something failed, 2 when the command line is wrong, 130 when the run was interrupted.
///
/// Device memory is measured in a program that installs the counting allocator of `hydra-spill`.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and versions come here too. Where they cannot be printed, nobody is listening.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let around = Surroundings { machine: Machine::look(), terminal: indicatif::MultiProgress::new() };
    log::to(&around.terminal);
    keep_worker_panics_quiet();
    match dispatch(cli, &around) {
        Ok(outcome) => outcome.into(),
        Err(error) => {
            error::tell(error::render(&error).trim_end());
            error::status(&error)
        }
    }
}

fn dispatch(cli: Cli, around: &Surroundings) -> anyhow::Result<Outcome> {
    let machine = &around.machine;
    match cli.command {
        None => run::run(RunSpec::select(&cli.select, machine)?, &cli.select.out, around),
        Some(Command::Select(args)) => run::run(RunSpec::select(&args, machine)?, &args.out, around),
        Some(Command::Train(args)) => run::run(RunSpec::train(&args, machine)?, &args.out, around),
        Some(Command::Eval(args)) => eval::run(&args, around),
        Some(Command::Partition(args)) => partition::run(&args, around),
        Some(Command::Step(args)) => step::run(&args, around),
        Some(Command::Doctor(args)) => doctor::run(&args, machine),
        Some(Command::Check(args)) => check::run(&args, around),
        Some(Command::Resume(args)) => resume::run(&args, around),
        Some(Command::Report(args)) => report::run(&args),
        Some(Command::Simulate(args)) => simulate::run(&args),
        Some(Command::Compare(args)) => compare::run(&args),
    }
}

/// The engine reports what a layer's panic says; the default hook would print it among the bars.
fn keep_worker_panics_quiet() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let thread = std::thread::current();
        if !thread.name().is_some_and(|name| name.starts_with("hydra-")) {
            default(info);
        }
    }));
}
