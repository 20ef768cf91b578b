//! How a chain learns: optimizer, schedule, clipping, accumulation, length.

use crate::CoreError;
use serde::{Deserialize, Serialize};

/// The optimizer and its constants. The learning rate is the base rate; the schedule scales it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum OptimizerSpec {
    /// AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019).
    AdamW {
        /// Base learning rate.
        lr: f64,
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
        /// Decoupled weight decay, scaled by the learning rate.
        weight_decay: f64,
    },
    /// Stochastic gradient descent with (heavy-ball) momentum and coupled (L2) decay, as PyTorch defines it.
    Sgd {
        /// Base learning rate.
        lr: f64,
        /// Momentum; zero keeps no state.
        momentum: f64,
        /// Added to the gradient, times the parameter.
        weight_decay: f64,
    },
}

impl OptimizerSpec {
    /// AdamW with betas 0.9 and 0.999, epsilon 1e-8 and decay 0.01.
    pub fn adamw(lr: f64) -> Self {
        Self::AdamW { lr, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }

    /// SGD with momentum 0.9 and no decay.
    pub fn sgd(lr: f64) -> Self {
        Self::Sgd { lr, momentum: 0.9, weight_decay: 0.0 }
    }

    /// The base learning rate.
    pub fn lr(&self) -> f64 {
        match *self {
            Self::AdamW { lr, .. } | Self::Sgd { lr, .. } => lr,
        }
    }

    /// How many moments the optimizer keeps for each parameter.
    pub fn moments(&self) -> usize {
        match *self {
            Self::AdamW { .. } => 2,
            Self::Sgd { momentum, .. } => usize::from(momentum != 0.0),
        }
    }
}

/// The shape of the learning rate over the steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// The base rate after the warmup.
    #[default]
    Constant,
    /// Linear to zero, which would be that of the step after the last.
    Linear,
    /// Half a cosine to zero, likewise.
    Cosine,
}

/// A learning-rate schedule with warmup, as Hugging Face Transformers defines them
/// (`get_constant_schedule_with_warmup`, `get_linear_..`, `get_cosine_schedule_with_warmup`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// The shape after the warmup.
    pub kind: ScheduleKind,
    /// Steps over which the rate rises linearly from zero; the first of them has rate zero.
    pub warmup: usize,
}

impl Schedule {
    /// The factor on the base rate at `step` (from zero) of `total` steps.
    pub fn factor(&self, step: usize, total: usize) -> f64 {
        if step < self.warmup {
            return step as f64 / self.warmup.max(1) as f64;
        }
        let rest = total.saturating_sub(self.warmup).max(1) as f64;
        match self.kind {
            ScheduleKind::Constant => 1.0,
            ScheduleKind::Linear => (total as f64 - step as f64).max(0.0) / rest,
            ScheduleKind::Cosine => {
                let progress = (step - self.warmup) as f64 / rest;
                (0.5 * (1.0 + (std::f64::consts::PI * progress).cos())).max(0.0)
            }
        }
    }
}

/// Which parameters decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// All of them.
    #[default]
    All,
    /// Only matrices and kernels: norms and biases (vectors) are spared.
    Matrices,
}

/// How long to train: at most `u32::MAX` of either, so that what is counted along the way has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Length {
    /// So many passes over the dataset.
    Epochs(usize),
    /// Exactly so many minibatches, wrapping into further epochs.
    Steps(usize),
}

/// How a task trains its chain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainSpec {
    /// The optimizer.
    pub optimizer: OptimizerSpec,
    /// The learning-rate schedule.
    pub schedule: Schedule,
    /// Which parameters decay.
    pub decay: Decay,
    /// The largest global norm of the gradient; a larger one is scaled down to it.
    pub clip: Option<f64>,
    /// Items in a minibatch, the unit of an optimizer step.
    pub batch: usize,
    /// Microbatches that a minibatch is cut into; their gradients add up, weighted by their loss terms.
    pub accumulate: usize,
    /// How long to train.
    pub length: Length,
    /// The seed of initial weights, data order and dropout.
    pub seed: u64,
    /// True if every epoch has an order of its own.
    pub shuffle: bool,
    /// Evaluate on the validation data after every so many minibatches and keep the best weights.
    pub eval_every: Option<usize>,
    /// End after so many of these evaluations in a row that are no better than the best one before them (early
    /// stopping); the learning rate follows its schedule over the whole length all the same.
    #[serde(default)]
    pub patience: Option<usize>,
}

impl TrainSpec {
    /// One epoch of AdamW in batches of `batch`, shuffled by seed 0, everything else off.
    pub fn new(optimizer: OptimizerSpec, batch: usize) -> Self {
        Self {
            optimizer,
            schedule: Schedule::default(),
            decay: Decay::All,
            clip: None,
            batch,
            accumulate: 1,
            length: Length::Epochs(1),
            seed: 0,
            shuffle: true,
            eval_every: None,
            patience: None,
        }
    }

