//! A task of a report, as far as the leaderboard reads it.

use crate::terminal::{Measure, Score};
use hydra_engine::Placement;
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

/// Minibatches over which the training loss of a task that has not come to its end is averaged.
pub(super) const LAST: usize = 10;

#[derive(Debug, Deserialize)]
pub(super) struct Task {
    pub(super) name: String,
    /// The directory of its run, in a report of several.
    #[serde(default)]
    pub(super) run: Option<String>,
    pub(super) config: Value,
    pub(super) state: String,
    /// The work of a task of a run that is under way.
    #[serde(default)]
    pub(super) doing: Option<String>,
    pub(super) error: Option<String>,
    pub(super) shards: Option<usize>,
    /// What was trained on, and how much of it. Reports of the time before images do not have it.
    #[serde(default)]
    pub(super) unit: Option<String>,
    #[serde(default)]
    pub(super) units: u64,
    pub(super) steps: usize,
    /// Minibatches in all, of a run that is under way.
    #[serde(default)]
    pub(super) steps_in_all: Option<usize>,
    #[serde(default)]
    pub(super) losses: Vec<Option<f64>>,
    #[serde(default)]
    pub(super) stopped_early: bool,
    pub(super) initial_validation: Option<Score>,
    #[serde(default)]
    pub(super) evaluations: Vec<(usize, Score)>,
    pub(super) validation: Option<Score>,
    pub(super) test: Option<Score>,
    pub(super) best_step: Option<usize>,
    pub(super) model_dir: Option<String>,
    /// Reports of the time before optimizers on devices do not have it.
    #[serde(default)]
    pub(super) optimizer: Placement,
}

impl Task {
    /// The reason of its failure, and its best weights.
    pub(super) fn failure(&self) -> String {
        let why = self.error.as_deref().unwrap_or("no reason is known");
        match (self.best_step, &self.model_dir) {
            (Some(step), Some(dir)) => {
                format!("{}: {why}; its best weights, after {step} minibatches, are in `{dir}`", self.name)
            }
            _ => format!("{}: {why}", self.name),
        }
    }

    /// The figure that it is ranked by, as far as it was evaluated.
    pub(super) fn measure(&self) -> Option<Measure> {
        let periodic = self.evaluations.iter().map(|(_, result)| result);
        let others = [&self.validation, &self.initial_validation, &self.test].into_iter().flatten();
        others.chain(periodic).next().map(Score::measure)
    }

    /// Its validation; of a task that has not come to its end, the one so far whose weights are kept, after so many
    /// minibatches.
    pub(super) fn validated(&self) -> Option<(Option<usize>, &Score)> {
        let before = |a: &&(usize, Score), b: &&(usize, Score)| a.1.loss.total_cmp(&b.1.loss);
        let so_far = || self.evaluations.iter().min_by(before).map(|(step, result)| (Some(*step), result));
        self.validation.as_ref().map(|result| (None, result)).or_else(so_far)
    }

    /// The mean of its last losses that are numbers, over up to [`LAST`] minibatches.
    pub(super) fn training_loss(&self) -> Option<f64> {
        let last = &self.losses[self.losses.len().saturating_sub(LAST)..];
        let numbers: Vec<f64> = last.iter().copied().flatten().collect();
        (!numbers.is_empty()).then(|| numbers.iter().sum::<f64>() / numbers.len() as f64)
    }

    /// The task that it began as, after how many minibatches, and what it has of its own.
    pub(super) fn forked_from(&self) -> Option<String> {
        let fork = self.config.get("fork")?;
        let changes = fork["changes"].as_object().into_iter().flatten();
        let changes = changes.map(|(name, text)| format!("{name} {}", text.as_str().unwrap_or_default()));
        let weights = (fork["weights_only"] == true).then(|| "weights only".to_owned());
        let own: Vec<String> = weights.into_iter().chain(changes).collect();
        let own = if own.is_empty() { String::new() } else { format!(": {}", own.join(", ")) };
        Some(format!("{} after {}{own}", fork["of"].as_str()?, fork["at"]))
    }

    /// Returns true if it could have gone on.
    pub(super) fn is_unfinished(&self) -> bool {
        !matches!(self.state.as_str(), "done" | "failed" | "deleted")
    }

    pub(super) fn state(&self) -> String {
        match &self.doing {
            Some(doing) => doing.clone(),
            None if self.stopped_early => format!("{} early", self.state),
            None => self.state.clone(),
        }
    }
}

/// Returns true if two tasks have the same data, which runs on several machines may have in several places.
pub(super) fn same_data(a: &Task, b: &Task) -> bool {
    let name = |task: &'_ Task| Path::new(data(&task.config)).file_name().map(std::ffi::OsStr::to_owned);
    let elsewhere = a.run.is_some() && a.run != b.run;
    data(&a.config) == data(&b.config) || (elsewhere && name(a) == name(b))
}

/// The data of a configuration.
pub(super) fn data(config: &Value) -> &str {
    config["data"].as_str().unwrap_or("the data")
}

/// Four significant digits, or as many as a large number has before its point.
pub(super) fn figure(value: f64) -> String {
    match value {
        v if v >= 1e7 => format!("{v:.2e}"),
        v if v >= 1000.0 => format!("{v:.0}"),
        v if v >= 100.0 => format!("{v:.1}"),
        v => format!("{v:.3}"),
    }
}
