//! The sequence of shard tasks of a whole task: training microbatch passes, with evaluations between them.

use std::ops::Range;

use super::TaskCost;
use super::workload::Microbatches;
use crate::policy::{ShardTaskKind, WorkLeft, group_length};

/// One shard task of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardTask {
    /// The number of minibatches trained before it.
    pub minibatch: u64,
    pub kind: ShardTaskKind,
    pub shard: usize,
    /// The number of earlier microbatch passes at the same point: microbatches of its minibatch, or
    /// evaluations after the same minibatch.
    pub microbatch_pass: u64,
}

impl ShardTask {
    /// Returns whether both are in the same minibatch, or in evaluations at the same point.
    pub(crate) fn same_minibatch(&self, other: &Self) -> bool {
        let evaluates = |task: &Self| task.kind == ShardTaskKind::Evaluate;
        (self.minibatch, evaluates(self)) == (other.minibatch, evaluates(other))
    }
}

/// Evaluation microbatch passes after the same minibatch.
#[derive(Clone, Copy, Debug)]
struct Evaluations {
    after: u64,
    microbatch_passes: u64,
    /// The number of these and all later ones.
    rest: u64,
}

/// The sequence of a task's shard tasks.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub shards: usize,
    pub minibatches: u64,
    /// Backward passes end at this shard, and those below it are never updated.
    pub first_trained: usize,
    /// The sizes of microbatch groups in training and in evaluations.
    microbatch_groups: [u64; 2],
    replicas: u64,
    microbatches: Microbatches,
    evaluations: Vec<Evaluations>,
}

impl Program {
    /// Returns the program of a valid task.
    pub(crate) fn of(task: &TaskCost) -> Self {
        let mut rest = 0;
        let mut evaluations: Vec<Evaluations> = Vec::with_capacity(task.evaluations.len());
        for of in task.evaluations.iter().rev().filter(|of| of.microbatch_passes > 0) {
            rest += of.microbatch_passes;
            evaluations.push(Evaluations { after: of.after, microbatch_passes: of.microbatch_passes, rest });
        }
        evaluations.reverse();
        // No point has more microbatch passes than this.
        let most = evaluations.iter().map(|of| of.microbatch_passes).fold(1, u64::max);
        Self {
            shards: task.shards.len(),
            minibatches: task.minibatches,
            first_trained: task.first_trained,
            microbatch_groups: [
                task.microbatch_group.min(task.microbatches),
                task.evaluation_group.min(most),
            ],
            replicas: task.replicas as u64,
            microbatches: task.microbatches(),
            evaluations,
        }
    }

    /// The first shard task.
    pub(crate) fn first(&self) -> ShardTask {
        // Every task trains at least one minibatch, so there is always a first shard task.
        self.begin(0).unwrap_or(self.training(0, 0))
    }

    /// The shard task after this one if microbatch groups run in sequence; `None` at the end.
    pub(crate) fn after(&self, task: &ShardTask) -> Option<ShardTask> {
        self.after_in_group(task).or_else(|| self.group_after(task))
    }

    /// The shard task after this one in its microbatch group; `None` at the end of the group.
    pub(crate) fn after_in_group(&self, task: &ShardTask) -> Option<ShardTask> {
        let microbatch_passes = self.group_passes(task);
        if task.microbatch_pass + 1 < microbatch_passes.end {
            return Some(ShardTask { microbatch_pass: task.microbatch_pass + 1, ..*task });
        }
        let (kind, shard) = self.following(task)?;
        Some(ShardTask { kind, shard, microbatch_pass: microbatch_passes.start, ..*task })
    }

    /// The shard task of the same microbatch pass that reads this one's output; `None` at the end of the
    /// pass.
    pub(crate) fn following(&self, task: &ShardTask) -> Option<(ShardTaskKind, usize)> {
        let over = task.kind == ShardTaskKind::Backward && task.shard == self.first_trained;
        task.kind.following(task.shard, self.shards).filter(|_| !over)
    }

    /// The first shard task of the microbatch group after this one's; `None` at the end.
    pub(crate) fn group_after(&self, task: &ShardTask) -> Option<ShardTask> {
        let (next, evaluates) = (self.group_passes(task).end, task.kind == ShardTaskKind::Evaluate);
        match next < self.microbatch_passes(task) {
            true if evaluates => Some(self.evaluation(task.minibatch, next)),
            true => Some(self.training(task.minibatch, next)),
            false if evaluates => self.train(task.minibatch),
            false => self.begin(task.minibatch + 1),
        }
    }

