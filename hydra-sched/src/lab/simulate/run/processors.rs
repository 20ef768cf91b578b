//! Processors that devices and the host optimizer share: how fast each of them is while others compute too.

use std::collections::VecDeque;

use super::{Event, Run};
use crate::policy::claimable::ordered;

/// The share of a processor that each thread has, and the steps that are under way or wait on the host.
pub(super) struct Processors {
    /// Of a processor, 1 where there are enough.
    pub share: f64,
    /// When the work of all was last brought up to date.
    at_s: f64,
    /// The steps of the host optimizer, in their order, where it shares processors.
    steps: VecDeque<Step>,
}

/// A step of a shard's masters.
struct Step {
    model: usize,
    shard: usize,
    /// When the backward ended.
    from_s: f64,
    /// Seconds that are left of it, on processors of its own.
    left_s: f64,
    /// When it ends, as far as is known.
    end_s: f64,
}

impl Default for Processors {
    fn default() -> Self {
        Self { share: 1.0, at_s: 0.0, steps: VecDeque::new() }
    }
}

impl Run<'_> {
    /// Whether a device's threads are on the processors that are shared.
    fn shares(&self, device: usize) -> bool {
        self.workload.processors.is_some() && self.workload.devices[device].threads > 0
    }

    /// Whether the host optimizer's threads are.
    fn host_shares(&self) -> bool {
        self.workload.processors.is_some() && self.workload.optimizer_threads > 0
    }

    /// The speed of a device's threads now.
    pub(super) fn share_of(&self, device: usize) -> f64 {
        if self.shares(device) { self.processors.share } else { 1.0 }
    }

    /// Brings up to date what is left of all that is under way; before anything begins or ends.
    pub(super) fn progress(&mut self) {
        if self.workload.processors.is_none() {
            return;
        }
        let passed_s = (self.now_s - self.processors.at_s) * self.processors.share;
        self.processors.at_s = self.now_s;
        for device in 0..self.devices.len() {
            if self.shares(device)
                && let Some(active) = &mut self.devices[device].active
            {
                active.left_s -= passed_s;
            }
        }
        if let Some(step) = self.processors.steps.front_mut() {
            step.left_s -= passed_s;
        }
    }

    /// Divides the processors anew, when something has begun or ended, and says when what is under way ends now.
    pub(super) fn share_processors(&mut self) {
        let Some(processors) = self.workload.processors else { return };
        let computes = |(device, _): &(usize, &super::Device)| self.devices[*device].active.is_some();
        let devices = self.devices.iter().enumerate().filter(computes);
        let threads = devices.map(|(device, _)| self.workload.devices[device].threads);
        let steps = if self.processors.steps.is_empty() { 0 } else { self.workload.optimizer_threads };
        // What more threads than that cost is in the times of what they compute.
        let threads = threads.chain([steps]).map(|threads| threads.min(processors));
        let share = (processors as f64 / threads.sum::<usize>().max(1) as f64).min(1.0);
        if share == self.processors.share {
            return;
        }
        self.processors.share = share;
        for device in 0..self.devices.len() {
            if !self.shares(device) {
                continue;
            }
            let now_s = self.now_s;
            let Some(active) = &mut self.devices[device].active else { continue };
            active.end_s = now_s + active.left_s.max(0.0) / share;
            let end_s = active.end_s;
            self.at(end_s, Event::End { device });
        }
        self.time_steps();
    }

    /// Has the host optimizer step a shard when it has stepped what was given to it before; gives the time at which it will
    /// have, as far as is known.
    pub(super) fn queue_step(&mut self, model: usize, shard: usize, step_s: f64) -> f64 {
        let share = if self.host_shares() { self.processors.share } else { 1.0 };
        let end_s = self.host_s.max(self.now_s) + step_s / share;
        self.host_s = end_s;
        if self.host_shares() {
            self.progress();
            self.processors.steps.push_back(Step { model, shard, from_s: self.now_s, left_s: step_s, end_s });
            self.at(end_s, Event::Stepped);
        }
        end_s
    }

    /// The host optimizer has done with a step, if none was put off since.
    pub(super) fn stepped(&mut self) {
        self.progress();
        while self.processors.steps.front().is_some_and(|step| ordered(step.end_s) <= ordered(self.now_s)) {
            self.processors.steps.pop_front();
        }
        self.share_processors();
    }

    /// Says anew when each step ends.
    fn time_steps(&mut self) {
        let mut end_s = self.now_s;
        for index in 0..self.processors.steps.len() {
            let share = self.processors.share;
            let step = &mut self.processors.steps[index];
            end_s += step.left_s.max(0.0) / share;
            step.end_s = end_s;
            let (model, shard, from_s) = (step.model, step.shard, step.from_s);
            self.at(end_s, Event::Stepped);
            // The model may wait for this, and does so for another time now.
            if let Some(ready_s) = self.models[model].ready_s() {
                self.waiting.remove(&(ordered(ready_s), model));
            }
            self.finish(model, shard, from_s, end_s);
            self.wait(model);
        }
        if !self.processors.steps.is_empty() {
            self.host_s = end_s;
        }
    }
}
