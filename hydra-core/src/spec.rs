//! Training specs: optimizer, schedule, clipping, accumulation, length.

use crate::error::{at_least_zero, countable, in_range, positive};
use crate::{BufferParam, CoreError, Evaluations, OptimizerSpec, Schedule};
use serde::{Deserialize, Serialize};

/// The parameters with weight decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// All of them.
    #[default]
    All,
    /// Only matrices and kernels; norms and biases (vectors) are excluded.
    Matrices,
}

/// The length of the training: at most `u32::MAX` epochs or steps, so that derived counts do not overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Length {
    /// This number of passes over the dataset.
    Epochs(usize),
    /// Exactly this number of minibatches, wrapping into further epochs.
    Steps(usize),
}

/// The training configuration of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainSpec {
    /// The optimizer.
    pub optimizer: OptimizerSpec,
    /// The learning-rate schedule.
    pub schedule: Schedule,
    /// The parameters with weight decay.
    pub decay: Decay,
    /// The maximum global norm of the gradient; a larger gradient is scaled down to it.
    pub clip: Option<f64>,
    /// The number of items in a minibatch, after which the optimizer takes a step.
    pub batch: usize,
    /// The number of microbatches per minibatch; their gradients are accumulated, weighted by their loss
    /// targets.
    pub accumulate: usize,
    /// The length of the training.
    pub length: Length,
    /// The seed of initial weights, data order and dropout.
    pub seed: u64,
    /// Whether every epoch has its own order.
    pub shuffle: bool,
    /// Evaluate on the validation data after every N minibatches and keep the best weights.
    pub eval_every: Option<usize>,
    /// Also evaluate once after each of these minibatch counts, and keep the best weights.
    #[serde(default)]
    pub eval_at: Vec<usize>,
    /// Stop after N of these evaluations in a row without an improvement over the best one before them (early
    /// stopping). The learning rate follows its schedule over the whole length regardless.
    #[serde(default)]
    pub patience: Option<usize>,
    /// The metric that decides which evaluation is the best one; the loss by default. It must be one of the
    /// [objective's](crate::Objective::metrics).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<String>,
}

impl TrainSpec {
    /// Returns a spec of one epoch in batches of `batch`, shuffled by seed 0, everything else off.
    pub fn new(optimizer: impl Into<OptimizerSpec>, batch: usize) -> Self {
        Self {
            optimizer: optimizer.into(),
            schedule: Schedule::default(),
            decay: Decay::All,
            clip: None,
            batch,
            accumulate: 1,
            length: Length::Epochs(1),
            seed: 0,
            shuffle: true,
            eval_every: None,
            eval_at: Vec::new(),
            patience: None,
            metric: None,
        }
    }

    /// The evaluations on the validation data during training.
    pub fn evaluations(&self) -> Evaluations {
        Evaluations::new(self.eval_every, self.eval_at.clone())
    }

    /// Checks the number of these evaluations on a dataset of `items` items. Each takes a place in the plan of its task.
    ///
    /// # Errors
    /// More than [`Evaluations::MOST`].
    pub fn check_evaluations(&self, items: usize) -> Result<(), CoreError> {
        let Some(every) = self.eval_every.filter(|every| *every > 0) else { return Ok(()) };
        let evaluations = self.steps(items) / every;
        if evaluations <= Evaluations::MOST {
            return Ok(());
        }
        let found = format!("{every}, for {evaluations} evaluations");
        Err(CoreError::Spec { name: "eval_every", found, expected: "at most 1000000 evaluations" })
    }

    /// Returns whether the best weights of these evaluations are kept.
    pub fn keeps_best(&self) -> bool {
        self.eval_every.is_some() || !self.eval_at.is_empty()
    }

