//! The state of a model in a simulated run.

use super::TaskCost;
use crate::policy::{CostModel, ShardTaskKind};
use crate::program::{Cursor, InFlight, Program, ShardTask, UnderWay};

/// For each microbatch pass of a replica's microbatch group: when the input of its next shard task is on the host;
/// infinite until known.
struct Outputs(Vec<f64>);

impl Outputs {
    /// The place of a shard task's microbatch pass. There are as many as in the longest group, and those of a group
    /// follow each other.
    fn place(&self, task: &ShardTask) -> usize {
        task.microbatch_pass() % self.0.len()
    }
}

/// The progress of one model.
pub(crate) struct ModelProgress {
    pub cost: CostModel,
    /// Whether gradients of some shard are accumulated on devices.
    pub adds_up: bool,
    /// Its position behind all shard tasks that devices have committed to.
    cursor: Cursor,
    pub in_flight: InFlight<usize>,
    /// By replica.
    outputs_s: Vec<Outputs>,
    /// Per shard: when its master weights are final; infinite until known.
    pub final_s: Vec<f64>,
    /// Per shard: the backwards of the minibatch that were committed to, and those with gradients on the
    /// host.
    backwards: Vec<(u64, u64)>,
    /// Seconds from the end of its last minibatch until its master weights were final, including the queue of
    /// the host optimizer; before the first minibatch ends, the time of its own step.
    pub waited_s: f64,
    /// The estimated time at which its master weights are final, if its minibatch has ended and gradients are
    /// being downloaded; else infinite.
    expected_s: f64,
}

impl ModelProgress {
    /// Returns a model on `devices` devices, which limits the useful number of replicas.
    pub(crate) fn new(task: &TaskCost, cost: CostModel, devices: usize) -> Self {
        let cursor = Cursor::after(task.program(), 0, devices);
        let largest = cursor.program().microbatch_group;
        let outputs_s = vec![0.0; largest.microbatches.max(largest.batches)];
        Self {
            in_flight: InFlight::new(cursor.replicas()),
            outputs_s: (0..cursor.replicas()).map(|_| Outputs(outputs_s.clone())).collect(),
            final_s: vec![task.arrival_s; task.shards.len()],
            backwards: vec![(0, 0); task.shards.len()],
            waited_s: task.least_step_s(),
            expected_s: f64::INFINITY,
            adds_up: task.shards.iter().any(|shard| shard.working.accumulation > 0),
            cursor,
            cost,
        }
    }

    pub(crate) fn program(&self) -> &Program {
        self.cursor.program()
    }

    /// The number of replicas.
    pub(crate) fn replicas(&self) -> usize {
        self.cursor.replicas()
    }

    /// The next shard task of the earliest unfinished microbatch group, or of the next one if none is in
    /// progress.
    pub(crate) fn next(&self) -> Option<ShardTask> {
        self.cursor.peek()
    }

    /// The version of the master weights that a shard task reads: how often they were updated.
    pub(crate) fn version(&self, task: &ShardTask) -> u64 {
        self.program().version(task.shard, task.step) as u64
    }

    /// Returns whether it is between two minibatches or microbatch passes of an evaluation, or at its end,
    /// and all updates are done.
    pub(crate) fn is_at_rest(&self, now_s: f64) -> bool {
        let begins = |next: ShardTask| next.microbatch_pass() == 0 || next.kind == ShardTaskKind::Evaluate;
        let is_between = self.cursor.is_between_groups() && self.next().is_none_or(begins);
        is_between && self.in_flight.is_idle() && self.final_s.iter().all(|final_s| *final_s <= now_s)
    }

    /// The shard task that a device may commit to at this time, and its replica; if `device` is `None`, for a
    /// device that does not compute the model.
    pub(crate) fn claimable(&self, device: Option<usize>, now_s: f64) -> Option<(usize, ShardTask)> {
        self.in_flight.claimable(&self.cursor, device, |replica, next| {
            let running = self.in_flight.running(replica);
            let is_handed = running.is_some_and(|of| of.task.microbatch_pass() == next.microbatch_pass());
            self.final_s[next.shard] <= now_s && (is_handed || self.inputs_s(replica, next) <= now_s)
        })
    }

    /// The earliest known time at which the next shard task can be committed to, unless it waits for
    /// something that has not started.
    pub(crate) fn ready_s(&self) -> Option<f64> {
        let next = self.next().filter(|_| self.in_flight.is_idle())?;
        let replica = self.cursor.first_in_group().unwrap_or(0);
        let final_s = self.final_s[next.shard];
        let final_s = if final_s.is_finite() { final_s } else { self.expected_s };
        Some(final_s.max(self.inputs_s(replica, &next))).filter(|ready_s| ready_s.is_finite())
    }

