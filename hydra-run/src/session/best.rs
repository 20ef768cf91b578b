//! `--keep-best` during a run.

use super::task_table::TaskTable;
use crate::run_dir::{BestModels, RunDir};
use crate::terminal::tell;
use anyhow::Result;
use hydra_engine::{Observer, RunEvent};

/// An observer that removes models when better ones have been written, if the run keeps only the best.
pub(crate) struct KeepBest {
    task_table: TaskTable,
    best: Option<BestModels>,
    /// True if the run is interrupted: tasks that end now may be resumed.
    stopping: bool,
}

impl KeepBest {
    /// Keeps the models of the best `keep` tasks, or all.
    pub(crate) fn new(dir: &RunDir, keep: Option<usize>) -> Result<Self> {
        let best = keep.map(|keep| BestModels::new(dir, keep)).transpose()?;
        Ok(Self { task_table: TaskTable::default(), best, stopping: false })
    }
}

impl Observer for KeepBest {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let Some(best) = &mut self.best else { return };
        self.task_table.observe(event);
        match event {
            RunEvent::Stopping => self.stopping = true,
            RunEvent::Ended { task, .. } if !self.stopping => {
                let pruned = self.task_table.name(*task).map_or(Ok(()), |name| best.ended(name));
                if let Err(error) = pruned {
                    tell(&format!(
                        "error: a model that is not among the best could not be removed: {error:#}"
                    ));
                }
            }
            _ => {}
        }
    }
}
