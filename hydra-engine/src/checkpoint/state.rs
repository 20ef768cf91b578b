//! The state of a task in a checkpoint beside its tensors, as JSON in the file's header.

use crate::error::CheckpointError;
use crate::protocol::{SavedEvaluation, Sums};
use crate::stages::{EvaluationKind, Stage};
use hydra_core::TrainSpec;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The version of the format.
pub(crate) const SCHEMA: u32 = 1;

/// The position and the results of a task between two minibatches or two batches of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    pub schema: u32,
    pub identity: Identity,
    /// Minibatches trained, and those to train in all.
    pub step: usize,
    pub steps: usize,
    pub position: Position,
    pub results: SavedResults,
    /// The hash of its frozen masters, if it has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<String>,
}

impl State {
    /// Returns true if the best masters so far belong to it.
    pub(crate) fn has_best(&self) -> bool {
        let tests = matches!(
            self.position,
            Position::Evaluate { kind: EvaluationKind::Validation | EvaluationKind::Test, .. }
        );
        !tests && !self.is_trained() && self.results.best.is_some()
    }

    /// Moments of each trained parameter that are written: nobody steps a task that was trained to its end.
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
    /// A minibatch.
    Train,
    /// A batch of an evaluation, of which this much is done.
    Evaluate {
        kind: EvaluationKind,
        batch: usize,
        #[serde(flatten)]
        sums: Sums,
    },
    /// Nothing but having its best masters put back.
    Restore,
    /// Nothing but having its model written.
    Write,
    /// Nothing: its model was hashed and written.
    Finished { sha256: String, dir: Option<PathBuf> },
}

impl Position {
    pub(crate) fn stage(&self) -> Stage {
        match *self {
            Self::Train => Stage::Train { microbatch: 0 },
            Self::Evaluate { kind, batch, .. } => Stage::Evaluate { kind, batch },
            Self::Restore => Stage::Restore,
            Self::Write => Stage::Write,
            Self::Finished { .. } => Stage::Finished,
        }
    }
}

/// The results that a task had when it was saved, without the times of its run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedResults {
    pub losses: Vec<f64>,
    pub initial: Option<SavedEvaluation>,
    /// The tasks that computed that, if it was not this one alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub initial_by: Vec<String>,
    pub validation: Option<SavedEvaluation>,
    pub test: Option<SavedEvaluation>,
    pub periodic: Vec<(usize, SavedEvaluation)>,
    pub best: Option<(usize, SavedEvaluation)>,
}

/// All that a task's bits depend on, on one build and one processor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// The hardware: a task stays on one kind of device.
    pub backend: String,
    /// Other settings of devices that decide bits, such as a precision of products.
    pub config: String,
    pub float: String,
    /// SHA-256 of what the chain says of its architecture.
    pub architecture: String,
    /// True if the optimizer's steps are the host's to the bit.
    pub exact: bool,
    pub spec: TrainSpec,
    pub train: Option<DataIdentity>,
    pub validation: Option<DataIdentity>,
    pub test: Option<DataIdentity>,
    pub initial_validation: bool,
}

/// A dataset by its length and its items: all of them, or as many as are hashed at most, evenly spread.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DataIdentity {
    pub items: usize,
    pub sha256: String,
}

impl Identity {
    /// Refuses a checkpoint, whose identity this is, for a task of another identity.
    pub(crate) fn check(&self, path: &Path, task: &Self) -> Result<(), CheckpointError> {
        let now: HashMap<String, String> = task.properties().into_iter().collect();
        let now = |what: &String| now.get(what).cloned().unwrap_or_default();
        match self.properties().into_iter().find(|(what, saved)| *saved != now(what)) {
            Some((what, found)) => {
                let expected = now(&what);
                Err(CheckpointError::Other { path: path.to_owned(), what, found, expected })
            }
            None => Ok(()),
        }
    }

    /// The same for a task that is forked where that checkpoint's stood: what it was trained with until then may be other
    /// than what it will be trained with.
    pub(crate) fn check_fork(&self, path: &Path, task: &Self) -> Result<(), CheckpointError> {
        let spec = forked(&self.spec, &task.spec);
        Self { spec, initial_validation: task.initial_validation, ..self.clone() }.check(path, task)
    }

    /// All of it in words, by name.
    fn properties(&self) -> Vec<(String, String)> {
        let config = if self.config.is_empty() { "the default" } else { &self.config };
        let exact = if self.exact { "the host's" } else { "the device's" };
        let named = [
            ("device", self.backend.clone()),
            ("precision", config.to_owned()),
            ("type of floats", self.float.clone()),
            ("architecture", short(&self.architecture)),
            ("bits of optimizer steps", exact.to_owned()),
            ("training data", described(self.train.as_ref())),
            ("validation data", described(self.validation.as_ref())),
            ("test data", described(self.test.as_ref())),
            ("validation before training", self.initial_validation.to_string()),
        ];
        let mut spec = serde_json::to_value(&self.spec).unwrap_or_default();
        // The order in which settings are read and written is no difference.
        spec.sort_all_objects();
        let spec = spec.as_object().into_iter().flatten();
        let spec = spec.map(|(name, value)| (name.replace('_', " "), value.to_string()));
        named.into_iter().map(|(name, value)| (name.to_owned(), value)).chain(spec).collect()
    }
}

/// The spec of a fork, with what a fork cannot change as it was.
fn forked(saved: &TrainSpec, own: &TrainSpec) -> TrainSpec {
    let mut spec = TrainSpec {
        schedule: own.schedule.clone(),
        decay: own.decay,
        clip: own.clip,
        length: own.length,
        patience: own.patience,
        ..saved.clone()
    };
    // The moments mean the same, and the best weights are there or are not.
    let (kind, moments) = (saved.optimizer.name(), saved.optimizer.moments());
    if (kind, moments) == (own.optimizer.name(), own.optimizer.moments()) {
        spec.optimizer = own.optimizer.clone();
    }
    if saved.keeps_best() == own.keeps_best() {
        (spec.eval_every, spec.eval_at) = (own.eval_every, own.eval_at.clone());
    }
    spec
}

/// What a task of the spec `own` cannot have other than the one that it is [forked](crate::TrainTask::fork_from) from, if it
/// has: the name, and the values of both as JSON.
pub fn fork_obstacle(saved: &TrainSpec, own: &TrainSpec) -> Option<(String, String, String)> {
    let fields = |spec: &TrainSpec| serde_json::to_value(spec).unwrap_or_default();
    let (saved, own) = (fields(&forked(saved, own)), fields(own));
    let differs = saved.as_object()?.iter().find(|(name, value)| own[name.as_str()] != **value);
    differs.map(|(name, value)| (name.replace('_', " "), value.to_string(), own[name.as_str()].to_string()))
}

/// The beginning of a hash.
fn short(hash: &str) -> String {
    format!("{}..", hash.get(..16).unwrap_or(hash))
}

fn described(data: Option<&DataIdentity>) -> String {
    match data {
        Some(data) => format!("{} items ({})", data.items, short(&data.sha256)),
        None => "none".to_owned(),
    }
}
