//! The shard tasks of a whole task, in their order: training sweeps, with evaluations between them.

use std::ops::Range;

use super::TaskCost;
use super::workload::Microbatches;
use crate::policy::{ShardTaskKind, WorkLeft, visit_length};

/// One shard task of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardTask {
    /// Minibatches trained before it.
    pub minibatch: u64,
    pub kind: ShardTaskKind,
    pub shard: usize,
    /// The sweeps of the same place that come before its own: microbatches of its minibatch, or evaluations after the same
    /// minibatch.
    pub sweep: u64,
}

impl ShardTask {
    /// True if both are of one minibatch, or of evaluations of one place.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        let evaluates = |task: &Self| task.kind == ShardTaskKind::Evaluate;
        (self.minibatch, evaluates(self)) == (other.minibatch, evaluates(other))
    }
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
    /// Backward passes end at this shard, and those below it are never stepped.
    pub first_trained: usize,
    /// Microbatches that go through the shards together, and evaluation sweeps of one place.
    visits: [u64; 2],
    lanes: u64,
    microbatches: Microbatches,
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
        // No place has more sweeps than that.
        let most = evaluations.iter().map(|of| of.sweeps).fold(1, u64::max);
        Self {
            shards: task.shards.len(),
            minibatches: task.minibatches,
            first_trained: task.first_trained,
            visits: [task.visit.min(task.microbatches), task.evaluation_visit.min(most)],
            lanes: task.lanes as u64,
            microbatches: task.microbatches(),
            evaluations,
        }
    }

    /// The first shard task.
    pub(crate) fn first(&self) -> ShardTask {
        // Every task trains at least one minibatch, so there always is one.
        self.begin(0).unwrap_or(self.training(0, 0))
    }

    /// The shard task after this one where visits are made one after the other; `None` at the end.
    pub(crate) fn after(&self, task: &ShardTask) -> Option<ShardTask> {
        self.after_in_visit(task).or_else(|| self.visit_after(task))
    }

    /// The shard task after this one in its visit; `None` at the visit's end.
    pub(crate) fn after_in_visit(&self, task: &ShardTask) -> Option<ShardTask> {
        let sweeps = self.visited(task);
        if task.sweep + 1 < sweeps.end {
            return Some(ShardTask { sweep: task.sweep + 1, ..*task });
        }
        let (kind, shard) = self.following(task)?;
        Some(ShardTask { kind, shard, sweep: sweeps.start, ..*task })
    }

    /// The shard task of the same sweep that reads what this one makes; `None` at the sweep's end.
    pub(crate) fn following(&self, task: &ShardTask) -> Option<(ShardTaskKind, usize)> {
        let over = task.kind == ShardTaskKind::Backward && task.shard == self.first_trained;
        task.kind.following(task.shard, self.shards).filter(|_| !over)
    }

    /// The first shard task of the visit after this one's; `None` at the end.
    pub(crate) fn visit_after(&self, task: &ShardTask) -> Option<ShardTask> {
        let (next, evaluates) = (self.visited(task).end, task.kind == ShardTaskKind::Evaluate);
        match next < self.sweeps(task) {
            true if evaluates => Some(self.evaluation(task.minibatch, next)),
            true => Some(self.training(task.minibatch, next)),
            false if evaluates => self.train(task.minibatch),
            false => self.begin(task.minibatch + 1),
        }
    }

    /// The sweeps of its place that a shard task's own goes through the shards with.
    pub(crate) fn visited(&self, task: &ShardTask) -> Range<u64> {
        let (sweeps, evaluates) = (self.sweeps(task), task.kind == ShardTaskKind::Evaluate);
        let usual = if evaluates { sweeps } else { self.microbatches.each() };
        let visit = visit_length(self.visits[usize::from(evaluates)], self.lanes, usual, sweeps);
        let start = task.sweep - task.sweep % visit;
        start..start.saturating_add(visit).min(sweeps)
    }

    /// The most sweeps that go through the shards together.
    pub(crate) fn largest_visit(&self) -> u64 {
        self.visits[0].max(self.visits[1])
    }

    /// True if the shard task is the first of its sweep: it reads nothing that another one makes.
    pub(crate) fn begins(&self, task: &ShardTask) -> bool {
        let start = match task.kind {
            ShardTaskKind::Evaluate => ShardTaskKind::evaluation_start(),
            _ => ShardTaskKind::training_start(self.shards),
        };
        (task.kind, task.shard) == start
    }

    /// True if the shard's masters are stepped when the shard task ends, where visits are made one after the other: it is the
    /// last backward of its minibatch.
    pub(crate) fn steps(&self, task: &ShardTask) -> bool {
        task.kind == ShardTaskKind::Backward && task.sweep + 1 == self.sweeps(task)
    }

    /// The version of the masters that a shard task reads: how often they were stepped.
    pub(crate) fn version(&self, task: &ShardTask) -> u64 {
        if task.shard < self.first_trained { 0 } else { task.minibatch }
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
        self.left_beside(next, Some(self.visited(next).end))
    }

    /// The work from this shard task on, where no visit has begun with this sweep of its place and those after it; all have
    /// where there is none.
    pub(crate) fn left_beside(&self, next: &ShardTask, not_begun: Option<u64>) -> WorkLeft {
        let (_, later) = self.here(next.minibatch);
        let (visited, position) = (self.visited(next), Some((next.kind, next.shard)));
        let more = not_begun.map_or(0, |from| self.sweeps(next) - from);
        let trains = |from: u64| self.microbatches.before(self.minibatches) - self.microbatches.before(from);
        let (sweeps, evaluations) = match next.kind {
            ShardTaskKind::Evaluate => (trains(next.minibatch), more + later),
            _ => (trains(next.minibatch + 1) + more, later),
        };
        let (also, past) = (visited.end - next.sweep - 1, next.sweep - visited.start);
        WorkLeft { sweeps, evaluations, position, also, past }
    }

    /// The sweeps of a shard task's place.
    pub(crate) fn sweeps(&self, task: &ShardTask) -> u64 {
        match task.kind {
            ShardTaskKind::Evaluate => self.here(task.minibatch).0,
            _ => self.microbatches.of(task.minibatch),
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
        (minibatch < self.minibatches).then(|| self.training(minibatch, 0))
    }

    fn training(&self, minibatch: u64, sweep: u64) -> ShardTask {
        let (kind, shard) = ShardTaskKind::training_start(self.shards);
        ShardTask { minibatch, kind, shard, sweep }
    }

    fn evaluation(&self, minibatch: u64, sweep: u64) -> ShardTask {
        let (kind, shard) = ShardTaskKind::evaluation_start();
        ShardTask { minibatch, kind, shard, sweep }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::{Epoch, EvaluationCost, ShardCost};

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

    fn order(program: &Program) -> String {
        let name = |task: ShardTask| {
            format!("{}{}.{}@{}", &task.kind.to_string()[..1], task.shard, task.sweep, task.minibatch)
        };
        program.tasks().map(name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_visit_takes_its_sweeps_through_a_shard_before_the_next() {
        let mut cost = task(3, 2, &[(1, 3)]);
        (cost.microbatches, cost.visit, cost.evaluation_visit, cost.first_trained) = (3, 2, 2, 1);
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
        cost.visit = u64::MAX;
        assert!(order(&Program::of(&cost)).starts_with("f0.0@0 f0.1@0 f0.2@0 f1.0@0"));
        let evaluated = order(&Program::of(&task(1, 1, &[(0, 2)])));
        assert_eq!(evaluated, "e0.0@0 e0.1@0 b0.0@0", "one after another where nothing is said");
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
        let evaluations = [(1, &[][..]), (3, &[(0, 2), (3, 1), (4, 1)]), (1, &[(2, 3)]), (2, &[(1, 1)])];
        let microbatches = [(1, 1, 1), (4, 1, 2), (4, 3, 4), (2, 2, 1), (3, 9, 2)];
        let cases =
            evaluations.into_iter().flat_map(|of| microbatches.map(|microbatches| (of, microbatches)));
        for ((shards, evaluations), (microbatches, visit, last)) in cases {
            let mut cost = task(shards, 4, evaluations);
            (cost.microbatches, cost.visit, cost.evaluation_visit) = (microbatches, visit, visit);
            cost.first_trained = shards / 2;
            cost.epoch = Some(Epoch { minibatches: 3, last_microbatches: last });
            let program = Program::of(&cost);
            // With a second for each shard task, what is left is their number.
            cost.shards.iter_mut().for_each(|shard| (shard.forward_s, shard.backward_s) = (1.0, 1.0));
            let second = cost.estimates().unwrap();
            let left: Vec<f64> =
                program.tasks().map(|task| second.remaining_s(&program.left(&task))).collect();
            let expected: Vec<f64> = (1..=cost.shard_tasks()).rev().map(|n| n as f64).collect();
            assert_eq!(left, expected);
        }
    }
}
