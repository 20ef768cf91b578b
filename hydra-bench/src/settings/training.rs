//! Training: the grid, and what its configurations have in common.

use super::warmup::Warmup;
use super::{flags, values};
use crate::terminal::Usage;
use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{ArgAction, Args};
use hydra_core::{Decay, Length, OptimizerSpec, Schedule, TrainSpec};
use serde::{Deserialize, Serialize};
use serde_json::json;
use toml::Table;

/// The schedule that has decay steps.
const WSD: &str = "wsd";

/// The settings that say how long is trained; one of them takes the place of both.
pub(super) const LENGTHS: [&str; 2] = ["epochs", "steps"];

/// The grid and what its configurations have in common.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Training")]
#[serde(default = "flags::defaults", deny_unknown_fields)]
pub(crate) struct TrainingSettings {
    /// Minibatch sizes, separated by commas [default: 8; of the demo 12,8]
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = values::batch, allow_hyphen_values = true)]
    pub(crate) batch: Vec<usize>,
    /// Learning rates, separated by commas [default: 3e-4; of the demo 3e-3,1e-3,6e-4,3e-4,1e-4,3e-5]
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
    /// The rule by which parameters follow gradients: AdamW (betas 0.9 and 0.999, epsilon 1e-8), SGD (momentum 0.9) ..
    #[arg(long, default_value = "adamw", value_parser = PossibleValuesParser::new(OptimizerSpec::names()))]
    pub(crate) optimizer: String,
    /// Weight decay: coupled for SGD, decoupled otherwise
    #[arg(long, value_name = "X", default_value = "0.01", value_parser = values::decay, allow_hyphen_values = true)]
    pub(crate) weight_decay: f64,
    /// Spare norms and biases from weight decay
    #[arg(long)]
    pub(crate) no_decay_norms: bool,
    /// Scale gradients down to this global norm [default: off]
    #[arg(long, value_name = "X", value_parser = values::clip, allow_hyphen_values = true)]
    pub(crate) clip: Option<f64>,
    /// The learning rate's shape after the warmup; wsd is constant until the last --decay-steps (warmup-stable-decay)
    #[arg(long, default_value = "constant", value_parser = PossibleValuesParser::new(Schedule::names()))]
    pub(crate) schedule: String,
    /// Minibatches over which the learning rate rises from zero, or their share of all such as 0.1
    #[arg(long, value_name = "N|X", default_value = "0", allow_hyphen_values = true)]
    pub(crate) warmup: Warmup,
    /// The last minibatches, over which --schedule wsd lets the learning rate fall linearly to zero
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) decay_steps: Option<usize>,
    /// The share of the learning rate that --schedule wsd ends at, from 0 to 1 [default: 0]
    #[arg(long, value_name = "X", value_parser = values::share, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) decay_to: Option<f64>,
    /// Take the training data in its own order in every epoch
    #[arg(long = "no-shuffle", action = ArgAction::SetFalse)]
    pub(crate) shuffle: bool,
    /// Evaluate on the validation data after every N minibatches and keep the best weights [default: off]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) eval_every: Option<usize>,
    /// Evaluate on the validation data after these minibatches too, separated by commas, and keep the best weights
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) eval_at: Vec<usize>,
    /// End a task after N of these evaluations in a row without a better one (early stopping) [default: off]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) patience: Option<usize>,
    /// Evaluate on the first N blocks of the validation and of the test data [default: on all]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) eval_limit: Option<usize>,
    /// Train at once, without evaluating on the validation data first
    #[arg(long = "no-initial-validation", action = ArgAction::SetFalse)]
    #[serde(skip_serializing_if = "Clone::clone")]
    pub(crate) initial_validation: bool,
}

/// One configuration of the grid.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Configuration {
    /// A name that is unique within the grid and safe as a directory's, such as `b16-lr3e-4`.
    pub(crate) name: String,
    /// The place of its model among those of the run.
    pub(crate) model: usize,
    pub(crate) batch: usize,
    pub(crate) lr: f64,
    /// The rank of its adapters, if it has some of its own.
    pub(crate) lora: Option<usize>,
    /// Its seed, if it has one of its own.
    pub(crate) seed: Option<u64>,
    /// What else it has in place of the settings of the run.
    pub(crate) changes: Table,
}

impl TrainingSettings {
    /// These settings with a length, if none is given.
    pub(crate) fn resolve(self) -> Self {
        Self { epochs: self.epochs.or(self.steps.is_none().then_some(1)), ..self }
    }

    /// Refuses a grid without configurations, and settings that make no sense for one of them.
    pub(crate) fn check_grid(&self, grid: &[Configuration], seed: u64) -> Result<(), Usage> {
        if grid.is_empty() {
            let says = "there is nothing to train: give at least one batch size and one learning rate";
            return Err(Usage::new(says));
        }
        grid.iter().try_for_each(|one| self.check_one(one, seed))
    }

    /// Refuses settings that make no sense for this configuration.
    pub(crate) fn check_one(&self, one: &Configuration, seed: u64) -> Result<(), Usage> {
        let spec = self.of(one, seed, usize::MAX)?;
        check_accumulate(spec.accumulate, spec.batch)?;
        spec.validate().map_err(Usage::from_error)
    }

