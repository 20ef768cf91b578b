//! The command line: subcommands, flags, and what their help says.

use crate::check::CheckArgs;
use crate::doctor::DoctorArgs;
use crate::parse::{self, CheckpointArg, DevicesArg};
use crate::spec::DEFAULT_MODEL;
use crate::step::StepArgs;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use hydra_core::{Bandwidth, ByteSize, FloatType};
use hydra_models::data::Split;
use hydra_models::gpt2::PRESETS;
use hydra_sched::PolicyKind;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

const AFTER_HELP: &str = "\
Without a subcommand, `hydra` is `hydra select`. Without --model, --data, --batch, --devices, --device-memory \
and --spec, that is the demo: twelve small byte-level GPT-2 models, trained from scratch on the built-in corpus \
by two logical CPU devices of one thread each, whose memory is so small that every model is cut into three \
shards or more.

The exit status is 0 when every task was trained, 1 when something failed, 2 when the command line is \
wrong, and 130 when the run was interrupted. HYDRA_LOG=info shows the run's log on standard error.";

/// Of `hydra resume`, whose flags of devices and checkpoints are those of every command.
const AFTER_RESUME: &str = "\
What is not given is as the run was begun, whatever the defaults above: its devices and their memory, and how often \
it is kept. Results do not depend on it, but for the kind of device, --precision and --optimizer-placement.";

/// The heading of flags about how it learns.
const TRAINING: &str = "Training";
/// The heading of flags about what is written and printed.
pub(crate) const OUTPUT: &str = "Output";

/// Train many models, each larger than a device's memory, on few devices, exactly.
#[derive(Debug, Parser)]
#[command(name = "hydra", version, args_conflicts_with_subcommands = true, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) select: SelectArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a grid of batch sizes and learning rates and rank it by validation perplexity (the default)
    #[command(after_help = AFTER_HELP)]
    Select(Box<SelectArgs>),
    /// Train one configuration
    Train(Box<TrainArgs>),
    /// Evaluate a model on a text
    Eval(Box<EvalArgs>),
    /// Measure a model and show where it is cut for a device's memory
    Partition(Box<PartitionArgs>),
    /// Measure how fast a training step is and where its time goes
    Step(Box<StepArgs>),
    /// Say what a GPU needs and what of it is here; the exit status is 0 if `--devices cuda:0` can be used, 1 if not
    Doctor(DoctorArgs),
    /// Try a device and measure it: do its kernels, copies and memory do what training needs?
    Check(Box<CheckArgs>),
    /// Go on with a run that was interrupted, from its last checkpoints, to the results that it would have had
    #[command(after_help = AFTER_RESUME)]
    Resume(Box<ResumeArgs>),
    /// Print the leaderboard of a run directory again
    Report(ReportArgs),
    /// Simulate a scheduling policy on a workload of stated costs, in virtual time
    Simulate(SimulateArgs),
    /// Compare ways to train a workload of stated costs, and scheduling policies
    Compare(CompareArgs),
}

/// `hydra select`.
#[derive(Debug, Args)]
pub(crate) struct SelectArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Minibatch sizes, separated by commas [default: 16,8; of the demo 12,8]
    #[arg(
        long, value_name = "N,..", value_delimiter = ',',
        value_parser = parse::batch, help_heading = TRAINING, allow_hyphen_values = true
    )]
    pub(crate) batch: Vec<usize>,
    /// Learning rates, separated by commas [default: 3e-3,1e-3,6e-4,3e-4,1e-4,3e-5]
    #[arg(
        long, value_name = "RATE,..", value_delimiter = ',',
        value_parser = parse::rate, help_heading = TRAINING, allow_hyphen_values = true
    )]
    pub(crate) lr: Vec<f64>,
    #[command(flatten)]
    pub(crate) learn: LearnArgs,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    #[command(flatten)]
    pub(crate) out: OutArgs,
    #[command(flatten)]
    pub(crate) keep: KeepArgs,
    /// Run what a run directory's spec.toml says; only --out, --force, --dry-run, --record, --json and --checkpoint-every may stand beside it
    #[arg(long, value_name = "FILE", conflicts_with_all = BESIDE_NO_SPEC)]
    pub(crate) spec: Option<PathBuf>,
}

