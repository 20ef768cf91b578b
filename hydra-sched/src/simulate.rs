//! A discrete-event simulation of a run, with the policies that real runs use.
//!
//! Virtual time jumps from event to event: a shard task ends, a promotion ends, a model arrives or
//! its optimizer is done. The rules are those of the engine.
//!
//! - A model has at most one shard task computing, and its shard tasks run in order.
//! - When a shard task starts, its device commits to the next one and promotes that one's
//!   parameters into its one buffer slot. Without prefetching it commits when it is free.
//! - A shard task can be committed to when the masters it reads are final: after the backward of
//!   the previous minibatch and the optimizer's step. What follows on a model's shard task can be
//!   committed to while that computes, on the same device.
//! - The host has one optimizer for all models. It takes their shards one after another, in the order in which
//!   their backwards end; a step of no time waits for none before it.
//! - A promotion takes the link for its time, in the order of commitments. A copy that is still on
//!   the device in the right version is not promoted again.
//! - What a shard task made goes down to the host, in the time that the workload says; until then only
//!   the device that made it can go on with the model.
//! - Between commitment and promotion lies the device's latency. Nothing else takes time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use crate::claimable::ordered;
use crate::program::ShardTask;
use crate::progress::Model;
use crate::resident::{Copies, Resident};
use crate::sum::Sum;
use crate::{
    Asking, LowerBounds, ModelIndex, ModelView, Policy, Queue, ShardTaskKind, SimulationError, Workload,
    WorkloadError,
};

/// How a simulation runs, beside what the workload says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulationOptions {
    /// Devices commit to their next shard task when the current one starts, and promote its
    /// parameters meanwhile.
    pub prefetch: bool,
    /// Keep every shard task and promotion in [`Simulation::spans`]. Without it the memory that a
    /// simulation uses grows with the models, devices and shards, and not with the shard tasks.
    pub record: bool,
}

impl Default for SimulationOptions {
    fn default() -> Self {
        Self { prefetch: true, record: false }
    }
}

/// What occupied a device or its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupation {
    /// A shard task computed.
    Compute(ShardTaskKind),
    /// Parameters were promoted.
    Promote,
}

/// One bar of a Gantt chart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The device, or the device whose buffer a promotion filled.
    pub device: usize,
    /// The task's index in the workload.
    pub task: usize,
    /// The minibatch.
    pub minibatch: u64,
    /// The shard.
    pub shard: usize,
    /// What happened.
    pub what: Occupation,
    /// Start in seconds from the start of the run.
    pub start_s: f64,
    /// End in seconds from the start of the run.
    pub end_s: f64,
}

/// What came of a simulated run.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// The policy's name.
    pub policy: &'static str,
    /// From the start of the run to the end of the last shard task, in seconds.
    pub makespan_s: f64,
    /// When the first shard task started, in seconds from the start of the run.
    pub first_start_s: f64,
    /// No schedule is shorter; see [`LowerBounds`].
    pub bounds: LowerBounds,
    /// Seconds of compute, per device.
    pub busy_s: Vec<f64>,
    /// Shard tasks that ran.
    pub shard_tasks: u64,
    /// Promotions that took a link, and those that a copy on the device saved.
    pub promotions: u64,
    /// Shard tasks whose parameters were still on the device.
    pub promotions_saved: u64,
    /// Bytes of the parameters that were promoted; `None` where the size of one of them is not known.
    pub promoted_bytes: Option<u64>,
    /// Seconds in which a device had committed to a shard task and waited for its parameters.
    pub promotion_wait_s: f64,
    /// How often the policy was asked with something to choose from, the times at which it took nothing included.
    pub decisions: u64,
    /// When each task was over, in seconds from the start of the run.
    pub finished_s: Vec<f64>,
    /// Every shard task and promotion in order of their starts, if they were recorded.
    pub spans: Vec<Span>,
}

impl Simulation {
    /// Each device's share of the makespan in which it computed.
    pub fn utilization(&self) -> Vec<f64> {
        let share = |busy: &f64| if self.makespan_s > 0.0 { busy / self.makespan_s } else { 0.0 };
        self.busy_s.iter().map(share).collect()
    }

    /// The makespan over the best lower bound; 1 when both are 0, and infinite when only the bound is.
    pub fn gap(&self) -> f64 {
        let bound = self.bounds.best_s();
        if bound > 0.0 || self.makespan_s > 0.0 { self.makespan_s / bound } else { 1.0 }
    }
}

/// Runs a workload under a policy. The same workload, policy and options give the same result,
/// bit for bit.
///
/// # Errors
///
/// [`SimulationError::Workload`] when the workload breaks a rule of [`Workload::check`];
/// [`SimulationError::NotClaimable`] when the policy answers with a model that it was not shown, and
/// [`SimulationError::Stuck`] when it answers with none while nothing is under way that it could wait for.
pub fn simulate(
    workload: &Workload,
    policy: &mut dyn Policy,
    options: SimulationOptions,
) -> Result<Simulation, SimulationError> {
    workload.check()?;
    let bounds = LowerBounds::of_valid(workload, options.prefetch);
    let mut run = Run::new(workload, policy, options)?;
    run.work()?;
    Ok(run.result(bounds))
}

/// Claimable models that an error names.
const SHOWN: usize = 8;

/// A shard task that a device has committed to or computes.
#[derive(Clone, Copy)]
struct Claim {
    model: usize,
    task: ShardTask,
    committed_s: f64,
    /// When its parameters are on the device.
    ready_s: f64,
}

struct Device {
    active: Option<(Claim, f64)>,
    /// The model that it computes or computed last.
    last: Option<usize>,
    next: Option<Claim>,
    free_since_s: f64,
    copies: Copies,
    link: usize,
    busy_s: f64,
    /// Its place in the order in which idle devices are served: the fast ones first.
    rank: usize,
}

/// What happens at a time; at the same time in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    End {
        device: usize,
    },
    /// The masters that a model waited for are final, or its inputs are there, or it arrives.
    Final {
        model: usize,
    },
    Promoted {
        device: usize,
    },
}

struct Run<'a> {
    workload: &'a Workload,
    policy: &'a mut dyn Policy,
    options: SimulationOptions,
    now_s: f64,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    models: Vec<Model>,
    devices: Vec<Device>,
    /// Devices by rank.
    ranked: Vec<usize>,
    /// When each link is free.
    links_s: Vec<f64>,
    /// When the host optimizer has stepped all that it was given.
    host_s: f64,
    /// Models that no device computes or has committed to.
    queue: Queue,
    /// Models that wait for their masters, by when they become claimable, for a policy that waits.
    waiting: BTreeMap<(u64, usize), ModelView>,
    /// Devices that could commit, as (computes, rank): the idle ones are served first.
    hungry: BTreeSet<(bool, usize)>,
    /// Devices by rank whose own model may have become claimable.
    touched: BTreeSet<usize>,
    /// Devices that the policy holds back until something happens.
    held: Vec<(bool, usize)>,
    /// Those of them, by rank, that could have gone on with the model that they compute: nothing else may be there
    /// to be asked about when something happens.
    held_with_own: Vec<usize>,
    /// Of the models in the queue.
    resident: Resident,
    /// Estimated seconds of compute left of all models.
    left_s: Sum,
    speeds: f64,
    result: Simulation,
}

