//! The tiers of master weights.
//!
//! A store keeps each parameter buffer with its optimizer moments. Its main invariant is that a buffer is
//! never read while it is written. Readers get shared bytes without a copy and count for as long as any clone
//! or slice of them lives; a writer gets the master weights themselves, once the count is zero.
//!
//! This module may use memory and links. It never decides what moves when, and does not depend on cards.

use crate::Reservation;
#[cfg(doc)]
use hydra_core::optimizer::MomentLayout;
use hydra_core::{BUFFER_PART, DeviceBytes};
use std::ops::Range;
use std::sync::Arc;

mod buffer;
#[cfg(test)]
pub(crate) mod conformance;
mod device_resident;
mod disk;
mod dram;
mod error;
mod in_place;
mod scratch;
mod shared;
mod slots;

pub use buffer::{
    Masters, MastersPart, Moment, ParamBufferId, ParamBufferKind, ParamBufferView, ParamBufferWriter, ViewOf,
    Writer,
};
pub use device_resident::{DeviceMasters, DeviceMoment, DeviceNarrow, DeviceResidentStore, DeviceWriter};
pub use disk::DiskStore;
pub use dram::DramStore;
pub use error::SpillError;
pub use in_place::{InPlaceParam, InPlaceParams, SourceFile};
pub use shared::{Files, Hashes, SharedStore};

/// The number of elements that pass through host memory at a time if the master weights are kept elsewhere
/// and are not needed whole.
pub const PIECE: usize = BUFFER_PART;

/// Returns the elements of the pieces of a buffer of `len` elements that contain some of these `elements`: what a store on the
/// disk reads for them, because it verifies the checksums of whole pieces.
pub fn covering(elements: &Range<usize>, len: usize, piece: usize) -> Range<usize> {
    elements.start / piece * piece..elements.end.next_multiple_of(piece).min(len)
}

/// A store of buffers.
///
/// Implementations keep them in host memory, in files or in the memory of a device. In every tier, a read
/// never sees a partial write, a version identifies one content, and access to a buffer in use is refused
/// with [`SpillError::BufferBusy`] instead of blocking, because the scheduler decides what waits.
pub trait TierStore: Send + Sync {
    /// Inserts a buffer at version 0; empty moments become zeros. The store keeps the reservation until the
    /// buffer is removed.
    ///
    /// # Errors
    /// [`SpillError::BufferExists`], [`SpillError::MomentLength`], [`SpillError::NarrowLength`], or
    /// [`SpillError::ReservationTooSmall`] if the reservation does not cover parameters and moments.
    fn insert(&self, id: ParamBufferId, masters: Masters, reservation: Reservation)
    -> Result<(), SpillError>;

    /// Reads a part of a buffer; the methods below name each. Concurrent readers are allowed. Errors are those of
    /// [`read`](Self::read).
    ///
    /// # Panics
    /// If the buffer has no such part or elements.
    fn view(&self, id: ParamBufferId, of: ViewOf) -> Result<ParamBufferView, SpillError>;

    /// Reads the parameters as they are promoted: rounded if the master weights have a rounded copy.
    /// Concurrent readers are allowed.
    ///
    /// # Errors
    /// [`SpillError::BufferMissing`], or [`SpillError::BufferBusy`] while a writer is out.
    fn read(&self, id: ParamBufferId) -> Result<ParamBufferView, SpillError> {
        self.view(id, ViewOf::Promoted(None))
    }

    /// Reads the parameters of the master weights, `f32`; otherwise like [`read`](Self::read). Errors are
    /// those of [`read`](Self::read).
    fn read_masters(&self, id: ParamBufferId) -> Result<ParamBufferView, SpillError> {
        self.view(id, ViewOf::Masters(MastersPart::Params, None))
    }

    /// Reads some elements of a part of the master weights: `f32`, or those [bytes](MomentLayout::bytes_of) of a moment;
    /// otherwise like [`read`](Self::read). Errors are those of [`read`](Self::read).
    ///
    /// # Panics
    /// If the buffer has no such part or elements.
    fn read_part(
        &self,
        id: ParamBufferId,
        part: MastersPart,
        elements: Range<usize>,
    ) -> Result<ParamBufferView, SpillError> {
        self.view(id, ViewOf::Masters(part, Some(elements)))
    }

    /// Reads some elements of the parameters as they are promoted, of `each` bytes; otherwise like [`read`](Self::read).
    /// Errors are those of [`read`](Self::read).
    ///
    /// # Panics
    /// If the buffer has no such elements.
    fn read_promoted(
        &self,
        id: ParamBufferId,
        elements: Range<usize>,
        each: usize,
    ) -> Result<ParamBufferView, SpillError> {
        self.view(id, ViewOf::Promoted(Some((elements, each))))
    }

    /// Takes the master weights out for writing in place.
    ///
    /// # Errors
    /// [`SpillError::BufferMissing`], or [`SpillError::BufferBusy`] while the buffer is read or written.
    fn write(&self, id: ParamBufferId) -> Result<ParamBufferWriter, SpillError>;

