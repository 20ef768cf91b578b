//! The results of a comparison of a device's optimizer with the host's.

use hydra_core::{FloatType, OptimizerSpec};
use serde::Serialize;

/// The rules to compare.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cube"), allow(dead_code, reason = "only GPUs are tried"))]
pub(crate) enum Tried<'a> {
    /// Every rule, with gradients of these types.
    Every(&'a [FloatType]),
    /// The rules of tasks with these optimizers and types, without clipping.
    Tasks(&'a [(OptimizerSpec, FloatType)]),
}

/// The number of values of an optimizer rule whose bits differ between device and host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RuleCheck {
    /// The rule, such as `AdamW`, and the type of the gradients if it is not `f32`.
    pub rule: String,
    /// Compared values of the size that training has: parameters and moments after each step, sums, and rounded
    /// values.
    pub ordinary: usize,
    /// The number of those whose bits differ.
    pub ordinary_differing: usize,
    /// Compared values of any size: zeros, denormal, tiny and huge ones.
    pub extreme: usize,
    /// The number of those whose bits differ.
    pub extreme_differing: usize,
    /// An example of a difference: the host's value and the device's.
    pub example: Option<String>,
}

/// A comparison of a device's optimizer with the host's, rule by rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OptimizerCheck {
    /// The rules.
    pub rules: Vec<RuleCheck>,
}

impl OptimizerCheck {
    /// Returns true if no bit differs. Otherwise the optimizer steps on the device only on request.
    pub fn is_exact(&self) -> bool {
        self.differing() == 0
    }

    /// The number of values whose bits differ.
    pub fn differing(&self) -> usize {
        self.rules.iter().map(|rule| rule.ordinary_differing + rule.extreme_differing).sum()
    }

    /// The number of compared values.
    pub fn values(&self) -> usize {
        self.rules.iter().map(|rule| rule.ordinary + rule.extreme).sum()
    }
}