    /// Minibatches that are trained on a dataset of `items` items; `usize::MAX` if they are more than that.
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

    /// Checks every value against its range.
    pub fn validate(&self) -> Result<(), CoreError> {
        let at_least_zero = "a finite number, zero or above";
        let below_one = "a number in [0, 1)";
        match self.optimizer {
            OptimizerSpec::AdamW { lr, beta1, beta2, eps, weight_decay } => {
                check("learning rate", lr, lr >= 0.0, at_least_zero)?;
                check("beta1", beta1, (0.0..1.0).contains(&beta1), below_one)?;
                check("beta2", beta2, (0.0..1.0).contains(&beta2), below_one)?;
                check("epsilon", eps, eps >= 0.0, at_least_zero)?;
                check("weight decay", weight_decay, weight_decay >= 0.0, at_least_zero)?;
            }
            OptimizerSpec::Sgd { lr, momentum, weight_decay } => {
                check("learning rate", lr, lr >= 0.0, at_least_zero)?;
                check("momentum", momentum, (0.0..1.0).contains(&momentum), below_one)?;
                check("weight decay", weight_decay, weight_decay >= 0.0, at_least_zero)?;
            }
        }
        if let Some(clip) = self.clip {
            check("clip", clip, clip > 0.0, "a finite number above zero")?;
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
        match (self.patience, self.eval_every) {
            (None, _) => Ok(()),
            (Some(n), Some(_)) => positive("patience", n),
            (Some(n), None) => {
                let expected = "nothing without eval-every, the evaluations that it counts";
                Err(CoreError::Spec { name: "patience", found: n.to_string(), expected })
            }
        }
    }

    /// Cuts a minibatch of these items into microbatches of nearly equal size, in order.
    pub fn microbatches<'a>(&self, items: &'a [usize]) -> Vec<&'a [usize]> {
        let parts = self.accumulate.clamp(1, items.len().max(1));
        let at = |i: usize| i * items.len() / parts;
        (0..parts).map(|i| &items[at(i)..at(i + 1)]).collect()
    }

    /// Items of the largest microbatch: what a pilot pass measures.
    pub fn microbatch(&self) -> usize {
        self.batch.div_ceil(self.accumulate.max(1))
    }
}

fn check(name: &'static str, value: f64, in_range: bool, expected: &'static str) -> Result<(), CoreError> {
    match value.is_finite() && in_range {
        true => Ok(()),
        false => Err(CoreError::Spec { name, found: value.to_string(), expected }),
    }
}

fn positive(name: &'static str, value: usize) -> Result<(), CoreError> {
    match value {
        0 => Err(CoreError::Spec { name, found: "0".to_owned(), expected: "at least 1" }),
        _ => Ok(()),
    }
}

