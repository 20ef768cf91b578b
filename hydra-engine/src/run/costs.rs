//! Costs of devices that are known before anything runs, for recorded and for predicted runs alike.

use crate::admission::{Admission, AdmittedTask, SharedBuffer};
use crate::device::LogicalDevice;
use hydra_partition::PartitionPlan;
use hydra_sched::{DeviceCost, WorkingBytes};
use std::collections::BTreeSet;

/// The costs of a device, with all that tasks may have of its budget as room for copies where parameters are moved to it; its
/// link's bandwidth where that is simulated.
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

/// Divides the memory of devices into what shard tasks need at most beside their parameters, and the rest.
pub(super) fn leave_room_for_copies<'a>(
    devices: impl Iterator<Item = &'a mut DeviceCost>,
    admission: &Admission,
) {
    let shards =
        admission.tasks.iter().flat_map(|task| (0..task.plan.shards.len()).map(move |of| (task, of)));
    let working =
        shards.map(|(task, shard)| working_bytes(task, &task.plan, shard).most()).max().unwrap_or(0);
    for device in devices {
        let Some(memory) = &mut device.memory_bytes else { continue };
        *memory = memory.saturating_sub(working);
        device.working_bytes = Some(working);
    }
}

/// The bytes of a device that a shard's tasks take beside its parameters, as this plan has them: as they were measured where they
/// were.
pub(super) fn working_bytes(task: &AdmittedTask, plan: &PartitionPlan, shard: usize) -> WorkingBytes {
    let (of, sums) = (&plan.shards[shard], task.accumulation_bytes[shard]);
    let [forward, backward] = plan.beside_standing(shard).map(|need| need.saturating_sub(of.param_bytes));
    WorkingBytes {
        forward,
        backward,
        input: if of.first == 0 { 0 } else { plan.layers[of.first].input_bytes },
        gradients: of.gradient_bytes.max(sums),
        sums,
    }
}

/// The host memory of a run for masters that tasks do not share and for models within a minibatch; `None` where tasks begin in
/// turn, which the simulator does not.
pub(super) fn host_bytes(admission: &Admission) -> Option<u64> {
    let shared = admission.tasks.iter().flat_map(|task| task.shared());
    let shared: BTreeSet<SharedBuffer> =
        shared.filter(|(.., on_disk)| !on_disk).map(|(_, shared, _)| shared).collect();
    let shared: u64 = shared.into_iter().map(|shared| shared.bytes).sum();
    let others = admission.host_ahead_bytes + admission.host_working_bytes + shared;
    admission.queued.is_none().then(|| admission.host_admitted_bytes.saturating_sub(others))
}
