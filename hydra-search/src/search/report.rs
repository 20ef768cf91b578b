//! What a search is told.

use crate::rank::{Loss, TrialId};
use serde::{Deserialize, Serialize};

/// What a search is told of a trial. The reports of a search, in the order in which they were taken, are all that it takes
/// to repeat it: a log of them is a line of JSON each.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "kebab-case")]
pub enum Report {
    /// The loss where it was wanted.
    Loss {
        /// The trial.
        trial: TrialId,
        /// Minibatches that it has been trained for.
        step: usize,
        /// The loss, if it is a finite number.
        loss: Option<f64>,
    },
    /// The trial is where it was sent, and its loss there is compared with no other's
    /// ([`compares`](crate::Search::compares)).
    Reached {
        /// The trial.
        trial: TrialId,
        /// Minibatches that it has been trained for.
        step: usize,
    },
    /// The trial cannot be trained any further.
    Failed {
        /// The trial.
        trial: TrialId,
        /// Minibatches that it had been trained for.
        step: usize,
    },
}

impl Report {
    /// The report of a loss, which may be any.
    pub fn loss(trial: TrialId, step: usize, loss: f64) -> Self {
        Self::Loss { trial, step, loss: Loss::of(loss).number() }
    }

    /// The trial.
    pub fn trial(&self) -> TrialId {
        match self {
            Self::Loss { trial, .. } | Self::Reached { trial, .. } | Self::Failed { trial, .. } => *trial,
        }
    }
}
