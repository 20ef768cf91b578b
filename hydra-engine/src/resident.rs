//! Gathering gradients and stepping masters where a task lives on a device.
//!
//! The order of all additions is that of `gradient.rs`, the formulas are those of `optimizer.rs`; on a GPU they
//! are kernels. A CPU device that has memory of its own is served by the host's code.

use crate::device::LogicalDevice;
use crate::error::EngineError;
use crate::host::ImageSum;
use crate::optimizer::{Step, step_slice};
use burn::tensor::{DType, Device};
use bytes::Bytes;
use hydra_core::{DeviceBytes, DeviceId, DeviceTensor, HostTensor, ImageLayout, finish};
use hydra_spill::{DeviceMasters, alloc};

/// The gradients of an image's parameters on their device, by slot.
pub(crate) struct ResidentGradient {
    params: Vec<Sum>,
}

/// The gradient of a parameter; nothing is zero.
type Sum = Option<Part>;

struct Part {
    bytes: DeviceBytes,
    /// Whether it is a sum that was made here, and may be added to in place.
    #[cfg_attr(not(feature = "cube"), allow(dead_code, reason = "only GPUs write in place"))]
    own: bool,
}

impl ImageSum for ResidentGradient {
    type Use = DeviceTensor;

    fn of_microbatch(layout: &ImageLayout, layers: Vec<Vec<Option<DeviceTensor>>>) -> Self {
        let mut layers = layers.into_iter();
        let given = |gradient: DeviceTensor| Part { bytes: gradient.bytes, own: false };
        let first = layers.next().unwrap_or_default().into_iter().map(|gradient| gradient.map(given));
        let mut params: Vec<Sum> = first.collect();
        params.resize_with(layout.params.len(), || None);
        for layer in layers {
            for (sum, gradient) in params.iter_mut().zip(layer) {
                // What a layer gives nothing to stays as it is.
                if let Some(gradient) = gradient {
                    *sum = add(sum.take(), Some(&gradient.bytes));
                }
            }
        }
        Self { params }
    }

    fn add(self, next: &Self, _: &rayon::ThreadPool) -> Self {
        let params = self.params.into_iter().zip(&next.params);
        Self { params: params.map(|(sum, next)| add(sum, next.as_ref().map(|part| &part.bytes))).collect() }
    }
}

/// The sum of two gradients; a zero is added too, for the sake of the other's sign.
fn add(sum: Sum, next: Option<&DeviceBytes>) -> Sum {
    match (sum, next) {
        (None, None) => None,
        (Some(sum), Some(next)) => Some(plus(sum, next)),
        (Some(Part { bytes, .. }), None) => Some(plus_zero(&bytes)),
        (None, Some(next)) => Some(plus_zero(next)),
    }
}

fn plus(sum: Part, next: &DeviceBytes) -> Part {
    match (&sum.bytes, next) {
        (DeviceBytes::Host(a), DeviceBytes::Host(b)) => {
            let sums = floats(a).iter().zip(floats(b)).map(|(a, b)| a + b);
            Part { bytes: bytes_of(sums.collect()), own: true }
        }
        #[cfg(feature = "cube")]
        (a, b) => match sum.own {
            true => {
                crate::device_optimizer::add(cube(a), cube(b));
                sum
            }
            false => Part { bytes: buffer(crate::device_optimizer::sum(cube(a), cube(b))), own: true },
        },
        #[cfg(not(feature = "cube"))]
        _ => unreachable!("this build has no other memory"),
    }
}

fn plus_zero(bytes: &DeviceBytes) -> Part {
    let bytes = match bytes {
        DeviceBytes::Host(bytes) => bytes_of(floats(bytes).iter().map(|x| x + 0.0).collect()),
        #[cfg(feature = "cube")]
        bytes => {
            buffer(crate::device_optimizer::sum(cube(bytes), &crate::device_optimizer::zeros(cube(bytes))))
        }
        #[cfg(not(feature = "cube"))]
        _ => unreachable!("this build has no other memory"),
    };
    Part { bytes, own: true }
}

fn floats(bytes: &Bytes) -> &[f32] {
    bytemuck::cast_slice(bytes)
}

fn bytes_of(floats: Vec<f32>) -> DeviceBytes {
    let elements = floats.len();
    HostTensor::float(floats, [elements]).bytes.into()
}

#[cfg(feature = "cube")]
#[track_caller]
fn cube(bytes: &DeviceBytes) -> &hydra_core::cube::CubeBytes {
    bytes.as_buffer().expect("GPUs are devices of CubeCL")
}

