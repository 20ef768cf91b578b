//! What becomes of a task that fails, and of a device.

use crate::cursor::{Cursor, ShardTask, Stage};
use crate::error::EngineError;
use crate::event::Ticket;
use crate::model::{Claim, Model};
use crate::report::TaskState;
use crate::run::Run;
use hydra_core::{DeviceId, TaskId};
use hydra_sched::ShardTaskKind;
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

impl Model {
    /// The task has failed in minibatch `step`: what is left to do is to put back its best masters, if there are any, and
    /// to write what there is.
    pub(crate) fn give_up(&mut self, step: usize, error: EngineError) {
        let stage = if self.results.best.is_some() { Stage::Restore } else { Stage::Write };
        self.results.failure = Some(Arc::new(error));
        self.cursor = Cursor::resumed(self.cursor.program().clone(), step, stage);
        self.cut_short = true;
    }

    /// Whether what shard tasks make is of no use any more.
    pub(crate) fn gives_up(&self) -> bool {
        self.ended.is_some() || self.results.failure.is_some()
    }

    /// Whether the task fails, or has.
    pub(crate) fn is_failing(&self) -> bool {
        self.gives_up() || self.cannot_go_on.is_some()
    }

    /// Whether what this claim makes is of no use any more.
    pub(crate) fn gives_up_on(&self, claim: &Claim) -> bool {
        self.gives_up() || self.ends_before.is_some_and(|ticket| claim.ticket > ticket)
    }

    /// A shard task came to nothing.
    pub(crate) fn dropped(&mut self) {
        (self.running, self.running_task, self.claimed) = (None, None, None);
    }

    /// Whether the masters are those before its minibatch, now and later, if this shard task does not end well.
    pub(crate) fn has_stepped_nothing_before(&self, task: &ShardTask) -> bool {
        task.kind != ShardTaskKind::Backward || task.shard + 1 == self.shards.len()
    }

    /// Goes back to the beginning of the minibatch, or the batch of an evaluation, of this shard task, which failed.
    pub(crate) fn go_back_to(&mut self, task: &ShardTask, ticket: Ticket) {
        self.ends_before = Some(ticket);
        let stage = match task.stage {
            Stage::Train { .. } => Stage::Train { microbatch: 0 },
            stage => stage,
        };
        self.cursor = Cursor::resumed(self.cursor.program().clone(), task.step, stage);
    }

    /// A shard task failed, which had begun or was still claimed.
    pub(crate) fn failed(&mut self, had_begun: bool) {
        match had_begun {
            true => (self.running, self.running_task) = (None, None),
            false => self.claimed = None,
        }
    }
}
