//! Device costs known before anything runs, for recorded and predicted runs.

use crate::admission::{Admission, AdmittedTask, bytes_once};
use crate::device::LogicalDevice;
use hydra_partition::PartitionPlan;
use hydra_sched::{DeviceCost, WorkingBytes};

/// The costs of a device. If parameters are copied to it, all of its budget for tasks counts as cache; a simulated
/// link has its bandwidth.
pub(super) fn device_cost(device: &LogicalDevice) -> DeviceCost {
    let (caches, moves) = (device.manager.caches_copies(), !device.manager.link().zero_copy());
    DeviceCost {
        link_bytes_per_s: device.spec.link.map(|link| link.0),
        keeps_copies: caches,
        memory_bytes: moves.then(|| device.for_tasks()),
        threads: device.spec.threads_here(),
        ..DeviceCost::default()
    }
}

/// Splits the memory of devices into the largest working memory of a shard task and the rest, which is the parameter
/// cache.
pub(super) fn split_off_cache<'a>(devices: impl Iterator<Item = &'a mut DeviceCost>, admission: &Admission) {
    let shards =
        admission.tasks.iter().flat_map(|task| (0..task.plan.shards.len()).map(move |of| (task, of)));
    let working =
        shards.map(|(task, shard)| working_bytes(task, &task.plan, shard).most()).max().unwrap_or(0);
    let resident = admission.resident_bytes();
    for device in devices {
        let Some(memory) = &mut device.memory_bytes else { continue };
        *memory = memory.saturating_sub(working + resident);
        device.working_bytes = Some(working);
    }
}

/// The device bytes that a shard's tasks take in addition to parameters by this plan; they are measured where the
/// plan was verified.
pub(super) fn working_bytes(task: &AdmittedTask, plan: &PartitionPlan, shard: usize) -> WorkingBytes {
    let (of, sums) = (&plan.shards[shard], task.memory.accumulation_bytes[shard]);
    let [forward, backward] = plan.without_standing(shard).map(|need| need.saturating_sub(of.param_bytes));
    WorkingBytes {
        forward,
        backward,
        input: if of.first == 0 { 0 } else { plan.layers[of.first].input_bytes },
        gradients: of.gradient_bytes.max(sums),
        accumulation: sums,
    }
}

/// The host memory of a run for unshared masters and models within a minibatch. `None` if tasks are queued, which the
/// simulator does not model.
pub(super) fn host_bytes(admission: &Admission) -> Option<u64> {
    let shared = bytes_once(admission.tasks.iter().flat_map(|task| task.storage.shared_in_memory()));
    let others = admission.host_ahead_bytes + admission.host_working_bytes + shared;
    admission.max_concurrent.is_none().then(|| admission.host_admitted_bytes.saturating_sub(others))
}
