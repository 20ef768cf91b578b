//! The waits of a task between its minibatches.

use crate::protocol::Time;

/// The waits of a task in its last minibatch, which it would have in each even without others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Waits {
    /// From the end of a minibatch to that of its last optimizer step that something waits for.
    step_s: f64,
    /// The promotion of the first shard.
    pub promote_s: f64,
    /// When the last minibatch ended, while the next shard task waits for its optimizer.
    done_s: Option<f64>,
}

impl Waits {
    /// A minibatch ended, and what comes next `waits` for the optimizer. After the last one nothing waits.
    pub(crate) fn begin(&mut self, waits: bool, at_s: f64) {
        self.done_s = waits.then_some(at_s);
    }

    /// An optimizer step ended; `over` if nothing waits any more. Returns the seconds that were waited in it.
    pub(crate) fn step(&mut self, time: Time, over: bool) -> f64 {
        let Some(done_s) = self.done_s else { return 0.0 };
        if over {
            self.done_s = None;
            self.step_s = (time.end_s - done_s).max(0.0);
        }
        (time.end_s - time.start_s.max(done_s)).max(0.0)
    }

    /// When the shard that waits for the optimizer can have been promoted, once that was measured.
    pub(crate) fn promoted_s(&self) -> Option<f64> {
        let done_s = self.done_s.filter(|_| self.step_s > 0.0)?;
        Some(done_s + self.step_s + self.promote_s)
    }

    /// Seconds of waiting of so many minibatches.
    pub(crate) fn of_minibatches(&self, minibatches: usize) -> f64 {
        minibatches as f64 * (self.step_s + self.promote_s)
    }
}
