//! The state of a task in a checkpoint, without tensors, as JSON in the file's header.

use crate::error::CheckpointError;
use crate::protocol::{SavedEvaluation, Sums};
use hydra_core::TrainSpec;
use hydra_sched::program::{EvaluationKind, Stage};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The version of the format.
pub(crate) const SCHEMA: u32 = 1;

/// The position and the results of a task at rest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TaskAtRest {
    pub schema: u32,
    pub identity: Identity,
    /// Minibatches trained, and those to train in total.
    pub step: usize,
    pub steps: usize,
    pub position: Position,
    pub results: SavedResults,
    /// The hash of its frozen parameters, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<String>,
}

impl TaskAtRest {
    /// Returns true if it includes best weights.
    pub(crate) fn has_best(&self) -> bool {
        let tests = matches!(
            self.position,
            Position::Evaluate { kind: EvaluationKind::Validation | EvaluationKind::Test, .. }
        );
        !tests && !self.is_trained() && self.results.best.is_some()
    }

    /// The number of moments of each trained parameter in the file; zero for a task that was trained to its end.
    pub(super) fn moments(&self) -> usize {
        if self.is_trained() { 0 } else { self.identity.spec.optimizer.moments() }
    }

    /// Returns true if it was trained to its end.
    pub(super) fn is_trained(&self) -> bool {
        matches!(self.position, Position::Write | Position::Finished { .. })
    }
}

/// The next work of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Position {
    /// Train a minibatch.
    Train,
    /// Evaluate the next batch of an evaluation.
    Evaluate {
        kind: EvaluationKind,
        batch: usize,
        #[serde(flatten)]
        sums: Sums,
    },
    /// Restore the best weights.
    Restore,
    /// Write the model.
    Write,
    /// Nothing: the model was hashed and written.
    Finished { sha256: String, dir: Option<PathBuf> },
}

impl Position {
    pub(crate) fn stage(&self) -> Stage {
        match *self {
            Self::Train => Stage::Train { microbatch: 0 },
            Self::Evaluate { kind, batch, .. } => Stage::Evaluate { kind, batch, rounds: false },
            Self::Restore => Stage::Restore,
            Self::Write => Stage::Write,
            Self::Finished { .. } => Stage::Finished,
        }
    }
}

/// The results of a task when it was saved, without times.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedResults {
    pub losses: Vec<f64>,
    pub initial: Option<SavedEvaluation>,
    /// The tasks that computed `initial`, if other tasks took part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub initial_by: Vec<String>,
    pub validation: Option<SavedEvaluation>,
    pub test: Option<SavedEvaluation>,
    pub periodic: Vec<(usize, SavedEvaluation)>,
    pub best: Option<(usize, SavedEvaluation)>,
}

/// The inputs that determine a task's bits, on one build and one processor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// The hardware: a task stays on one kind of device.
    pub backend: String,
    /// Other device settings that determine bits, such as the precision of matrix products.
    pub config: String,
    pub float: String,
    /// SHA-256 of the chain's architecture description.
    pub architecture: String,
    /// True if the optimizer's steps have the bits of the host's.
    pub exact: bool,
    pub spec: TrainSpec,
    pub train: Option<DataIdentity>,
    pub validation: Option<DataIdentity>,
    pub test: Option<DataIdentity>,
    pub initial_validation: bool,
}

/// A dataset: its length and a hash of its items (all, or an evenly spaced sample up to a limit).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DataIdentity {
    pub items: usize,
    pub sha256: String,
}

impl Identity {
    /// Refuses the checkpoint with this identity for a task of another identity.
    pub(crate) fn check(&self, path: &Path, task: &Self) -> Result<(), CheckpointError> {
        // A setting that a version or a spec does not have is null.
        let value = |of: &[(String, String)], what: &String| {
            of.iter()
                .find(|(name, _)| name == what)
                .map_or_else(|| "null".to_owned(), |(_, value)| value.clone())
        };
        let (saved, now) = (self.properties(), task.properties());
        let names = saved.iter().chain(&now).map(|(what, _)| what);
        let values = names.map(|what| (what, value(&saved, what), value(&now, what)));
        match values.into_iter().find(|(_, found, expected)| found != expected) {
            Some((what, found, expected)) => {
                Err(CheckpointError::Other { path: path.to_owned(), what: what.clone(), found, expected })
            }
            None => Ok(()),
        }
    }

    /// The same for a task that is forked from the checkpoint: settings that only affect later training may differ.
    pub(crate) fn check_fork(&self, path: &Path, task: &Self) -> Result<(), CheckpointError> {
        let spec = forked(&self.spec, &task.spec);
        Self { spec, initial_validation: task.initial_validation, ..self.clone() }.check(path, task)
    }

