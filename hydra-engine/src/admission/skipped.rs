//! Tasks that can never fit, of a run that goes on without them.

use crate::error::{EngineError, refused, with_causes};
use crate::train_task::TrainTask;
use hydra_partition::PartitionError;
use serde::{Deserialize, Serialize};

/// A task that can never fit, and that the run goes on without.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Skipped {
    /// The task's name.
    pub name: String,
    /// The description that it was submitted with.
    pub config: serde_json::Value,
    /// The reason, in words.
    pub reason: String,
}

/// The tasks that are left out, if any may be.
pub(super) struct SkippedTasks {
    /// True if tasks may be left out.
    pub allowed: bool,
    pub skipped: Vec<Skipped>,
    /// The error of the first one.
    first: Option<EngineError>,
}

impl SkippedTasks {
    pub(super) fn new(allowed: bool) -> Self {
        Self { allowed, skipped: Vec::new(), first: None }
    }

    /// Leaves a task out that does not fit.
    ///
    /// # Errors
    /// The error, by the task's name, if it is another, or no task may be left out.
    pub(super) fn leave(&mut self, task: &TrainTask, error: EngineError) -> Result<(), EngineError> {
        let error = match error {
            EngineError::Task { source, .. } => *source,
            error => error,
        };
        if !self.allowed || !never_fits(&error) {
            return Err(refused(&task.name)(error));
        }
        let (name, config, reason) = (task.name.clone(), task.config.clone(), with_causes(&error));
        tracing::warn!("task `{name}` can never fit, and is left out: {reason}");
        self.skipped.push(Skipped { name, config, reason });
        self.first.get_or_insert_with(|| refused(&task.name)(error));
        Ok(())
    }

    /// Refuses a run of which nothing is left.
    pub(super) fn check<T>(&mut self, tasks: &[T]) -> Result<(), EngineError> {
        self.first.take_if(|_| tasks.is_empty()).map_or(Ok(()), Err)
    }
}

/// Returns whether an error says that a task has no room in the memory that there is.
fn never_fits(error: &EngineError) -> bool {
    use PartitionError::{LayerTooLarge, ShardTooLarge};
    let of_device = matches!(error, EngineError::Partition(LayerTooLarge { .. } | ShardTooLarge { .. }));
    of_device || matches!(error, EngineError::HostMemory { .. } | EngineError::DiskMemory { .. })
}
