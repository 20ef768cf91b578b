//! The bytes that one sharded model moves over the link of a device.

use crate::train_task::TrainTask;
use hydra_core::{Chain, FloatType};
use hydra_partition::{PartitionPlan, Profile, Rules, ShardMemory, ShardPlan};
use std::ops::{Range, RangeInclusive};

/// The longest microbatch group of an evaluation, in batches. Parameters are then a sixteenth of the traffic without
/// groups, and checkpoints within the evaluation are no further apart.
pub(super) const MOST_BATCHES: usize = 16;

/// The bytes that a model moves over the link of its device in both directions.
#[derive(Default)]
pub(super) struct Traffic {
    /// Passes over all shards per microbatch group: forward and backward, or one if there is one shard.
    pub passes: u64,
    /// Parameters promoted by one pass.
    pub promoted: u64,
    /// Boundary activations of one microbatch pass.
    pub boundaries: u64,
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
        shards: &[Range<usize>],
        summable_bytes: impl Fn(&Range<usize>) -> u64,
    ) -> Self {
        let needs: Vec<ShardMemory> =
            shards.iter().map(|range| profile.shard_memory(range.clone())).collect();
        let sums = needs.iter().zip(shards).map(|(of, range)| (of.peak_bytes(), summable_bytes(range)));
        Self {
            passes: passes(shards.len()),
            promoted: needs.iter().map(|of| of.param_bytes).sum(),
            boundaries: shards.iter().skip(1).map(|range| profile.layers[range.start].input_bytes).sum(),
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
        plan: &PartitionPlan,
        tasks: usize,
        accumulation_bytes: impl Fn(usize) -> u64,
    ) -> Self {
        let shards = &plan.shards;
        let parameters: u64 = shards.iter().map(|shard| shard.param_bytes).sum();
        let need =
            shards.iter().map(ShardPlan::most_bytes).max().unwrap_or(0).saturating_add(plan.rules.spare());
        let stays = plan.rules.budget.saturating_sub(need) / tasks.max(1) as u64;
        let inputs = shards.iter().skip(1).map(|shard| plan.layers[shard.first].input_bytes);
        Self {
            passes: passes(shards.len()),
            promoted: parameters.saturating_sub(stays),
            boundaries: inputs.sum(),
            gradients: shards.iter().map(|shard| shard.gradient_bytes).sum(),
            summed: (0..shards.len()).map(accumulation_bytes).sum(),
        }
    }

    /// Bytes of a minibatch of `microbatches` microbatches.
    pub(super) fn minibatch(&self, microbatches: usize, microbatch_group: usize) -> u64 {
        let (all, microbatch_groups) = (microbatches as u64, microbatches.div_ceil(microbatch_group) as u64);
        // An activation and its gradient, each down and up.
        let boundaries = if microbatch_group > 1 { (4 * all).saturating_mul(self.boundaries) } else { 0 };
        let saved = (microbatch_group as u64 - 1).min(all).saturating_mul(self.summed);
        let gradients = all.saturating_mul(self.gradients).saturating_sub(saved);
        let promoted = (self.passes * microbatch_groups).saturating_mul(self.promoted);
        promoted.saturating_add(boundaries).saturating_add(gradients)
    }

    /// Bytes of [`MOST_BATCHES`] batches of an evaluation, rounded up to whole groups.
    pub(super) fn evaluation(&self, microbatch_group: usize) -> u64 {
        let again = 2 * MOST_BATCHES as u64;
        let boundaries = if microbatch_group > 1 { again.saturating_mul(self.boundaries) } else { 0 };
        (MOST_BATCHES.div_ceil(microbatch_group) as u64)
            .saturating_mul(self.promoted)
            .saturating_add(boundaries)
    }
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
        let traffic = Traffic { passes: 2, promoted: 1000, boundaries: 10, gradients: 100, summed: 80 };
        assert_eq!(traffic.minibatch(8, 1), 16 * 1000 + 8 * 100);
        assert_eq!(traffic.minibatch(8, 8), 2 * 1000 + 32 * 10 + 8 * 100 - 7 * 80);
        // The second microbatch group's three are downloaded one by one.
        assert_eq!(traffic.minibatch(8, 5), 4 * 1000 + 32 * 10 + 8 * 100 - 4 * 80);
        // A damaged plan file may have any numbers.
        let damaged = Traffic { gradients: 0, boundaries: u64::MAX, ..traffic };
        assert_eq!((damaged.minibatch(8, 1), damaged.minibatch(8, 8)), (16 * 1000, u64::MAX));
        assert_eq!(damaged.evaluation(2), u64::MAX);
    }
}
