//! The sizes of a task that determine its memory.

use super::buffers::{initial_bytes, is_narrowed, read_bytes, stepped_bytes, stored_bytes, writes_whole};
use super::cut::CutTask;
use super::division::StoredBuffers;
use super::gradients::{GradientBytes, Window};
use super::placement::{Place, Placement};
use crate::train_task::TrainTask;
use hydra_core::{Encoding, ParamBufferLayout};
use hydra_partition::PartitionPlan;
use hydra_sched::program::MicrobatchGroup;

/// How much of a task is computed at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Concurrency {
    /// Length of its microbatch groups.
    pub microbatch_group: MicrobatchGroup,
    /// Microbatch groups in flight, each on its own device.
    pub replicas: usize,
    /// True if the gradients of enough microbatch groups fit that replicas hardly wait for a sum.
    pub flows: bool,
}

impl Concurrency {
    /// One microbatch pass after another.
    #[cfg(test)]
    pub(super) const ONE: Self = Self { microbatch_group: MicrobatchGroup::ONE, replicas: 1, flows: false };
}

/// The gradients of a task in host memory while it is within a minibatch, by the work that remains.
#[derive(Debug)]
pub(super) enum Remaining {
    /// Nothing is left to do.
    Nothing,
    /// Only evaluations.
    Evaluation,
    /// Gradients that the optimizer frees as they arrive.
    Training,
    /// Gradients of several microbatches; bytes including their sums.
    Accumulation(u64),
}

/// The sizes of a task that determine its memory.
#[derive(Debug)]
pub(super) struct TaskSizes {
    /// Its buffers in the store.
    pub buffers: StoredBuffers,
    /// Bytes of the batches of a minibatch, or of an evaluation.
    pub batches: u64,
    /// Bytes of the batches of rounds, and of what their data keeps.
    pub rounds: u64,
    /// Bytes of boundary activations at the cut-points, and of their gradients.
    pub boundaries: u64,
    pub gradients: GradientBytes,
    pub remaining: Remaining,
    /// Length of its microbatch groups.
    pub microbatch_group: MicrobatchGroup,
    /// Microbatch groups in flight.
    pub replicas: usize,
    /// The microbatches whose gradients may wait for those of earlier microbatches.
    pub window: Window,
}

impl TaskSizes {
    pub(super) fn of(
        cut: &CutTask<'_>,
        optimizer: &Placement,
        concurrency: Concurrency,
        devices: usize,
    ) -> Self {
        let CutTask { task, batch, plan, .. } = cut;
        let Concurrency { microbatch_group, replicas, flows } = concurrency;
        let microbatches = if task.evaluate_only { 1 } else { task.spec.accumulate.max(1) };
        let training_replicas = replicas.min(microbatches.div_ceil(microbatch_group.microbatches));
        let batch_bytes = batch.inputs.len_bytes() + batch.targets.len_bytes();
        let is_resident = |buffer| optimizer.is_resident(buffer);
        let gradients = GradientBytes::of(&task.chain, &task.spec, &plan.shards(), is_resident);
        let window =
            Window::of_replicas(microbatches, microbatch_group.microbatches, training_replicas, flows);
        let in_window = gradients.in_window(window);
        Self {
            buffers: stored_buffers(cut, optimizer, replicas),
            batches: batch_bytes.saturating_mul(microbatches.max(microbatch_group.batches * replicas) as u64),
            rounds: task.rounds.as_ref().map_or(0, |of| of.host_bytes(microbatch_group.batches * replicas)),
            boundaries: boundary_bytes(task, plan, concurrency, training_replicas),
            remaining: match (task.is_finished(), task.evaluate_only, task.spec.accumulate) {
                (true, ..) => Remaining::Nothing,
                (_, true, _) => Remaining::Evaluation,
                (.., 0 | 1) => Remaining::Training,
                _ => Remaining::Accumulation(summed_bytes(task, plan, microbatch_group, devices) + in_window),
            },
            gradients,
            window,
            microbatch_group,
            replicas,
        }
    }

    /// Returns true if nothing is left to do.
    pub(super) fn is_finished(&self) -> bool {
        matches!(self.remaining, Remaining::Nothing)
    }

    /// Host bytes within a minibatch, with memory for the gradients of `shards` shards.
    pub(super) fn active(&self, shards: usize) -> u64 {
        let gradients = match self.remaining {
            Remaining::Nothing => return 0,
            Remaining::Evaluation => 0,
            Remaining::Training => self.gradients.budget_bytes(shards),
            Remaining::Accumulation(bytes) => bytes,
        };
        let parts = [self.boundaries, self.batches, self.rounds];
        parts.into_iter().fold(gradients, u64::saturating_add)
    }

