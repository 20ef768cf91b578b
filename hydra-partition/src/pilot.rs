//! The pilot pass: runs layers on a device with real data, forward and backward, and measures them.

use crate::PartitionError;
use burn::tensor::Device;
use bytes::Bytes;
use hydra_core::{
    Activation, AnyTensor, BackwardFrom, Batch, Chain, DeviceBytes, DeviceError, DeviceId, DeviceTensor,
    FloatType, HostActivation, HostTensor, Layer, Measured, MemoryProbe, Pass, WeightError, backward_range,
    finish, forward_range, panic_message, promote_layers, vector_jacobian,
};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// The value of every element of the upstream gradient in a pilot pass: small, and not denormal.
const UPSTREAM: f32 = 1e-3;

/// A logical device for the pilot pass; the owner of the workers implements it.
///
/// During a pilot pass nothing else may allocate on the device. Memory that is in use when it starts is
/// assumed to stay in use.
pub trait PilotDevice {
    /// The device's id, for the probe.
    fn id(&self) -> DeviceId;

    /// The plain (not the autodiff) device of tensors.
    fn burn(&self) -> Device;

    /// The probe of the device's memory.
    fn probe(&self) -> &dyn MemoryProbe;

    /// Runs `job` in the device's threads and with its allocator, and returns when it is done. The job itself
    /// catches the panics of layers.
    ///
    /// # Errors
    /// [`PartitionError::Device`] if the job could not be run.
    fn run(&self, job: &mut (dyn FnMut() + Send)) -> Result<(), PartitionError>;

    /// Copies bytes from the host into the device's memory, or returns them unchanged if moving them to the
    /// [`burn`](Self::burn) device copies them. Host memory is then aligned to four bytes. Called from the
    /// measuring thread, never within [`run`](Self::run).
    ///
    /// # Errors
    /// The device's failure, such as insufficient memory.
    fn upload(&self, bytes: &Bytes) -> Result<DeviceBytes, DeviceError>;
}

/// The parameters that a pilot pass copies to its device.
pub trait PilotValues {
    /// The values of the buffer at `buffer`, rounded to its element type, with the offsets of its layout.
    ///
    /// # Errors
    /// Values that cannot be read.
    fn promoted(&self, buffer: usize) -> Result<Bytes, WeightError>;
}

/// The initial values of a chain for a pilot pass, which does not depend on their values.
///
/// Drawn values are kept in memory, at most 32 MiB of them and the last larger buffer that layers share, such as a token
/// embedding.
#[derive(Debug)]
pub struct InitialValues<'a> {
    chain: &'a Chain,
    seed: u64,
    kept: Mutex<BTreeMap<usize, Bytes>>,
}

/// Bytes of initial values that are kept: those of models so small that drawing takes as long as computing.
const KEPT_BYTES: u64 = 32 << 20;

impl<'a> InitialValues<'a> {
    /// Returns the initial values of `chain` for a task's seed.
    pub fn new(chain: &'a Chain, seed: u64) -> Self {
        Self { chain, seed, kept: Mutex::default() }
    }
}

impl PilotValues for InitialValues<'_> {
    fn promoted(&self, buffer: usize) -> Result<Bytes, WeightError> {
        let draw = || Ok(self.chain.initial_values(buffer, self.seed)?.bytes);
        let layout = &self.chain.buffers()[buffer];
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(values) = kept.get(&buffer) {
            return Ok(values.clone());
        }
        let fits =
            kept.values().map(|values| values.len() as u64).sum::<u64>() + layout.bytes() <= KEPT_BYTES;
        if !fits && layout.layers.len() == 1 {
            drop(kept);
            return draw();
        }
        if !fits {
            // The others are dropped before this one is drawn.
            kept.clear();
        }
        let values: Bytes = draw()?;
        kept.insert(buffer, values.clone());
        Ok(values)
    }
}

/// A pass that takes less than this many seconds is timed again, up to [`TIMES`] times in total: short passes
/// are affected most by other activity on the machine.
const AGAIN_S: f64 = 0.1;
const TIMES: usize = 5;

/// Returns the median seconds of a pass whose first run took `first_s`.
fn usual_s(first_s: f64, mut again: impl FnMut() -> f64) -> f64 {
    let mut times = vec![first_s];
    while times.len() < TIMES && times.iter().sum::<f64>() < AGAIN_S {
        times.push(again());
    }
    times.sort_by(f64::total_cmp);
    times[(times.len() - 1) / 2]
}

