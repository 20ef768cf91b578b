//! Trackers: programs of others that draw the losses of runs, and what they read.
//! They may touch run directories, their own files and the network; they read lines that are written, in a thread of theirs.
//! They never keep training waiting, and nothing that they fail at ends a run.

mod crc;
mod figures;
mod mirror;
mod mlflow;
mod tensorboard;

pub(crate) use mirror::{Mirror, Sink};
pub(crate) use mlflow::Mlflow;
pub(crate) use tensorboard::TensorBoard;
