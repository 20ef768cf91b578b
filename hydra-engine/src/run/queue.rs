//! The tasks that wait for room in host memory.

use super::memory::RunMemory;
use crate::task::{Facts, LiveTask};

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

    /// Returns whether tasks begin in turn, in the order of the policy.
    pub(super) fn is_in_turn(&self) -> bool {
        self.in_turn.is_some()
    }

    /// The tasks that may begin now.
    pub(super) fn may_begin<'a>(&self, tasks: &'a [LiveTask], memory: &RunMemory) -> Vec<&'a LiveTask> {
        let mut waiting = tasks.iter().filter(|task| task.phase.is_waiting()).peekable();
        if waiting.peek().is_none() {
            return Vec::new();
        }
        let begun: Vec<&Facts> =
            tasks.iter().filter(|task| task.has_begun()).map(|task| task.facts.as_ref()).collect();
        waiting.filter(|task| self.has_room(&task.facts, &begun, memory)).collect()
    }

    /// Returns whether a task has room beside those that have begun: its masters, and for each device one of them within a
    /// minibatch, the largest.
    fn has_room(&self, task: &Facts, begun: &[&Facts], memory: &RunMemory) -> bool {
        let Some(most) = self.in_turn else { return true };
        let all = || begun.iter().copied().chain([task]);
        let mut active: Vec<u64> = all().map(|facts| facts.admitted.active_bytes).collect();
        active.sort_unstable_by(|a, b| b.cmp(a));
        let masters: u64 = all().map(|facts| facts.memory_bytes()).sum();
        let within: u64 = active.iter().take(self.devices).sum();
        begun.len() < most && masters + within <= memory.for_tasks
    }
}
