//! Tensors of any rank, on a device or on the host, the types of their floats, and activations made of them.
//!
//! It may touch Burn's tensors. It never moves one between host and device, and knows no device's memory.

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
