//! The command line: the commands by name, what their help says, and who does what they say.
//! It may touch every room below, of which it mostly calls `commands`.
//! It never does anything itself.

mod demo;
mod foreign;
mod hints;
mod samples;

pub(crate) use demo::announce;
pub(crate) use foreign::Given;
pub(crate) use hints::of_keyword;

use crate::commands::{
    check, compare, completions, ctl, doctor, eval, explain, man, partition, report, resume, select, serve,
    simulate, step, train, watch,
};
use crate::session::Environment;
use crate::terminal::Outcome;
use clap::{CommandFactory, Parser, Subcommand};
use std::ffi::OsString;

const AFTER_HELP: &str = "\
Without a subcommand, `hydra` is `hydra select`. Where no flag says what to train, that is the demo: twelve small \
byte-level GPT-2 models, trained from scratch on the built-in corpus by two logical CPU devices of one thread each, whose \
memory is so small that every model is cut into three shards or more.

A grid is a list of values of one or more settings, separated by commas: --lr 1e-3,3e-4 --optimizer adamw,lion \
--seed 0,1,2. Every combination is a task; what has no list has one value.

The exit status is 0 when every task was trained, 1 when something failed, 2 when the command line is \
wrong, and 130 when the run was interrupted. HYDRA_LOG=info shows the run's log on standard error.";

/// Of `hydra resume`, whose flags of devices and checkpoints are those of every command.
const AFTER_RESUME: &str = "\
What is not given is as the run was begun, whatever the defaults above: its devices and their memory, and how often \
it writes checkpoints. Results do not depend on it, but for the kind of device, --precision and --optimizer-placement.";

/// Of `hydra explain`, which takes the flags of a run.
const AFTER_EXPLAIN: &str = "\
Nothing is trained but a pilot pass. The same is printed by `hydra select`, `hydra train` and a spec with --dry-run. The \
exit status is 0 when the run fits, 1 when it does not, and 2 when the command line is wrong.";

/// Of `hydra ctl`, whose commands are answered when they count.
const AFTER_CTL: &str = "\
Every command takes effect between two minibatches of its task, at a place that is said, so what comes of it is exact: \
a fork has the bits of a plain loop that changes its settings there. What was answered stands in DIR/control.jsonl, and \
holds after a kill; `hydra select --spec DIR/spec.toml --replay DIR/control.jsonl` repeats the run.";

/// Of `hydra completions`: where the shells look.
const AFTER_COMPLETIONS: &str = "\
Bash: hydra completions bash > ~/.local/share/bash-completion/completions/hydra
Zsh:  hydra completions zsh > DIR/_hydra, where DIR is one of $fpath
Fish: hydra completions fish > ~/.config/fish/completions/hydra.fish";

/// Train many models, each larger than a device's memory, on few devices, exactly.
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
    /// Train a grid of batch sizes and learning rates and rank it by validation perplexity (the default)
    #[command(after_help = AFTER_HELP)]
    Select(Box<select::SelectArgs>),
    /// Train one configuration
    Train(Box<train::TrainArgs>),
    /// Evaluate a model on a text
    Eval(Box<eval::EvalArgs>),
    /// Say what a run needs, what it would move over which link, how long it would take and what would make it faster
    #[command(after_help = AFTER_EXPLAIN)]
    Explain(Box<explain::ExplainArgs>),
    /// Measure a model and show where it is cut for a device's memory
    Partition(Box<partition::PartitionArgs>),
    /// Measure how fast a training step is and where its time goes
    Step(Box<step::StepArgs>),
    /// Say what a GPU needs and what of it is here; the exit status is 0 if `--devices cuda:0` can be used, 1 if not
    Doctor(doctor::DoctorArgs),
    /// Try a device and measure it: do its kernels, copies and memory do what training needs?
    Check(Box<check::CheckArgs>),
    /// Go on with a run that was interrupted, from its last checkpoints, to the results that it would have had
    #[command(after_help = AFTER_RESUME)]
    Resume(Box<resume::ResumeArgs>),
    /// Steer a run that is under way: pause, stop, fork and extend its tasks, and say how far they are
    #[command(after_help = AFTER_CTL)]
    Ctl(Box<ctl::CtlArgs>),
    /// Print the leaderboard of a run directory again
    Report(report::ReportArgs),
    /// Show runs on a page while they go on and afterwards, and steer them there
    Serve(serve::ServeArgs),
    /// Show a run in the terminal while it goes on and afterwards; `q` ends that
    Watch(watch::WatchArgs),
    /// Simulate a scheduling policy on a workload of stated costs, in virtual time
    Simulate(simulate::SimulateArgs),
    /// Compare ways to train a workload of stated costs, and scheduling policies
    Compare(compare::CompareArgs),
    /// Print the script with which a shell completes this command line
    #[command(after_help = AFTER_COMPLETIONS)]
    Completions(completions::CompletionsArgs),
    /// Write the manual pages
    Man(man::ManArgs),
}

impl Cli {
    /// Reads arguments, of which the first is the program's name.
    pub(crate) fn read(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let arguments: Vec<OsString> = arguments.into_iter().collect();
        let read = Self::try_parse_from(samples::with_lists(arguments.clone()));
        read.map_err(|error| hints::explained(error, &arguments))
    }

    pub(crate) fn run(self, around: &Environment) -> anyhow::Result<Outcome> {
        match self.command {
            None => select::run(self.select, around),
            Some(Command::Select(args)) => select::run(*args, around),
            Some(Command::Train(args)) => train::run(*args, around),
            Some(Command::Eval(args)) => eval::run(*args, around),
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
