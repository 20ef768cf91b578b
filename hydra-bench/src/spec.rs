//! The spec of a run: every flag resolved, saved in the run directory, re-runnable.

use crate::args::{
    DeviceArgs, DtypeName, KeepArgs, LearnArgs, ModelArgs, OptimizerName, PlacementName, PrecisionName,
    ResumeArgs, ScheduleName, SelectArgs, TrainArgs,
};
use crate::doctor;
use crate::error::Usage;
use crate::inputs::Inputs;
use crate::machine::Machine;
use crate::parse::{self, CheckpointArg, DevicesArg};
use anyhow::{Context, Result, bail};
use hydra_core::optimizer::{AdamW, Sgd};
use hydra_core::schedule::{Constant, Cosine, Linear, WarmupStableDecay};
use hydra_core::{Bandwidth, ByteSize, Decay, Length, OptimizerSpec, Schedule, TrainSpec};
use hydra_sched::PolicyKind;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The version of the format of `spec.toml`.
const SPEC_FORMAT: u32 = 1;
const DEFAULT_BATCHES: [usize; 2] = [16, 8];
/// Suited to training from scratch, which presets do.
const DEFAULT_RATES: [f64; 6] = [3e-3, 1e-3, 6e-4, 3e-4, 1e-4, 3e-5];
/// The model when nobody says which.
pub(crate) const DEFAULT_MODEL: &str = "bytes-tiny";
const BUILTIN: &str = "builtin";

/// What a command without a model, data or devices runs on: each of its models needs three shards or more.
pub(crate) struct Demo;

impl Demo {
    /// The devices of the demo: two logical ones of one thread.
    pub(crate) const DEVICES: DevicesArg = DevicesArg::Cpu { count: 2, threads: Some(1) };
    /// The memory of each: a block of the model fits alone at both batch sizes, and two fit at neither, so
    /// that each of its four blocks is a shard.
    pub(crate) const MEMORY: ByteSize = ByteSize::mib(12);
    /// The minibatch sizes. They are not 16 and 8, because a block takes as much at 16 as two do at 8: no one
    /// budget would cut both models that often.
    const BATCHES: [usize; 2] = [12, 8];

    /// Whether these flags ask for the demo. Other batches end it, because its memory is made for its own.
    fn applies(args: &SelectArgs) -> bool {
        args.model.model.is_none()
            && args.model.data.is_none()
            && args.batch.is_empty()
            && args.devices.devices.is_none()
            && args.devices.device_memory.is_none()
    }
}

/// Which command made a spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CommandName {
    Select,
    Train,
}

impl CommandName {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Select => "select",
            Self::Train => "train",
        }
    }
}

/// A run, with every flag resolved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunSpec {
    /// [`SPEC_FORMAT`].
    pub(crate) format: u32,
    pub(crate) command: CommandName,
    /// How often tasks are kept.
    #[serde(default)]
    pub(crate) checkpoint_every: CheckpointArg,
    pub(crate) model: ModelSpec,
    pub(crate) training: TrainingSpec,
    pub(crate) devices: DevicesSpec,
    /// What the model and the text were when the run began; set when they have been read.
    #[serde(default)]
    pub(crate) inputs: Option<Inputs>,
}

/// The model and its text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelSpec {
    /// A preset or the absolute path of a directory.
    pub(crate) model: String,
    /// `builtin` or an absolute path.
    pub(crate) data: String,
    /// Set when the model has been read.
    pub(crate) context: Option<usize>,
    /// `None` leaves the configuration's.
    pub(crate) dropout: Option<f64>,
    /// Of parameters, activations and gradients on devices.
    #[serde(default)]
    pub(crate) dtype: DtypeName,
    pub(crate) seed: u64,
}

/// The grid and what its configurations have in common.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrainingSpec {
    pub(crate) batch: Vec<usize>,
    pub(crate) lr: Vec<f64>,
    pub(crate) accumulate: usize,
    pub(crate) epochs: Option<usize>,
    pub(crate) steps: Option<usize>,
    pub(crate) optimizer: OptimizerName,
    pub(crate) weight_decay: f64,
    pub(crate) no_decay_norms: bool,
    pub(crate) clip: Option<f64>,
    pub(crate) schedule: ScheduleName,
    pub(crate) warmup: usize,
    /// Of [`ScheduleName::Wsd`] alone.
    #[serde(default)]
    pub(crate) decay_steps: Option<usize>,
    pub(crate) shuffle: bool,
    pub(crate) eval_every: Option<usize>,
    pub(crate) patience: Option<usize>,
}

