//! The events that the orchestrator hears. The enum is closed: its loop matches every case.

use super::{Clock, Loaded, Made, Output, Time};
use crate::error::EngineError;
use crossbeam_channel::Sender;
use hydra_core::{DeviceId, HostTensor, TaskId};

/// Numbers the shard tasks of a run in the order in which they were claimed.
pub(crate) type Ticket = u64;

pub(crate) enum Event {
    /// The first masters of a task are in the store, or could not be put there.
    Begun { task: TaskId, result: Result<Begun, EngineError> },
    /// Batches were read ahead, or could not be.
    Loaded { task: TaskId, loaded: Loaded },
    /// A promotion ended; the payload is about to be in the device's double buffer.
    Promoted { device: DeviceId, task: TaskId, ticket: Ticket, time: Time, failure: Option<EngineError> },
    /// A shard task has left the double buffer and has its memory: the next one may be promoted.
    Started { device: DeviceId, ticket: Ticket, at_s: f64 },
    /// A shard task ended.
    ShardDone {
        device: DeviceId,
        ticket: Ticket,
        time: Time,
        stalled_s: f64,
        /// `None` if there was nothing to compute, because the task had failed.
        result: Result<Option<Made>, EngineError>,
        /// True if the device computes nothing any more.
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
    /// The gradients of a shard task are on the host (with the optimizer), so many bytes downloaded; device memory was released.
    GradientsDown {
        device: DeviceId,
        task: TaskId,
        of: (usize, usize),
        bytes: u64,
        time: Time,
        failure: Option<EngineError>,
    },
    /// So many microbatches, of more, are in the sum of a buffer's gradients, and their own are not kept any more.
    Added { task: TaskId, buffer: usize, microbatches: usize },
    /// A buffer has its masters of minibatch `step` + 1.
    Stepped { task: TaskId, buffer: usize, step: usize, time: Time },
    /// The host could not do what it was asked for a task.
    HostFailed { task: TaskId, error: EngineError },
    /// The best weights are in place again.
    Restored { task: TaskId },
    /// A task's checkpoint was written, with so many bytes.
    Checkpointed { task: TaskId, result: Result<u64, EngineError>, time: Time },
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

/// The first masters of a task, which are in the store.
pub(crate) struct Begun {
    /// True if its best ones so far are among them.
    pub best: bool,
    /// The hash of their parameters, of a task whose first evaluation may be that of others.
    pub weights: Option<String>,
    /// The hash of those that are frozen, of a task that has checkpoints.
    pub frozen: Option<String>,
}

/// The writer's result.
pub(crate) struct Written {
    pub sha256: String,
    pub dir: Option<std::path::PathBuf>,
    /// The error of the checkpoint that was to say so.
    pub unsaved: Option<EngineError>,
}
