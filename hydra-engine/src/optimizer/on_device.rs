//! Gathering gradients and stepping masters where a task lives on a device.
//!
//! The order of all additions is that of `gradient.rs`, the formulas are those of `optimizer.rs`; on a GPU they
//! are kernels. A CPU device that has memory of its own is served by the host's code. Gradients of 16 bits are widened
//! where they are read, so every sum is `f32`, and masters are rounded where shard tasks read 16 bits.

use super::arithmetic::{Step, step_slice};
#[cfg(feature = "cube")]
use super::cube::{self, CubeFloats};
use super::gradient::ImageSum;
use crate::error::EngineError;
use burn::backend::StreamId;
use burn::tensor::Device;
use bytes::Bytes;
#[cfg(feature = "cube")]
use hydra_core::ImageParam;
use hydra_core::{
    DeviceBytes, DeviceError, DeviceId, DeviceTensor, FloatType, HostTensor, ImageLayout, finish,
};
use hydra_spill::{DeviceLink, DeviceMasters, DeviceNarrow, alloc};
use std::borrow::Cow;
use std::sync::Arc;

/// The gradients of an image's parameters on their device, by slot.
pub(crate) struct ResidentGradient {
    params: Vec<Sum>,
}

/// The gradient of a parameter; nothing is zero.
type Sum = Option<Part>;

struct Part {
    bytes: DeviceBytes,
    float: FloatType,
    /// Whether it is a sum that was made here, which is `f32`, and may be added to in place.
    #[cfg_attr(not(feature = "cube"), allow(dead_code, reason = "only GPUs write in place"))]
    own: bool,
}

impl ImageSum for ResidentGradient {
    type Use = DeviceTensor;

    fn of_microbatch(layout: &ImageLayout, layers: Vec<Vec<Option<DeviceTensor>>>) -> Self {
        let mut layers = layers.into_iter();
        let given = |tensor: DeviceTensor| Part { bytes: tensor.bytes, float: layout.float, own: false };
        let first = layers.next().unwrap_or_default().into_iter().map(|gradient| gradient.map(given));
        let mut params: Vec<Sum> = first.collect();
        params.resize_with(layout.params.len(), || None);
        for layer in layers {
            for (sum, gradient) in params.iter_mut().zip(layer) {
                // What a layer gives nothing to stays as it is.
                if let Some(gradient) = gradient {
                    *sum = add(sum.take(), Some(&given(gradient)));
                }
            }
        }
        Self { params }
    }

    fn add(self, next: &Self, _: &rayon::ThreadPool) -> Self {
        let params = self.params.into_iter().zip(&next.params);
        Self { params: params.map(|(sum, next)| add(sum, next.as_ref())).collect() }
    }
}

/// The sum of two gradients; a zero is added too, for the sake of the other's sign.
fn add(sum: Sum, next: Option<&Part>) -> Sum {
    match (sum, next) {
        (None, None) => None,
        (Some(sum), Some(next)) => Some(plus(sum, next)),
        (Some(sum), None) => Some(plus_zero(&sum)),
        (None, Some(next)) => Some(plus_zero(next)),
    }
}

fn plus(sum: Part, next: &Part) -> Part {
    match (&sum.bytes, &next.bytes) {
        (DeviceBytes::Host(a), DeviceBytes::Host(b)) => {
            let (a, b) = (widened(a, sum.float), widened(b, next.float));
            let sums = a.iter().zip(b.iter()).map(|(a, b)| a + b);
            Part::sum(bytes_of(sums.collect()))
        }
        #[cfg(feature = "cube")]
        (a, _) => match sum.own {
            true => {
                cube::add(cube(a), &next.on_cube());
                sum
            }
            false => Part::sum(buffer(cube::sum(&sum.on_cube(), &next.on_cube()))),
        },
        #[cfg(not(feature = "cube"))]
        _ => unreachable!("this build has no other memory"),
    }
}

fn plus_zero(part: &Part) -> Part {
    Part::sum(match &part.bytes {
        DeviceBytes::Host(bytes) => bytes_of(widened(bytes, part.float).iter().map(|x| x + 0.0).collect()),
        #[cfg(feature = "cube")]
        DeviceBytes::Buffer(_) => {
            let part = part.on_cube();
            buffer(cube::sum(&part, &cube::zeros(&part)))
        }
        #[cfg(not(feature = "cube"))]
        DeviceBytes::Buffer(_) => unreachable!("this build has no other memory"),
    })
}

