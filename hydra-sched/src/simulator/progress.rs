//! The state of a model in a simulated run.

use super::TaskCost;
use super::program::{Program, ShardTask};
use crate::policy::{CostModel, ShardTaskKind, WorkLeft};

/// A replica runs microbatch groups of a model in sequence: its next, claimed and running shard task.
struct Replica {
    /// The next shard task of a microbatch group that has started.
    next: Option<ShardTask>,
    /// The device that has committed to a shard task that has not started.
    claimed: Option<(usize, ShardTask)>,
    /// The device that computes a shard task.
    runs_on: Option<(usize, ShardTask)>,
    /// Per microbatch pass of the group: when the input of its next shard task is on the host; infinite until
    /// known.
    outputs_s: Vec<f64>,
}

impl Replica {
    fn is_free(&self) -> bool {
        self.claimed.is_none() && self.runs_on.is_none()
    }

    fn under_way(&self) -> impl Iterator<Item = &(usize, ShardTask)> {
        self.claimed.iter().chain(&self.runs_on)
    }

    /// Returns whether all of its unfinished work is in the minibatch, or the evaluations, of this shard
    /// task.
    fn same_minibatch(&self, task: &ShardTask) -> bool {
        let mut there = self.next.iter().chain(self.under_way().map(|(_, task)| task));
        there.all(|other| other.same_minibatch(task))
    }
}

/// The progress of one model.
pub(crate) struct Model {
    pub cost: CostModel,
    pub program: Program,
    /// Whether gradients of some shard are accumulated on devices.
    pub adds_up: bool,
    replicas: Vec<Replica>,
    /// The first shard task of the first microbatch group that has not started.
    following: Option<ShardTask>,
    /// The device that last committed to it.
    pub ran_on: Option<usize>,
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

impl Model {
    /// Returns a model on `devices` devices, which limits the useful number of replicas.
    pub(crate) fn new(task: &TaskCost, cost: CostModel, devices: usize) -> Self {
        let program = Program::of(task);
        let largest = program.largest_group() as usize;
        let replica = |_| Replica { next: None, claimed: None, runs_on: None, outputs_s: vec![0.0; largest] };
        Self {
            replicas: (0..task.replicas.min(devices)).map(replica).collect(),
            following: Some(program.first()),
            ran_on: None,
            final_s: vec![task.arrival_s; program.shards],
            backwards: vec![(0, 0); program.shards],
            waited_s: task.least_step_s(),
            expected_s: f64::INFINITY,
            adds_up: task.shards.iter().any(|shard| shard.working.accumulation > 0),
            program,
            cost,
        }
    }

    /// The number of replicas.
    pub(crate) fn replicas(&self) -> usize {
        self.replicas.len()
    }

    /// The replicas with a microbatch group that has started, in the order of their microbatch passes.
    fn begun(&self) -> Vec<usize> {
        let begun = self.replicas.iter().enumerate().filter_map(|(replica, of)| Some((of.next?, replica)));
        let mut begun: Vec<(u64, usize)> =
            begun.map(|(next, replica)| (self.program.group_passes(&next).start, replica)).collect();
        begun.sort_unstable();
        begun.into_iter().map(|(_, replica)| replica).collect()
    }

    /// The replica of the earliest unfinished microbatch group, and its next shard task.
    fn first_begun(&self) -> Option<(usize, ShardTask)> {
        let begun = self.replicas.iter().enumerate().filter_map(|(replica, of)| Some((replica, of.next?)));
        begun.min_by_key(|(replica, next)| (self.program.group_passes(next).start, *replica))
    }

    /// The next shard task of the earliest unfinished microbatch group, or of the next one if none is in
    /// progress.
    pub(crate) fn next(&self) -> Option<ShardTask> {
        self.first_begun().map_or(self.following, |(_, next)| Some(next))
    }

    /// Returns whether a device computes it or has committed to it.
    pub(crate) fn is_under_way(&self) -> bool {
        self.replicas.iter().any(|replica| !replica.is_free())
    }

    /// Returns whether a device has committed to a shard task that has not started.
    pub(crate) fn is_claimed(&self) -> bool {
        self.replicas.iter().any(|replica| replica.claimed.is_some())
    }

    /// Returns whether another device computes it or has committed to it.
    pub(crate) fn is_elsewhere(&self, device: usize) -> bool {
        self.replicas.iter().flat_map(Replica::under_way).any(|(on, _)| *on != device)
    }