#[cfg(feature = "cube")]
fn buffer(bytes: hydra_core::cube::CubeBytes) -> DeviceBytes {
    DeviceBytes::Buffer(std::sync::Arc::new(bytes))
}

/// Steps masters on the device that they live on.
pub(crate) struct DeviceStepper {
    name: String,
    burn: Device,
    measured_as: DeviceId,
}

impl DeviceStepper {
    pub(crate) fn of(device: &LogicalDevice) -> Self {
        let (name, burn) = (device.spec.name.clone(), device.burn.clone());
        Self { name, burn, measured_as: device.measured_as() }
    }

    /// Runs `f` with what it allocates charged to the device.
    pub(crate) fn charged<T>(&self, f: impl FnOnce() -> T) -> T {
        alloc::with_tag(Some(self.measured_as), f)
    }

    /// Steps an image whose gradient is complete, until the device has finished.
    pub(crate) fn step(
        &self,
        step: &Step<'_>,
        layout: &ImageLayout,
        masters: &mut DeviceMasters,
        gradient: &ResidentGradient,
    ) -> Result<(), EngineError> {
        self.charged(|| match &masters.params {
            DeviceBytes::Host(_) => step_on_host(step, layout, masters, gradient),
            #[cfg(feature = "cube")]
            DeviceBytes::Buffer(_) => step_on_cube(step, layout, masters, gradient),
            #[cfg(not(feature = "cube"))]
            DeviceBytes::Buffer(_) => unreachable!("this build has no other memory"),
        });
        // A sum for which there was no memory is known to what was computed with it.
        let view = |bytes: &DeviceBytes| {
            DeviceTensor::view(bytes.clone(), [bytes.len() / size_of::<f32>()], DType::F32)
        };
        let made: Vec<DeviceTensor> = masters.moments.iter().chain([&masters.params]).map(view).collect();
        let finished = finish(&self.burn, &made.iter().collect::<Vec<_>>());
        finished.map_err(|error| EngineError::Device {
            device: self.name.clone(),
            problem: format!("the optimizer's step failed: {error}"),
        })
    }
}

/// Steps every parameter into new memory, for a device's bytes are not written on the host.
fn step_on_host(
    step: &Step<'_>,
    layout: &ImageLayout,
    masters: &mut DeviceMasters,
    gradient: &ResidentGradient,
) {
    let values = |bytes: &DeviceBytes| bytes.as_host().map_or_else(Vec::new, |bytes| floats(bytes).to_vec());
    let mut params = values(&masters.params);
    let mut moments: Vec<Vec<f32>> = masters.moments.iter().map(values).collect();
    for (param, gradient) in layout.params.iter().zip(&gradient.params) {
        let zero = || vec![0.0; param.len];
        let gradient = gradient.as_ref().map_or_else(zero, |part| values(&part.bytes));
        let mut moments: Vec<&mut [f32]> = moments.iter_mut().map(|m| &mut m[param.range()]).collect();
        step_slice(step.update(param), &mut params[param.range()], &gradient, step.factor, &mut moments);
    }
    masters.params = bytes_of(params);
    masters.moments = moments.into_iter().map(bytes_of).collect();
}

