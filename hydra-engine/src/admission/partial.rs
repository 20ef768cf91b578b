//! Chooses the buffers whose masters are resident on a device that does not fit all of them (partial offload).
//!
//! Device memory that no shard task needs holds the masters of some buffers. These are not promoted, their gradients
//! are not downloaded, and the device steps them. The buffers that the chain reads first are chosen: their gradients
//! are complete last and they are needed first, so the host steps the others during the end of the backward pass and
//! the beginning of the next forward pass. ZeRO-Offload's Twin-Flow divides the parameters in the same way, by a ratio
//! that the user sets.

use super::buffers::{master_bytes, waiting};
use super::cut::{CutTask, Limits};
use super::shared::shared_buffers;
use super::traffic::accumulation_bytes;
use crate::train_task::TrainTask;
use hydra_core::ParamBufferLayout;
use hydra_spill::ParamBufferId;
use std::collections::{BTreeMap, BTreeSet};

/// The device memory that spilled tasks leave unused: not the largest shard task, the double buffer, the margin, and the
/// gradients of one more shard, which are downloaded meanwhile.
pub(super) fn free_bytes<'a, 'b: 'a>(
    tasks: impl Iterator<Item = &'a CutTask<'b>> + Clone,
    limits: &Limits,
) -> u64 {
    let shards = || tasks.clone().flat_map(|cut| (0..cut.plan.shards.len()).map(move |shard| (cut, shard)));
    let sums = |cut: &CutTask<'_>, shard| match cut.task.spec.accumulate {
        0 | 1 => 0,
        _ => 2 * accumulation_bytes(cut.task, &cut.plan, shard),
    };
    let computing = shards().map(|(cut, shard)| cut.plan.shards[shard].most_bytes() + sums(cut, shard)).max();
    let gradients = shards().map(|(cut, shard)| cut.plan.shards[shard].gradient_bytes).max();
    let margin = tasks.clone().map(|cut| cut.plan.rules.margin).max();
    [computing, gradients, margin]
        .into_iter()
        .flatten()
        .fold(limits.budget.saturating_sub(limits.reserve), u64::saturating_sub)
}

/// For each task, the buffers that are resident in `free` bytes. Tasks take turns, from the first buffer of their chain
/// on. A task that has an `obstacle`, or that accumulates gradients, has only frozen buffers on the device; one that
/// trains nothing has none.
pub(super) fn resident_buffers(
    tasks: &[CutTask<'_>],
    free: u64,
    obstacle: impl Fn(&TrainTask) -> Option<String>,
) -> Vec<BTreeSet<usize>> {
    let none = |_| false;
    let shared = shared_buffers(tasks.iter().map(|cut| (cut.task, none)));
    let may_be: Vec<Vec<bool>> =
        tasks.iter().map(|cut| may_be_resident(cut, obstacle(cut.task).is_none())).collect();
    let mut users: BTreeMap<ParamBufferId, Vec<(usize, usize)>> = BTreeMap::new();
    for (task, shared) in shared.iter().enumerate() {
        for (buffer, id) in shared.iter().enumerate().filter_map(|(buffer, id)| Some((buffer, (*id)?))) {
            users.entry(id).or_default().push((task, buffer));
        }
    }
    let mut resident: Vec<BTreeSet<usize>> = tasks.iter().map(|_| BTreeSet::new()).collect();
    let mut pending = vec![0; tasks.len()];
    let mut masters = 0;
    for (task, buffer) in in_turn(tasks) {
        let (spec, chain) = (&tasks[task].task.spec, &tasks[task].task.chain);
        let own = [(task, buffer)];
        let all = shared[task][buffer].map_or(&own[..], |id| &users[&id]);
        if resident[task].contains(&buffer) || !all.iter().all(|(task, buffer)| may_be[*task][*buffer]) {
            continue;
        }
        let bytes = master_bytes(&chain.buffers()[buffer], spec);
        let waits = waiting(chain, spec, |other| other == buffer || resident[task].contains(&other));
        let others = pending.iter().sum::<u64>() - pending[task];
        if masters + bytes + others + waits > free {
            continue;
        }
        (masters, pending[task]) = (masters + bytes, waits);
        all.iter().for_each(|(task, buffer)| {
            resident[*task].insert(*buffer);
        });
    }
    resident
}

/// The buffers of all tasks: the one that each chain reads first, then the next one of each.
fn in_turn(tasks: &[CutTask<'_>]) -> Vec<(usize, usize)> {
    let mut all: Vec<(usize, usize, usize)> = Vec::new();
    for (task, cut) in tasks.iter().enumerate() {
        let layers = cut.task.chain.buffers().iter().map(|buffer| buffer.layers.first().copied());
        let mut order: Vec<(Option<usize>, usize)> = layers.zip(0..).collect();
        order.sort_unstable();
        all.extend(order.into_iter().enumerate().map(|(turn, (_, buffer))| (turn, task, buffer)));
    }
    all.sort_unstable();
    all.into_iter().map(|(_, task, buffer)| (task, buffer)).collect()
}

/// For each buffer of a task, whether it may be resident; trained ones only if the device `steps` them.
fn may_be_resident(cut: &CutTask<'_>, steps: bool) -> Vec<bool> {
    let task = cut.task;
    let runs = !task.evaluate_only && !task.is_finished();
    let steps = steps && task.spec.accumulate <= 1;
    let may_be = |buffer: &ParamBufferLayout| runs && !buffer.is_state() && (steps || !buffer.trained);
    task.chain.buffers().iter().map(may_be).collect()
}