/// What it runs on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DevicesSpec {
    /// As `--devices` reads it.
    pub(crate) devices: String,
    /// Of each device.
    pub(crate) device_memory_bytes: ByteSize,
    /// Whether the devices read the host's memory in place, as they do when nobody gives them one of theirs.
    #[serde(default)]
    pub(crate) resident: bool,
    /// `None` takes what the machine has free.
    pub(crate) host_memory_bytes: Option<ByteSize>,
    /// Of the disk, for masters that host memory has no room for; `None` keeps all of them there.
    #[serde(default)]
    pub(crate) disk_memory_bytes: Option<ByteSize>,
    /// An absolute path; `None` is the run directory.
    #[serde(default)]
    pub(crate) disk: Option<PathBuf>,
    /// `None` takes the engine's default; NVIDIA's cards only.
    #[serde(default)]
    pub(crate) pinned_memory_bytes: Option<ByteSize>,
    /// Of matrix products.
    #[serde(default)]
    pub(crate) precision: PrecisionName,
    /// Of optimizers.
    #[serde(default)]
    pub(crate) optimizer_placement: PlacementName,
    pub(crate) link_bytes_per_s: Option<Bandwidth>,
    pub(crate) prefetch: bool,
    pub(crate) policy: PolicyKind,
    pub(crate) cuts: Option<Vec<usize>>,
    pub(crate) plan: Option<PathBuf>,
}

/// One configuration of the grid.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Configuration {
    /// A name that is unique within the grid and safe as a directory's.
    pub(crate) name: String,
    pub(crate) batch: usize,
    pub(crate) lr: f64,
}

impl RunSpec {
    /// The spec that the flags of `hydra select` ask for.
    pub(crate) fn select(args: &SelectArgs, machine: &Machine) -> Result<Self> {
        if let Some(file) = &args.spec {
            return Ok(Self::load(file, machine)?.kept(&args.keep));
        }
        let demo = Demo::applies(args);
        let batches = if demo { Demo::BATCHES } else { DEFAULT_BATCHES };
        let batch = if args.batch.is_empty() { batches.to_vec() } else { args.batch.clone() };
        let lr = if args.lr.is_empty() { DEFAULT_RATES.to_vec() } else { args.lr.clone() };
        let training = TrainingSpec::new(&args.learn, batch, lr);
        let spec = Self::new(CommandName::Select, &args.model, training, &args.devices, demo, machine)?;
        Ok(spec.kept(&args.keep))
    }

    /// The spec that the flags of `hydra train` ask for.
    pub(crate) fn train(args: &TrainArgs, machine: &Machine) -> Result<Self> {
        let training = TrainingSpec::new(&args.learn, vec![args.batch], vec![args.lr]);
        let spec = Self::new(CommandName::Train, &args.model, training, &args.devices, false, machine)?;
        Ok(spec.kept(&args.keep))
    }

    fn new(
        command: CommandName,
        model: &ModelArgs,
        training: TrainingSpec,
        devices: &DeviceArgs,
        demo: bool,
        machine: &Machine,
    ) -> Result<Self> {
        let devices = DevicesSpec::new(devices, demo, machine)?;
        let model = ModelSpec::new(model)?;
        let checkpoint_every = CheckpointArg::default();
        let spec =
            Self { format: SPEC_FORMAT, command, checkpoint_every, model, training, devices, inputs: None };
        spec.check()?;
        Ok(spec)
    }

    /// Reads a spec that [`to_toml`](Self::to_toml) wrote and perhaps a person changed.
    fn load(file: &Path, machine: &Machine) -> Result<Self> {
        let spec = Self::read(file)?;
        let usable = spec.check().and_then(|()| spec.devices.check_machine(machine));
        usable.with_context(|| format!("the spec `{}` cannot be run", file.display()))?;
        Ok(spec)
    }

    /// The spec of a run that goes on, on the devices that it had, but for what these flags change. Its plans are
    /// looked for in `plans`.
    pub(crate) fn resume(file: &Path, plans: &Path, args: &ResumeArgs, machine: &Machine) -> Result<Self> {
        let mut spec = Self::read(file)?;
        spec.check().with_context(|| format!("the spec `{}` cannot be run", file.display()))?;
        spec.devices = spec.devices.changed(&args.devices, plans, machine)?;
        Ok(spec.kept(&args.keep))
    }

    /// This spec with tasks kept as often as the flag says, if it is given.
    fn kept(self, keep: &KeepArgs) -> Self {
        Self { checkpoint_every: keep.checkpoint_every.unwrap_or(self.checkpoint_every), ..self }
    }

