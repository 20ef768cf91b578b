//! The interface to the memory of a device where gradients are accumulated and master weights are stepped.
//!
//! For every implementation: the caller determines the order of additions, sums are `f32`, 16-bit gradients are
//! widened when they are read, and master weights are rounded if shard tasks read 16 bits.

use super::arithmetic::TaskStep;
use super::check::{OptimizerCheck, Tried};
use crate::error::EngineError;
use hydra_core::{DeviceBytes, FloatType, Optimizer, ParamBufferLayout};
use hydra_spill::{DeviceMasters, SpillError};

/// Floats on a device.
pub(crate) struct DeviceFloats {
    pub bytes: DeviceBytes,
    pub float: FloatType,
    /// True for a sum made here, which is `f32` and may be added to in place.
    pub own: bool,
}

impl DeviceFloats {
    pub(crate) fn sum(bytes: DeviceBytes) -> Self {
        Self { bytes, float: FloatType::F32, own: true }
    }
}

/// The memory of a device, with its arithmetic. No method waits for the device unless its documentation states it.
pub(crate) trait DeviceMemory: Send + Sync {
    /// Returns true if this optimizer can step master weights here.
    fn steps(&self, optimizer: &dyn Optimizer) -> bool;

    /// The sum of two gradients. A missing one counts as zero, which is added too, for the sign of the other's zeros.
    fn sum(&self, a: &DeviceFloats, b: Option<&DeviceFloats>) -> DeviceFloats;

    /// Adds a gradient to a sum that has no other reference.
    fn add(&self, total: DeviceFloats, part: &DeviceFloats) -> DeviceFloats {
        self.sum(&total, Some(part))
    }

    /// Steps a buffer with an optimizer that [can step here](Self::steps); a missing gradient counts as zero.
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
