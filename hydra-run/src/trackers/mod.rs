//! Experiment trackers: TensorBoard and MLflow.
//!
//! Trackers use run directories, their own files and the network. Each reads the written lines in a thread of its own. They never
//! block training, and their failures never end a run.

mod crc;
mod figures;
mod mirror;
mod mlflow;
mod tensorboard;

pub(crate) use mirror::{Mirror, Sink};
pub(crate) use mlflow::Mlflow;
pub(crate) use tensorboard::TensorBoard;
