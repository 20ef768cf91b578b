//! Processors that devices and the host optimizer share, and the resulting speeds.

use std::collections::VecDeque;

use super::{SimulatedEvent, SimulatedRun};
use crate::policy::claimable::ordered;

/// The use of the processors, the devices that wait for them, and the running and queued steps of the host
/// optimizer.
#[derive(Default)]
pub(super) struct Processors {
    /// The processors in use by devices.
    taken: usize,
    /// The devices whose shard task is ready except for processors, in order, and since when.
    waiting: VecDeque<(usize, f64)>,
    /// The fraction of a processor per thread, of devices and of the host optimizer; `None` before anything
    /// computes.
    share: Option<f64>,
    /// The time at which the remaining work was last updated.
    at_s: f64,
    /// The steps of the host optimizer, in order, if it shares processors.
    steps: VecDeque<Step>,
    /// The time at which the host optimizer has finished all queued steps.
    stepped_s: f64,
}

/// A step of a shard's master weights.
struct Step {
    model: usize,
    shard: usize,
    /// The end of the model's last shard task before it.
    from_s: f64,
    /// The seconds left, at full speed.
    left_s: f64,
    /// The currently expected end.
    end_s: f64,
}

impl SimulatedRun<'_> {
    /// Returns whether the host optimizer's threads use the shared processors.
    fn host_shares(&self) -> bool {
        self.workload.processors.is_some() && self.workload.optimizer_threads > 0
    }

    /// The threads of a device on the shared processors.
    fn threads(&self, device: usize) -> usize {
        self.workload.processors.map_or(0, |processors| self.workload.devices[device].threads.min(processors))
    }

    /// Takes the processors for a device's next shard task and returns since when it has waited for them, or
    /// queues the device.
    pub(super) fn take_processors(&mut self, device: usize) -> Option<f64> {
        let threads = self.threads(device);
        if threads == 0 {
            return Some(self.now_s);
        }
        let processors = &mut self.processors;
        if !processors.waiting.iter().any(|(waits, _)| *waits == device) {
            processors.waiting.push_back((device, self.now_s));
        }
        let free = self.workload.processors.unwrap_or(0) - processors.taken;
        let (_, since_s) =
            processors.waiting.pop_front_if(|(first, _)| *first == device && free >= threads)?;
        processors.taken += threads;
        Some(since_s)
    }

    /// Releases the processors of a device, and starts queued devices as far as the processors suffice.
    pub(super) fn release_processors(&mut self, device: usize) {
        self.processors.taken -= self.threads(device);
        while let Some(next) = self.processors.waiting.front().copied() {
            self.start(next.0);
            if self.processors.waiting.front() == Some(&next) {
                return;
            }
        }
    }

    /// The current speed of a device's threads.
    pub(super) fn share_of(&self, device: usize) -> f64 {
        if self.threads(device) > 0 { self.share() } else { 1.0 }
    }

    /// The current speed of the threads on the shared processors, including the host optimizer's.
    fn share(&self) -> f64 {
        self.processors.share.unwrap_or(1.0)
    }

    /// Updates the remaining work of everything in progress; called before anything starts or ends.
    pub(super) fn progress(&mut self) {
        if self.workload.processors.is_none() {
            return;
        }
        let passed_s = self.now_s - self.processors.at_s;
        self.processors.at_s = self.now_s;
        for device in 0..self.devices.len() {
            let done_s = passed_s * self.share_of(device);
            self.devices[device].active.iter_mut().for_each(|active| active.left_s -= done_s);
        }
        let done_s = passed_s * self.share();
        self.processors.steps.front_mut().into_iter().for_each(|step| step.left_s -= done_s);
    }

    /// Divides the processors again after anything has started or ended, and schedules the new ends.
    pub(super) fn share_processors(&mut self) {
        let Some(processors) = self.workload.processors else { return };
        // Measured times include the cost of more threads than processors on one device.
        let stepping = if self.processors.steps.is_empty() { 0 } else { self.workload.optimizer_threads };
        let threads = self.processors.taken + stepping.min(processors);
        let share = (processors as f64 / threads.max(1) as f64).min(1.0);
        if self.processors.share.replace(share).unwrap_or(1.0) == share {
            return;
        }
        for device in 0..self.devices.len() {
            let (now_s, share) = (self.now_s, self.share_of(device));
            let Some(active) = &mut self.devices[device].active else { continue };
            active.end_s = now_s + active.left_s.max(0.0) / share;
            let end_s = active.end_s;
            self.at(end_s, SimulatedEvent::End { device });
        }
        self.time_steps();
    }

    /// Queues a step of a shard in the host optimizer; returns the time at which it is expected to end.
    pub(super) fn queue_step(&mut self, model: usize, shard: usize, step_s: f64) -> f64 {
        let end_s = self.processors.stepped_s.max(self.now_s) + step_s / self.share();
        self.processors.stepped_s = end_s;
        if self.host_shares() {
            self.progress();
            let from_s = self.result.finished_s[model];
            self.processors.steps.push_back(Step { model, shard, from_s, left_s: step_s, end_s });
            self.at(end_s, SimulatedEvent::Stepped);
        }
        end_s
    }

    /// Ends a step of the host optimizer, unless it was slowed down since.
    pub(super) fn stepped(&mut self) {
        self.progress();
        while self.processors.steps.front().is_some_and(|step| ordered(step.end_s) <= ordered(self.now_s)) {
            self.processors.steps.pop_front();
        }
        self.share_processors();
    }

    /// Schedules the end of each step again.
    fn time_steps(&mut self) {
        let mut end_s = self.now_s;
        for index in 0..self.processors.steps.len() {
            let share = self.share();
            let step = &mut self.processors.steps[index];
            end_s += step.left_s.max(0.0) / share;
            step.end_s = end_s;
            let (model, shard, from_s) = (step.model, step.shard, step.from_s);
            self.at(end_s, SimulatedEvent::Stepped);
            self.finish(model, shard, from_s, end_s);
            self.wait(model);
        }
        if !self.processors.steps.is_empty() {
            self.processors.stepped_s = end_s;
        }
    }
}