    fn read(file: &Path) -> Result<Self> {
        let shown = file.display();
        let text =
            std::fs::read_to_string(file).with_context(|| format!("the spec `{shown}` could not be read"))?;
        toml::from_str(&text)
            .with_context(|| format!("`{shown}` is not a spec: give the spec.toml of a run directory"))
    }

    /// The text of `spec.toml`.
    pub(crate) fn to_toml(&self) -> Result<String> {
        let body = toml::to_string(self).context("the spec could not be written as TOML")?;
        Ok(format!(
            "# Run it again with: hydra select --spec spec.toml --out DIR\n\
             # Go on with it, if it was interrupted: hydra resume DIR\n\n{body}"
        ))
    }

    fn check(&self) -> Result<()> {
        if self.format != SPEC_FORMAT {
            bail!("it has format {}, and this program reads format {SPEC_FORMAT}", self.format);
        }
        check_dtype(self.model.dtype, self.devices.precision)?;
        if self.training.batch.is_empty() || self.training.lr.is_empty() {
            bail!(Usage::new(
                "there is nothing to train: give at least one batch size and one learning rate"
            ));
        }
        self.model.check().and_then(|()| self.training.check())?;
        self.devices.check()?;
        for configuration in self.grid()? {
            check_accumulate(self.training.accumulate, configuration.batch)?;
            let spec = self.training.of(&configuration, self.model.seed, usize::MAX);
            spec.validate().map_err(Usage::from_error)?;
        }
        Ok(())
    }

    /// The configurations: for each batch size in its order, each learning rate in its order.
    pub(crate) fn grid(&self) -> Result<Vec<Configuration>> {
        let mut grid: Vec<Configuration> = Vec::new();
        for &batch in &self.training.batch {
            for &lr in &self.training.lr {
                let name = configuration_name(batch, lr);
                if grid.iter().any(|other| other.name == name) {
                    let text =
                        format!("batch {batch} with learning rate {lr:e} is given twice: give each once");
                    bail!(Usage::new(text));
                }
                grid.push(Configuration { name, batch, lr });
            }
        }
        Ok(grid)
    }

    /// What the report says of a configuration.
    pub(crate) fn describe(&self, spec: &TrainSpec) -> serde_json::Value {
        serde_json::json!({
            "model": self.model.model,
            "data": self.model.data,
            "context": self.model.context,
            "dropout": self.model.dropout,
            "dtype": self.model.dtype,
            "batch": spec.batch,
            "lr": spec.optimizer.lr(),
            "training": spec,
        })
    }
}

/// Refuses numbers that the flag of this name would not take: a spec may have been changed by hand.
fn check_each<'a, T: ToString + 'a, R>(
    name: &str,
    values: impl IntoIterator<Item = &'a T>,
    read: impl Fn(&str) -> Result<R, String>,
) -> Result<(), Usage> {
    let read = |value: &T| read(&value.to_string()).map(drop);
    values.into_iter().try_for_each(read).map_err(|why| Usage::new(format!("{name}: {why}")))
}

/// What a text reads as, or what is wrong with it in words.
fn said<T: FromStr<Err: ToString>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: T::Err| error.to_string())
}

/// Refuses more microbatches than a minibatch has items.
pub(crate) fn check_accumulate(accumulate: usize, batch: usize) -> Result<(), Usage> {
    match accumulate > batch {
        true => Err(Usage::new(format!(
            "--accumulate {accumulate} cuts --batch {batch} into more microbatches than it has items: give \
             --accumulate {batch} or less, or a larger --batch"
        ))),
        false => Ok(()),
    }
}

/// The name of a configuration, such as `b16-lr3e-4`.
fn configuration_name(batch: usize, lr: f64) -> String {
    format!("b{batch}-lr{lr:e}")
}

impl ModelSpec {
    /// The model and the text that these flags name; paths become absolute.
    pub(crate) fn new(args: &ModelArgs) -> Result<Self> {
        let model = args.model.as_deref().unwrap_or(DEFAULT_MODEL);
        let data = args.data.as_deref().unwrap_or(BUILTIN);
        Ok(Self {
            model: if Path::new(model).exists() { absolute(model)? } else { model.to_owned() },
            data: if data == BUILTIN { data.to_owned() } else { absolute(data)? },
            context: args.context,
            dropout: args.dropout,
            dtype: args.dtype.unwrap_or_default(),
            seed: args.seed.unwrap_or(0),
        })
    }

