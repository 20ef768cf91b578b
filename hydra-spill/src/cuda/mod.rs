//! The parts of a link to a GPU: page-locked memory, places on the card, and copies that run beside it.
//!
//! A [`Driver`] is what they ask of the card's driver, which is `CudaDriver` with the feature `cuda`. A [`PinnedPool`]
//! keeps page-locked host memory within a budget. [`Dma`] copies between it and the card, with a channel for each
//! direction. An arena says where in one allocation on the card a promotion goes, and when it may go there.
//! All of them are in every build, because none needs a card to be tested: the tests' driver has a heap for a
//! card, and threads that copy late.
//!
//! `unsafe` stands in these files alone. It is a raw address that crosses to the driver, and each block says why
//! what is behind the address outlives the copy.
//!
//! It may touch memory, links and stores, whose ports it implements. Nothing else of this crate imports it.

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

pub use card::{CardLink, CardMemory, Place};
#[cfg(feature = "cuda")]
pub use detect::{CudaCard, CudaFindings, CudaVersion, detect, headers_root};
pub use dma::{Dma, STAGING_CHUNK};
pub use driver::{CopyStream, DeviceMemory, Driver, DriverError};
#[cfg(feature = "cuda")]
pub use memory::CudaMemory;
#[cfg(feature = "cuda")]
pub use nvidia::CudaDriver;
pub use pinned::{PinnedBuffer, PinnedError, PinnedFloats, PinnedPool};
