//! Reports to a search.

use crate::rank::{Loss, TrialId};
use serde::{Deserialize, Serialize};

/// A report about a trial. The reports of a search, in order, are sufficient to repeat it; a log has one line of JSON
/// for each.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "kebab-case")]
pub enum Report {
    /// The loss at a requested step.
    Loss {
        /// The trial.
        trial: TrialId,
        /// Minibatches trained.
        step: usize,
        /// The loss, if it is finite.
        loss: Option<f64>,
    },
    /// The trial has reached a requested step at which its loss is not compared
    /// ([`compares`](crate::Search::compares)).
    Reached {
        /// The trial.
        trial: TrialId,
        /// Minibatches trained.
        step: usize,
    },
    /// The trial failed.
    Failed {
        /// The trial.
        trial: TrialId,
        /// Minibatches trained.
        step: usize,
    },
}

impl Report {
    /// The report of a loss, which may be any number.
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