/// The number and purpose of the runs of a range of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repetitions {
    /// One warm-up run, one to measure the memory of the graph, one to measure the rest.
    Rehearsed,
    /// Two forwards, to check that the output is repeatable.
    Repeated,
    /// As in a training run, which skips work that the batch does not require: a forward to warm up, a forward and a
    /// backward; for times.
    Timed,
    /// One run.
    Plain,
}

/// A chain with a microbatch on a device.
pub(crate) struct Pilot<'a> {
    pub chain: &'a Chain,
    pub batch: &'a Batch,
    pub buffers: &'a dyn PilotValues,
    pub device: &'a dyn PilotDevice,
}

/// Measurements of running a range of layers. Bytes are zero if the probe does not measure.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ran {
    /// The output, on the host.
    pub output: HostActivation,
    /// Whether an earlier forward had a different output.
    pub differs: bool,
    /// Bytes in use before anything was uploaded.
    pub standing_bytes: u64,
    /// Bytes of parameters and input, and of the targets if the range ends in the loss.
    pub resident_bytes: u64,
    /// Overhead of the tensors of layers and inputs: shapes, reference counts and graph nodes.
    pub wrapping_bytes: u64,
    /// Bytes of the upstream gradient.
    pub upstream_bytes: u64,
    /// Bytes of the targets, if the range ends in the loss.
    pub target_bytes: u64,
    /// The forward's peak beyond the resident bytes.
    pub forward_peak: u64,
    /// The peak of forward and backward beyond the resident bytes and the upstream gradient.
    pub backward_peak: u64,
    /// Bytes that the tracked forward left in use, including its output. Measured only in
    /// [`Repetitions::Rehearsed`].
    pub held_bytes: u64,
    /// Seconds of the forward.
    pub forward_s: f64,
    /// Seconds of the recomputed forward and backward.
    pub backward_s: f64,
}

impl Ran {
    /// The peak number of bytes in use, including all parameters.
    pub fn peak(&self) -> u64 {
        self.forward_bytes().max(self.base_bytes() + self.upstream_bytes + self.backward_peak)
    }

    /// The peak of the forward without a graph.
    pub fn forward_bytes(&self) -> u64 {
        self.base_bytes() + self.forward_peak
    }

    fn base_bytes(&self) -> u64 {
        self.standing_bytes + self.resident_bytes + self.wrapping_bytes
    }
}