    /// The part of them for gradients that the optimizer may step with as they arrive.
    pub(super) fn pending_gradients(&self, shards: usize) -> u64 {
        self.gradients.budget_bytes(shards)
    }
}

fn stored_buffers(cut: &CutTask<'_>, optimizer: &Placement, replicas: usize) -> StoredBuffers {
    let CutTask { task, plan, shared, in_place, .. } = cut;
    let buffers = || task.chain.buffers().iter().enumerate();
    let is_in_place = |buffer: usize| in_place.get(buffer).is_some_and(|in_place| *in_place);
    let of = |bytes: &dyn Fn(usize, &ParamBufferLayout) -> u64| -> Vec<u64> {
        buffers().map(|(index, buffer)| if is_in_place(index) { 0 } else { bytes(index, buffer) }).collect()
    };
    StoredBuffers {
        masters: of(&|_, buffer| if task.is_finished() { 0 } else { stored_bytes(buffer, &task.spec) }),
        promoted: of(&|_, buffer| buffer.bytes()),
        first: of(&|index, _| initial_bytes(&task.chain, index)),
        stepped: of(&|_, buffer| stepped_bytes(buffer, &task.spec)),
        written: buffers().map(|(_, buffer)| read_bytes(buffer, writes_whole(task))).collect(),
        narrowed: buffers()
            .map(|(index, _)| !is_in_place(index) && is_narrowed(&task.chain, index))
            .collect(),
        narrow: buffers()
            .map(|(index, buffer)| is_in_place(index) || buffer.encoding != Encoding::Masters)
            .collect(),
        in_place: of_in_place(cut),
        shards: plan.shards().into_iter().map(|range| task.chain.buffers_of(range)).collect(),
        shared: shared.clone(),
        replicas,
        may_leave: optimizer.on == Place::Host && !task.is_finished(),
    }
}

/// The bytes of each buffer that is read in place, and zero for the others.
fn of_in_place(cut: &CutTask<'_>) -> Vec<u64> {
    let buffers = cut.task.chain.buffers().iter().zip(&cut.in_place);
    buffers.map(|(buffer, in_place)| if *in_place { buffer.bytes() } else { 0 }).collect()
}

/// The bytes of boundary activations at the cut-points, for all microbatch passes of the groups in flight. Each group
/// has one more boundary for the shard task that computes and, in training, one boundary gradient for each microbatch
/// pass.
fn boundary_bytes(
    task: &TrainTask,
    plan: &PartitionPlan,
    concurrency: Concurrency,
    training_replicas: usize,
) -> u64 {
    let Concurrency { microbatch_group, replicas, .. } = concurrency;
    let inputs = plan.shards.iter().skip(1).map(|shard| plan.layers[shard.first].input_bytes);
    let (all, largest) = (inputs.clone().sum::<u64>(), inputs.max().unwrap_or(0));
    let of = |microbatch_passes: usize, gradients: usize| {
        (microbatch_passes as u64)
            .saturating_mul(all)
            .saturating_add((1 + gradients as u64).saturating_mul(largest))
    };
    let evaluation = of(microbatch_group.batches, 0).saturating_mul(replicas as u64);
    let training = || {
        of(microbatch_group.microbatches, microbatch_group.microbatches)
            .saturating_mul(training_replicas as u64)
    };
    if task.evaluate_only { evaluation } else { evaluation.max(training()) }
}

/// The bytes of microbatch gradients, which are accumulated in `f32`. Uses of a tied buffer in a microbatch group
/// wait for the last use. While the sum is kept, the gradients of one more shard arrive: with several devices, those
/// of each microbatch of a group, if another device was faster than that of the first microbatch.
fn summed_bytes(
    task: &TrainTask,
    plan: &PartitionPlan,
    microbatch_group: MicrobatchGroup,
    devices: usize,
) -> u64 {
    let summed = |buffer: &ParamBufferLayout| {
        let uses = buffer.bytes() * buffer.layers.len() as u64;
        uses.max(buffer.moment_bytes()) + microbatch_group.microbatches as u64 * (uses - buffer.bytes())
    };
    let sums: u64 = task.chain.buffers().iter().filter(|buffer| buffer.trained).map(summed).sum();
    let largest = plan.shards.iter().map(|shard| shard.gradient_bytes).max().unwrap_or(0);
    sums + largest * if devices > 1 { microbatch_group.microbatches as u64 } else { 1 }
}