impl Part {
    fn sum(bytes: DeviceBytes) -> Self {
        Self { bytes, float: FloatType::F32, own: true }
    }

    #[cfg(feature = "cube")]
    fn on_cube(&self) -> CubeFloats {
        CubeFloats { bytes: cube(&self.bytes).clone(), float: self.float }
    }
}

fn floats(bytes: &Bytes) -> &[f32] {
    bytemuck::cast_slice(bytes)
}

/// The values of floats of any type.
fn widened(bytes: &Bytes, float: FloatType) -> Cow<'_, [f32]> {
    if float == FloatType::F32 {
        return Cow::Borrowed(floats(bytes));
    }
    let mut wide = vec![0.0; bytes.len() / float.bytes()];
    float.widen(bytemuck::cast_slice(bytes), &mut wide);
    Cow::Owned(wide)
}

fn bytes_of(floats: Vec<f32>) -> DeviceBytes {
    let elements = floats.len();
    HostTensor::float(floats, [elements]).bytes.into()
}

#[cfg(feature = "cube")]
#[track_caller]
fn on_cube(bytes: &DeviceBytes) -> &hydra_core::cube::CubeBytes {
    bytes.as_buffer().expect("GPUs are devices of CubeCL")
}

#[cfg(feature = "cube")]
fn buffer(bytes: hydra_core::cube::CubeBytes) -> DeviceBytes {
    DeviceBytes::Buffer(std::sync::Arc::new(bytes))
}

/// Steps masters on the device that they live on.
pub(crate) struct DeviceStepper {
    pub name: String,
    pub burn: Device,
    pub measured_as: DeviceId,
    /// Of the thread that computes, whose masters and gradients these are.
    pub stream: StreamId,
    #[cfg_attr(not(feature = "cube"), allow(dead_code, reason = "only to GPUs values are copied"))]
    pub link: Arc<dyn DeviceLink>,
}

impl DeviceStepper {
    /// Runs `f` with what it allocates charged to the device, and what it has a GPU do on the stream of the device.
    pub(crate) fn charged<T>(&self, f: impl FnOnce() -> T) -> T {
        alloc::with_tag(Some(self.measured_as), || self.stream.executes(f))
    }

    /// Waits for everything that was given to the device, also by the thread that computes.
    fn finish(&self, made: &[&DeviceTensor], what: &str) -> Result<(), EngineError> {
        self.stream.executes(|| finish(&self.burn, made)).map_err(|error| self.failed(what, error))
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
        self.finished(masters, "the optimizer's step")
    }

    /// Puts other values in the place of an image's parameters, one after another, until the device has finished.
    /// The moments stay.
    pub(crate) fn put_back(
        &self,
        layout: &ImageLayout,
        masters: &mut DeviceMasters,
        values: &[f32],
    ) -> Result<(), EngineError> {
        self.charged(|| match &masters.params {
            DeviceBytes::Host(_) => {
                put_on_host(masters, values.to_vec());
                Ok::<_, EngineError>(())
            }
            #[cfg(feature = "cube")]
            DeviceBytes::Buffer(_) => self.put_on_cube(layout, masters, values),
            #[cfg(not(feature = "cube"))]
            DeviceBytes::Buffer(_) => unreachable!("this build has no other memory"),
        })?;
        let _ = layout;
        self.finished(masters, "putting back the best weights")
    }

    #[cfg(feature = "cube")]
    fn put_on_cube(
        &self,
        layout: &ImageLayout,
        masters: &DeviceMasters,
        values: &[f32],
    ) -> Result<(), EngineError> {
        for param in &layout.params {
            let value = HostTensor::float(values[param.range()].to_vec(), param.shape.clone());
            let value = self.link.upload(&value.bytes).map_err(hydra_spill::SpillError::from)?;
            let place = CubeFloats::wide(cube(&param_of(&masters.params, param)).clone());
            cube::round(cube(&value), &place);
            // It is let go of when the device has read it, and so is one parameter's at most.
            self.finish(&[], "putting back the best weights")?;
        }
        round_on_cube(masters);
        Ok(())
    }

    /// Waits for everything that was given to the device.
    pub(crate) fn wait(&self) -> Result<(), EngineError> {
        self.finish(&[], "adding gradients")
    }

    fn failed(&self, what: &str, error: DeviceError) -> EngineError {
        EngineError::Device { device: self.name.clone(), problem: format!("{what} failed: {error}") }
    }

