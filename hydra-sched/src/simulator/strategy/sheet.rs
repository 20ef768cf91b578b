//! The accumulated work of devices as models are assigned to them one after another.

use std::collections::BTreeSet;

use super::StrategyOutcome;
use crate::policy::ShardTaskKind;
use crate::simulator::{Occupation, ScheduleSpan, Workload};

/// The work of the devices so far.
pub(super) struct Sheet {
    record: bool,
    pub(super) free_s: Vec<f64>,
    pub(super) busy_s: Vec<f64>,
    pub(super) moved: Option<u64>,
    pub(super) spans: Vec<ScheduleSpan>,
}

impl Sheet {
    pub(super) fn new(workload: &Workload, record: bool) -> Self {
        let devices = workload.devices.len();
        Self {
            record,
            free_s: vec![0.0; devices],
            busy_s: vec![0.0; devices],
            moved: Some(0),
            spans: Vec::new(),
        }
    }

    /// Runs the same minibatch repeatedly.
    pub(super) fn run(&mut self, task: usize, minibatches: u64, start_s: f64, minibatch: &Minibatch) {
        for bar in &minibatch.bars {
            self.busy_s[bar.device] += (bar.end_s - bar.start_s) * minibatches as f64;
        }
        let recorded = if self.record { minibatches } else { 0 };
        for minibatch_index in 0..recorded {
            let from_s = start_s + minibatch.length_s * minibatch_index as f64;
            self.spans.extend(minibatch.bars.iter().map(|bar| ScheduleSpan {
                device: bar.device,
                task,
                minibatch: minibatch_index,
                shard: bar.shard,
                what: Occupation::Compute(bar.kind),
                start_s: from_s + bar.start_s,
                end_s: from_s + bar.end_s,
            }));
        }
    }

    pub(super) fn outcome(self) -> StrategyOutcome {
        let runtime_s = self.free_s.iter().copied().fold(0.0, f64::max);
        StrategyOutcome { runtime_s, busy_s: self.busy_s, moved_bytes: self.moved, spans: self.spans }
    }
}

/// Tasks that wait in order. An idle device takes the first task that has arrived, or else the next one to
/// arrive.
pub(super) struct Line {
    /// The tasks in order.
    order: Vec<usize>,
    /// Positions of those that have not arrived, the next one last.
    later: Vec<usize>,
    /// Positions of those that have arrived.
    here: BTreeSet<usize>,
}

impl Line {
    pub(super) fn new(workload: &Workload, order: Vec<usize>) -> Self {
        let mut later: Vec<usize> = (0..order.len()).rev().collect();
        let arrival_s = |place: usize| workload.tasks[order[place]].arrival_s;
        later.sort_by(|a, b| arrival_s(*b).total_cmp(&arrival_s(*a)));
        Self { order, later, here: BTreeSet::new() }
    }

    /// Takes the task for this time, or for the next arrival.
    pub(super) fn next(&mut self, workload: &Workload, free_s: f64) -> Option<usize> {
        let arrived = |place: usize| workload.tasks[self.order[place]].arrival_s <= free_s;
        while let Some(place) = self.later.pop_if(|place| self.here.is_empty() || arrived(*place)) {
            self.here.insert(place);
        }
        self.here.pop_first().map(|place| self.order[place])
    }
}

/// One minibatch of one model on a group of devices, from time 0.
pub(super) struct Minibatch {
    pub(super) length_s: f64,
    pub(super) bars: Vec<Bar>,
}

pub(super) struct Bar {
    pub(super) device: usize,
    pub(super) kind: ShardTaskKind,
    pub(super) shard: usize,
    pub(super) start_s: f64,
    pub(super) end_s: f64,
}

impl Minibatch {
    pub(super) fn push(
        &mut self,
        device: usize,
        kind: ShardTaskKind,
        shard: usize,
        start_s: f64,
        seconds: f64,
    ) {
        let end_s = start_s + seconds;
        if seconds > 0.0 {
            self.bars.push(Bar { device, kind, shard, start_s, end_s });
        }
        self.length_s = self.length_s.max(end_s);
    }
}
