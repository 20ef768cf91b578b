//! Memory of devices: buffers, transfers between them and the host, and probes that measure them.
//!
//! It may touch tensors and a device's runtime. It never knows of layers, chains or tasks.

#[cfg(feature = "cube")]
pub mod cube;
mod memory;
mod probe;
mod transfer;

pub use memory::{DeviceBuffer, DeviceBytes, DeviceError, DeviceTensor, leased, panic_message};
pub use probe::MemoryProbe;
pub use transfer::finish;
