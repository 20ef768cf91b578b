//! The shard task that a device can claim next, when several microbatch groups of a task are in flight.

use super::in_flight::{Claimed, Next};
use super::live::{Claim, LiveTask};
use super::phase::Phase;
use crate::device::Adding;
use hydra_core::DeviceId;
use hydra_sched::program::{MicrobatchPass, ShardTask, UnderWay};

impl LiveTask {
    /// The shard task that `device` can claim next, if any.
    pub(crate) fn claimable(&self, device: DeviceId, prefetch: bool) -> Option<Next> {
        let failing = matches!(self.phase, Phase::Failing { .. });
        if !self.has_begun() || self.request.is_some() || failing {
            return None;
        }
        let is_ready = |replica: usize, next: &ShardTask| self.is_ready(replica, next, prefetch);
        let claimable = self.in_flight.claimable(&self.cursor, Some(device), is_ready);
        claimable.map(|(replica, what)| Next { replica, what })
    }

    /// Returns whether a replica's next shard task has what it reads, and the space that it needs. If the previous
    /// one runs, it can be claimed only to be prefetched.
    fn is_ready(&self, replica: usize, next: &ShardTask, prefetch: bool) -> bool {
        let follows = self.in_flight.running(replica).map(|running| &running.task);
        (prefetch || follows.is_none())
            && (self.cursor.is_in_group(replica) || self.may_begin_group(next))
            && self.has_final_masters(next)
            && self.microbatch_pass.has_inputs(replica, next, follows)
            && !self.lacks_pending_gradient_space(next)
    }

    /// Returns whether the microbatch group with the first shard task `next` may start.
    fn may_begin_group(&self, next: &ShardTask) -> bool {
        !self.stops_before(next)
            && !self.awaits_verdict()
            && !self.awaits_statistic(next)
            && !self.reader.reads_for(MicrobatchPass::of(next))
    }

    /// Records that a device claimed a shard task.
    pub(super) fn record_claim(&mut self, claim: &Claim, device: DeviceId) {
        let Claim { ticket, adding, .. } = *claim;
        let claimed = UnderWay { device, task: claim.what, claim: Claimed { ticket, adding } };
        self.in_flight.claim(claim.replica, claimed);
    }

    /// Records that a shard task ended, failed or was cancelled.
    pub(crate) fn end_claim(&mut self, claim: &Claim) {
        self.in_flight.end(claim.replica, |of| of.claim.ticket == claim.ticket);
    }

    /// Returns whether the running shard task of a replica belongs to the microbatch before `next` and accumulates its
    /// gradients on the device. `next` can then be claimed only on that device.
    pub(super) fn adds_before(&self, replica: usize, next: &ShardTask) -> bool {
        let running = self.in_flight.running(replica);
        running.is_some_and(|of| of.claim.adding != Adding::Nothing && of.task.is_microbatch_before(next))
    }
}
