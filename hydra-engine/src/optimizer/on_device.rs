//! Accumulates gradients and steps master weights on a device. The order of all additions is that of `gradient.rs`.

use super::arithmetic::TaskStep;
#[cfg(feature = "cube")]
use super::cube::CubeMemory;
use super::device_memory::{DeviceFloats, DeviceMemory};
use super::gradient::BufferSum;
use super::host_memory::HostMemory;
use crate::error::EngineError;
use burn::backend::StreamId;
use burn::tensor::Device;
use hydra_core::{DeviceBytes, DeviceError, DeviceId, DeviceTensor, FloatType, ParamBufferLayout, finish};
use hydra_spill::{DeviceLink, DeviceMasters, alloc};
use std::sync::Arc;

/// The memory of the device `burn`, reached over `link`.
pub(crate) fn memory_of(link: Arc<dyn DeviceLink>, burn: &Device) -> Box<dyn DeviceMemory> {
    #[cfg(feature = "cube")]
    if hydra_core::cube::place(burn).is_some() {
        return Box::new(CubeMemory { link, burn: burn.clone() });
    }
    let _ = (link, burn);
    Box::new(HostMemory)
}

/// The gradients of a buffer's parameters on their device, by slot; `None` counts as zero.
pub(crate) type DeviceGradient = Vec<Option<DeviceFloats>>;

impl BufferSum for DeviceGradient {
    type Use = DeviceTensor;
    type Adder = dyn DeviceMemory;

    fn of_microbatch(
        layout: &ParamBufferLayout,
        layers: Vec<Vec<Option<DeviceTensor>>>,
        memory: &dyn DeviceMemory,
    ) -> Self {
        let mut layers = layers.into_iter();
        let given =
            |tensor: DeviceTensor| DeviceFloats { bytes: tensor.bytes, float: layout.float, own: false };
        let first = layers.next().unwrap_or_default().into_iter().map(|gradient| gradient.map(given));
        let mut params: Vec<Option<DeviceFloats>> = first.collect();
        params.resize_with(layout.params.len(), || None);
        for layer in layers {
            for (sum, gradient) in params.iter_mut().zip(layer) {
                // A parameter without a gradient of this layer is unchanged.
                if let Some(gradient) = gradient {
                    *sum = add(sum.take(), Some(&given(gradient)), memory);
                }
            }
        }
        params
    }

    fn add(self, next: Self, memory: &dyn DeviceMemory) -> Self {
        self.into_iter().zip(&next).map(|(sum, next)| add(sum, next.as_ref(), memory)).collect()
    }
}

fn add(
    sum: Option<DeviceFloats>,
    next: Option<&DeviceFloats>,
    memory: &dyn DeviceMemory,
) -> Option<DeviceFloats> {
    match (sum, next) {
        (None, None) => None,
        (Some(sum), Some(next)) if sum.own => Some(memory.add(sum, next)),
        (Some(sum), next) => Some(memory.sum(&sum, next)),
        (None, Some(next)) => Some(memory.sum(next, None)),
    }
}

/// Steps master weights that are resident on a device.
pub(crate) struct DeviceStepper {
    pub name: String,
    pub burn: Device,
    pub measured_as: DeviceId,
    /// The stream of the compute thread.
    pub stream: StreamId,
    pub memory: Box<dyn DeviceMemory>,
}

impl DeviceStepper {
    /// Runs `f` with its allocations charged to the device and its GPU work on the device's stream.
    pub(crate) fn charged<T>(&self, f: impl FnOnce() -> T) -> T {
        alloc::with_tag(Some(self.measured_as), || self.stream.executes(f))
    }

    /// Steps a buffer whose gradient is complete, and waits until the device has finished.
    pub(crate) fn step(
        &self,
        step: &TaskStep<'_>,
        layout: &ParamBufferLayout,
        masters: &mut DeviceMasters,
        gradient: &[Option<DeviceFloats>],
    ) -> Result<(), EngineError> {
        self.charged(|| self.memory.step(step, layout, masters, gradient));
        self.finish_masters(masters, "the optimizer's step")
    }

