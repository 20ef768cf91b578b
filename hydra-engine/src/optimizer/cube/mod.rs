//! The memory of CubeCL devices: sums, steps and rounding as kernels with the host's formulas.
//!
//! That a device gives the host's bits is not assumed: `compare.rs` tests it.

mod compare;
mod kernels;
mod rules;

use super::arithmetic::TaskStep;
use super::check::{OptimizerCheck, Tried};
use super::device_memory::{DeviceFloats, DeviceMemory};
use crate::error::EngineError;
use burn::tensor::Device;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::{BufferArg, CubeCount, CubeDim};
use hydra_core::cube::CubeBytes;
use hydra_core::{BufferParam, DeviceBytes, FloatType, HostTensor, Optimizer, ParamBufferLayout};
use hydra_spill::{DeviceLink, DeviceMasters, DeviceNarrow, SpillError};
use std::sync::Arc;

/// Units of a cube.
const UNITS: u32 = 256;

/// Floats on the device, of any type.
#[derive(Clone, Debug)]
struct CubeFloats {
    bytes: CubeBytes,
    float: FloatType,
}

impl CubeFloats {
    fn of(floats: &DeviceFloats) -> Self {
        Self { bytes: cube(&floats.bytes).clone(), float: floats.float }
    }

    fn wide(bytes: CubeBytes) -> Self {
        Self { bytes, float: FloatType::F32 }
    }

    /// Returns the kernel argument and the type that the kernel is generic over.
    fn arg(&self) -> (BufferArg, ElemType) {
        let kind = match self.float {
            FloatType::F32 => FloatKind::F32,
            FloatType::Bf16 => FloatKind::BF16,
            FloatType::F16 => FloatKind::F16,
        };
        (self.bytes.floats(self.float), ElemType::Float(kind))
    }

    fn elements(&self) -> usize {
        hydra_core::DeviceBuffer::len(&self.bytes) / self.float.bytes()
    }

    /// Allocates an `f32` sum of the same length.
    fn new_sum(&self) -> CubeBytes {
        self.bytes.alloc_floats(self.elements())
    }

    /// The number of cubes that gives each float a unit.
    fn cubes(&self) -> (CubeCount, CubeDim) {
        let units = CubeDim::new_1d(UNITS);
        (cubecl::calculate_cube_count_elemwise(self.bytes.client(), self.elements(), units), units)
    }
}

/// A kernel argument of `f32`.
fn wide(bytes: &CubeBytes) -> BufferArg {
    bytes.floats(FloatType::F32)
}

/// The memory of a CubeCL device.
pub(super) struct CubeMemory {
    pub link: Arc<dyn DeviceLink>,
    pub burn: Device,
}

impl DeviceMemory for CubeMemory {
    fn steps(&self, optimizer: &dyn Optimizer) -> bool {
        rules::kernel(optimizer).is_some()
    }

    fn sum(&self, a: &DeviceFloats, b: Option<&DeviceFloats>) -> DeviceFloats {
        let a = CubeFloats::of(a);
        let b = b.map_or_else(|| zeros(&a), CubeFloats::of);
        DeviceFloats::sum(DeviceBytes::Buffer(Arc::new(sum(&a, &b))))
    }

    fn add(&self, total: DeviceFloats, part: &DeviceFloats) -> DeviceFloats {
        add(cube(&total.bytes), &CubeFloats::of(part));
        total
    }

    /// Steps every parameter in place, and rounds all of them in one launch.
    fn step(
        &self,
        step: &TaskStep<'_>,
        layout: &ParamBufferLayout,
        masters: &mut DeviceMasters,
        gradient: &[Option<DeviceFloats>],
    ) {
        let kernel = rules::kernel(&*step.spec.optimizer).expect("an optimizer that steps here");
        for (param, gradient) in layout.params.iter().zip(gradient) {
            let params = param_of(&masters.params, param);
            let moments: Vec<_> =
                masters.moments.iter().map(|moment| param_of(&moment.bytes, param)).collect();
            let gradient = match gradient {
                Some(gradient) => CubeFloats::of(gradient),
                None => zeros(&CubeFloats::wide(params.clone())),
            };
            kernel.launch(&step.of(param), step.clip, &params, &gradient, &moments);
        }
        round_masters(masters);
    }

    fn replace(
        &self,
        layout: &ParamBufferLayout,
        masters: &mut DeviceMasters,
        values: &[f32],
        wait: &dyn Fn() -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        for param in &layout.params {
            let value = HostTensor::float(values[param.range()].to_vec(), param.shape.clone());
            let value = self.link.upload(&value.bytes).map_err(hydra_spill::SpillError::from)?;
            round(cube(&value), &CubeFloats::wide(param_of(&masters.params, param)));
            // Wait until the device has read it before it is freed, so that only one parameter's values are held at a
            // time.
            wait()?;
        }
        round_masters(masters);
        Ok(())
    }

    fn compare(&self, tried: Tried<'_>) -> Result<Option<OptimizerCheck>, SpillError> {
        compare::compare(self.link.as_ref(), &self.burn, tried).map(Some)
    }
}

#[track_caller]
fn cube(bytes: &DeviceBytes) -> &CubeBytes {
    bytes.as_buffer().expect("GPUs are devices of CubeCL")
}

/// The bytes of a parameter within a buffer of `f32`.
fn param_of(buffer: &DeviceBytes, param: &BufferParam) -> CubeBytes {
    let range = param.range();
    cube(&buffer.slice(range.start * size_of::<f32>()..range.end * size_of::<f32>())).clone()
}

/// Rounds the master weights to the type that shard tasks read, if it is another one.
fn round_masters(masters: &DeviceMasters) {
    if let Some(DeviceNarrow { float, bytes }) = &masters.narrow {
        round(cube(&masters.params), &CubeFloats { bytes: cube(bytes).clone(), float: *float });
    }
}

/// The sum of two gradients, in new memory.
fn sum(a: &CubeFloats, b: &CubeFloats) -> CubeBytes {
    let (out, (count, units)) = (a.new_sum(), a.cubes());
    let ((a, a_float), (b, b_float), client) = (a.arg(), b.arg(), out.client());
    kernels::sum::launch(client, count, units, a, b, wide(&out), a_float, b_float);
    out
}

/// Adds a gradient to a sum that has no other reference.
fn add(total: &CubeBytes, part: &CubeFloats) {
    let ((count, units), (part, float)) = (part.cubes(), part.arg());
    kernels::add::launch(total.client(), count, units, wide(total), part, float);
}

/// Rounds the values to the type of `out`, in place.
fn round(values: &CubeBytes, out: &CubeFloats) {
    let ((count, units), (out, float)) = (out.cubes(), out.arg());
    kernels::round::launch(values.client(), count, units, wide(values), out, float);
}

/// Zeros, as many as there are floats in `like`.
fn zeros(like: &CubeFloats) -> CubeFloats {
    let (out, (count, units)) = (like.new_sum(), like.cubes());
    kernels::fill::launch(out.client(), count, units, wide(&out), 0.0);
    CubeFloats::wide(out)
}
