//! The state in which a task ended.

use serde::{Deserialize, Serialize};

/// The state in which a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// Trained to the end.
    Done,
    /// Ended with an error.
    Failed,
    /// Stopped at the end of a minibatch because the run was interrupted.
    Stopped,
}
