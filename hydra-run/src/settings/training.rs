//! Training settings: the grid, and the settings that its configurations share.

use super::axis::{SettingGroup, repeated};
use super::warmup::Warmup;
use super::{flags, values};
use crate::terminal::Usage;
use anyhow::Result;
use clap::builder::{NonEmptyStringValueParser, PossibleValuesParser};
use clap::{ArgAction, Args};
use hydra_core::{Decay, Length, OptimizerSpec, Schedule, TrainSpec};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;
use toml::Table;

/// The schedule that has decay steps.
const WSD: &str = "wsd";

/// The settings of a training's length; a change of one replaces both.
pub(super) const LENGTHS: [&str; 2] = ["epochs", "steps"];

/// The metrics of generated texts.
pub(crate) const TEXT_METRICS: [&str; 2] = ["exact_match", "rouge_l"];

/// The grid, and the settings that its configurations share.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Training")]
#[serde(default = "flags::defaults", deny_unknown_fields)]
pub struct TrainingSettings {
    /// Minibatch size: items in one optimizer step, over all microbatches and devices; several, separated by commas, make a grid
    /// [default: 8; demo: 12,8]
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = values::batch, allow_hyphen_values = true)]
    pub batch: Vec<usize>,
    /// Peak learning rate; several, separated by commas, make a grid [default: 3e-4; demo: 3e-3,1e-3,6e-4,3e-4,1e-4,3e-5]
    #[arg(long, value_name = "RATE,..", value_delimiter = ',', value_parser = values::rate, allow_hyphen_values = true)]
    pub lr: Vec<f64>,
    /// Gradient accumulation: split each minibatch into N microbatches and add their gradients before the optimizer step
    #[arg(long, value_name = "N", default_value = "1", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) accumulate: usize,
    /// Number of passes over the training data [default: 1]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) epochs: Option<usize>,
    /// Number of optimizer steps (minibatches), with as many epochs as they take; with --epochs, an upper limit
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    pub steps: Option<usize>,
    /// Optimizer: adamw (betas 0.9, 0.999; epsilon 1e-8), adamw8bit (the same with moments in 8 bits), sgd (momentum 0.9) or lion
    /// (betas 0.9, 0.99)
    #[arg(long, default_value = "adamw", value_parser = PossibleValuesParser::new(OptimizerSpec::names()))]
    pub optimizer: String,
    /// Weight decay: decoupled for adamw, adamw8bit and lion, added to the gradient for sgd
    #[arg(long, value_name = "X", default_value = "0.01", value_parser = values::decay, allow_hyphen_values = true)]
    pub(crate) weight_decay: f64,
    /// Exclude norms and biases from weight decay
    #[arg(long)]
    pub(crate) no_decay_norms: bool,
    /// Clip gradients to this global norm [default: no clipping]
    #[arg(long, value_name = "X", value_parser = values::clip, allow_hyphen_values = true)]
    pub(crate) clip: Option<f64>,
    /// Learning-rate schedule after the warmup: constant, linear or cosine decay to zero, or wsd (warmup-stable-decay: constant
    /// until the last --decay-steps)
    #[arg(long, default_value = "constant", value_parser = PossibleValuesParser::new(Schedule::names()))]
    pub(crate) schedule: String,
    /// Learning-rate warmup, linear from zero: a number of minibatches, or a fraction of all minibatches such as 0.1
    #[arg(long, value_name = "N|X", default_value = "0", allow_hyphen_values = true)]
    pub(crate) warmup: Warmup,
    /// For --schedule wsd: number of minibatches of the final linear decay
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) decay_steps: Option<usize>,
    /// For --schedule wsd: final learning rate, as a fraction of --lr from 0 to 1 [default: 0]
    #[arg(long, value_name = "X", value_parser = values::share, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) decay_to: Option<f64>,
    /// Do not shuffle: keep the order of the training data in every epoch
    #[arg(long = "no-shuffle", action = ArgAction::SetFalse)]
    pub(crate) shuffle: bool,
    /// Evaluate on the validation split every N minibatches, and keep the best weights [default: off]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) eval_every: Option<usize>,
    /// Also evaluate on the validation split after these minibatches, separated by commas, and keep the best weights
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) eval_at: Vec<usize>,
    /// Early stopping: end a task after N evaluations in a row without improvement; needs --eval-every or --eval-at [default:
    /// off]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) patience: Option<usize>,
    /// Metric that decides which evaluation is the best one, for the kept weights, --patience, searches and the leaderboard:
    /// loss, perplexity of a language model, exact_match or rouge_l of the answers that it generates for the validation rows, or a
    /// classifier's, such as accuracy, f1_macro or matthews_correlation [default: the loss; for the leaderboard accuracy or
    /// perplexity, where there is one]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) metric: Option<String>,
    /// Evaluate only on the first N items (blocks of text, examples or images) of the validation and test splits [default: all]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) eval_limit: Option<usize>,
    /// At each evaluation during and after training, continue these prompts with the most likely tokens: rows with a `prompt` or
    /// `messages` (.jsonl, .json, .csv, .tsv or .parquet), or a text file with one prompt on each line
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sample_prompts: Option<PathBuf>,
    /// Maximum number of new tokens of each text that is generated at evaluations [default: 64, or those of the longest answer that
    /// --metric compares with]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sample_tokens: Option<usize>,
    /// Skip the validation before training
    #[arg(long = "no-initial-validation", action = ArgAction::SetFalse)]
    #[serde(skip_serializing_if = "Clone::clone")]
    pub(crate) initial_validation: bool,
}

