//! Who watches a run from outside: its page, and trackers.

use crate::dashboard::{Server, Shown};
use crate::run_dir::TENSORBOARD;
use crate::settings::WatchSettings;
use crate::terminal::tell;
use crate::trackers::{Mirror, Mlflow, Sink, TensorBoard};
use anyhow::Result;
use std::path::Path;

/// The page of a run, if one was asked for, until this is dropped.
pub(crate) fn page(dir: &Path, asked: &WatchSettings) -> Result<Option<Server>> {
    let Some(address) = asked.serve else { return Ok(None) };
    let server = Server::start(address, Shown::run(dir))?;
    tell(&format!("note: the run's page: {}", server.url()));
    server.warning().iter().for_each(|warning| tell(warning));
    Ok(Some(server))
}

/// The trackers of a run, each with the name by which people know it.
#[derive(Default)]
pub(crate) struct Trackers(Vec<(&'static str, Mirror)>);

impl Trackers {
    /// Begins those that were asked for, with what the run in this directory has noted already.
    pub(crate) fn begin(dir: &Path, asked: &WatchSettings) -> Result<Self> {
        let mut trackers = Self::default();
        if let Some(task_table) = &asked.tensorboard {
            let task_table = task_table.clone().unwrap_or_else(|| dir.join(TENSORBOARD));
            trackers.add(dir, "TensorBoard", TensorBoard::new(&task_table)?)?;
        }
        if let Some(uri) = &asked.mlflow {
            trackers.add(dir, "MLflow", Mlflow::new(uri, dir)?)?;
        }
        Ok(trackers)
    }

    fn add(&mut self, dir: &Path, name: &'static str, sink: impl Sink) -> Result<()> {
        self.0.push((name, Mirror::start(dir, name, sink)?));
        Ok(())
    }

    /// Hands on the last lines, and says what could not be.
    pub(crate) fn end(self) {
        for (name, mirror) in self.0 {
            if let Some(left) = mirror.finish() {
                tell(&format!("warning: {name}: {left}"));
            }
        }
    }
}
