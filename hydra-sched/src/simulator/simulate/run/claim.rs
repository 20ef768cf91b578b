//! Claims of a simulated run: the claimable models, and the request of a device.

use super::{Active, Claim, Offers, SimulatedRun, unordered};
use crate::policy::claimable::ordered;
use crate::policy::{ModelIndex, ModelView, Request, ShardTaskKind};
use crate::program::ShardTask;
use crate::simulator::cached::CachedPart;
use crate::simulator::progress::ModelProgress;
#[cfg(test)]
use crate::simulator::sum::Sum;
use crate::simulator::{Occupation, Queue, Read, SimulationError};

/// The maximum number of claimable models in an error.
const SHOWN: usize = 8;

impl SimulatedRun<'_> {
    /// Makes a model claimable, if the master weights for its next shard task are final.
    pub(super) fn release(&mut self, model: usize) {
        self.release_host_memory(model);
        let state = &self.models[model];
        let goes_on = |device: &usize| state.claimable(Some(*device), self.now_s).is_some();
        let touched: Vec<usize> = state.in_flight.computing().filter(goes_on).collect();
        self.requests.touched.extend(touched.into_iter().map(|device| self.devices[device].rank));
        let next = state.claimable(None, self.now_s).map(|(_, next)| next);
        if !state.in_flight.is_idle() {
            return self.offer_joinable(model, next);
        }
        self.offer_joinable(model, None);
        let Some(next) = next else { return self.wait(model) };
        if let Some(ready_s) = self.models[model].ready_s() {
            self.forecast.waiting.remove(&(ordered(ready_s), model));
        }
        if self.fits_host(model) {
            self.enqueue(model, &next, false);
        }
    }

    /// Makes a running model claimable by further devices with this shard task, or not at all.
    fn offer_joinable(&mut self, model: usize, next: Option<ShardTask>) {
        if self.models[model].replicas() == 1 {
            return;
        }
        match next {
            Some(next) => self.offers.joinable.insert(&*self.policy, self.claimable(model, &next, false)),
            None => drop(self.offers.joinable.remove(ModelIndex(model))),
        }
    }

    /// Inserts a model into the queue, or updates its position.
    fn enqueue(&mut self, model: usize, next: &ShardTask, continues: bool) {
        self.offers.dequeue(model);
        self.offers.queue.insert(&*self.policy, self.claimable(model, next, continues));
        let Some(place) = self.offers.queue.place(ModelIndex(model)).copied() else { return };
        let (devices, version) = (&self.devices, self.models[model].version(next));
        let cost = &self.workload.tasks[model].shards[next.shard];
        let has =
            |device: usize| devices[device].copies.has(CachedPart::of((model, next.shard), cost, version));
        match cost.is_in_parts() {
            true => self.offers.cached.enter_in_parts(model, place, has),
            false => self.offers.cached.enter(model, version, place, has),
        }
    }

    /// Returns a model as devices see it.
    fn claimable(&self, model: usize, next: &ShardTask, continues: bool) -> ModelView {
        let state = &self.models[model];
        let ran_on =
            state.in_flight.last_device().filter(|device| self.workload.devices[*device].keeps_copies);
        ModelView { ran_on, ..view(model, state, next, continues) }
    }

    /// Returns whether a device has all parameters that a model's next shard task, on this shard, reads.
    pub(super) fn has_next(&self, device: usize, model: usize, shard: usize) -> bool {
        let state = &self.models[model];
        let version = state.next().map_or(0, |next| state.version(&ShardTask { shard, ..next }));
        let cost = &self.workload.tasks[model].shards[shard];
        self.devices[device].copies.has(CachedPart::of((model, shard), cost, version))
    }

    /// Records a model that becomes claimable at a known time, when its master weights are final.
    pub(super) fn wait(&mut self, model: usize) {
        if !self.policy.waits() {
            return;
        }
        let state = &self.models[model];
        let (Some(next), Some(ready_s)) = (state.next(), state.ready_s()) else { return };
        let place = (ordered(ready_s), model);
        if state.final_s[next.shard] > self.now_s {
            self.forecast.waiting.insert(place, view(model, state, &next, false));
        } else {
            self.forecast.waiting.remove(&place);
        }
    }

    /// Returns the longest of the models that wait for their master weights and can be promoted before the
    /// estimated end of the device's shard task.
    fn soon(&self, device: usize) -> Option<ModelView> {
        let Active { claim, start_s, .. } = self.devices[device].active.as_ref()?;
        let of = &self.workload.devices[device];
        let end_s =
            start_s + self.models[claim.model].cost.seconds(claim.task.kind, claim.task.shard) / of.speed;
        let promoted = |(&(ready_s, _), view): (&(u64, usize), &ModelView)| {
            let promote_s = self.workload.promote_s(device, view.model.0, view.next_shard);
            (*view, unordered(ready_s) + of.latency_s + promote_s)
        };
        let ready = self.forecast.waiting.range(..=(ordered(end_s), usize::MAX)).map(promoted);
        Request::longest_in_time(ready, end_s)
    }

    /// Commits every device that can commit: idle ones first, and fast ones first among them.
    pub(super) fn commit(&mut self) -> Result<(), SimulationError> {
        for (_, rank) in std::mem::take(&mut self.requests.held) {
            let state = &self.devices[self.requests.ranked[rank]];
            if state.next.is_none() {
                self.requests.hungry.insert((state.active.is_some(), rank));
            }
        }
        self.requests.touched.extend(self.requests.held_with_own.drain(..));
        loop {
            let first = self.requests.hungry.first().copied();
            let asks = first.filter(|_| !self.offers.queue.is_empty());
            let idles = first.filter(|(computes, _)| !computes && !self.offers.joinable.is_empty());
            if let Some((_, rank)) = asks {
                self.claim(self.requests.ranked[rank])?;
            } else if let Some((_, rank)) = idles {
                self.claim_joinable(self.requests.ranked[rank])?;
            } else if let Some(rank) = self.requests.touched.pop_first() {
                // The queue is empty, but a device may continue with the model that it computes.
                if self.requests.hungry.contains(&(true, rank)) {
                    self.claim(self.requests.ranked[rank])?;
                }
            } else {
                return Ok(());
            }
        }
    }

    /// Commits the device to the shard task that the policy chooses.
    fn claim(&mut self, device: usize) -> Result<(), SimulationError> {
        let running = self.devices[device].active.as_ref().map(|of| of.claim.model);
        if let Some(model) = running {
            let state = &self.models[model];
            // Models that other devices compute come after idle ones.
            let may = self.offers.queue.is_empty() || !state.in_flight.is_elsewhere(device);
            if let Some((_, next)) = state.claimable(Some(device), self.now_s).filter(|_| may) {
                self.enqueue(model, &next, true);
            }
        }
        let chosen = self.ask(device);
        if let Some(found) = chosen.filter(|found| self.offers.queue.get(*found).is_none()) {
            return Err(self.not_claimable(device, found));
        }
        let fits = chosen.filter(|ModelIndex(model)| self.find_space(device, *model));
        let own = running.is_some_and(|model| self.offers.dequeue(model));
        match fits {
            Some(ModelIndex(model)) => {
                self.offers.dequeue(model);
                self.promote(device, model);
            }
            None => self.hold(device, own),
        }
        Ok(())
    }

    /// Offers the policy the models that other devices compute for an idle device, and commits to
    /// its shard task.
    fn claim_joinable(&mut self, device: usize) -> Result<(), SimulationError> {
        let is_there = |view: &&ModelView| self.has_next(device, view.model.0, view.next_shard);
        let joinable = &self.offers.joinable;
        let cached = joinable.iter().filter(is_there);
        let cached = cached.filter_map(|view| joinable.place(view.model).copied()).collect();
        let request = self.request(device);
        self.result.decisions += 1;
        match joinable.choose_near(&mut *self.policy, &request, &cached) {
            Some(found) if joinable.get(found).is_none() => Err(self.not_claimable(device, found)),
            Some(ModelIndex(model)) if self.find_space(device, model) => {
                self.promote(device, model);
                Ok(())
            }
            Some(_) | None => {
                let place = (false, self.devices[device].rank);
                self.requests.hungry.remove(&place);
                self.requests.held.push(place);
                Ok(())
            }
        }
    }

    /// Returns the error for the policy's last choice.
    fn not_claimable(&self, device: usize, found: ModelIndex) -> SimulationError {
        SimulationError::NotClaimable {
            policy: self.result.policy,
            decision: self.claims(),
            device,
            at_s: self.now_s,
            found,
            task: self.workload.tasks.get(found.0).map(|task| task.name.clone()),
            count: self.offers.offered().len(),
            claimable: self.offers.some_claimable(),
        }
    }

    /// Does not repeat the device's request before the next event. `own` is whether it could have continued
    /// with the model that it computes.
    fn hold(&mut self, device: usize, own: bool) {
        let state = &self.devices[device];
        if own {
            self.requests.held_with_own.push(state.rank);
        }
        let place = (state.active.is_some(), state.rank);
        if !self.offers.queue.is_empty() && self.requests.hungry.remove(&place) {
            self.requests.held.push(place);
        }
    }

    /// Returns the model that the device computes or last computed, if no other device did since and it waits
    /// for its master weights.
    fn awaited(&self, device: usize) -> Option<ModelView> {
        let model = self.devices[device].last?;
        let state = &self.models[model];
        let in_flight = &state.in_flight;
        let is_last = !in_flight.has_claims() && in_flight.last_device() == Some(device);
        let next = state.next().filter(|_| is_last)?;
        let continues = in_flight.computing().any(|on| on == device);
        (state.final_s[next.shard] > self.now_s).then(|| view(model, state, &next, continues))
    }

    /// Estimated seconds to the end of a model that never waits for a device.
    fn alone_s(&self, device: usize, model: &ModelView) -> f64 {
        let index = model.model.0;
        let (state, cost) = (&self.models[index], &self.workload.tasks[index]);
        let minibatches = state.next().map_or(0, |next| cost.minibatches - next.step as u64);
        let (first, speed) = (cost.first_trained, self.workload.devices[device].speed);
        // Frozen shards wait for no step, and hide a part of the wait.
        let frozen_s: f64 =
            (0..first).map(|shard| state.cost.seconds(ShardTaskKind::Forward, shard) / speed).sum();
        let wait_s = state.waited_s + self.workload.promote_s(device, index, first);
        model.remaining_s / (speed * state.replicas() as f64)
            + minibatches as f64 * (wait_s - frozen_s).max(0.0)
    }

    /// Updates the sum of the remaining work for one model.
    pub(super) fn count_left(&mut self, model: usize) {
        if self.policy.waits() {
            self.forecast.left_s.set(model, self.models[model].left_s());
        }
    }

    fn ask(&mut self, device: usize) -> Option<ModelIndex> {
        if self.offers.queue.is_empty() {
            return None;
        }
        #[cfg(test)]
        self.check_sums(device);
        let request = self.request(device);
        self.result.decisions += 1;
        self.offers.queue.choose_near(&mut *self.policy, &request, self.offers.cached.of(device))
    }

    /// Checks the incrementally updated sums and sets against recomputed ones.
    #[cfg(test)]
    fn check_sums(&self, device: usize) {
        if self.result.decisions > 64 && !self.result.decisions.is_multiple_of(64) {
            return;
        }
        let there = |view: &&ModelView| self.has_next(device, view.model.0, view.next_shard);
        let Offers { queue, cached, .. } = &self.offers;
        let found = queue.iter().filter(there).map(|view| *queue.place(view.model).unwrap());
        assert_eq!(*cached.of(device), found.collect());
        if self.policy.waits() {
            let left_s: Vec<f64> = self.models.iter().map(ModelProgress::left_s).collect();
            assert_eq!(self.forecast.left_s.get(), Sum::new(&left_s).get());
        }
    }

    /// The number of shard tasks that devices have committed to: each was promoted or cached.
    const fn claims(&self) -> u64 {
        self.result.promotions + self.result.promotions_saved
    }

    fn request(&self, device: usize) -> Request {
        let request = Request::new(device, self.devices.len(), self.claims());
        if !self.policy.waits() {
            return request;
        }
        let awaited = self.awaited(device);
        Request {
            awaited,
            awaited_s: awaited.map_or(0.0, |model| self.alone_s(device, &model)),
            soon: self.soon(device),
            even_s: self.forecast.left_s.get() / self.forecast.speeds,
            ..request
        }
    }

    /// Commits the device to the model's next shard task and promotes its parameters.
    fn promote(&mut self, device: usize, model: usize) {
        let state = &mut self.models[model];
        let Some((replica, _)) = state.claimable(Some(device), self.now_s) else { return };
        let Some(task) = state.claim(device, replica) else { return };
        self.take_host_memory(model);
        self.release_sums(device, (model, replica), &task);
        let version = self.models[model].version(&task);
        self.count_left(model);
        let (of, cost) = (&self.workload.devices[device], &self.workload.tasks[model].shards[task.shard]);
        let state = &mut self.devices[device];
        if let Some(reads) = self.result.reads.get_mut(device) {
            let (shard, bytes, overlaps_previous) =
                (task.shard, cost.bytes.unwrap_or(0), state.active.is_some());
            reads.push(Read { task: model, shard, version, bytes, overlaps_previous });
        }
        self.requests.hungry.remove(&(state.active.is_some(), state.rank));
        let parts = CachedPart::of((model, task.shard), cost, version);
        let missing = parts.clone().filter(|part| !(of.keeps_copies && state.copies.touch(part)));
        let missing = missing.map(|part| part.bytes).reduce(u64::saturating_add);
        let (mut ready_s, link) = (self.now_s, state.link);
        if let Some(bytes) = missing {
            let start_s = self.devices[link].link_free_s.max(self.now_s + of.latency_s);
            ready_s = start_s + self.workload.promote_part_s(device, model, task.shard, bytes);
            self.devices[link].link_free_s = ready_s;
            self.result.promotions += 1;
            let promoted = self.result.promoted_bytes.filter(|_| cost.bytes.is_some());
            self.result.promoted_bytes = promoted.map(|sum| sum.saturating_add(bytes));
            self.record(device, model, &task, Occupation::Promote { bytes }, (start_s, ready_s));
            if of.keeps_copies {
                parts.for_each(|part| self.cache(device, (model, task.shard), &part));
            }
        } else {
            self.result.promotions_saved += 1;
        }
        let claim = Claim { model, replica, task, committed_s: self.now_s, ready_s };
        self.devices[device].next = Some(claim);
        self.promote_inputs(device, &claim);
        self.start(device);
        if self.models[model].replicas() > 1 {
            self.release(model);
        }
    }
}

impl Offers {
    /// Removes a model from the queue; returns whether it was there.
    pub(super) fn dequeue(&mut self, model: usize) -> bool {
        let Some(place) = self.queue.place(ModelIndex(model)).copied() else { return false };
        self.cached.leave(model, &place);
        self.queue.remove(ModelIndex(model)).is_some()
    }

    /// The models that are offered to a requesting device, except the one that it computes.
    fn offered(&self) -> &Queue {
        if self.queue.is_empty() { &self.joinable } else { &self.queue }
    }

    pub(super) fn some_claimable(&self) -> Vec<ModelIndex> {
        self.offered().iter().take(SHOWN).map(|model| model.model).collect()
    }
}

fn view(model: usize, state: &ModelProgress, next: &ShardTask, continues: bool) -> ModelView {
    ModelView {
        model: ModelIndex(model),
        remaining_s: state.left_s(),
        submitted: model as u64,
        next_shard: next.shard,
        cached: false,
        continues,
        ran_on: None,
    }
}
