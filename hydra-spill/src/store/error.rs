//! Errors of stores and of transfers of buffers.

use super::buffer::ParamBufferId;
use crate::{BudgetError, BufferError, LinkError};
use hydra_core::ByteSize;
use std::io;
use std::path::PathBuf;

/// An error of keeping or moving bytes.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum SpillError {
    /// A budget refused a reservation.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// A link failed to copy.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A link could not be set up: there is no page-locked memory left, or a card's driver has failed.
    #[error(transparent)]
    Setup(Box<dyn std::error::Error + Send + Sync>),
    /// A transition that the double buffer does not allow.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// A buffer is in use, which excludes the requested access.
    #[error("{buffer} is busy: {}", busy(*readers))]
    BufferBusy {
        buffer: ParamBufferId,
        /// The number of live views of it; zero if it is being written.
        readers: usize,
    },
    /// A directory has no space for master weights.
    #[error(
        "no space for {} of master weights in `{}`: free some there, use another directory, or give more host \
         memory",
        ByteSize(*bytes), dir.display()
    )]
    DiskHeadroom {
        dir: PathBuf,
        /// The requested bytes.
        bytes: u64,
        source: io::Error,
    },
    /// Master weights on the disk could not be read or written.
    #[error("{buffer} could not be {done} in `{}`", dir.display())]
    Disk { buffer: ParamBufferId, done: &'static str, dir: PathBuf, source: io::Error },
    /// A file whose values are read in place could not be opened or read.
    #[error("the frozen weights in `{}` could not be read in place", path.display())]
    SourceFile { path: PathBuf, source: io::Error },
    /// A file whose values are read in place is not what it was when its values were first read.
    #[error(
        "`{}` has changed since this run opened it to read frozen weights in place: restore the file, and store other \
         weights under another name",
        path.display()
    )]
    SourceChanged { path: PathBuf },
    /// A buffer that is read in place has no bytes in the store.
    #[error("{buffer} is read in place: read it from its files")]
    InPlace { buffer: ParamBufferId },
    /// The new master weights of a buffer could not be put back, and the old ones are lost.
    #[error("{buffer} was lost when it was put back: {problem}")]
    BufferLost { buffer: ParamBufferId, problem: String },
    /// The store does not hold a buffer.
    #[error("{buffer} is not in the store: insert it before use and remove it only after its task has ended")]
    BufferMissing { buffer: ParamBufferId },
    /// The store already holds a buffer with this id.
    #[error("{buffer} is already in the store: remove it before another is inserted with its id")]
    BufferExists { buffer: ParamBufferId },
    /// A buffer to be written or taken is shared with other tasks.
    #[error("{buffer} is shared with other tasks: it can be read and discarded, but not written")]
    BufferShared { buffer: ParamBufferId },
    /// An optimizer moment has another length than the parameters.
    #[error("{buffer} has {params} parameters, but its moment {moment} has {found} elements: pass {params}")]
    MomentLength { buffer: ParamBufferId, params: usize, moment: usize, found: usize },
    /// The rounded parameters differ in number from those that they were rounded from.
    #[error("{buffer} has {params} parameters, but {found} rounded to 16 bits: pass {params}")]
    NarrowLength {
        buffer: ParamBufferId,
        params: usize,
        /// The number of 16-bit elements.
        found: usize,
    },
    /// A reservation does not cover the bytes that it was passed for.
    #[error(
        "the reservation of `{owner}` is {}, at least {} are needed: reserve the bytes of all buffers",
        ByteSize(*reserved), ByteSize(*needed).at_least()
    )]
    ReservationTooSmall {
        /// The required bytes: all that were counted until it no longer sufficed.
        needed: u64,
        reserved: u64,
        owner: String,
    },
    /// A reservation was made in another budget than the one whose bytes it was passed for.
    #[error("the reservation of `{owner}` is in `{found}`, expected one in `{expected}`: reserve it there")]
    ReservationElsewhere { expected: String, found: String, owner: String },
}

fn busy(readers: usize) -> String {
    match readers {
        0 => "it is being written; commit or drop its writer first".to_owned(),
        1 => "1 reader holds it; drop its view first".to_owned(),
        n => format!("{n} readers hold it; drop their views first"),
    }
}
