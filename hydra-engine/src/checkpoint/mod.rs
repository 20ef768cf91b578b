//! Checkpoints: a task's masters, moments and results as one file, from which training goes on to the same bits.
//!
//! A task is saved where nothing of it is under way: between two minibatches, or two batches of an evaluation. Data order,
//! dropout and learning rate are functions of the spec and the step, so the masters, their moments, the best masters so
//! far and the step are the whole truth.
//!
//! The file is in the safetensors format, so that other programs read the tensors too: `masters/NAME`, `moment1/NAME`,
//! `moment2/NAME` and `best/NAME`, all `F32`. It is replaced as a whole when the next one is complete and on the disk.

mod format;
mod interval;
mod state;

pub(crate) use format::{Part, Reader, Tensors, write};
pub(crate) use interval::{estimated_cost_s, interval_s};
pub use state::fork_obstacle;
pub(crate) use state::{DataIdentity, Identity, Position, SCHEMA, SavedResults, State};

use crate::error::CheckpointError;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The times at which a task is saved; it also is when the run is asked to stop and when it has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckpointEvery {
    /// As often as what was measured allows: after a twentieth of the time that the task has run, which is soon at first,
    /// and at most ten minutes; but so that the checkpoints of all tasks together take less than a hundredth of the time.
    #[default]
    Auto,
    /// After every so many minibatches (at least one).
    Minibatches(usize),
    /// At the first opportunity after so long.
    Time(Duration),
}

/// A checkpoint with a checked header, for [`TrainTask::resume_from`](crate::TrainTask::resume_from).
#[derive(Clone, Debug)]
pub struct Checkpoint {
    path: PathBuf,
    state: State,
    checksum: String,
    /// True if it has weights.
    weights: bool,
}

impl Checkpoint {
    /// Opens a checkpoint that a run wrote.
    ///
    /// # Errors
    /// [`CheckpointError::Read`], [`CheckpointError::NotACheckpoint`], [`CheckpointError::Schema`] or, of a finished
    /// task, [`CheckpointError::Damaged`]; they name the file. Tensors are read when the run begins.
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

    /// Minibatches to train in all.
    pub fn steps(&self) -> usize {
        self.state.steps
    }

    /// The losses on the validation data during training: after how many minibatches, and the loss.
    pub fn evaluations(&self) -> impl Iterator<Item = (usize, f64)> {
        self.state.results.periodic.iter().map(|(step, result)| (*step, result.loss))
    }

    /// Returns true if the task was trained to its end and, if it had a writer, its model written.
    pub fn is_finished(&self) -> bool {
        matches!(self.state.position, Position::Finished { .. })
    }

    /// Returns true if it has the weights of a finished task whose model nobody has written.
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

    pub(crate) fn state(&self) -> &State {
        &self.state
    }
}

/// Makes the directory of a checkpoint, and tries to write a file there.
pub(crate) fn prepare(path: &Path) -> Result<(), CheckpointError> {
    let try_it = || {
        if path.is_dir() || path.file_name().is_none() {
            return Err(std::io::Error::other("it is no name of a file"));
        }
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(dir)?;
        tempfile::tempfile_in(dir).map(drop)
    };
    try_it().map_err(|source| CheckpointError::Write { path: path.to_owned(), source })
}