    /// Waits until the device has written the masters.
    fn finished(&self, masters: &DeviceMasters, what: &str) -> Result<(), EngineError> {
        // A sum for which there was no memory is known to what was computed with it.
        let view = |bytes: &DeviceBytes, float: FloatType| {
            DeviceTensor::view(bytes.clone(), [bytes.len() / float.bytes()], float.dtype())
        };
        let wide = masters.moments.iter().chain([&masters.params]).map(|bytes| view(bytes, FloatType::F32));
        let narrow = masters.narrow.iter().map(|narrow| view(&narrow.bytes, narrow.float));
        let made: Vec<DeviceTensor> = wide.chain(narrow).collect();
        self.finish(&made.iter().collect::<Vec<_>>(), what)
    }
}

/// The bytes of a parameter within an image of `f32`.
#[cfg(feature = "cube")]
fn param_of(image: &DeviceBytes, param: &ImageParam) -> DeviceBytes {
    let range = param.range();
    image.slice(range.start * size_of::<f32>()..range.end * size_of::<f32>())
}

/// Parameters of a CPU device, with what they are rounded to.
fn put_on_host(masters: &mut DeviceMasters, params: Vec<f32>) {
    if let Some(DeviceNarrow { float, bytes }) = &mut masters.narrow {
        let elements = params.len();
        *bytes = HostTensor::float(params.clone(), [elements]).in_type(*float).bytes.into();
    }
    masters.params = bytes_of(params);
}

/// Rounds what shard tasks read, if that is not the masters themselves.
#[cfg(feature = "cube")]
fn round_on_cube(masters: &DeviceMasters) {
    if let Some(DeviceNarrow { float, bytes }) = &masters.narrow {
        let out = CubeFloats { bytes: cube(bytes).clone(), float: *float };
        cube::round(cube(&masters.params), &out);
    }
}

/// Steps every parameter into new memory, for a device's bytes are not written on the host. For as long as this
/// runs an image's masters are there twice, which no budget counts: it stands for a GPU in tests.
fn step_on_host(
    step: &Step<'_>,
    layout: &ImageLayout,
    masters: &mut DeviceMasters,
    gradient: &ResidentGradient,
) {
    let values = |bytes: &DeviceBytes, float| {
        bytes.as_host().map_or_else(Vec::new, |bytes| widened(bytes, float).into_owned())
    };
    let mut params = values(&masters.params, FloatType::F32);
    let mut moments: Vec<Vec<f32>> =
        masters.moments.iter().map(|moment| values(moment, FloatType::F32)).collect();
    for (param, gradient) in layout.params.iter().zip(&gradient.params) {
        let zero = || vec![0.0; param.len];
        let gradient = gradient.as_ref().map_or_else(zero, |part| values(&part.bytes, part.float));
        let mut moments: Vec<&mut [f32]> = moments.iter_mut().map(|m| &mut m[param.range()]).collect();
        step_slice(step.update(param), &mut params[param.range()], &gradient, step.factor, &mut moments);
    }
    put_on_host(masters, params);
    masters.moments = moments.into_iter().map(bytes_of).collect();
}

/// Steps every parameter in place, and rounds them all at once.
#[cfg(feature = "cube")]
fn step_on_cube(
    step: &Step<'_>,
    layout: &ImageLayout,
    masters: &mut DeviceMasters,
    gradient: &ResidentGradient,
) {
    for (param, gradient) in layout.params.iter().zip(&gradient.params) {
        let params = param_of(&masters.params, param);
        let moments = masters.moments.iter().map(|moment| cube(&param_of(moment, param)).clone());
        let moments: Vec<_> = moments.collect();
        let gradient = match gradient {
            Some(part) => part.on_cube(),
            None => cube::zeros(&CubeFloats::wide(cube(&params).clone())),
        };
        cube::step(step.update(param), cube(&params), &gradient, step.factor, &moments);
    }
    round_on_cube(masters);
}

#[cfg(test)]
mod tests {
    use super::super::gradient::ImageGradient;
    use super::*;
    use hydra_core::{ImageParam, Init, Key, OptimizerSpec, TrainSpec};
    use hydra_spill::{Floats, Masters, NarrowFloats};

    const LEN: usize = 300;

