//! Costs of devices that are known before anything runs, for recorded and for predicted runs alike.

use crate::admission::{Admission, SharedImage};
use crate::device::LogicalDevice;
use hydra_partition::ShardPlan;
use hydra_sched::DeviceCost;
use std::collections::BTreeSet;

/// The costs of a device, with its whole budget as room for copies; its link's bandwidth where that is simulated.
pub(super) fn device_cost(device: &LogicalDevice) -> DeviceCost {
    let caches = device.manager.caches_copies();
    DeviceCost {
        link_bytes_per_s: device.spec.link.map(|link| link.0),
        keeps_copies: caches,
        memory_bytes: caches.then_some(device.spec.memory.bytes()),
        threads: device.spec.threads_here(),
        ..DeviceCost::default()
    }
}

/// Leaves copies the room that no shard task needs beside its parameters.
pub(super) fn leave_room_for_copies<'a>(
    devices: impl Iterator<Item = &'a mut DeviceCost>,
    admission: &Admission,
) {
    let shards = admission.tasks.iter().flat_map(|task| task.plan.shards.iter().zip(&task.sum_bytes));
    let beside = |(of, sum): (&ShardPlan, &u64)| {
        of.need_bytes.max(of.verified_bytes.unwrap_or(0)) - of.param_bytes + 2 * sum
    };
    let working = shards.map(beside).max().unwrap_or(0);
    for memory in devices.filter_map(|device| device.memory_bytes.as_mut()) {
        *memory = memory.saturating_sub(working);
    }
}

/// The host memory of a run for masters that tasks do not share and for models within a minibatch; `None` where tasks begin in
/// turn, which the simulator does not.
pub(super) fn host_bytes(admission: &Admission) -> Option<u64> {
    let shared = admission.tasks.iter().flat_map(|task| task.shared());
    let shared: BTreeSet<SharedImage> =
        shared.filter(|(.., on_disk)| !on_disk).map(|(_, shared, _)| shared).collect();
    let shared: u64 = shared.into_iter().map(|shared| shared.bytes).sum();
    let others = admission.host_ahead_bytes + admission.host_working_bytes + shared;
    admission.in_turn.is_none().then(|| admission.host_admitted_bytes.saturating_sub(others))
}
