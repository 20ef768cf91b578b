//! Logical devices: CPU threads or a GPU (or a part of one), each with its own memory budget and threads.
//!
//! May touch: the protocol, the optimizer's jobs, and the memory and links of devices.
//! Never: chooses the work that it runs, or reads tasks beyond their names and chains.

mod executor;
mod gpu;
mod open;
mod sums;
mod time_slices;
mod worker;

pub(crate) use executor::ShardWork;
pub(crate) use gpu::PageLocked;
pub use open::OpenDevice;
pub(crate) use time_slices::TimeSlices;
pub(crate) use worker::{Adding, Buffer, ComputeJob, DownloadJob, GradientPart, PromoteJob, Worker};

use crate::error::{EngineError, with_causes};
use crate::optimizer::{DeviceStepper, memory_of};
use crate::protocol::LayerGradients;
use burn::backend::StreamId;
use burn::tensor::Tensor;
use hydra_core::{
    AnyTensor, Bandwidth, ByteSize, Chain, DeviceBytes, DeviceError, DeviceId, DeviceTensor, HostTensor,
    MemoryProbe, finish,
};
use hydra_partition::{PartitionError, PilotDevice};
use hydra_spill::{
    Budget, DeviceLink, HostCopyLink, LinkError, Reservation, SimulatedLink, SpillError, SpillManager,
    TierStore, ZeroCopyLink, alloc,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use sums::Sums;

/// The processors of this machine that the process may use.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The hardware that computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// Threads of this machine's CPU.
    #[default]
    Cpu,
    /// An NVIDIA card; requires the feature `cuda`.
    Cuda {
        /// Its index, in the driver's order.
        card: usize,
    },
    /// An adapter with a Vulkan driver; requires the feature `wgpu`.
    Wgpu {
        /// Its index: discrete GPUs come first, the CPU last.
        adapter: usize,
    },
}

impl DeviceKind {
    /// The number of shards into which a model that is larger than the device would be cut if its layers were equal and
    /// memory did not require more. A GPU computes on a shard while its copies and the host optimizer work on others; on a
    /// CPU these share the cores with computation, and the fewest shards recompute the least.
    pub(crate) fn pipeline_depth(self) -> usize {
        match self {
            Self::Cpu => 1,
            Self::Cuda { .. } | Self::Wgpu { .. } => 16,
        }
    }
}

/// The description of a logical device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSpec {
    /// A name for reports, such as `cpu:0`.
    pub name: String,
    /// The hardware that computes.
    pub kind: DeviceKind,
    /// Compute threads of a CPU. A GPU has one, and the host optimizer gets the remaining processors.
    pub threads: usize,
    /// The memory budget: resident parameters, activations, gradients and workspace.
    pub memory: ByteSize,
    /// A simulated link's bandwidth in each direction; `None` copies as fast as memory allows.
    pub link: Option<Bandwidth>,
    /// A simulated link's latency per transfer.
    pub latency: Duration,
    /// The number of logical devices on the GPU, including this one.
    pub sharing: usize,
    /// True if it reads and writes host memory directly, without copies, unless it is behind a simulated link.
    pub zero_copy: bool,
    /// True if parameters are cached on the device after their shard task, in otherwise free memory, until their
    /// master weights change.
    pub caches: bool,
}

impl DeviceSpec {
    /// A CPU device with one thread and this memory budget, called `cpu:0`.
    pub fn cpu(memory: ByteSize) -> Self {
        Self::of(DeviceKind::Cpu, "cpu:0".to_owned(), memory)
    }

    /// An NVIDIA card with this memory budget, called `cuda:card`.
    pub fn cuda(card: usize, memory: ByteSize) -> Self {
        Self::of(DeviceKind::Cuda { card }, format!("cuda:{card}"), memory)
    }

    /// An adapter with a Vulkan driver and this memory budget, called `wgpu:adapter`.
    pub fn wgpu(adapter: usize, memory: ByteSize) -> Self {
        Self::of(DeviceKind::Wgpu { adapter }, format!("wgpu:{adapter}"), memory)
    }

