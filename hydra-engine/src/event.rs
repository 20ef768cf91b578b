//! What the orchestrator hears. The enum is closed: its loop matches every case.

use crate::clock::{Clock, Time};
use crate::error::EngineError;
use crate::loader::Loaded;
use crossbeam_channel::Sender;
use hydra_core::{DeviceId, DeviceTensor, HostTensor, Measured, TaskId};
use hydra_spill::Reservation;
use std::sync::Arc;

/// Numbers the shard tasks of a run in the order in which they were claimed.
pub(crate) type Ticket = u64;

/// The gradient of each tensor of an activation.
pub(crate) type Gradient<T> = Vec<Option<T>>;

/// A tensor on one side of a link.
pub(crate) trait LenBytes {
    /// The number of bytes.
    fn len_bytes(&self) -> u64;
}

impl LenBytes for HostTensor {
    fn len_bytes(&self) -> u64 {
        Self::len_bytes(self)
    }
}

impl LenBytes for DeviceTensor {
    fn len_bytes(&self) -> u64 {
        Self::len_bytes(self)
    }
}

/// The bytes of these tensors.
pub(crate) fn len_bytes<'a, T: LenBytes + 'a>(tensors: impl IntoIterator<Item = &'a T>) -> u64 {
    tensors.into_iter().map(LenBytes::len_bytes).sum()
}

/// What a shard task hands to the next one of its sweep, on the device or on the host.
#[derive(Clone, Debug)]
pub(crate) enum Output<T> {
    /// Nothing: the sweep ends here.
    None,
    /// The boundary activation.
    Activation(Vec<T>),
    /// The gradient of the shard's input.
    Gradient(Gradient<T>),
}

impl<T: LenBytes> Output<T> {
    /// The number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::Activation(boundary) => len_bytes(boundary),
            Self::Gradient(gradient) => len_bytes(gradient.iter().flatten()),
        }
    }
}

/// What a compute worker made; all bytes are still device memory.
pub(crate) struct Computed {
    pub output: Output<DeviceTensor>,
    /// For each layer with trained parameters: its index in the chain and its gradients.
    pub gradients: Vec<(usize, Gradient<DeviceTensor>)>,
    /// The mean loss of the microbatch, at the last shard, with the chain's metrics in an evaluation.
    pub measured: Option<Measured>,
}

impl Computed {
    /// All tensors.
    pub(crate) fn made(&self) -> Vec<&DeviceTensor> {
        let output: Vec<&DeviceTensor> = match &self.output {
            Output::None => Vec::new(),
            Output::Activation(parts) => parts.iter().collect(),
            Output::Gradient(parts) => parts.iter().flatten().collect(),
        };
        let gradients = self.gradients.iter().flat_map(|(_, of)| of.iter().flatten());
        output.into_iter().chain(gradients).collect()
    }

    /// What outputs and gradients take on the device until they are down.
    pub(crate) fn room(&self) -> u64 {
        let made = self.made();
        UPKEEP * made.len() as u64 + len_bytes(made)
    }
}

/// What a tensor takes beside its bytes, in bytes: its shape, who holds it, and the headers of these blocks. Some
/// 350 were measured. It matters where a model has many small tensors.
const UPKEEP: u64 = 512;

/// What a shard task made, with the device memory that it takes until it is down.
pub(crate) struct Made {
    pub computed: Computed,
    /// Shared with whoever takes the output over on the device.
    pub output: Arc<Reservation>,
    pub gradients: Reservation,
}

pub(crate) enum Event {
    /// Batches were read ahead, or could not be.
    Loaded { task: TaskId, loaded: Loaded },
    /// A promotion ended; the payload is about to be in the device's double buffer.
    Promoted { device: DeviceId, task: TaskId, ticket: Ticket, time: Time, failure: Option<EngineError> },
    /// A shard task has left the double buffer and has its memory: the next one may be promoted.
    Started { device: DeviceId, ticket: Ticket },
    /// A shard task ended.
    ShardDone {
        device: DeviceId,
        ticket: Ticket,
        time: Time,
        stalled_s: f64,
        /// `None` if there was nothing to compute, because the task had failed.
        result: Result<Option<Made>, EngineError>,
        /// Whether the device computes nothing any more.
        lost: bool,
    },
    /// The output of a shard task (`of`: shard and minibatch) is on the host.
    OutputDown {
        device: DeviceId,
        task: TaskId,
        ticket: Ticket,
        of: (usize, usize),
        time: Time,
        result: Result<Output<HostTensor>, EngineError>,
    },
    /// The gradients of a shard task are on the host (with the optimizer); device memory was released.
    GradientsDown {
        device: DeviceId,
        task: TaskId,
        of: (usize, usize),
        time: Time,
        failure: Option<EngineError>,
    },
    /// An image has its masters of minibatch `step` + 1.
    Stepped { task: TaskId, image: usize, step: usize, time: Time },
    /// The host could not do what it was asked for a task.
    HostFailed { task: TaskId, error: EngineError },
    /// The best weights are in place again.
    Restored { task: TaskId },
    /// A task's checkpoint was written, with so many bytes.
    Kept { task: TaskId, result: Result<u64, EngineError>, time: Time },
    /// A task's weights were hashed and written.
    Written { task: TaskId, result: Result<Written, EngineError> },
}

/// Tells the orchestrator what happened, and when by the run's clock.
#[derive(Clone)]
pub(crate) struct Reporter {
    events: Sender<Event>,
    clock: Clock,
}

impl Reporter {
    pub(crate) fn new(events: Sender<Event>, clock: Clock) -> Self {
        Self { events, clock }
    }

    pub(crate) fn send(&self, event: Event) {
        // The orchestrator outlives its workers; if it is gone, the run was given up.
        let _ = self.events.send(event);
    }

    pub(crate) fn now(&self) -> f64 {
        self.clock.now()
    }

    /// The time from `start_s` until now.
    pub(crate) fn since(&self, start_s: f64) -> Time {
        Time { start_s, end_s: self.now() }
    }
}

/// What the writer gives.
pub(crate) struct Written {
    pub sha256: String,
    pub dir: Option<std::path::PathBuf>,
    /// Why the checkpoint does not say so, if it was to.
    pub not_kept: Option<EngineError>,
}