    /// All properties by name, as text.
    fn properties(&self) -> Vec<(String, String)> {
        let config = if self.config.is_empty() { "the default" } else { &self.config };
        let exact = if self.exact { "the host's" } else { "the device's" };
        let named = [
            ("device", self.backend.clone()),
            ("precision", config.to_owned()),
            ("float type", self.float.clone()),
            ("architecture", short(&self.architecture)),
            ("bits of optimizer steps", exact.to_owned()),
            ("training data", described(self.train.as_ref())),
            ("validation data", described(self.validation.as_ref())),
            ("test data", described(self.test.as_ref())),
            ("validation before training", self.initial_validation.to_string()),
        ];
        let mut spec = serde_json::to_value(&self.spec).unwrap_or_default();
        // The order of settings does not matter.
        spec.sort_all_objects();
        let spec = spec.as_object().into_iter().flatten();
        let spec = spec.map(|(name, value)| (name.replace('_', " "), value.to_string()));
        named.into_iter().map(|(name, value)| (name.to_owned(), value)).chain(spec).collect()
    }
}

/// The spec of a fork, with the settings that a fork cannot change taken from the checkpoint.
fn forked(saved: &TrainSpec, own: &TrainSpec) -> TrainSpec {
    let mut spec = TrainSpec {
        schedule: own.schedule.clone(),
        decay: own.decay,
        clip: own.clip,
        length: own.length,
        patience: own.patience,
        ..saved.clone()
    };
    // The moments mean the same, and the presence of best weights is the same.
    let (kind, moments) = (saved.optimizer.name(), saved.optimizer.moments());
    if (kind, moments) == (own.optimizer.name(), own.optimizer.moments()) {
        spec.optimizer = own.optimizer.clone();
    }
    if saved.keeps_best() == own.keeps_best() {
        (spec.eval_every, spec.eval_at) = (own.eval_every, own.eval_at.clone());
    }
    spec
}

/// Returns the first setting that prevents a task with the spec `own` from being
/// [forked](crate::TrainTask::fork_from) from one with the spec `saved`: its name, and both values as JSON.
pub fn fork_obstacle(saved: &TrainSpec, own: &TrainSpec) -> Option<(String, String, String)> {
    let fields = |spec: &TrainSpec| serde_json::to_value(spec).unwrap_or_default();
    let (saved, own) = (fields(&forked(saved, own)), fields(own));
    // A setting that is not there is null, as indexing gives it.
    let names = saved.as_object()?.keys().chain(own.as_object()?.keys());
    let differs = names.into_iter().find(|name| own[name.as_str()] != saved[name.as_str()]);
    differs.map(|name| {
        (name.replace('_', " "), saved[name.as_str()].to_string(), own[name.as_str()].to_string())
    })
}

/// The first digits of a hash.
fn short(hash: &str) -> String {
    format!("{}..", hash.get(..16).unwrap_or(hash))
}

fn described(data: Option<&DataIdentity>) -> String {
    match data {
        Some(data) => format!("{} items ({})", data.items, short(&data.sha256)),
        None => "none".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::OptimizerSpec;

    fn spec(metric: Option<&str>) -> TrainSpec {
        let metric = metric.map(str::to_owned);
        TrainSpec { metric, eval_every: Some(1), ..TrainSpec::new(OptimizerSpec::adamw(1e-3), 1) }
    }

    fn identity(spec: TrainSpec) -> Identity {
        let none = String::new;
        let (train, validation, test) = (None, None, None);
        let (backend, config, float, architecture) = (none(), none(), none(), none());
        let (exact, initial_validation) = (true, true);
        Identity {
            backend,
            config,
            float,
            architecture,
            exact,
            spec,
            train,
            validation,
            test,
            initial_validation,
        }
    }

    #[test]
    fn a_setting_that_only_one_side_has_is_another_one() {
        for (saved, own) in [(None, Some("f1_macro")), (Some("f1_macro"), None)] {
            let (saved, own) = (spec(saved), spec(own));
            let (what, ..) = fork_obstacle(&saved, &own).unwrap();
            assert_eq!(what, "metric");
            let path = Path::new("a");
            let refused =
                identity(saved.clone()).check(path, &identity(own.clone())).unwrap_err().to_string();
            assert!(refused.contains("metric") && refused.contains("null"), "{refused}");
            assert!(identity(saved.clone()).check_fork(path, &identity(own)).is_err());
            assert!(identity(saved.clone()).check(path, &identity(saved)).is_ok());
        }
    }
}