fn countable(name: &'static str, value: usize) -> Result<(), CoreError> {
    match u32::try_from(value) {
        Ok(0) | Err(_) => Err(CoreError::Spec {
            name,
            found: value.to_string(),
            expected: "at least 1 and at most 4294967295",
        }),
        Ok(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_follow_hugging_face() {
        let at = |kind, step| Schedule { kind, warmup: 3 }.factor(step, 10);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} against {b}");
        for kind in [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine] {
            close(at(kind, 0), 0.0);
            close(at(kind, 1), 1.0 / 3.0);
            close(at(kind, 3), 1.0);
        }
        close(at(ScheduleKind::Constant, 9), 1.0);
        close(at(ScheduleKind::Linear, 9), 1.0 / 7.0);
        close(at(ScheduleKind::Cosine, 4), 0.950_484_433_951_209_5);
        close(at(ScheduleKind::Cosine, 9), 0.049_515_566_048_790_48);
    }

    #[test]
    fn schedules_have_ends() {
        for kind in [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine] {
            let at = |warmup, step, total| Schedule { kind, warmup }.factor(step, total);
            assert_eq!(
                (at(0, 0, 1), at(0, 0, 7)),
                (1.0, 1.0),
                "without a warmup the first step has the base rate"
            );
            assert_eq!(
                (at(5, 4, 5), at(9, 4, 5)),
                (0.8, 4.0 / 9.0),
                "a warmup may be as long as the training"
            );
            assert_eq!((at(1, 0, 1), at(usize::MAX, 0, 1)), (0.0, 0.0));
            assert!(
                (0..12).all(|step| (0.0..=1.0).contains(&at(2, step, 10))),
                "also of steps that are none"
            );
        }
        let last = |kind| Schedule { kind, warmup: 0 }.factor(10, 10);
        assert_eq!([ScheduleKind::Linear, ScheduleKind::Cosine].map(last), [0.0, 0.0]);
    }

    #[test]
    fn optimizers_have_the_usual_constants() {
        let expected =
            OptimizerSpec::AdamW { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
        assert_eq!((OptimizerSpec::adamw(0.1), expected.moments(), expected.lr()), (expected, 2, 0.1));
        let expected = OptimizerSpec::Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0 };
        assert_eq!((OptimizerSpec::sgd(0.1), expected.moments(), expected.lr()), (expected, 1, 0.1));
        assert_eq!(OptimizerSpec::Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.1 }.moments(), 0);
        let schedule = Schedule { warmup: 4, ..Schedule::default() };
        assert_eq!(TrainSpec { schedule, ..TrainSpec::new(expected, 1) }.rate(1, 9), 0.1 / 4.0);
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
            TrainSpec { optimizer: OptimizerSpec::adamw(f64::NAN), ..base.clone() },
            TrainSpec { optimizer: OptimizerSpec::adamw(-1.0), ..base.clone() },
            TrainSpec { batch: 0, ..base.clone() },
            TrainSpec { accumulate: 9, ..base.clone() },
            TrainSpec { clip: Some(0.0), ..base.clone() },
            TrainSpec { length: Length::Steps(0), ..base.clone() },
            TrainSpec { length: Length::Steps(usize::MAX), ..base.clone() },
            TrainSpec { length: Length::Epochs(usize::MAX), ..base.clone() },
            TrainSpec { eval_every: Some(0), ..base.clone() },
            TrainSpec { eval_every: Some(1), patience: Some(0), ..base.clone() },
            TrainSpec { patience: Some(1), ..base.clone() },
        ];
        let names = [
            "learning rate",
            "learning rate",
            "batch",
            "accumulate",
            "clip",
            "steps",
            "steps",
            "epochs",
            "eval-every",
        ];
        for (spec, name) in bad.iter().zip(names) {
            let message = spec.validate().unwrap_err().to_string();
            assert!(message.starts_with(&format!("`{name}`")), "{message}");
        }
    }

    #[test]
    fn every_number_has_its_range() {
        let with = |optimizer| TrainSpec::new(optimizer, 8).validate();
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let adamw = |lr, beta1, beta2, eps, weight_decay| {
            with(OptimizerSpec::AdamW { lr, beta1, beta2, eps, weight_decay })
        };
        assert!(adamw(0.0, 0.0, 0.0, 0.0, 0.0).is_ok());
        for bad in [nan, inf, -inf, -1e-9] {
            let wrong = [
                adamw(bad, 0.9, 0.9, 1e-8, 0.0),
                adamw(0.1, bad, 0.9, 1e-8, 0.0),
                adamw(0.1, 0.9, bad, 1e-8, 0.0),
                adamw(0.1, 0.9, 0.9, bad, 0.0),
                adamw(0.1, 0.9, 0.9, 1e-8, bad),
                with(OptimizerSpec::Sgd { lr: bad, momentum: 0.9, weight_decay: 0.0 }),
                with(OptimizerSpec::Sgd { lr: 0.1, momentum: bad, weight_decay: 0.0 }),
                with(OptimizerSpec::Sgd { lr: 0.1, momentum: 0.9, weight_decay: bad }),
                TrainSpec { clip: Some(bad), ..TrainSpec::new(OptimizerSpec::sgd(0.1), 8) }.validate(),
            ];
            let names = [
                "learning rate",
                "beta1",
                "beta2",
                "epsilon",
                "weight decay",
                "learning rate",
                "momentum",
                "weight decay",
                "clip",
            ];
            for (wrong, name) in wrong.into_iter().zip(names) {
                let message = wrong.unwrap_err().to_string();
                assert!(message.starts_with(&format!("`{name}` is {bad}")), "{message}");
            }
        }
        let ones = [
            adamw(0.1, 1.0, 0.9, 1e-8, 0.0),
            adamw(0.1, 0.9, 1.0, 1e-8, 0.0),
            with(OptimizerSpec::Sgd { lr: 0.1, momentum: 1.0, weight_decay: 0.0 }),
            TrainSpec { accumulate: 0, ..TrainSpec::new(OptimizerSpec::sgd(0.1), 8) }.validate(),
            TrainSpec { length: Length::Epochs(0), ..TrainSpec::new(OptimizerSpec::sgd(0.1), 8) }.validate(),
        ];
        assert!(ones.iter().all(Result::is_err), "{ones:?}");
        assert!(TrainSpec { accumulate: 8, ..TrainSpec::new(OptimizerSpec::sgd(0.1), 8) }.validate().is_ok());
    }

    #[test]
    fn specs_survive_their_text() {
        let spec = TrainSpec {
            schedule: Schedule { kind: ScheduleKind::Cosine, warmup: 3 },
            decay: Decay::Matrices,
            clip: Some(0.1 + 0.2),
            length: Length::Steps(7),
            eval_every: Some(2),
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
    }
}
