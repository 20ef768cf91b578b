//! The replicas of a task: which shard task a device can claim next, where several microbatch groups are under way at once.

use super::live::LiveTask;
use super::phase::Phase;
use crate::stages::{MicrobatchPass, Next, ShardTask};
use hydra_core::DeviceId;

impl LiveTask {
    /// The shard task that `device` can claim next, if there is one now.
    pub(crate) fn claimable(&self, device: DeviceId, prefetch: bool) -> Option<Next> {
        let failing = matches!(self.phase, Phase::Failing { .. });
        if !self.has_begun() || self.request.is_some() || failing {
            return None;
        }
        let in_replica =
            |replica: usize| Some(Next { replica, what: self.claimable_in(replica, device, prefetch)? });
        self.replicas_for(device).into_iter().find_map(in_replica)
    }

    /// The replicas of which a device can claim the next shard task, the best one first: what follows on the one that it
    /// computes, then microbatch groups that have begun, then one that begins. A device that computes the task begins none in another
    /// replica.
    fn replicas_for(&self, device: DeviceId) -> Vec<usize> {
        let is_free = |replica: &usize| self.in_flight.is_replica_idle(*replica);
        let own = self.in_flight.replica_on(device);
        let (goes_on, begins): (Vec<_>, Vec<_>) =
            own.into_iter().partition(|replica| self.cursor.is_visiting(*replica));
        let begun = self.cursor.visiting().into_iter().filter(is_free);
        let free = (0..self.cursor.replicas())
            .find(|replica| is_free(replica) && !self.cursor.is_visiting(*replica));
        let free = free.filter(|_| !self.in_flight.is_on(device));
        goes_on.into_iter().chain(begun).chain(begins).chain(free).collect()
    }

    /// The next shard task of a replica, if `device` can claim it now.
    fn claimable_in(&self, replica: usize, device: DeviceId, prefetch: bool) -> Option<ShardTask> {
        let follows = self.in_flight.followed_on(replica, device, prefetch).ok()?;
        let next = self.cursor.peek_in(replica)?;
        if !self.cursor.is_visiting(replica) && !self.may_begin_group(replica, &next) {
            return None;
        }
        let ready = self.has_final_masters(&next)
            && self.microbatch_pass.has_inputs(replica, &next, follows.as_ref())
            && !self.lacks_pending_gradient_space(&next);
        ready.then_some(next)
    }

    /// Returns whether a replica may begin the microbatch group that comes next, with this shard task. It does not begin a minibatch or an
    /// evaluation before other replicas are done with the one before.
    fn may_begin_group(&self, replica: usize, next: &ShardTask) -> bool {
        !self.stops_before(next)
            && !self.awaits_verdict()
            && !self.in_flight.is_behind(replica, next)
            && !self.ahead.reads_for(MicrobatchPass::of(next))
    }
}