    fn of(kind: DeviceKind, name: String, memory: ByteSize) -> Self {
        let latency = Duration::ZERO;
        Self {
            name,
            kind,
            threads: 1,
            memory,
            link: None,
            latency,
            sharing: 1,
            zero_copy: false,
            caches: true,
        }
    }

    /// Sets the number of compute threads, at least one.
    pub fn threads(self, threads: usize) -> Self {
        Self { threads: threads.max(1), ..self }
    }

    /// Returns `count` logical devices like this one, each with its memory budget: `cpu:0`, `cpu:1`, .., or parts of
    /// one GPU, `cuda:0/0`, `cuda:0/1`, ...
    pub fn times(self, count: usize) -> Vec<Self> {
        let device = |index: usize| match self.kind {
            DeviceKind::Cpu => Self { name: format!("cpu:{index}"), ..self.clone() },
            _ if count == 1 => self.clone(),
            _ => Self { name: format!("{}/{index}", self.name), sharing: count, ..self.clone() },
        };
        (0..count).map(device).collect()
    }

    /// Makes the host's memory the device's own. A GPU, which has none of it, is unchanged.
    pub fn zero_copy(self) -> Self {
        Self { zero_copy: true, ..self }
    }

    /// Enables or disables the parameter cache; enabled by default.
    pub fn cache_copies(self, on: bool) -> Self {
        Self { caches: on, ..self }
    }

    /// Adds a simulated link in front of the device.
    pub fn with_link(self, bandwidth: Bandwidth, latency: Duration) -> Self {
        Self { link: Some(bandwidth), latency, ..self }
    }
}

/// Wraps or replaces a device's own link.
pub(crate) type OwnLink = dyn Fn(&DeviceSpec, Arc<dyn DeviceLink>) -> Arc<dyn DeviceLink> + Send + Sync;

/// A device that is set up: its threads, its budget, its link.
pub(crate) struct LogicalDevice {
    pub id: DeviceId,
    pub spec: DeviceSpec,
    /// The hardware and the memory probe; costs measured with another value do not apply.
    pub model: String,
    pub burn: burn::tensor::Device,
    pub pool: Arc<rayon::ThreadPool>,
    /// The stream of the compute thread, which other threads use for a GPU too; unused on a CPU.
    pub stream: StreamId,
    pub manager: Arc<SpillManager>,
    pub probe: Arc<dyn MemoryProbe>,
    /// The link of the pilot pass, without simulated delays.
    pilot: Arc<dyn DeviceLink>,
    /// Memory for allocations that exist regardless of the work.
    standing: Option<Reservation>,
    tag: alloc::TagLease,
}

/// The number of values that are doubled to test whether a device computes.
const TRIAL: usize = 64;

/// The components of a kind of device.
pub(crate) struct Hardware {
    /// The properties of the hardware that results and costs depend on.
    pub model: String,
    pub burn: burn::tensor::Device,
    pub link: Arc<dyn DeviceLink>,
    pub probe: Arc<dyn MemoryProbe>,
    pub pilot: Arc<dyn DeviceLink>,
}

impl Hardware {
    /// Opens the hardware of `spec`; `probe` measures a CPU.
    pub(crate) fn open(
        spec: &DeviceSpec,
        measured_as: DeviceId,
        probe: Arc<dyn MemoryProbe>,
        locked: &PageLocked,
    ) -> Result<Self, EngineError> {
        if spec.kind != DeviceKind::Cpu {
            return gpu::hardware(spec, locked);
        }
        let copies: Arc<dyn DeviceLink> = Arc::new(HostCopyLink::new(measured_as));
        let link: Arc<dyn DeviceLink> = match spec.zero_copy && spec.link.is_none() {
            true => Arc::new(ZeroCopyLink::new(measured_as)),
            false => copies.clone(),
        };
        let model = if probe.measures() { "allocator" } else { "shapes" };
        Ok(Self { model: model.to_owned(), burn: burn::tensor::Device::flex(), link, probe, pilot: copies })
    }
}

