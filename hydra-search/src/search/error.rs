//! Errors of reports.

use crate::rank::TrialId;
use thiserror::Error;

/// A report that does not follow from the actions of the search.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum ReportError {
    /// No action started this trial.
    #[error("trial {trial} was not started: report only trials of a Start or a Fork")]
    Unknown { trial: TrialId },
    /// The trial is not being trained.
    #[error(
        "trial {trial} has a report at minibatch {step}, but no action to train it past {at}: wait for a Continue"
    )]
    NotTraining { trial: TrialId, at: usize, step: usize },
    /// The report of the trial is for another step than the requested one.
    #[error("trial {trial} has a report at minibatch {step}, expected one at {wanted}")]
    Step { trial: TrialId, step: usize, wanted: usize },
    /// A trial was reported without a loss at a step at which its loss is compared.
    #[error("trial {trial} has reached minibatch {step}, where its loss is compared: report the loss")]
    Compared { trial: TrialId, step: usize },
    /// The same step was reported with another loss.
    #[error(
        "trial {trial} had the loss {before} after minibatch {step}, and is reported with {loss}: training is exact, so this \
         is another spec, another seed or other data"
    )]
    Contradiction { trial: TrialId, step: usize, before: f64, loss: f64 },
}
