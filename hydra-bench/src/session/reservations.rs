//! The run's entry in the machine's ledger.

use crate::machine::reservations::VARIABLE;
use crate::machine::resources::card_name_here;
use crate::machine::{Admitted, Entry, PlanningLock};
use crate::terminal::tell;
use hydra_core::ByteSize;
use hydra_engine::{Admission, DeviceKind, DeviceSpec, Observer, RunEvent};
use hydra_partition::ShardPlan;
use indicatif::MultiProgress;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// An observer that writes into the machine-wide reservations what its run has admitted, and lets the next run plan. The entry goes with it,
/// when the run has ended.
pub(crate) struct Registrar {
    turn: Option<Arc<PlanningLock>>,
    devices: Vec<DeviceSpec>,
    run: String,
    terminal: MultiProgress,
    entry: Option<Entry>,
}

impl Registrar {
    /// The registrar of a run of this name on these devices; without a turn it does nothing.
    pub(super) fn new(
        turn: Option<Arc<PlanningLock>>,
        devices: Vec<DeviceSpec>,
        run: String,
        terminal: MultiProgress,
    ) -> Self {
        Self { turn, devices, run, terminal, entry: None }
    }
}

impl Observer for Registrar {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let (RunEvent::Admitted(admission), Some(turn)) = (event, &self.turn) else { return };
        match turn.admit(&admitted(admission, &self.devices, &self.run)) {
            Ok(entry) => self.entry = Some(entry),
            Err(error) => self.terminal.suspend(|| tell(&unseen(&error.into()))),
        }
    }
}

/// The warning of a run that other runs do not see.
pub(super) fn unseen(error: &anyhow::Error) -> String {
    format!(
        "warning: runs that begin beside this one will plan with memory that it has admitted: {error:#}; {VARIABLE} names \
         another folder, and an empty one none"
    )
}

/// The memory that a run has admitted, on the host and on cards.
fn admitted(admission: &Admission, devices: &[DeviceSpec], run: &str) -> Admitted {
    let need = need_of_shards(admission);
    let mut host_bytes = admission.host_admitted_bytes;
    let mut cards = BTreeMap::<String, ByteSize>::new();
    for device in devices {
        let budget = device.memory.bytes();
        let (sum, bytes) = match device.kind {
            DeviceKind::Cuda { card } => (&mut cards.entry(card_name_here(card)).or_default().0, budget),
            // Nobody gave it a budget, and its promotions take nothing.
            _ if device.zero_copy && device.link.is_none() => (&mut host_bytes, budget.min(need)),
            _ => (&mut host_bytes, budget),
        };
        *sum = sum.saturating_add(bytes);
    }
    let at_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let host_bytes = ByteSize(host_bytes);
    Admitted { process: std::process::id(), at_s, run: run.to_owned(), host_bytes, cards }
}

/// The most that a shard takes on a device beside its double buffer.
fn need_of_shards(admission: &Admission) -> u64 {
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
            queued: None,
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
