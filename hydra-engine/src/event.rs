//! What the orchestrator hears. The enum is closed: its loop matches every case.

use crate::clock::Time;
use crate::error::EngineError;
use hydra_core::{DeviceId, HostActivation, HostTensor, TaskId};
use hydra_spill::Reservation;
use std::sync::Arc;

/// Numbers the shard tasks of a run in the order in which they were claimed.
pub(crate) type Ticket = u64;

/// The gradient of each tensor of an activation.
pub(crate) type HostGradient = Vec<Option<HostTensor>>;

/// What a shard task hands to the next one of its sweep.
#[derive(Clone, Debug)]
pub(crate) enum Output {
    /// Nothing: the sweep ends here.
    None,
    /// The boundary activation.
    Activation(HostActivation),
    /// The gradient of the shard's input.
    Gradient(HostGradient),
}

impl Output {
    /// The number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::Activation(boundary) => boundary.len_bytes(),
            Self::Gradient(gradient) => gradient_bytes(gradient),
        }
    }
}

/// The bytes of those tensors of a gradient that are there.
pub(crate) fn gradient_bytes(gradient: &[Option<HostTensor>]) -> u64 {
    gradient.iter().flatten().map(HostTensor::len_bytes).sum()
}

/// What a compute worker made; all bytes are still device memory.
pub(crate) struct Computed {
    pub output: Output,
    /// For each layer with trained parameters: its index in the chain and its gradients.
    pub gradients: Vec<(usize, HostGradient)>,
    /// The mean loss of the microbatch, at the last shard.
    pub loss: Option<f32>,
}

impl Computed {
    /// Bytes of outputs and gradients.
    pub(crate) fn bytes(&self) -> u64 {
        self.output.bytes() + self.gradients.iter().map(|(_, of)| gradient_bytes(of)).sum::<u64>()
    }
}

/// What a shard task made, with the device memory that it takes until it is down.
pub(crate) struct Made {
    pub computed: Computed,
    /// Shared with whoever takes the output over on the device.
    pub output: Arc<Reservation>,
    pub gradients: Reservation,
}

pub(crate) enum Event {
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
    },
    /// The output of a shard task (`of`: shard and minibatch) is on the host.
    OutputDown {
        device: DeviceId,
        task: TaskId,
        ticket: Ticket,
        of: (usize, usize),
        time: Time,
        result: Result<Output, EngineError>,
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
    /// A task's weights were hashed and written.
    Written { task: TaskId, result: Result<Written, EngineError> },
}

/// What the writer gives.
pub(crate) struct Written {
    pub sha256: String,
    pub dir: Option<std::path::PathBuf>,
}