    /// The time at which the input of a replica's shard task is on the host; infinite until known.
    fn inputs_s(&self, replica: usize, next: &ShardTask) -> f64 {
        let outputs = &self.outputs_s[replica];
        if self.program().begins_pass(next) { 0.0 } else { outputs.0[outputs.place(next)] }
    }

    /// Records when the output of a replica's shard task is on the host; returns whether another device may
    /// continue with it then.
    pub(crate) fn made(&mut self, replica: usize, task: &ShardTask, at_s: f64) -> bool {
        let outputs = &mut self.outputs_s[replica];
        let place = outputs.place(task);
        outputs.0[place] = at_s;
        // Nothing waits if the device continues with the same microbatch pass.
        !self.in_flight.is_claimed(replica) || outputs.0.len() > 1
    }

    /// Estimated seconds of the work that no device has committed to.
    pub(crate) fn left_s(&self) -> f64 {
        self.cursor.remaining_s(&self.cost)
    }

    /// Estimated seconds of its own compute until an unclaimed shard task reads a copy of this version of a
    /// shard, or of frozen parameters if `version` is `None`; `None` if the master weights are updated
    /// before, or if nothing reads it again.
    pub(crate) fn until_read_s(&self, shard: usize, version: Option<u64>) -> Option<f64> {
        let reads = |next: &ShardTask| version.is_none_or(|version| self.version(next) == version);
        self.next().filter(|next| reads(&ShardTask { shard, ..*next }))?;
        let trained = version.is_some() && shard >= self.program().first_trained;
        self.cursor.until_read_s(&self.cost, shard, trained)
    }

    /// Commits a device to a replica's next shard task.
    pub(crate) fn claim(&mut self, device: usize, replica: usize) -> Option<ShardTask> {
        let task = self.cursor.peek_in(replica)?;
        self.cursor.advance(replica);
        self.made(replica, &task, f64::INFINITY);
        self.in_flight.claim(replica, UnderWay { device, task, claim: () });
        if task.kind == ShardTaskKind::Backward {
            self.backwards[task.shard].0 += 1;
            if self.backwards[task.shard].0 == self.backwards_of(&task) {
                self.final_s[task.shard] = f64::INFINITY;
            }
        }
        Some(task)
    }

    /// The backwards of each shard in the minibatch of a shard task.
    fn backwards_of(&self, task: &ShardTask) -> u64 {
        self.program().microbatches.of(task.step) as u64
    }

    /// Ends a shard task of a replica at this time.
    pub(crate) fn end(&mut self, replica: usize, task: &ShardTask, now_s: f64) {
        self.in_flight.end(replica, |of| of.task == *task);
        let is_last = self.program().following(task.kind, task.shard).is_none() && self.in_flight.is_idle();
        self.expected_s = if is_last { now_s + self.waited_s } else { f64::INFINITY };
    }

    /// Records that the gradients of `backwards` more backwards of a shard are on the host; returns whether
    /// all of its minibatch are.
    pub(crate) fn gave(&mut self, task: &ShardTask, backwards: u64) -> bool {
        let all = self.backwards_of(task);
        let (_, given) = &mut self.backwards[task.shard];
        *given += backwards;
        let are_all = backwards > 0 && *given == all;
        if are_all {
            self.backwards[task.shard] = (0, 0);
        }
        are_all
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
        let order = order(&task(2, 2, &[(0, 1), (1, 0), (2, 2)]));
        let trained = |step| format!("f0.0@{step} b1.0@{step} b0.0@{step}");
        let last = "e0.0@2 e1.0@2 e0.1@2 e1.1@2";
        assert_eq!(order, format!("e0.0@0 e1.0@0 {} {} {last}", trained(0), trained(1)));
    }

    fn order(cost: &TaskCost) -> String {
        let name = |task: ShardTask| {
            format!("{}{}.{}@{}", &task.kind.to_string()[..1], task.shard, task.microbatch_pass(), task.step)
        };
        cost.tasks_from(0).map(name).collect::<Vec<_>>().join(" ")
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
        assert_eq!(order(&cost), expected.join(" "));
        cost.microbatch_group = u64::MAX;
        assert!(order(&cost).starts_with("f0.0@0 f0.1@0 f0.2@0 f1.0@0"));
        let evaluated = order(&task(1, 1, &[(0, 2)]));
        assert_eq!(evaluated, "e0.0@0 e0.1@0 b0.0@0", "one after another where nothing is said");
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
            // With a second for each shard task, the remaining work is their number.
            cost.shards.iter_mut().for_each(|shard| (shard.forward_s, shard.backward_s) = (1.0, 1.0));
            let second = cost.estimates().unwrap();
            let (mut model, mut left) = (ModelProgress::new(&cost, second, 1), Vec::new());
            while model.next().is_some() {
                left.push(model.left_s());
                model.claim(0, 0);
            }
            let expected: Vec<f64> = (1..=cost.shard_tasks()).rev().map(|n| n as f64).collect();
            assert_eq!(left, expected);
        }
    }
}
