//! Stochastic gradient descent with momentum.

use super::{Elements, Optimizer, Registered, Step};
use crate::error::{at_least_zero, below_one};
use crate::{CoreError, Settings};

const NAME: &str = "sgd";

pub(super) const REGISTERED: Registered = Registered {
    name: NAME,
    new: |lr, weight_decay| Sgd { weight_decay, ..Sgd::new(lr) }.into(),
    read: |settings| Sgd::read(settings).map(Into::into),
};

/// SGD with (heavy-ball) momentum and coupled (L2) decay, as PyTorch's `torch.optim.SGD`, in `f32`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Base learning rate.
    pub lr: f64,
    /// Momentum; at zero no moment is kept.
    pub momentum: f64,
    /// Added to the gradient, times the parameter.
    pub weight_decay: f64,
}

/// The constants of one step, rounded to `f32`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "each is a factor of the formulas in `Sgd::update`")]
pub struct SgdConstants {
    pub rate: f32,
    pub decay: f32,
    pub momentum: f32,
    /// Whether this is the first step, in which the moment is the gradient itself.
    pub first: bool,
}

impl Sgd {
    /// Momentum 0.9 and no decay.
    pub fn new(lr: f64) -> Self {
        Self { lr, momentum: 0.9, weight_decay: 0.0 }
    }

    fn read(settings: &Settings) -> Result<Self, CoreError> {
        Ok(Self {
            lr: settings.number("lr")?,
            momentum: settings.number("momentum")?,
            weight_decay: settings.number("weight_decay")?,
        })
    }

    /// Returns the constants of a step.
    pub fn constants(&self, step: &Step) -> SgdConstants {
        SgdConstants {
            rate: step.rate as f32,
            decay: if step.decays { self.weight_decay as f32 } else { 0.0 },
            momentum: self.momentum as f32,
            first: step.index == 0,
        }
    }
}

impl Optimizer for Sgd {
    fn name(&self) -> &str {
        NAME
    }

    fn settings(&self) -> Settings {
        let settings = Settings::new().with("lr", self.lr).with("momentum", self.momentum);
        settings.with("weight_decay", self.weight_decay)
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn moments(&self) -> usize {
        usize::from(self.momentum != 0.0)
    }

    fn validate(&self) -> Result<(), CoreError> {
        below_one("momentum", self.momentum)?;
        at_least_zero("weight decay", self.weight_decay)
    }

    fn update(&self, step: &Step, elements: Elements<'_, '_>) {
        let SgdConstants { rate, decay, momentum, first } = self.constants(step);
        if self.moments() == 0 {
            return elements.update(|p, g, []| ((-rate).mul_add(decay.mul_add(p, g), p), []));
        }
        elements.update(|p, g, [buffer]| {
            let g = decay.mul_add(p, g);
            let buffer = if first { g } else { momentum.mul_add(buffer, g) };
            ((-rate).mul_add(buffer, p), [buffer])
        });
    }
}
