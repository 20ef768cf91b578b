//! The events that the orchestrator receives from its worker threads.
//!
//! A device claims a *shard task* (one pass of one microbatch through one shard of a model) and reports its steps:
//! the shard's parameters are promoted (`Promoted`), it starts to compute (`Started`), it ends (`ShardDone`), its
//! output and gradients are downloaded (`OutputDown`, `GradientsDown`), and the optimizer steps the shard's parameter
//! buffers (`Stepped`). The enum is closed: the event loop matches every case.

use super::{Clock, Loaded, Made, Output, Time};
use crate::error::EngineError;
use crossbeam_channel::Sender;
use hydra_core::{DeviceId, HostTensor, TaskId};

/// The number of a shard task, in the order in which the run's shard tasks were claimed.
pub(crate) type Ticket = u64;

pub(crate) enum Event {
    /// The initial weights of a task are in the store, or could not be loaded.
    WeightsLoaded { task: TaskId, result: Result<LoadedWeights, EngineError> },
    /// Batches were read ahead, or could not be.
    Loaded { task: TaskId, loaded: Loaded },
    /// A promotion ended; the payload is about to enter the device's double buffer.
    Promoted { device: DeviceId, task: TaskId, ticket: Ticket, time: Time, failure: Option<EngineError> },
    /// A shard task has left the double buffer and holds its memory: the next one may be promoted.
    Started { device: DeviceId, ticket: Ticket, at_s: f64 },
    /// A shard task ended.
    ShardDone {
        device: DeviceId,
        ticket: Ticket,
        time: Time,
        stalled_s: f64,
        /// `None` if the task had failed and nothing was computed.
        result: Result<Option<Made>, EngineError>,
        /// True if the device has failed and computes no more.
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
    /// The gradients of a shard task are on the host, passed to the optimizer; `bytes` were downloaded, and their
    /// device memory is released.
    GradientsDown {
        device: DeviceId,
        task: TaskId,
        of: (usize, usize),
        bytes: u64,
        time: Time,
        failure: Option<EngineError>,
    },
    /// The first `microbatches` microbatches, not all, are accumulated in a buffer's gradient; their own gradients
    /// are freed.
    Added { task: TaskId, buffer: usize, microbatches: usize },
    /// A buffer was stepped: it holds the master weights of minibatch `step` + 1.
    Stepped { task: TaskId, buffer: usize, step: usize, time: Time },
    /// A request to the host failed for a task.
    HostFailed { task: TaskId, error: EngineError },
    /// The best weights are restored.
    Restored { task: TaskId },
    /// A task's checkpoint was written; the result is its size in bytes.
    Checkpointed { task: TaskId, result: Result<u64, EngineError>, time: Time },
    /// A task's weights were hashed and written.
    Written { task: TaskId, result: Result<Written, EngineError> },
}

/// Sends events to the orchestrator, with times of the run's clock.
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
        // The orchestrator outlives its workers; if it is gone, the run was cancelled.
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

/// The result of loading a task's initial weights into the store.
pub(crate) struct LoadedWeights {
    /// True if the best weights of a resumed task were loaded too.
    pub best: bool,
    /// The hash of the parameters, if other tasks may share the initial evaluation.
    pub weights: Option<String>,
    /// The hash of the frozen parameters, if the task has checkpoints.
    pub frozen: Option<String>,
}

/// The result of writing a model.
pub(crate) struct Written {
    pub sha256: String,
    pub dir: Option<std::path::PathBuf>,
    /// The error of writing the final checkpoint.
    pub unsaved: Option<EngineError>,
}