    /// The microbatch passes in the same group as a shard task's own.
    pub(crate) fn group_passes(&self, task: &ShardTask) -> Range<u64> {
        let (microbatch_passes, evaluates) =
            (self.microbatch_passes(task), task.kind == ShardTaskKind::Evaluate);
        let usual = if evaluates { microbatch_passes } else { self.microbatches.each() };
        let microbatch_group = group_length(
            self.microbatch_groups[usize::from(evaluates)],
            self.replicas,
            usual,
            microbatch_passes,
        );
        let start = task.microbatch_pass - task.microbatch_pass % microbatch_group;
        start..start.saturating_add(microbatch_group).min(microbatch_passes)
    }

    /// The size of the largest microbatch group.
    pub(crate) fn largest_group(&self) -> u64 {
        self.microbatch_groups[0].max(self.microbatch_groups[1])
    }

    /// Returns whether the shard task is the first of its microbatch pass, which reads no output of another.
    pub(crate) fn begins(&self, task: &ShardTask) -> bool {
        let start = match task.kind {
            ShardTaskKind::Evaluate => ShardTaskKind::evaluation_start(),
            _ => ShardTaskKind::training_start(self.shards),
        };
        (task.kind, task.shard) == start
    }

    /// Returns whether the shard's master weights are updated when the shard task ends, if microbatch groups
    /// run in sequence: it is the last backward of its minibatch.
    pub(crate) fn steps(&self, task: &ShardTask) -> bool {
        task.kind == ShardTaskKind::Backward && task.microbatch_pass + 1 == self.microbatch_passes(task)
    }

    /// The version of the master weights that a shard task reads: how often they were updated.
    pub(crate) fn version(&self, task: &ShardTask) -> u64 {
        if task.shard < self.first_trained { 0 } else { task.minibatch }
    }

    /// All shard tasks, in order.
    pub(crate) fn tasks(&self) -> impl Iterator<Item = ShardTask> {
        std::iter::successors(Some(self.first()), |task| self.after(task))
    }

    /// The shard tasks that read the master weights after at least this many minibatches, in order.
    pub(crate) fn tasks_from(&self, minibatch: u64) -> impl Iterator<Item = ShardTask> {
        std::iter::successors(self.begin(minibatch), |task| self.after(task))
    }

    /// The remaining work from this shard task on.
    pub(crate) fn left(&self, next: &ShardTask) -> WorkLeft {
        self.left_with_unstarted(next, Some(self.group_passes(next).end))
    }

    /// The remaining work from this shard task on, if the microbatch groups from the microbatch pass
    /// `not_begun` on have not started; all have if it is `None`.
    pub(crate) fn left_with_unstarted(&self, next: &ShardTask, not_begun: Option<u64>) -> WorkLeft {
        let (_, later) = self.here(next.minibatch);
        let (passes, position) = (self.group_passes(next), Some((next.kind, next.shard)));
        let more = not_begun.map_or(0, |from| self.microbatch_passes(next) - from);
        let trains = |from: u64| self.microbatches.before(self.minibatches) - self.microbatches.before(from);
        let (microbatch_passes, evaluations) = match next.kind {
            ShardTaskKind::Evaluate => (trains(next.minibatch), more + later),
            _ => (trains(next.minibatch + 1) + more, later),
        };
        let (also, past) = (passes.end - next.microbatch_pass - 1, next.microbatch_pass - passes.start);
        WorkLeft { microbatch_passes, evaluations, position, also, past }
    }

    /// The number of microbatch passes at a shard task's point.
    pub(crate) fn microbatch_passes(&self, task: &ShardTask) -> u64 {
        match task.kind {
            ShardTaskKind::Evaluate => self.here(task.minibatch).0,
            _ => self.microbatches.of(task.minibatch),
        }
    }

    /// The evaluation microbatch passes after this many minibatches, and those after more.
    fn here(&self, minibatch: u64) -> (u64, u64) {
        let place = self.evaluations.partition_point(|of| of.after < minibatch);
        match self.evaluations.get(place) {
            Some(of) if of.after == minibatch => (of.microbatch_passes, of.rest - of.microbatch_passes),
            Some(of) => (0, of.rest),
            None => (0, 0),
        }
    }

    fn begin(&self, minibatch: u64) -> Option<ShardTask> {
        if self.here(minibatch).0 > 0 { Some(self.evaluation(minibatch, 0)) } else { self.train(minibatch) }
    }

    fn train(&self, minibatch: u64) -> Option<ShardTask> {
        (minibatch < self.minibatches).then(|| self.training(minibatch, 0))
    }

    fn training(&self, minibatch: u64, microbatch_pass: u64) -> ShardTask {
        let (kind, shard) = ShardTaskKind::training_start(self.shards);
        ShardTask { minibatch, kind, shard, microbatch_pass }
    }