/// The flags that a spec holds, and that may therefore not be given beside it.
const BESIDE_NO_SPEC: [&str; 34] = [
    "model",
    "data",
    "context",
    "dropout",
    "dtype",
    "seed",
    "batch",
    "lr",
    "accumulate",
    "epochs",
    "steps",
    "optimizer",
    "weight_decay",
    "no_decay_norms",
    "clip",
    "schedule",
    "warmup",
    "decay_steps",
    "no_shuffle",
    "eval_every",
    "patience",
    "devices",
    "device_memory",
    "link",
    "no_prefetch",
    "policy",
    "cuts",
    "plan",
    "host_memory",
    "disk_memory",
    "disk",
    "pinned_memory",
    "precision",
    "optimizer_placement",
];

/// `hydra train`.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// The minibatch size
    #[arg(
        long, value_name = "N", default_value = "8",
        value_parser = parse::batch, help_heading = TRAINING, allow_hyphen_values = true
    )]
    pub(crate) batch: usize,
    /// The learning rate
    #[arg(
        long, value_name = "RATE", default_value = "3e-4",
        value_parser = parse::rate, help_heading = TRAINING, allow_hyphen_values = true
    )]
    pub(crate) lr: f64,
    #[command(flatten)]
    pub(crate) learn: LearnArgs,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    #[command(flatten)]
    pub(crate) out: OutArgs,
    #[command(flatten)]
    pub(crate) keep: KeepArgs,
}

/// `hydra resume`.
#[derive(Debug, Args)]
pub(crate) struct ResumeArgs {
    /// A run directory
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    #[command(flatten)]
    pub(crate) keep: KeepArgs,
    /// Write the measured costs of what is left as a workload that `hydra simulate` replays
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    pub(crate) record: Option<PathBuf>,
    /// Print the final report as JSON, alone on standard output
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
}

/// `hydra eval`.
#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// The part of the text: train, validation or test
    #[arg(long, default_value = "test")]
    pub(crate) split: Split,
    /// Blocks that are evaluated at once; the loss depends on it by rounding alone, about 1e-7 of it
    #[arg(long, value_name = "N", default_value = "8", value_parser = parse::batch, allow_hyphen_values = true)]
    pub(crate) batch: usize,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    /// Print the result as JSON, alone on standard output
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
}

/// `hydra partition`.
#[derive(Debug, Args)]
pub(crate) struct PartitionArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// The minibatch size
    #[arg(long, value_name = "N", default_value = "8", value_parser = parse::batch, allow_hyphen_values = true)]
    pub(crate) batch: usize,
    /// Microbatches that a minibatch is cut into
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse::count)]
    pub(crate) accumulate: usize,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    /// Save the plan as JSON, to be used by --plan
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    pub(crate) out: Option<PathBuf>,
    /// Print the plan and the budgets as JSON, alone on standard output
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
}

/// `hydra report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// A run directory
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Print the report as JSON, alone on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// `hydra simulate`.
#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    #[command(flatten)]
    pub(crate) lab: LabArgs,
    #[arg(long, value_name = "POLICY", default_value_t, hide_default_value = true, help = policy_help())]
    pub(crate) policy: PolicyKind,
    /// Promote a shard only when its device is free
    #[arg(long)]
    pub(crate) no_prefetch: bool,
    /// Draw the schedule as a Gantt chart
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) gantt: Option<PathBuf>,
    /// Print the result as JSON, alone on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// `hydra compare`.
#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    #[command(flatten)]
    pub(crate) lab: LabArgs,
    /// What a device draws while it computes
    #[arg(long, value_name = "W", default_value = "300", value_parser = parse::watts, allow_hyphen_values = true)]
    pub(crate) busy_watts: f64,
    /// What a device draws while it does not compute
    #[arg(long, value_name = "W", default_value = "60", value_parser = parse::watts, allow_hyphen_values = true)]
    pub(crate) idle_watts: f64,
    /// Write the result as JSON and pictures of it into this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Print the result as JSON, alone on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// What is simulated.
