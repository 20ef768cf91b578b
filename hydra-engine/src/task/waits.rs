//! What a task waits for between its minibatches.

use super::model::Model;

/// What a model waited for in its last minibatch, and would in each even without others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Waits {
    /// From the end of a minibatch to that of its last optimizer step that something waits for.
    pub step_s: f64,
    /// The promotion of the first shard.
    pub promote_s: f64,
}

impl Model {
    /// The next shard task waits for the optimizer, and any device may claim it afterwards.
    pub(crate) fn awaits_masters(&self) -> bool {
        let open = self.ended.is_none() && self.claimed.is_none();
        let stops_here = (self.stopping || self.keep_due) && self.between_sweeps();
        open && !stops_here && self.cursor.peek().is_some_and(|next| !self.masters_final(&next))
    }

    /// When the shard that waits for the optimizer can have been promoted, once that was measured.
    pub(crate) fn promoted_s(&self) -> Option<f64> {
        let measured = self.waits.step_s > 0.0 && self.running.is_none() && self.awaits_masters();
        let done_s = self.minibatch_done_s.filter(|_| measured)?;
        Some(done_s + self.waits.step_s + self.waits.promote_s)
    }

    /// Estimated seconds to the end of the task if it waits for no other.
    pub(crate) fn alone_s(&self) -> f64 {
        let minibatches = self.cursor.program().steps.saturating_sub(self.cursor.step());
        self.remaining_s() + minibatches as f64 * (self.waits.step_s + self.waits.promote_s)
    }
}
