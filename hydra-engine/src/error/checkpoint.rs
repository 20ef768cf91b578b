//! The errors of checkpoints.

use std::path::PathBuf;

/// The reason why a checkpoint could not be written or used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file could not be read.
    #[error("the checkpoint `{path}` could not be read")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The file could not be written.
    #[error("the checkpoint `{path}` could not be written; an earlier checkpoint is unchanged")]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The file is not a checkpoint, or is truncated.
    #[error("`{path}` is not a checkpoint: {problem}; remove it to start the task from the beginning")]
    NotACheckpoint {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// The file has another version of the format.
    #[error(
        "the checkpoint `{path}` has format version {found}, expected {expected}: resume it with the release that wrote it"
    )]
    Schema {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The supported version.
        expected: u32,
    },
    /// The file was replaced after it had been opened.
    #[error("the checkpoint `{path}` was replaced while it was open: open it again")]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The content has changed since it was written.
    #[error(
        "the checkpoint `{path}` is damaged: its checksum is {found}, expected {expected}; remove it to start \
         the task from the beginning"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The checksum of the content.
        found: String,
        /// The recorded checksum.
        expected: String,
    },
    /// The checkpoint belongs to a task with other results.
    #[error(
        "the checkpoint `{path}` belongs to another task: its {what} is {found}, expected {expected}; resume it with \
         the settings that it was started with"
    )]
    Other {
        /// The file.
        path: PathBuf,
        /// The property that differs.
        what: String,
        /// The value in the checkpoint.
        found: String,
        /// The value of the task.
        expected: String,
    },
}
