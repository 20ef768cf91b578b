//! The port to a GPU's driver: page-locked host memory and streams of copies.
//!
//! It is a port. The driver of NVIDIA cards stands behind it, and in tests one without a card, which delays
//! and fails copies at will and watches what memory they touch.

use crate::SpillError;
use std::fmt;
use std::ptr::NonNull;

/// A call of the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum DriverError {
    /// The driver answered with an error.
    #[error("{call} failed with {code}: {meaning}")]
    Call {
        call: &'static str,
        /// The driver's name of the error, such as `CUDA_ERROR_OUT_OF_MEMORY`.
        code: String,
        meaning: String,
    },
    /// There is no driver to call.
    #[error(
        "the driver's library {library} was not found; install the driver of the card, or use CPU devices"
    )]
    Missing { library: &'static str },
}

impl From<DriverError> for SpillError {
    fn from(error: DriverError) -> Self {
        Self::Setup(error.into())
    }
}

/// Memory of a card, in bytes, whoever on the machine uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The bytes that are free.
    pub free: u64,
    /// All there is.
    pub total: u64,
}

/// A card's driver.
///
/// # Safety
/// Memory that [`lock_pages`](Self::lock_pages) returns is the caller's alone: so many bytes that may be read
/// and written until they are given to [`unlock_pages`](Self::unlock_pages).
pub unsafe trait Driver: fmt::Debug + Send + Sync + 'static {
    /// Allocates page-locked host memory, at an address that is a multiple of the page size. Every card of
    /// the machine can copy from it and to it. Its contents are not initialized.
    ///
    /// # Errors
    /// If the system refuses; [`DriverError`] as everywhere here.
    fn lock_pages(&self, bytes: usize) -> Result<NonNull<u8>, DriverError>;

    /// Frees page-locked host memory. It may wait for everything that the card does.
    ///
    /// # Errors
    /// If the driver has failed; the memory then ends with the process.
    ///
    /// # Safety
    /// `memory` came from [`lock_pages`](Self::lock_pages) of this driver, and neither the program nor a
    /// copy uses it from now on.
    unsafe fn unlock_pages(&self, memory: NonNull<u8>) -> Result<(), DriverError>;

    /// Opens a stream of copies that runs beside all other streams and the card's computations. It has
    /// so many marks, numbered from zero.
    ///
    /// # Errors
    /// If the driver has failed.
    fn open_stream(&self, marks: usize) -> Result<Box<dyn CopyStream>, DriverError>;

    /// The card's memory as it is now.
    ///
    /// # Errors
    /// If the driver has failed.
    fn memory(&self) -> Result<DeviceMemory, DriverError>;
}

/// Copies that run one after another, later than they are asked for.
///
/// # Safety
/// Once [`wait`](Self::wait) has succeeded no copy before the mark, and once [`drain`](Self::drain) has
/// returned in any way no copy at all, touches memory any more. Dropping a stream drains it.
pub unsafe trait CopyStream: Send {
    /// Enqueues a copy to the address `to` of the card.
    ///
    /// # Errors
    /// If the copy was not enqueued. A copy that fails later is reported by a later call.
    ///
    /// # Safety
    /// `from` is page-locked and can be read, `to` is memory of this driver's card, both for `bytes` bytes,
    /// until the copy is over; until then nobody writes the one or uses the other.
    unsafe fn upload(&mut self, from: *const u8, to: u64, bytes: usize) -> Result<(), DriverError>;

    /// Enqueues a copy from the address `from` of the card.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    ///
    /// # Safety
    /// As [`upload`](Self::upload), with the roles changed: nobody uses `to` until the copy is over.
    unsafe fn download(&mut self, from: u64, to: *mut u8, bytes: usize) -> Result<(), DriverError>;

    /// Sets a mark behind everything that was enqueued so far; where it stood before is forgotten.
    ///
    /// # Errors
    /// If the driver has failed; the mark then stands anywhere.
    ///
    /// # Panics
    /// If the stream has no such mark.
    fn mark(&mut self, mark: usize) -> Result<(), DriverError>;

    /// Sleeps until everything before a mark is over; at once if it was never set.
    ///
    /// # Errors
    /// If the driver or a copy has failed.
    ///
    /// # Panics
    /// If the stream has no such mark.
    fn wait(&mut self, mark: usize) -> Result<(), DriverError>;

    /// Waits until everything that was enqueued is over. After an error it is over too: the card has then
    /// dropped what it had to do.
    ///
    /// # Errors
    /// If the driver or a copy has failed.
    fn drain(&mut self) -> Result<(), DriverError>;
}