    /// Two parameters that two layers name.
    fn layout(float: FloatType) -> ImageLayout {
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
            float,
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

    fn sum<S: ImageSum>(float: FloatType, of: impl Fn(HostTensor) -> S::Use + Copy) -> S {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let given = |values: Vec<f32>| of(HostTensor::float(values, [LEN]).in_type(float));
        let one = |slots: Vec<Option<Vec<f32>>>| slots.into_iter().map(|slot| slot.map(given)).collect();
        let micro = uses().into_iter().map(|layers| {
            let layers = layers.into_iter().map(one).collect();
            S::of_microbatch(&layout(float), layers)
        });
        micro.reduce(|sum, next| sum.add(&next, &pool)).unwrap()
    }

    /// The masters after a step on the host and one where `up` brought masters and gradients.
    fn stepped(
        spec: OptimizerSpec,
        float: FloatType,
        up: impl Fn(Bytes) -> DeviceBytes + Copy,
        burn: Device,
    ) -> (Masters, DeviceMasters) {
        let spec = TrainSpec::new(spec, 1);
        let step = Step { spec: &spec, rate: spec.optimizer.lr(), step: 3, factor: None };
        let moment = |i: u64| numbers(20 + i, 768).into_iter().map(f32::abs).collect::<Vec<f32>>();
        let moments: Vec<Vec<f32>> = (0..spec.optimizer.moments() as u64).map(moment).collect();
        let params = numbers(9, 768);
        let wide = |values: &[f32]| HostTensor::float(values.to_vec(), [768]);
        let rounded = (float != FloatType::F32).then_some(float);
        let mut there = DeviceMasters {
            params: up(wide(&params).bytes),
            narrow: rounded
                .map(|float| DeviceNarrow { float, bytes: up(wide(&params).in_type(float).bytes) }),
            moments: moments.iter().map(|moment| up(wide(moment).bytes)).collect(),
        };
        let narrow = rounded.map(|float| NarrowFloats::of(&params, float, Floats::from));
        let mut here = Masters { narrow, ..Masters::new(params, moments) };
        step.image(&layout(float), &mut here, &sum::<ImageGradient>(float, |tensor| tensor));
        let device = |tensor: HostTensor| DeviceTensor::view(up(tensor.bytes), tensor.shape, tensor.dtype);
        let link = Arc::new(hydra_spill::HostCopyLink::new(DeviceId(0)));
        let (name, measured_as, stream) = ("device".to_owned(), DeviceId(0), StreamId::current());
        let stepper = DeviceStepper { name, burn, measured_as, stream, link };
        stepper.step(&step, &layout(float), &mut there, &sum::<ResidentGradient>(float, device)).unwrap();
        (here, there)
    }

    /// Bit by bit; `down` is the way back.
    fn same(here: &Masters, there: &DeviceMasters, down: impl Fn(&DeviceBytes) -> Bytes) {
        let wide = |values: &[f32], bytes: &DeviceBytes| {
            assert_eq!(bytemuck::cast_slice::<f32, u8>(values), &down(bytes)[..]);
        };
        wide(&here.params, &there.params);
        assert_eq!(here.moments.len(), there.moments.len());
        here.moments.iter().zip(&there.moments).for_each(|(here, there)| wide(here, there));
        assert_eq!(here.narrow.is_some(), there.narrow.is_some());
        for (here, there) in here.narrow.iter().zip(&there.narrow) {
            assert_eq!(here.float_type(), there.float);
            assert_eq!(bytemuck::cast_slice::<u16, u8>(here), &down(&there.bytes)[..]);
        }
    }

    #[test]
    fn a_step_where_a_task_lives_is_the_hosts() {
        let plain = OptimizerSpec::Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.01 };
        for float in [FloatType::F32, FloatType::Bf16, FloatType::F16] {
            for spec in [OptimizerSpec::adamw(1e-2), OptimizerSpec::sgd(1e-2), plain] {
                let (here, there) = stepped(spec, float, DeviceBytes::from, Device::flex());
                same(&here, &there, |bytes| bytes.as_host().unwrap().clone());
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
        let up = |bytes: Bytes| buffer(adapter.write(&[bytes]).unwrap().remove(0));
        for float in [FloatType::F32, FloatType::Bf16, FloatType::F16] {
            if !hydra_models::ops::supports(&adapter.burn, float.dtype()) {
                eprintln!("skipped: the device does not compute with {float}");
                continue;
            }
            let (here, there) = stepped(spec, float, up, adapter.burn.clone());
            same(&here, &there, |bytes| cube(bytes).read().unwrap());
        }
    }
}