    /// Replaces a buffer's parameters, but not its moments, and waits until the device has finished.
    pub(crate) fn replace(
        &self,
        layout: &ParamBufferLayout,
        masters: &mut DeviceMasters,
        values: &[f32],
    ) -> Result<(), EngineError> {
        const WHAT: &str = "restoring the best weights";
        self.charged(|| self.memory.replace(layout, masters, values, &|| self.finish(&[], WHAT)))?;
        self.finish_masters(masters, WHAT)
    }

    /// Waits for all work of the device, including that of the compute thread.
    pub(crate) fn finish(&self, made: &[&DeviceTensor], what: &str) -> Result<(), EngineError> {
        let failed = |error: DeviceError| EngineError::Device {
            device: self.name.clone(),
            problem: format!("{what} failed: {error}"),
        };
        self.stream.executes(|| finish(&self.burn, made)).map_err(failed)
    }

    /// Waits until the device has written the master weights.
    fn finish_masters(&self, masters: &DeviceMasters, what: &str) -> Result<(), EngineError> {
        // An allocation that failed in a sum is reported by the values computed from it.
        let view = |bytes: &DeviceBytes, float: FloatType| {
            DeviceTensor::view(bytes.clone(), [bytes.len() / float.bytes()], float.dtype())
        };
        let moments = masters.moments.iter().map(|moment| &moment.bytes);
        let wide = moments.chain([&masters.params]).map(|bytes| view(bytes, FloatType::F32));
        let narrow = masters.narrow.iter().map(|narrow| view(&narrow.bytes, narrow.float));
        let made: Vec<DeviceTensor> = wide.chain(narrow).collect();
        self.finish(&made.iter().collect::<Vec<_>>(), what)
    }
}

#[cfg(test)]
mod tests {
    use super::super::gradient::BufferGradient;
    use super::super::gradient::HostAdder;
    use super::super::tests::{numbers, tied};
    use super::*;
    use bytes::Bytes;
    use hydra_core::optimizer::{MomentLayout, Sgd};
    use hydra_core::{HostTensor, OptimizerSpec, TrainSpec};
    use hydra_spill::{DeviceMoment, DeviceNarrow, Floats, Masters, NarrowFloats};

    const LEN: usize = 300;

    /// The gradients of two layers for two parameters in three microbatches; includes missing ones, and zeros of
    /// either sign.
    fn uses() -> Vec<Vec<Vec<Option<Vec<f32>>>>> {
        let some = |key: u64| Some(numbers(key, LEN));
        let minus = || Some(vec![-0.0; LEN]);
        vec![
            vec![vec![some(1), None], vec![some(2), minus()]],
            vec![vec![minus(), minus()], vec![None, None]],
            vec![vec![None, some(3)], vec![some(4), some(5)]],
        ]
    }

    fn sum<S: BufferSum>(float: FloatType, of: impl Fn(HostTensor) -> S::Use + Copy, adder: &S::Adder) -> S {
        let given = |values: Vec<f32>| of(HostTensor::float(values, [LEN]).in_type(float));
        let one = |slots: Vec<Option<Vec<f32>>>| slots.into_iter().map(|slot| slot.map(given)).collect();
        let micro = uses().into_iter().map(|layers| {
            let layers = layers.into_iter().map(one).collect();
            S::of_microbatch(&tied(2, LEN, float), layers, adder)
        });
        micro.reduce(|sum, next| sum.add(next, adder)).unwrap()
    }

