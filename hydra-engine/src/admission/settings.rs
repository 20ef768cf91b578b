//! The settings that decide whether a run fits.

use super::buffers::stored_bytes;
use super::host_memory::DiskSpec;
use super::in_place::FrozenWeights;
use super::measure::Plans;
use super::placement::OptimizerPlacement;
use crate::device::{DeviceSpec, LogicalDevice, OwnLink, PageLocked, processors};
use crate::error::EngineError;
use crate::protocol::StopFlag;
use crate::train_task::TrainTask;
use hydra_core::{ByteSize, DeviceId, MemoryProbe};
use hydra_spill::{TierStore, alloc::AllocatorProbe};
use std::sync::Arc;

/// The default limit of host memory: effectively none.
const UNLIMITED: ByteSize = ByteSize(u64::MAX / 4);

/// The default limit of page-locked memory.
const PAGE_LOCKED: ByteSize = ByteSize::mib(1024);

/// The settings that admission depends on.
pub(crate) struct AdmissionSettings {
    pub devices: Vec<DeviceSpec>,
    pub host_memory: ByteSize,
    pub page_locked: ByteSize,
    pub disk: Option<DiskSpec>,
    pub placement: OptimizerPlacement,
    pub frozen: FrozenWeights,
    pub plans: Plans,
    pub probe: Arc<dyn MemoryProbe>,
    pub own_link: Option<Box<OwnLink>>,
    /// The most tasks that run at the same time if tasks may be queued for memory.
    pub concurrent: Option<usize>,
    /// True if a task that can never fit is skipped, false if the run is refused.
    pub leave_out: bool,
    /// Stops pilot passes between two layers.
    pub stop: StopFlag,
    /// True if tasks may be added during the run, which then gets all of its host memory.
    pub controlled: bool,
}

impl AdmissionSettings {
    /// The defaults for these devices. There must be at least one, and all must be of one kind.
    pub(crate) fn new(devices: Vec<DeviceSpec>) -> Result<Self, EngineError> {
        let first = devices.first().ok_or(EngineError::NoDevice)?;
        let kind = |spec: &DeviceSpec| std::mem::discriminant(&spec.kind);
        if let Some(other) = devices.iter().find(|other| kind(other) != kind(first)) {
            let (first, other) = (first.name.clone(), other.name.clone());
            return Err(EngineError::MixedDevices { first, other });
        }
        Ok(Self {
            devices,
            host_memory: UNLIMITED,
            page_locked: PAGE_LOCKED,
            disk: None,
            placement: OptimizerPlacement::default(),
            frozen: FrozenWeights::default(),
            plans: Plans::default(),
            probe: Arc::new(AllocatorProbe),
            own_link: None,
            concurrent: None,
            leave_out: false,
            stop: StopFlag::new(),
            controlled: false,
        })
    }

    /// The threads that may draw initial weights while a pilot pass runs: those that it leaves idle. None unless host
    /// memory holds twice the masters of all tasks and they all start together, since the values then soon take that
    /// memory anyway.
    pub(crate) fn idle_threads(&self, tasks: &[TrainTask]) -> usize {
        let stored = |task: &TrainTask| {
            task.chain.buffers().iter().map(|buffer| stored_bytes(buffer, &task.spec)).sum::<u64>()
        };
        let masters = tasks.iter().map(stored).fold(0, u64::saturating_add);
        let together = self.concurrent.is_none_or(|most| most >= tasks.len());
        if !together || masters > self.host_memory.bytes() / 2 {
            return 0;
        }
        let pilot = self.devices.iter().map(|device| device.threads).max().unwrap_or(1);
        processors().saturating_sub(pilot)
    }

    /// Opens the devices over a store. All must be of one model.
    pub(crate) fn open_devices(&self, store: &Arc<dyn TierStore>) -> Result<Vec<LogicalDevice>, EngineError> {
        let locked = PageLocked::new(self.page_locked);
        let open = |(index, spec): (usize, &DeviceSpec)| {
            let (spec, probe, own_link) = (spec.clone(), self.probe.clone(), self.own_link.as_deref());
            LogicalDevice::new(DeviceId(index), spec, store.clone(), probe, &locked, own_link)
        };
        let devices: Vec<LogicalDevice> =
            self.devices.iter().enumerate().map(open).collect::<Result<_, _>>()?;
        if let Some(other) = devices.iter().find(|other| other.model != devices[0].model) {
            let named = |device: &LogicalDevice| format!("{} ({})", device.spec.name, device.model);
            return Err(EngineError::MixedDevices { first: named(&devices[0]), other: named(other) });
        }
        Ok(devices)
    }
}