#[derive(Debug, Args)]
pub(crate) struct LabArgs {
    /// Tasks and devices as costs, in JSON as docs/scheduling.md describes it; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) workload: PathBuf,
    /// So many devices, each like the workload's first one [default: the workload's own]
    #[arg(long, value_name = "N", value_parser = parse::simulated_devices, allow_hyphen_values = true)]
    pub(crate) devices: Option<usize>,
    /// The seed of the policy `random`, and of the variation of a workload that has one [default: 0, and the
    /// workload's own]
    #[arg(long, value_name = "N", value_parser = parse::seed, allow_hyphen_values = true)]
    pub(crate) seed: Option<u64>,
}

/// The model and its text.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model and data")]
pub(crate) struct ModelArgs {
    #[arg(long, value_name = "PRESET|FILE.json|DIR", value_parser = NonEmptyStringValueParser::new(), help = model_help())]
    pub(crate) model: Option<String>,
    /// `builtin`, a WikiText directory or a plain-text file (its last tenth is held out) [default: builtin]
    #[arg(long, value_name = "builtin|DIR|FILE", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) data: Option<String>,
    /// Tokens in a block [default: the model's positions, at most 512]
    #[arg(long, value_name = "N", value_parser = parse::context, allow_hyphen_values = true)]
    pub(crate) context: Option<usize>,
    /// The probability of every dropout in the model [default: as its configuration says]
    #[arg(long, value_name = "P", value_parser = parse::dropout, allow_hyphen_values = true)]
    pub(crate) dropout: Option<f64>,
    /// The type of parameters, activations and gradients on devices, and of what moves between them and the host,
    /// where masters are f32 [default: f32]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<DtypeName>,
    /// The seed of initial weights, data order and dropout [default: 0]
    #[arg(long, value_name = "N", value_parser = parse::seed, allow_hyphen_values = true)]
    pub(crate) seed: Option<u64>,
}

/// How it learns.
#[derive(Debug, Args)]
#[command(next_help_heading = TRAINING)]
pub(crate) struct LearnArgs {
    /// Microbatches that a minibatch is cut into, whose gradients add up [default: 1]
    #[arg(long, value_name = "N", value_parser = parse::count, allow_hyphen_values = true)]
    pub(crate) accumulate: Option<usize>,
    /// Passes over the training data [default: 1]
    #[arg(long, value_name = "N", value_parser = parse::count, allow_hyphen_values = true)]
    pub(crate) epochs: Option<usize>,
    /// Exactly so many minibatches, wrapping into further epochs; with --epochs, at most so many
    #[arg(long, value_name = "N", value_parser = parse::count, allow_hyphen_values = true)]
    pub(crate) steps: Option<usize>,
    /// AdamW (betas 0.9 and 0.999, epsilon 1e-8) or SGD (momentum 0.9) [default: adamw]
    #[arg(long, value_enum)]
    pub(crate) optimizer: Option<OptimizerName>,
    /// Weight decay: decoupled for AdamW, coupled for SGD [default: 0.01]
    #[arg(long, value_name = "X", value_parser = parse::decay, allow_hyphen_values = true)]
    pub(crate) weight_decay: Option<f64>,
    /// Spare norms and biases from weight decay
    #[arg(long)]
    pub(crate) no_decay_norms: bool,
    /// Scale gradients down to this global norm [default: off]
    #[arg(long, value_name = "X", value_parser = parse::clip, allow_hyphen_values = true)]
    pub(crate) clip: Option<f64>,
    /// The learning rate's shape after the warmup [default: constant]
    #[arg(long, value_enum)]
    pub(crate) schedule: Option<ScheduleName>,
    /// Minibatches over which the learning rate rises from zero [default: 0]
    #[arg(long, value_name = "N", value_parser = parse::warmup, allow_hyphen_values = true)]
    pub(crate) warmup: Option<usize>,
    /// The last minibatches, over which --schedule wsd lets the learning rate fall linearly to zero
    #[arg(long, value_name = "N", value_parser = parse::count, allow_hyphen_values = true)]
    pub(crate) decay_steps: Option<usize>,
    /// Take the training data in its own order in every epoch
    #[arg(long)]
    pub(crate) no_shuffle: bool,
    /// Evaluate on the validation data after every N minibatches and keep the best weights [default: off]
    #[arg(long, value_name = "N", value_parser = parse::count, allow_hyphen_values = true)]
    pub(crate) eval_every: Option<usize>,
    /// End a task after N of these evaluations in a row without a better one (early stopping) [default: off]
    #[arg(long, value_name = "N", value_parser = parse::count, allow_hyphen_values = true, requires = "eval_every")]
    pub(crate) patience: Option<usize>,
}