/// The bytes that the pools of a device may keep that `sharing` logical devices of this `budget` share. Promotions
/// reserve half of the memory that their link has prepared; the other half is in addition to the budget.
fn kept_by_pools(budget: u64, prepared: u64, sharing: u64) -> u64 {
    budget.saturating_add(prepared / 2).saturating_mul(sharing)
}

impl LogicalDevice {
    pub(crate) fn new(
        id: DeviceId,
        spec: DeviceSpec,
        store: Arc<dyn TierStore>,
        probe: Arc<dyn MemoryProbe>,
        locked: &PageLocked,
        own_link: Option<&OwnLink>,
    ) -> Result<Self, EngineError> {
        let tag = alloc::TagLease::take();
        let measured_as = tag.device();
        // Pool threads carry the device's tag, so that the counting allocator charges their allocations to it.
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(spec.threads)
            .thread_name(move |i| format!("hydra-compute-{}-{i}", id.0))
            .start_handler(move |_| alloc::tag_thread(Some(measured_as)))
            .build()
            .map_err(|error| EngineError::Worker { worker: spec.name.clone(), problem: error.to_string() })?;
        let stream = pool.install(StreamId::current);
        let hardware = stream.executes(|| Hardware::open(&spec, measured_as, probe, locked))?;
        let Hardware { model, burn, link, probe, pilot } = hardware;
        warm_up(&pool, &burn);
        let link: Arc<dyn DeviceLink> = match spec.link {
            Some(bandwidth) => Arc::new(SimulatedLink::new(link, bandwidth, spec.latency)),
            None => link,
        };
        let link = match own_link {
            Some(own) => own(&spec, link),
            None => link,
        };
        let budget = Budget::measured_as(measured_as, spec.name.clone(), spec.memory);
        let manager = SpillManager::new(id, budget, store, link).cache_copies(spec.caches);
        let manager = Arc::new(manager);
        let (pool, standing) = (Arc::new(pool), None);
        Ok(Self { id, spec, model, burn, pool, stream, manager, probe, pilot, standing, tag })
    }

    /// Withholds memory from tasks for the life of the device: `standing` bytes of permanent allocations, and `spare`
    /// bytes that stay free.
    pub(crate) fn set_aside(&mut self, standing: u64, spare: u64) -> Result<(), EngineError> {
        let budget = self.manager.budget();
        let room = budget.reserve(standing, "buffers of the device's threads").map_err(SpillError::from)?;
        budget.leave_free(spare);
        self.standing = Some(room);
        Ok(())
    }

    /// Bytes of permanent allocations on the device.
    pub(crate) fn standing_bytes(&self) -> u64 {
        self.standing.as_ref().map_or(0, Reservation::bytes)
    }

    /// Bytes of the budget that are available to tasks.
    pub(crate) fn for_tasks(&self) -> u64 {
        self.manager.budget().usable().saturating_sub(self.standing_bytes())
    }

    /// Frees memory that the allocator caches beyond the budgets of all logical devices of the hardware.
    pub(crate) fn trim(&self) {
        let (budget, prepared) = (self.manager.budget().capacity(), self.manager.link().prepared());
        self.probe.trim(self.measured_as(), kept_by_pools(budget, prepared, self.spec.sharing as u64));
    }

    /// Tests a device after a failed shard task; returns true if it computes, reports its memory and is reachable
    /// over its link. A lost GPU, or one whose driver has failed, fails every later operation.
    pub(crate) fn computes(&self) -> bool {
        let trial = AssertUnwindSafe(|| alloc::with_tag(Some(self.measured_as()), || self.doubles()));
        let tried = catch_unwind(trial).unwrap_or_else(|panic| {
            Err(DeviceError::from_panic(panic.as_ref())
                .cloned()
                .unwrap_or_else(|| DeviceError::new("it panicked")))
        });
        // A device that is out of memory has answered.
        tried.unwrap_or_else(|error| matches!(error, DeviceError::OutOfMemory { .. }))
    }

