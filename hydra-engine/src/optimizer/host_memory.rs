//! The memory of a CPU device, with the host's code. During a step a buffer's master weights are in memory twice,
//! which no budget counts: such a device represents a GPU in tests.

use super::arithmetic::TaskStep;
use super::check::{OptimizerCheck, Tried};
use super::device_memory::{DeviceFloats, DeviceMemory};
use crate::error::EngineError;
use hydra_core::optimizer::{Elements, MomentMut, Optimizer};
use hydra_core::{DeviceBytes, FloatType, HostTensor, ParamBufferLayout};
use hydra_spill::{DeviceMasters, DeviceNarrow, SpillError};
use std::borrow::Cow;

/// Host memory.
pub(super) struct HostMemory;

impl DeviceMemory for HostMemory {
    fn steps(&self, _: &dyn Optimizer) -> bool {
        true
    }

    fn sum(&self, a: &DeviceFloats, b: Option<&DeviceFloats>) -> DeviceFloats {
        let a = widened(&a.bytes, a.float);
        DeviceFloats::sum(bytes_of(match b {
            Some(b) => a.iter().zip(widened(&b.bytes, b.float).iter()).map(|(a, b)| a + b).collect(),
            None => a.iter().map(|a| a + 0.0).collect(),
        }))
    }

    fn step(
        &self,
        step: &TaskStep<'_>,
        layout: &ParamBufferLayout,
        masters: &mut DeviceMasters,
        gradient: &[Option<DeviceFloats>],
    ) {
        let values = |bytes: &DeviceBytes| widened(bytes, FloatType::F32).into_owned();
        let mut params = values(&masters.params);
        let mut moments: Vec<Vec<f32>> = masters.moments.iter().map(|moment| values(&moment.bytes)).collect();
        for (param, gradient) in layout.params.iter().zip(gradient) {
            let zero = || Cow::Owned(vec![0.0; param.len]);
            let gradient = gradient.as_ref().map_or_else(zero, |part| widened(&part.bytes, part.float));
            let moments = moments.iter_mut().zip(&masters.moments);
            let mut moments: Vec<MomentMut<'_>> =
                moments.map(|(words, moment)| moment.layout.slice(words, 0, param.range())).collect();
            let elements = Elements::new(&mut params[param.range()], &gradient, &mut moments, step.clip);
            step.spec.optimizer.update(&step.of(param), elements);
        }
        replace(masters, params);
        let moments = masters.moments.iter_mut().zip(moments);
        moments.for_each(|(moment, words)| moment.bytes = bytes_of(words));
    }

    fn replace(
        &self,
        _: &ParamBufferLayout,
        masters: &mut DeviceMasters,
        values: &[f32],
        _: &dyn Fn() -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        replace(masters, values.to_vec());
        Ok(())
    }

    fn compare(&self, _: Tried<'_>) -> Result<Option<OptimizerCheck>, SpillError> {
        Ok(None)
    }
}

/// Replaces the parameters and their rounded values.
fn replace(masters: &mut DeviceMasters, params: Vec<f32>) {
    if let Some(DeviceNarrow { float, bytes }) = &mut masters.narrow {
        let elements = params.len();
        *bytes = HostTensor::float(params.clone(), [elements]).in_type(*float).bytes.into();
    }
    masters.params = bytes_of(params);
}

/// The values of floats of any type.
fn widened(bytes: &DeviceBytes, float: FloatType) -> Cow<'_, [f32]> {
    let bytes = bytes.as_host().expect("a CPU device has host memory");
    if float == FloatType::F32 {
        return Cow::Borrowed(bytemuck::cast_slice(bytes));
    }
    let mut wide = vec![0.0; bytes.len() / float.bytes()];
    float.widen(bytemuck::cast_slice(bytes), &mut wide);
    Cow::Owned(wide)
}

fn bytes_of(floats: Vec<f32>) -> DeviceBytes {
    let elements = floats.len();
    HostTensor::float(floats, [elements]).bytes.into()
}
