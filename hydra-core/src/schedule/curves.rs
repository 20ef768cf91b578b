//! The built-in curves.

use super::Curve;
use crate::error::{in_range, positive};
use crate::{CoreError, Settings};

/// Constant at the base rate.
#[derive(Clone, Copy, Debug)]
pub struct Constant;

impl Curve for Constant {
    fn name(&self) -> &str {
        "constant"
    }

    fn factor(&self, _: usize, _: usize) -> f64 {
        1.0
    }

    fn stable(&self, steps: usize) -> usize {
        steps
    }
}

/// Linear decay to zero.
#[derive(Clone, Copy, Debug)]
pub struct Linear;

impl Curve for Linear {
    fn name(&self) -> &str {
        "linear"
    }

    fn factor(&self, step: usize, steps: usize) -> f64 {
        steps.saturating_sub(step) as f64 / steps.max(1) as f64
    }
}

/// Cosine decay to zero over half a period.
#[derive(Clone, Copy, Debug)]
pub struct Cosine;

impl Curve for Cosine {
    fn name(&self) -> &str {
        "cosine"
    }

    fn factor(&self, step: usize, steps: usize) -> f64 {
        let progress = step as f64 / steps.max(1) as f64;
        (0.5 * (1.0 + (std::f64::consts::PI * progress).cos())).max(0.0)
    }
}

/// The base rate until the last `decay_steps` steps, then linear decay to a fraction of it (WSD: Hu et al.,
/// "MiniCPM", arXiv 2404.06395; Hägele et al., arXiv 2405.18392). A training with at most that many steps
/// decays from its start.
#[derive(Clone, Copy, Debug)]
pub struct WarmupStableDecay {
    /// The length of the decay in minibatches, at least one.
    pub decay_steps: usize,
    /// The fraction of the base rate at the end of the decay, from 0 (the usual value) to 1.
    pub decay_to: f64,
}

impl WarmupStableDecay {
    pub(super) fn read(settings: &Settings) -> Result<Self, CoreError> {
        // Files from before this setting existed have no `decay_to`.
        let decay_to = settings.get("decay_to").map_or(Ok(0.0), |_| settings.number("decay_to"))?;
        Ok(Self { decay_steps: settings.count("decay_steps")?, decay_to })
    }
}

impl Curve for WarmupStableDecay {
    fn name(&self) -> &str {
        "wsd"
    }

    fn settings(&self) -> Settings {
        let settings = Settings::new().with("decay_steps", self.decay_steps);
        if self.decay_to == 0.0 { settings } else { settings.with("decay_to", self.decay_to) }
    }

    fn validate(&self) -> Result<(), CoreError> {
        positive("decay-steps", self.decay_steps)?;
        let share = (0.0..=1.0).contains(&self.decay_to);
        in_range("decay-to", self.decay_to, share, "a fraction of the learning rate from 0 to 1")
    }

    fn factor(&self, step: usize, steps: usize) -> f64 {
        let decay = self.decay_steps.min(steps);
        match steps.saturating_sub(step) {
            left if left >= decay && left > 0 => 1.0,
            left => self.decay_to + (1.0 - self.decay_to) * (left as f64 / decay.max(1) as f64),
        }
    }

    fn stable(&self, steps: usize) -> usize {
        // The first step of the decay still has the base rate.
        (steps + 1 - self.decay_steps.min(steps)).min(steps)
    }
}
