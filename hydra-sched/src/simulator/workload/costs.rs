//! Sums over the costs of a workload.

use crate::policy::random::{keyed, unit};
use crate::policy::{CostModel, ShardTaskKind};
use crate::program::{Cursor, EvaluationPoints, MicrobatchGroup, Microbatches, Program, ShardTask};
use crate::simulator::{
    DeviceCost, Epoch, ShardCost, TaskCost, Variation, WorkingBytes, Workload, WorkloadError,
};

impl Workload {
    /// Returns a workload with defaults for everything else.
    pub fn new(tasks: Vec<TaskCost>, devices: Vec<DeviceCost>) -> Self {
        Self {
            tasks,
            devices,
            shared_link: false,
            host_bytes: None,
            processors: None,
            optimizer_threads: 0,
            variation: None,
        }
    }

    /// The number of shard tasks of the workload.
    pub fn shard_tasks(&self) -> u64 {
        self.tasks.iter().map(TaskCost::shard_tasks).fold(0, u64::saturating_add)
    }

    /// Actual seconds of compute of all shard tasks on a device of speed 1.
    pub fn total_s(&self) -> f64 {
        (0..self.tasks.len()).map(|task| self.task_s(task)).sum()
    }

    /// Actual seconds of compute of one task on a device of speed 1.
    ///
    /// # Panics
    /// If the workload has no such task.
    pub fn task_s(&self, task: usize) -> f64 {
        let cost = &self.tasks[task];
        if self.variation.is_none() && cost.drift == 0.0 {
            return cost.pass_s() * cost.training_passes() as f64
                + cost.evaluation_s() * cost.evaluation_passes() as f64;
        }
        let evaluation = |after| {
            let shards = 0..cost.shards.len();
            shards.map(|shard| self.seconds(task, after, ShardTaskKind::Evaluate, shard)).sum::<f64>()
        };
        let evaluations: f64 =
            cost.evaluations.iter().map(|of| of.microbatch_passes as f64 * evaluation(of.after)).sum();
        let microbatch_pass =
            |m| cost.microbatch_pass().map(|(kind, shard)| self.seconds(task, m, kind, shard)).sum::<f64>();
        let minibatch = |m| cost.microbatches().of(m as usize) as f64 * microbatch_pass(m);
        evaluations + (0..cost.minibatches).map(minibatch).sum::<f64>()
    }

    /// Actual seconds of a shard task on a device of speed 1: its stated cost with drift and variation.
    ///
    /// # Panics
    /// If the workload has no such task or the task no such shard.
    pub fn seconds(&self, task: usize, minibatch: u64, kind: ShardTaskKind, shard: usize) -> f64 {
        let cost = &self.tasks[task];
        let stated = cost.shards[shard].seconds(kind);
        let drifted = if cost.drift == 0.0 { stated } else { stated * cost.drift_at(minibatch) };
        let Some(Variation { seed, relative }) = self.variation else { return drifted };
        let draw = keyed(seed, &[task as u64, minibatch, shard as u64, kind as u64]);
        drifted * (1.0 + relative * (2.0 * unit(draw) - 1.0))
    }

    /// Actual seconds of a shard task of a task.
    pub(crate) fn shard_task_s(&self, task: usize, of: &ShardTask) -> f64 {
        self.seconds(task, of.step as u64, of.kind, of.shard)
    }

    /// Seconds of a promotion of a shard to a device.
    ///
    /// # Panics
    /// If the workload has no such device or task, or the task no such shard.
    pub fn promote_s(&self, device: usize, task: usize, shard: usize) -> f64 {
        let cost = &self.tasks[task].shards[shard];
        match (cost.promote_s, cost.bytes, self.devices[device].link_bytes_per_s) {
            (Some(seconds), ..) => seconds,
            (None, Some(bytes), Some(link)) => bytes as f64 / link,
            _ => 0.0,
        }
    }

    /// Seconds of a promotion of this many bytes of a shard's parameters to a device that already has the
    /// rest: minus the link's time for the rest, or in proportion to the bytes if the link's bandwidth is not
    /// stated.
    pub(crate) fn promote_part_s(&self, device: usize, task: usize, shard: usize, bytes: u64) -> f64 {
        let (all_s, cost) = (self.promote_s(device, task, shard), &self.tasks[task].shards[shard]);
        let Some(all) = cost.bytes.filter(|all| *all > bytes && cost.is_in_parts()) else {
            return all_s;
        };
        match self.devices[device].link_bytes_per_s {
            Some(link) => (all_s - (all - bytes) as f64 / link).max(0.0),
            None => all_s * (bytes as f64 / all as f64),
        }
    }

