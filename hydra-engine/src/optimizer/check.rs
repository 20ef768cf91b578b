//! The findings of a comparison of a device's optimizer with the host's.

use hydra_core::{FloatType, OptimizerSpec};
use serde::Serialize;

/// The rules that are tried.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cube"), allow(dead_code, reason = "only GPUs are tried"))]
pub(crate) enum Tried<'a> {
    /// Every rule, in these types of floats.
    Every(&'a [FloatType]),
    /// The rules that unclipped tasks with these optimizers need, each in the task's type.
    Tasks(&'a [(OptimizerSpec, FloatType)]),
}

/// The number of values of a rule of the optimizer that a device computed otherwise than the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RuleCheck {
    /// The rule, such as `AdamW`, and the type of the gradients if they are not `f32`.
    pub rule: String,
    /// Values of the size that training has: parameters and moments after each step, sums, and what is rounded.
    pub ordinary: usize,
    /// Those of them whose bits differ.
    pub ordinary_differing: usize,
    /// Values from everywhere: zeros, denormal, tiny and huge ones.
    pub extreme: usize,
    /// Those of them whose bits differ.
    pub extreme_differing: usize,
    /// One of those that differ: the host's value and the device's.
    pub example: Option<String>,
}

/// A device's optimizer beside the host's, rule by rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OptimizerCheck {
    /// The rules.
    pub rules: Vec<RuleCheck>,
}

impl OptimizerCheck {
    /// Returns true if not a bit differs. Only then may a task be stepped on the device unasked.
    pub fn is_exact(&self) -> bool {
        self.differing() == 0
    }

    /// Values whose bits differ.
    pub fn differing(&self) -> usize {
        self.rules.iter().map(|rule| rule.ordinary_differing + rule.extreme_differing).sum()
    }

    /// All values that were compared.
    pub fn values(&self) -> usize {
        self.rules.iter().map(|rule| rule.ordinary + rule.extreme).sum()
    }
}
