//! The tiers that masters live in.
//!
//! A store keeps each buffer of parameters with its optimizer moments, and holds one rule above all: nobody
//! reads a buffer while it is written. Readers get shared bytes without a copy and count for as long as any
//! clone or slice of them lives; a writer gets the masters themselves, once the count is zero.
//!
//! It may touch memory and links. It never decides what moves when, and never names a card.

use crate::Reservation;
use hydra_core::DeviceBytes;
use std::ops::Range;

mod buffer;
#[cfg(test)]
pub(crate) mod conformance;
mod device_resident;
mod disk;
mod dram;
mod error;
mod scratch;
mod shared;
mod slots;

pub use buffer::{
    Masters, MastersPart, ParamBufferId, ParamBufferKind, ParamBufferView, ParamBufferWriter, Writer,
};
pub use device_resident::{DeviceMasters, DeviceNarrow, DeviceResidentStore, DeviceWriter};
pub use disk::DiskStore;
pub use dram::DramStore;
pub use error::SpillError;
pub use shared::{Hashes, SharedStore};

/// Elements of a buffer that pass through host memory at once where its masters live elsewhere and are not needed whole.
pub const PIECE: usize = 1 << 18;

/// A place that keeps buffers.
///
/// It is a port: behind it stand memory of the host, files, and the memory of a device. Whatever the tier, a read never
/// sees half of a write, a version names one content, and a buffer that is in use is refused with
/// [`SpillError::BufferBusy`] instead of waited for, because who waits is the scheduler's to decide.
pub trait TierStore: Send + Sync {
    /// Takes a buffer in, at version 0; moments that are empty are zeros. The reservation is the store's until the buffer is
    /// removed.
    ///
    /// # Errors
    /// [`SpillError::BufferExists`], [`SpillError::MomentLength`], [`SpillError::NarrowLength`], or
    /// [`SpillError::ReservationTooSmall`] if the reservation does not cover parameters and moments.
    fn insert(&self, id: ParamBufferId, masters: Masters, reservation: Reservation)
    -> Result<(), SpillError>;

    /// The parameters as they move, to be read: rounded where the masters have them so. Several readers at once
    /// are welcome.
    ///
    /// # Errors
    /// [`SpillError::BufferMissing`], or [`SpillError::BufferBusy`] while a writer is out.
    fn read(&self, id: ParamBufferId) -> Result<ParamBufferView, SpillError>;

    /// The masters' parameters, `f32`, to be read; else as [`read`](Self::read).
    /// Errors are those of [`read`](Self::read).
    fn read_masters(&self, id: ParamBufferId) -> Result<ParamBufferView, SpillError>;

    /// Some elements of a part of the masters, `f32`, to be read; else as [`read`](Self::read).
    /// Errors are those of [`read`](Self::read).
    ///
    /// # Panics
    /// If the buffer has no such part or elements.
    fn read_part(
        &self,
        id: ParamBufferId,
        part: MastersPart,
        elements: Range<usize>,
    ) -> Result<ParamBufferView, SpillError>;

    /// The masters, to be written in place.
    ///
    /// # Errors
    /// [`SpillError::BufferMissing`], or [`SpillError::BufferBusy`] while anyone reads or writes the buffer.
    fn write(&self, id: ParamBufferId) -> Result<ParamBufferWriter, SpillError>;

    /// Hands the masters to `rewrite`, to be written in place, and commits them: whole, or where they live elsewhere piece
    /// after piece of [`PIECE`] elements, so that only one is in host memory. With each comes the index of its first
    /// element. Where it fails, what was written stays; a buffer of which a part alone could be put back is lost.
    ///
    /// # Errors
    /// Those of [`write`](Self::write), and that of `rewrite`.
    fn write_pieces(&self, id: ParamBufferId, rewrite: &mut Rewrite<'_>) -> Result<(), SpillError> {
        rewrite_whole(self.write(id)?, rewrite)
    }

    /// Writes some elements of a part of the masters, from `start` on, and commits them; what moves is rounded anew. They are
    /// whole pieces of [`PIECE`] elements, or reach to the end. Errors are those of [`write`](Self::write).
    ///
    /// # Panics
    /// If the buffer has no such part or elements, or they are no whole pieces where that matters.
    fn write_part(
        &self,
        id: ParamBufferId,
        part: MastersPart,
        start: usize,
        values: &[f32],
    ) -> Result<(), SpillError> {
        overwrite(self.write(id)?, part, start, values)
    }

    /// How many writes were committed; while a writer is out, without that one.
    ///
    /// # Errors
    /// [`SpillError::BufferMissing`].
    fn version(&self, id: ParamBufferId) -> Result<u64, SpillError>;

    /// Gives a buffer up and releases its reservation.
    ///
    /// # Errors
    /// [`SpillError::BufferMissing`], or [`SpillError::BufferBusy`] while anyone reads or writes the buffer.
    fn remove(&self, id: ParamBufferId) -> Result<Masters, SpillError>;

    /// Gives a buffer up, as [`remove`](Self::remove), when nobody wants what was in it.
    /// Errors are those of [`remove`](Self::remove).
    fn discard(&self, id: ParamBufferId) -> Result<(), SpillError> {
        self.remove(id).map(drop)
    }

    /// The buffer that is read under this name: itself, unless tasks have it in common ([`SharedStore`]). Copies of one buffer
    /// are copies for all of its names.
    fn identity(&self, id: ParamBufferId) -> ParamBufferId {
        id
    }

    /// The parameters of a buffer that lives on a device, to be read there, and how many writes were committed;
    /// `None` if it lives on the host. Whoever has them is a reader. Errors are those of [`read`](Self::read).
    fn on_device(&self, _id: ParamBufferId) -> Result<Option<(DeviceBytes, u64)>, SpillError> {
        Ok(None)
    }

    /// The masters of a buffer that lives on a device, to be stepped there.
    ///
    /// # Errors
    /// As [`write`](Self::write), and [`SpillError::BufferMissing`] if it lives on the host.
    fn write_on_device(&self, id: ParamBufferId) -> Result<DeviceWriter, SpillError> {
        Err(SpillError::BufferMissing { buffer: id })
    }
}

/// What is done with a piece of masters, whose first element has this index.
pub type Rewrite<'a> = dyn FnMut(usize, &mut Masters) -> Result<(), SpillError> + 'a;

/// Writes some elements of masters that are whole in memory.
fn overwrite(
    mut writer: ParamBufferWriter,
    part: MastersPart,
    start: usize,
    values: &[f32],
) -> Result<(), SpillError> {
    writer.part_mut(part)[start..start + values.len()].copy_from_slice(values);
    if part == MastersPart::Params {
        writer.round();
    }
    writer.commit();
    Ok(())
}

/// Rewrites masters that are whole in memory.
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
    if let Some(narrow) = masters.narrow.as_ref().filter(|narrow| narrow.len() != params) {
        return Err(SpillError::NarrowLength { buffer: id, params, found: narrow.len() });
    }
    if let Some(moment) = masters.moments.iter().position(|m| !m.is_empty() && m.len() != params) {
        let found = masters.moments[moment].len();
        return Err(SpillError::MomentLength { buffer: id, params, moment, found });
    }
    covers(reservation, masters.len_bytes())
}

/// Checks that `reservation` is enough for `needed` bytes.
pub(crate) fn covers(reservation: &Reservation, needed: u64) -> Result<(), SpillError> {
    let reserved = reservation.bytes();
    match needed <= reserved {
        true => Ok(()),
        false => {
            Err(SpillError::ReservationTooSmall { needed, reserved, owner: reservation.owner().to_owned() })
        }
    }
}
