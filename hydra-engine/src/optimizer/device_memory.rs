//! The port to the memory of a device in which gradients are added up and masters are stepped.
//!
//! Whatever stands behind it, the order of additions is the caller's, sums are `f32`, gradients of 16 bits are widened
//! where they are read, and masters are rounded where shard tasks read 16 bits.

use super::arithmetic::TaskStep;
use super::check::{OptimizerCheck, Tried};
use crate::error::EngineError;
use hydra_core::{DeviceBytes, FloatType, Optimizer, ParamBufferLayout};
use hydra_spill::{DeviceMasters, SpillError};

/// Floats on a device.
pub(crate) struct DeviceFloats {
    pub bytes: DeviceBytes,
    pub float: FloatType,
    /// True if they are a sum that was made here, which is `f32` and may be added to in place.
    pub own: bool,
}

impl DeviceFloats {
    pub(crate) fn sum(bytes: DeviceBytes) -> Self {
        Self { bytes, float: FloatType::F32, own: true }
    }
}

/// The memory of a device, with the arithmetic that is done in it. Nothing waits for the device but where it says so.
pub(crate) trait DeviceMemory: Send + Sync {
    /// Returns true if this optimizer can step masters here.
    fn steps(&self, optimizer: &dyn Optimizer) -> bool;

    /// The sum of two gradients. Nothing is zero, which is added too, for the sake of the other's sign.
    fn sum(&self, a: &DeviceFloats, b: Option<&DeviceFloats>) -> DeviceFloats;

    /// Adds a gradient to a sum that nobody else has.
    fn add(&self, total: DeviceFloats, part: &DeviceFloats) -> DeviceFloats {
        self.sum(&total, Some(part))
    }

    /// Steps a buffer by an optimizer that [can step here](Self::steps); a gradient that is none is zero.
    fn step(
        &self,
        step: &TaskStep<'_>,
        layout: &ParamBufferLayout,
        masters: &mut DeviceMasters,
        gradient: &[Option<DeviceFloats>],
    );

    /// Replaces a buffer's parameters, but not its moments, one by one; `wait` waits until the device has finished.
    fn replace(
        &self,
        layout: &ParamBufferLayout,
        masters: &mut DeviceMasters,
        values: &[f32],
        wait: &dyn Fn() -> Result<(), EngineError>,
    ) -> Result<(), EngineError>;

    /// Compares the arithmetic here with the host's; `None` if it is the same code.
    fn compare(&self, tried: Tried<'_>) -> Result<Option<OptimizerCheck>, SpillError>;
}
