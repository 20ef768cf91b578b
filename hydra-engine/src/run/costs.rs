//! Costs of devices that are known before anything runs, for recorded and for predicted runs alike.

use crate::admission::Admission;
use crate::device::LogicalDevice;
use hydra_partition::ShardPlan;
use hydra_sched::DeviceCost;

/// The costs of a device, with its whole budget as room for copies; its link's bandwidth where that is simulated.
pub(super) fn device_cost(device: &LogicalDevice) -> DeviceCost {
    let caches = device.manager.caches_copies();
    DeviceCost {
        link_bytes_per_s: device.spec.link.map(|link| link.0),
        keeps_copies: caches,
        memory_bytes: caches.then_some(device.spec.memory.bytes()),
        ..DeviceCost::default()
    }
}

/// The most bytes of a device that a shard task takes beside its parameters, as they were measured where they were.
pub(super) fn working_bytes(admission: &Admission) -> u64 {
    let shards = admission.tasks.iter().flat_map(|task| &task.plan.shards);
    let beside = |of: &ShardPlan| of.verified_bytes.unwrap_or(of.need_bytes).saturating_sub(of.param_bytes);
    shards.map(beside).max().unwrap_or(0)
}

/// Leaves copies the room that no shard task needs beside its parameters.
pub(super) fn leave_room_for_copies<'a>(
    devices: impl Iterator<Item = &'a mut DeviceCost>,
    admission: &Admission,
) {
    let shards = admission.tasks.iter().flat_map(|task| &task.plan.shards);
    let beside = |of: &ShardPlan| of.need_bytes.max(of.verified_bytes.unwrap_or(0)) - of.param_bytes;
    let working = shards.map(beside).max().unwrap_or(0);
    for memory in devices.filter_map(|device| device.memory_bytes.as_mut()) {
        *memory = memory.saturating_sub(working);
    }
}