    /// Returns whether another device last committed to it, and this one is not computing it too.
    pub(crate) fn ran_elsewhere(&self, device: usize) -> bool {
        let mut under_way = self.replicas.iter().flat_map(Replica::under_way);
        self.ran_on.is_some_and(|on| on != device) && under_way.all(|(on, _)| *on != device)
    }

    /// Returns whether it is between two minibatches or microbatch passes of an evaluation, or at its end,
    /// and all updates are done.
    pub(crate) fn is_at_rest(&self, now_s: f64) -> bool {
        let begins = |next: ShardTask| next.microbatch_pass == 0 || next.kind == ShardTaskKind::Evaluate;
        let is_between = self.first_begun().is_none() && self.following.is_none_or(begins);
        is_between && !self.is_under_way() && self.final_s.iter().all(|final_s| *final_s <= now_s)
    }

    /// The devices that compute it.
    pub(crate) fn runs_on(&self) -> impl Iterator<Item = usize> {
        self.replicas.iter().filter_map(|replica| replica.runs_on.map(|(device, _)| device))
    }

    /// The shard task that a device may commit to at this time, and its replica; if `device` is `None`, for a
    /// device that does not compute the model. The order of preference is: the successor of the one that the
    /// device computes, then microbatch groups that have started, then one that starts, but not in a second
    /// replica on the same device.
    pub(crate) fn claimable(&self, device: Option<usize>, now_s: f64) -> Option<(usize, ShardTask)> {
        let runs_here = |replica: &Replica| {
            device.is_some() && replica.claimed.is_none() && replica.runs_on.map(|(on, _)| on) == device
        };
        let own = self.replicas.iter().position(runs_here);
        let is_begun = |replica: &usize| self.replicas[*replica].next.is_some();
        let (goes_on, begins) = (own.filter(is_begun), own.filter(|replica| !is_begun(replica)));
        let begun = self.begun().into_iter().filter(|replica| self.replicas[*replica].is_free());
        let free = self.replicas.iter().position(|replica| replica.is_free() && replica.next.is_none());
        let here = self.replicas.iter().flat_map(Replica::under_way).any(|(on, _)| Some(*on) == device);
        let mut replicas = goes_on.into_iter().chain(begun).chain(begins).chain(free.filter(|_| !here));
        replicas.find_map(|replica| Some((replica, self.claimable_in(replica, now_s)?)))
    }

    /// The next shard task of a replica without a commitment, if it can run now.
    fn claimable_in(&self, replica: usize, now_s: f64) -> Option<ShardTask> {
        let of = &self.replicas[replica];
        let next = of.next.or(self.following)?;
        let others = self.replicas.iter().enumerate().filter(|(other, _)| *other != replica);
        let may_begin = || others.map(|(_, other)| other).all(|other| other.same_minibatch(&next));
        let is_handed = of.runs_on.is_some_and(|(_, task)| task.microbatch_pass == next.microbatch_pass);
        let has_inputs = is_handed || self.inputs_s(replica, &next) <= now_s;
        let ready = self.final_s[next.shard] <= now_s && has_inputs && (of.next.is_some() || may_begin());
        ready.then_some(next)
    }

    /// The earliest known time at which the next shard task can be committed to, unless it waits for
    /// something that has not started.
    pub(crate) fn ready_s(&self) -> Option<f64> {
        let next = self.next().filter(|_| !self.is_under_way())?;
        let replica = self.first_begun().map_or(0, |(replica, _)| replica);
        let final_s = self.final_s[next.shard];
        let final_s = if final_s.is_finite() { final_s } else { self.expected_s };
        Some(final_s.max(self.inputs_s(replica, &next))).filter(|ready_s| ready_s.is_finite())
    }

    /// The time at which the input of a replica's shard task is on the host; infinite until known.
    fn inputs_s(&self, replica: usize, next: &ShardTask) -> f64 {
        if self.program.begins(next) { 0.0 } else { self.replicas[replica].outputs_s[self.place(next)] }
    }

    /// Records when the output of a replica's shard task is on the host; returns whether another device may
    /// continue with it then.
    pub(crate) fn made(&mut self, replica: usize, task: &ShardTask, at_s: f64) -> bool {
        let place = self.place(task);
        let of = &mut self.replicas[replica];
        of.outputs_s[place] = at_s;
        // Nothing waits if the device continues with the same microbatch pass.
        of.claimed.is_none() || self.program.largest_group() > 1
    }

