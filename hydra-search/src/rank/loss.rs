//! A loss, and the order of trials by loss.

use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::fmt;

/// The number of a trial in its search, from zero in the order of creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TrialId(pub usize);

impl fmt::Display for TrialId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The loss of a trial at a step. The smallest is first, and a loss that is not finite last.
///
/// Trials are ordered by loss; of two trials with equal losses the one with the lower number is better.
#[derive(Clone, Copy, Debug)]
pub enum Loss {
    /// A finite number.
    Number(f64),
    /// Not a finite number, or missing because the trial failed. Such a trial never advances and never wins.
    Lost,
}

impl Loss {
    /// The loss of this value; [`Loss::Lost`] if it is not finite.
    pub fn of(value: f64) -> Self {
        match value.is_finite() {
            true => Self::Number(value),
            false => Self::Lost,
        }
    }

    /// The number, unless the loss is [`Loss::Lost`].
    pub fn number(self) -> Option<f64> {
        match self {
            Self::Number(value) => Some(value),
            Self::Lost => None,
        }
    }

    /// True for [`Loss::Lost`].
    pub fn is_lost(self) -> bool {
        self.number().is_none()
    }
}

impl Ord for Loss {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self, other) {
            // Zeros of both signs are equal: adding zero makes them one.
            (Self::Number(a), Self::Number(b)) => (a + 0.0).total_cmp(&(b + 0.0)),
            (Self::Number(_), Self::Lost) => Ordering::Less,
            (Self::Lost, Self::Number(_)) => Ordering::Greater,
            (Self::Lost, Self::Lost) => Ordering::Equal,
        }
    }
}

impl PartialOrd for Loss {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Loss {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Loss {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_comes_last_and_zeros_are_equal() {
        let mut losses = [f64::NAN, 2.0, f64::INFINITY, -1.0, f64::NEG_INFINITY, 0.0].map(Loss::of);
        losses.sort_unstable();
        assert_eq!(losses[..3], [-1.0, 0.0, 2.0].map(Loss::Number));
        assert_eq!(losses[3..], [Loss::Lost; 3]);
        assert_eq!(Loss::of(-0.0), Loss::of(0.0));
        assert_eq!((Loss::of(3.0).number(), Loss::of(f64::NAN).number()), (Some(3.0), None));
    }
}