impl<'a> Run<'a> {
    fn new(
        workload: &'a Workload,
        policy: &'a mut dyn Policy,
        options: SimulationOptions,
    ) -> Result<Self, WorkloadError> {
        let model = |task: &crate::TaskCost| -> Result<Model, WorkloadError> {
            Ok(Model::new(task, task.estimates()?))
        };
        let models: Vec<Model> = workload.tasks.iter().map(model).collect::<Result<_, _>>()?;
        let left_s = Sum::new(&models.iter().map(Model::left_s).collect::<Vec<f64>>());
        let ranked = fast_first(workload);
        let devices = devices(workload, &ranked);
        let resident = Resident::new(devices.len(), models.len());
        let result = Simulation {
            policy: policy.name(),
            makespan_s: 0.0,
            first_start_s: f64::INFINITY,
            bounds: LowerBounds::default(),
            busy_s: Vec::new(),
            shard_tasks: 0,
            promotions: 0,
            promotions_saved: 0,
            promoted_bytes: Some(0),
            promotion_wait_s: 0.0,
            decisions: 0,
            finished_s: vec![0.0; models.len()],
            spans: Vec::new(),
        };
        Ok(Self {
            workload,
            policy,
            options,
            now_s: 0.0,
            events: BinaryHeap::new(),
            queue: Queue::new(models.len()),
            waiting: BTreeMap::new(),
            hungry: (0..devices.len()).map(|rank| (false, rank)).collect(),
            touched: BTreeSet::new(),
            host_s: 0.0,
            links_s: vec![0.0; if workload.shared_link { 1 } else { devices.len() }],
            models,
            devices,
            ranked,
            held: Vec::new(),
            held_with_own: Vec::new(),
            resident,
            left_s,
            speeds: workload.devices.iter().map(|device| device.speed).sum(),
            result,
        })
    }

    fn work(&mut self) -> Result<(), SimulationError> {
        for (model, task) in self.workload.tasks.iter().enumerate() {
            self.events.push(Reverse((ordered(task.arrival_s), Event::Final { model })));
        }
        while let Some(Reverse((key, event))) = self.events.pop() {
            self.now_s = unordered(key);
            self.handle(event);
            while let Some(Reverse((_, event))) = self.pop_at(key) {
                self.handle(event);
            }
            self.commit()?;
        }
        self.all_is_done()
    }

    /// When no event is left, nothing computes, is promoted or stepped, and no model arrives. Work that is left
    /// then is what the policy would not take.
    fn all_is_done(&self) -> Result<(), SimulationError> {
        let shard_tasks = self.workload.shard_tasks();
        let left = shard_tasks - self.result.shard_tasks;
        if left == 0 {
            return Ok(());
        }
        Err(SimulationError::Stuck {
            policy: self.result.policy,
            at_s: self.now_s,
            decisions: self.result.decisions,
            left,
            shard_tasks,
            count: self.queue.len(),
            claimable: self.some_claimable(),
        })
    }

    fn some_claimable(&self) -> Vec<ModelIndex> {
        self.queue.iter().take(SHOWN).map(|model| model.model).collect()
    }

    fn pop_at(&mut self, key: u64) -> Option<Reverse<(u64, Event)>> {
        let same = self.events.peek().is_some_and(|Reverse((next, _))| *next == key);
        if same { self.events.pop() } else { None }
    }

