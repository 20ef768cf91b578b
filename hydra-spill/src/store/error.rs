//! Errors of stores, and of whatever moves buffers.

use super::buffer::ParamBufferId;
use crate::{BudgetError, BufferError, LinkError};
use hydra_core::ByteSize;
use std::io;
use std::path::PathBuf;

/// Bytes could not be kept or moved.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
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
    /// The double buffer was used out of turn.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// A buffer is in use by someone whom the caller excludes.
    #[error("{buffer} is busy: {}", busy(*readers))]
    BufferBusy {
        buffer: ParamBufferId,
        /// How many views of it are alive; zero if it is being written.
        readers: usize,
    },
    /// A directory has no room for masters.
    #[error(
        "no room could be made for {} of masters in `{}`: free some there, give another directory, or more host \
         memory",
        ByteSize(*bytes), dir.display()
    )]
    DiskHeadroom {
        dir: PathBuf,
        /// The bytes that were asked for.
        bytes: u64,
        source: io::Error,
    },
    /// Masters on the disk could not be read or written.
    #[error("{buffer} could not be {done} in `{}`", dir.display())]
    Disk { buffer: ParamBufferId, done: &'static str, dir: PathBuf, source: io::Error },
    /// The new masters of a buffer could not be put back, and the old ones are gone.
    #[error("{buffer} was lost when it was put back: {problem}")]
    BufferLost { buffer: ParamBufferId, problem: String },
    /// The store does not hold a buffer.
    #[error("{buffer} is not in the store: insert it before use and remove it only after its task has ended")]
    BufferMissing { buffer: ParamBufferId },
    /// The store holds a buffer of that name already.
    #[error("{buffer} is in the store already: remove it before another is inserted in its place")]
    BufferExists { buffer: ParamBufferId },
    /// A buffer is to be written or taken that other tasks have too.
    #[error("{buffer} is shared with other tasks: it can be read, and given up, and never written")]
    BufferShared { buffer: ParamBufferId },
    /// An optimizer moment has another length than the parameters.
    #[error(
        "{buffer} has {params} parameters, but its moment {moment} has {found} elements: give it {params}"
    )]
    MomentLength { buffer: ParamBufferId, params: usize, moment: usize, found: usize },
    /// The parameters that move are not as many as those that they were rounded from.
    #[error(
        "{buffer} has {params} parameters, but {found} of 16 bits to move in their place: give it {params}"
    )]
    NarrowLength {
        buffer: ParamBufferId,
        params: usize,
        /// The elements of those of 16 bits.
        found: usize,
    },
    /// A reservation does not cover the bytes that it was given for.
    #[error(
        "the reservation of `{owner}` is {}, at least {} are needed: reserve what the images take",
        ByteSize(*reserved), ByteSize(*needed).at_least()
    )]
    ReservationTooSmall {
        /// The bytes that are needed: all of those counted until it no longer sufficed.
        needed: u64,
        reserved: u64,
        owner: String,
    },
    /// A reservation was made against another budget than the one whose bytes it was given for.
    #[error("the reservation of `{owner}` is of `{found}`, expected one of `{expected}`: reserve it there")]
    ReservationElsewhere { expected: String, found: String, owner: String },
}

fn busy(readers: usize) -> String {
    match readers {
        0 => "it is being written; commit or drop its writer first".to_owned(),
        1 => "1 reader holds it; drop its view first".to_owned(),
        n => format!("{n} readers hold it; drop their views first"),
    }
}
