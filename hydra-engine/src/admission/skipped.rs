//! Tasks that can never fit and are skipped.

use crate::error::{EngineError, refused, with_causes};
use crate::train_task::TrainTask;
use hydra_partition::PartitionError;
use serde::{Deserialize, Serialize};

/// A task that can never fit; the run goes on without it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Skipped {
    /// The task's name.
    pub name: String,
    /// Its description as submitted.
    pub config: serde_json::Value,
    /// The reason, as text.
    pub reason: String,
}

/// The skipped tasks of a run.
pub(super) struct SkippedTasks {
    /// True if tasks may be skipped.
    pub allowed: bool,
    pub skipped: Vec<Skipped>,
    /// The error of the first skipped task.
    first: Option<EngineError>,
}

impl SkippedTasks {
    pub(super) fn new(allowed: bool) -> Self {
        Self { allowed, skipped: Vec::new(), first: None }
    }

    /// The same skipped tasks, to which a candidate of the search adds its own.
    pub(super) fn without_error(&self) -> Self {
        Self { skipped: self.skipped.clone(), ..Self::new(self.allowed) }
    }

    /// Logs the skipped tasks.
    pub(super) fn warn(&self) {
        for Skipped { name, reason, .. } in &self.skipped {
            tracing::warn!("task `{name}` can never fit and is skipped: {reason}");
        }
    }

    /// Skips a task that does not fit.
    ///
    /// # Errors
    /// The error, under the task's name, if it has another cause or tasks may not be skipped.
    pub(super) fn skip(&mut self, task: &TrainTask, error: EngineError) -> Result<(), EngineError> {
        let error = match error {
            EngineError::Task { source, .. } => *source,
            error => error,
        };
        if !self.allowed || !never_fits(&error) {
            return Err(refused(&task.name)(error));
        }
        let (name, config, reason) = (task.name.clone(), task.config.clone(), with_causes(&error));
        self.skipped.push(Skipped { name, config, reason });
        self.first.get_or_insert_with(|| refused(&task.name)(error));
        Ok(())
    }

    /// Refuses a run if all tasks were skipped.
    pub(super) fn check<T>(&mut self, tasks: &[T]) -> Result<(), EngineError> {
        self.first.take_if(|_| tasks.is_empty()).map_or(Ok(()), Err)
    }
}

/// Returns whether the error means that the task is too large for the memory of the run.
fn never_fits(error: &EngineError) -> bool {
    use PartitionError::{LayerTooLarge, ShardTooLarge};
    let of_device = matches!(error, EngineError::Partition(LayerTooLarge { .. } | ShardTooLarge { .. }));
    of_device || matches!(error, EngineError::HostMemory { .. } | EngineError::DiskMemory { .. })
}
