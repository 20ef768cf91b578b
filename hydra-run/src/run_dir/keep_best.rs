//! `--keep-best`: keeps only the models of the best tasks.

use crate::run_dir::directory::TaskFiles;
use crate::run_dir::follower::Follower;
use crate::run_dir::leaderboard::Report;
use crate::run_dir::{RunDir, entries};
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Removes the models of tasks that better ones have overtaken, and no other files.
#[derive(Debug)]
pub(crate) struct BestModels {
    keep: usize,
    files: TaskFiles,
    follower: Follower,
    /// Tasks that have ended for good in this run.
    ended: BTreeSet<String>,
    /// The files of each model when its task ended. Files added later stay.
    written: BTreeMap<PathBuf, Vec<PathBuf>>,
}

impl BestModels {
    /// Keeps the models of the best `keep` tasks of each group in a run directory.
    pub(crate) fn new(dir: &RunDir, keep: usize) -> Result<Self> {
        let files = dir.task_files()?;
        let models = entries(files.models()).filter(|path| path.is_dir());
        let written = models.map(|model| (model.clone(), entries(&model).collect())).collect();
        Ok(Self { keep, files, follower: Follower::new(dir.path()), ended: BTreeSet::new(), written })
    }

    /// Records that a task has ended for good and its model is written, and prunes the models.
    pub(crate) fn ended(&mut self, task: &str) -> Result<()> {
        let model = self.files.model_dir(task);
        self.written.insert(model.clone(), entries(&model).collect());
        self.ended.insert(task.to_owned());
        self.prune(false)
    }

    /// Removes the models that are not among the best of their group. Tasks that may still be resumed are not compared, unless
    /// `all` have ended for good.
    pub(crate) fn prune(&mut self, all: bool) -> Result<()> {
        self.follower.follow().context("the metrics could not be read")?;
        let tasks = self.follower.journal().standings(false);
        let is_done = |task: &&Value| {
            let name = task["name"].as_str().unwrap_or_default();
            all || task["state"] == "done" || self.ended.contains(name)
        };
        let has_model =
            |task: &&Value| task["name"].as_str().is_some_and(|name| self.files.model_dir(name).is_dir());
        let compared = tasks.iter().filter(is_done).filter(has_model).cloned().collect();
        for group in Report::so_far(compared)?.in_order() {
            for task in group.iter().skip(self.keep) {
                self.remove(&self.files.model_dir(task))?;
            }
        }
        Ok(())
    }

    /// Removes the files of a model, and its directory if it is then empty.
    fn remove(&self, model: &Path) -> Result<()> {
        let removed = |path: &Path| format!("`{}` could not be removed", path.display());
        for file in self.written.get(model).into_iter().flatten().filter(|file| file.is_file()) {
            fs::remove_file(file).with_context(|| removed(file))?;
        }
        match entries(model).next() {
            Some(_) => Ok(()),
            None => fs::remove_dir(model).with_context(|| removed(model)),
        }
    }
}

/// Clears `model_dir` of the tasks in a report whose model directory no longer exists.
pub(crate) fn without_removed(report: &str) -> Result<String> {
    let mut value: Value = serde_json::from_str(report).context("the report is broken JSON")?;
    for task in value["tasks"].as_array_mut().into_iter().flatten() {
        if task["model_dir"].as_str().is_some_and(|dir| !Path::new(dir).is_dir()) {
            task["model_dir"] = Value::Null;
        }
    }
    serde_json::to_string_pretty(&value).context("the report could not be written as JSON")
}
