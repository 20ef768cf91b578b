//! The interface to a GPU's driver: page-locked host memory and streams of copies.
//!
//! It is implemented by the driver of NVIDIA cards, and in tests by one without a card, which delays
//! and fails copies on request and checks which memory they access.

use crate::SpillError;
use std::fmt;
use std::ptr::NonNull;

/// A failed driver call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum DriverError {
    /// The driver returned an error.
    #[error("{call} failed with {code}: {meaning}")]
    Call {
        call: &'static str,
        /// The driver's name of the error, such as `CUDA_ERROR_OUT_OF_MEMORY`.
        code: String,
        meaning: String,
    },
    /// No driver is installed.
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

/// Memory of a card in bytes, for all processes on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The free bytes.
    pub free: u64,
    /// The total bytes.
    pub total: u64,
}

/// A card's driver.
///
/// # Safety
/// Memory that [`lock_pages`](Self::lock_pages) returns is owned by the caller: the requested bytes may be
/// read and written until they are passed to [`unlock_pages`](Self::unlock_pages).
pub unsafe trait Driver: fmt::Debug + Send + Sync + 'static {
    /// Allocates page-locked host memory, aligned to the page size. Every card of the machine can copy from
    /// it and to it. Its bytes are initialized, with any values.
    ///
    /// # Errors
    /// If the system refuses; [`DriverError`] as for all calls.
    fn lock_pages(&self, bytes: usize) -> Result<NonNull<u8>, DriverError>;

    /// Frees page-locked host memory. May wait for all work of the card.
    ///
    /// # Errors
    /// If the driver has failed; the memory is then freed with the process.
    ///
    /// # Safety
    /// `memory` came from [`lock_pages`](Self::lock_pages) of this driver, and neither the program nor a
    /// copy uses it any more.
    unsafe fn unlock_pages(&self, memory: NonNull<u8>) -> Result<(), DriverError>;

    /// Opens a stream of copies that runs concurrently with all other streams and the card's computations. It
    /// has `marks` marks, numbered from zero.
    ///
    /// # Errors
    /// If the driver has failed.
    fn open_stream(&self, marks: usize) -> Result<Box<dyn CopyStream>, DriverError>;

    /// The card's current memory.
    ///
    /// # Errors
    /// If the driver has failed.
    fn memory(&self) -> Result<DeviceMemory, DriverError>;
}

/// Copies that run in order, asynchronously.
///
/// # Safety
/// Once [`wait`](Self::wait) has succeeded no copy before the mark, and once [`drain`](Self::drain) has
/// returned, with or without an error, no copy at all accesses memory any more. Dropping a stream drains it.
pub unsafe trait CopyStream: Send {
    /// Enqueues a copy to the address `to` of the card.
    ///
    /// # Errors
    /// If the copy was not enqueued. A copy that fails later is reported by a later call.
    ///
    /// # Safety
    /// `from` is page-locked and readable, `to` is memory of this driver's card, both for `bytes` bytes,
    /// until the copy is over; until then `from` is not written and `to` is not used.
    unsafe fn upload(&mut self, from: *const u8, to: u64, bytes: usize) -> Result<(), DriverError>;

    /// Enqueues a copy from the address `from` of the card.
    ///
    /// # Errors
    /// Those of [`upload`](Self::upload).
    ///
    /// # Safety
    /// That of [`upload`](Self::upload) with exchanged roles: `to` is not used until the copy is over.
    unsafe fn download(&mut self, from: u64, to: *mut u8, bytes: usize) -> Result<(), DriverError>;

    /// Sets a mark after everything that was enqueued so far; its previous position is discarded.
    ///
    /// # Errors
    /// If the driver has failed; the mark's position is then unspecified.
    ///
    /// # Panics
    /// If the stream has no such mark.
    fn mark(&mut self, mark: usize) -> Result<(), DriverError>;

    /// Blocks until everything before a mark is over; returns immediately if it was never set.
    ///
    /// # Errors
    /// If the driver or a copy has failed.
    ///
    /// # Panics
    /// If the stream has no such mark.
    fn wait(&mut self, mark: usize) -> Result<(), DriverError>;

    /// Waits until everything that was enqueued is over. This also holds after an error: the card has then
    /// discarded its pending work.
    ///
    /// # Errors
    /// If the driver or a copy has failed.
    fn drain(&mut self) -> Result<(), DriverError>;
}
