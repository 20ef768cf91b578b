//! What becomes of a task that fails, and of a device.

use crate::cursor::ShardTask;
use crate::error::EngineError;
use crate::model::Claim;
use crate::report::TaskState;
use crate::run::Run;
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
                self.ends_at(index, &next, EngineError::NoDeviceLeft);
            }
        }
    }

    /// A shard task failed, and with it its task.
    pub(crate) fn shard_failed(&mut self, claim: &Claim, error: EngineError) {
        self.ends_at(claim.task.0, &claim.what, error);
        self.abandon(claim.task);
    }

    /// A task cannot go on with this shard task. Where no backward of the minibatch has begun, it ends before the
    /// minibatch, with all that it has trained.
    fn ends_at(&mut self, index: usize, next: &ShardTask, error: EngineError) {
        let model = &mut self.models[index];
        if model.gives_up() || model.cannot_go_on.is_some() {
            return;
        }
        if model.has_stepped_nothing_before(next) {
            model.go_back_to(next);
            model.cannot_go_on = Some(error);
        } else {
            self.failed_in(index, next.step, error);
        }
    }

    /// A task failed in the middle of a minibatch, or its loss is no number: it is over when its best masters so far, if
    /// there are any, are written as its model.
    pub(crate) fn failed_in(&mut self, index: usize, step: usize, error: EngineError) {
        let model = &mut self.models[index];
        if model.gives_up() {
            return;
        }
        if model.results.best.is_none() {
            return self.fail(index, error);
        }
        let task = model.id;
        model.give_up(step, error);
        self.abandon(task);
    }

    /// As [`fail`](Self::fail), but where the task has failed already and only its best masters matter.
    pub(crate) fn fail_if_awaited(&mut self, index: usize, error: EngineError) {
        if !self.models[index].gives_up() {
            self.fail(index, error);
        }
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
