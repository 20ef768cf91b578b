//! The tasks that are queued for host memory.

use super::memory::RunMemory;
use crate::admission::RunningTasks;
use crate::task::{LiveTask, TaskInfo};

/// Decides when tasks start: all at the beginning, or as host memory becomes free.
pub(super) struct StartQueue {
    /// The most tasks that run at the same time, if tasks are queued.
    max_concurrent: Option<usize>,
    devices: usize,
}

impl StartQueue {
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
        let begun = || tasks.iter().filter(|task| task.has_begun());
        if begun().count() >= most || waiting.clone().next().is_none() {
            return Vec::new();
        }
        let shares = begun().map(|task| task.info.admitted.host_share());
        let running = RunningTasks::new(shares, self.devices);
        let has_space = |info: &TaskInfo| {
            let bytes = running.bytes_with(&info.admitted.host_share());
            // Files are examined only if memory is left.
            let compared = || memory.compared_bytes(info, &memory.stored(info));
            bytes <= memory.for_tasks && bytes.saturating_add(compared()) <= memory.for_tasks
        };
        waiting.filter(|task| has_space(&task.info)).collect()
    }
}
