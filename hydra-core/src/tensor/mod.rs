//! Tensors of any rank, on a device or on the host, their float types, and activations made of them.
//!
//! This module may use Burn's tensors. It does not transfer between host and device or depend on device
//! memory.

mod activation;
mod any;
mod float;
mod host;

pub use activation::{Activation, HostActivation};
pub use any::AnyTensor;
pub(crate) use any::by_rank;
pub use float::FloatType;
#[cfg(feature = "cube")]
pub(crate) use host::BurnBytes;
pub use host::HostTensor;
pub(crate) use host::shared;
