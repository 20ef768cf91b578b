//! The fields of a report's task that the leaderboard reads.

use crate::terminal::{Measure, Score};
use hydra_engine::Placement;
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

/// The number of last minibatches over which the training loss of an unfinished task is averaged.
pub(super) const LAST: usize = 10;

#[derive(Debug, Deserialize)]
pub(super) struct ReportTask {
    pub(super) name: String,
    /// The directory of its run, in a report of several runs.
    pub(super) run: Option<String>,
    pub(super) config: Value,
    pub(super) state: String,
    pub(super) error: Option<String>,
    pub(super) shards: Option<usize>,
    /// The kind and number of items trained on. Missing in reports of versions without image data.
    pub(super) unit: Option<String>,
    #[serde(default)]
    pub(super) units: u64,
    #[serde(flatten)]
    pub(super) progress: TrainingProgress,
    #[serde(default)]
    pub(super) losses: Vec<Option<f64>>,
    #[serde(flatten)]
    pub(super) results: Results,
    pub(super) best_step: Option<usize>,
    pub(super) model_dir: Option<String>,
    /// Missing in reports of versions without optimizers on devices.
    #[serde(default)]
    pub(super) optimizer: Placement,
}

/// The progress of a task's training.
#[derive(Debug, Deserialize)]
pub(super) struct TrainingProgress {
    /// The current activity, in a report of a running run.
    doing: Option<String>,
    pub(super) steps: usize,
    /// Total minibatches, in a report of an unfinished run.
    pub(super) steps_in_all: Option<usize>,
    #[serde(default)]
    stopped_early: bool,
}

/// The results of a task's evaluations.
#[derive(Debug, Deserialize)]
pub(super) struct Results {
    pub(super) initial_validation: Option<Score>,
    #[serde(default)]
    pub(super) evaluations: Vec<(usize, Score)>,
    pub(super) validation: Option<Score>,
    pub(super) test: Option<Score>,
}

impl ReportTask {
    /// Returns the reason of its failure, and the place of its best weights.
    pub(super) fn failure(&self) -> String {
        let why = self.error.as_deref().unwrap_or("unknown reason");
        match (self.best_step, &self.model_dir) {
            (Some(step), Some(dir)) => {
                format!("{}: {why}; its best weights, after {step} minibatches, are in `{dir}`", self.name)
            }
            _ => format!("{}: {why}", self.name),
        }
    }

    /// Returns the measure by which it is ranked, if it was evaluated.
    pub(super) fn measure(&self) -> Option<Measure> {
        let Results { initial_validation, evaluations, validation, test } = &self.results;
        let periodic = evaluations.iter().map(|(_, result)| result);
        let others = [validation, initial_validation, test].into_iter().flatten();
        others.chain(periodic).next().map(Score::measure)
    }

    /// Returns its final validation, or for an unfinished task the best one so far with its minibatch.
    pub(super) fn validated(&self) -> Option<(Option<usize>, &Score)> {
        let before = |a: &&(usize, Score), b: &&(usize, Score)| a.1.cost.total_cmp(&b.1.cost);
        let so_far = || self.results.evaluations.iter().min_by(before).map(|(at, score)| (Some(*at), score));
        self.results.validation.as_ref().map(|result| (None, result)).or_else(so_far)
    }

    /// Returns the mean of the finite losses among the last [`LAST`] minibatches.
    pub(super) fn training_loss(&self) -> Option<f64> {
        let last = &self.losses[self.losses.len().saturating_sub(LAST)..];
        let numbers: Vec<f64> = last.iter().copied().flatten().collect();
        (!numbers.is_empty()).then(|| numbers.iter().sum::<f64>() / numbers.len() as f64)
    }

    /// Returns the parent of a fork, the minibatch of the fork, and the changed settings.
    pub(super) fn forked_from(&self) -> Option<String> {
        let fork = self.config.get("fork")?;
        let changes = fork["changes"].as_object().into_iter().flatten();
        let changes = changes.map(|(name, text)| format!("{name} {}", text.as_str().unwrap_or_default()));
        let weights = (fork["weights_only"] == true).then(|| "weights only".to_owned());
        let own: Vec<String> = weights.into_iter().chain(changes).collect();
        let own = if own.is_empty() { String::new() } else { format!(": {}", own.join(", ")) };
        Some(format!("{} after {}{own}", fork["of"].as_str()?, fork["at"]))
    }

    /// Returns true if it has not ended for good.
    pub(super) fn is_unfinished(&self) -> bool {
        !matches!(self.state.as_str(), "done" | "failed" | "deleted")
    }

    pub(super) fn state(&self) -> String {
        match &self.progress.doing {
            Some(doing) => doing.clone(),
            None if self.progress.stopped_early => format!("{} early", self.state),
            None => self.state.clone(),
        }
    }
}

/// Returns true if two tasks have the same data. Runs on different machines may have it under different paths.
pub(super) fn same_data(a: &ReportTask, b: &ReportTask) -> bool {
    let name =
        |task: &'_ ReportTask| Path::new(data(&task.config)).file_name().map(std::ffi::OsStr::to_owned);
    let elsewhere = a.run.is_some() && a.run != b.run;
    data(&a.config) == data(&b.config) || (elsewhere && name(a) == name(b))
}

/// Returns the data of a configuration.
pub(super) fn data(config: &Value) -> &str {
    config["data"].as_str().unwrap_or("the data")
}

/// Formats a number with four significant digits, or all integer digits of a large one.
pub(super) fn figure(value: f64) -> String {
    match value {
        v if v >= 1e7 => format!("{v:.2e}"),
        v if v >= 1000.0 => format!("{v:.0}"),
        v if v >= 100.0 => format!("{v:.1}"),
        v => format!("{v:.3}"),
    }
}
