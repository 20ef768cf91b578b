//! The command line: the commands with their help, and the dispatch to them.
//! It depends on every module below, mostly on `commands`.
//! It performs no command itself.

mod demo;
mod foreign;
mod hints;
mod renamed;
mod samples;
mod unused;

pub(crate) use demo::announce;
pub(crate) use foreign::NamedValue;
pub(crate) use hints::keyword_suggestion;
pub(crate) use renamed::current_keyword;

use crate::commands::{
    check, compare, completions, ctl, doctor, eval, explain, export, generate, man, partition, predict,
    report, resume, select, serve, simulate, step, train, watch,
};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use hydra_run::session::Environment;
use hydra_run::terminal::{Outcome, tell};
use std::ffi::OsString;

const AFTER_HELP: &str = "\
Without a subcommand, `hydra` runs `hydra select`. If no flag says what to train, that is the demo: twelve small \
byte-level GPT-2 models, trained from random weights on a built-in text, on two logical CPU devices of one thread each, with \
so little memory that every model is cut into three shards or more.

A grid is made by lists of values, separated by commas: --lr 1e-3,3e-4 --optimizer adamw,lion --seed 0,1,2. Every \
combination is one task. Settings without a list have the same value in all tasks.

The exit status is 0 if every task was trained, 1 if something failed, 2 if the command line is wrong, and 130 if the run \
was interrupted. HYDRA_LOG=info prints the run's log on standard error.";

/// The end of the help of `hydra resume`, which shares its flags, and their defaults, with other commands.
const AFTER_RESUME: &str = "\
Flags that are not given keep the values of the original run, not the defaults above. Results do not depend on these flags, \
except on the kind of device, --precision and --optimizer-placement.";

/// The end of the help of `hydra explain`, which takes the flags of a run.
const AFTER_EXPLAIN: &str = "\
Only a pilot pass, which measures the model, is computed. `hydra select`, `hydra train` and --spec print the same with \
--dry-run. The exit status is 0 if the run fits in memory, 1 if it does not, and 2 if the command line is wrong.";

/// The end of the help of `hydra ctl`.
const AFTER_CTL: &str = "\
Each command takes effect between two minibatches of its task, and the answer names the minibatch. Results stay \
reproducible: a fork has the same bits as a plain training loop that changes its settings at that minibatch. Answered \
commands are recorded in DIR/control.jsonl and survive a crash; `hydra select --spec DIR/spec.toml --replay \
DIR/control.jsonl` repeats the run.";

/// The end of the help of `hydra completions`: the files that the shells read.
const AFTER_COMPLETIONS: &str = "\
Bash: hydra completions bash > ~/.local/share/bash-completion/completions/hydra
Zsh:  hydra completions zsh > DIR/_hydra, where DIR is one of $fpath
Fish: hydra completions fish > ~/.config/fish/completions/hydra.fish";

