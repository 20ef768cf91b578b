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
//! - A promotion takes the link for its time, in the order of commitments. A copy that is still on
//!   the device in the right version is not promoted again.
//! - Nothing else takes time: not decisions, not activations or gradients going down to the host.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use crate::claimable::ordered;
use crate::resident::Copies;
use crate::{
    Asking, CostModel, LowerBounds, ModelIndex, ModelView, Policy, Queue, ShardTaskKind, WorkLeft, Workload,
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
    /// Seconds in which a device had committed to a shard task and waited for its parameters.
    pub promotion_wait_s: f64,
    /// How often the policy was asked with something to choose from.
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

    /// The makespan over the best lower bound; 1 when both are 0.
    pub fn gap(&self) -> f64 {
        let bound = self.bounds.best_s();
        if bound > 0.0 { self.makespan_s / bound } else { 1.0 }
    }
}

/// Runs a workload under a policy. The same workload, policy and options give the same result,
/// bit for bit.
///
/// # Errors
///
/// [`WorkloadError`] when the workload breaks a rule of [`Workload::check`].
pub fn simulate(
    workload: &Workload,
    policy: &mut dyn Policy,
    options: SimulationOptions,
) -> Result<Simulation, WorkloadError> {
    workload.check()?;
    let bounds = LowerBounds::of(workload, options.prefetch);
    let mut run = Run::new(workload, policy, options)?;
    run.work();
    Ok(run.result(bounds))
}

/// A shard task of one model.
#[derive(Clone, Copy, Debug)]
struct ShardTask {
    minibatch: u64,
    kind: ShardTaskKind,
    shard: usize,
}

/// A model in the middle of the run.
struct Model {
    cost: CostModel,
    minibatches: u64,
    /// The first shard task that no device has committed to.
    next: Option<ShardTask>,
    /// A device has committed to a shard task that has not started.
    claimed: bool,
    /// The device that computes it.
    runs_on: Option<usize>,
    /// Per shard: when its masters are final; infinite until that is known.
    final_s: Vec<f64>,
}

impl Model {
    fn new(cost: CostModel, minibatches: u64, arrival_s: f64) -> Self {
        let shards = cost.shards();
        let (kind, shard) = ShardTaskKind::training_start(shards);
        Self {
            cost,
            minibatches,
            next: Some(ShardTask { minibatch: 0, kind, shard }),
            claimed: false,
            runs_on: None,
            final_s: vec![arrival_s; shards],
        }
    }

    /// The next shard task, if a device may commit to it at this time.
    fn claimable(&self, now_s: f64) -> Option<ShardTask> {
        self.next.filter(|next| !self.claimed && self.final_s[next.shard] <= now_s)
    }

    /// Estimated seconds from `next` on.
    fn remaining_s(&self, next: &ShardTask) -> f64 {
        let sweeps = self.minibatches - next.minibatch - 1;
        let position = Some((next.kind, next.shard));
        self.cost.remaining_s(&WorkLeft { sweeps, evaluations: 0, position })
    }

    fn claim(&mut self) -> Option<ShardTask> {
        let task = self.next?;
        self.claimed = true;
        let shards = self.cost.shards();
        self.next = match task.kind.following(task.shard, shards) {
            Some((kind, shard)) => Some(ShardTask { kind, shard, ..task }),
            None if task.minibatch + 1 == self.minibatches => None,
            None => {
                let (kind, shard) = ShardTaskKind::training_start(shards);
                Some(ShardTask { minibatch: task.minibatch + 1, kind, shard })
            }
        };
        if task.kind == ShardTaskKind::Backward {
            self.final_s[task.shard] = f64::INFINITY;
        }
        Some(task)
    }
}

/// A shard task that a device has committed to or computes.
#[derive(Clone, Copy)]
struct Claim {
    model: usize,
    task: ShardTask,
    /// When its parameters are on the device.
    ready_s: f64,
}

struct Device {
    active: Option<(Claim, f64)>,
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
    End { device: usize },
    /// The masters that a model waited for are final, or it arrives.
    Final { model: usize },
    Promoted { device: usize },
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
    /// Models that no device computes or has committed to.
    queue: Queue,
    /// Devices that could commit, as (computes, rank): the idle ones are served first.
    hungry: BTreeSet<(bool, usize)>,
    /// Devices by rank whose own model may have become claimable.
    touched: BTreeSet<usize>,
    resident: Vec<ModelIndex>,
    result: Simulation,
}