/// One configuration of the grid.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Configuration {
    /// A name that is unique within the grid and safe as a directory's, such as `b16-lr3e-4`.
    pub name: String,
    /// The index of its model among the run's models.
    pub model: usize,
    /// Its minibatch size.
    pub batch: usize,
    /// Its learning rate.
    pub lr: f64,
    /// The rank of its adapters, if it has adapters from a grid.
    pub lora: Option<usize>,
    /// Its seed, if it differs from the run's.
    pub seed: Option<u64>,
    /// Its other settings that differ from the run's.
    pub changes: Table,
}

impl TrainingSettings {
    /// These settings with the default length, if none is given, and an absolute path.
    pub(crate) fn resolve(self) -> Self {
        let absolute = |file: PathBuf| std::path::absolute(&file).unwrap_or(file);
        Self {
            epochs: self.epochs.or(self.steps.is_none().then_some(1)),
            sample_prompts: self.sample_prompts.map(absolute),
            ..self
        }
    }

    /// Refuses a grid without configurations, and settings that are invalid for one of them.
    pub(crate) fn check_grid(&self, grid: &[Configuration], seed: u64) -> Result<(), Usage> {
        if grid.is_empty() {
            let says = "the grid is empty: give at least one --batch and one --lr";
            return Err(Usage::new(says));
        }
        grid.iter().try_for_each(|one| self.check_one(one, seed))
    }

    /// Refuses settings that are invalid for this configuration.
    pub(crate) fn check_one(&self, one: &Configuration, seed: u64) -> Result<(), Usage> {
        let spec = self.of(one, seed, usize::MAX)?;
        check_accumulate(spec.accumulate, spec.batch)?;
        spec.validate().map_err(Usage::from_error)
    }

    /// Refuses settings that are invalid for every configuration. `drawn` reports the settings that configurations set.
    pub(crate) fn check_alone(&self, drawn: impl Fn(&str) -> bool) -> Result<(), Usage> {
        if self.patience.is_some() && !self.is_evaluated() {
            let says =
                "--patience N counts evaluations during training; pass --eval-every N or --eval-at N,.. too";
            return Err(Usage::new(says));
        }
        if self.schedule == WSD && self.decay_steps.is_none() && !drawn("decay_steps") {
            return Err(Usage::new("--schedule wsd needs the length of its decay; pass --decay-steps N too"));
        }
        let never = self.schedule != WSD && !drawn("schedule");
        if never && (self.decay_steps.is_some() || drawn("decay_steps")) {
            return Err(Usage::new("--decay-steps needs --schedule wsd"));
        }
        if never && (self.decay_to.is_some() || drawn("decay_to")) {
            return Err(Usage::new("--decay-to needs --schedule wsd"));
        }
        Ok(())
    }

    /// Refuses a combination of batch size and learning rate that is given twice.
    pub(super) fn check_lists(&self) -> Result<(), Usage> {
        let all = self.batch.iter().flat_map(|batch| self.lr.iter().map(move |lr| (batch, lr)));
        match repeated(&all.collect::<Vec<_>>()) {
            Some((batch, lr)) => Err(Usage::new(format!(
                "--batch {batch} with --lr {lr:e} is given twice; give each value once"
            ))),
            None => Ok(()),
        }
    }

    /// The training of a configuration on a dataset of `items` items.
    pub fn of(&self, one: &Configuration, seed: u64, items: usize) -> Result<TrainSpec, Usage> {
        one.changed(self, SettingGroup::Training)?.spec_of(one, one.seed.unwrap_or(seed), items)
    }

    fn spec_of(&self, one: &Configuration, seed: u64, items: usize) -> Result<TrainSpec, Usage> {
        let spec = TrainSpec {
            optimizer: self.optimizer(one.lr)?,
            schedule: Schedule::default(),
            decay: if self.no_decay_norms { Decay::Matrices } else { Decay::All },
            clip: self.clip,
            batch: one.batch,
            accumulate: self.accumulate,
            length: self.length(items.div_ceil(one.batch)),
            seed,
            shuffle: self.shuffle,
            eval_every: self.eval_every,
            eval_at: self.eval_at.clone(),
            patience: self.patience,
            metric: self.metric.clone(),
        };
        Ok(TrainSpec { schedule: self.schedule(self.warmup.steps(spec.steps(items)))?, ..spec })
    }

