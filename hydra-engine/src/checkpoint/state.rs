//! The state of a task in a checkpoint beside its tensors, as JSON in the file's header.

use crate::error::CheckpointError;
use crate::protocol::{SavedEvaluation, Sums};
use crate::stages::{EvaluationKind, Stage};
use hydra_core::TrainSpec;
use serde::{Deserialize, Serialize};
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
}

impl State {
    /// Returns true if the best masters so far belong to it.
    pub(crate) fn has_best(&self) -> bool {
        let before_the_end = match self.position {
            Position::Train | Position::Restore => true,
            Position::Evaluate { kind, .. } => {
                matches!(kind, EvaluationKind::Initial | EvaluationKind::Periodic)
            }
            Position::Write | Position::Finished { .. } => false,
        };
        before_the_end && self.results.best.is_some()
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
        let pair = |what: &str, of: fn(&Self) -> String| (what.to_owned(), of(self), of(task));
        let mut pairs = vec![
            pair("device", |of| of.backend.clone()),
            pair("precision", |of| {
                if of.config.is_empty() { "the default".to_owned() } else { of.config.clone() }
            }),
            pair("type of floats", |of| of.float.clone()),
            pair("architecture", |of| short(&of.architecture)),
            pair("bits of optimizer steps", |of| {
                if of.exact { "the host's" } else { "the device's" }.to_owned()
            }),
            pair("training data", |of| described(of.train.as_ref())),
            pair("validation data", |of| described(of.validation.as_ref())),
            pair("test data", |of| described(of.test.as_ref())),
            pair("validation before training", |of| of.initial_validation.to_string()),
        ];
        pairs.extend(fields(&self.spec, &task.spec));
        match pairs.into_iter().find(|(_, saved, task)| saved != task) {
            Some((what, found, expected)) => {
                Err(CheckpointError::Other { path: path.to_owned(), what, found, expected })
            }
            None => Ok(()),
        }
    }
}

/// The fields of two specs, side by side.
fn fields(saved: &TrainSpec, task: &TrainSpec) -> Vec<(String, String, String)> {
    let values = |spec: &TrainSpec| match serde_json::to_value(spec) {
        Ok(serde_json::Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    };
    let task = values(task);
    let pair = |(name, saved): (String, serde_json::Value)| {
        let now = task.get(&name).map(ToString::to_string).unwrap_or_default();
        (name.replace('_', " "), saved.to_string(), now)
    };
    values(saved).into_iter().map(pair).collect()
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