impl<'a> Run<'a> {
    fn new(
        workload: &'a Workload,
        policy: &'a mut dyn Policy,
        options: SimulationOptions,
    ) -> Result<Self, WorkloadError> {
        let model = |task: &crate::TaskCost| -> Result<Model, WorkloadError> {
            Ok(Model::new(task.estimates()?, task.minibatches, task.arrival_s))
        };
        let models: Vec<Model> = workload.tasks.iter().map(model).collect::<Result<_, _>>()?;
        let ranked = fast_first(workload);
        let devices = devices(workload, &ranked);
        let result = Simulation {
            policy: policy.name(),
            makespan_s: 0.0,
            bounds: LowerBounds::default(),
            busy_s: Vec::new(),
            shard_tasks: 0,
            promotions: 0,
            promotions_saved: 0,
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
            hungry: (0..devices.len()).map(|rank| (false, rank)).collect(),
            touched: BTreeSet::new(),
            links_s: vec![0.0; if workload.shared_link { 1 } else { devices.len() }],
            models,
            devices,
            ranked,
            resident: Vec::new(),
            result,
        })
    }

    fn work(&mut self) {
        for (model, task) in self.workload.tasks.iter().enumerate() {
            self.events.push(Reverse((ordered(task.arrival_s), Event::Final { model })));
        }
        while let Some(Reverse((key, event))) = self.events.pop() {
            self.now_s = unordered(key);
            self.handle(event);
            while let Some(Reverse((_, event))) = self.pop_at(key) {
                self.handle(event);
            }
            self.commit();
        }
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
        self.release(model);
        self.start(device);
    }

    /// The host optimizer steps a shard's masters; the copy on the device is stale.
    fn step(&mut self, device: usize, model: usize, shard: usize) {
        self.devices[device].copies.forget(model as u32, shard as u32);
        let cost = &self.workload.tasks[model];
        let final_s = self.now_s + cost.optimizer_s / cost.shards.len() as f64;
        self.models[model].final_s[shard] = final_s;
        if final_s > self.now_s {
            self.at(final_s, Event::Final { model });
        }
    }

    /// Lets devices commit to a model's next shard task, if its masters are final.
    fn release(&mut self, model: usize) {
        let state = &self.models[model];
        let Some(next) = state.claimable(self.now_s) else { return };
        match state.runs_on {
            Some(device) => {
                self.touched.insert(self.devices[device].rank);
            }
            None => self.queue.insert(&*self.policy, view(model, state, &next, false)),
        }
    }

    /// Lets every device commit that can: idle ones first, fast ones first among them.
    fn commit(&mut self) {
        loop {
            let asks = if self.queue.is_empty() { None } else { self.hungry.first().copied() };
            if let Some((_, rank)) = asks {
                self.claim(self.ranked[rank]);
            } else if let Some(rank) = self.touched.pop_first() {
                // Nothing waits, but a device may go on with the model that it computes.
                if self.hungry.contains(&(true, rank)) {
                    self.claim(self.ranked[rank]);
                }
            } else {
                return;
            }
        }
    }

    /// Asks the policy for the device's next shard task and commits to it.
    fn claim(&mut self, device: usize) {
        let running = self.devices[device].active.map(|(claim, _)| claim.model);
        if let Some(model) = running {
            let state = &self.models[model];
            if let Some(next) = state.claimable(self.now_s) {
                self.queue.insert(&*self.policy, view(model, state, &next, true));
            }
        }
        let chosen = self.ask(device);
        if let Some(model) = running {
            self.queue.remove(ModelIndex(model));
        }
        if let Some(ModelIndex(model)) = chosen {
            self.queue.remove(ModelIndex(model));
            self.promote(device, model);
        }
    }

    fn ask(&mut self, device: usize) -> Option<ModelIndex> {
        if self.queue.is_empty() {
            return None;
        }
        self.resident.clear();
        for copy in self.devices[device].copies.kept() {
            let model = copy.model as usize;
            let next = self.models[model].next;
            let same = |next: ShardTask| (next.shard, next.minibatch) == (copy.shard as usize, copy.version);
            if next.is_some_and(same) && self.queue.get(ModelIndex(model)).is_some() {
                self.resident.push(ModelIndex(model));
            }
        }
        let asking = Asking { device, devices: self.devices.len(), decision: self.result.decisions };
        self.result.decisions += 1;
        self.queue.choose(&mut *self.policy, &asking, &self.resident)
    }

    /// Commits the device to the model's next shard task and brings its parameters there.
    fn promote(&mut self, device: usize, model: usize) {
        let Some(task) = self.models[model].claim() else { return };
        let state = &mut self.devices[device];
        self.hungry.remove(&(state.active.is_some(), state.rank));
        let (index, shard) = (model as u32, task.shard as u32);
        let mut ready_s = self.now_s;
        if state.copies.touch(index, shard, task.minibatch) {
            self.result.promotions_saved += 1;
        } else {
            let computes = state.active.map(|(claim, _)| (claim.model as u32, claim.task.shard as u32));
            let bytes = self.workload.tasks[model].shards[task.shard].bytes.unwrap_or(0);
            state.copies.insert((index, shard), task.minibatch, bytes, computes);
            let start_s = self.links_s[state.link].max(self.now_s);
            ready_s = start_s + self.workload.promote_s(device, model, task.shard);
            self.links_s[state.link] = ready_s;
            self.result.promotions += 1;
            self.record(device, model, &task, Occupation::Promote, (start_s, ready_s));
        }
        self.devices[device].next = Some(Claim { model, task, ready_s });
        self.start(device);
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
        state.next = None;
        state.active = Some((claim, self.now_s));
        let rank = state.rank;
        self.models[model].claimed = false;
        self.models[model].runs_on = Some(device);
        self.result.shard_tasks += 1;
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