    fn at(&mut self, time_s: f64, event: Event) {
        self.events.push(Reverse((ordered(time_s), event)));
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::End { device } => self.end(device),
            Event::Final { model } => self.release(model),
            Event::Promoted { device } => self.start(device),
        }
    }

    /// A shard task is over: what it took corrects the estimate, and the device goes on.
    fn end(&mut self, device: usize) {
        let state = &mut self.devices[device];
        let Some((claim, start_s)) = state.active.take() else { return };
        let Claim { model, task, .. } = claim;
        let took_s = self.now_s - start_s;
        state.busy_s += took_s;
        state.free_since_s = self.now_s;
        self.hungry.remove(&(true, state.rank));
        if state.next.is_none() {
            self.hungry.insert((false, state.rank));
        }
        let state = &mut self.models[model];
        state.runs_on = None;
        state.cost.observe(task.kind, task.shard, took_s * self.workload.devices[device].speed);
        self.result.finished_s[model] = self.now_s;
        if task.kind == ShardTaskKind::Backward {
            self.step(device, model, task.shard);
        }
        self.take_down(model, &task);
        self.count_left(model);
        self.release(model);
        self.start(device);
    }

    /// The host optimizer steps a shard's masters, when it has stepped what was given to it before; the copy on the
    /// device is stale.
    fn step(&mut self, device: usize, model: usize, shard: usize) {
        self.devices[device].copies.forget(model as u32, shard as u32);
        let cost = &self.workload.tasks[model];
        let step_s = cost.step_s();
        let stepped_s = if step_s > 0.0 { self.host_s.max(self.now_s) + step_s } else { self.now_s };
        self.host_s = self.host_s.max(stepped_s);
        let final_s = stepped_s + cost.step_wait_s;
        self.models[model].final_s[shard] = final_s;
        if shard == 0 {
            self.models[model].waited_s = final_s - self.now_s;
        }
        if final_s > self.now_s {
            self.at(final_s, Event::Final { model });
        }
    }

    /// What a shard task made for the next one of its sweep goes to the host.
    fn take_down(&mut self, model: usize, task: &ShardTask) {
        let shards = &self.workload.tasks[model].shards;
        let made = task.kind.following(task.shard, shards.len()).is_some();
        let down_s = self.now_s + if made { shards[task.shard].take_down_s } else { 0.0 };
        self.models[model].down_s = down_s;
        // Nothing waits where the device has gone on with the model.
        if down_s > self.now_s && !self.models[model].claimed {
            self.at(down_s, Event::Final { model });
        }
    }

    /// Lets devices commit to a model's next shard task, if its masters are final.
    fn release(&mut self, model: usize) {
        let state = &self.models[model];
        let Some(next) = state.claimable(self.now_s) else { return self.wait(model) };
        if let Some(ready_s) = state.ready_s() {
            self.waiting.remove(&(ordered(ready_s), model));
        }
        match state.runs_on {
            Some(device) => {
                self.touched.insert(self.devices[device].rank);
            }
            None => self.enqueue(model, &next, false),
        }
    }

    /// Puts a model into the queue, or into its new place.
    fn enqueue(&mut self, model: usize, next: &ShardTask, continues: bool) {
        self.dequeue(model);
        self.queue.insert(&*self.policy, view(model, &self.models[model], next, continues));
        let Some(place) = self.queue.place(ModelIndex(model)).copied() else { return };
        let devices = &self.devices;
        let has = |device: usize| devices[device].copies.has(model as u32, next.shard as u32, next.minibatch);
        self.resident.enter(model, next.minibatch, place, has);
    }

    /// Takes a model out of the queue; whether it was there.
    fn dequeue(&mut self, model: usize) -> bool {
        let Some(place) = self.queue.place(ModelIndex(model)).copied() else { return false };
        self.resident.leave(model, &place);
        self.queue.remove(ModelIndex(model)).is_some()
    }

    /// Notes a model that becomes claimable at a time that is known, when its masters are final.
    fn wait(&mut self, model: usize) {
        if !self.policy.waits() {
            return;
        }
        let state = &self.models[model];
        let (Some(next), Some(ready_s)) = (state.next, state.ready_s()) else { return };
        let place = (ordered(ready_s), model);
        if state.final_s[next.shard] > self.now_s {
            self.waiting.insert(place, view(model, state, &next, false));
        } else {
            self.waiting.remove(&place);
        }
    }

    /// The longest of the models that wait for their masters and can be promoted before the device's shard task ends,
    /// by the estimate of that.
    fn soon(&self, device: usize) -> Option<ModelView> {
        let (claim, start_s) = self.devices[device].active?;
        let of = &self.workload.devices[device];
        let end_s = start_s + self.models[claim.model].cost.of(claim.task.kind, claim.task.shard) / of.speed;
        let promoted = |(&(ready_s, _), view): (&(u64, usize), &ModelView)| {
            let promote_s = self.workload.promote_s(device, view.model.0, view.next_shard);
            (*view, unordered(ready_s) + of.latency_s + promote_s)
        };
        let ready = self.waiting.range(..=(ordered(end_s), usize::MAX)).map(promoted);
        Asking::longest_in_time(ready, end_s)
    }

    /// Lets every device commit that can: idle ones first, fast ones first among them.
    fn commit(&mut self) -> Result<(), SimulationError> {
        for (_, rank) in std::mem::take(&mut self.held) {
            let state = &self.devices[self.ranked[rank]];
            if state.next.is_none() {
                self.hungry.insert((state.active.is_some(), rank));
            }
        }
        self.touched.extend(self.held_with_own.drain(..));
        loop {
            let asks = if self.queue.is_empty() { None } else { self.hungry.first().copied() };
            if let Some((_, rank)) = asks {
                self.claim(self.ranked[rank])?;
            } else if let Some(rank) = self.touched.pop_first() {
                // Nothing waits, but a device may go on with the model that it computes.
                if self.hungry.contains(&(true, rank)) {
                    self.claim(self.ranked[rank])?;
                }
            } else {
                return Ok(());
            }
        }
    }

    /// Asks the policy for the device's next shard task and commits to it.
    fn claim(&mut self, device: usize) -> Result<(), SimulationError> {
        let running = self.devices[device].active.map(|(claim, _)| claim.model);
        if let Some(model) = running {
            let state = &self.models[model];
            if let Some(next) = state.claimable(self.now_s) {
                self.enqueue(model, &next, true);
            }
        }
        let chosen = self.ask(device);
        if let Some(found) = chosen.filter(|found| self.queue.get(*found).is_none()) {
            return Err(self.not_claimable(device, found));
        }
        let own = running.is_some_and(|model| self.dequeue(model));
        match chosen {
            Some(ModelIndex(model)) => {
                self.dequeue(model);
                self.promote(device, model);
            }
            None => self.hold(device, own),
        }
        Ok(())
    }

    /// The error that says what the policy was just asked, and answered.
    fn not_claimable(&self, device: usize, found: ModelIndex) -> SimulationError {
        SimulationError::NotClaimable {
            policy: self.result.policy,
            decision: self.claims(),
            device,
            at_s: self.now_s,
            found,
            task: self.workload.tasks.get(found.0).map(|task| task.name.clone()),
            count: self.queue.len(),
            claimable: self.some_claimable(),
        }
    }

    /// Asks the device no more before something happens. `own` is whether it could have gone on with the model that
    /// it computes.
    fn hold(&mut self, device: usize, own: bool) {
        let state = &self.devices[device];
        if own {
            self.held_with_own.push(state.rank);
        }
        let place = (state.active.is_some(), state.rank);
        if !self.queue.is_empty() && self.hungry.remove(&place) {
            self.held.push(place);
        }
    }

    /// The model that the device computes or computed last, if no other did since and its masters are waited for.
    fn awaited(&self, device: usize) -> Option<ModelView> {
        let model = self.devices[device].last?;
        let state = &self.models[model];
        let next = state.next.filter(|_| !state.claimed && state.ran_on == Some(device))?;
        let continues = state.runs_on == Some(device);
        (state.final_s[next.shard] > self.now_s).then(|| view(model, state, &next, continues))
    }

    /// Estimated seconds to the end of a model that waits for no other.
    fn alone_s(&self, device: usize, model: &ModelView) -> f64 {
        let index = model.model.0;
        let (state, cost) = (&self.models[index], &self.workload.tasks[index]);
        let minibatches = state.next.map_or(0, |next| cost.minibatches - next.minibatch);
        let wait_s = state.waited_s + self.workload.promote_s(device, index, 0);
        model.remaining_s / self.workload.devices[device].speed + minibatches as f64 * wait_s
    }

    /// Brings the sum of what is left up to date with one model.
    fn count_left(&mut self, model: usize) {
        if !self.policy.waits() {
            return;
        }
        self.left_s.set(model, self.models[model].left_s());
    }

    fn ask(&mut self, device: usize) -> Option<ModelIndex> {
        if self.queue.is_empty() {
            return None;
        }
        #[cfg(test)]
        self.check_sums(device);
        let asking = self.asking(device);
        self.result.decisions += 1;
        self.queue.choose_near(&mut *self.policy, &asking, self.resident.of(device))
    }

    /// What is kept up to date from event to event is what it would be from scratch.
    #[cfg(test)]
    fn check_sums(&self, device: usize) {
        if self.result.decisions > 64 && !self.result.decisions.is_multiple_of(64) {
            return;
        }
        let there = |view: &&ModelView| {
            let next = self.models[view.model.0].next.unwrap();
            let copies = &self.devices[device].copies;
            copies.has(view.model.0 as u32, next.shard as u32, next.minibatch)
        };
        let resident = self.queue.iter().filter(there).map(|view| *self.queue.place(view.model).unwrap());
        assert_eq!(*self.resident.of(device), resident.collect());
        if self.policy.waits() {
            let left_s: Vec<f64> = self.models.iter().map(Model::left_s).collect();
            assert_eq!(self.left_s.get(), Sum::new(&left_s).get());
        }
    }

    /// Shard tasks that devices have committed to: each was promoted, or was there.
    const fn claims(&self) -> u64 {
        self.result.promotions + self.result.promotions_saved
    }

    fn asking(&self, device: usize) -> Asking {
        let asking = Asking::new(device, self.devices.len(), self.claims());
        if !self.policy.waits() {
            return asking;
        }
        let awaited = self.awaited(device);
        Asking {
            awaited,
            awaited_s: awaited.map_or(0.0, |model| self.alone_s(device, &model)),
            soon: self.soon(device),
            even_s: self.left_s.get() / self.speeds,
            ..asking
        }
    }

    /// Commits the device to the model's next shard task and brings its parameters there.
    fn promote(&mut self, device: usize, model: usize) {
        let Some(task) = self.models[model].claim() else { return };
        self.count_left(model);
        let of = &self.workload.devices[device];
        let state = &mut self.devices[device];
        self.hungry.remove(&(state.active.is_some(), state.rank));
        let mut ready_s = self.now_s;
        if of.keeps_copies && state.copies.touch(model as u32, task.shard as u32, task.minibatch) {
            self.result.promotions_saved += 1;
        } else {
            let start_s = self.links_s[state.link].max(self.now_s + of.latency_s);
            ready_s = start_s + self.workload.promote_s(device, model, task.shard);
            self.links_s[state.link] = ready_s;
            self.result.promotions += 1;
            let bytes = self.workload.tasks[model].shards[task.shard].bytes;
            let promoted = self.result.promoted_bytes.zip(bytes);
            self.result.promoted_bytes = promoted.map(|(sum, bytes)| sum.saturating_add(bytes));
            self.record(device, model, &task, Occupation::Promote, (start_s, ready_s));
            if of.keeps_copies {
                self.keep(device, model, &task, bytes.unwrap_or(0));
            }
        }
        self.devices[device].next = Some(Claim { model, task, committed_s: self.now_s, ready_s });
        self.start(device);
    }

    /// Keeps a copy on the device, in the place of others.
    fn keep(&mut self, device: usize, model: usize, task: &ShardTask, bytes: u64) {
        let state = &mut self.devices[device];
        let computes = state.active.map(|(claim, _)| (claim.model as u32, claim.task.shard as u32));
        let goes = |model: u32, shard: u32| {
            let model = model as usize;
            let needed = self.models[model].next.is_some_and(|next| next.shard == shard as usize);
            if let Some(place) = self.queue.place(ModelIndex(model)).filter(|_| needed) {
                self.resident.lose(device, model, place);
            }
        };
        state.copies.insert((model as u32, task.shard as u32), task.minibatch, bytes, computes, goes);
        self.resident.comes(device, model, task.minibatch);
    }

    /// Starts what the device has committed to, if it is free and the parameters are there.
    fn start(&mut self, device: usize) {
        let state = &mut self.devices[device];
        let Some(claim) = state.next.filter(|_| state.active.is_none()) else { return };
        if claim.ready_s > self.now_s {
            self.at(claim.ready_s, Event::Promoted { device });
            return;
        }
        let Claim { model, task, .. } = claim;
        let speed = self.workload.devices[device].speed;
        let end_s = self.now_s + self.workload.seconds(model, task.minibatch, task.kind, task.shard) / speed;
        let waited_s = self.now_s - state.free_since_s.max(claim.committed_s);
        state.next = None;
        state.active = Some((claim, self.now_s));
        state.last = Some(model);
        let rank = state.rank;
        self.models[model].claimed = false;
        self.models[model].runs_on = Some(device);
        self.models[model].ran_on = Some(device);
        self.result.shard_tasks += 1;
        self.result.first_start_s = self.result.first_start_s.min(self.now_s);
        self.result.promotion_wait_s += waited_s;
        self.record(device, model, &task, Occupation::Compute(task.kind), (self.now_s, end_s));
        self.at(end_s, Event::End { device });
        if self.options.prefetch {
            self.hungry.insert((true, rank));
            self.touched.insert(rank);
        }
    }

    fn record(&mut self, device: usize, task: usize, of: &ShardTask, what: Occupation, at: (f64, f64)) {
        if self.options.record {
            let (start_s, end_s) = at;
            let span = Span { device, task, minibatch: of.minibatch, shard: of.shard, what, start_s, end_s };
            self.result.spans.push(span);
        }
    }

    fn result(mut self, bounds: LowerBounds) -> Simulation {
        self.result.bounds = bounds;
        self.result.makespan_s = self.result.finished_s.iter().copied().fold(0.0, f64::max);
        self.result.busy_s = self.devices.iter().map(|device| device.busy_s).collect();
        self.result.spans.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
        self.result
    }
}

