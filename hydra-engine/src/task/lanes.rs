//! The lanes of a task: which shard task a device can claim next, where several visits are under way at once.

use super::live::LiveTask;
use super::phase::Phase;
use crate::stages::{Next, ShardTask, Sweep};
use hydra_core::DeviceId;

impl LiveTask {
    /// The shard task that `device` can claim next, if there is one now.
    pub(crate) fn claimable(&self, device: DeviceId, prefetch: bool) -> Option<Next> {
        let doomed = matches!(self.phase, Phase::Doomed { .. });
        if !self.has_begun() || self.request.is_some() || doomed {
            return None;
        }
        let in_lane = |lane: usize| Some(Next { lane, what: self.claimable_in(lane, device, prefetch)? });
        self.lanes_for(device).into_iter().find_map(in_lane)
    }

    /// The lanes of which a device can claim the next shard task, the best one first: what follows on the one that it
    /// computes, then visits that have begun, then one that begins. A device that computes the task begins none in another
    /// lane.
    fn lanes_for(&self, device: DeviceId) -> Vec<usize> {
        let is_free = |lane: &usize| self.flight.is_lane_idle(*lane);
        let own = self.flight.lane_on(device);
        let (goes_on, begins): (Vec<_>, Vec<_>) =
            own.into_iter().partition(|lane| self.cursor.is_visiting(*lane));
        let begun = self.cursor.visiting().into_iter().filter(is_free);
        let free = (0..self.cursor.lanes()).find(|lane| is_free(lane) && !self.cursor.is_visiting(*lane));
        let free = free.filter(|_| !self.flight.is_on(device));
        goes_on.into_iter().chain(begun).chain(begins).chain(free).collect()
    }

    /// The next shard task of a lane, if `device` can claim it now.
    fn claimable_in(&self, lane: usize, device: DeviceId, prefetch: bool) -> Option<ShardTask> {
        let follows = self.flight.followed_on(lane, device, prefetch).ok()?;
        let next = self.cursor.peek_in(lane)?;
        if !self.cursor.is_visiting(lane) && !self.may_begin_visit(lane, &next) {
            return None;
        }
        let ready = self.has_final_masters(&next)
            && self.sweep.has_inputs(lane, &next, follows.as_ref())
            && !self.lacks_gradient_room(&next);
        ready.then_some(next)
    }

    /// Returns whether a lane may begin the visit that comes next, with this shard task. It does not begin a minibatch or an
    /// evaluation before other lanes are done with the one before.
    fn may_begin_visit(&self, lane: usize, next: &ShardTask) -> bool {
        !self.stops_before(next)
            && !self.awaits_verdict()
            && !self.flight.is_behind(lane, next)
            && !self.ahead.reads_for(Sweep::of(next))
    }
}
