//! Training: the grid, and what its configurations have in common.

use super::{flags, values};
use crate::terminal::Usage;
use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{ArgAction, Args};
use hydra_core::optimizer::{AdamW, Sgd};
use hydra_core::schedule::{Constant, Cosine, Linear, WarmupStableDecay};
use hydra_core::{Decay, Length, OptimizerSpec, Schedule, TrainSpec};
use serde::{Deserialize, Serialize};

/// An optimizer at a learning rate, with a weight decay.
type MakeOptimizer = fn(f64, f64) -> OptimizerSpec;

/// The optimizers by name.
const OPTIMIZERS: &[(&str, MakeOptimizer)] = &[
    ("adamw", |lr, weight_decay| AdamW { weight_decay, ..AdamW::new(lr) }.into()),
    ("sgd", |lr, weight_decay| Sgd { weight_decay, ..Sgd::new(lr) }.into()),
];

/// A schedule as the other settings say.
type MakeSchedule = fn(&TrainingSettings) -> Schedule;

/// The name of the schedule that has `--decay-steps`.
const WSD: &str = "wsd";

/// The schedules by name.
const SCHEDULES: &[(&str, MakeSchedule)] = &[
    ("constant", |of| Schedule::new(Constant, of.warmup)),
    ("linear", |of| Schedule::new(Linear, of.warmup)),
    ("cosine", |of| Schedule::new(Cosine, of.warmup)),
    (WSD, |of| {
        let decay_steps = of.decay_steps.unwrap_or_default();
        Schedule::new(WarmupStableDecay { decay_steps }, of.warmup)
    }),
];

/// What a table has under a name.
fn named<T: Copy>(what: &str, table: &[(&str, T)], name: &str) -> Result<T, Usage> {
    let found = table.iter().find(|(of, _)| *of == name).map(|(_, make)| *make);
    found.ok_or_else(|| {
        let names: Vec<&str> = table.iter().map(|(name, _)| *name).collect();
        Usage::new(format!("`{name}` is not {what}: expected {}", values::any_of(&names)))
    })
}

/// The grid and what its configurations have in common.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Training")]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TrainingSettings {
    /// Minibatch sizes, separated by commas [default: 16,8; of the demo 12,8]
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = values::batch, allow_hyphen_values = true)]
    pub(crate) batch: Vec<usize>,
    /// Learning rates, separated by commas [default: 3e-3,1e-3,6e-4,3e-4,1e-4,3e-5]
    #[arg(long, value_name = "RATE,..", value_delimiter = ',', value_parser = values::rate, allow_hyphen_values = true)]
    pub(crate) lr: Vec<f64>,
    /// Microbatches that a minibatch is cut into, whose gradients add up
    #[arg(long, value_name = "N", default_value = "1", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) accumulate: usize,
    /// Passes over the training data [default: 1]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) epochs: Option<usize>,
    /// Exactly so many minibatches, wrapping into further epochs; with --epochs, at most so many
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) steps: Option<usize>,
    /// AdamW (betas 0.9 and 0.999, epsilon 1e-8) or SGD (momentum 0.9)
    #[arg(long, default_value = OPTIMIZERS[0].0, value_parser = PossibleValuesParser::new(OPTIMIZERS.iter().map(|(name, _)| *name)))]
    pub(crate) optimizer: String,
    /// Weight decay: decoupled for AdamW, coupled for SGD
    #[arg(long, value_name = "X", default_value = "0.01", value_parser = values::decay, allow_hyphen_values = true)]
    pub(crate) weight_decay: f64,
    /// Spare norms and biases from weight decay
    #[arg(long)]
    pub(crate) no_decay_norms: bool,
    /// Scale gradients down to this global norm [default: off]
    #[arg(long, value_name = "X", value_parser = values::clip, allow_hyphen_values = true)]
    pub(crate) clip: Option<f64>,
    /// The learning rate's shape after the warmup; wsd is constant until the last --decay-steps
    #[arg(long, default_value = SCHEDULES[0].0, value_parser = PossibleValuesParser::new(SCHEDULES.iter().map(|(name, _)| *name)))]
    pub(crate) schedule: String,
    /// Minibatches over which the learning rate rises from zero
    #[arg(long, value_name = "N", default_value = "0", value_parser = values::warmup, allow_hyphen_values = true)]
    pub(crate) warmup: usize,
    /// The last minibatches, over which --schedule wsd lets the learning rate fall linearly to zero
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) decay_steps: Option<usize>,
    /// Take the training data in its own order in every epoch
    #[arg(long = "no-shuffle", action = ArgAction::SetFalse)]
    pub(crate) shuffle: bool,
    /// Evaluate on the validation data after every N minibatches and keep the best weights [default: off]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) eval_every: Option<usize>,
    /// End a task after N of these evaluations in a row without a better one (early stopping) [default: off]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true, requires = "eval_every")]
    pub(crate) patience: Option<usize>,
}