impl Pilot<'_> {
    /// Returns whether a backward of layers that start at `first` computes the gradient of its input.
    pub fn has_input_gradient(&self, first: usize) -> bool {
        first > self.chain.first_trained()
    }

    /// Returns whether layers that end before `end` have a backward.
    pub fn has_backward(&self, end: usize) -> bool {
        end > self.chain.first_trained()
    }

    /// Runs these layers, forward and backward, on the input `x`.
    pub fn run(
        &self,
        range: Range<usize>,
        x: &HostActivation,
        repetitions: Repetitions,
    ) -> Result<Ran, PartitionError> {
        let standing_bytes = self.standing_bytes();
        let staged = self.stage(range.clone(), x, repetitions)?;
        let mut ran = self.on_device(&range, || staged.forward(repetitions))?;
        if ran.differs {
            let (chain, layer) = (self.chain.name().to_owned(), self.names(&range));
            return Err(PartitionError::Unrepeatable { chain, layer });
        }
        ran.output = own(&ran.output);
        ran.standing_bytes = standing_bytes;
        ran.resident_bytes = staged.resident_bytes();
        ran.target_bytes = len_bytes(&staged.targets);
        if self.has_backward(range.end) {
            let upstream = (range.end < self.chain.len()).then(|| self.upstream(&ran.output)).transpose();
            let upstream = upstream.map_err(|error| self.unfinished(&range, error))?;
            ran.upstream_bytes = upstream.iter().flatten().flatten().map(DeviceTensor::len_bytes).sum();
            let back = self.on_device(&range, || staged.backward(upstream.as_deref(), repetitions))?;
            (ran.backward_peak, ran.held_bytes, ran.backward_s) = (back.peak, back.held, back.seconds);
            ran.wrapping_bytes = ran.wrapping_bytes.max(back.wrapping);
        }
        Ok(ran)
    }

    /// Bytes in use on the device while nothing of the chain is on it.
    pub fn standing_bytes(&self) -> u64 {
        self.device.probe().in_use(self.device.id())
    }

    fn stage(
        &self,
        range: Range<usize>,
        x: &HostActivation,
        repetitions: Repetitions,
    ) -> Result<Staged<'_>, PartitionError> {
        let mut buffers = BTreeMap::new();
        for buffer in self.chain.buffers_of(range.clone()) {
            let read = self.buffers.promoted(buffer);
            let values = read.map_err(|source| PartitionError::Weights { layers: range.clone(), source })?;
            let copy = self.device.upload(&values);
            buffers.insert(buffer, copy.map_err(|error| self.unfinished(&range, error))?);
        }
        let unfinished = |error| self.unfinished(&range, error);
        let targets = match range.end > self.chain.targets_from() {
            true => self.upload(&self.batch.targets).map_err(unfinished)?,
            false => Vec::new(),
        };
        Ok(Staged {
            chain: self.chain,
            buffers,
            x: self.upload(x).map_err(unfinished)?,
            targets,
            meter: Meter { probe: self.device.probe(), id: self.device.id(), device: self.device.burn() },
            input_gradients: self.has_input_gradient(range.start),
            worst_case: repetitions != Repetitions::Timed,
            range,
        })
    }

    /// Returns a gradient for every float tensor of `y`, in the device's memory.
    fn upstream(&self, y: &HostActivation) -> Result<Vec<Option<DeviceTensor>>, DeviceError> {
        let gradient = |part: &HostTensor| {
            let n = part.shape.iter().product();
            let Some(float) = FloatType::from_dtype(part.dtype) else { return Ok(None) };
            let host = HostTensor::float(vec![UPSTREAM; n], part.shape.clone()).in_type(float);
            self.upload_tensor(&host).map(Some)
        };
        y.parts.iter().map(gradient).collect()
    }

    fn upload(&self, x: &HostActivation) -> Result<Vec<DeviceTensor>, DeviceError> {
        x.parts.iter().map(|part| self.upload_tensor(part)).collect()
    }

    fn upload_tensor(&self, x: &HostTensor) -> Result<DeviceTensor, DeviceError> {
        Ok(DeviceTensor::view(self.device.upload(&x.bytes)?, x.shape.clone(), x.dtype))
    }

    /// Runs `work` where the device computes. A panic in it is reported as a failure of the layers.
    fn on_device<T: Send>(
        &self,
        range: &Range<usize>,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T, PartitionError> {
        let mut work = Some(work);
        let mut done = None;
        self.device.run(&mut || {
            if let Some(work) = work.take() {
                done = Some(catch_unwind(AssertUnwindSafe(work)));
            }
        })?;
        match done {
            Some(Ok(result)) => Ok(result),
            Some(Err(panic)) => Err(self.failed(range, panic.as_ref())),
            None => Err(PartitionError::Device { device: self.device.id(), source: None }),
        }
    }

    fn failed(&self, range: &Range<usize>, panic: &(dyn std::any::Any + Send)) -> PartitionError {
        if let Some(error) = DeviceError::from_panic(panic) {
            return self.unfinished(range, error.clone());
        }
        let message = panic_message(panic);
        PartitionError::Layer { chain: self.chain.name().to_owned(), layer: self.names(range), message }
    }

    fn unfinished(&self, range: &Range<usize>, source: DeviceError) -> PartitionError {
        PartitionError::Unfinished { chain: self.chain.name().to_owned(), layer: self.names(range), source }
    }

    fn names(&self, range: &Range<usize>) -> String {
        let name = |layer: usize| self.chain.layers()[layer].name.as_str();
        match range.len() {
            1 => name(range.start).to_owned(),
            _ => format!("{}..{}", name(range.start), name(range.end - 1)),
        }
    }
}

fn len_bytes(tensors: &[DeviceTensor]) -> u64 {
    tensors.iter().map(DeviceTensor::len_bytes).sum()
}

/// Returns a digest for comparing outputs without keeping them.
fn digest(x: &HostActivation) -> u64 {
    let mut hasher = DefaultHasher::new();
    x.parts.iter().for_each(|part| part.bytes.hash(&mut hasher));
    hasher.finish()
}

/// Copies the activation into memory of the calling thread, so that no device memory stays in use.
fn own(x: &HostActivation) -> HostActivation {
    HostActivation { parts: x.parts.iter().map(HostTensor::copied).collect() }
}

/// Layers with all their inputs, in the device's memory.
struct Staged<'a> {
    chain: &'a Chain,
    range: Range<usize>,
    buffers: BTreeMap<usize, DeviceBytes>,
    x: Vec<DeviceTensor>,
    targets: Vec<DeviceTensor>,
    meter: Meter<'a>,
    input_gradients: bool,
    /// Whether passes use the worst case.
    worst_case: bool,
}

