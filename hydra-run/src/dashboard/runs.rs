//! The runs that the dashboard shows: run directories, and the run directories below a given directory.

use crate::run_dir::{Follower, METRICS, REPORT, SPEC, entries, is_taken, length};
use crate::terminal::Usage;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

/// The maximum number of runs in the list.
const MOST: usize = 1000;

/// The directories whose runs are shown.
#[derive(Clone, Debug)]
pub struct ShownRuns(Vec<PathBuf>);

impl ShownRuns {
    /// Returns the directories to show. Each must exist; runs may be added below it later.
    pub fn new(dirs: Vec<PathBuf>) -> Result<Self, Usage> {
        match dirs.iter().find(|dir| !dir.is_dir()) {
            Some(dir) => Err(Usage::new(format!(
                "`{}` is not a directory: expected a run directory, or a directory of runs such as `runs`",
                dir.display()
            ))),
            None => Ok(Self(dirs)),
        }
    }

    /// Returns the run in one directory.
    pub(crate) fn run(dir: &Path) -> Self {
        Self(vec![dir.to_owned()])
    }

    /// Returns the current runs by name. The name is the path as given, extended below a directory of runs.
    fn runs(&self) -> BTreeMap<String, PathBuf> {
        let found = self.0.iter().flat_map(|dir| if is_run(dir) { vec![dir.clone()] } else { below(dir) });
        found.take(MOST).map(|dir| (dir.display().to_string(), dir)).collect()
    }
}

fn is_run(dir: &Path) -> bool {
    dir.join(SPEC).is_file() || dir.join(METRICS).is_file()
}

fn below(dir: &Path) -> Vec<PathBuf> {
    let mut runs: Vec<PathBuf> = entries(dir).filter(|dir| is_run(dir)).collect();
    runs.sort_unstable();
    runs
}

/// Returns the state of the run in a directory.
pub(super) fn state(dir: &Path) -> &'static str {
    match dir.join(REPORT).is_file() {
        true => "ended",
        false if is_taken(dir) => "running",
        false => "stopped",
    }
}

/// The shown runs, with the part of their logs that has been read.
pub(super) struct Runs {
    shown: ShownRuns,
    read: Mutex<BTreeMap<PathBuf, Arc<Mutex<Follower>>>>,
}

impl Runs {
    pub(super) fn new(shown: ShownRuns) -> Self {
        Self { shown, read: Mutex::default() }
    }

    /// Returns the list of runs: name, state, and the time of the last line in seconds since 1970.
    pub(super) fn list(&self) -> Value {
        let runs = self.shown.runs();
        let listed = runs
            .iter()
            .map(|(name, dir)| json!({ "name": name, "state": state(dir), "written": written(dir) }));
        listed.collect()
    }

    /// Returns the directory of a run, if it is shown.
    pub(super) fn dir(&self, name: &str) -> Option<PathBuf> {
        self.shown.runs().remove(name)
    }

    /// Returns the follower of a run's log.
    pub(super) fn follower(&self, dir: &Path) -> Arc<Mutex<Follower>> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.entry(dir.to_owned()).or_insert_with(|| Arc::new(Mutex::new(Follower::new(dir)))).clone()
    }
}

fn written(dir: &Path) -> Option<f64> {
    let metrics = dir.join(METRICS);
    length(&metrics).ok().filter(|bytes| *bytes > 0)?;
    let at = metrics.metadata().ok()?.modified().ok()?;
    at.duration_since(SystemTime::UNIX_EPOCH).ok().map(|at| at.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn runs_are_shown_by_themselves_or_below_a_directory() {
        let root = tempfile::tempdir().unwrap();
        let dirs = ["runs/b", "runs/a", "alone", "runs/none"].map(|dir| root.path().join(dir));
        dirs.iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
        dirs[..3].iter().for_each(|dir| fs::write(dir.join(SPEC), "").unwrap());
        let shown = ShownRuns::new(vec![root.path().join("runs"), dirs[2].clone()]).unwrap();
        let runs = Runs::new(shown);
        let names: Vec<PathBuf> = runs.shown.runs().into_values().collect();
        assert_eq!(names, [&dirs[2], &dirs[1], &dirs[0]].map(Clone::clone));
        assert_eq!(runs.dir(&dirs[0].display().to_string()), Some(dirs[0].clone()));
        assert_eq!(runs.dir(&root.path().join("runs/../alone").display().to_string()), None);
        assert_eq!(runs.list()[0]["state"], "stopped");
        fs::write(dirs[2].join(REPORT), "{}").unwrap();
        assert_eq!(
            (runs.list()[0]["state"].as_str(), &runs.list()[0]["written"]),
            (Some("ended"), &Value::Null)
        );
        let wrong = ShownRuns::new(vec![root.path().join("nowhere")]).unwrap_err().to_string();
        assert!(wrong.contains("is not a directory"), "{wrong}");
    }
}