impl Default for TrainingSettings {
    fn default() -> Self {
        flags::defaults()
    }
}

/// One configuration of the grid.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Configuration {
    /// A name that is unique within the grid and safe as a directory's, such as `b16-lr3e-4`.
    pub(crate) name: String,
    pub(crate) batch: usize,
    pub(crate) lr: f64,
}

impl TrainingSettings {
    /// These settings with a length, if none is given.
    pub(crate) fn resolve(self) -> Self {
        Self { epochs: self.epochs.or(self.steps.is_none().then_some(1)), ..self }
    }

    /// Refuses settings that make no sense together.
    pub(crate) fn check(&self, seed: u64) -> Result<(), Usage> {
        if self.batch.is_empty() || self.lr.is_empty() {
            return Err(Usage::new(
                "there is nothing to train: give at least one batch size and one learning rate",
            ));
        }
        if self.patience.is_some() && self.eval_every.is_none() {
            return Err(Usage::new("patience counts evaluations during training: give eval_every too"));
        }
        match (self.schedule == WSD, self.decay_steps) {
            (true, None) => {
                return Err(Usage::new("the schedule wsd decays over its last steps: give decay_steps too"));
            }
            (false, Some(_)) => return Err(Usage::new("decay_steps is for the schedule wsd alone")),
            _ => {}
        }
        for configuration in self.grid()? {
            check_accumulate(self.accumulate, configuration.batch)?;
            self.of(&configuration, seed, usize::MAX)?.validate().map_err(Usage::from_error)?;
        }
        Ok(())
    }

    /// The configurations: for each batch size in its order, each learning rate in its order.
    pub(crate) fn grid(&self) -> Result<Vec<Configuration>, Usage> {
        let mut grid: Vec<Configuration> = Vec::new();
        for &batch in &self.batch {
            for &lr in &self.lr {
                let name = format!("b{batch}-lr{lr:e}");
                if grid.iter().any(|other| other.name == name) {
                    return Err(Usage::new(format!(
                        "batch {batch} with learning rate {lr:e} is given twice: give each once"
                    )));
                }
                grid.push(Configuration { name, batch, lr });
            }
        }
        Ok(grid)
    }

    /// The training of a configuration on a dataset of `items` items.
    pub(crate) fn of(
        &self,
        configuration: &Configuration,
        seed: u64,
        items: usize,
    ) -> Result<TrainSpec, Usage> {
        Ok(TrainSpec {
            optimizer: named("an optimizer", OPTIMIZERS, &self.optimizer)?(
                configuration.lr,
                self.weight_decay,
            ),
            schedule: named("a schedule", SCHEDULES, &self.schedule)?(self),
            decay: if self.no_decay_norms { Decay::Matrices } else { Decay::All },
            clip: self.clip,
            batch: configuration.batch,
            accumulate: self.accumulate,
            length: self.length(items.div_ceil(configuration.batch)),
            seed,
            shuffle: self.shuffle,
            eval_every: self.eval_every,
            patience: self.patience,
        })
    }

    fn length(&self, steps_per_epoch: usize) -> Length {
        match (self.epochs, self.steps) {
            (Some(epochs), Some(steps)) => Length::Steps(steps.min(epochs.saturating_mul(steps_per_epoch))),
            (None, Some(steps)) => Length::Steps(steps),
            (epochs, None) => Length::Epochs(epochs.unwrap_or(1)),
        }
    }
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
