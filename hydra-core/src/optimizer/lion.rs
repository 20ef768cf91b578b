//! Lion: Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023 (arXiv 2302.06675).

use super::{Elements, Optimizer, Registered, Step};
use crate::error::{at_least_zero, below_one};
use crate::{CoreError, Settings};

const NAME: &str = "lion";

pub(super) const REGISTERED: Registered = Registered {
    name: NAME,
    new: |lr, weight_decay| Lion { weight_decay, ..Lion::new(lr) }.into(),
    read: |settings| Lion::read(settings).map(Into::into),
};

/// Lion in `f32`: every parameter moves by the learning rate, in the direction of an interpolated momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Base learning rate: a third to a tenth of AdamW's, according to the paper.
    pub lr: f64,
    /// The weight of the moment in the direction.
    pub beta1: f64,
    /// Decay of the moment.
    pub beta2: f64,
    /// Decoupled weight decay, scaled by the learning rate: three to ten times AdamW's.
    pub weight_decay: f64,
}

impl Lion {
    /// Betas 0.9 and 0.99, no decay.
    pub fn new(lr: f64) -> Self {
        Self { lr, beta1: 0.9, beta2: 0.99, weight_decay: 0.0 }
    }

    fn read(settings: &Settings) -> Result<Self, CoreError> {
        Ok(Self {
            lr: settings.number("lr")?,
            beta1: settings.number("beta1")?,
            beta2: settings.number("beta2")?,
            weight_decay: settings.number("weight_decay")?,
        })
    }
}

impl Optimizer for Lion {
    fn name(&self) -> &str {
        NAME
    }

    fn settings(&self) -> Settings {
        let settings = Settings::new().with("lr", self.lr).with("beta1", self.beta1);
        settings.with("beta2", self.beta2).with("weight_decay", self.weight_decay)
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn moments(&self) -> usize {
        1
    }

    fn validate(&self) -> Result<(), CoreError> {
        below_one("beta1", self.beta1)?;
        below_one("beta2", self.beta2)?;
        at_least_zero("weight decay", self.weight_decay)
    }

    fn update(&self, step: &Step, elements: Elements<'_, '_>) {
        let decay = if step.decays { self.weight_decay } else { 0.0 };
        let (rate, shrink) = (step.rate as f32, (1.0 - step.rate * decay) as f32);
        let [beta1, beta2, rest1, rest2] =
            [self.beta1, self.beta2, 1.0 - self.beta1, 1.0 - self.beta2].map(|x| x as f32);
        elements.update(|p, g, [m]| {
            let direction = beta1.mul_add(m, rest1 * g);
            // The sign of zero is zero.
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            ((-rate).mul_add(sign, p * shrink), [beta2.mul_add(m, rest2 * g)])
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::MomentMut;
    use crate::{Key, OptimizerSpec, TrainSpec};

    fn steps(rule: &Lion, params: &mut [f32], moment: &mut [f32], grads: &[Vec<f32>], decays: bool) {
        for (index, grads) in grads.iter().enumerate() {
            let step = Step { index, rate: rule.lr, decays };
            rule.update(&step, Elements::new(params, grads, &mut [MomentMut::Floats(moment)], None));
        }
    }

    #[test]
    fn lion_follows_its_formula_in_f64() {
        let n = 4000;
        let rule = Lion { weight_decay: 0.1, ..Lion::new(1e-2) };
        let numbers = |key: u64| (0..n).map(|i| Key::new(key).normal(i) as f32).collect::<Vec<f32>>();
        let (mut params, mut moment) = (numbers(1), vec![0.0; n as usize]);
        let grads: Vec<Vec<f32>> = (2..7).map(numbers).collect();
        let mut exact: Vec<[f64; 2]> = params.iter().map(|p| [f64::from(*p), 0.0]).collect();
        for (i, [p, m]) in exact.iter_mut().enumerate() {
            for g in grads.iter().map(|grads| f64::from(grads[i])) {
                let direction = rule.beta1 * *m + (1.0 - rule.beta1) * g;
                *p -= rule.lr * (direction.signum() + rule.weight_decay * *p);
                *m = rule.beta2 * *m + (1.0 - rule.beta2) * g;
            }
        }
        steps(&rule, &mut params, &mut moment, &grads, true);
        for ([p, m], (found_p, found_m)) in exact.iter().zip(params.iter().zip(&moment)) {
            assert!((p - f64::from(*found_p)).abs() < 5e-6 && (m - f64::from(*found_m)).abs() < 1e-6);
        }
    }

    #[test]
    fn lion_gives_a_known_sequence() {
        let rule = Lion { weight_decay: 0.5, ..Lion::new(0.1) };
        let (mut p, mut m) = (vec![1.0], vec![0.0]);
        for (g, [expected_p, expected_m]) in [
            (2.0, [0.85, 0.02]),
            (-1.0, [0.9075, 0.0098]),
            (0.0, [0.762_125, 0.009_702]),
            (-8.0, [0.824_019, -0.070_395_02]),
        ] {
            steps(&rule, &mut p, &mut m, &[vec![g]], true);
            assert!((p[0] - expected_p).abs() < 1e-6 && (m[0] - expected_m).abs() < 1e-7, "{p:?} {m:?}");
        }
        let (mut p, mut m) = (vec![2.0], vec![0.0]);
        steps(&rule, &mut p, &mut m, &[vec![0.0]], false);
        assert_eq!((p, m), (vec![2.0], vec![0.0]), "nothing changes without a gradient");
    }

    #[test]
    fn lion_is_known_to_files() {
        let text = "name = \"lion\"\nlr = 0.001\nbeta1 = 0.9\nbeta2 = 0.99\nweight_decay = 0.0\n";
        let read: OptimizerSpec = toml::from_str(text).unwrap();
        assert_eq!((toml::to_string(&read).unwrap().as_str(), &read), (text, &Lion::new(1e-3).into()));
        assert!(TrainSpec::new(read, 8).validate().is_ok());
        assert!(TrainSpec::new(Lion { beta2: 1.0, ..Lion::new(1e-3) }, 8).validate().is_err());
    }
}
