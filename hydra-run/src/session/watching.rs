//! Observers outside the process: the dashboard, and experiment trackers.

use crate::dashboard::{Server, ShownRuns};
use crate::run_dir::TENSORBOARD;
use crate::settings::WatchSettings;
use crate::terminal::tell;
use crate::trackers::{Mirror, Mlflow, Sink, TensorBoard};
use anyhow::Result;
use std::path::Path;

/// Starts the dashboard of a run, if requested. It is served until the result is dropped.
pub(crate) fn dashboard(dir: &Path, asked: &WatchSettings) -> Result<Option<Server>> {
    let Some(address) = asked.serve else { return Ok(None) };
    let server = Server::start(address, ShownRuns::run(dir), None)?;
    tell(&format!("note: dashboard: {}", server.url()));
    server.warning().iter().for_each(|warning| tell(warning));
    Ok(Some(server))
}

/// The experiment trackers of a run with their display names.
#[derive(Default)]
pub struct Trackers(Vec<(&'static str, Mirror)>);

impl Trackers {
    /// Starts the requested trackers with the events that the run has recorded already.
    pub fn begin(dir: &Path, asked: &WatchSettings) -> Result<Self> {
        let mut trackers = Self::default();
        if let Some(logs) = &asked.tensorboard {
            let logs = logs.clone().unwrap_or_else(|| dir.join(TENSORBOARD));
            trackers.add(dir, "TensorBoard", TensorBoard::new(&logs)?)?;
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

    /// Sends the last events, and prints a warning if some could not be sent.
    pub fn end(self) {
        for (name, mirror) in self.0 {
            if let Some(left) = mirror.finish() {
                tell(&format!("warning: {name}: {left}"));
            }
        }
    }
}
