//! What becomes of a task that fails, and of a device.

use super::Run;
use crate::error::EngineError;
use crate::protocol::Ticket;
use crate::stages::{ShardTask, TaskState};
use crate::task::Claim;
use hydra_core::{DeviceId, TaskId};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Run {
    /// The error of a shard task, with the device's name where that is gone.
    pub(crate) fn named(&self, device: DeviceId, lost: bool, source: EngineError) -> EngineError {
        match lost {
            true => EngineError::DeviceLost { device: self.device_name(device), source: Box::new(source) },
            false => source,
        }
    }

    fn device_name(&self, device: DeviceId) -> String {
        self.threads.devices[device.0].device.spec.name.clone()
    }

    /// Leaves a device out that computes nothing any more.
    pub(crate) fn lose(&mut self, device: DeviceId) {
        if !std::mem::replace(&mut self.devices[device.0].lost, true) {
            let name = self.device_name(device);
            tracing::error!("the device `{name}` computes nothing any more: the run goes on without it");
        }
    }

    /// Where no device is left, every task ends with what it had.
    pub(crate) fn end_without_devices(&mut self) {
        if !self.devices.iter().all(|device| device.lost) {
            return;
        }
        for index in 0..self.models.len() {
            let model = &mut self.models[index];
            // What it has claimed fails by itself.
            if model.gives_up() || model.asked || !model.idle() {
                continue;
            }
            if let Some(next) = model.cursor.peek() {
                self.ends_at(index, &next, self.tickets, EngineError::NoDeviceLeft);
            }
        }
    }

    /// A shard task failed, and with it its task.
    pub(crate) fn shard_failed(&mut self, claim: &Claim, error: EngineError) {
        self.ends_at(claim.task.0, &claim.what, claim.ticket, error);
        self.abandon(claim.task);
    }

    /// A task cannot go on with this shard task, which was claimed with this ticket, or would be. Where no backward of the
    /// minibatch has begun, it ends before the minibatch, with all that it has trained.
    fn ends_at(&mut self, index: usize, next: &ShardTask, ticket: Ticket, error: EngineError) {
        let model = &mut self.models[index];
        // Of two that fail the earlier one counts, and what went wrong first is why.
        if model.gives_up() || model.ends_before.is_some_and(|before| before <= ticket) {
            return;
        }
        if model.has_stepped_nothing_before(next) {
            model.go_back_to(next, ticket);
            model.cannot_go_on.get_or_insert(error);
        } else {
            self.failed_in(index, next.step, error);
        }
    }

    /// What a shard task made for the next one could not be taken down.
    pub(crate) fn output_lost(&mut self, index: usize, step: usize, error: EngineError) {
        let model = &self.models[index];
        if model.ends_before.is_some() {
            return;
        }
        match model.cursor.peek().filter(|_| model.idle()) {
            Some(next) => self.ends_at(index, &next, self.tickets, error),
            None => self.failed_in(index, step, error),
        }
    }

    /// Gradients of minibatch `step` could not be taken down. Where the task ends before that minibatch, nobody waits for
    /// them.
    pub(crate) fn gradients_lost(&mut self, index: usize, step: usize, error: EngineError) {
        let model = &self.models[index];
        if model.ends_before.is_none() || step < model.cursor.step() {
            self.failed_in(index, step, error);
        }
    }

    /// A task failed in the middle of a minibatch, or its loss is no number: it is over when its best masters so far, if
    /// there are any, are written as its model.
    pub(crate) fn failed_in(&mut self, index: usize, step: usize, error: EngineError) {
        let model = &mut self.models[index];
        if model.gives_up() {
            return;
        }
        let error = model.cannot_go_on.take().unwrap_or(error);
        if model.results.best.is_none() {
            return self.fail(index, error);
        }
        let task = model.id;
        model.give_up(step, error);
        self.abandon(task);
    }

    /// Sets a task aside; the run goes on.
    pub(crate) fn fail(&mut self, index: usize, error: EngineError) {
        if self.models[index].ended.is_some() {
            return;
        }
        let model = &mut self.models[index];
        // What went wrong first is why.
        model.results.failure.get_or_insert(Arc::new(error));
        let task = model.id;
        self.abandon(task);
        self.end(index, TaskState::Failed);
    }

    /// Tells workers that nobody waits for what is claimed of a task.
    fn abandon(&self, task: TaskId) {
        for next in self.devices.iter().flat_map(|state| &state.next).filter(|n| n.claim.task == task) {
            next.abandoned.store(true, Ordering::Relaxed);
        }
    }
}
