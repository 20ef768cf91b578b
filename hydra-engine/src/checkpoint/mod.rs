//! Checkpoints: a task's master weights, moments and results in one file. A resumed task gives the same bits as an
//! uninterrupted one.
//!
//! A task is saved at rest: between two minibatches or two batches of an evaluation. Data order, dropout and learning
//! rate are functions of the spec and the step, so master weights, moments, best weights and the step are the
//! complete state.
//!
//! The file is in the safetensors format, so that other programs can read the tensors: `masters/NAME`,
//! `moment1/NAME`, `moment2/NAME` and `best/NAME`, all `F32`. It is replaced atomically once the next one is complete
//! and on the disk.

mod format;
mod interval;
mod state;

pub(crate) use format::{Reader, TensorRole, Tensors, write};
pub(crate) use interval::{estimated_cost_s, interval_s};
pub use state::fork_obstacle;
pub(crate) use state::{DataIdentity, Identity, Position, SCHEMA, SavedResults, TaskAtRest};

use crate::error::CheckpointError;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The times at which a task is saved, in addition to a requested stop and the end of the task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckpointEvery {
    /// After a twentieth of the task's run time, at most ten minutes, but rarely enough that the checkpoints of all
    /// tasks together take less than a hundredth of the time.
    #[default]
    Auto,
    /// After this many minibatches (at least one).
    Minibatches(usize),
    /// At the first opportunity after this duration.
    Time(Duration),
}

/// A checkpoint with a verified header, for [`TrainTask::resume_from`](crate::TrainTask::resume_from).
#[derive(Clone, Debug)]
pub struct Checkpoint {
    path: PathBuf,
    state: TaskAtRest,
    checksum: String,
    /// True if it has weights.
    weights: bool,
}

impl Checkpoint {
    /// Opens a checkpoint that a run wrote. Tensors are read when the run starts.
    ///
    /// # Errors
    /// [`CheckpointError::Read`], [`CheckpointError::NotACheckpoint`], [`CheckpointError::Schema`] or, for a finished
    /// task, [`CheckpointError::Damaged`]; they name the file.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, CheckpointError> {
        let path = path.into();
        let reader = Reader::open(&path)?;
        let (checksum, weights) = (reader.checksum.clone(), reader.has_tensors());
        Ok(Self { path, state: reader.into_state()?, checksum, weights })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Minibatches trained.
    pub fn step(&self) -> usize {
        self.state.step
    }

    /// Minibatches to train in total.
    pub fn steps(&self) -> usize {
        self.state.steps
    }

    /// The validations during training: minibatches trained, and the figure by which they are compared
    /// ([`Evaluation::cost`](crate::Evaluation::cost)).
    pub fn evaluations(&self) -> impl Iterator<Item = (usize, f64)> {
        self.state.results.periodic.iter().map(|(step, result)| (*step, result.cost()))
    }

    /// Returns true if the task was trained to its end and, if it had a writer, its model was written.
    pub fn is_finished(&self) -> bool {
        matches!(self.state.position, Position::Finished { .. })
    }

    /// Returns true if it has the weights of a finished task whose model was not written.
    pub(crate) fn is_unwritten(&self) -> bool {
        self.weights && matches!(self.state.position, Position::Finished { dir: None, .. })
    }

    /// Opens the file again, to read the tensors.
    pub(crate) fn reader(&self) -> Result<Reader, CheckpointError> {
        let reader = Reader::open(&self.path)?;
        match reader.checksum == self.checksum {
            true => Ok(reader),
            false => Err(CheckpointError::Changed { path: self.path.clone() }),
        }
    }

    pub(crate) fn state(&self) -> &TaskAtRest {
        &self.state
    }
}

/// Creates the directory of a checkpoint, and tests that a file can be written there.
pub(crate) fn prepare(path: &Path) -> Result<(), CheckpointError> {
    let try_it = || {
        if path.is_dir() || path.file_name().is_none() {
            return Err(std::io::Error::other("the path does not end in a file name"));
        }
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(dir)?;
        tempfile::tempfile_in(dir).map(drop)
    };
    try_it().map_err(|source| CheckpointError::Write { path: path.to_owned(), source })
}
