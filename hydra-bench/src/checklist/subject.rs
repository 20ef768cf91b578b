//! The subject of the checklist: a device, opened as a run opens it.

use anyhow::{Context, Result, bail};
use burn::tensor::{DType, Device, Tensor};
use bytes::Bytes;
use hydra_core::{AnyTensor, ByteSize, DeviceBytes, DeviceTensor, FloatType, HostTensor, finish};
use hydra_engine::{DeviceKind, DeviceSpec, OpenDevice, OptimizerPlacement, Orchestrator};
use hydra_spill::{Floats, alloc};

/// The device and the options of the check.
pub(crate) struct Subject {
    pub(crate) device: DeviceSpec,
    pub(crate) page_locked: ByteSize,
    pub(crate) quick: bool,
    pub(crate) oom: bool,
}

impl Subject {
    /// Returns a quick check of a CPU device with one thread.
    #[cfg(test)]
    pub(crate) fn cpu(memory: ByteSize) -> Self {
        let device = DeviceSpec::cpu(memory);
        Self { device, page_locked: ByteSize::mib(1024), quick: true, oom: false }
    }

    /// Returns `full`, or `quick` in a quick check.
    pub(super) fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    pub(super) fn is_cuda(&self) -> bool {
        matches!(self.device.kind, DeviceKind::Cuda { .. })
    }

    pub(super) fn is_cpu(&self) -> bool {
        self.device.kind == DeviceKind::Cpu
    }

    /// Opens the device. Each item opens it separately, so that no item holds memory while another measures it.
    pub(super) fn open(&self) -> Result<OpenDevice> {
        OpenDevice::new(&self.device, self.page_locked).context("the device could not be opened")
    }

    /// Returns a run on the device with a memory budget, with optimizers on the host so that copies are exercised.
    pub(super) fn orchestrator(&self, memory: ByteSize) -> Result<Orchestrator> {
        self.placed(memory, OptimizerPlacement::Host)
    }

    pub(super) fn placed(&self, memory: ByteSize, placement: OptimizerPlacement) -> Result<Orchestrator> {
        let device = DeviceSpec { memory, ..self.device.clone() };
        let run = Orchestrator::new(vec![device])?.page_locked_memory(self.page_locked);
        Ok(run.optimizer_placement(placement))
    }
}

/// Waits for all work that this thread has submitted to the device.
pub(super) fn sync(device: &Device) -> Result<()> {
    Ok(finish(device, &[])?)
}

pub(super) fn tensor<const D: usize>(device: &Device, values: Vec<f32>, shape: [usize; D]) -> Tensor<D> {
    HostTensor::float(values, shape).to_device(device).into_float()
}

/// Views floats on the device as a tensor, without a copy.
pub(super) fn floats_of(device: &Device, bytes: DeviceBytes) -> Tensor<1> {
    let elements = bytes.len() / size_of::<f32>();
    DeviceTensor::view(bytes, [elements], DType::F32).to_device(device).into_float()
}

pub(super) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    AnyTensor::from(tensor.cast(DType::F32)).into_host().as_f32().to_vec()
}

/// Returns whole numbers from 0 to 7, different for each swap. Sums of up to two million of them are exact in any order.
pub(super) fn pattern(swap: usize, elements: usize) -> Vec<f32> {
    let salt = (swap as u32).wrapping_mul(0x9e37_79b9);
    let value = |i: u32| ((i ^ salt).wrapping_mul(0x85eb_ca6b) >> 29) as f32;
    (0..elements as u32).map(value).collect()
}

/// Converts floats to bytes without a copy.
pub(super) fn bytes_of(floats: Vec<f32>) -> Bytes {
    let elements = floats.len();
    HostTensor::float(floats, [elements]).bytes
}

/// Returns true if the link can page-lock memory of this size.
pub(super) fn locks_pages(device: &OpenDevice, elements: usize) -> bool {
    matches!(device.link.pin(vec![0.0; elements]), Floats::Pinned(_))
}

/// The compute threads of the device, as in a run. The memory of CPU threads is charged to the device.
pub(super) struct Workers(Option<rayon::ThreadPool>);

impl Workers {
    pub(super) fn new(subject: &Subject, device: &OpenDevice) -> Result<Self> {
        if !subject.is_cpu() {
            return Ok(Self(None));
        }
        let tag = Some(device.measured_as());
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(subject.device.threads)
            .thread_name(|i| format!("hydra-check-{i}"))
            .start_handler(move |_| alloc::tag_thread(tag));
        Ok(Self(Some(pool.build().context("the threads could not be started")?)))
    }

    pub(super) fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        match &self.0 {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }
}

/// Checks that the device still computes by doubling numbers, which requires no kernel that a working device may lack.
pub(super) fn computes(device: &Device) -> Result<()> {
    let given: Vec<f32> = (0..1 << 12).map(|i| i as f32).collect();
    let expected: Vec<f32> = given.iter().map(|value| 2.0 * value).collect();
    let found = values(tensor(device, given, [64, 64]).mul_scalar(2.0));
    sync(device)?;
    if found == expected { Ok(()) } else { bail!("doubled numbers are wrong") }
}

pub(super) fn supports(device: &Device, float: FloatType) -> bool {
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    return hydra_models::ops::supports(device, float.dtype());
    #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
    {
        // CPUs widen types that they do not support natively.
        let _ = (device, float);
        true
    }
}
