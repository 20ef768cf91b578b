//! The bytes that one sharded model moves over the link of a device.

use crate::train_task::TrainTask;
use hydra_core::{Chain, FloatType};
use hydra_partition::{LayerCost, PartitionPlan, Profile, Rules, ShardMemory, ShardPlan};
use std::ops::{Range, RangeInclusive};

/// The longest microbatch group of an evaluation, in batches. Parameters are then a sixteenth of the traffic without
/// groups, and checkpoints within the evaluation are no further apart.
pub(super) const MOST_BATCHES: usize = 16;

/// The bytes of boundary activations and of their gradients that a microbatch pass moves.
#[derive(Clone, Copy, Default)]
pub(crate) struct Boundaries {
    /// The inputs of all shards but the first.
    forward: u64,
    /// The gradients of these inputs, as far as earlier shards train.
    backward: u64,
    /// The inputs that backward passes read again; the last shard runs backward right after its forward.
    again: u64,
}

impl Boundaries {
    /// The boundaries of shards with these input bytes, 0 for the first.
    pub(crate) fn new(inputs: &[u64], first_trained: usize) -> Self {
        let sum = |from: usize, to: usize| {
            inputs.iter().take(to).skip(from).fold(0, |sum: u64, bytes| sum.saturating_add(*bytes))
        };
        let last = inputs.len().saturating_sub(1);
        let backward = sum(first_trained + 1, inputs.len());
        Self { forward: sum(0, inputs.len()), backward, again: sum(first_trained, last) }
    }

    /// Uploaded bytes. Between two shards of one microbatch everything stays on the device; that of a longer group is
    /// uploaded again.
    pub(crate) fn up(&self, microbatch_group: usize) -> u64 {
        self.again.saturating_add(if microbatch_group > 1 { self.down() } else { 0 })
    }

    /// Downloaded bytes.
    pub(crate) fn down(&self) -> u64 {
        self.forward.saturating_add(self.backward)
    }
}

/// Downloaded bytes of the gradients of a minibatch of `microbatches` microbatches, each of `gradients` bytes. In the
/// first microbatch group, `summed` of them are accumulated on the device and downloaded once.
pub(crate) fn gradient_bytes(
    microbatches: usize,
    microbatch_group: usize,
    gradients: u64,
    summed: u64,
) -> u64 {
    let saved = (microbatch_group.min(microbatches) as u64).saturating_sub(1).saturating_mul(summed);
    (microbatches as u64).saturating_mul(gradients).saturating_sub(saved)
}

/// The bytes that a model moves over the link of its device in both directions.
#[derive(Default)]
pub(super) struct Traffic {
    /// Passes over all shards per microbatch group: forward and backward, or one if there is one shard.
    pub passes: u64,
    /// Parameters promoted by one pass.
    pub promoted: u64,
    /// Boundary activations and gradients of one microbatch pass.
    pub boundaries: Boundaries,
    /// Gradients of the parameters of one microbatch.
    pub gradients: u64,
    /// The part of `gradients` that can be accumulated on the device, in the first microbatch group of a minibatch.
    pub summed: u64,
}

impl Traffic {
    /// The traffic of a model with these shards, if parameters are promoted for every pass.
    pub(super) fn of_shards(
        profile: &Profile,
        rules: &Rules,
        (shards, first_trained): (&[Range<usize>], usize),
        summable_bytes: impl Fn(&Range<usize>) -> u64,
    ) -> Self {
        let needs: Vec<ShardMemory> =
            shards.iter().map(|range| profile.shard_memory(range.clone())).collect();
        let sums = needs.iter().zip(shards).map(|(of, range)| (of.peak_bytes(), summable_bytes(range)));
        Self {
            passes: passes(shards.len()),
            promoted: needs.iter().map(|of| of.param_bytes).sum(),
            boundaries: boundaries(&profile.layers, shards.iter().map(|range| range.start), first_trained),
            gradients: needs.iter().map(|of| of.gradient_bytes).sum(),
            summed: sums
                .filter(|(need, bytes)| rules.holds_sums(*need, *bytes))
                .map(|(_, bytes)| bytes)
                .sum(),
        }
    }

    /// The traffic of a model with this plan, if devices cache the parameters that the budget leaves memory for,
    /// shared by `tasks` tasks.
    pub(super) fn of_plan(
        (plan, first_trained): (&PartitionPlan, usize),
        tasks: usize,
        accumulation_bytes: impl Fn(usize) -> u64,
    ) -> Self {
        let shards = &plan.shards;
        let parameters: u64 = shards.iter().map(|shard| shard.param_bytes).sum();
        let need =
            shards.iter().map(ShardPlan::most_bytes).max().unwrap_or(0).saturating_add(plan.rules.spare());
        let stays = plan.rules.budget.saturating_sub(need) / tasks.max(1) as u64;
        Self {
            passes: passes(shards.len()),
            promoted: parameters.saturating_sub(stays),
            boundaries: boundaries(&plan.layers, shards.iter().map(|shard| shard.first), first_trained),
            gradients: shards.iter().map(|shard| shard.gradient_bytes).sum(),
            summed: (0..shards.len()).map(accumulation_bytes).sum(),
        }
    }