    /// The master weights after a step on the host and after one with buffers from `up`.
    fn stepped(
        spec: OptimizerSpec,
        float: FloatType,
        up: impl Fn(Bytes) -> DeviceBytes + Copy,
        burn: Device,
    ) -> (Masters, DeviceMasters) {
        let spec = TrainSpec::new(spec, 1);
        let step = TaskStep { spec: &spec, rate: spec.optimizer.lr(), index: 3, clip: None };
        let moment = |i: u64| numbers(20 + i, 768).into_iter().map(f32::abs).collect::<Vec<f32>>();
        let moments: Vec<Vec<f32>> = (0..spec.optimizer.moments() as u64).map(moment).collect();
        let params = numbers(9, 768);
        let moment_of = |bytes| DeviceMoment { bytes, layout: MomentLayout::default() };
        let wide = |values: &[f32]| HostTensor::float(values.to_vec(), [768]);
        let rounded = (float != FloatType::F32).then_some(float);
        let mut there = DeviceMasters {
            params: up(wide(&params).bytes),
            narrow: rounded
                .map(|float| DeviceNarrow { float, bytes: up(wide(&params).in_type(float).bytes) }),
            moments: moments.iter().map(|moment| moment_of(up(wide(moment).bytes))).collect(),
        };
        let narrow = rounded.map(|float| NarrowFloats::of(&params, float, Floats::from));
        let mut here = Masters { narrow, ..Masters::new(params, moments) };
        let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap());
        let mut as_read = here.clone();
        for (masters, as_read) in [(&mut here, false), (&mut as_read, true)] {
            let adder = HostAdder { pool: pool.clone(), as_read };
            step.piece(
                &tied(2, LEN, float),
                0,
                masters,
                &sum::<BufferGradient>(float, |tensor| tensor, &adder),
            );
        }
        assert!(here == as_read, "microbatches are added in one order");
        let device = |tensor: HostTensor| DeviceTensor::view(up(tensor.bytes), tensor.shape, tensor.dtype);
        let link = Arc::new(hydra_spill::HostCopyLink::new(DeviceId(0)));
        let (name, memory) = ("device".to_owned(), memory_of(link, &burn));
        let stepper =
            DeviceStepper { name, burn, measured_as: DeviceId(0), stream: StreamId::current(), memory };
        let gradient = sum::<DeviceGradient>(float, device, stepper.memory.as_ref());
        stepper.step(&step, &tied(2, LEN, float), &mut there, &gradient).unwrap();
        (here, there)
    }

    /// Compares bit by bit; `down` copies back to the host.
    fn same(here: &Masters, there: &DeviceMasters, down: impl Fn(&DeviceBytes) -> Bytes) {
        let wide = |values: &[f32], bytes: &DeviceBytes| {
            assert_eq!(bytemuck::cast_slice::<f32, u8>(values), &down(bytes)[..]);
        };
        wide(&here.params, &there.params);
        assert_eq!(here.moments.len(), there.moments.len());
        here.moments.iter().zip(&there.moments).for_each(|(here, there)| wide(&here.words, &there.bytes));
        assert_eq!(here.narrow.is_some(), there.narrow.is_some());
        for (here, there) in here.narrow.iter().zip(&there.narrow) {
            assert_eq!(here.float_type(), there.float);
            assert_eq!(bytemuck::cast_slice::<u16, u8>(here), &down(&there.bytes)[..]);
        }
    }

    #[test]
    fn a_step_on_a_device_is_the_hosts() {
        let plain = OptimizerSpec::from(Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.01 });
        for float in [FloatType::F32, FloatType::Bf16, FloatType::F16] {
            for spec in [OptimizerSpec::adamw(1e-2), OptimizerSpec::sgd(1e-2), plain.clone()] {
                let (here, there) = stepped(spec, float, DeviceBytes::from, Device::flex());
                same(&here, &there, |bytes| bytes.as_host().unwrap().clone());
            }
        }
    }

    #[cfg(feature = "cube")]
    #[test]
    fn a_step_on_a_gpu_is_the_hosts_where_no_product_is_rounded() {
        use hydra_core::cube::{CubeAdapter, CubeBytes};
        let adapter = CubeAdapter::wgpu(0).inspect_err(|error| eprintln!("skipped: {error}"));
        let Ok(adapter) = adapter else { return };
        // Powers of two: a fused operation that rounds twice gives the same.
        let spec = OptimizerSpec::from(Sgd { lr: 0.125, momentum: 0.5, weight_decay: 0.0 });
        let up = |bytes: Bytes| DeviceBytes::Buffer(Arc::new(adapter.write(&[bytes]).unwrap().remove(0)));
        for float in [FloatType::F32, FloatType::Bf16, FloatType::F16] {
            if !hydra_models::ops::supports(&adapter.burn, float.dtype()) {
                eprintln!("skipped: the device does not compute with {float}");
                continue;
            }
            let (here, there) = stepped(spec.clone(), float, up, adapter.burn.clone());
            same(&here, &there, |bytes| bytes.as_buffer::<CubeBytes>().unwrap().read().unwrap());
        }
    }
}