/// Steps every parameter in place.
#[cfg(feature = "cube")]
fn step_on_cube(
    step: &Step<'_>,
    layout: &ImageLayout,
    masters: &mut DeviceMasters,
    gradient: &ResidentGradient,
) {
    for (param, gradient) in layout.params.iter().zip(&gradient.params) {
        let range = param.range();
        let bytes = range.start * size_of::<f32>()..range.end * size_of::<f32>();
        let params = masters.params.slice(bytes.clone());
        let moments = masters.moments.iter().map(|moment| cube(&moment.slice(bytes.clone())).clone());
        let moments: Vec<_> = moments.collect();
        let gradient = match gradient {
            Some(part) => cube(&part.bytes).clone(),
            None => crate::device_optimizer::zeros(cube(&params)),
        };
        crate::device_optimizer::step(step.update(param), cube(&params), &gradient, step.factor, &moments);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradient::ImageGradient;
    use hydra_core::{FloatType, ImageParam, Init, Key, OptimizerSpec, TrainSpec};
    use hydra_spill::Masters;

    const LEN: usize = 300;

    /// Two parameters that two layers name.
    fn layout() -> ImageLayout {
        let param = |index: usize| ImageParam {
            name: format!("p{index}"),
            shape: vec![LEN],
            offset: index * 384,
            len: LEN,
            init: Init::Zeros,
            given: None,
        };
        let params = vec![param(0), param(1)];
        ImageLayout {
            name: "tied".to_owned(),
            params,
            elements: 768,
            layers: vec![0, 3],
            trained: true,
            float: FloatType::F32,
        }
    }

    fn numbers(key: u64, n: usize) -> Vec<f32> {
        (0..n as u64).map(|i| Key::new(key).normal(i) as f32).collect()
    }

    /// What two layers give two parameters in three microbatches; also nothing, and zeros of either sign.
    fn uses() -> Vec<Vec<Vec<Option<Vec<f32>>>>> {
        let some = |key: u64| Some(numbers(key, LEN));
        let minus = || Some(vec![-0.0; LEN]);
        vec![
            vec![vec![some(1), None], vec![some(2), minus()]],
            vec![vec![minus(), minus()], vec![None, None]],
            vec![vec![None, some(3)], vec![some(4), some(5)]],
        ]
    }

    fn sum<S: ImageSum>(of: impl Fn(Vec<f32>) -> S::Use + Copy) -> S {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let one = |slots: Vec<Option<Vec<f32>>>| slots.into_iter().map(|slot| slot.map(of)).collect();
        let micro = uses().into_iter().map(|layers| {
            let layers = layers.into_iter().map(one).collect();
            S::of_microbatch(&layout(), layers)
        });
        micro.reduce(|sum, next| sum.add(&next, &pool)).unwrap()
    }

    /// The masters after a step on the host and one where `up` brought masters and gradients.
    fn stepped(
        spec: OptimizerSpec,
        up: impl Fn(Vec<f32>) -> DeviceBytes + Copy,
        burn: Device,
    ) -> (Masters, DeviceMasters) {
        let spec = TrainSpec::new(spec, 1);
        let step = Step { spec: &spec, rate: spec.optimizer.lr(), step: 3, factor: None };
        let moment = |i: u64| numbers(20 + i, 768).into_iter().map(f32::abs).collect::<Vec<f32>>();
        let moments: Vec<Vec<f32>> = (0..spec.optimizer.moments() as u64).map(moment).collect();
        let params = numbers(9, 768);
        let mut there = DeviceMasters {
            params: up(params.clone()),
            moments: moments.iter().map(|moment| up(moment.clone())).collect(),
        };
        let mut here = Masters::new(params, moments);
        let host = |values: Vec<f32>| HostTensor::float(values, [LEN]);
        step.image(&layout(), &mut here, &sum::<ImageGradient>(host));
        let device = |values: Vec<f32>| DeviceTensor::view(up(values), [LEN], DType::F32);
        let stepper = DeviceStepper { name: "device".to_owned(), burn, measured_as: DeviceId(0) };
        stepper.step(&step, &layout(), &mut there, &sum::<ResidentGradient>(device)).unwrap();
        (here, there)
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn a_step_where_a_task_lives_is_the_hosts() {
        let plain = OptimizerSpec::Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.01 };
        for spec in [OptimizerSpec::adamw(1e-2), OptimizerSpec::sgd(1e-2), plain] {
            let (here, there) = stepped(spec, bytes_of, Device::flex());
            let values = |bytes: &DeviceBytes| bits(floats(bytes.as_host().unwrap()));
            assert_eq!(bits(&here.params), values(&there.params));
            assert_eq!(here.moments.len(), there.moments.len());
            for (here, there) in here.moments.iter().zip(&there.moments) {
                assert_eq!(bits(here), values(there));
            }
        }
    }

    #[cfg(feature = "wgpu")]
    #[test]
    fn a_step_on_a_gpu_is_the_hosts_where_no_product_is_rounded() {
        use hydra_core::cube::CubeAdapter;
        let adapter = CubeAdapter::wgpu(0).inspect_err(|error| eprintln!("skipped: {error}"));
        let Ok(adapter) = adapter else { return };
        // Powers of two: a fused operation that rounds twice gives the same.
        let spec = OptimizerSpec::Sgd { lr: 0.125, momentum: 0.5, weight_decay: 0.0 };
        let up = |values: Vec<f32>| {
            let bytes = bytes_of(values);
            let there = adapter.write(&[bytes.as_host().unwrap().clone()]).unwrap().remove(0);
            DeviceBytes::Buffer(std::sync::Arc::new(there))
        };
        let (here, there) = stepped(spec, up, adapter.burn.clone());
        let values = |bytes: &DeviceBytes| bits(floats(&cube(bytes).read().unwrap()));
        assert_eq!(bits(&here.params), values(&there.params));
        assert_eq!(bits(&here.moments[0]), values(&there.moments[0]));
    }
}