    /// Refuses settings that make no sense whatever the configuration. Those that are `drawn` configurations have of their own.
    pub(crate) fn check_alone(&self, drawn: impl Fn(&str) -> bool) -> Result<(), Usage> {
        if self.patience.is_some() && !self.is_evaluated() {
            let says = "patience counts evaluations during training: give eval_every too (--eval-every <N>), or eval_at";
            return Err(Usage::new(says));
        }
        if self.schedule == WSD && self.decay_steps.is_none() && !drawn("decay_steps") {
            return Err(Usage::new("the schedule wsd decays over its last steps: give decay_steps too"));
        }
        let never = self.schedule != WSD && !drawn("schedule");
        if never && (self.decay_steps.is_some() || drawn("decay_steps")) {
            return Err(Usage::new("decay_steps is for the schedule wsd alone"));
        }
        if never && (self.decay_to.is_some() || drawn("decay_to")) {
            return Err(Usage::new("decay_to is for the schedule wsd alone"));
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
                    let twice =
                        format!("batch {batch} with learning rate {lr:e} is given twice: give each once");
                    return Err(Usage::new(twice));
                }
                let (lora, seed, changes) = (None, None, Table::new());
                grid.push(Configuration { name, model: 0, batch, lr, lora, seed, changes });
            }
        }
        Ok(grid)
    }

    /// The training of a configuration on a dataset of `items` items.
    pub(crate) fn of(&self, one: &Configuration, seed: u64, items: usize) -> Result<TrainSpec, Usage> {
        let changed = (!one.changes.is_empty()).then(|| self.changed(&one.changes)).transpose()?;
        let (this, seed) = (changed.as_ref().unwrap_or(self), one.seed.unwrap_or(seed));
        this.spec_of(one, seed, items)
    }

    /// These settings with others in the place of some.
    fn changed(&self, changes: &Table) -> Result<Self, Usage> {
        let mut table = Table::try_from(self).map_err(Usage::from_error)?;
        if LENGTHS.iter().any(|length| changes.contains_key(*length)) {
            LENGTHS.iter().for_each(|length| drop(table.remove(*length)));
        }
        // What is changed of the model is nothing to its training.
        let of_training = |name: &str| !super::grid::OF_MODEL.contains(&name);
        table.extend(changes.clone().into_iter().filter(|(name, _)| of_training(name)));
        table.try_into().map_err(Usage::from_error)
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
        };
        Ok(TrainSpec { schedule: self.schedule(self.warmup.steps(spec.steps(items)))?, ..spec })
    }

    /// Returns true if tasks are evaluated while they train.
    pub(crate) fn is_evaluated(&self) -> bool {
        self.eval_every.is_some() || !self.eval_at.is_empty()
    }

    /// The note on a warmup that training of `items` items does not outlast, in one of these configurations.
    pub(crate) fn note_of_warmup(
        &self,
        grid: &[Configuration],
        items: usize,
    ) -> Result<Option<String>, Usage> {
        let mut most: Option<(usize, f64, Warmup)> = None;
        for one in grid {
            let spec = self.of(one, 0, items)?;
            let steps = spec.steps(items);
            let warmup = self.warmup_of(one)?;
            if warmup.steps(steps) >= steps && most.is_none_or(|(longest, ..)| longest < steps) {
                most = Some((steps, spec.schedule.factor(steps.saturating_sub(1), steps), warmup));
            }
        }
        Ok(most.map(|(steps, share, warmup)| {
            format!(
                "note: --warmup {warmup} is not over when training is, after {steps} minibatches: the learning rate only rises, to \
                 {:.1}% of --lr; give a shorter --warmup, or more --steps or --epochs",
                100.0 * share
            )
        }))
    }

    fn optimizer(&self, rate: f64) -> Result<OptimizerSpec, Usage> {
        OptimizerSpec::named(&self.optimizer, rate, self.weight_decay)
            .ok_or_else(|| Usage::new(format!("`{}` is not an optimizer", self.optimizer)))
    }

    /// The warmup of a configuration.
    fn warmup_of(&self, one: &Configuration) -> Result<Warmup, Usage> {
        match one.changes.get("warmup") {
            Some(own) => own.clone().try_into().map_err(Usage::from_error),
            None => Ok(self.warmup),
        }
    }

    /// The schedule as files name it, which the core reads, after a warmup of so many minibatches.
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
pub(crate) fn check_accumulate(accumulate: usize, batch: usize) -> Result<(), Usage> {
    if accumulate <= batch {
        return Ok(());
    }
    Err(Usage::new(format!(
        "--accumulate {accumulate} cuts --batch {batch} into more microbatches than it has items: give \
         --accumulate {batch} or less, or a larger --batch"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warmup_as_long_as_the_training_is_said_with_both_numbers() {
        let note = |warmup, steps: Option<usize>| {
            let grid = TrainingSettings { batch: vec![8, 4], lr: vec![1e-3], ..flags::defaults() };
            let warmup = Warmup::Steps(warmup);
            let grid = TrainingSettings { warmup, steps, epochs: steps.is_none().then_some(1), ..grid };
            grid.note_of_warmup(&grid.grid().unwrap(), 40).unwrap()
        };
        let said = note(100, Some(3)).unwrap();
        assert!(said.contains("--warmup 100 ") && said.contains("after 3 minibatches"), "{said}");
        assert!(said.contains("to 2.0% of --lr") && !said.contains('\n'), "{said}");
        assert_eq!((note(0, Some(1)), note(2, Some(3))), (None, None));
        assert!(note(3, Some(3)).is_some(), "the rate it rises to is never trained with");
        // Five minibatches of eight, ten of four: of those that the warmup fills, the longest.
        assert_eq!(note(4, None), None);
        assert!(note(9, None).unwrap().contains("after 5 minibatches"));
        assert!(
            note(10, None).unwrap().contains("after 10 minibatches: the learning rate only rises, to 90.0%")
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
        let grid = settings.grid().unwrap();
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
