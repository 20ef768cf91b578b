//! A model in the middle of a simulated run.

use super::TaskCost;
use super::program::{Program, ShardTask};
use crate::policy::{CostModel, ShardTaskKind};

/// The progress of one model.
pub(crate) struct Model {
    pub cost: CostModel,
    program: Program,
    /// The first shard task that no device has committed to.
    pub next: Option<ShardTask>,
    /// A device has committed to a shard task that has not started.
    pub claimed: bool,
    /// The device that computes it.
    pub runs_on: Option<usize>,
    /// The device that computed it last.
    pub ran_on: Option<usize>,
    /// Per shard: when its masters are final; infinite until that is known.
    pub final_s: Vec<f64>,
    /// The time at which the output of its last shard task is on the host.
    pub output_s: f64,
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
            output_s: 0.0,
            waited_s: task.least_step_s(),
            program,
            cost,
        }
    }

    /// The next shard task, if a device may commit to it at this time.
    pub(crate) fn claimable(&self, now_s: f64) -> Option<ShardTask> {
        let inputs = self.runs_on.is_some() || self.output_s <= now_s;
        self.next.filter(|next| !self.claimed && inputs && self.final_s[next.shard] <= now_s)
    }

    /// When the next shard task can be committed to, if it waits for nothing that has not begun.
    pub(crate) fn ready_s(&self) -> Option<f64> {
        let next = self.next.filter(|_| !self.claimed && self.runs_on.is_none())?;
        Some(self.final_s[next.shard].max(self.output_s)).filter(|ready_s| ready_s.is_finite())
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
        let next = self.next.filter(|next| next.minibatch == version)?;
        let then = self.program.sweep_after(&next).filter(|then| then.minibatch == version);
        self.cost.until_read_s((next.kind, next.shard), shard, 0, then.map(|then| then.kind))
    }

    /// A device commits to the next shard task.
    pub(crate) fn claim(&mut self) -> Option<ShardTask> {
        let task = self.next?;
        self.claimed = true;
        self.next = self.program.after(&task);
        if task.kind == ShardTaskKind::Backward {
            self.final_s[task.shard] = f64::INFINITY;
        }
        Some(task)
    }
}