/// What it runs on.
#[derive(Debug, Args)]
#[command(next_help_heading = "Devices")]
pub(crate) struct DeviceArgs {
    /// cpu:N (N logical devices that share the cores evenly), cpu:NxT (T threads each), cuda:0 or cuda:0,1
    /// (NVIDIA's GPUs), cuda:0/2 (two logical devices on one), or wgpu: likewise [default: cpu:1]
    #[arg(long, value_name = "SPEC")]
    pub(crate) devices: Option<DevicesArg>,
    /// The memory of each device, such as 64MiB [default: two fifths of the machine's free memory, shared; on a
    /// GPU nine tenths of its own]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) device_memory: Option<ByteSize>,
    /// The host memory for masters, gradients and activations [default: nine tenths of what is free,
    /// without the devices' part of it]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) host_memory: Option<ByteSize>,
    /// So much of a disk for masters and optimizer state that host memory has no room for [default: none]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) disk_memory: Option<ByteSize>,
    /// The directory for them, in files that nobody sees and that end with the run [default: the run directory, if any]
    #[arg(long, value_name = "DIR")]
    pub(crate) disk: Option<PathBuf>,
    /// The part of the host memory that may be page-locked for NVIDIA's GPUs [default: half of what is free]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) pinned_memory: Option<ByteSize>,
    /// What GPT-2's matrix products multiply on NVIDIA's GPUs: f32, or tf32 with 10 bits of mantissa, for which
    /// they have faster units [default: f32]
    #[arg(long, value_enum)]
    pub(crate) precision: Option<PrecisionName>,
    /// Where optimizers step: auto (on a GPU if everything stays there at once and a step has the host's bits, else
    /// on the host), host, or device (also if its bits are others, which the report says) [default: auto]
    #[arg(long, value_enum, value_name = "PLACE")]
    pub(crate) optimizer_placement: Option<PlacementName>,
    /// Simulate a link of this bandwidth between host and devices, such as 8GiB/s [default: none]
    #[arg(long, value_name = "SIZE/s", allow_hyphen_values = true)]
    pub(crate) link: Option<Bandwidth>,
    /// Promote a shard only when its device is free
    #[arg(long)]
    pub(crate) no_prefetch: bool,
    #[arg(long, value_name = "POLICY", help = policy_help())]
    pub(crate) policy: Option<PolicyKind>,
    /// Cut-points by hand, separated by commas: the layers at which a new shard begins; they win over --plan
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = parse::cut, allow_hyphen_values = true)]
    pub(crate) cuts: Vec<usize>,
    /// A plan, or a directory of plans, to use where the fingerprint matches
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) plan: Option<PathBuf>,
}

/// What `--model` is.
pub(crate) fn model_help() -> String {
    let presets = PRESETS.map(|preset| preset.name);
    format!(
        "A preset ({}) or a configuration, trained from scratch, or a Hugging Face directory [default: {DEFAULT_MODEL}]",
        any_of(&presets)
    )
}

fn policy_help() -> String {
    format!("Who runs next: {} [default: {}]", policies(PolicyKind::name), PolicyKind::default())
}

/// The policies by name, each as `name` gives it.
fn policies<T: std::fmt::Display>(name: impl Fn(PolicyKind) -> T) -> String {
    any_of(&PolicyKind::ALL.map(|kind| name(kind).to_string()))
}

fn any_of<T: AsRef<str>>(names: &[T]) -> String {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    names.split_last().map_or_else(String::new, |(last, first)| format!("{} or {last}", first.join(", ")))
}

/// How often a run is kept, so that it can go on.
#[derive(Debug, Args)]
#[command(next_help_heading = "Checkpoints")]
pub(crate) struct KeepArgs {
    /// Keep every model, with its optimizer's state, after so long (90s, 10m, 2h) or so many of its minibatches (500),
    /// for `hydra resume`; or never [default: 10m]
    #[arg(long, value_name = "TIME|N|never", allow_hyphen_values = true)]
    pub(crate) checkpoint_every: Option<CheckpointArg>,
}

