//! The devices of a run: what each computes and has claimed, and what it has done.

use crate::device::Adding;
use crate::error::EngineError;
use crate::protocol::{Made, Ticket, Time};
use crate::stages::ShardTask;
use crate::task::{Claim, ParameterBytes};
use hydra_core::{DeviceId, TaskId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A claim that is being promoted, or waits in the double buffer for the one before it.
pub(super) struct Next {
    pub claim: Claim,
    /// Tells the compute worker that the task has failed.
    pub abandoned: Arc<AtomicBool>,
}

/// A device of a run.
#[derive(Default)]
pub(super) struct DeviceState {
    pub active: Option<Claim>,
    pub next: Option<Next>,
    /// When its last shard task began to compute.
    pub started_s: Option<f64>,
    /// The task that it computes or computed last, if no other device did since.
    pub last: Option<TaskId>,
    pub compute_s: f64,
    pub copy_s: f64,
    pub stall_s: f64,
    pub shard_tasks: u64,
    /// Bytes of the parameters that its shard tasks read.
    pub parameters: ParameterBytes,
    /// The gradients of the last shard task, to which the next one may add its own.
    pub sums: Option<(Claim, Made)>,
    /// True if it computes nothing any more.
    pub lost: bool,
    /// Why a shard task that was claimed for it could not be promoted.
    not_promoted: Option<(Ticket, EngineError)>,
}

impl DeviceState {
    /// Returns whether it has neither a shard task nor a claim.
    pub(super) fn is_idle(&self) -> bool {
        self.active.is_none() && self.next.is_none()
    }

    /// The claim whose promotion ended, and may have failed: the shard task comes to nothing then, and says so next.
    pub(super) fn promoted(&mut self, ticket: Ticket, failure: Option<EngineError>) -> Option<&Claim> {
        self.not_promoted = failure.map(|error| (ticket, error));
        let mut claims = self.next.iter().map(|next| &next.claim).chain(&self.active);
        let claim = claims.find(|claim| claim.ticket == ticket)?;
        if self.not_promoted.is_none() {
            self.parameters.promoted += claim.parameters.promoted;
            self.parameters.cached += claim.parameters.cached;
        }
        Some(claim)
    }

    /// The result of a shard task, with what kept it from being promoted as its error.
    pub(super) fn with_cause(
        &mut self,
        ticket: Ticket,
        result: Result<Option<Made>, EngineError>,
    ) -> Result<Option<Made>, EngineError> {
        let cause = self.not_promoted.take_if(|(of, _)| *of == ticket);
        result.map_err(|error| cause.map_or(error, |(_, cause)| cause))
    }

    /// The claim of a shard task that ended; one that could not start has ended in the double buffer.
    pub(super) fn take(&mut self, ticket: Ticket) -> Option<Claim> {
        let active = self.active.take_if(|claim| claim.ticket == ticket);
        active.or_else(|| self.next.take_if(|next| next.claim.ticket == ticket).map(|next| next.claim))
    }

    /// A shard task ended well.
    pub(super) fn count(&mut self, time: Time, stalled_s: f64) {
        self.compute_s += time.seconds();
        self.stall_s += stalled_s;
        self.shard_tasks += 1;
    }

    /// Returns whether the shard task that follows adds its gradients to those of `claim`.
    pub(super) fn adds_to(&self, claim: &Claim) -> bool {
        let next = self.next.as_ref().map(|next| &next.claim);
        next.is_some_and(|next| next.is_beside(claim) && next.adding == Adding::Next)
    }

    /// Returns whether gradients wait to which this shard task of a task can add its own.
    pub(super) fn sums_wait_for(&self, task: TaskId, next: &ShardTask) -> bool {
        self.sums
            .as_ref()
            .is_some_and(|(claim, _)| claim.task == task && claim.what.is_microbatch_before(next))
    }

    /// Returns whether the shard task that follows takes over on the device what `claim` leaves.
    pub(super) fn takes_over(&self, claim: &Claim) -> bool {
        let next = self.next.as_ref().map(|next| &next.claim);
        next.is_some_and(|next| next.is_beside(claim) && next.from_handoff)
    }
}

/// A claim has started to compute; gives it.
pub(super) fn start(devices: &mut [DeviceState], device: DeviceId, ticket: Ticket) -> Option<&Claim> {
    let next = devices[device.0].next.take_if(|next| next.claim.ticket == ticket)?;
    let task = Some(next.claim.task);
    devices.iter_mut().filter(|other| other.last == task).for_each(|other| other.last = None);
    let state = &mut devices[device.0];
    state.last = task;
    Some(state.active.insert(next.claim))
}

/// Tells workers that nobody waits for what is claimed of a task.
pub(super) fn abandon(devices: &[DeviceState], task: TaskId) {
    for next in devices.iter().flat_map(|state| &state.next).filter(|next| next.claim.task == task) {
        next.abandoned.store(true, Ordering::Relaxed);
    }
}
