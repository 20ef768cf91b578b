//! The tasks that wait for room in host memory.

use super::memory::{RunMemory, compared_bytes};
use crate::admission::SharedImage;
use crate::task::{Facts, LiveTask};
use hydra_spill::SharedStore;
use std::collections::BTreeSet;

/// When tasks begin: all at the start, or in turn, as others end.
pub(super) struct Queue {
    /// The most tasks that may have begun at once, where they begin in turn.
    in_turn: Option<usize>,
    devices: usize,
}

impl Queue {
    pub(super) fn new(in_turn: Option<usize>, devices: usize) -> Self {
        Self { in_turn, devices }
    }

    /// From now on tasks begin when there is room: some were added, or have made room.
    pub(super) fn go_on_in_turn(&mut self) {
        self.in_turn.get_or_insert(usize::MAX);
    }

    /// Returns whether tasks begin in turn, in the order of the policy.
    pub(super) fn is_in_turn(&self) -> bool {
        self.in_turn.is_some()
    }

    /// The tasks that may begin now.
    pub(super) fn may_begin<'a>(
        &self,
        tasks: &'a [LiveTask],
        memory: &RunMemory,
        store: &SharedStore,
    ) -> Vec<&'a LiveTask> {
        let waiting = tasks.iter().filter(|task| task.phase.is_waiting() && !task.is_paused());
        let Some(most) = self.in_turn else { return waiting.collect() };
        let begun = || tasks.iter().filter(|task| task.has_begun()).map(|task| &task.facts);
        if begun().count() >= most || waiting.clone().next().is_none() {
            return Vec::new();
        }
        let masters: u64 = begun().map(|facts| facts.memory_bytes()).sum();
        let shared: BTreeSet<SharedImage> = begun().flat_map(|facts| facts.shared_in_memory()).collect();
        let in_common: u64 = shared.iter().map(|shared| shared.bytes).sum();
        // Those within a minibatch that need the most, one for each device, the largest first.
        let mut active: Vec<u64> = begun().map(|facts| facts.admitted.active_bytes).collect();
        active.sort_unstable_by(|a, b| b.cmp(a));
        active.truncate(self.devices);
        let within: u64 = active.iter().sum();
        let least = if active.len() < self.devices { 0 } else { active.last().copied().unwrap_or(0) };
        let has_room = |facts: &Facts| {
            let more = facts.admitted.active_bytes.saturating_sub(least);
            let brought = facts.shared_in_memory().filter(|image| !shared.contains(image));
            let all = masters + in_common + facts.memory_bytes() + brought.map(|of| of.bytes).sum::<u64>();
            all + within + more + compared_bytes(facts, store) <= memory.for_tasks
        };
        waiting.filter(|task| has_room(&task.facts)).collect()
    }
}
