//! Processors that devices and the host optimizer share: how fast each of them is while others compute too.

use std::collections::VecDeque;

use super::{Event, Run};
use crate::policy::claimable::ordered;

/// Who computes, the devices that wait for their turn, and the steps that are under way or wait on the host.
#[derive(Default)]
pub(super) struct Processors {
    /// Those that devices have.
    taken: usize,
    /// The devices whose shard task could start but for processors, in the order in which it could, and since when.
    waiting: VecDeque<(usize, f64)>,
    /// The share of a processor that each thread has, of devices and of the host optimizer; none before anything computes.
    share: Option<f64>,
    /// When the work of all was last brought up to date.
    at_s: f64,
    /// The steps of the host optimizer, in their order, where it shares processors.
    steps: VecDeque<Step>,
}

/// A step of a shard's masters.
struct Step {
    model: usize,
    shard: usize,
    /// When the model's last shard task before it ended.
    from_s: f64,
    /// Seconds that are left of it, on processors of its own.
    left_s: f64,
    /// When it ends, as far as is known.
    end_s: f64,
}

impl Run<'_> {
    /// Whether the host optimizer's threads are on the processors that are shared.
    fn host_shares(&self) -> bool {
        self.workload.processors.is_some() && self.workload.optimizer_threads > 0
    }

    /// The threads of a device on the processors that are shared.
    fn threads(&self, device: usize) -> usize {
        self.workload.processors.map_or(0, |processors| self.workload.devices[device].threads.min(processors))
    }

    /// Has a device take the processors for what it would compute now, and returns since when it has waited for them; else it waits
    /// for its turn.
    pub(super) fn take_turn(&mut self, device: usize) -> Option<f64> {
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

    /// A device has computed: those start that have waited for processors, as far as they are enough now.
    pub(super) fn end_turn(&mut self, device: usize) {
        self.processors.taken -= self.threads(device);
        while let Some(next) = self.processors.waiting.front().copied() {
            self.start(next.0);
            if self.processors.waiting.front() == Some(&next) {
                return;
            }
        }
    }

    /// The speed of a device's threads now.
    pub(super) fn share_of(&self, device: usize) -> f64 {
        if self.threads(device) > 0 { self.share() } else { 1.0 }
    }

    /// The speed of the threads that share the processors, the host optimizer's among them.
    fn share(&self) -> f64 {
        self.processors.share.unwrap_or(1.0)
    }

    /// Brings up to date what is left of all that is under way; before anything begins or ends.
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

    /// Divides the processors anew, when something has begun or ended, and says when what is under way ends now.
    pub(super) fn share_processors(&mut self) {
        let Some(processors) = self.workload.processors else { return };
        // What more threads than processors cost is in the times of what they compute.
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
            self.at(end_s, Event::End { device });
        }
        self.time_steps();
    }

    /// Has the host optimizer step a shard when it has stepped what was given to it before; gives the time at which it will
    /// have, as far as is known.
    pub(super) fn queue_step(&mut self, model: usize, shard: usize, step_s: f64) -> f64 {
        let end_s = self.host_s.max(self.now_s) + step_s / self.share();
        self.host_s = end_s;
        if self.host_shares() {
            self.progress();
            let from_s = self.result.finished_s[model];
            self.processors.steps.push_back(Step { model, shard, from_s, left_s: step_s, end_s });
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
            let share = self.share();
            let step = &mut self.processors.steps[index];
            end_s += step.left_s.max(0.0) / share;
            step.end_s = end_s;
            let (model, shard, from_s) = (step.model, step.shard, step.from_s);
            self.at(end_s, Event::Stepped);
            self.finish(model, shard, from_s, end_s);
            self.wait(model);
        }
        if !self.processors.steps.is_empty() {
            self.host_s = end_s;
        }
    }
}