    fn check(&self) -> Result<(), Usage> {
        check_each("context", &self.context, parse::context)?;
        check_each("dropout", &self.dropout, parse::dropout)?;
        check_each("seed", [&self.seed], parse::seed)
    }
}

fn absolute(path: &str) -> Result<String> {
    let path = std::path::absolute(path).with_context(|| format!("`{path}` is not a usable path"))?;
    let text = path.to_str().with_context(|| format!("the path `{}` is not UTF-8", path.display()))?;
    Ok(text.to_owned())
}

impl TrainingSpec {
    fn new(args: &LearnArgs, batch: Vec<usize>, lr: Vec<f64>) -> Self {
        Self {
            batch,
            lr,
            accumulate: args.accumulate.unwrap_or(1),
            epochs: args.epochs.or(args.steps.is_none().then_some(1)),
            steps: args.steps,
            optimizer: args.optimizer.unwrap_or_default(),
            weight_decay: args.weight_decay.unwrap_or(0.01),
            no_decay_norms: args.no_decay_norms,
            clip: args.clip,
            schedule: args.schedule.unwrap_or_default(),
            warmup: args.warmup.unwrap_or(0),
            decay_steps: args.decay_steps,
            shuffle: !args.no_shuffle,
            eval_every: args.eval_every,
            patience: args.patience,
        }
    }

    fn check(&self) -> Result<(), Usage> {
        check_each("batch", &self.batch, parse::batch)?;
        check_each("lr", &self.lr, parse::rate)?;
        check_each("weight_decay", [&self.weight_decay], parse::decay)?;
        check_each("clip", &self.clip, parse::clip)?;
        check_each("warmup", [&self.warmup], parse::warmup)?;
        check_each("accumulate", [&self.accumulate], parse::count)?;
        if self.patience.is_some() && self.eval_every.is_none() {
            return Err(Usage::new("patience counts evaluations during training: give eval_every too"));
        }
        match (self.schedule, self.decay_steps) {
            (ScheduleName::Wsd, None) => {
                return Err(Usage::new("the schedule wsd decays over its last steps: give decay_steps too"));
            }
            (ScheduleName::Wsd, Some(_)) | (_, None) => {}
            (_, Some(_)) => return Err(Usage::new("decay_steps is for the schedule wsd alone")),
        }
        let counts = [
            ("decay_steps", &self.decay_steps),
            ("epochs", &self.epochs),
            ("steps", &self.steps),
            ("eval_every", &self.eval_every),
            ("patience", &self.patience),
        ];
        counts.into_iter().try_for_each(|(name, count)| check_each(name, count, parse::count))
    }

    /// How a configuration trains on a dataset of `items` items.
    pub(crate) fn of(&self, configuration: &Configuration, seed: u64, items: usize) -> TrainSpec {
        TrainSpec {
            optimizer: self.optimizer(configuration.lr),
            schedule: self.schedule(),
            decay: if self.no_decay_norms { Decay::Matrices } else { Decay::All },
            clip: self.clip,
            batch: configuration.batch,
            accumulate: self.accumulate,
            length: self.length(items.div_ceil(configuration.batch)),
            seed,
            shuffle: self.shuffle,
            eval_every: self.eval_every,
            patience: self.patience,
        }
    }

    fn optimizer(&self, rate: f64) -> OptimizerSpec {
        let weight_decay = self.weight_decay;
        match self.optimizer {
            OptimizerName::AdamW => AdamW { weight_decay, ..AdamW::new(rate) }.into(),
            OptimizerName::Sgd => Sgd { weight_decay, ..Sgd::new(rate) }.into(),
        }
    }

    fn schedule(&self) -> Schedule {
        match self.schedule {
            ScheduleName::Constant => Schedule::new(Constant, self.warmup),
            ScheduleName::Linear => Schedule::new(Linear, self.warmup),
            ScheduleName::Cosine => Schedule::new(Cosine, self.warmup),
            ScheduleName::Wsd => {
                let decay_steps = self.decay_steps.unwrap_or_default();
                Schedule::new(WarmupStableDecay { decay_steps }, self.warmup)
            }
        }
    }

    fn length(&self, steps_per_epoch: usize) -> Length {
        match (self.epochs, self.steps) {
            (Some(epochs), Some(steps)) => Length::Steps(steps.min(epochs.saturating_mul(steps_per_epoch))),
            (None, Some(steps)) => Length::Steps(steps),
            (epochs, None) => Length::Epochs(epochs.unwrap_or(1)),
        }
    }
}

