//! Registers a run in the machine-wide memory reservations.

use crate::machine::reservations::VARIABLE;
use crate::machine::resources::card_name_here;
use crate::machine::{Admitted, PlanningLock, ReservationEntry};
use crate::terminal::tell;
use hydra_core::ByteSize;
use hydra_engine::{Admission, DeviceKind, DeviceSpec, Observer, RunEvent};
use hydra_partition::ShardPlan;
use indicatif::MultiProgress;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// An observer that registers the memory that its run has admitted, and then releases the planning lock. Dropping it removes the
/// entry.
pub struct Registrar {
    planning_lock: Option<Arc<PlanningLock>>,
    devices: Vec<DeviceSpec>,
    run: String,
    terminal: MultiProgress,
    entry: Option<ReservationEntry>,
}

impl Registrar {
    /// Returns the registrar of a run on these devices. Without a planning lock it does nothing.
    pub(super) fn new(
        planning_lock: Option<Arc<PlanningLock>>,
        devices: Vec<DeviceSpec>,
        run: String,
        terminal: MultiProgress,
    ) -> Self {
        Self { planning_lock, devices, run, terminal, entry: None }
    }
}

impl Observer for Registrar {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let (RunEvent::Admitted(admission), Some(planning_lock)) = (event, &self.planning_lock) else {
            return;
        };
        match planning_lock.admit(&admitted(admission, &self.devices, &self.run)) {
            Ok(entry) => self.entry = Some(entry),
            Err(error) => self.terminal.suspend(|| tell(&unseen(&error.into()))),
        }
    }
}

/// Returns the warning of a run that other runs cannot see.
pub(super) fn unseen(error: &anyhow::Error) -> String {
    format!(
        "warning: the memory of this run could not be reserved, so other runs may plan with it too: {error:#}; set \
        {VARIABLE} to another folder, or to an empty value to disable reservations"
    )
}

/// Returns the memory that a run has admitted, on the host and on GPUs.
fn admitted(admission: &Admission, devices: &[DeviceSpec], run: &str) -> Admitted {
    let shard_peak = shard_peak_bytes(admission);
    let mut host_bytes = admission.host_admitted_bytes;
    let mut cards = BTreeMap::<String, ByteSize>::new();
    for device in devices {
        let budget = device.memory.bytes();
        let (sum, bytes) = match device.kind {
            DeviceKind::Cuda { card } => (&mut cards.entry(card_name_here(card)).or_default().0, budget),
            // A zero-copy device has no budget of its own, and its promotions take no memory.
            _ if device.zero_copy && device.link.is_none() => (&mut host_bytes, budget.min(shard_peak)),
            _ => (&mut host_bytes, budget),
        };
        *sum = sum.saturating_add(bytes);
    }
    let at_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let host_bytes = ByteSize(host_bytes);
    Admitted { process: std::process::id(), at_s, run: run.to_owned(), host_bytes, cards }
}

/// Returns the peak device memory of the largest shard, including the double buffer.
fn shard_peak_bytes(admission: &Admission) -> u64 {
    let shards = admission.tasks.iter().flat_map(|task| &task.plan.shards);
    shards.map(ShardPlan::most_bytes).max().unwrap_or(0).saturating_add(admission.reserve_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::Bandwidth;

    #[test]
    fn devices_take_the_hosts_memory_or_that_of_their_cards() {
        let admission = Admission {
            tasks: Vec::new(),
            devices: Vec::new(),
            reserve_bytes: 8,
            host_budget_bytes: 1000,
            host_admitted_bytes: 100,
            host_ahead_bytes: 0,
            host_working_bytes: 0,
            disk_bytes: 0,
            disk_budget_bytes: None,
            active_models: 1,
            max_concurrent: None,
            skipped: Vec::new(),
            estimated_s: 1.0,
        };
        let of = |devices: &[DeviceSpec]| {
            let admitted = admitted(&admission, devices, "a");
            assert_eq!((admitted.process, admitted.run.as_str()), (std::process::id(), "a"));
            (admitted.host_bytes.bytes(), admitted.cards)
        };
        let copies = DeviceSpec::cpu(ByteSize(50));
        let reads = DeviceSpec { zero_copy: true, ..copies.clone() };
        let linked = DeviceSpec { link: Some(Bandwidth(1e9)), ..reads.clone() };
        assert_eq!(of(&[copies.clone(), copies]).0, 200);
        assert_eq!(of(&[reads.clone(), linked]).0, 100 + 8 + 50);
        assert_eq!(of(&[DeviceSpec { memory: ByteSize(5), ..reads }]).0, 105);
        let cards: Vec<DeviceSpec> =
            [1, 1, 2].map(|card| DeviceSpec::cuda(card, ByteSize(30))).into_iter().collect();
        let on = [(1, 60), (2, 30)].map(|(card, bytes)| (card_name_here(card), ByteSize(bytes)));
        assert_eq!(of(&cards), (100, on.into()));
    }
}