    /// An upper bound on the makespan of any schedule, in seconds; infinite on overflow.
    pub(crate) fn at_most_s(&self) -> f64 {
        let slowest = self.devices.iter().map(|device| device.speed).fold(f64::INFINITY, f64::min);
        let links = self.devices.iter().filter_map(|device| device.link_bytes_per_s);
        let link = links.fold(f64::INFINITY, f64::min);
        let promote_s =
            |s: &ShardCost| s.promote_s.unwrap_or(s.bytes.map_or(0.0, |bytes| bytes as f64 / link));
        let latency_s = self.devices.iter().map(|device| device.latency_s).fold(0.0, f64::max);
        let of = |task: &TaskCost| {
            let microbatch_passes = 2.0 * (task.training_passes() as f64 + task.evaluation_passes() as f64);
            let compute_s = (task.pass_s() + task.evaluation_s()) * (1.0 + task.drift.max(0.0)) / slowest;
            let moved_s = |s: &ShardCost| latency_s + promote_s(s) + s.download_s + s.gradients_s;
            let promotions_s: f64 = task.shards.iter().map(moved_s).sum();
            let steps_s = task.optimizer_s + task.shards.len() as f64 * task.step_wait_s;
            task.arrival_s + microbatch_passes * (compute_s + promotions_s + steps_s)
        };
        self.tasks.iter().map(of).sum()
    }
}

impl TaskCost {
    /// Returns a task with this name and these shards, and defaults for everything else.
    pub fn new(name: impl Into<String>, minibatches: u64, shards: Vec<ShardCost>) -> Self {
        let name = name.into();
        Self {
            name,
            minibatches,
            shards,
            microbatches: 1,
            epoch: None,
            microbatch_group: 1,
            evaluation_group: 1,
            replicas: 1,
            first_trained: 0,
            arrival_s: 0.0,
            optimizer_s: 0.0,
            step_wait_s: 0.0,
            estimate_factor: 1.0,
            drift: 0.0,
            masters_bytes: 0,
            active_bytes: 0,
            evaluations: Vec::new(),
        }
    }

    /// The number of its shard tasks.
    pub fn shard_tasks(&self) -> u64 {
        let shards = self.shards.len() as u64;
        let microbatch_pass = (2 * shards).saturating_sub(1 + self.first_trained as u64);
        let training = self.training_passes().saturating_mul(microbatch_pass);
        training.saturating_add(self.evaluation_passes().saturating_mul(shards))
    }

    /// The number of its training microbatch passes: the microbatches of all minibatches.
    pub fn training_passes(&self) -> u64 {
        self.microbatches().before(self.minibatches as usize)
    }

    /// The microbatches of each minibatch.
    pub(crate) fn microbatches(&self) -> Microbatches {
        let of = self.epoch.unwrap_or(Epoch { minibatches: 1, last_microbatches: self.microbatches });
        let [each, last, epoch] = [self.microbatches, of.last_microbatches, of.minibatches.max(1)];
        Microbatches { each: each as usize, last: last as usize, epoch: epoch as usize }
    }

    /// Its passes over the data: all evaluations are between minibatches, or before or after all of them.
    pub(crate) fn program(&self) -> Program {
        let evaluations =
            self.evaluations.iter().map(|of| (of.after as usize, of.microbatch_passes as usize));
        // No evaluation has more batches than this.
        let most = evaluations.clone().map(|(_, batches)| batches).fold(1, usize::max);
        Program {
            shards: self.shards.len(),
            first_trained: self.first_trained,
            steps: self.minibatches as usize,
            microbatches: self.microbatches(),
            reads_statistic: false,
            microbatch_group: MicrobatchGroup {
                microbatches: self.microbatch_group.min(self.microbatches) as usize,
                batches: (self.evaluation_group as usize).min(most),
            },
            validation: 0,
            test: 0,
            rounds: None,
            initial_validation: false,
            replicas: self.replicas,
            shared: false,
            evaluations: EvaluationPoints::new(evaluations),
        }
    }