impl DevicesSpec {
    /// The devices that these flags ask for; what is not given is the demo's, or follows from the machine.
    pub(crate) fn new(args: &DeviceArgs, demo: bool, machine: &Machine) -> Result<Self> {
        let default = if demo { Demo::DEVICES } else { DevicesArg::ONE_CPU };
        let devices = args.devices.clone().unwrap_or(default);
        check_link(&devices, args.link)?;
        check_precision(&devices, args.precision.unwrap_or_default())?;
        check_placement(&devices, args.optimizer_placement.unwrap_or_default())?;
        check_disk(args.disk.as_deref(), args.disk_memory)?;
        let asked = args.device_memory.or(demo.then_some(Demo::MEMORY));
        let shares_memory = matches!(devices, DevicesArg::Cpu { .. }) && asked.is_none();
        Ok(Self {
            devices: devices.to_string(),
            device_memory_bytes: doctor::memory(&devices, asked, machine)?,
            resident: shares_memory && args.link.is_none(),
            host_memory_bytes: args.host_memory,
            disk_memory_bytes: args.disk_memory,
            disk: args.disk.as_deref().map(std::path::absolute).transpose()?,
            pinned_memory_bytes: args.pinned_memory,
            precision: args.precision.unwrap_or_default(),
            optimizer_placement: args.optimizer_placement.unwrap_or_default(),
            link_bytes_per_s: args.link,
            prefetch: !args.no_prefetch,
            policy: args.policy.unwrap_or_default(),
            cuts: (!args.cuts.is_empty()).then(|| args.cuts.clone()),
            plan: args.plan.as_deref().map(std::path::absolute).transpose()?,
        })
    }

    /// These devices, but for what flags change.
    fn changed(&self, args: &DeviceArgs, plans: &Path, machine: &Machine) -> Result<Self> {
        let memory = (!self.resident).then_some(self.device_memory_bytes);
        if let Some(gone) = self.disk.as_deref().filter(|dir| args.disk.is_none() && !dir.is_dir()) {
            return Err(Usage::new(format!(
                "the run was begun with --disk `{}`, which is no directory any more: give another --disk",
                gone.display()
            ))
            .into());
        }
        let plan = args.plan.clone().or_else(|| self.plan.clone());
        let args = DeviceArgs {
            devices: Some(args.devices.clone().map_or_else(|| self.parsed(), Ok)?),
            device_memory: args.device_memory.or(memory),
            host_memory: args.host_memory.or(self.host_memory_bytes),
            disk_memory: args.disk_memory.or(self.disk_memory_bytes),
            disk: args.disk.clone().or_else(|| self.disk.clone()),
            pinned_memory: args.pinned_memory.or(self.pinned_memory_bytes),
            precision: args.precision.or(Some(self.precision)),
            optimizer_placement: args.optimizer_placement.or(Some(self.optimizer_placement)),
            link: args.link.or(self.link_bytes_per_s),
            no_prefetch: args.no_prefetch || !self.prefetch,
            policy: args.policy.or(Some(self.policy)),
            cuts: match args.cuts.is_empty() {
                true => self.cuts.clone().unwrap_or_default(),
                false => args.cuts.clone(),
            },
            plan: plan.or_else(|| plans.is_dir().then(|| plans.to_owned())),
        };
        Self::new(&args, false, machine)
    }

    fn check(&self) -> Result<(), Usage> {
        self.parsed()?;
        let sizes = [
            ("device_memory_bytes", Some(self.device_memory_bytes)),
            ("host_memory_bytes", self.host_memory_bytes),
            ("disk_memory_bytes", self.disk_memory_bytes),
            ("pinned_memory_bytes", self.pinned_memory_bytes),
        ];
        for (name, size) in sizes {
            check_each(name, &size.map(ByteSize::bytes), said::<ByteSize>)?;
        }
        let bandwidth = self.link_bytes_per_s.map(|Bandwidth(bytes)| format!("{bytes}B/s"));
        check_each("link_bytes_per_s", &bandwidth, said::<Bandwidth>)?;
        check_each("cuts", self.cuts.iter().flatten(), parse::cut)
    }

    /// Refuses devices that this machine does not have.
    fn check_machine(&self, machine: &Machine) -> Result<()> {
        let devices = self.parsed()?;
        check_link(&devices, self.link_bytes_per_s)?;
        check_precision(&devices, self.precision)?;
        check_placement(&devices, self.optimizer_placement)?;
        check_disk(self.disk.as_deref(), self.disk_memory_bytes)?;
        doctor::memory(&devices, Some(self.device_memory_bytes), machine).map(|_| ())
    }