    /// The number of minibatches to train on a dataset of `items` items, saturating at `usize::MAX`.
    pub fn steps(&self, items: usize) -> usize {
        match self.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => epochs.saturating_mul(items.div_ceil(self.batch.max(1))),
        }
    }

    /// The learning rate of `step` of `total`.
    pub fn rate(&self, step: usize, total: usize) -> f64 {
        self.optimizer.lr() * self.schedule.factor(step, total)
    }

    /// Returns whether weight decay applies to a parameter.
    pub fn decays(&self, param: &BufferParam) -> bool {
        self.decay == Decay::All || !param.is_vector()
    }

    /// Checks every value against its range.
    pub fn validate(&self) -> Result<(), CoreError> {
        at_least_zero("learning rate", self.optimizer.lr())?;
        self.optimizer.validate()?;
        self.schedule.validate()?;
        if let Some(clip) = self.clip {
            in_range("clip", clip, clip > 0.0, "a finite number above zero")?;
        }
        positive("batch", self.batch)?;
        positive("accumulate", self.accumulate)?;
        if self.accumulate > self.batch {
            let found = self.accumulate.to_string();
            return Err(CoreError::Spec { name: "accumulate", found, expected: "at most the batch" });
        }
        match self.length {
            Length::Epochs(n) => countable("epochs", n)?,
            Length::Steps(n) => countable("steps", n)?,
        }
        self.eval_every.map_or(Ok(()), |n| positive("eval-every", n))?;
        self.eval_at.iter().try_for_each(|at| positive("eval-at", *at))?;
        match (self.patience, self.keeps_best()) {
            (None, _) => Ok(()),
            (Some(n), true) => positive("patience", n),
            (Some(n), false) => {
                let expected = "no patience without eval-every or eval-at, whose evaluations it counts";
                Err(CoreError::Spec { name: "patience", found: n.to_string(), expected })
            }
        }
    }

    /// Splits a minibatch of these items into microbatches of nearly equal size, in order.
    pub fn microbatches<'a>(&self, items: &'a [usize]) -> Vec<&'a [usize]> {
        let parts = self.accumulate.clamp(1, items.len().max(1));
        let at = |i: usize| i * items.len() / parts;
        (0..parts).map(|i| &items[at(i)..at(i + 1)]).collect()
    }

    /// The number of items of the largest microbatch, which a pilot pass measures.
    pub fn microbatch(&self) -> usize {
        self.batch.div_ceil(self.accumulate.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::{AdamW, Sgd};
    use crate::schedule::{Constant, Cosine};

    #[test]
    fn the_rate_is_the_base_rate_on_its_schedule() {
        let spec = TrainSpec::new(Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0 }, 1);
        assert_eq!(TrainSpec { schedule: Schedule::new(Constant, 4), ..spec }.rate(1, 9), 0.1 / 4.0);
    }

    #[test]
    fn microbatches_hold_every_item_in_order() {
        let spec = TrainSpec { accumulate: 3, ..TrainSpec::new(OptimizerSpec::adamw(1e-3), 8) };
        let items: Vec<usize> = (0..8).collect();
        let parts = spec.microbatches(&items);
        assert_eq!(parts.iter().map(|p| p.len()).collect::<Vec<_>>(), [2, 3, 3]);
        assert_eq!(parts.concat(), items);
        assert!(parts.iter().all(|p| p.len() <= spec.microbatch()));
        let parts = |items: usize| spec.microbatches(&(0..items).collect::<Vec<_>>()).len();
        assert_eq!((parts(2), parts(1)), (2, 1), "a last, smaller batch has fewer parts");
    }

    #[test]
    fn values_out_of_range_are_named() {
        let base = TrainSpec::new(OptimizerSpec::adamw(1e-3), 8);
        assert!(base.validate().is_ok());
        let bad = [
            ("learning rate", TrainSpec { optimizer: OptimizerSpec::adamw(f64::NAN), ..base.clone() }),
            ("learning rate", TrainSpec { optimizer: OptimizerSpec::adamw(-1.0), ..base.clone() }),
            ("batch", TrainSpec { batch: 0, ..base.clone() }),
            ("accumulate", TrainSpec { accumulate: 9, ..base.clone() }),
            ("clip", TrainSpec { clip: Some(0.0), ..base.clone() }),
            ("steps", TrainSpec { length: Length::Steps(0), ..base.clone() }),
            ("steps", TrainSpec { length: Length::Steps(usize::MAX), ..base.clone() }),
            ("epochs", TrainSpec { length: Length::Epochs(usize::MAX), ..base.clone() }),
            ("eval-every", TrainSpec { eval_every: Some(0), ..base.clone() }),
            ("eval-at", TrainSpec { eval_at: vec![3, 0], ..base.clone() }),
            ("patience", TrainSpec { eval_every: Some(1), patience: Some(0), ..base.clone() }),
            ("patience", TrainSpec { patience: Some(1), ..base.clone() }),
        ];
        for (name, spec) in bad {
            let message = spec.validate().unwrap_err().to_string();
            assert!(message.starts_with(&format!("`{name}`")), "{message}");
        }
    }

    #[test]
    fn every_number_has_its_range() {
        let with = |optimizer: OptimizerSpec| TrainSpec::new(optimizer, 8).validate();
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let adamw =
            |lr, beta1, beta2, eps, weight_decay| with(AdamW { lr, beta1, beta2, eps, weight_decay }.into());
        assert!(adamw(0.0, 0.0, 0.0, 0.0, 0.0).is_ok());
        for bad in [nan, inf, -inf, -1e-9] {
            let wrong = [
                ("learning rate", adamw(bad, 0.9, 0.9, 1e-8, 0.0)),
                ("beta1", adamw(0.1, bad, 0.9, 1e-8, 0.0)),
                ("beta2", adamw(0.1, 0.9, bad, 1e-8, 0.0)),
                ("epsilon", adamw(0.1, 0.9, 0.9, bad, 0.0)),
                ("weight decay", adamw(0.1, 0.9, 0.9, 1e-8, bad)),
                ("learning rate", with(Sgd { lr: bad, momentum: 0.9, weight_decay: 0.0 }.into())),
                ("momentum", with(Sgd { lr: 0.1, momentum: bad, weight_decay: 0.0 }.into())),
                ("weight decay", with(Sgd { lr: 0.1, momentum: 0.9, weight_decay: bad }.into())),
                (
                    "clip",
                    TrainSpec { clip: Some(bad), ..TrainSpec::new(OptimizerSpec::sgd(0.1), 8) }.validate(),
                ),
            ];
            for (name, wrong) in wrong {
                let message = wrong.unwrap_err().to_string();
                assert!(message.starts_with(&format!("`{name}` is {bad}")), "{message}");
            }
        }
        let ones = [
            adamw(0.1, 1.0, 0.9, 1e-8, 0.0),
            adamw(0.1, 0.9, 1.0, 1e-8, 0.0),
            with(Sgd { lr: 0.1, momentum: 1.0, weight_decay: 0.0 }.into()),
            TrainSpec { accumulate: 0, ..TrainSpec::new(OptimizerSpec::sgd(0.1), 8) }.validate(),
            TrainSpec { length: Length::Epochs(0), ..TrainSpec::new(OptimizerSpec::sgd(0.1), 8) }.validate(),
        ];
        assert!(ones.iter().all(Result::is_err), "{ones:?}");
        assert!(TrainSpec { accumulate: 8, ..TrainSpec::new(OptimizerSpec::sgd(0.1), 8) }.validate().is_ok());
    }

    #[test]
    fn specs_survive_their_text() {
        let spec = TrainSpec {
            schedule: Schedule::new(Cosine, 3),
            decay: Decay::Matrices,
            clip: Some(0.1 + 0.2),
            length: Length::Steps(7),
            eval_every: Some(2),
            eval_at: vec![3, 9],
            ..TrainSpec::new(OptimizerSpec::adamw(1e-3), 8)
        };
        for spec in [spec, TrainSpec::new(OptimizerSpec::sgd(f64::MIN_POSITIVE), 1)] {
            let text = toml::to_string(&spec).unwrap();
            assert_eq!(toml::from_str::<TrainSpec>(&text).unwrap(), spec, "{text}");
        }
    }

    #[test]
    fn steps_do_not_wrap() {
        let base = TrainSpec::new(OptimizerSpec::adamw(1e-3), 8);
        let spec = |epochs| TrainSpec { length: Length::Epochs(epochs), ..base.clone() };
        assert_eq!(spec(3).steps(41), 18);
        assert_eq!(spec(usize::MAX).steps(40), usize::MAX);
        assert!(spec(u32::MAX as usize).validate().is_ok());
        assert_eq!(spec(u32::MAX as usize).steps(16), 2 * u32::MAX as usize);
        let evaluated = |every| TrainSpec { eval_every: Some(every), ..spec(2_000_000) };
        assert!(evaluated(2).check_evaluations(8).is_ok());
        let error = evaluated(1).check_evaluations(8).unwrap_err().to_string();
        assert_eq!(error, "`eval_every` is 1, for 2000000 evaluations, expected at most 1000000 evaluations");
    }
}
