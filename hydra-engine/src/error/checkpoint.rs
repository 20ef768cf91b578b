//! The errors of checkpoints.

use std::path::PathBuf;

/// The reasons for which a checkpoint could not be written or used.
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
    #[error("the checkpoint `{path}` could not be written; an earlier one stays as it is")]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The file is something else, or was cut off.
    #[error("`{path}` is not a checkpoint: {problem}; remove it, and the task begins anew")]
    NotACheckpoint {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// The file is of another version of the format.
    #[error(
        "the checkpoint `{path}` has format {found}, expected {expected}: resume it with the version that wrote it"
    )]
    Schema {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The version that is read.
        expected: u32,
    },
    /// The file is not the one that was opened.
    #[error("the checkpoint `{path}` was replaced after it had been opened: open it again")]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The content has changed since it was written.
    #[error(
        "the checkpoint `{path}` is damaged: its checksum is {found}, expected {expected}; remove it, and the task \
         begins anew"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The checksum of what is there.
        found: String,
        /// The checksum of what was written.
        expected: String,
    },
    /// The checkpoint is of a task whose results would be others.
    #[error(
        "the checkpoint `{path}` is of another task: its {what} was {found}, and is {expected} now; resume it as it \
         was begun"
    )]
    Other {
        /// The file.
        path: PathBuf,
        /// The property that differs.
        what: String,
        /// The property as it was.
        found: String,
        /// The property as it is.
        expected: String,
    },
}