/// Train and compare many models on few devices, even models larger than a device's memory, with exact results.
#[derive(Debug, Parser)]
#[command(name = "hydra", version, args_conflicts_with_subcommands = true, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) select: select::SelectArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a grid of settings, or search them, and rank the models by validation perplexity, accuracy or another metric (the default)
    #[command(after_help = AFTER_HELP)]
    Select(Box<select::SelectArgs>),
    /// Train one configuration
    Train(Box<train::TrainArgs>),
    /// Evaluate a model on a split of its data: loss, and perplexity or a classifier's metrics
    Eval(Box<eval::EvalArgs>),
    /// Predict for the rows of a file: classes with probabilities, numbers, or log-probabilities of texts
    Predict(Box<predict::PredictArgs>),
    /// Generate text: continue prompts with a language model, also with several adapters at once
    Generate(Box<generate::GenerateArgs>),
    /// Write a model for other programs: with its adapters merged, in another type, or in several files
    Export(Box<export::ExportArgs>),
    /// Predict a run without training: its memory, the bytes that it moves over each link, its time, and what would speed it up
    #[command(after_help = AFTER_EXPLAIN)]
    Explain(Box<explain::ExplainArgs>),
    /// Measure a model and print how it is cut into shards that fit a device's memory
    Partition(Box<partition::PartitionArgs>),
    /// Benchmark a training step: tokens per second, and the time of its parts
    Step(Box<step::StepArgs>),
    /// Check the GPU setup: driver, compiler, headers, cards; the exit status is 0 if `--devices cuda:0` can be used, 1 if not
    Doctor(doctor::DoctorArgs),
    /// Test and benchmark a device: its kernels, copies, memory and training steps
    Check(Box<check::CheckArgs>),
    /// Resume an interrupted run from its last checkpoints, with the results of an uninterrupted run
    #[command(after_help = AFTER_RESUME)]
    Resume(Box<resume::ResumeArgs>),
    /// Control a run in progress: pause, resume, stop, delete, extend and fork its tasks, or print their states
    #[command(after_help = AFTER_CTL)]
    Ctl(Box<ctl::CtlArgs>),
    /// Print the leaderboard of a run, finished or not, or of several runs together
    Report(report::ReportArgs),
    /// Serve the dashboard of runs, in progress or finished, to a browser, with run control
    Serve(serve::ServeArgs),
    /// Show a run, in progress or finished, in the terminal; `q` quits
    Watch(watch::WatchArgs),
    /// Simulate a scheduling policy on a workload of given costs, in virtual time
    Simulate(simulate::SimulateArgs),
    /// Compare training strategies, and scheduling policies, on a workload of given costs
    Compare(compare::CompareArgs),
    /// Print the completion script of a shell
    #[command(after_help = AFTER_COMPLETIONS)]
    Completions(completions::CompletionsArgs),
    /// Write the manual pages
    Man(man::ManArgs),
}

impl Cli {
    /// Parses arguments, the program's name first. Old spellings of flags are replaced, with a note each. A note names flags that
    /// the command does not use.
    pub(crate) fn read(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let (arguments, notes) = renamed::with_current_flags(arguments.into_iter().collect());
        notes.iter().for_each(|note| tell(note));
        let matches = Self::command().try_get_matches_from(samples::with_lists(arguments.clone()));
        let read = matches.and_then(|matches| {
            let read =
                Self::from_arg_matches(&matches).map_err(|error| error.format(&mut Self::command()))?;
            unused::note(&matches).iter().for_each(|note| tell(note));
            Ok(read)
        });
        read.map_err(|error| hints::explained(error, &arguments))
    }

    pub(crate) fn run(self, around: &Environment) -> anyhow::Result<Outcome> {
        match self.command {
            None => select::run(self.select, around),
            Some(Command::Select(args)) => select::run(*args, around),
            Some(Command::Train(args)) => train::run(*args, around),
            Some(Command::Eval(args)) => eval::run(*args, around),
            Some(Command::Predict(args)) => predict::run(*args, around),
            Some(Command::Generate(args)) => generate::run(*args, around),
            Some(Command::Export(args)) => export::run(*args, around),
            Some(Command::Explain(args)) => explain::run(*args, around),
            Some(Command::Partition(args)) => partition::run(*args, around),
            Some(Command::Step(args)) => step::run(*args, around),
            Some(Command::Doctor(args)) => doctor::run(&args, &around.machine),
            Some(Command::Check(args)) => check::run(*args, around),
            Some(Command::Resume(args)) => resume::run(&args, around),
            Some(Command::Ctl(args)) => ctl::run(*args, around),
            Some(Command::Report(args)) => report::run(&args, around),
            Some(Command::Serve(args)) => serve::run(&args, around),
            Some(Command::Watch(args)) => watch::run(&args),
            Some(Command::Simulate(args)) => simulate::run(&args),
            Some(Command::Compare(args)) => compare::run(&args),
            Some(Command::Completions(args)) => completions::run(&args, Self::command()),
            Some(Command::Man(args)) => man::run(&args, Self::command()),
        }
    }
}

#[cfg(test)]
mod spec_tests;
#[cfg(test)]
mod tests;
