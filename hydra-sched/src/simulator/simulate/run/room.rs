//! Host memory: the models that may be within a minibatch at once.

use std::collections::BTreeSet;

use super::Run;
use crate::policy::ModelIndex;
use crate::simulator::Workload;

/// What of the host's memory models within a minibatch have.
pub(super) struct Room {
    /// Bytes that nobody has; `None` where there is room for all models.
    free: Option<u64>,
    /// The models that have room.
    active: Vec<bool>,
    /// Those that could be claimed if there were room for them.
    shut_out: BTreeSet<usize>,
}

impl Room {
    pub(super) fn new(workload: &Workload) -> Self {
        let masters = workload.tasks.iter().map(|task| task.masters_bytes).fold(0, u64::saturating_add);
        Self {
            free: workload.host_bytes.map(|bytes| bytes.saturating_sub(masters)),
            active: vec![false; workload.tasks.len()],
            shut_out: BTreeSet::new(),
        }
    }
}

impl Run<'_> {
    /// Whether a model is within a minibatch or could begin one. One that could not is remembered: it is released when others have
    /// made room.
    pub(super) fn finds_room(&mut self, model: usize) -> bool {
        let Some(free) = self.room.free else { return true };
        let has = self.room.active[model] || self.workload.tasks[model].active_bytes <= free;
        match has {
            true => self.room.shut_out.remove(&model),
            false => self.room.shut_out.insert(model),
        };
        has
    }

    /// Gives a model that a device commits to its room, and takes those out of the queue that have none beside it.
    pub(super) fn take_room(&mut self, model: usize) {
        let Some(free) = self.room.free.filter(|_| !self.room.active[model]) else { return };
        self.room.active[model] = true;
        self.room.free = Some(free.saturating_sub(self.workload.tasks[model].active_bytes));
        let queued: Vec<ModelIndex> = self.queue.iter().map(|view| view.model).collect();
        for ModelIndex(other) in queued {
            if !self.finds_room(other) {
                self.dequeue(other);
            }
        }
    }

    /// Takes the room of a model that is between two minibatches, its masters stepped; those that waited for it can be claimed.
    pub(super) fn leave_room(&mut self, model: usize) {
        let Some(free) = self.room.free.filter(|_| self.room.active[model]) else { return };
        let state = &self.models[model];
        if !state.is_at_rest(self.now_s) {
            return;
        }
        let cost = &self.workload.tasks[model];
        let masters = if state.next().is_none() { cost.masters_bytes } else { 0 };
        self.room.active[model] = false;
        self.room.free = Some(free.saturating_add(cost.active_bytes).saturating_add(masters));
        for other in std::mem::take(&mut self.room.shut_out) {
            self.release(other);
        }
    }
}