    /// These devices, with what is to be on the disk in this directory if no other was named.
    pub(crate) fn with_disk_in(&self, dir: &Path) -> Self {
        Self { disk: self.disk.clone().or_else(|| Some(dir.to_owned())), ..self.clone() }
    }

    /// The devices, understood.
    pub(crate) fn parsed(&self) -> Result<DevicesArg, Usage> {
        self.devices.parse().map_err(Usage::new)
    }
}

/// Refuses a simulated link in front of devices that have a real one.
fn check_link(devices: &DevicesArg, link: Option<Bandwidth>) -> Result<(), Usage> {
    match (devices, link) {
        (DevicesArg::Cuda(_) | DevicesArg::Wgpu(_), Some(_)) => Err(Usage::new(format!(
            "--link simulates a link in front of CPU devices, and those of --devices {devices} have one of their own"
        ))),
        _ => Ok(()),
    }
}

/// Refuses a precision that only NVIDIA's GPUs have.
fn check_precision(devices: &DevicesArg, precision: PrecisionName) -> Result<(), Usage> {
    match (precision, devices) {
        (PrecisionName::Tf32, DevicesArg::Cpu { .. } | DevicesArg::Wgpu(_)) => Err(Usage::new(format!(
            "--precision tf32 is for NVIDIA's GPUs, and --devices {devices} names none: leave it out, or give --devices cuda:0"
        ))),
        _ => Ok(()),
    }
}

/// Refuses a precision of products where the type of their factors leaves no choice.
pub(crate) fn check_dtype(dtype: DtypeName, precision: PrecisionName) -> Result<(), Usage> {
    match (dtype, precision) {
        (DtypeName::Bf16, PrecisionName::Tf32) => Err(Usage::new(
            "--precision tf32 is about products of f32, and --dtype bf16 leaves none: leave one of the two out",
        )),
        _ => Ok(()),
    }
}

/// Refuses a directory that is not there, or that nothing is to be in.
fn check_disk(dir: Option<&Path>, memory: Option<ByteSize>) -> Result<(), Usage> {
    let Some(dir) = dir else { return Ok(()) };
    let shown = dir.display();
    if memory.is_none() {
        let text = format!("--disk `{shown}` says where, and nothing how much: give --disk-memory too");
        return Err(Usage::new(text));
    }
    match dir.is_dir() {
        true => Ok(()),
        false => Err(Usage::new(format!("--disk `{shown}` names no directory that exists"))),
    }
}