    /// Returns true if tasks are evaluated while they train.
    pub(crate) fn is_evaluated(&self) -> bool {
        self.eval_every.is_some() || !self.eval_at.is_empty()
    }

    /// The note about a warmup that is as long as the training on `items` items, or longer, in one of these configurations.
    pub(crate) fn note_of_warmup(
        &self,
        grid: &[Configuration],
        items: usize,
    ) -> Result<Option<String>, Usage> {
        let mut most: Option<(usize, f64, Warmup)> = None;
        for one in grid {
            let spec = self.of(one, 0, items)?;
            let steps = spec.steps(items);
            let warmup = one.changed(self, SettingGroup::Training)?.warmup;
            if warmup.steps(steps) >= steps && most.is_none_or(|(longest, ..)| longest < steps) {
                most = Some((steps, spec.schedule.factor(steps.saturating_sub(1), steps), warmup));
            }
        }
        Ok(most.map(|(steps, share, warmup)| {
            format!(
                "note: --warmup {warmup} is not shorter than the training, which ends after {steps} minibatches: the learning rate \
                 only reaches {:.1}% of --lr; pass a shorter --warmup, or more --steps or --epochs",
                100.0 * share
            )
        }))
    }

    fn optimizer(&self, rate: f64) -> Result<OptimizerSpec, Usage> {
        OptimizerSpec::named(&self.optimizer, rate, self.weight_decay)
            .ok_or_else(|| Usage::new(format!("unknown optimizer `{}`", self.optimizer)))
    }

    /// The schedule after a warmup of `warmup` minibatches.
    fn schedule(&self, warmup: usize) -> Result<Schedule, Usage> {
        let (kind, decay_steps) = (&self.schedule, self.decay_steps.unwrap_or_default());
        let decay_to = self.decay_to.unwrap_or_default();
        let described = json!({
            "kind": kind, "warmup": warmup, "decay_steps": decay_steps, "decay_to": decay_to
        });
        serde_json::from_value(described).map_err(Usage::from_error)
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
pub fn check_accumulate(accumulate: usize, batch: usize) -> Result<(), Usage> {
    if accumulate <= batch {
        return Ok(());
    }
    Err(Usage::new(format!("--accumulate must be between 1 and --batch ({batch}), got {accumulate}")))
}

#[cfg(test)]
mod tests {
    use super::super::Grid;
    use super::*;

    fn all(settings: &TrainingSettings) -> Vec<Configuration> {
        Grid::default().of(settings, &flags::defaults()).unwrap()
    }

    #[test]
    fn a_warmup_as_long_as_the_training_is_said_with_both_numbers() {
        let note = |warmup, steps: Option<usize>| {
            let grid = TrainingSettings { batch: vec![8, 4], lr: vec![1e-3], ..flags::defaults() };
            let warmup = Warmup::Steps(warmup);
            let grid = TrainingSettings { warmup, steps, epochs: steps.is_none().then_some(1), ..grid };
            grid.note_of_warmup(&all(&grid), 40).unwrap()
        };
        let said = note(100, Some(3)).unwrap();
        assert!(said.contains("--warmup 100 ") && said.contains("after 3 minibatches"), "{said}");
        assert!(said.contains("reaches 2.0% of --lr") && !said.contains('\n'), "{said}");
        assert_eq!((note(0, Some(1)), note(2, Some(3))), (None, None));
        assert!(note(3, Some(3)).is_some(), "no minibatch has the peak rate");
        // Five minibatches of eight, ten of four: the note names the longest that the warmup fills.
        assert_eq!(note(4, None), None);
        assert!(note(9, None).unwrap().contains("after 5 minibatches"));
        assert!(
            note(10, None).unwrap().contains("after 10 minibatches: the learning rate only reaches 90.0%")
        );
    }

    #[test]
    fn a_warmup_is_a_share_of_the_minibatches_that_are_trained() {
        let settings = TrainingSettings {
            warmup: Warmup::Share(0.1),
            schedule: "linear".to_owned(),
            batch: vec![8, 4],
            lr: vec![1e-3],
            epochs: Some(2),
            ..flags::defaults()
        };
        let grid = all(&settings);
        let warmups: Vec<_> = grid
            .iter()
            .map(|one| {
                serde_json::to_value(settings.of(one, 0, 400).unwrap()).unwrap()["schedule"]["warmup"].clone()
            })
            .collect();
        assert_eq!(warmups, [json!(10), json!(20)]);
        let text = toml::to_string(&settings).unwrap();
        assert!(text.contains("warmup = 0.1\n"), "{text}");
        assert_eq!(toml::from_str::<TrainingSettings>(&text).unwrap(), settings);
    }

    #[test]
    fn every_schedule_is_a_curve_of_the_core() {
        for schedule in Schedule::names() {
            let decay_steps = (schedule == WSD).then_some(3);
            let settings =
                TrainingSettings { schedule: schedule.to_owned(), decay_steps, ..flags::defaults() };
            settings.schedule(0).unwrap().validate().unwrap();
        }
    }
}