    /// Passes the master weights to `rewrite` for writing in place, and commits them: whole, or, if they are
    /// kept elsewhere, in pieces of [`PIECE`] elements, so that only one is in host memory. Each call
    /// receives the index of the first element. After an error the values written so far are kept; if only a
    /// part of a buffer could be put back, it is lost.
    ///
    /// # Errors
    /// Those of [`write`](Self::write), and that of `rewrite`.
    fn write_pieces(&self, id: ParamBufferId, rewrite: &mut Rewrite<'_>) -> Result<(), SpillError> {
        rewrite_whole(self.write(id)?, rewrite)
    }

    /// Writes the [words](Masters::words_of) of some elements of a part of the master weights, and commits them; the
    /// rounded copy is updated. The elements are whole pieces of [`PIECE`] elements, or extend to the end. Errors are
    /// those of [`write`](Self::write).
    ///
    /// # Panics
    /// If the buffer has no such part or elements, or they are not whole pieces and the store requires them, or there is
    /// another number of words.
    fn write_part(
        &self,
        id: ParamBufferId,
        part: MastersPart,
        elements: Range<usize>,
        words: &[f32],
    ) -> Result<(), SpillError> {
        overwrite(self.write(id)?, part, elements, words)
    }

    /// The number of committed writes, not counting one in progress.
    ///
    /// # Errors
    /// [`SpillError::BufferMissing`].
    fn version(&self, id: ParamBufferId) -> Result<u64, SpillError>;

    /// Removes a buffer and releases its reservation.
    ///
    /// # Errors
    /// [`SpillError::BufferMissing`], or [`SpillError::BufferBusy`] while the buffer is read or written.
    fn remove(&self, id: ParamBufferId) -> Result<Masters, SpillError>;

    /// Removes a buffer, as [`remove`](Self::remove), without returning its content. Errors are those of
    /// [`remove`](Self::remove).
    fn discard(&self, id: ParamBufferId) -> Result<(), SpillError> {
        self.remove(id).map(drop)
    }

    /// Returns the buffer that is read under this id: itself, unless tasks share it ([`SharedStore`]). Copies
    /// of one buffer serve all of its ids.
    fn identity(&self, id: ParamBufferId) -> ParamBufferId {
        id
    }

    /// Returns the files of a buffer that is read in place, and its version. Its parameters cannot be read otherwise: the
    /// reader decides in which memory they go. Errors are those of [`read`](Self::read).
    fn in_place(&self, _id: ParamBufferId) -> Result<Option<(Arc<InPlaceParams>, u64)>, SpillError> {
        Ok(None)
    }

    /// Returns the parameters of a buffer that is resident on a device, for reading there, and the number of
    /// committed writes; `None` if it is on the host. The holder counts as a reader. Errors are those of
    /// [`read`](Self::read).
    fn on_device(&self, _id: ParamBufferId) -> Result<Option<(DeviceBytes, u64)>, SpillError> {
        Ok(None)
    }

    /// Takes out the master weights of a buffer that is resident on a device, for a step there.
    ///
    /// # Errors
    /// Those of [`write`](Self::write), and [`SpillError::BufferMissing`] if it is on the host.
    fn write_on_device(&self, id: ParamBufferId) -> Result<DeviceWriter, SpillError> {
        Err(SpillError::BufferMissing { buffer: id })
    }
}

/// The function applied to a piece of master weights whose first element has this index.
pub type Rewrite<'a> = dyn FnMut(usize, &mut Masters) -> Result<(), SpillError> + 'a;

/// Writes some elements of master weights that are whole in memory.
fn overwrite(
    mut writer: ParamBufferWriter,
    part: MastersPart,
    elements: Range<usize>,
    words: &[f32],
) -> Result<(), SpillError> {
    let range = writer.words_of(part, elements);
    writer.part_mut(part)[range].copy_from_slice(words);
    if part == MastersPart::Params {
        writer.round();
    }
    writer.commit();
    Ok(())
}

/// Rewrites master weights that are whole in memory.
fn rewrite_whole(mut writer: ParamBufferWriter, rewrite: &mut Rewrite<'_>) -> Result<(), SpillError> {
    rewrite(0, &mut writer)?;
    writer.commit();
    Ok(())
}

/// Checks that the moments are as long as the parameters and that `reservation` covers both.
pub(crate) fn check(
    id: ParamBufferId,
    masters: &Masters,
    reservation: &Reservation,
) -> Result<(), SpillError> {
    let params = masters.params.len();
    let is_frozen = params == 0 && masters.moments.is_empty();
    if let Some(narrow) = masters.narrow.as_ref().filter(|narrow| narrow.len() != params && !is_frozen) {
        return Err(SpillError::NarrowLength { buffer: id, params, found: narrow.len() });
    }
    let expected = |of: &Moment| of.layout.words_of(0..params).len();
    let is_uneven = |of: &Moment| !of.words.is_empty() && of.words.len() != expected(of);
    if let Some(moment) = masters.moments.iter().position(is_uneven) {
        let found = masters.moments[moment].words.len();
        return Err(SpillError::MomentLength { buffer: id, params, moment, found });
    }
    covers(reservation, masters.len_bytes())
}

/// Checks that `reservation` covers `needed` bytes.
pub(crate) fn covers(reservation: &Reservation, needed: u64) -> Result<(), SpillError> {
    let reserved = reservation.bytes();
    match needed <= reserved {
        true => Ok(()),
        false => {
            Err(SpillError::ReservationTooSmall { needed, reserved, owner: reservation.owner().to_owned() })
        }
    }
}