    fn evaluation(&self, minibatch: u64, microbatch_pass: u64) -> ShardTask {
        let (kind, shard) = ShardTaskKind::evaluation_start();
        ShardTask { minibatch, kind, shard, microbatch_pass }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulator::{Epoch, EvaluationCost, ShardCost};

    fn task(shards: usize, minibatches: u64, evaluations: &[(u64, u64)]) -> TaskCost {
        let mut task = TaskCost::new("a", minibatches, vec![ShardCost::new(1.0, 2.0, 0.0); shards]);
        task.evaluations = evaluations
            .iter()
            .map(|&(after, microbatch_passes)| EvaluationCost { after, microbatch_passes })
            .collect();
        task
    }

    #[test]
    fn evaluations_stand_between_minibatches() {
        let program = Program::of(&task(2, 2, &[(0, 1), (1, 0), (2, 2)]));
        let order: Vec<String> = program
            .tasks()
            .map(|task| format!("{}{}@{}", &task.kind.to_string()[..1], task.shard, task.minibatch))
            .collect();
        let expected = "e0@0 e1@0 f0@0 b1@0 b0@0 f0@1 b1@1 b0@1 e0@2 e1@2 e0@2 e1@2";
        assert_eq!(order.join(" "), expected);
    }

    fn order(program: &Program) -> String {
        let name = |task: ShardTask| {
            format!(
                "{}{}.{}@{}",
                &task.kind.to_string()[..1],
                task.shard,
                task.microbatch_pass,
                task.minibatch
            )
        };
        program.tasks().map(name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_group_takes_its_passes_through_a_shard_before_the_next() {
        let mut cost = task(3, 2, &[(1, 3)]);
        (cost.microbatches, cost.microbatch_group, cost.evaluation_group, cost.first_trained) = (3, 2, 2, 1);
        cost.epoch = Some(Epoch { minibatches: 2, last_microbatches: 1 });
        let expected = [
            "f0.0@0 f0.1@0 f1.0@0 f1.1@0 b2.0@0 b2.1@0 b1.0@0 b1.1@0",
            "f0.2@0 f1.2@0 b2.2@0 b1.2@0",
            "e0.0@1 e0.1@1 e1.0@1 e1.1@1 e2.0@1 e2.1@1",
            "e0.2@1 e1.2@1 e2.2@1",
            "f0.0@1 f1.0@1 b2.0@1 b1.0@1",
        ];
        assert_eq!(order(&Program::of(&cost)), expected.join(" "));
        let steps = |program: &Program| program.tasks().filter(|task| program.steps(task)).count();
        assert_eq!(steps(&Program::of(&cost)), 2 * 2);
        cost.microbatch_group = u64::MAX;
        assert!(order(&Program::of(&cost)).starts_with("f0.0@0 f0.1@0 f0.2@0 f1.0@0"));
        let evaluated = order(&Program::of(&task(1, 1, &[(0, 2)])));
        assert_eq!(evaluated, "e0.0@0 e0.1@0 b0.0@0", "one after another where nothing is said");
    }

    #[test]
    fn the_places_of_evaluations_rise_and_are_in_the_task() {
        let check = |evaluations: &[(u64, u64)]| {
            let devices = vec![crate::simulator::DeviceCost::default()];
            crate::simulator::Workload::new(vec![task(1, 3, evaluations)], devices).check()
        };
        assert!(check(&[(0, 1), (2, 0), (3, 9)]).is_ok());
        for wrong in [&[(1, 1), (1, 1)][..], &[(2, 1), (1, 1)], &[(4, 1)]] {
            let error = check(wrong).unwrap_err().to_string();
            assert!(error.contains("evaluations.after") && error.contains("`a`"), "{error}");
        }
    }

    #[test]
    fn what_is_left_counts_down_by_one_shard_task_each() {
        let evaluations = [(1, &[][..]), (3, &[(0, 2), (3, 1), (4, 1)]), (1, &[(2, 3)]), (2, &[(1, 1)])];
        let microbatches = [(1, 1, 1), (4, 1, 2), (4, 3, 4), (2, 2, 1), (3, 9, 2)];
        let cases =
            evaluations.into_iter().flat_map(|of| microbatches.map(|microbatches| (of, microbatches)));
        for ((shards, evaluations), (microbatches, microbatch_group, last)) in cases {
            let mut cost = task(shards, 4, evaluations);
            (cost.microbatches, cost.microbatch_group, cost.evaluation_group) =
                (microbatches, microbatch_group, microbatch_group);
            cost.first_trained = shards / 2;
            cost.epoch = Some(Epoch { minibatches: 3, last_microbatches: last });
            let program = Program::of(&cost);
            // With a second for each shard task, the remaining work is their number.
            cost.shards.iter_mut().for_each(|shard| (shard.forward_s, shard.backward_s) = (1.0, 1.0));
            let second = cost.estimates().unwrap();
            let left: Vec<f64> =
                program.tasks().map(|task| second.remaining_s(&program.left(&task))).collect();
            let expected: Vec<f64> = (1..=cost.shard_tasks()).rev().map(|n| n as f64).collect();
            assert_eq!(left, expected);
        }
    }
}