    /// The position of a microbatch pass in its group.
    fn place(&self, task: &ShardTask) -> usize {
        (task.microbatch_pass - self.program.group_passes(task).start) as usize
    }

    /// Estimated seconds of the work that no device has committed to.
    pub(crate) fn left_s(&self) -> f64 {
        let Some((first, next)) = self.first_begun() else {
            return self.following.map_or(0.0, |next| self.cost.remaining_s(&self.program.left(&next)));
        };
        let joined = self.following.filter(|following| following.same_minibatch(&next));
        let left = self.program.left_with_unstarted(&next, joined.map(|following| following.microbatch_pass));
        let others = self.replicas.iter().enumerate().filter(|(replica, _)| *replica != first);
        let of = |next: ShardTask| {
            let WorkLeft { position, also, past, .. } = self.program.left(&next);
            self.cost.remaining_s(&WorkLeft { position, also, past, ..WorkLeft::default() })
        };
        let others = others.filter_map(|(_, replica)| replica.next).map(of);
        others.fold(self.cost.remaining_s(&left), |sum, more_s| sum + more_s)
    }

    /// Estimated seconds of its own compute until an unclaimed shard task reads a copy of this version of a
    /// shard, or of frozen parameters if `version` is `None`; `None` if the master weights are updated
    /// before, or if nothing reads it again.
    pub(crate) fn until_read_s(&self, shard: usize, version: Option<u64>) -> Option<f64> {
        let program = &self.program;
        let found = |task: &ShardTask| program.version(&ShardTask { shard, ..*task });
        let reads = |task: &ShardTask| version.is_none_or(|version| found(task) == version);
        let until = |next: ShardTask, then: Option<ShardTask>| {
            let then = then.filter(reads).map(|then| then.kind);
            let next = Some(next).filter(reads)?;
            let position = (next.kind, next.shard);
            let alone_s = self.cost.until_read_s(position, shard, program.first_trained, then)?;
            // Each shard has one shard task in sequence per microbatch pass of the group.
            let microbatch_passes = program.group_passes(&next);
            Some(alone_s * (microbatch_passes.end - microbatch_passes.start) as f64)
        };
        let begun = self.replicas.iter().filter_map(|replica| replica.next);
        let is_between = begun.clone().next().is_none();
        let following = self.following.filter(|_| is_between);
        let in_following = following.and_then(|next| until(next, program.group_after(&next)));
        begun.filter_map(|next| until(next, self.following)).chain(in_following).min_by(f64::total_cmp)
    }

    /// Commits a device to a replica's next shard task.
    pub(crate) fn claim(&mut self, device: usize, replica: usize) -> Option<ShardTask> {
        let begins = self.replicas[replica].next.is_none();
        let task = self.replicas[replica].next.or(self.following)?;
        if begins {
            self.following = self.program.group_after(&task);
        }
        self.made(replica, &task, f64::INFINITY);
        self.ran_on = Some(device);
        let of = &mut self.replicas[replica];
        (of.claimed, of.next) = (Some((device, task)), self.program.after_in_group(&task));
        if task.kind == ShardTaskKind::Backward {
            self.backwards[task.shard].0 += 1;
            if self.backwards[task.shard].0 == self.program.microbatch_passes(&task) {
                self.final_s[task.shard] = f64::INFINITY;
            }
        }
        Some(task)
    }

    /// Starts the claimed shard task of a replica.
    pub(crate) fn start(&mut self, replica: usize) {
        let of = &mut self.replicas[replica];
        of.runs_on = of.claimed.take();
    }

    /// Ends a shard task of a replica at this time.
    pub(crate) fn end(&mut self, replica: usize, task: &ShardTask, now_s: f64) {
        self.replicas[replica].runs_on = None;
        let is_last = self.program.following(task).is_none() && !self.is_under_way();
        self.expected_s = if is_last { now_s + self.waited_s } else { f64::INFINITY };
    }

    /// Records that the gradients of `backwards` more backwards of a shard are on the host; returns whether
    /// all of its minibatch are.
    pub(crate) fn gave(&mut self, task: &ShardTask, backwards: u64) -> bool {
        let microbatch_passes = self.program.microbatch_passes(task);
        let (_, given) = &mut self.backwards[task.shard];
        *given += backwards;
        let all = backwards > 0 && *given == microbatch_passes;
        if all {
            self.backwards[task.shard] = (0, 0);
        }
        all
    }
}
