//! Recorded times of the shard tasks of a run.

use std::collections::BTreeMap;

use crate::policy::ShardTaskKind;
use crate::program::ShardTask;

/// Seconds that shard tasks took on a device of speed 1, for a [`replay`](crate::replay) of their run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShardTimes {
    /// For each task, kind, minibatch and shard: its microbatch passes.
    seconds: BTreeMap<(usize, ShardTaskKind, u64, usize), Vec<Option<f64>>>,
}

impl ShardTimes {
    /// Records a shard task of a task, by its index in the workload, after this many minibatches: that of
    /// this microbatch, or the next one of its shard in the evaluations there.
    pub fn insert(
        &mut self,
        (task, kind, minibatch, shard): (usize, ShardTaskKind, u64, usize),
        microbatch: usize,
        seconds: f64,
    ) {
        let microbatch_passes = self.seconds.entry((task, kind, minibatch, shard)).or_default();
        let microbatch_pass =
            if kind == ShardTaskKind::Evaluate { microbatch_passes.len() } else { microbatch };
        if microbatch_pass >= microbatch_passes.len() {
            microbatch_passes.resize(microbatch_pass + 1, None);
        }
        microbatch_passes[microbatch_pass] = Some(seconds);
    }

    /// Returns the seconds of a shard task, if recorded.
    pub(super) fn get(&self, task: usize, of: &ShardTask) -> Option<f64> {
        let microbatch_passes = self.seconds.get(&(task, of.kind, of.step as u64, of.shard))?;
        microbatch_passes.get(of.microbatch_pass()).copied()?
    }
}
