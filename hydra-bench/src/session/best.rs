//! A run that keeps its best models alone, while it goes on.

use super::task_table::TaskTable;
use crate::run_dir::{BestModels, RunDir};
use crate::terminal::tell;
use anyhow::Result;
use hydra_engine::{Observer, RunEvent};

/// Has models removed when better ones have been written, if the run keeps but some.
pub(crate) struct KeepBest {
    task_table: TaskTable,
    best: Option<BestModels>,
    /// True if the run is interrupted: tasks that end now may go on.
    stopping: bool,
}

impl KeepBest {
    /// Keeps the models of so many tasks, or all.
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
                let swept = self.task_table.name(*task).map_or(Ok(()), |name| best.ended(name));
                if let Err(error) = swept {
                    tell(&format!(
                        "error: a model that is not among the best could not be removed: {error:#}"
                    ));
                }
            }
            _ => {}
        }
    }
}