impl Staged<'_> {
    /// Bytes of parameters, input and targets, including parameters that a promotion shares with the host.
    fn resident_bytes(&self) -> u64 {
        let params: u64 = self.buffers.values().map(|buffer| buffer.len() as u64).sum();
        params + len_bytes(&self.x) + len_bytes(&self.targets)
    }

    fn layers(&self, track: bool) -> Vec<Box<dyn Layer>> {
        let buffer = |buffer: usize| self.buffers[&buffer].clone();
        promote_layers(self.chain, self.range.clone(), &buffer, &self.meter.device, track)
    }

    fn input(&self) -> Activation {
        Activation::from_device_tensors(&self.x, &self.meter.device.clone().autodiff())
    }

    fn pass(&self) -> Pass {
        let pass = Pass::train(Pass::key_of(0, 0, 0), self.targets());
        if self.worst_case { pass.worst_case() } else { pass }
    }

    fn targets(&self) -> Activation {
        Activation::from_device_tensors(&self.targets, &self.meter.device.clone().autodiff())
    }

    /// Runs the forward without a graph.
    fn forward(&self, repetitions: Repetitions) -> Ran {
        let wrapped = || (self.layers(false), self.input(), self.pass());
        let ((layers, x, pass), wrapping_bytes) = self.meter.left_by(wrapped);
        let forward = || -> Vec<DeviceTensor> {
            let y = forward_range(&layers, self.range.start, x.clone(), &pass);
            y.into_parts().into_iter().map(AnyTensor::into_device_tensor).collect()
        };
        let to_host = |y: &[DeviceTensor]| Activation::from_device_tensors(y, &self.meter.device).into_host();
        let before = (repetitions != Repetitions::Plain).then(|| digest(&to_host(&forward())));
        let (y, mut forward_peak, first_s) = self.meter.watch(forward);
        let output = to_host(&y);
        drop(y);
        // Threads split their work differently each time, and thereby their workspace.
        let mut again = || {
            let (_, peak, seconds) = self.meter.watch(forward);
            forward_peak = forward_peak.max(peak);
            seconds
        };
        let forward_s = match repetitions {
            Repetitions::Plain | Repetitions::Timed => first_s,
            Repetitions::Rehearsed | Repetitions::Repeated => usual_s(first_s, &mut again),
        };
        let differs = before.is_some_and(|before| before != digest(&output));
        // The metrics of an evaluation may take more than the loss.
        let evaluation_peak = if self.measures_metrics() { self.evaluation(&layers, x.clone()) } else { 0 };
        let forward_peak = forward_peak.max(evaluation_peak);
        Ran { output, differs, wrapping_bytes, forward_peak, forward_s, ..Ran::default() }
    }

    fn measures_metrics(&self) -> bool {
        self.range.end == self.chain.len() && !self.chain.objective().metrics().is_empty()
    }

    /// The peak of an evaluation forward.
    fn evaluation(&self, layers: &[Box<dyn Layer>], x: Activation) -> u64 {
        let pass = Pass::evaluate(self.targets()).worst_case();
        let run = || Measured::from_output(forward_range(layers, self.range.start, x, &pass));
        self.meter.watch(run).1
    }

    /// Runs the recomputed forward and the backward.
    fn backward(&self, upstream: Option<&[Option<DeviceTensor>]>, repetitions: Repetitions) -> RanBack {
        let mut held = 0;
        if repetitions == Repetitions::Rehearsed {
            self.watch_backward(upstream);
            held = self.held(upstream);
        }
        let measured = self.watch_backward(upstream);
        let mut peak = measured.peak;
        let mut again = || {
            let again = self.watch_backward(upstream);
            peak = peak.max(again.peak);
            again.seconds
        };
        let seconds = match repetitions {
            Repetitions::Plain | Repetitions::Timed => measured.seconds,
            Repetitions::Rehearsed | Repetitions::Repeated => usual_s(measured.seconds, &mut again),
        };
        RanBack { held, seconds, peak, ..measured }
    }

    fn watch_backward(&self, upstream: Option<&[Option<DeviceTensor>]>) -> RanBack {
        let wrapped = || (self.layers(true), self.input(), self.pass(), self.from(upstream));
        let ((layers, x, pass, from), wrapping) = self.meter.left_by(wrapped);
        let first = self.range.start;
        let run =
            || backward_range(layers, first, x, from, &pass, self.input_gradients).into_device_tensors();
        let (made, peak, seconds) = self.meter.watch(run);
        self.meter.finish(&made);
        RanBack { peak, held: 0, seconds, wrapping }
    }

    /// Returns the bytes that come into use with the tracked forward and remain after it. Also runs the
    /// backward, because Burn never frees a graph that is dropped without one.
    fn held(&self, upstream: Option<&[Option<DeviceTensor>]>) -> u64 {
        let (layers, x, pass, from) = (self.layers(true), self.input(), self.pass(), self.from(upstream));
        let x = if self.input_gradients { x.into_leaves() } else { x };
        let (y, held) = self.meter.left_by(|| forward_range(&layers, self.range.start, x.clone(), &pass));
        let gradients = match from {
            BackwardFrom::Loss { .. } => {
                let loss = y.into_float::<1>();
                loss.is_tracked().then(|| loss.backward())
            }
            BackwardFrom::Gradient(upstream) => {
                vector_jacobian(y.into_parts().into_iter().zip(upstream).collect())
            }
        };
        drop(gradients);
        held
    }

    fn from(&self, upstream: Option<&[Option<DeviceTensor>]>) -> BackwardFrom {
        let Some(upstream) = upstream else { return BackwardFrom::Loss { weight: 1.0 } };
        let to_device =
            |part: &Option<DeviceTensor>| part.as_ref().map(|part| part.to_device(&self.meter.device));
        BackwardFrom::Gradient(upstream.iter().map(to_device).collect())
    }
}