    /// Its shard tasks in order if microbatch groups run in sequence, from those on that read the master weights
    /// after this many minibatches.
    pub(crate) fn tasks_from(&self, minibatch: u64) -> impl Iterator<Item = ShardTask> {
        Cursor::after(self.program(), minibatch as usize, 1).tasks()
    }

    /// The number of its evaluation microbatch passes.
    pub fn evaluation_passes(&self) -> u64 {
        self.evaluations.iter().map(|of| of.microbatch_passes).fold(0, u64::saturating_add)
    }

    /// Stated seconds of compute of an evaluation microbatch pass.
    pub fn evaluation_s(&self) -> f64 {
        self.shards.iter().map(|shard| shard.seconds(ShardTaskKind::Evaluate)).sum()
    }

    /// The shard tasks of a training microbatch pass, in order; none without shards.
    pub fn microbatch_pass(&self) -> impl Iterator<Item = (ShardTaskKind, usize)> + use<> {
        let (shards, down_to) = (self.shards.len(), self.first_trained);
        let start = (shards > 0).then(|| ShardTaskKind::training_start(shards));
        let microbatch_pass =
            std::iter::successors(start, move |&(kind, shard)| kind.following(shard, shards));
        microbatch_pass.take_while(move |(kind, shard)| *kind != ShardTaskKind::Backward || *shard >= down_to)
    }

    /// Stated seconds of compute of a training microbatch pass.
    pub fn pass_s(&self) -> f64 {
        self.microbatch_pass().map(|(kind, shard)| self.shards[shard].seconds(kind)).sum()
    }

    /// Seconds of the host optimizer for one trained shard of one minibatch.
    pub(crate) fn step_s(&self) -> f64 {
        self.optimizer_s / (self.shards.len() - self.first_trained) as f64
    }

    /// Seconds from the end of a shard's backward until its master weights are final, without waiting for
    /// other tasks.
    pub(crate) fn least_step_s(&self) -> f64 {
        self.step_s() + self.step_wait_s
    }

    /// The policy's initial estimates.
    pub(crate) fn estimates(&self) -> Result<CostModel, WorkloadError> {
        let of =
            |kind| self.shards.iter().map(|s| s.seconds(kind) * self.estimate_factor).collect::<Vec<f64>>();
        let (forward, mut backward) = (of(ShardTaskKind::Forward), of(ShardTaskKind::Backward));
        // No backward runs there.
        backward.iter_mut().take(self.first_trained).for_each(|seconds| *seconds = 0.0);
        CostModel::new(forward, backward, of(ShardTaskKind::Evaluate))
            .map_err(|source| WorkloadError::Costs { task: self.name.clone(), source })
    }

    /// The drift factor after this many minibatches. Evaluations after the last one cost what it did, and
    /// a single minibatch has no drift.
    fn drift_at(&self, minibatch: u64) -> f64 {
        let last = self.minibatches.saturating_sub(1);
        let share = if last == 0 { 0.0 } else { minibatch.min(last) as f64 / last as f64 };
        1.0 + self.drift * share
    }
}

impl WorkingBytes {
    /// The maximum working bytes of a shard task, including accumulated gradients and those that are added to
    /// them.
    pub fn most(&self) -> u64 {
        self.forward.max(self.backward.saturating_add(self.accumulation.saturating_mul(2)))
    }
}

impl ShardCost {
    /// Returns a shard with these seconds, whose parameters take `promote_s` to promote.
    pub fn new(forward_s: f64, backward_s: f64, promote_s: f64) -> Self {
        Self { forward_s, backward_s, promote_s: Some(promote_s), ..Self::default() }
    }

    /// Returns whether parts of it are cached separately.
    pub fn is_in_parts(&self) -> bool {
        !self.frozen.is_empty() || !self.buffers.is_empty()
    }

    /// Bytes of its trained parameters; 0 if the size of the shard is not stated.
    pub fn own_bytes(&self) -> u64 {
        let frozen = self.frozen.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
        self.bytes.unwrap_or(0).saturating_sub(frozen)
    }

    /// Stated seconds of a shard task.
    pub fn seconds(&self, kind: ShardTaskKind) -> f64 {
        match kind {
            ShardTaskKind::Forward => self.forward_s,
            ShardTaskKind::Evaluate => self.evaluate_s.unwrap_or(self.forward_s),
            ShardTaskKind::Backward => self.backward_s,
        }
    }
}
