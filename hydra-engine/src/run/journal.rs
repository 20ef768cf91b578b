//! The journal of a run: events for its observer, and their times.

use super::record::Recorder;
use crate::observer::{Observer, RunEvent, Span, Track, Work};
use crate::protocol::{Clock, Time};
use crate::task::{Claim, LiveTask, Progress};
use hydra_core::{DeviceId, TaskId};
use hydra_sched::ShardTaskKind;

/// The observer of a run, its clock, and from when to when shard tasks ran.
pub(super) struct Journal {
    pub recorder: Recorder,
    pub clock: Clock,
    first_start_s: Option<f64>,
    last_end_s: f64,
}

impl Journal {
    pub(super) fn new(recorder: Recorder, clock: Clock) -> Self {
        Self { recorder, clock, first_start_s: None, last_end_s: 0.0 }
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
        self.observe(&RunEvent::Span(Span { track, task, work, shard, step, start_s, end_s }));
    }

    /// A shard task ended well.
    pub(super) fn computed(&mut self, device: DeviceId, claim: &Claim, time: Time) {
        self.first_start_s.get_or_insert(time.start_s);
        self.last_end_s = self.last_end_s.max(time.end_s);
        let work = match claim.what.kind {
            ShardTaskKind::Forward => Work::Forward,
            ShardTaskKind::Backward => Work::Backward,
            ShardTaskKind::Evaluate => Work::Evaluate,
        };
        let of = (claim.what.shard, claim.what.step);
        self.span(Track::Compute(device), claim.task, work, of, time);
    }

    /// A shard task completed something.
    pub(super) fn progress(&mut self, of: &LiveTask, progress: Progress, at_s: f64) {
        let task = of.id();
        match progress {
            Progress::Nothing | Progress::SharedBatch { .. } => {}
            Progress::Minibatch { step, loss, units } => {
                let steps = of.cursor.program().steps;
                let rate = of.facts.task.spec.rate(step, steps);
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
}
