//! The journal of a run: its observer and the times of events.

use super::record::Recorder;
use crate::observer::{Observer, RunEvent, Span, TierMemory, Track, Work};
use crate::protocol::{Clock, Time};
use crate::task::{Claim, LiveTask, Progress};
use hydra_core::{DeviceId, TaskId};
use hydra_sched::ShardTaskKind;

/// The least seconds between two memory reports, absolute and as a share of the time so far. The share bounds the
/// number of reports of a long run.
const MEMORY_EVERY_S: f64 = 0.5;
const MEMORY_EVERY_SHARE: f64 = 0.002;

/// The observer of a run, its clock, and the span of time in which shard tasks ran.
pub(super) struct Journal {
    pub recorder: Recorder,
    pub clock: Clock,
    first_start_s: Option<f64>,
    last_end_s: f64,
    /// When memory was last reported.
    memory_s: f64,
}

impl Journal {
    pub(super) fn new(recorder: Recorder, clock: Clock) -> Self {
        Self { recorder, clock, first_start_s: None, last_end_s: 0.0, memory_s: f64::NEG_INFINITY }
    }

    pub(super) fn observe(&mut self, event: &RunEvent<'_>) {
        self.recorder.observe(event);
    }

    /// Seconds from the first shard task's start to the last one's end.
    pub(super) fn makespan_s(&self) -> f64 {
        (self.last_end_s - self.first_start_s.unwrap_or(self.last_end_s)).max(0.0)
    }

    pub(super) fn span(&mut self, track: Track, task: TaskId, work: Work, of: (usize, usize), time: Time) {
        let ((shard, step), Time { start_s, end_s }) = (of, time);
        let span = Span { track, task, work, shard, step, microbatch_pass: 0, start_s, end_s };
        self.observe(&RunEvent::Span(span));
    }

    /// Reports a shard task that succeeded.
    pub(super) fn computed(&mut self, device: DeviceId, claim: &Claim, time: Time) {
        self.first_start_s.get_or_insert(time.start_s);
        self.last_end_s = self.last_end_s.max(time.end_s);
        let work = match claim.what.kind {
            ShardTaskKind::Forward => Work::Forward,
            ShardTaskKind::Backward => Work::Backward,
            ShardTaskKind::Evaluate => Work::Evaluate,
        };
        let (track, task, what) = (Track::Compute(device), claim.task, &claim.what);
        let (shard, step, microbatch_pass) = (what.shard, what.step, what.stage.microbatch_pass());
        let Time { start_s, end_s } = time;
        let span = Span { track, task, work, shard, step, microbatch_pass, start_s, end_s };
        self.observe(&RunEvent::Span(span));
    }

    /// Reports the progress that a shard task made.
    pub(super) fn progress(&mut self, of: &LiveTask, progress: Progress, at_s: f64) {
        let task = of.id();
        match progress {
            Progress::Nothing | Progress::SharedBatch { .. } => {}
            Progress::Minibatch { step, loss, units } => {
                let steps = of.cursor.program().steps;
                let rate = of.info.task.spec.rate(step, steps);
                self.observe(&RunEvent::Minibatch { task, step, steps, loss, rate, units, at_s });
            }
            Progress::Evaluating { kind, batch, batches, units } => {
                self.observe(&RunEvent::Evaluating { task, kind, batch, batches, units, at_s });
            }
            Progress::Evaluated { kind, step, result, .. } => {
                self.observe(&RunEvent::Evaluated { task, kind, step, result, at_s });
            }
        }
    }

    /// Returns whether the next memory report is due.
    pub(super) fn memory_is_due(&self, at_s: f64) -> bool {
        at_s - self.memory_s >= MEMORY_EVERY_S.max(MEMORY_EVERY_SHARE * at_s)
    }

    pub(super) fn memory(&mut self, tiers: &[TierMemory], at_s: f64) {
        self.memory_s = at_s;
        self.observe(&RunEvent::Memory { tiers, at_s });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observer::Silent;

    #[test]
    fn memory_is_told_of_twice_a_second_and_of_a_long_run_more_rarely() {
        let clock = Clock::start();
        let mut journal = Journal::new(Recorder::new(Box::new(Silent), true, []), clock);
        let mut reported = Vec::new();
        for at_s in (0..400_000).map(|i| f64::from(i) / 10.0) {
            if journal.memory_is_due(at_s) {
                journal.memory(&[], at_s);
                reported.push(at_s);
            }
        }
        assert_eq!(reported[..4], [0.0, 0.5, 1.0, 1.5]);
        assert!(reported.windows(2).all(|pair| pair[1] - pair[0] >= 0.5));
        // More than ten hours.
        assert!(reported.len() < 3500, "{}", reported.len());
        assert!(
            reported.windows(2).all(|pair| pair[1] - pair[0] < 0.5 + 0.003 * pair[1]),
            "and no more rarely"
        );
    }
}