/// Measurements of a recomputed forward and backward: peak bytes, bytes that the forward held, tensor
/// overhead, and seconds.
struct RanBack {
    peak: u64,
    held: u64,
    wrapping: u64,
    seconds: f64,
}

/// Measures a device's memory and the time.
struct Meter<'a> {
    probe: &'a dyn MemoryProbe,
    id: DeviceId,
    device: Device,
}

impl Meter<'_> {
    /// Returns the result, the peak beyond the bytes in use before, and the seconds.
    fn watch<T>(&self, work: impl FnOnce() -> T) -> (T, u64, f64) {
        self.finish(&[]);
        self.probe.reset_peak(self.id);
        let before = self.probe.in_use(self.id);
        let start = Instant::now();
        let result = work();
        self.finish(&[]);
        let seconds = start.elapsed().as_secs_f64();
        (result, self.probe.peak(self.id).saturating_sub(before), seconds)
    }

    /// Returns the result and the increase of the bytes in use.
    fn left_by<T>(&self, work: impl FnOnce() -> T) -> (T, u64) {
        self.finish(&[]);
        let before = self.probe.in_use(self.id);
        let result = work();
        self.finish(&[]);
        (result, self.probe.in_use(self.id).saturating_sub(before))
    }

    /// Waits for the device's pending work, and checks that it computed `made`.
    fn finish(&self, made: &[DeviceTensor]) {
        finish(&self.device, &made.iter().collect::<Vec<_>>()).unwrap_or_else(|error| panic_any(error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::module::Module;
    use burn::nn::{Linear, LinearConfig};
    use hydra_core::Forward;

    #[derive(Module, Debug)]
    struct Wide {
        linear: Linear,
    }

    impl Forward for Wide {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            Activation::of(self.linear.forward(x.into_float::<2>()))
        }
    }

    #[test]
    fn small_values_are_drawn_once_and_large_ones_each_time() {
        let linear = |[inputs, outputs]: [usize; 2]| Wide {
            linear: LinearConfig::new(inputs, outputs).init(&Device::flex()),
        };
        let chain =
            Chain::builder("chain").layer("small", linear([4, 2100])).layer("large", linear([2100, 4096]));
        let chain = chain.build().unwrap();
        let values = InitialValues::new(&chain, 0);
        for (buffer, is_kept) in [(0, true), (1, false)] {
            let [first, second] = [0; 2].map(|_| values.promoted(buffer).unwrap());
            assert_eq!(first.as_ptr() == second.as_ptr(), is_kept);
            assert_eq!(first, chain.initial_values(buffer, 0).unwrap().bytes);
        }
    }

    #[test]
    fn what_takes_little_is_timed_again() {
        let timed = |times: &[f64]| {
            let mut again = times.iter().copied();
            (usual_s(again.next().unwrap(), || again.next().unwrap()), again.count())
        };
        assert_eq!(timed(&[0.2, 0.01]), (0.2, 1), "long enough for one measurement");
        assert_eq!(timed(&[0.02, 0.01, 0.011, 0.012, 0.013, 0.014]), (0.012, 1), "the median of five");
        assert_eq!(timed(&[0.01, 0.2, 0.3]), (0.01, 1), "the shorter of two");
    }
}
