//! Device memory: buffers, transfers between host and device, and memory probes.
//!
//! This module may use tensors and a device's runtime. It does not depend on layers, chains or tasks.

#[cfg(feature = "cube")]
pub mod cube;
mod memory;
mod probe;
mod transfer;

pub use memory::{DeviceBuffer, DeviceBytes, DeviceError, DeviceTensor, leased, panic_message};
pub use probe::MemoryProbe;
pub use transfer::finish;
