//! The waits of a task between its minibatches.

use crate::protocol::Time;

/// The waits of a task after its last minibatch. Every minibatch would have them, even without other tasks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Waits {
    /// From the end of a minibatch to the end of the last optimizer step that the next shard task waits for.
    step_s: f64,
    /// The promotion of the first shard.
    pub promote_s: f64,
    /// The end of the last minibatch, while the next shard task waits for its optimizer step.
    done_s: Option<f64>,
}

impl Waits {
    /// Ends a minibatch; `waits` is true if the next shard task waits for the optimizer. After the last minibatch
    /// none does.
    pub(crate) fn begin(&mut self, waits: bool, at_s: f64) {
        self.done_s = waits.then_some(at_s);
    }

    /// Ends an optimizer step; `over` is true if nothing waits any more. Returns the seconds waited during this step.
    pub(crate) fn step(&mut self, time: Time, over: bool) -> f64 {
        let Some(done_s) = self.done_s else { return 0.0 };
        if over {
            self.done_s = None;
            self.step_s = (time.end_s - done_s).max(0.0);
        }
        (time.end_s - time.start_s.max(done_s)).max(0.0)
    }

    /// Estimated time at which the shard that waits for the optimizer is promoted; `None` before the first
    /// measurement.
    pub(crate) fn promoted_s(&self) -> Option<f64> {
        let done_s = self.done_s.filter(|_| self.step_s > 0.0)?;
        Some(done_s + self.step_s + self.promote_s)
    }

    /// The seconds waited in `minibatches` minibatches.
    pub(crate) fn of_minibatches(&self, minibatches: usize) -> f64 {
        minibatches as f64 * (self.step_s + self.promote_s)
    }
}