fn view(model: usize, state: &Model, next: &ShardTask, continues: bool) -> ModelView {
    ModelView {
        model: ModelIndex(model),
        remaining_s: state.remaining_s(next),
        submitted: model as u64,
        next_shard: next.shard,
        resident: false,
        continues,
    }
}

/// The devices in the order in which idle ones are served.
fn fast_first(workload: &Workload) -> Vec<usize> {
    let speed = |device: &usize| workload.devices[*device].speed;
    let mut ranked: Vec<usize> = (0..workload.devices.len()).collect();
    ranked.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
    ranked
}

fn devices(workload: &Workload, ranked: &[usize]) -> Vec<Device> {
    let mut ranks = vec![0; ranked.len()];
    ranked.iter().enumerate().for_each(|(rank, device)| ranks[*device] = rank);
    let device = |(index, rank): (usize, usize)| Device {
        active: None,
        last: None,
        next: None,
        free_since_s: 0.0,
        copies: Copies::new(workload.devices[index].memory_bytes),
        link: if workload.shared_link { 0 } else { index },
        busy_s: 0.0,
        rank,
    };
    ranks.into_iter().enumerate().map(device).collect()
}

/// The number whose [`ordered`] bits these are.
fn unordered(key: u64) -> f64 {
    f64::from_bits(if key >> 63 == 1 { key & !(1 << 63) } else { !key })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::TestCaseResult;

    use super::*;
    use crate::conformance::any_workload;
    use crate::program::Program;
    use crate::{Claimable, DeviceCost, Draw, EvaluationCost, PolicyKind, Priority, ShardCost, TaskCost};

    fn on(tasks: Vec<TaskCost>, devices: usize) -> Workload {
        let devices = vec![DeviceCost::default(); devices];
        Workload { tasks, devices, shared_link: false, variation: None }
    }

    fn one_shard(name: &str, minibatches: u64, backward_s: f64, promote_s: f64) -> TaskCost {
        TaskCost::new(name, minibatches, vec![ShardCost::new(0.0, backward_s, promote_s)])
    }

    fn run(workload: &Workload, kind: PolicyKind) -> Simulation {
        let options = SimulationOptions { prefetch: true, record: true };
        simulate(workload, &mut *kind.build(3), options).unwrap()
    }

    fn lrtf(workload: &Workload) -> Simulation {
        run(workload, PolicyKind::ShardedLrtf)
    }

    /// The whole schedule of a lone model of two shards, by hand: the second shard's promotion
    /// hides behind the first one's forward, that of the first after a step behind nothing.
    #[test]
    fn a_lone_model_waits_for_stale_copies_only() {
        let shards = vec![ShardCost::new(1.0, 2.0, 0.5), ShardCost::new(0.0, 3.0, 0.5)];
        let result = lrtf(&on(vec![TaskCost::new("a", 2, shards)], 1));
        let compute: Vec<_> = result.spans.iter().filter(|s| s.what != Occupation::Promote).collect();
        let times: Vec<_> = compute.iter().map(|s| (s.shard, s.start_s, s.end_s)).collect();
        let expected =
            [(0, 0.5, 1.5), (1, 1.5, 4.5), (0, 4.5, 6.5), (0, 7.0, 8.0), (1, 8.0, 11.0), (0, 11.0, 13.0)];
        assert_eq!(times, expected);
        assert_eq!((result.promotions, result.promotions_saved, result.shard_tasks), (4, 2, 6));
        assert_eq!((result.makespan_s, result.bounds.chain_s, result.gap()), (13.0, 13.0, 1.0));
        assert_eq!(result.promotion_wait_s, 1.0);
        assert_eq!(result.utilization(), [12.0 / 13.0]);
    }

    #[test]
    fn a_lone_model_of_one_shard_promotes_after_every_step_and_ends() {
        let mut workload = on(vec![one_shard("a", 5, 2.0, 0.5)], 3);
        workload.tasks[0].optimizer_s = 0.25;
        for kind in PolicyKind::ALL {
            let result = run(&workload, kind);
            assert_eq!((result.makespan_s, result.promotions), (5.0 * 2.5 + 4.0 * 0.25, 5), "{kind}");
            assert_eq!(result.gap(), 1.0);
        }
    }

    /// Eight models on as many devices wait for the one optimizer of the host, which takes as long as a device for
    /// each of them: it is given the first step after a second, and when it has done those of the last minibatch but
    /// one of all, the last model computes for a second more.
    #[test]
    fn all_models_share_the_host_optimizer() {
        let model = |name: &str| TaskCost { optimizer_s: 1.0, ..one_shard(name, 10, 1.0, 0.0) };
        let mut workload = on(["a", "b", "c", "d", "e", "f", "g", "h"].map(model).into(), 8);
        for kind in PolicyKind::ALL {
            let result = run(&workload, kind);
            assert_eq!((result.makespan_s, result.bounds.host_s), (74.0, 74.0), "{kind}");
            assert_eq!(result.gap(), 1.0);
        }
        // What was waited in a recorded run is waited by each model for itself.
        workload.tasks.iter_mut().for_each(|task| (task.optimizer_s, task.step_wait_s) = (0.0, 1.0));
        let result = lrtf(&workload);
        assert_eq!((result.makespan_s, result.bounds.host_s, result.gap()), (19.0, 0.0, 1.0));
    }

    /// Shards are stepped in the order in which their backwards end, those of two models by turns, by hand: `a` ends
    /// its backwards at 1 and 2, `b` at 1.5 and 2.5, and each step takes a second.
    #[test]
    fn the_host_optimizer_takes_shards_in_the_order_of_their_backwards() {
        let model = |name: &str, arrival_s| {
            let shard = ShardCost::new(0.0, 1.0, 0.0);
            TaskCost { optimizer_s: 2.0, arrival_s, ..TaskCost::new(name, 2, vec![shard; 2]) }
        };
        let result = lrtf(&on(vec![model("a", 0.0), model("b", 0.5)], 2));
        let second = |task| {
            let starts = result.spans.iter().filter(|s| s.what != Occupation::Promote);
            let starts = starts.filter(|s| (s.task, s.minibatch) == (task, 1));
            starts.map(|s| (s.shard, s.start_s)).collect::<Vec<_>>()
        };
        // Steps end at 2 and 4 for `a`, at 3 and 5 for `b`.
        assert_eq!(second(0), [(0, 4.0), (1, 4.0), (0, 5.0)]);
        assert_eq!(second(1), [(0, 5.0), (1, 5.0), (0, 6.0)]);
    }

    /// A device that had nothing to do has waited for parameters since it committed to them only.
    #[test]
    fn a_device_waits_for_promotions_from_its_commitment_on() {
        let mut workload = on(vec![one_shard("a", 1, 1.0, 0.5)], 1);
        workload.tasks[0].arrival_s = 10.0;
        assert_eq!((lrtf(&workload).makespan_s, lrtf(&workload).promotion_wait_s), (11.5, 0.5));
    }

    #[test]
    fn another_model_hides_promotions() {
        let workload = on(vec![one_shard("a", 5, 2.0, 0.5), one_shard("b", 5, 2.0, 0.5)], 1);
        let result = lrtf(&workload);
        assert_eq!((result.makespan_s, result.promotion_wait_s), (20.5, 0.5));
        let without = SimulationOptions { prefetch: false, record: false };
        let without = simulate(&workload, &mut crate::ShardedLrtf, without).unwrap();
        assert_eq!((without.makespan_s, without.promotion_wait_s), (25.0, 5.0));
        assert!(without.spans.is_empty());
    }

    #[test]
    fn a_shared_link_is_taken_in_turns() {
        let mut workload = on(vec![one_shard("a", 1, 1.0, 2.0), one_shard("b", 1, 1.0, 2.0)], 2);
        assert_eq!(lrtf(&workload).makespan_s, 3.0);
        workload.shared_link = true;
        assert_eq!(lrtf(&workload).makespan_s, 5.0);
    }

    #[test]
    fn the_fast_device_is_served_first() {
        let mut workload = on(vec![one_shard("a", 1, 4.0, 0.0)], 3);
        workload.devices[2].speed = 4.0;
        let result = lrtf(&workload);
        assert_eq!((result.makespan_s, result.busy_s), (1.0, vec![0.0, 0.0, 1.0]));
    }

    #[test]
    fn a_model_is_not_there_before_it_arrives() {
        let mut workload = on(vec![one_shard("a", 1, 4.0, 0.0), one_shard("b", 1, 1.0, 0.0)], 2);
        workload.tasks[1].arrival_s = 10.0;
        let result = lrtf(&workload);
        assert_eq!((result.makespan_s, result.finished_s), (11.0, vec![4.0, 11.0]));
    }

    #[test]
    fn evaluations_come_before_and_after_training() {
        let shards = vec![ShardCost { evaluate_s: Some(0.25), ..ShardCost::new(1.0, 2.0, 0.5) }; 2];
        let mut workload = on(vec![TaskCost::new("a", 1, shards)], 1);
        workload.tasks[0].evaluations =
            vec![EvaluationCost { after: 0, sweeps: 1 }, EvaluationCost { after: 1, sweeps: 2 }];
        workload.tasks[0].optimizer_s = 0.5;
        let result = lrtf(&workload);
        // The stale copies come anew after the step of shard 0, and its evaluation waits for that.
        let before_s = 0.5 + 0.25 + 0.25 + 0.25;
        assert_eq!(result.makespan_s, before_s + 5.0 + 0.25 + 0.5 + 0.25 + 0.25 + 0.25 + 0.25 + 0.25);
        assert_eq!((result.shard_tasks, result.first_start_s), (9, 0.5));
        assert_eq!((result.promotions, result.bounds.chain_s), (4, result.makespan_s));
        workload.devices[0].keeps_copies = false;
        assert_eq!(lrtf(&workload).promotions, 9);
    }

    /// Where copies do not stay, the next shard task promotes its parameters anew even if the one that computes
    /// reads the same ones.
    #[test]
    fn without_copies_every_shard_task_is_promoted() {
        let mut task = one_shard("a", 2, 1.0, 0.5);
        task.evaluations =
            vec![EvaluationCost { after: 0, sweeps: 5 }, EvaluationCost { after: 2, sweeps: 5 }];
        let mut workload = on(vec![task], 1);
        workload.devices[0].keeps_copies = false;
        for kind in PolicyKind::ALL {
            let result = run(&workload, kind);
            assert_eq!((result.promotions, result.promotions_saved), (12, 0), "{kind}");
        }
        workload.devices[0].keeps_copies = true;
        assert_eq!(lrtf(&workload).promotions_saved, 9);
    }

    /// A model of one shard takes turns with another's shard tasks: its masters are final soon after these
    /// begin, and the patient policy does not commit to the next of them before that.
    #[test]
    fn the_patient_policy_commits_late_where_that_costs_nothing() {
        let mut long = one_shard("a", 20, 1.0, 0.25);
        long.optimizer_s = 0.25;
        let other = TaskCost::new("b", 1, vec![ShardCost::new(1.0, 1.0, 0.25); 5]);
        let workload = on(vec![long, other], 1);
        let gaps = |result: &Simulation| result.makespan_s - 0.25 - result.busy_s[0];
        // Nine of the nineteen gaps of half a second can be filled.
        assert_eq!(gaps(&run(&workload, PolicyKind::ShardedLrtfPatient)), 10.0 * 0.5);
        assert!(gaps(&lrtf(&workload)) > 10.0 * 0.5);
    }

    /// A device that was held back, and beside which nothing but its own model can be claimed, is asked again after
    /// every event: it promotes the next shard of `a` as soon as `x` is no longer worth waiting for.
    #[test]
    fn a_device_held_back_beside_its_own_model_is_asked_again() {
        let mut x = one_shard("x", 20, 3.0, 0.5);
        x.optimizer_s = 1.0;
        let shard = ShardCost { take_down_s: 1.0, ..ShardCost::new(4.0, 4.0, 1.0) };
        let a = TaskCost::new("a", 1, vec![shard; 4]);
        let result = run(&on(vec![x, a], 2), PolicyKind::ShardedLrtfPatient);
        assert_eq!(result.finished_s[1], 29.0);
    }

    /// A policy that writes down what it was asked with, and decides as another one does.
    struct Hears<'a> {
        policy: Box<dyn Policy>,
        heard: &'a mut Vec<Asking>,
    }

    impl Policy for Hears<'_> {
        fn name(&self) -> &'static str {
            self.policy.name()
        }

        fn priority(&self, model: &ModelView) -> Priority {
            self.policy.priority(model)
        }

        fn waits(&self) -> bool {
            true
        }

        fn pick(&mut self, asking: &Asking, from: &dyn Claimable) -> Option<ModelIndex> {
            self.heard.push(*asking);
            self.policy.pick(asking, from)
        }
    }

    fn heard(workload: &Workload, kind: PolicyKind) -> (Vec<Asking>, Simulation) {
        let mut heard = Vec::new();
        let mut policy = Hears { policy: kind.build(3), heard: &mut heard };
        let result = simulate(workload, &mut policy, SimulationOptions::default()).unwrap();
        (heard, result)
    }

    /// One device takes `late`, `near` and `here` in turn. `late` is the longest, and steps for ever; what `near` waits
    /// begins when `here` does, which takes six seconds on a device of speed 1. By hand: with `s` the start of `near`,
    /// it is promoted by `s + 1 / speed + wait + latency + promote`, and `here` ends at `s + 7 / speed`.
    #[test]
    fn soon_is_the_longest_of_those_that_come_in_time() {
        let soon = |speed: f64, promote_s: f64, latency_s: f64, wait_s: f64| {
            let waits = |name: &str, step_wait_s, minibatches, promote_s| TaskCost {
                step_wait_s,
                ..one_shard(name, minibatches, 1.0, promote_s)
            };
            let (late, near) = (waits("late", 99.0, 99, 0.0), waits("near", wait_s, 50, promote_s));
            let tasks = vec![late, near, one_shard("here", 2, 6.0, 0.0), one_shard("there", 1, 1.0, 0.0)];
            let mut workload = on(tasks, 1);
            (workload.devices[0].speed, workload.devices[0].latency_s) = (speed, latency_s);
            let heard = heard(&workload, PolicyKind::Fifo).0;
            let fourth = heard.iter().find(|asking| asking.decision == 3).unwrap();
            fourth.soon.map(|model| model.model.0)
        };
        assert_eq!((soon(1.0, 0.0, 0.0, 6.0), soon(1.0, 0.0, 0.0, 6.25)), (Some(1), None));
        assert_eq!((soon(1.0, 4.0, 0.0, 2.0), soon(1.0, 4.25, 0.0, 2.0)), (Some(1), None));
        assert_eq!((soon(1.0, 0.0, 0.5, 5.5), soon(1.0, 0.0, 0.5, 5.75)), (Some(1), None));
        assert_eq!((soon(2.0, 1.0, 0.0, 2.0), soon(2.0, 1.0, 0.0, 2.25)), (Some(1), None));
    }

    /// A model that waits only for what it made to be on the host is not waited for: `mid` can be claimed elsewhere
    /// long before `here` ends.
    #[test]
    fn what_is_on_its_way_down_is_not_soon() {
        let shard = ShardCost { take_down_s: 1.0, ..ShardCost::new(1.0, 1.0, 0.0) };
        let mid = TaskCost::new("mid", 9, vec![shard; 2]);
        let tasks = vec![mid, one_shard("here", 9, 6.0, 0.0), one_shard("there", 9, 6.0, 0.0)];
        let mut workload = on(tasks, 1);
        workload.tasks[1].step_wait_s = 99.0;
        let heard = heard(&workload, PolicyKind::RoundRobin).0;
        assert!(heard.iter().all(|asking| asking.soon.is_none()), "{heard:?}");
    }

    /// A device that was held back is asked with the number of what was claimed, and not of how often it was asked.
    #[test]
    fn a_decision_counts_when_it_came_to_something() {
        let mut long = one_shard("a", 20, 1.0, 0.25);
        long.optimizer_s = 0.25;
        let other = TaskCost::new("b", 1, vec![ShardCost::new(1.0, 1.0, 0.25); 5]);
        let (heard, result) = heard(&on(vec![long, other], 1), PolicyKind::ShardedLrtfPatient);
        let numbers: Vec<u64> = heard.iter().map(|asking| asking.decision).collect();
        assert!(result.decisions > result.shard_tasks, "it was held back");
        assert_eq!((numbers.len() as u64, numbers[0]), (result.decisions, 0));
        assert_eq!(numbers.last(), Some(&(result.shard_tasks - 1)));
        assert!(numbers.windows(2).all(|pair| pair[0] == pair[1] || pair[0] + 1 == pair[1]));
    }

    /// Two devices, the second of twice the speed, which takes the first model: it waits for it by its own speed, and
    /// an even share of all work is by both speeds.
    #[test]
    fn awaited_and_even_go_by_the_speeds_of_devices() {
        let mut long = one_shard("long", 9, 4.0, 0.5);
        long.step_wait_s = 1.0;
        let others = ["b", "c", "d"].map(|name| one_shard(name, 9, 4.0, 0.0));
        let mut workload = on(std::iter::once(long).chain(others).collect(), 2);
        workload.devices[1].speed = 2.0;
        let heard = heard(&workload, PolicyKind::Fifo).0;
        // It computes `long` from 0.5 to 2.5, and is asked when it begins: 32 seconds of compute are left at twice the
        // speed, and eight minibatches with a step and a promotion each.
        let asking = heard.iter().find(|asking| asking.device == 1 && asking.awaited.is_some()).unwrap();
        let awaited = asking.awaited.unwrap();
        assert_eq!((awaited.model.0, awaited.continues, awaited.remaining_s), (0, true, 32.0));
        assert_eq!(asking.awaited_s, 16.0 + 8.0 * 1.5);
        // No device has committed to 32 seconds of each of three models, and to 36 of `d`.
        assert_eq!(asking.even_s, (3.0 * 32.0 + 36.0) / 3.0);
    }

    /// As before, with a model in the queue while the device is held back: it is asked again in the middle of its
    /// shard task, and promotes before that ends. Of nineteen gaps, eighteen are filled.
    #[test]
    fn a_device_that_computes_is_asked_again() {
        let mut long = one_shard("a", 20, 1.0, 0.25);
        long.optimizer_s = 0.25;
        let other = |name: &str| TaskCost::new(name, 1, vec![ShardCost::new(1.0, 1.0, 0.25); 5]);
        let workload = on(vec![long, other("b"), other("c")], 1);
        let result = run(&workload, PolicyKind::ShardedLrtfPatient);
        assert_eq!(result.makespan_s - 0.25 - result.busy_s[0], 0.5);
    }

    #[test]
    fn latency_comes_before_a_promotion_and_is_hidden_with_it() {
        let mut workload = on(vec![one_shard("a", 5, 2.0, 0.5), one_shard("b", 5, 2.0, 0.5)], 1);
        workload.devices[0].latency_s = 1.0;
        assert_eq!(lrtf(&workload).makespan_s, 1.5 + 20.0);
        workload.tasks.truncate(1);
        assert_eq!(lrtf(&workload).makespan_s, 5.0 * (1.5 + 2.0));
    }

    /// A model goes on where it is without waiting for what it made, if it is claimed there before.
    #[test]
    fn what_goes_down_is_waited_for_by_other_devices_only() {
        let shard = ShardCost { take_down_s: 0.5, ..ShardCost::new(1.0, 1.0, 0.0) };
        let mut workload = on(vec![TaskCost::new("a", 2, vec![shard; 2])], 1);
        assert_eq!(lrtf(&workload).makespan_s, 2.0 * 3.0);
        let without = SimulationOptions { prefetch: false, record: false };
        let result = simulate(&workload, &mut crate::ShardedLrtf, without).unwrap();
        assert_eq!(result.makespan_s, 2.0 * 3.0 + 4.0 * 0.5, "it is not claimed before it ends");
        workload.tasks[0].optimizer_s = 2.0;
        assert_eq!(lrtf(&workload).makespan_s, 2.0 * 3.0 + 1.0, "the optimizer takes longer");
    }

    #[test]
    fn memory_keeps_copies_between_forward_and_backward() {
        let shard = |_| ShardCost { bytes: Some(10), ..ShardCost::new(1.0, 2.0, 0.1) };
        let mut workload = on(vec![TaskCost::new("a", 3, (0..8).map(shard).collect())], 1);
        let scarce = lrtf(&workload);
        // Only the last shard but one is still in the buffer on the way back.
        assert_eq!((scarce.promotions, scarce.promotions_saved), (3 * 14, 3));
        workload.devices[0].memory_bytes = Some(1_000);
        let plenty = lrtf(&workload);
        assert_eq!((plenty.promotions, plenty.promotions_saved), (3 * 8, 3 * 7));
        assert_eq!(plenty.bounds, scarce.bounds);
    }

    /// The bounds know nothing of take-downs and latencies.
    #[test]
    fn a_makespan_over_no_bound_is_no_gap_of_one() {
        let mut workload = on(vec![one_shard("a", 2, 0.0, 0.0)], 1);
        assert_eq!((lrtf(&workload).makespan_s, lrtf(&workload).gap()), (0.0, 1.0));
        workload.devices[0].latency_s = 1.0;
        let result = lrtf(&workload);
        assert_eq!((result.makespan_s, result.bounds.best_s(), result.gap()), (2.0, 0.0, f64::INFINITY));
    }

    /// Sums of bytes that no number of 64 bits holds: two copies on a device, and all that is promoted.
    #[test]
    fn sizes_too_large_to_add_up_are_no_panic() {
        let text = format!(
            r#"{{"tasks": [
                {{"name": "a", "minibatches": 2, "shards": [{{"forward_s": 1, "backward_s": 1, "promote_s": 0, "bytes": {0}}}]}},
                {{"name": "b", "minibatches": 2, "shards": [{{"forward_s": 1, "backward_s": 1, "promote_s": 0, "bytes": {0}}}]}}
            ], "devices": 1}}"#,
            1_u64 << 63
        );
        let result = lrtf(&Workload::from_json(&text).unwrap());
        assert_eq!((result.promotions, result.promoted_bytes), (4, Some(u64::MAX)));
    }

    #[test]
    fn bytes_are_counted_as_they_are_promoted() {
        let shards = [(10, 0.1), (70, 0.1), (1_000, 0.1)]
            .map(|(bytes, s)| ShardCost { bytes: Some(bytes), ..ShardCost::new(1.0, 2.0, s) });
        let mut workload = on(vec![TaskCost::new("a", 2, shards.into())], 1);
        // There is room for two copies: the second shard's is still there for its backward, the first one's is not.
        assert_eq!(lrtf(&workload).promoted_bytes, Some(2 * (10 + 70 + 1_000 + 10)));
        workload.tasks[0].shards[1].bytes = None;
        assert_eq!(lrtf(&workload).promoted_bytes, None);
    }

    /// Estimates that are wrong by a factor, for half of the models each way, are put right by the
    /// first measurements.
    #[test]
    fn wrong_estimates_are_corrected() {
        let draw = Draw { models: (8, 24), devices: (2, 6), ..Draw::default() };
        for seed in 0..40 {
            let right = draw.workload(seed);
            let mut wrong = right.clone();
            for (index, task) in wrong.tasks.iter_mut().enumerate() {
                task.estimate_factor = if index % 2 == 0 { 2.0 } else { 0.5 };
            }
            let run = |workload| {
                simulate(workload, &mut crate::ShardedLrtfPatient::default(), SimulationOptions::default())
                    .unwrap()
            };
            let (right, wrong) = (run(&right), run(&wrong));
            assert_eq!(right.bounds, wrong.bounds);
            assert!(
                wrong.makespan_s <= 1.03 * right.makespan_s,
                "seed {seed}: {} {}",
                wrong.gap(),
                right.gap()
            );
        }
    }

    /// Costs that double over the run are followed: the makespan stays near the bound, which knows
    /// what the costs turn out to be.
    #[test]
    fn drifting_costs_are_followed() {
        let draw = Draw { models: (8, 24), devices: (2, 6), ..Draw::default() };
        for seed in 0..40 {
            let mut workload = draw.workload(seed);
            workload.tasks.iter_mut().step_by(2).for_each(|task| task.drift = 1.0);
            let mut policy = crate::ShardedLrtfPatient::default();
            let result = simulate(&workload, &mut policy, SimulationOptions::default()).unwrap();
            assert!(result.gap() <= 1.05, "seed {seed}: {}", result.gap());
        }
    }

    /// The gap that docs/scheduling.md promises, on a part of the workloads that it is measured on.
    #[test]
    fn lrtf_stays_near_the_lower_bound() {
        let draw = Draw { promote_s: 0.05, optimizer: 0.05, ..Draw::default() };
        let gaps = |draw: Draw, policy: &mut dyn Policy, prefetch| -> Vec<f64> {
            let options = SimulationOptions { prefetch, record: false };
            let gap = |seed| simulate(&draw.workload(seed), policy, options).unwrap().gap();
            let mut gaps: Vec<f64> = (0..200).map(gap).collect();
            gaps.sort_by(f64::total_cmp);
            gaps
        };
        let plain = gaps(Draw::default(), &mut crate::ShardedLrtf, false);
        assert!(plain[100] <= 1.001 && plain[199] <= 1.01, "{} {}", plain[100], plain[199]);
        let patient = gaps(draw, &mut crate::ShardedLrtfPatient::default(), true);
        assert!(patient[100] <= 1.01 && patient[199] <= 1.06, "{} {}", patient[100], patient[199]);
        let fifo = gaps(draw, &mut crate::Fifo, true);
        assert!(fifo[100] > patient[199], "the drawn workloads tell policies apart: {}", fifo[100]);
    }

    #[test]
    fn the_local_policy_saves_promotions_and_loses_no_more_than_its_tolerance() {
        let (mut saved, mut saved_by_local) = (0, 0);
        for seed in 0..60 {
            let mut workload = Draw { promote_s: 0.05, shards: (1, 8), ..Draw::default() }.workload(seed);
            workload
                .tasks
                .iter_mut()
                .flat_map(|task| &mut task.shards)
                .for_each(|shard| shard.bytes = Some(1));
            workload.devices.iter_mut().for_each(|device| device.memory_bytes = Some(8));
            let options = SimulationOptions { prefetch: false, record: false };
            let plain = simulate(&workload, &mut crate::ShardedLrtf, options).unwrap();
            let local = simulate(&workload, &mut crate::ShardedLrtfLocal::default(), options).unwrap();
            saved += plain.promotions_saved;
            saved_by_local += local.promotions_saved;
            let most_s = plain.makespan_s * (1.0 + crate::ShardedLrtfLocal::TOLERANCE);
            assert!(local.makespan_s <= most_s, "seed {seed}: {} {}", local.makespan_s, plain.makespan_s);
        }
        assert!(saved_by_local as f64 > 1.2 * saved as f64, "{saved} {saved_by_local}");
    }

    /// A shard task starts after the promotion that its device made for it, and after its own when it was committed to.
    fn parameters_are_there(workload: &Workload, result: &Simulation) -> TestCaseResult {
        let mut promoted: Vec<Option<&Span>> = vec![None; workload.devices.len()];
        let mut saved = 0;
        for span in &result.spans {
            let what = (span.task, span.minibatch, span.shard);
            if span.what == Occupation::Promote {
                prop_assert_eq!(
                    promoted[span.device].replace(span),
                    None,
                    "it has one place for what is next"
                );
                let least_s = workload.promote_s(span.device, span.task, span.shard);
                prop_assert!(span.end_s >= span.start_s + least_s * (1.0 - 1e-12));
                prop_assert!(span.start_s >= workload.devices[span.device].latency_s);
            } else if let Some(promotion) = promoted[span.device].take() {
                prop_assert_eq!((promotion.task, promotion.minibatch, promotion.shard), what);
                prop_assert!(span.start_s >= promotion.end_s, "{:?} before {:?}", span, promotion);
            } else {
                prop_assert!(workload.devices[span.device].keeps_copies);
                saved += 1;
            }
        }
        prop_assert_eq!(saved, result.promotions_saved);
        Ok(())
    }

    /// By task, shard and minibatch: when the masters are final at the earliest. The host optimizer steps those of
    /// backwards that ended before, in the order of their ends.
    fn finals(workload: &Workload, compute: &[&Span]) -> BTreeMap<(usize, usize, u64), f64> {
        let backward = |span: &&Span| span.what == Occupation::Compute(ShardTaskKind::Backward);
        let mut backwards: Vec<&Span> = compute.iter().copied().filter(backward).collect();
        backwards.sort_by(|a, b| a.end_s.total_cmp(&b.end_s));
        let (mut host_s, mut final_s) = (0.0f64, BTreeMap::new());
        for same in backwards.chunk_by(|a, b| a.end_s == b.end_s) {
            let before_s = host_s.max(same[0].end_s);
            for span in same {
                let task = &workload.tasks[span.task];
                let stepped_s = if task.step_s() > 0.0 { before_s + task.step_s() } else { span.end_s };
                final_s.insert((span.task, span.shard, span.minibatch), stepped_s + task.step_wait_s);
            }
            let steps_s: f64 = same.iter().map(|span| workload.tasks[span.task].step_s()).sum();
            host_s = if steps_s > 0.0 { before_s + steps_s } else { host_s };
        }
        final_s
    }

    /// What a shard task made for the next one is on the host, unless that follows on the same device.
    fn inputs_are_there(task: &TaskCost, own: &[&Span], compute: &[&Span], prefetch: bool) -> TestCaseResult {
        for pair in own.windows(2) {
            let Occupation::Compute(kind) = pair[0].what else { continue };
            if kind.following(pair[0].shard, task.shards.len()).is_none() {
                continue;
            }
            let on_device = compute.iter().filter(|span| span.device == pair[0].device);
            let mut later = on_device.skip_while(|span| !std::ptr::eq(**span, pair[0])).skip(1);
            let follows = later.next().is_some_and(|span| std::ptr::eq(*span, pair[1]));
            let down_s = pair[0].end_s + task.shards[pair[0].shard].take_down_s;
            prop_assert!(prefetch && follows || pair[1].start_s >= down_s, "{:?} {}", pair, down_s);
        }
        Ok(())
    }

    /// Whether these spans follow one another.
    fn in_turn<'a>(spans: impl Iterator<Item = &'a Span>) -> bool {
        let spans: Vec<&Span> = spans.collect();
        spans.windows(2).all(|pair| pair[0].end_s <= pair[1].start_s)
    }

    proptest! {
        /// Everything runs, in order, one shard task of a model and of a device at a time, with
        /// the parameters there and final, and never faster than the bounds.
        #[test]
        fn every_schedule_keeps_the_rules(workload in any_workload(), prefetch: bool, seed: u64) {
            for kind in PolicyKind::ALL {
                let mut policy = kind.build(seed);
                let options = SimulationOptions { prefetch, record: true };
                let result = simulate(&workload, &mut *policy, options).unwrap();
                prop_assert_eq!(result.shard_tasks, workload.shard_tasks());
                prop_assert_eq!(result.promotions + result.promotions_saved, result.shard_tasks);
                prop_assert!(result.makespan_s >= result.bounds.best_s() * (1.0 - 1e-12));
                prop_assert!(result.makespan_s <= workload.at_most_s() * (1.0 + 1e-12));
                prop_assert!(result.spans.iter().all(|span| span.start_s <= span.end_s));
                let compute: Vec<&Span> = result.spans.iter().filter(|s| s.what != Occupation::Promote).collect();
                parameters_are_there(&workload, &result)?;
                let final_s = finals(&workload, &compute);
                for (index, task) in workload.tasks.iter().enumerate() {
                    let own: Vec<&Span> = compute.iter().copied().filter(|s| s.task == index).collect();
                    let order: Vec<_> = own.iter().map(|s| (s.minibatch, s.what, s.shard)).collect();
                    let expected: Vec<_> = Program::of(task)
                        .tasks()
                        .map(|of| (of.minibatch, Occupation::Compute(of.kind), of.shard))
                        .collect();
                    prop_assert_eq!(order, expected);
                    prop_assert!(in_turn(own.iter().copied()));
                    prop_assert!(own[0].start_s >= task.arrival_s);
                    for span in &own {
                        let stepped = span.minibatch.checked_sub(1).map(|before| (index, span.shard, before));
                        let final_s = stepped.map_or(0.0, |of| final_s[&of]);
                        prop_assert!(span.start_s >= final_s - 1e-9, "{span:?} before {final_s}");
                    }
                    inputs_are_there(task, &own, &compute, prefetch)?;
                }
                for device in 0..workload.devices.len() {
                    prop_assert!(in_turn(compute.iter().copied().filter(|s| s.device == device)));
                }
                let promotes = || result.spans.iter().filter(|s| s.what == Occupation::Promote);
                let links = if workload.shared_link { 1 } else { workload.devices.len() };
                for link in 0..links {
                    prop_assert!(in_turn(promotes().filter(|s| links == 1 || s.device == link)));
                }
            }
        }

        #[test]
        fn the_same_seed_gives_the_same_schedule(workload in any_workload(), seed: u64) {
            for kind in PolicyKind::ALL {
                let options = SimulationOptions { prefetch: true, record: true };
                let once = simulate(&workload, &mut *kind.build(seed), options).unwrap();
                prop_assert_eq!(&once, &simulate(&workload, &mut *kind.build(seed), options).unwrap());
                let silent = SimulationOptions { record: false, ..options };
                let silent = simulate(&workload, &mut *kind.build(seed), silent).unwrap();
                prop_assert_eq!(Simulation { spans: Vec::new(), ..once }, silent);
            }
        }
    }
}