/// Refuses optimizers on devices whose memory is the host's.
fn check_placement(devices: &DevicesArg, placement: PlacementName) -> Result<(), Usage> {
    match (placement, devices) {
        (PlacementName::Device, DevicesArg::Cpu { .. }) => Err(Usage::new(format!(
            "--optimizer-placement device is for GPUs, and --devices {devices} names none: leave it out, or give --devices cuda:0"
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    const MACHINE: Machine = Machine { cores: 4, available: Some(ByteSize(10_000_000_000)), limited: false };

    fn spec(line: &str) -> Result<RunSpec> {
        let cli = Cli::try_parse_from(["hydra"].into_iter().chain(line.split_whitespace())).unwrap();
        match cli.command {
            None => RunSpec::select(&cli.select, &MACHINE),
            Some(Command::Select(args)) => RunSpec::select(&args, &MACHINE),
            Some(Command::Train(args)) => RunSpec::train(&args, &MACHINE),
            _ => panic!("no spec"),
        }
    }

    #[test]
    fn the_default_is_twelve_configurations_on_two_small_devices() {
        let spec = spec("--steps 3").unwrap();
        let grid = spec.grid().unwrap();
        assert_eq!(grid.len(), 12);
        assert_eq!(grid[0], Configuration { name: "b12-lr3e-3".into(), batch: 12, lr: 3e-3 });
        assert_eq!(grid[11].name, "b8-lr3e-5");
        assert_eq!(spec.devices.devices, "cpu:2x1");
        assert_eq!(spec.devices.device_memory_bytes, Demo::MEMORY);
    }

    #[test]
    fn a_flag_for_model_data_batch_or_devices_ends_the_demo() {
        for line in ["--model gpt2-mini", "--data builtin", "--batch 16,8", "--devices cpu:1", "train"] {
            let devices = spec(line).unwrap().devices;
            assert_eq!(devices.devices, "cpu:1");
            assert_eq!(devices.device_memory_bytes, ByteSize(4_000_000_000));
        }
        assert_eq!(spec("--model gpt2-mini").unwrap().training.batch, DEFAULT_BATCHES);
        let devices = spec("--device-memory 64MiB").unwrap().devices;
        assert_eq!((devices.devices.as_str(), devices.device_memory_bytes), ("cpu:1", ByteSize::mib(64)));
    }

    #[test]
    fn a_spec_comes_back_from_its_file() {
        let line = "select --model gpt2-mini --batch 4 --lr 1e-3,3e-4 --cuts 1,3 --link 8GiB/s --clip 1.5 \
                    --steps 9 --epochs 2 --optimizer sgd --schedule cosine --policy srtf --no-shuffle --seed 12 \
                    --dropout 0.1 --plan plans --no-decay-norms --eval-every 4 --host-memory 1GiB --dtype bf16 \
                    --disk-memory 4GiB --disk . --optimizer-placement host --checkpoint-every 90s";
        for line in [line, "", "train"] {
            let spec = spec(line).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("spec.toml");
            std::fs::write(&file, spec.to_toml().unwrap()).unwrap();
            assert_eq!(RunSpec::load(&file, &MACHINE).unwrap(), spec);
        }
    }

    #[test]
    fn a_broken_spec_is_told_from_a_missing_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("spec.toml");
        let says = |error: anyhow::Error| format!("{error:#}");
        assert!(says(RunSpec::load(&file, &MACHINE).unwrap_err()).contains("could not be read"));
        std::fs::write(&file, "model = 3").unwrap();
        assert!(says(RunSpec::load(&file, &MACHINE).unwrap_err()).contains("is not a spec"));
        let good = spec("").unwrap().to_toml().unwrap();
        std::fs::write(&file, good.replace("cpu:2x1", "tpu:2")).unwrap();
        assert!(says(RunSpec::load(&file, &MACHINE).unwrap_err()).contains("`tpu:2`"));
        std::fs::write(&file, good.replace("lr = [0.003", "lr = [-0.003")).unwrap();
        assert!(says(RunSpec::load(&file, &MACHINE).unwrap_err()).contains("learning rate"));
        std::fs::write(&file, good.replace("format = 1", "format = 9")).unwrap();
        assert!(says(RunSpec::load(&file, &MACHINE).unwrap_err()).contains("format 9"));
    }

    #[test]
    fn a_spec_in_a_file_has_the_limits_of_the_flags() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("spec.toml");
        let good = "train --steps 3 --epochs 2 --cuts 1,2 --clip 1 --context 8 --dropout 0.5 --eval-every 2 --patience 3 \
                    --device-memory 16MiB --link 1KiB/s";
        let good = spec(good).unwrap().to_toml().unwrap();
        for (line, changed, says) in [
            (
                "epochs = 2",
                "epochs = 4611686018427387904",
                "epochs: `4611686018427387904` is not a whole number",
            ),
            ("steps = 3", "steps = 4294967296", "steps: `4294967296`"),
            ("eval_every = 2", "eval_every = 0", "eval_every: `0`"),
            ("patience = 3", "patience = 0", "patience: `0`"),
            ("eval_every = 2", "", "give eval_every too"),
            ("warmup = 0", "warmup = 4294967296", "warmup: `4294967296`"),
            ("accumulate = 1", "accumulate = 0", "accumulate: `0`"),
            ("batch = [8]", "batch = [65537]", "batch: `65537` is not a batch size"),
            ("lr = [0.0003]", "lr = [nan]", "lr: `NaN` is out of range"),
            ("clip = 1.0", "clip = 0.0", "clip: `0` is out of range"),
            ("weight_decay = 0.01", "weight_decay = -1.0", "weight_decay: `-1`"),
            ("context = 8", "context = 1", "context: `1`"),
            ("dropout = 0.5", "dropout = 1.0", "dropout: `1`"),
            (
                "device_memory_bytes = 16777216",
                "device_memory_bytes = 0",
                "device_memory_bytes: `0` is not a size",
            ),
            ("link_bytes_per_s = 1024.0", "link_bytes_per_s = -1.0", "link_bytes_per_s: `-1B/s`"),
            ("cuts = [1, 2]", "cuts = [0, 2]", "cuts: `0` is not a cut-point"),
        ] {
            assert!(good.contains(line), "{line} in {good}");
            std::fs::write(&file, good.replace(line, changed)).unwrap();
            let error = format!("{:#}", RunSpec::load(&file, &MACHINE).unwrap_err());
            assert!(error.contains("cannot be run") && error.contains(says), "{changed}: {error}");
        }
    }

    #[test]
    fn combinations_that_make_no_sense_are_usage_errors() {
        for (line, says) in [
            ("--lr 1e-3,0.001", "given twice"),
            ("--batch 8,4 --accumulate 5", "--accumulate 5 cuts --batch 4"),
            ("--devices cuda:0 --link 8GiB/s", "--devices cuda:0 have one of their own"),
            ("--disk .", "give --disk-memory too"),
            ("--disk-memory 1GiB --disk there/is/none", "--disk `there/is/none` names no directory"),
            ("--devices cpu:2 --optimizer-placement device", "is for GPUs, and --devices cpu:2 names none"),
        ] {
            let error = spec(line).unwrap_err();
            assert!(error.downcast_ref::<Usage>().is_some(), "{error:#}");
            assert!(format!("{error:#}").contains(says), "{error:#}");
        }
    }

    #[test]
    fn products_of_16_bits_have_one_precision() {
        let said = check_dtype(DtypeName::Bf16, PrecisionName::Tf32).unwrap_err().to_string();
        assert!(said.ends_with("leave one of the two out"), "{said}");
        assert!(check_dtype(DtypeName::Bf16, PrecisionName::F32).is_ok());
        assert!(check_dtype(DtypeName::F32, PrecisionName::Tf32).is_ok());
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn devices_that_are_not_in_the_build_are_refused_in_flags_and_in_files() {
        let says = |error: anyhow::Error| {
            assert!(error.downcast_ref::<Usage>().is_none(), "{error:#}");
            format!("{error:#}")
        };
        let refused = says(spec("--devices cuda:0/2 --device-memory 1GiB").unwrap_err());
        assert!(refused.contains("`--devices cuda:0/2` cannot be used here"), "{refused}");
        assert!(refused.contains("this build has no CUDA"), "{refused}");
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("spec.toml");
        let good = spec("").unwrap().to_toml().unwrap();
        std::fs::write(&file, good.replace("cpu:2x1", "cuda:0/2")).unwrap();
        assert!(says(RunSpec::load(&file, &MACHINE).unwrap_err()).ends_with(&refused));
    }

    #[test]
    fn steps_and_epochs_make_the_length() {
        let length = |line: &str| {
            let spec = spec(line).unwrap();
            let configuration = Configuration { name: "x".into(), batch: 4, lr: 1e-3 };
            spec.training.of(&configuration, 0, 10).length
        };
        assert_eq!(length(""), Length::Epochs(1));
        assert_eq!(length("--epochs 3"), Length::Epochs(3));
        assert_eq!(length("--steps 7"), Length::Steps(7));
        assert_eq!(length("--steps 7 --epochs 2"), Length::Steps(6));
        assert_eq!(length("--steps 5 --epochs 2"), Length::Steps(5));
    }

    #[test]
    fn flags_reach_the_training_spec() {
        let spec = spec("train --lr 0.5 --batch 6 --accumulate 2 --weight-decay 0.2 --no-decay-norms --warmup 4 --schedule linear --seed 3 --no-shuffle").unwrap();
        let configuration = &spec.grid().unwrap()[0];
        let train = spec.training.of(configuration, spec.model.seed, 60);
        let Some(&AdamW { lr, weight_decay, .. }) = train.optimizer.downcast_ref() else {
            panic!("not AdamW")
        };
        assert_eq!((lr, weight_decay), (0.5, 0.2));
        assert_eq!((train.batch, train.accumulate, train.seed, train.shuffle), (6, 2, 3, false));
        assert_eq!(train.decay, Decay::Matrices);
        assert_eq!(train.schedule, Schedule::new(Linear, 4));
        assert_eq!(train.steps(60), 10);
    }

    #[test]
    fn a_schedule_that_decays_last_says_how_long() {
        let spec = |line: &str| spec(&format!("train --lr 1 --batch 2 --steps 9 {line}"));
        let wsd = spec("--schedule wsd --decay-steps 4 --warmup 2").unwrap();
        let train = wsd.training.of(&wsd.grid().unwrap()[0], 0, 60);
        assert_eq!([2, 5, 7].map(|step| train.rate(step, 9)), [1.0, 1.0, 0.5]);
        let text = wsd.to_toml().unwrap();
        assert!(text.contains("schedule = \"wsd\"\nwarmup = 2\ndecay_steps = 4\n"), "{text}");
        assert!(!spec("--schedule linear").unwrap().to_toml().unwrap().contains("decay_steps"));
        for (line, says) in
            [("--schedule wsd", "give decay_steps too"), ("--decay-steps 4", "for the schedule wsd alone")]
        {
            let error = spec(line).unwrap_err();
            assert!(error.downcast_ref::<Usage>().is_some(), "{error:#}");
            assert!(format!("{error:#}").contains(says), "{error:#}");
        }
    }
}
