//! What is on a device at once: copies of parameters, and what shard tasks take beside them.

use super::{Active, Claim, Run};
use crate::lab::WorkingBytes;
use crate::policy::ShardTaskKind;

impl Run<'_> {
    /// Notes what is on a device, when something has come there or begun: copies, what computes, and the inputs of what comes
    /// next. What leaves the device meanwhile has left before most of the next shard task is there.
    pub(super) fn note_peak(&mut self, device: usize) {
        let state = &self.devices[device];
        if !self.workload.devices[device].keeps_copies {
            return;
        }
        let active = state.active.as_ref().map(|Active { claim, .. }| claim);
        let working = active.map_or(0, |claim| match claim.task.kind {
            ShardTaskKind::Backward => self.working(claim, 0).backward,
            ShardTaskKind::Forward | ShardTaskKind::Evaluate => self.working(claim, 0).forward,
        });
        let makes = |next: &&Claim| {
            let before = active.filter(|claim| claim.model == next.model && claim.lane == next.lane);
            before.is_some_and(|claim| claim.task.sweep == next.task.sweep)
        };
        let next = state.next.as_ref().filter(|next| !makes(next)).map_or(0, |next| self.inputs(next));
        let all = [state.copies.held_bytes(), working, next].into_iter().fold(0, u64::saturating_add);
        let peak = &mut self.result.peak_bytes[device];
        *peak = (*peak).max(all);
    }

    /// What is uploaded for a shard task beside parameters: its input, and for a backward the gradient of its output.
    fn inputs(&self, claim: &Claim) -> u64 {
        let gradient =
            if claim.task.kind == ShardTaskKind::Backward { self.working(claim, 1).input } else { 0 };
        self.working(claim, 0).input.saturating_add(gradient)
    }

    /// The bytes of the claimed shard, or of one that comes so many after it.
    fn working(&self, claim: &Claim, after: usize) -> WorkingBytes {
        let shards = &self.workload.tasks[claim.model].shards;
        shards.get(claim.task.shard + after).map_or_else(WorkingBytes::default, |shard| shard.working)
    }
}
