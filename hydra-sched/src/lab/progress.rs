//! A model in the middle of a simulated run.

use super::TaskCost;
use super::program::{Program, ShardTask};
use crate::policy::CostModel;

/// The progress of one model.
pub(crate) struct Model {
    pub cost: CostModel,
    pub program: Program,
    /// The first shard task that no device has committed to.
    pub next: Option<ShardTask>,
    /// A device has committed to a shard task that has not started.
    pub claimed: bool,
    /// The device that computes it, and its shard task.
    pub runs_on: Option<(usize, ShardTask)>,
    /// The device that computed it last.
    pub ran_on: Option<usize>,
    /// Per shard: when its masters are final; infinite until that is known.
    pub final_s: Vec<f64>,
    /// Per sweep of a visit: the time at which what its next shard task reads is on the host; infinite until that is known.
    outputs_s: Vec<f64>,
    /// Seconds from the end of its last minibatch until its masters were final, the queue before the host optimizer
    /// included; before the first one ends, what its own step takes.
    pub waited_s: f64,
}

impl Model {
    pub(crate) fn new(task: &TaskCost, cost: CostModel) -> Self {
        let program = Program::of(task);
        Self {
            next: Some(program.first()),
            claimed: false,
            runs_on: None,
            ran_on: None,
            final_s: vec![task.arrival_s; program.shards],
            outputs_s: vec![0.0; program.largest_visit() as usize],
            waited_s: task.least_step_s(),
            program,
            cost,
        }
    }

    /// The next shard task, if a device may commit to it at this time.
    pub(crate) fn claimable(&self, now_s: f64) -> Option<ShardTask> {
        let has_inputs = |next: &ShardTask| self.is_handed(next) || self.inputs_s(next) <= now_s;
        let is_final = |next: &ShardTask| self.final_s[next.shard] <= now_s;
        self.next.filter(|next| !self.claimed && is_final(next) && has_inputs(next))
    }

    /// When the next shard task can be committed to, if it waits for nothing that has not begun.
    pub(crate) fn ready_s(&self) -> Option<f64> {
        let next = self.next.filter(|_| !self.claimed && self.runs_on.is_none())?;
        Some(self.final_s[next.shard].max(self.inputs_s(&next))).filter(|ready_s| ready_s.is_finite())
    }

    /// True if the shard task that computes makes what the next one reads, which needs no way over the host.
    fn is_handed(&self, next: &ShardTask) -> bool {
        self.runs_on.is_some_and(|(_, task)| task.sweep == next.sweep)
    }

    /// When what the next shard task reads is on the host; infinite until that is known.
    fn inputs_s(&self, next: &ShardTask) -> f64 {
        if self.program.begins(next) { 0.0 } else { self.outputs_s[self.place(next)] }
    }

    /// Notes when what a shard task makes is on the host.
    pub(crate) fn made(&mut self, task: &ShardTask, at_s: f64) {
        let place = self.place(task);
        self.outputs_s[place] = at_s;
    }

    /// The place of a sweep in its visit.
    fn place(&self, task: &ShardTask) -> usize {
        (task.sweep - self.program.visited(task).start) as usize
    }

    /// Estimated seconds from `next` on.
    pub(crate) fn remaining_s(&self, next: &ShardTask) -> f64 {
        self.cost.remaining_s(&self.program.left(next))
    }

    /// Estimated seconds of what no device has committed to.
    pub(crate) fn left_s(&self) -> f64 {
        self.next.map_or(0.0, |next| self.remaining_s(&next))
    }

    /// Estimated seconds of its own compute until a shard task that no device has committed to reads a copy of this version
    /// of a shard; `None` if its masters are stepped before, or if nothing reads it any more.
    pub(crate) fn until_read_s(&self, shard: usize, version: u64) -> Option<f64> {
        let program = &self.program;
        let reads = |task: &ShardTask| program.version(&ShardTask { shard, ..*task }) == version;
        let next = self.next.filter(reads)?;
        let then = program.visit_after(&next).filter(reads).map(|then| then.kind);
        let alone_s = self.cost.until_read_s((next.kind, next.shard), shard, program.first_trained, then)?;
        // Each shard has as many shard tasks in turn as the visit has sweeps.
        let sweeps = program.visited(&next);
        Some(alone_s * (sweeps.end - sweeps.start) as f64)
    }

    /// A device commits to the next shard task.
    pub(crate) fn claim(&mut self) -> Option<ShardTask> {
        let task = self.next?;
        self.claimed = true;
        self.next = self.program.after(&task);
        self.made(&task, f64::INFINITY);
        if self.program.steps(&task) {
            self.final_s[task.shard] = f64::INFINITY;
        }
        Some(task)
    }
}
