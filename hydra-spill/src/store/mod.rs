//! The tiers that masters live in.
//!
//! A store keeps each image of parameters with its optimizer moments, and holds one rule above all: nobody
//! reads an image while it is written. Readers get shared bytes without a copy and count for as long as any
//! clone or slice of them lives; a writer gets the masters themselves, once the count is zero.
//!
//! It may touch memory and links. It never decides what moves when, and never names a card.

use crate::Reservation;
use hydra_core::DeviceBytes;
use std::ops::Range;

#[cfg(test)]
pub(crate) mod conformance;
mod device_home;
mod disk;
mod dram;
mod error;
mod image;
mod scratch;
mod shared;
mod slots;

pub use device_home::{DeviceHomeStore, DeviceMasters, DeviceNarrow, DeviceWriter};
pub use disk::DiskStore;
pub use dram::DramStore;
pub use error::SpillError;
pub use image::{ImageId, ImageKind, ImageView, ImageWriter, Masters, MastersPart, Writer};
pub use shared::{Hashes, SharedStore};

/// Elements of an image that pass through host memory at once where its masters live elsewhere and are not needed whole.
pub const PIECE: usize = 1 << 18;

/// A place that keeps images.
///
/// It is a port: behind it stand memory of the host, files, and the memory of a device. Whatever the tier, a read never
/// sees half of a write, a version names one content, and an image that is in use is refused with
/// [`SpillError::ImageBusy`] instead of waited for, because who waits is the scheduler's to decide.
pub trait TierStore: Send + Sync {
    /// Takes an image in, at version 0; moments that are empty are zeros. The reservation is the store's until the image is
    /// removed.
    ///
    /// # Errors
    /// [`SpillError::ImageExists`], [`SpillError::MomentLength`], [`SpillError::NarrowLength`], or
    /// [`SpillError::ReservationTooSmall`] if the reservation does not cover parameters and moments.
    fn insert(&self, id: ImageId, masters: Masters, reservation: Reservation) -> Result<(), SpillError>;

    /// The parameters as they move, to be read: rounded where the masters have them so. Several readers at once
    /// are welcome.
    ///
    /// # Errors
    /// [`SpillError::ImageMissing`], or [`SpillError::ImageBusy`] while a writer is out.
    fn read(&self, id: ImageId) -> Result<ImageView, SpillError>;

    /// The masters' parameters, `f32`, to be read; else as [`read`](Self::read).
    /// Errors are those of [`read`](Self::read).
    fn read_masters(&self, id: ImageId) -> Result<ImageView, SpillError>;

    /// Some elements of a part of the masters, `f32`, to be read; else as [`read`](Self::read).
    /// Errors are those of [`read`](Self::read).
    ///
    /// # Panics
    /// If the image has no such part or elements.
    fn read_part(
        &self,
        id: ImageId,
        part: MastersPart,
        elements: Range<usize>,
    ) -> Result<ImageView, SpillError>;

    /// The masters, to be written in place.
    ///
    /// # Errors
    /// [`SpillError::ImageMissing`], or [`SpillError::ImageBusy`] while anyone reads or writes the image.
    fn write(&self, id: ImageId) -> Result<ImageWriter, SpillError>;

    /// Hands the masters to `rewrite`, to be written in place, and commits them: whole, or where they live elsewhere piece
    /// after piece of [`PIECE`] elements, so that only one is in host memory. With each comes the index of its first
    /// element. Where it fails, what was written stays; an image of which a part alone could be put back is lost.
    ///
    /// # Errors
    /// Those of [`write`](Self::write), and that of `rewrite`.
    fn write_pieces(&self, id: ImageId, rewrite: &mut Rewrite<'_>) -> Result<(), SpillError> {
        rewrite_whole(self.write(id)?, rewrite)
    }

    /// Writes some elements of a part of the masters, from `start` on, and commits them; what moves is rounded anew. They are
    /// whole pieces of [`PIECE`] elements, or reach to the end. Errors are those of [`write`](Self::write).
    ///
    /// # Panics
    /// If the image has no such part or elements, or they are no whole pieces where that matters.
    fn write_part(
        &self,
        id: ImageId,
        part: MastersPart,
        start: usize,
        values: &[f32],
    ) -> Result<(), SpillError> {
        overwrite(self.write(id)?, part, start, values)
    }

    /// How many writes were committed; while a writer is out, without that one.
    ///
    /// # Errors
    /// [`SpillError::ImageMissing`].
    fn version(&self, id: ImageId) -> Result<u64, SpillError>;

    /// Gives an image up and releases its reservation.
    ///
    /// # Errors
    /// [`SpillError::ImageMissing`], or [`SpillError::ImageBusy`] while anyone reads or writes the image.
    fn remove(&self, id: ImageId) -> Result<Masters, SpillError>;

    /// Gives an image up, as [`remove`](Self::remove), when nobody wants what was in it.
    /// Errors are those of [`remove`](Self::remove).
    fn discard(&self, id: ImageId) -> Result<(), SpillError> {
        self.remove(id).map(drop)
    }

    /// The image that is read under this name: itself, unless tasks have it in common ([`SharedStore`]). Copies of one image
    /// are copies for all of its names.
    fn identity(&self, id: ImageId) -> ImageId {
        id
    }

    /// The parameters of an image that lives on a device, to be read there, and how many writes were committed;
    /// `None` if it lives on the host. Whoever has them is a reader. Errors are those of [`read`](Self::read).
    fn on_device(&self, _id: ImageId) -> Result<Option<(DeviceBytes, u64)>, SpillError> {
        Ok(None)
    }

    /// The masters of an image that lives on a device, to be stepped there.
    ///
    /// # Errors
    /// As [`write`](Self::write), and [`SpillError::ImageMissing`] if it lives on the host.
    fn write_on_device(&self, id: ImageId) -> Result<DeviceWriter, SpillError> {
        Err(SpillError::ImageMissing { image: id })
    }
}

/// What is done with a piece of masters, whose first element has this index.
pub type Rewrite<'a> = dyn FnMut(usize, &mut Masters) -> Result<(), SpillError> + 'a;

/// Writes some elements of masters that are whole in memory.
fn overwrite(
    mut writer: ImageWriter,
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
fn rewrite_whole(mut writer: ImageWriter, rewrite: &mut Rewrite<'_>) -> Result<(), SpillError> {
    rewrite(0, &mut writer)?;
    writer.commit();
    Ok(())
}

/// Checks that the moments are as long as the parameters and that `reservation` covers both.
pub(crate) fn check(id: ImageId, masters: &Masters, reservation: &Reservation) -> Result<(), SpillError> {
    let params = masters.params.len();
    if let Some(narrow) = masters.narrow.as_ref().filter(|narrow| narrow.len() != params) {
        return Err(SpillError::NarrowLength { image: id, params, found: narrow.len() });
    }
    if let Some(moment) = masters.moments.iter().position(|m| !m.is_empty() && m.len() != params) {
        let found = masters.moments[moment].len();
        return Err(SpillError::MomentLength { image: id, params, moment, found });
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
