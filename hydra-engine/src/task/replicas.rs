//! The shard task that a device can claim next, when several microbatch groups of a task are in flight.

use super::in_flight::Next;
use super::live::LiveTask;
use super::phase::Phase;
use hydra_core::DeviceId;
use hydra_sched::program::{MicrobatchPass, ShardTask};

impl LiveTask {
    /// The shard task that `device` can claim next, if any.
    pub(crate) fn claimable(&self, device: DeviceId, prefetch: bool) -> Option<Next> {
        let failing = matches!(self.phase, Phase::Failing { .. });
        if !self.has_begun() || self.request.is_some() || failing {
            return None;
        }
        let in_replica =
            |replica: usize| Some(Next { replica, what: self.claimable_in(replica, device, prefetch)? });
        self.replicas_for(device).into_iter().find_map(in_replica)
    }

    /// The replicas whose next shard task the device may claim, best first: the one that it runs, then microbatch
    /// groups that have started, then a new one. A device that runs the task starts no microbatch group in another
    /// replica.
    fn replicas_for(&self, device: DeviceId) -> Vec<usize> {
        let is_free = |replica: &usize| self.in_flight.is_replica_idle(*replica);
        let own = self.in_flight.replica_on(device);
        let (goes_on, begins): (Vec<_>, Vec<_>) =
            own.into_iter().partition(|replica| self.cursor.is_in_group(*replica));
        let begun = self.cursor.replicas_in_group().into_iter().filter(is_free);
        let free = (0..self.cursor.replicas())
            .find(|replica| is_free(replica) && !self.cursor.is_in_group(*replica));
        let free = free.filter(|_| !self.in_flight.is_on(device));
        goes_on.into_iter().chain(begun).chain(begins).chain(free).collect()
    }

    /// The next shard task of a replica, if `device` can claim it now.
    fn claimable_in(&self, replica: usize, device: DeviceId, prefetch: bool) -> Option<ShardTask> {
        let follows = self.in_flight.followed_on(replica, device, prefetch).ok()?;
        let next = self.cursor.peek_in(replica)?;
        if !self.cursor.is_in_group(replica) && !self.may_begin_group(replica, &next) {
            return None;
        }
        let ready = self.has_final_masters(&next)
            && self.microbatch_pass.has_inputs(replica, &next, follows.as_ref())
            && !self.lacks_pending_gradient_space(&next);
        ready.then_some(next)
    }

    /// Returns whether a replica may start the next microbatch group, whose first shard task is `next`. It starts no
    /// minibatch or evaluation before the other replicas have finished the previous one.
    fn may_begin_group(&self, replica: usize, next: &ShardTask) -> bool {
        !self.stops_before(next)
            && !self.awaits_verdict()
            && !self.awaits_statistic(next)
            && !self.in_flight.is_behind(replica, next)
            && !self.reader.reads_for(MicrobatchPass::of(next))
    }
}
