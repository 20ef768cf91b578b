//! What a checkpoint says of a task beside its tensors, as JSON in the file's header.

use super::CheckpointError;
use crate::cursor::Stage;
use crate::device::{DeviceKind, LogicalDevice};
use crate::error::{EngineError, guarded};
use crate::evaluation::{KeptEvaluation, Sums};
use crate::model::Model;
use crate::observer::EvaluationKind;
use crate::placement::Placement;
use crate::task::TrainTask;
use crate::weights::hexadecimal;
use hydra_core::{Dataset, TrainSpec, gather_items};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The version of the format.
pub(super) const SCHEMA: u32 = 1;

/// Where a task stands between two minibatches or two batches of an evaluation, and what it has to show.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    pub schema: u32,
    pub identity: Identity,
    /// Minibatches trained, and those to train in all.
    pub step: usize,
    pub steps: usize,
    pub position: Position,
    pub results: KeptResults,
}

impl State {
    /// Of a task at rest.
    pub(crate) fn of(model: &Model, identity: Identity) -> Self {
        let position = match model.cursor.stage() {
            Stage::Evaluate { kind, batch } => {
                Position::Evaluate { kind, batch, sums: model.evaluation.clone() }
            }
            Stage::Restore => Position::Restore,
            Stage::Write => Position::Write,
            _ => Position::Train,
        };
        Self {
            schema: SCHEMA,
            identity,
            step: model.cursor.step(),
            steps: model.cursor.program().steps,
            position,
            results: KeptResults::from(&model.results),
        }
    }

    /// Whether the best masters so far belong to it.
    pub(crate) fn has_best(&self) -> bool {
        let before = |kind| matches!(kind, EvaluationKind::Initial | EvaluationKind::Periodic);
        let there = match self.position {
            Position::Train | Position::Restore => true,
            Position::Evaluate { kind, .. } => before(kind),
            Position::Write | Position::Finished { .. } => false,
        };
        there && self.results.best.is_some()
    }

    /// Moments of each trained parameter that are written: nobody steps a task that was trained to its end.
    pub(super) fn moments(&self) -> usize {
        match self.position {
            Position::Write | Position::Finished { .. } => 0,
            _ => self.identity.moments(),
        }
    }
}

/// What a task does next.
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

/// The results that a task had when it was kept. Times are of one run and not kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct KeptResults {
    pub losses: Vec<f64>,
    pub initial: Option<KeptEvaluation>,
    pub validation: Option<KeptEvaluation>,
    pub test: Option<KeptEvaluation>,
    pub periodic: Vec<(usize, KeptEvaluation)>,
    pub best: Option<(usize, KeptEvaluation)>,
}

/// All that a task's bits depend on, on one build and one processor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// What computes: a task stays on one kind of device.
    backend: String,
    /// What else decides how devices compute, such as a precision of products.
    config: String,
    float: String,
    /// SHA-256 of what the chain says of its architecture.
    architecture: String,
    /// Whether the optimizer's steps are the host's to the bit.
    exact: bool,
    spec: TrainSpec,
    train: Option<DataIdentity>,
    validation: Option<DataIdentity>,
    test: Option<DataIdentity>,
    initial_validation: bool,
}

/// A dataset by its length and its items: all of them up to [`HASHED_ITEMS`], and as many, evenly spread, of more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct DataIdentity {
    items: usize,
    sha256: String,
}

const HASHED_ITEMS: usize = 1 << 18;
/// Items that are read at once.
const HASHED_TOGETHER: usize = 8;

impl DataIdentity {
    fn of(data: &dyn Dataset) -> Result<Self, EngineError> {
        let items = data.len();
        let hashed: Vec<usize> = match items <= HASHED_ITEMS {
            true => (0..items).collect(),
            false => (0..HASHED_ITEMS)
                .map(|i| (i as u128 * items as u128 / HASHED_ITEMS as u128) as usize)
                .collect(),
        };
        let mut hash = Sha256::new();
        for some in hashed.chunks(HASHED_TOGETHER) {
            let batch = guarded("reading a batch", || Ok(gather_items(data, some)?))?;
            for part in batch.inputs.parts.iter().chain(&batch.targets.parts) {
                hash.update(format!("{:?}{:?}", part.dtype, part.shape));
                hash.update(&part.bytes);
            }
        }
        Ok(Self { items, sha256: hexadecimal(hash) })
    }
}

/// The identities of a run's tasks. Datasets that tasks share are read once.
#[derive(Default)]
pub(crate) struct Identities {
    data: Vec<(Arc<dyn Dataset>, DataIdentity)>,
}

impl Identities {
    fn of_data(&mut self, data: &Arc<dyn Dataset>) -> Result<DataIdentity, EngineError> {
        let same = |known: &Arc<dyn Dataset>| std::ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(data));
        if let Some((_, identity)) = self.data.iter().find(|(known, _)| same(known)) {
            return Ok(identity.clone());
        }
        let identity = DataIdentity::of(data.as_ref())?;
        self.data.push((data.clone(), identity.clone()));
        Ok(identity)
    }

    /// The identity of a task on such a device.
    ///
    /// # Errors
    /// Data that cannot be read.
    pub(crate) fn of(
        &mut self,
        task: &TrainTask,
        device: &LogicalDevice,
        config: &str,
        placement: &Placement,
    ) -> Result<Identity, EngineError> {
        let mut data = |data: Option<&Arc<dyn Dataset>>| data.map(|data| self.of_data(data)).transpose();
        Ok(Identity {
            backend: backend(device),
            config: config.to_owned(),
            float: task.chain.float_type().to_string(),
            architecture: hexadecimal(Sha256::new_with_prefix(task.chain.architecture())),
            exact: placement.exact,
            spec: task.spec.clone(),
            train: data(Some(&task.train))?,
            validation: data(task.validation.as_ref())?,
            test: data(task.test.as_ref())?,
            initial_validation: task.initial_validation,
        })
    }
}

impl Identity {
    /// The moments of the task's optimizer.
    pub(super) fn moments(&self) -> usize {
        self.spec.optimizer.moments()
    }

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
        match pairs.into_iter().find(|(_, kept, task)| kept != task) {
            Some((what, found, expected)) => {
                Err(CheckpointError::Other { path: path.to_owned(), what, found, expected })
            }
            None => Ok(()),
        }
    }
}

/// The fields of two specs, side by side.
fn fields(kept: &TrainSpec, task: &TrainSpec) -> Vec<(String, String, String)> {
    let values = |spec: &TrainSpec| match serde_json::to_value(spec) {
        Ok(serde_json::Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    };
    let task = values(task);
    let pair = |(name, kept): (String, serde_json::Value)| {
        let now = task.get(&name).map(ToString::to_string).unwrap_or_default();
        (name.replace('_', " "), kept.to_string(), now)
    };
    values(kept).into_iter().map(pair).collect()
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

/// What computes, as far as bits depend on it.
fn backend(device: &LogicalDevice) -> String {
    match device.spec.kind {
        DeviceKind::Cpu => "CPU".to_owned(),
        DeviceKind::Cuda { .. } | DeviceKind::Wgpu { .. } => device.model.clone(),
    }
}