    /// Doubles numbers on the device; returns true if the result is right.
    fn doubles(&self) -> Result<bool, DeviceError> {
        let of_spill = |error| match error {
            SpillError::Link(error) => of_link(error),
            other => DeviceError::new(with_causes(&other)),
        };
        self.probe.in_use(self.measured_as());
        let given: Vec<f32> = (0..TRIAL).map(|i| i as f32).collect();
        let uploaded = self.manager.upload(&[HostTensor::float(given.clone(), [TRIAL])]).map_err(of_spill)?;
        let doubled: Tensor<1> = uploaded[0].to_device(&self.burn).into_float().mul_scalar(2.0);
        let doubled = AnyTensor::from(doubled).into_device_tensor();
        finish(&self.burn, &[&doubled])?;
        let doubled = self.manager.download(vec![Some(doubled)]).map_err(of_spill)?;
        let doubled = doubled.into_iter().flatten().next();
        let doubled = doubled.as_ref().map_or(&[][..], HostTensor::as_f32);
        Ok(doubled.iter().copied().eq(given.iter().map(|number| 2.0 * number)))
    }

    /// Adds the gradients of a microbatch to the accumulated ones, on the device.
    fn add_gradients(&self, chain: &Chain, sums: Sums, next: &mut LayerGradients) -> Result<(), EngineError> {
        let memory = memory_of(self.manager.link().clone(), &self.burn);
        let add = || sums::add(chain, memory.as_ref(), &sums.gradients, next);
        alloc::with_tag(Some(self.measured_as()), add);
        let made: Vec<&DeviceTensor> = next.iter().flat_map(|(_, of)| of.iter().flatten()).collect();
        finish(&self.burn, &made).map_err(|error| EngineError::Worker {
            worker: self.spec.name.clone(),
            problem: error.to_string(),
        })
    }

    /// The stepper of master weights that are resident on the device.
    pub(crate) fn stepper(&self) -> DeviceStepper {
        DeviceStepper {
            name: self.spec.name.clone(),
            burn: self.burn.clone(),
            measured_as: self.measured_as(),
            stream: self.stream,
            memory: memory_of(self.manager.link().clone(), &self.burn),
        }
    }

    /// The device's tag for the memory probe, which differs from those of other runs in this process.
    pub(crate) fn measured_as(&self) -> DeviceId {
        self.tag.device()
    }
}

/// Makes every pool thread allocate its buffers for matrix products before a pilot pass measures memory.
fn warm_up(pool: &rayon::ThreadPool, device: &burn::tensor::Device) {
    const SIDE: usize = 256;
    pool.broadcast(|_| {
        let x = burn::tensor::Tensor::<2>::ones([SIDE, SIDE], device);
        drop(x.clone().matmul(x));
    });
}

impl PilotDevice for LogicalDevice {
    fn id(&self) -> DeviceId {
        self.measured_as()
    }

    fn burn(&self) -> burn::tensor::Device {
        self.burn.clone()
    }

    fn probe(&self) -> &dyn MemoryProbe {
        self.probe.as_ref()
    }

    fn run(&self, job: &mut (dyn FnMut() + Send)) -> Result<(), PartitionError> {
        self.pool.install(job);
        Ok(())
    }

    fn upload(&self, bytes: &bytes::Bytes) -> Result<DeviceBytes, DeviceError> {
        self.pilot.upload(bytes).map_err(of_link)
    }
}

/// The error of a link, or the device's own error if there is one.
fn of_link(error: LinkError) -> DeviceError {
    match error {
        LinkError::Transfer { source, .. } if source.is::<DeviceError>() => {
            source.downcast().map_or_else(DeviceError::new, |error| *error)
        }
        LinkError::Memory { bytes, .. } => DeviceError::OutOfMemory { bytes },
        other => DeviceError::new(with_causes(&SpillError::from(other))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_of_promotions_is_not_what_the_pools_keep() {
        assert_eq!([kept_by_pools(1600, 800, 1), kept_by_pools(1600, 800, 2)], [2000, 4000]);
        assert_eq!(kept_by_pools(u64::MAX, 800, 2), u64::MAX);
    }
}
