//! The tasks that are queued for host memory.

use super::memory::RunMemory;
use crate::admission::SharedBuffer;
use crate::task::{LiveTask, TaskInfo};
use std::collections::BTreeSet;

/// Decides when tasks start: all at the beginning, or as host memory becomes free.
pub(super) struct Queue {
    /// The most tasks that run at the same time, if tasks are queued.
    max_concurrent: Option<usize>,
    devices: usize,
}

impl Queue {
    pub(super) fn new(max_concurrent: Option<usize>, devices: usize) -> Self {
        Self { max_concurrent, devices }
    }

    /// From now on tasks are queued: some were added, or gave up their memory.
    pub(super) fn queue_from_now_on(&mut self) {
        self.max_concurrent.get_or_insert(usize::MAX);
    }

    /// Returns whether tasks are queued. They then start in the order of the policy.
    pub(super) fn is_queued(&self) -> bool {
        self.max_concurrent.is_some()
    }

    /// The waiting tasks that may start now.
    pub(super) fn may_begin<'a>(&self, tasks: &'a [LiveTask], memory: &RunMemory) -> Vec<&'a LiveTask> {
        let waiting = tasks.iter().filter(|task| task.phase.is_waiting() && !task.is_paused());
        let Some(most) = self.max_concurrent else { return waiting.collect() };
        let begun = || tasks.iter().filter(|task| task.has_begun()).map(|task| &task.info.admitted);
        if begun().count() >= most || waiting.clone().next().is_none() {
            return Vec::new();
        }
        let masters: u64 = begun().map(|of| of.storage.memory_bytes()).sum();
        let shared: BTreeSet<SharedBuffer> = begun().flat_map(|of| of.storage.shared_in_memory()).collect();
        let in_common: u64 = shared.iter().map(|shared| shared.bytes).sum();
        // The largest models within a minibatch, one for each device, in descending order.
        let mut active: Vec<u64> = begun().map(|of| of.memory.active_bytes).collect();
        active.sort_unstable_by(|a, b| b.cmp(a));
        active.truncate(self.devices);
        let within: u64 = active.iter().sum();
        let least = if active.len() < self.devices { 0 } else { active.last().copied().unwrap_or(0) };
        let has_space = |info: &TaskInfo| {
            let storage = &info.admitted.storage;
            let more = info.admitted.memory.active_bytes.saturating_sub(least);
            let brought = storage.shared_in_memory().filter(|buffer| !shared.contains(buffer));
            let all = masters + in_common + storage.memory_bytes() + brought.map(|of| of.bytes).sum::<u64>();
            all + within + more + memory.compared_bytes(info) <= memory.for_tasks
        };
        waiting.filter(|task| has_space(&task.info)).collect()
    }
}
