//! The devices of a run: their claims, current shard tasks and totals.

use crate::device::Adding;
use crate::error::EngineError;
use crate::protocol::{Made, Ticket, Time};
use crate::task::{Claim, ParameterBytes};
use hydra_core::{DeviceId, TaskId};
use hydra_sched::program::ShardTask;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A claim that is being promoted or waits in the double buffer.
pub(super) struct NextClaim {
    pub claim: Claim,
    /// Set when the task has failed; the compute worker then skips the job.
    pub abandoned: Arc<AtomicBool>,
}

/// A device of a run.
#[derive(Default)]
pub(super) struct DeviceState {
    pub active: Option<Claim>,
    pub next: Option<NextClaim>,
    /// When its last shard task started to compute.
    pub started_s: Option<f64>,
    /// The task that it computes or computed last, unless another device computed that task since.
    pub last: Option<TaskId>,
    pub compute_s: f64,
    pub copy_s: f64,
    pub stall_s: f64,
    pub shard_tasks: u64,
    /// Bytes of parameters read by its shard tasks.
    pub parameters: ParameterBytes,
    /// The gradients of the last shard task, if the next one may be added to them.
    pub sums: Option<(Claim, Made)>,
    /// True if the device has failed and gets no more work.
    pub lost: bool,
    /// The error of a promotion, until its shard task ends.
    not_promoted: Option<(Ticket, EngineError)>,
}

impl DeviceState {
    /// Returns whether the device has neither a shard task nor a claim.
    pub(super) fn is_idle(&self) -> bool {
        self.active.is_none() && self.next.is_none()
    }

    /// Records the end of a promotion and returns its claim. After a failure the shard task still ends, with an
    /// error.
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

    /// The result of a shard task; the error of its promotion replaces its own.
    pub(super) fn with_cause(
        &mut self,
        ticket: Ticket,
        result: Result<Option<Made>, EngineError>,
    ) -> Result<Option<Made>, EngineError> {
        let cause = self.not_promoted.take_if(|(of, _)| *of == ticket);
        result.map_err(|error| cause.map_or(error, |(_, cause)| cause))
    }

    /// Takes the claim of a shard task that ended. A shard task that could not start ends in the double buffer.
    pub(super) fn take(&mut self, ticket: Ticket) -> Option<Claim> {
        let active = self.active.take_if(|claim| claim.ticket == ticket);
        active.or_else(|| self.next.take_if(|next| next.claim.ticket == ticket).map(|next| next.claim))
    }

    /// Counts a shard task that succeeded.
    pub(super) fn count(&mut self, time: Time, stalled_s: f64) {
        self.compute_s += time.seconds();
        self.stall_s += stalled_s;
        self.shard_tasks += 1;
    }

    /// Returns whether the next shard task adds its gradients to those of `claim`.
    pub(super) fn adds_to(&self, claim: &Claim) -> bool {
        let next = self.next.as_ref().map(|next| &next.claim);
        next.is_some_and(|next| next.same_replica(claim) && next.adding == Adding::Next)
    }

    /// Returns whether gradients wait here to which this shard task can add its own.
    pub(super) fn sums_wait_for(&self, task: TaskId, next: &ShardTask) -> bool {
        self.sums
            .as_ref()
            .is_some_and(|(claim, _)| claim.task == task && claim.what.is_microbatch_before(next))
    }

    /// Returns whether the next shard task takes the output of `claim` on the device.
    pub(super) fn takes_over(&self, claim: &Claim) -> bool {
        let next = self.next.as_ref().map(|next| &next.claim);
        next.is_some_and(|next| next.same_replica(claim) && next.from_handoff)
    }
}

/// Marks a claim as computing and returns it.
pub(super) fn start(devices: &mut [DeviceState], device: DeviceId, ticket: Ticket) -> Option<&Claim> {
    let next = devices[device.0].next.take_if(|next| next.claim.ticket == ticket)?;
    let task = Some(next.claim.task);
    devices.iter_mut().filter(|other| other.last == task).for_each(|other| other.last = None);
    let state = &mut devices[device.0];
    state.last = task;
    Some(state.active.insert(next.claim))
}

/// Marks the claims of a task as abandoned for the compute workers.
pub(super) fn abandon(devices: &[DeviceState], task: TaskId) {
    for next in devices.iter().flat_map(|state| &state.next).filter(|next| next.claim.task == task) {
        next.abandoned.store(true, Ordering::Relaxed);
    }
}
