//! AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.

use super::{Elements, Optimizer, Registered, Step};
use crate::error::{at_least_zero, below_one};
use crate::{CoreError, Settings};

const NAME: &str = "adamw";

pub(super) const REGISTERED: Registered = Registered {
    name: NAME,
    new: |lr, weight_decay| AdamW { weight_decay, ..AdamW::new(lr) }.into(),
    read: |settings| AdamW::read(settings).map(Into::into),
};

/// AdamW, as PyTorch's `torch.optim.AdamW`, in `f32`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Base learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, scaled by the learning rate.
    pub weight_decay: f64,
}

/// The constants of one step, rounded to `f32`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "each is a factor of the formula in `AdamW::update`")]
pub struct AdamWConstants {
    pub shrink: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub rest1: f32,
    pub rest2: f32,
    pub step_size: f32,
    pub root2: f32,
    pub eps: f32,
}

impl AdamW {
    /// Betas 0.9 and 0.999, epsilon 1e-8 and decay 0.01.
    pub fn new(lr: f64) -> Self {
        Self { lr, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }

    pub(super) fn read(settings: &Settings) -> Result<Self, CoreError> {
        Ok(Self {
            lr: settings.number("lr")?,
            beta1: settings.number("beta1")?,
            beta2: settings.number("beta2")?,
            eps: settings.number("eps")?,
            weight_decay: settings.number("weight_decay")?,
        })
    }

    /// Returns the constants of a step.
    pub fn constants(&self, step: &Step) -> AdamWConstants {
        let Self { beta1, beta2, eps, weight_decay, .. } = *self;
        let decay = if step.decays { weight_decay } else { 0.0 };
        let power = i32::try_from(step.index + 1).unwrap_or(i32::MAX);
        AdamWConstants {
            shrink: (1.0 - step.rate * decay) as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            rest1: (1.0 - beta1) as f32,
            rest2: (1.0 - beta2) as f32,
            step_size: (step.rate / (1.0 - beta1.powi(power))) as f32,
            root2: (1.0 - beta2.powi(power)).sqrt() as f32,
            eps: eps as f32,
        }
    }
}

impl Optimizer for AdamW {
    fn name(&self) -> &str {
        NAME
    }

    fn settings(&self) -> Settings {
        Settings::new()
            .with("lr", self.lr)
            .with("beta1", self.beta1)
            .with("beta2", self.beta2)
            .with("eps", self.eps)
            .with("weight_decay", self.weight_decay)
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn moments(&self) -> usize {
        2
    }

    fn validate(&self) -> Result<(), CoreError> {
        below_one("beta1", self.beta1)?;
        below_one("beta2", self.beta2)?;
        at_least_zero("epsilon", self.eps)?;
        at_least_zero("weight decay", self.weight_decay)
    }

    fn update(&self, step: &Step, elements: Elements<'_, '_>) {
        let AdamWConstants { shrink, beta1, beta2, rest1, rest2, step_size, root2, eps } =
            self.constants(step);
        elements.update(|p, g, [m, v]| {
            let m = beta1.mul_add(m, rest1 * g);
            let v = beta2.mul_add(v, rest2 * (g * g));
            ((-step_size).mul_add(m / (v.sqrt() / root2 + eps), p * shrink), [m, v])
        });
    }
}