/// Where the results go.
#[derive(Debug, Args)]
#[command(next_help_heading = OUTPUT)]
pub(crate) struct OutArgs {
    /// The run directory [default: runs/<command>-<the next free number>]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Replace the run in the run directory
    #[arg(long)]
    pub(crate) force: bool,
    /// Print what would run and what it needs, and stop, leaving no file behind
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Write the run's measured costs as a workload that `hydra simulate` replays; the run directory has it too
    #[arg(long, value_name = "FILE", conflicts_with = "dry_run")]
    pub(crate) record: Option<PathBuf>,
    /// Print the final report as JSON, alone on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// `--optimizer`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OptimizerName {
    #[default]
    #[value(name = "adamw")]
    AdamW,
    Sgd,
}

/// `--dtype`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DtypeName {
    #[default]
    F32,
    Bf16,
}

impl From<DtypeName> for FloatType {
    fn from(name: DtypeName) -> Self {
        match name {
            DtypeName::F32 => Self::F32,
            DtypeName::Bf16 => Self::Bf16,
        }
    }
}

/// The precision of matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PrecisionName {
    #[default]
    F32,
    Tf32,
}

/// `--optimizer-placement`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PlacementName {
    #[default]
    Auto,
    Host,
    Device,
}

/// `--schedule`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ScheduleName {
    #[default]
    Constant,
    Linear,
    Cosine,
    /// Constant until the last --decay-steps, then linear (warmup-stable-decay)
    Wsd,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    fn fails(arguments: &[&str]) -> clap::Error {
        Cli::try_parse_from([&["hydra"], arguments].concat()).unwrap_err()
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn without_a_subcommand_it_selects() {
        let bare = Cli::try_parse_from(["hydra", "--steps", "3", "--batch", "4,2"]).unwrap();
        assert!(bare.command.is_none());
        assert_eq!(bare.select.learn.steps, Some(3));
        assert_eq!(bare.select.batch, [4, 2]);
        let named = Cli::try_parse_from(["hydra", "select", "--steps", "3"]).unwrap();
        assert!(matches!(named.command, Some(Command::Select(args)) if args.learn.steps == Some(3)));
    }

    #[test]
    fn beside_a_spec_stand_only_output_flags() {
        let allowed =
            ["spec", "out", "force", "dry_run", "record", "json", "checkpoint_every", "help", "version"];
        for flag in Cli::command().get_arguments() {
            let id = flag.get_id().as_str();
            assert_ne!(BESIDE_NO_SPEC.contains(&id), allowed.contains(&id), "--{id} is in neither or both");
        }
        assert_eq!(fails(&["--spec", "s.toml", "--lr", "1"]).kind(), ErrorKind::ArgumentConflict);
        assert!(Cli::try_parse_from(["hydra", "--spec", "s.toml", "--out", "d", "--force"]).is_ok());
    }

    #[test]
    fn wrong_values_name_the_flag_and_what_was_given() {
        let cases: [(&[&str], &str, &str); 18] = [
            (&["--lr", "fast"], "--lr", "`fast` is not a number"),
            (&["--lr", "1e-3,nan"], "--lr", "`nan`"),
            (&["--lr", "-1"], "--lr", "`-1`"),
            (&["--lr", "1e-3,"], "--lr", "is empty"),
            (&["--batch", "0"], "--batch", "`0`"),
            (&["--batch", "8,1000000"], "--batch", "`1000000`"),
            (&["--context", "1"], "--context", "`1`"),
            (&["--context", "99999999"], "--context", "`99999999`"),
            (&["--devices", "cuda:0x2"], "--devices", "`cuda:0x2` has no usable number of a card"),
            (&["--devices", "cpu:0"], "--devices", "`cpu:0`"),
            (&["--device-memory", "much"], "--device-memory", "`much` is not a size"),
            (&["--link", "8GiB"], "--link", "`8GiB` is not a bandwidth"),
            (&["--policy", "lifo"], "--policy", "sharded-lrtf, fifo, srtf, random"),
            (&["--dropout", "1"], "--dropout", "`1`"),
            (&["--steps", "0"], "--steps", "`0`"),
            (&["--clip", "0"], "--clip", "`0`"),
            (&["--checkpoint-every", "0"], "--checkpoint-every", "`0`"),
            (&["--checkpoint-every", "5d"], "--checkpoint-every", "`5d`"),
        ];
        for (arguments, flag, says) in cases {
            let error = fails(arguments);
            let message = error.to_string();
            assert_eq!(error.exit_code(), 2, "{message}");
            assert!(message.contains(flag) && message.contains(says), "{arguments:?}: {message}");
        }
        for flag in ["--model", "--data", "--out"] {
            let error = fails(&["train", flag, ""]);
            assert!(error.exit_code() == 2 && error.to_string().contains(flag), "{error}");
        }
        assert_eq!(fails(&["train", "--lr", "1e-3,1e-4"]).exit_code(), 2);
        assert_eq!(fails(&["report"]).exit_code(), 2);
        assert!(
            fails(&["eval", "--split", "dev"]).to_string().contains("expected train, validation or test")
        );
    }

    #[test]
    fn every_policy_is_in_the_help_and_in_the_manual() {
        let help = Cli::command().render_long_help().to_string();
        let list = policies(PolicyKind::name);
        assert!(help.split_whitespace().collect::<Vec<_>>().join(" ").contains(&list), "{list} in\n{help}");
        let list = policies(|kind| format!("`{kind}`"));
        for page in [include_str!("../../docs/cli.md"), include_str!("../../docs/report.md")] {
            assert!(page.contains(&list), "{list} in\n{page}");
        }
    }

    #[test]
    fn every_preset_is_in_the_help_and_in_the_manual() {
        let page = include_str!("../../docs/cli.md");
        for preset in PRESETS {
            assert!(model_help().contains(preset.name), "{}", preset.name);
            let row = format!("| `{}` | {} |", preset.name, preset.description);
            assert!(page.contains(&row), "{row}");
        }
    }

    #[test]
    fn the_commands_of_the_manuals_are_understood() {
        let mut commands = 0;
        for page in [include_str!("../../README.md"), include_str!("../../docs/cli.md")] {
            for line in page.lines() {
                let line = line.split('#').next().unwrap_or_default();
                let arguments =
                    line.strip_prefix("cargo run -p hydra-bench -- ").or(line.strip_prefix("hydra "));
                let Some(arguments) = arguments else { continue };
                let read = Cli::try_parse_from(["hydra"].into_iter().chain(arguments.split_whitespace()));
                assert!(read.is_ok(), "{line}: {}", read.unwrap_err());
                commands += 1;
            }
        }
        assert!(commands >= 12, "{commands}");
    }

    #[test]
    fn flags_stand_where_they_belong_in_the_help() {
        let mut command = Cli::command();
        for (name, flag, heading) in [
            ("train", "batch", TRAINING),
            ("select", "lr", TRAINING),
            ("eval", "json", OUTPUT),
            ("partition", "out", OUTPUT),
            ("step", "json", OUTPUT),
            ("resume", "record", OUTPUT),
        ] {
            let subcommand = command.find_subcommand_mut(name).unwrap();
            let found = subcommand.get_arguments().find(|argument| argument.get_id() == flag).unwrap();
            assert_eq!(found.get_help_heading(), Some(heading), "{name} --{flag}");
        }
    }

    #[test]
    fn values_as_the_manual_writes_them() {
        let line = "hydra train --devices cpu:2x1 --device-memory 64MiB --link 8GiB/s --cuts 1,3,5 --policy srtf \
                    --optimizer sgd --schedule cosine --warmup 3 --dropout 0 --seed 7 --lr 3e-4 --batch 8";
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
        let Some(Command::Train(train)) = cli.command else { panic!("not train") };
        assert_eq!(train.devices.cuts, [1, 3, 5]);
        assert_eq!(train.devices.device_memory, Some(ByteSize::mib(64)));
        assert_eq!(train.devices.policy, Some(PolicyKind::Srtf));
        assert_eq!((train.lr, train.batch), (3e-4, 8));
        assert_eq!(train.learn.optimizer, Some(OptimizerName::Sgd));
    }
}
