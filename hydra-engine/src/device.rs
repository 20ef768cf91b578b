//! A logical device: some CPU threads with a memory budget of their own.

use crate::error::EngineError;
use hydra_core::{Bandwidth, ByteSize, DeviceBytes, DeviceId, MemoryProbe};
use hydra_partition::{PartitionError, PilotDevice};
use hydra_spill::{
    Budget, DeviceLink, HostCopyLink, SharedLink, SimulatedLink, SpillManager, TierStore, alloc,
};
use std::sync::Arc;
use std::time::Duration;

/// What a logical device is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSpec {
    /// A name for reports, such as `cpu:0`.
    pub name: String,
    /// Compute threads.
    pub threads: usize,
    /// The memory budget: resident parameters, activations, gradients and workspace.
    pub memory: ByteSize,
    /// A simulated link's bandwidth in each direction; `None` copies as fast as memory allows.
    pub link: Option<Bandwidth>,
    /// A simulated link's latency per transfer.
    pub latency: Duration,
    /// Whether it reads masters and batches where they are on the host, and leaves there what it makes:
    /// nothing is copied. A device behind a simulated link copies all the same.
    pub resident: bool,
}

impl DeviceSpec {
    /// `count` devices called `cpu:0`, `cpu:1`, .. with so many threads and so much memory each.
    pub fn cpus(count: usize, threads: usize, memory: ByteSize) -> Vec<Self> {
        let device = |i| Self {
            name: format!("cpu:{i}"),
            threads: threads.max(1),
            memory,
            link: None,
            latency: Duration::ZERO,
            resident: false,
        };
        (0..count).map(device).collect()
    }

    /// This device with the host's memory as its own.
    pub fn resident(self) -> Self {
        Self { resident: true, ..self }
    }

    /// This device behind a simulated link.
    pub fn with_link(self, bandwidth: Bandwidth, latency: Duration) -> Self {
        Self { link: Some(bandwidth), latency, ..self }
    }
}

/// A device that is set up: its threads, its budget, its link.
pub(crate) struct LogicalDevice {
    pub id: DeviceId,
    pub spec: DeviceSpec,
    pub burn: burn::tensor::Device,
    pub pool: Arc<rayon::ThreadPool>,
    pub manager: Arc<SpillManager>,
    pub probe: Arc<dyn MemoryProbe>,
    tag: alloc::TagLease,
}

impl LogicalDevice {
    pub(crate) fn new(
        id: DeviceId,
        spec: DeviceSpec,
        store: Arc<dyn TierStore>,
        probe: Arc<dyn MemoryProbe>,
    ) -> Result<Self, EngineError> {
        let tag = alloc::TagLease::take();
        let measured_as = tag.device();
        // Pool threads carry the device's tag, so that the counting allocator charges what they allocate.
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(spec.threads)
            .thread_name(move |i| format!("hydra-compute-{}-{i}", id.0))
            .start_handler(move |_| alloc::tag_thread(Some(measured_as)))
            .build()
            .map_err(|error| EngineError::Worker { worker: spec.name.clone(), problem: error.to_string() })?;
        warm_up(&pool);
        let copies = HostCopyLink::new(measured_as);
        let link: Arc<dyn DeviceLink> = match spec.link {
            Some(bandwidth) => Arc::new(SimulatedLink::new(copies, bandwidth, spec.latency)),
            None if spec.resident => Arc::new(SharedLink::new(measured_as)),
            None => Arc::new(copies),
        };
        let budget = Budget::new(spec.name.clone(), spec.memory);
        let manager = Arc::new(SpillManager::new(id, budget, store, link));
        Ok(Self { id, spec, burn: burn::tensor::Device::flex(), pool: Arc::new(pool), manager, probe, tag })
    }

    /// The device as the memory probe knows it: devices of other runs in this process have other figures.
    pub(crate) fn measured_as(&self) -> DeviceId {
        self.tag.device()
    }
}

/// Makes every thread of the pool allocate the buffers that matrix products keep for each thread, so that a
/// pilot pass finds them there and they do not appear in the middle of a run.
fn warm_up(pool: &rayon::ThreadPool) {
    const SIDE: usize = 256;
    pool.broadcast(|_| {
        let x = burn::tensor::Tensor::<2>::ones([SIDE, SIDE], &burn::tensor::Device::flex());
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

    fn bring_in(&self, bytes: &bytes::Bytes) -> DeviceBytes {
        // Not through the device's link: a simulated one would make the pilot pass wait for nothing.
        HostCopyLink::new(self.measured_as()).copy_in(bytes).unwrap_or_else(|_| bytes.clone().into())
    }
}

/// The message of a caught panic.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}
