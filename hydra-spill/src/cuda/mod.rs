//! The parts of a link to a GPU: page-locked memory, ranges on the card, and concurrent copies.
//!
//! A [`Driver`] is the interface to the card's driver, `CudaDriver` with the feature `cuda`. A [`PinnedPool`]
//! keeps page-locked host memory within a budget. [`Dma`] copies between it and the card, with a channel for
//! each direction. An arena allocates the ranges of promotions in one allocation on the card. All of them are
//! in every build, because their tests need no card: the tests' driver uses a heap for the card's memory, and
//! threads that delay copies.
//!
//! `unsafe` is used only in these files. Raw addresses are passed to the driver, and each block states why
//! the memory at the address outlives the copy.
//!
//! This module may use memory, links and stores, whose traits it implements. Nothing else of this crate
//! imports it.

mod arena;
mod card;
#[cfg(feature = "cuda")]
mod detect;
mod dma;
mod driver;
#[cfg(test)]
mod fake;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod nvidia;
mod pinned;

pub use card::{CardLink, CardMemory, DeviceAddress};
#[cfg(feature = "cuda")]
pub use detect::{CudaCard, CudaFindings, CudaVersion, detect, headers_root};
pub use dma::{Dma, STAGING_CHUNK};
pub use driver::{CopyStream, DeviceMemory, Driver, DriverError};
#[cfg(feature = "cuda")]
pub use memory::CudaMemory;
#[cfg(feature = "cuda")]
pub use nvidia::CudaDriver;
pub use pinned::{PinnedBuffer, PinnedError, PinnedFloats, PinnedPool};
