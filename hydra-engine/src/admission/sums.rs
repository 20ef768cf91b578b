//! Gradient accumulation on devices. Shards that fill a device leave no memory for accumulation buffers, and the
//! gradients of each microbatch are downloaded separately. With shorter shards, the gradients of a microbatch group
//! are accumulated on the device and downloaded as one sum; the price is boundary traffic between more shards.

use super::microbatch_group::GroupDevices;
use super::traffic::{Traffic, cheapest, summable_bytes};
use crate::train_task::TrainTask;
use hydra_core::FloatType;
use hydra_partition::{Demand, Profile, Rules, choose_reserve, cut};
use hydra_sched::program::MicrobatchGroup;
use std::ops::Range;

/// The costs with which one of `tasks` tasks is cut so that accumulation buffers fit devices of `budget` bytes, if
/// that moves fewer bytes per minibatch at the best length of microbatch groups.
pub(super) fn costs_with_sums(
    (task, tasks): (&TrainTask, usize),
    profile: &Profile,
    devices: &GroupDevices,
    budget: u64,
) -> Option<Profile> {
    let microbatches = task.program(&[], 0, MicrobatchGroup::ONE).microbatches.each;
    let most =
        task.execution.microbatch_group.unwrap_or(devices.most_microbatches(task, microbatches, tasks));
    let adds_up = most > 1 && !task.evaluate_only && task.chain.float_type() == FloatType::F32;
    if !adds_up || task.execution.cuts.is_some() || !devices.cache {
        return None;
    }
    let least = task.execution.microbatch_group.unwrap_or(1);
    let with_sums = profile.with_sums(|layer| summable_bytes(&task.chain, layer..layer + 1));
    let moved = |cut_by: &Profile| {
        let reserve = choose_reserve(&[Demand::from(cut_by)], budget).ok()?;
        let rules = Rules::new(budget, reserve, profile.measured);
        let shards = cut(cut_by, &rules).ok()?;
        let summable = |layers: &Range<usize>| summable_bytes(&task.chain, layers.clone());
        let first_trained =
            task.program(&shards, task.chain.first_trained(), MicrobatchGroup::ONE).first_trained;
        let traffic = Traffic::of_shards(profile, &rules, (&shards, first_trained), summable);
        Some(cheapest(least..=most, |microbatch_group| traffic.minibatch(microbatches, microbatch_group)))
    };
    let ((microbatch_group, sums), (_, plain)) = (moved(&with_sums)?, moved(profile)?);
    (microbatch_group > 1 && sums < plain).then_some(with_sums)
}
