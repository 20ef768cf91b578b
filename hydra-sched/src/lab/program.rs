//! The shard tasks of a whole task, in their order: training sweeps, with evaluations between them.

use super::TaskCost;
use crate::policy::{ShardTaskKind, WorkLeft};

/// One shard task of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardTask {
    /// Minibatches trained before it: the version of the masters that it reads.
    pub minibatch: u64,
    pub kind: ShardTaskKind,
    pub shard: usize,
    /// Of an evaluation: the sweeps of the same place that came before its own.
    sweep: u64,
}

/// Evaluation sweeps that follow on the same minibatch.
#[derive(Clone, Copy, Debug)]
struct Evaluations {
    after: u64,
    sweeps: u64,
    /// These and all later ones.
    rest: u64,
}

/// The order of a task's shard tasks.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub shards: usize,
    pub minibatches: u64,
    evaluations: Vec<Evaluations>,
}

impl Program {
    /// The program of a valid task.
    pub(crate) fn of(task: &TaskCost) -> Self {
        let mut rest = 0;
        let mut evaluations: Vec<Evaluations> = Vec::with_capacity(task.evaluations.len());
        for of in task.evaluations.iter().rev().filter(|of| of.sweeps > 0) {
            rest += of.sweeps;
            evaluations.push(Evaluations { after: of.after, sweeps: of.sweeps, rest });
        }
        evaluations.reverse();
        Self { shards: task.shards.len(), minibatches: task.minibatches, evaluations }
    }

    /// The first shard task.
    pub(crate) fn first(&self) -> ShardTask {
        // Every task trains at least one minibatch, so there always is one.
        self.begin(0).unwrap_or(self.training(0))
    }

    /// The shard task after this one; `None` at the end.
    pub(crate) fn after(&self, task: &ShardTask) -> Option<ShardTask> {
        match task.kind.following(task.shard, self.shards) {
            Some((kind, shard)) => Some(ShardTask { kind, shard, ..*task }),
            None => self.sweep_after(task),
        }
    }

    /// The first shard task of the sweep after this one's; `None` at the end.
    pub(crate) fn sweep_after(&self, task: &ShardTask) -> Option<ShardTask> {
        match task.kind {
            ShardTaskKind::Evaluate if task.sweep + 1 < self.here(task.minibatch).0 => {
                Some(self.evaluation(task.minibatch, task.sweep + 1))
            }
            ShardTaskKind::Evaluate => self.train(task.minibatch),
            ShardTaskKind::Forward | ShardTaskKind::Backward => self.begin(task.minibatch + 1),
        }
    }

    /// All shard tasks, in order.
    pub(crate) fn tasks(&self) -> impl Iterator<Item = ShardTask> {
        std::iter::successors(Some(self.first()), |task| self.after(task))
    }

    /// The shard tasks that read the masters of so many minibatches or of more, in order.
    pub(crate) fn tasks_from(&self, minibatch: u64) -> impl Iterator<Item = ShardTask> {
        std::iter::successors(self.begin(minibatch), |task| self.after(task))
    }

    /// The work from this shard task on.
    pub(crate) fn left(&self, next: &ShardTask) -> WorkLeft {
        let (here, later) = self.here(next.minibatch);
        let position = Some((next.kind, next.shard));
        let sweeps = self.minibatches - next.minibatch;
        match next.kind {
            ShardTaskKind::Evaluate => WorkLeft {
                sweeps,
                evaluations: here - next.sweep - 1 + later,
                position,
                ..WorkLeft::default()
            },
            _ => WorkLeft { sweeps: sweeps - 1, evaluations: later, position, ..WorkLeft::default() },
        }
    }

    /// Evaluation sweeps after so many minibatches, and those after more.
    fn here(&self, minibatch: u64) -> (u64, u64) {
        let place = self.evaluations.partition_point(|of| of.after < minibatch);
        match self.evaluations.get(place) {
            Some(of) if of.after == minibatch => (of.sweeps, of.rest - of.sweeps),
            Some(of) => (0, of.rest),
            None => (0, 0),
        }
    }

    fn begin(&self, minibatch: u64) -> Option<ShardTask> {
        if self.here(minibatch).0 > 0 { Some(self.evaluation(minibatch, 0)) } else { self.train(minibatch) }
    }

    fn train(&self, minibatch: u64) -> Option<ShardTask> {
        (minibatch < self.minibatches).then(|| self.training(minibatch))
    }

    fn training(&self, minibatch: u64) -> ShardTask {
        let (kind, shard) = ShardTaskKind::training_start(self.shards);
        ShardTask { minibatch, kind, shard, sweep: 0 }
    }

    fn evaluation(&self, minibatch: u64, sweep: u64) -> ShardTask {
        let (kind, shard) = ShardTaskKind::evaluation_start();
        ShardTask { minibatch, kind, shard, sweep }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::{EvaluationCost, ShardCost};

    fn task(shards: usize, minibatches: u64, evaluations: &[(u64, u64)]) -> TaskCost {
        let mut task = TaskCost::new("a", minibatches, vec![ShardCost::new(1.0, 2.0, 0.0); shards]);
        task.evaluations =
            evaluations.iter().map(|&(after, sweeps)| EvaluationCost { after, sweeps }).collect();
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

    #[test]
    fn the_places_of_evaluations_rise_and_are_in_the_task() {
        let check = |evaluations: &[(u64, u64)]| {
            let devices = vec![crate::lab::DeviceCost::default()];
            crate::lab::Workload::new(vec![task(1, 3, evaluations)], devices).check()
        };
        assert!(check(&[(0, 1), (2, 0), (3, 9)]).is_ok());
        for wrong in [&[(1, 1), (1, 1)][..], &[(2, 1), (1, 1)], &[(4, 1)]] {
            let error = check(wrong).unwrap_err().to_string();
            assert!(error.contains("evaluations.after") && error.contains("`a`"), "{error}");
        }
    }

    #[test]
    fn what_is_left_counts_down_by_one_shard_task_each() {
        for (shards, evaluations) in
            [(1, &[][..]), (3, &[(0, 2), (3, 1), (4, 1)]), (1, &[(2, 3)]), (2, &[(1, 1)])]
        {
            let cost = task(shards, 4, evaluations);
            let program = Program::of(&cost);
            // With a second for each shard task, what is left is their number.
            let ones = vec![1.0; shards];
            let second = crate::policy::CostModel::new(ones.clone(), ones.clone(), ones).unwrap();
            let left: Vec<f64> =
                program.tasks().map(|task| second.remaining_s(&program.left(&task))).collect();
            let expected: Vec<f64> = (1..=cost.shard_tasks()).rev().map(|n| n as f64).collect();
            assert_eq!(left, expected);
        }
    }
}
