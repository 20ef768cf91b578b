//! Host memory, which limits the models that are within a minibatch.

use std::collections::BTreeSet;

use super::SimulatedRun;
use crate::policy::ModelIndex;
use crate::simulator::Workload;

/// The host memory of models within a minibatch.
pub(super) struct SimulatedHostMemory {
    /// The free bytes; `None` if the memory is not limited.
    free: Option<u64>,
    /// The models that hold memory.
    active: Vec<bool>,
    /// The models that would be claimable if there were memory for them.
    shut_out: BTreeSet<usize>,
}

impl SimulatedHostMemory {
    pub(super) fn new(workload: &Workload) -> Self {
        let masters = workload.tasks.iter().map(|task| task.masters_bytes).fold(0, u64::saturating_add);
        Self {
            free: workload.host_bytes.map(|bytes| bytes.saturating_sub(masters)),
            active: vec![false; workload.tasks.len()],
            shut_out: BTreeSet::new(),
        }
    }
}

impl SimulatedRun<'_> {
    /// Returns whether a model is within a minibatch or could start one. Otherwise it is recorded, and
    /// released when others have freed memory.
    pub(super) fn fits_host(&mut self, model: usize) -> bool {
        let Some(free) = self.host_memory.free else { return true };
        let has = self.host_memory.active[model] || self.workload.tasks[model].active_bytes <= free;
        match has {
            true => self.host_memory.shut_out.remove(&model),
            false => self.host_memory.shut_out.insert(model),
        };
        has
    }

    /// Gives memory to a model that a device commits to, and removes models from the queue that no longer
    /// fit.
    pub(super) fn take_host_memory(&mut self, model: usize) {
        let Some(free) = self.host_memory.free.filter(|_| !self.host_memory.active[model]) else { return };
        self.host_memory.active[model] = true;
        self.host_memory.free = Some(free.saturating_sub(self.workload.tasks[model].active_bytes));
        let queued: Vec<ModelIndex> = self.offers.queue.iter().map(|view| view.model).collect();
        for ModelIndex(other) in queued {
            if !self.fits_host(other) {
                self.offers.dequeue(other);
            }
        }
    }

    /// Frees the memory of a model between two minibatches with final master weights; waiting models can then
    /// be claimed.
    pub(super) fn release_host_memory(&mut self, model: usize) {
        let Some(free) = self.host_memory.free.filter(|_| self.host_memory.active[model]) else { return };
        let state = &self.models[model];
        if !state.is_at_rest(self.now_s) {
            return;
        }
        let cost = &self.workload.tasks[model];
        let masters = if state.next().is_none() { cost.masters_bytes } else { 0 };
        self.host_memory.active[model] = false;
        self.host_memory.free = Some(free.saturating_add(cost.active_bytes).saturating_add(masters));
        for other in std::mem::take(&mut self.host_memory.shut_out) {
            self.release(other);
        }
    }
}