    /// Bytes of a minibatch of `microbatches` microbatches.
    pub(super) fn minibatch(&self, microbatches: usize, microbatch_group: usize) -> u64 {
        let microbatch_groups = microbatches.div_ceil(microbatch_group) as u64;
        let promoted = (self.passes * microbatch_groups).saturating_mul(self.promoted);
        let boundaries = self.boundaries.up(microbatch_group).saturating_add(self.boundaries.down());
        promoted
            .saturating_add((microbatches as u64).saturating_mul(boundaries))
            .saturating_add(gradient_bytes(microbatches, microbatch_group, self.gradients, self.summed))
    }

    /// Bytes of [`MOST_BATCHES`] batches of an evaluation, rounded up to whole groups.
    pub(super) fn evaluation(&self, microbatch_group: usize) -> u64 {
        let each = MOST_BATCHES as u64 * if microbatch_group > 1 { 2 } else { 1 };
        (MOST_BATCHES.div_ceil(microbatch_group) as u64)
            .saturating_mul(self.promoted)
            .saturating_add(each.saturating_mul(self.boundaries.forward))
    }
}

fn boundaries(layers: &[LayerCost], firsts: impl Iterator<Item = usize>, first_trained: usize) -> Boundaries {
    let inputs = firsts.map(|first| if first == 0 { 0 } else { layers[first].input_bytes });
    Boundaries::new(&inputs.collect::<Vec<_>>(), first_trained)
}

/// The bytes of these layers' gradients that can be accumulated on a device.
pub(super) fn summable_bytes(chain: &Chain, layers: Range<usize>) -> u64 {
    let buffers = chain.buffers_of(layers).into_iter().map(|buffer| &chain.buffers()[buffer]);
    let single = buffers.filter(|buffer| buffer.adds_up());
    single.map(|buffer| buffer.parameters() * chain.float_type().bytes() as u64).sum()
}

/// The bytes of a shard's gradient accumulation buffer on a device: those of its `f32` gradients, if its plan leaves
/// memory for the sum and the next gradients, else 0.
pub(super) fn accumulation_bytes(task: &TrainTask, plan: &PartitionPlan, shard: usize) -> u64 {
    let shard = &plan.shards[shard];
    let bytes = summable_bytes(&task.chain, shard.range());
    let adds_up =
        task.chain.float_type() == FloatType::F32 && plan.rules.holds_sums(shard.most_bytes(), bytes);
    if adds_up { bytes } else { 0 }
}

/// The length of microbatch groups with the least bytes, and these bytes. Of equal lengths the smallest, which takes
/// the least host memory.
pub(super) fn cheapest(
    microbatch_groups: RangeInclusive<usize>,
    bytes: impl Fn(usize) -> u64,
) -> (usize, u64) {
    let all = microbatch_groups.map(|microbatch_group| (microbatch_group, bytes(microbatch_group)));
    all.min_by_key(|(microbatch_group, bytes)| (*bytes, *microbatch_group)).unwrap_or((1, 0))
}

fn passes(shards: usize) -> u64 {
    if shards > 1 { 2 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_come_down_once_for_the_microbatches_of_the_first_group() {
        let boundaries = Boundaries { forward: 10, backward: 10, again: 5 };
        let traffic = Traffic { passes: 2, promoted: 1000, boundaries, gradients: 100, summed: 80 };
        assert_eq!(traffic.minibatch(8, 1), 16 * 1000 + 8 * 25 + 8 * 100);
        assert_eq!(traffic.minibatch(8, 8), 2 * 1000 + 8 * 45 + 8 * 100 - 7 * 80);
        // The second microbatch group's three are downloaded one by one.
        assert_eq!(traffic.minibatch(8, 5), 4 * 1000 + 8 * 45 + 8 * 100 - 4 * 80);
        // A damaged plan file may have any numbers.
        let boundaries = Boundaries { forward: u64::MAX, ..Boundaries::default() };
        let damaged = Traffic { gradients: 0, boundaries, ..traffic };
        assert_eq!((damaged.minibatch(8, 1), damaged.minibatch(8, 8)), (u64::MAX, u64::MAX));
        assert_eq!(damaged.evaluation(2), u64::MAX);
    }

    #[test]
    fn boundaries_are_those_of_the_shards_that_train() {
        let moved = |first_trained, microbatch_group| {
            let boundaries = Boundaries::new(&[0, 1, 10, 100], first_trained);
            (boundaries.up(microbatch_group), boundaries.down())
        };
        assert_eq!([moved(0, 1), moved(0, 2)], [(11, 222), (233, 222)]);
        assert_eq!([moved(2, 1), moved(2, 2)], [(10, 211), (221, 211)]);
        assert_eq!(Boundaries::new(&[0], 0).down(), 0);
    }
}
