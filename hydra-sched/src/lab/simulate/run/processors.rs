//! Processors that devices and the host optimizer share: how fast each of them is while others compute too.

use std::collections::VecDeque;

use super::{Event, Run};
use crate::policy::claimable::ordered;

/// Who is on which processor, and the steps that are under way or wait on the host.
#[derive(Default)]
pub(super) struct Processors {
    queues: Queues,
    /// The share of a processor that each thread of a device has in the mean, and last that of the host optimizer's threads; none
    /// before anything computes.
    shares: Vec<f64>,
    /// When the work of all was last brought up to date.
    at_s: f64,
    /// The steps of the host optimizer, in their order, where it shares processors.
    steps: VecDeque<Step>,
}

/// The threads on each processor, by the number of the device whose they are, or the number of devices where they are the host
/// optimizer's. As in the kernels of operating systems, a thread that begins goes where the fewest are and stays there, and a
/// processor takes one over from another that has two more.
#[derive(Default)]
struct Queues(Vec<Vec<usize>>);

impl Queues {
    /// Has so many threads of `owner`, which are in no order among themselves, on the processors from now on.
    fn set(&mut self, owner: usize, threads: usize) {
        let had = self.0.iter().flatten().filter(|of| **of == owner).count();
        if had == threads {
            return;
        }
        self.0.iter_mut().for_each(|on| on.retain(|of| *of != owner));
        for _ in 0..threads {
            if let Some(fewest) = self.0.iter_mut().min_by_key(|on| on.len()) {
                fewest.push(owner);
            }
        }
    }

    /// Has processors take threads over, the one that came last to where the most are first.
    fn balance(&mut self) {
        let by_length = |(_, on): &(usize, &Vec<usize>)| on.len();
        while let (Some((most, _)), Some((fewest, _))) = (
            self.0.iter().enumerate().rev().max_by_key(by_length),
            self.0.iter().enumerate().min_by_key(by_length),
        ) && self.0[most].len() > self.0[fewest].len() + 1
        {
            let moved = self.0[most].pop();
            self.0[fewest].extend(moved);
        }
    }

    /// The share of a processor that each thread of `owner` has in the mean; 1 of one that has none on them.
    fn share(&self, owner: usize) -> f64 {
        let shares = self.0.iter().flat_map(|on| on.iter().map(move |of| (*of, 1.0 / on.len() as f64)));
        let own = shares.filter(|(of, _)| *of == owner).map(|(_, share)| share);
        let (threads, sum) = own.fold((0, 0.0), |(threads, sum), share| (threads + 1, sum + share));
        if threads > 0 { sum / f64::from(threads) } else { 1.0 }
    }
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

impl Run<'_> {
    /// Whether the host optimizer's threads are on the processors that are shared.
    fn host_shares(&self) -> bool {
        self.workload.processors.is_some() && self.workload.optimizer_threads > 0
    }

    /// The speed of a device's threads now, or of the host optimizer's.
    pub(super) fn share_of(&self, owner: usize) -> f64 {
        self.processors.shares.get(owner).copied().unwrap_or(1.0)
    }

    /// The number by which the host optimizer's threads are known.
    fn host(&self) -> usize {
        self.devices.len()
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
        let done_s = passed_s * self.share_of(self.host());
        self.processors.steps.front_mut().into_iter().for_each(|step| step.left_s -= done_s);
    }

    /// Divides the processors anew, when something has begun or ended, and says when what is under way ends now.
    pub(super) fn share_processors(&mut self) {
        let Some(processors) = self.workload.processors else { return };
        // What more threads than processors cost is in the times of what they compute.
        let threads = |threads: usize, on: bool| if on { threads.min(processors) } else { 0 };
        let computes = self.devices.iter().zip(&self.workload.devices);
        let computes = computes.map(|(state, of)| threads(of.threads, state.active.is_some()));
        let steps = threads(self.workload.optimizer_threads, !self.processors.steps.is_empty());
        let queues = &mut self.processors.queues;
        queues.0.resize_with(processors, Vec::new);
        let now: Vec<usize> = computes.chain([steps]).collect();
        // Who ends makes room for who begins.
        for ends in [true, false] {
            let some = now.iter().enumerate().filter(|(_, threads)| (**threads == 0) == ends);
            some.for_each(|(owner, threads)| queues.set(owner, *threads));
        }
        queues.balance();
        let shares: Vec<f64> = (0..now.len()).map(|owner| queues.share(owner)).collect();
        let before = std::mem::replace(&mut self.processors.shares, shares);
        for owner in 0..now.len() {
            let (now_s, share) = (self.now_s, self.share_of(owner));
            if before.get(owner).copied().unwrap_or(1.0) == share {
                continue;
            }
            let Some(device) = self.devices.get_mut(owner) else {
                self.time_steps();
                continue;
            };
            let Some(active) = &mut device.active else { continue };
            active.end_s = now_s + active.left_s.max(0.0) / share;
            let end_s = active.end_s;
            self.at(end_s, Event::End { device: owner });
        }
    }

    /// Has the host optimizer step a shard when it has stepped what was given to it before; gives the time at which it will
    /// have, as far as is known.
    pub(super) fn queue_step(&mut self, model: usize, shard: usize, step_s: f64) -> f64 {
        let end_s = self.host_s.max(self.now_s) + step_s / self.share_of(self.host());
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
            let share = self.share_of(self.host());
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
