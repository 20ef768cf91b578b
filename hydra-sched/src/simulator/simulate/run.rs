//! The events of a simulated run.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use self::downloads::Downloads;
use self::host_memory::SimulatedHostMemory;
use self::memory::UncachedBytes;
use self::processors::Processors;
use super::{Occupation, ScheduleSpan, ShardTimes, Simulation, SimulationOptions};
use crate::policy::claimable::ordered;
use crate::policy::{ModelView, Policy};
use crate::program::ShardTask;
use crate::simulator::cached::{CacheKey, Cached, CachedPart, Copies};
use crate::simulator::progress::ModelProgress;
use crate::simulator::sum::Sum;
use crate::simulator::{LowerBounds, Queue, SimulationError, TaskCost, Workload, WorkloadError};

mod claim;
mod copies;
mod downloads;
mod host_memory;
mod memory;
mod processors;

/// A shard task that a device has committed to or computes.
#[derive(Clone, Copy)]
struct Claim {
    model: usize,
    replica: usize,
    task: ShardTask,
    committed_s: f64,
    /// The time at which its parameters are on the device.
    ready_s: f64,
}

/// A shard task that a device computes.
struct Active {
    claim: Claim,
    start_s: f64,
    /// The seconds left when the processors were last divided, at full speed.
    left_s: f64,
    /// The currently expected end.
    end_s: f64,
    /// The index of its span, if recorded.
    span: usize,
}

#[derive(Default)]
struct SimulatedDevice {
    active: Option<Active>,
    /// The model that it computes or last computed.
    last: Option<usize>,
    next: Option<Claim>,
    free_since_s: f64,
    copies: Copies,
    uncached: UncachedBytes,
    downloads: Downloads,
    /// The device whose `link_free_s` is that of its link, which devices may share.
    link: usize,
    link_free_s: f64,
    busy_s: f64,
    /// Its position in the order in which idle devices are served: the fast ones first.
    rank: usize,
}

/// An event; simultaneous events are handled in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SimulatedEvent {
    End {
        device: usize,
    },
    /// The master weights or inputs that a model waited for are ready, or it arrives.
    Final {
        model: usize,
    },
    Promoted {
        device: usize,
    },
    Downloaded {
        device: usize,
    },
    /// The host optimizer has finished a step, and releases processors that it shares.
    Stepped,
}

/// The models that devices can claim.
struct Offers {
    /// Models that no device computes or has committed to.
    queue: Queue,
    /// Models that a device computes or has committed to, and that another one may compute too.
    joinable: Queue,
    /// The cached models in the queue.
    cached: Cached,
}

/// The order in which devices request shard tasks.
#[derive(Default)]
struct Requests {
    /// Devices by rank.
    ranked: Vec<usize>,
    /// Devices that could commit, as (computes, rank): the idle ones are served first.
    hungry: BTreeSet<(bool, usize)>,
    /// Devices by rank whose own model may have become claimable.
    touched: BTreeSet<usize>,
    /// Devices that the policy holds back until the next event.
    held: Vec<(bool, usize)>,
    /// Those of them, by rank, that could have continued with the model that they compute: there may be no
    /// other claimable model after the next event.
    held_with_own: Vec<usize>,
}

/// The known and estimated future, for a policy that waits.
struct Forecast {
    /// Models that wait for their master weights, by the time at which they become claimable.
    waiting: BTreeMap<(u64, usize), ModelView>,
    /// Estimated seconds of compute left of all models.
    left_s: Sum,
    /// The sum of the devices' speeds.
    speeds: f64,
}

pub(super) struct SimulatedRun<'a> {
    workload: &'a Workload,
    times: &'a ShardTimes,
    policy: &'a mut dyn Policy,
    options: SimulationOptions,
    now_s: f64,
    events: BinaryHeap<Reverse<(u64, SimulatedEvent)>>,
    models: Vec<ModelProgress>,
    devices: Vec<SimulatedDevice>,
    processors: Processors,
    host_memory: SimulatedHostMemory,
    offers: Offers,
    requests: Requests,
    forecast: Forecast,
    /// The models and shards that read each unit of caching, in order.
    readers: BTreeMap<CacheKey, Vec<(usize, usize)>>,
    result: Simulation,
}

impl<'a> SimulatedRun<'a> {
    pub(super) fn new(
        (workload, times): (&'a Workload, &'a ShardTimes),
        policy: &'a mut dyn Policy,
        options: SimulationOptions,
    ) -> Result<Self, WorkloadError> {
        let model = |task: &TaskCost| -> Result<ModelProgress, WorkloadError> {
            Ok(ModelProgress::new(task, task.estimates()?, workload.devices.len()))
        };
        let models: Vec<ModelProgress> = workload.tasks.iter().map(model).collect::<Result<_, _>>()?;
        let left_s = Sum::new(&models.iter().map(ModelProgress::left_s).collect::<Vec<f64>>());
        let ranked = fast_first(workload);
        let devices = devices(workload, &ranked);
        let queue = || Queue::new(models.len());
        let cached = Cached::new(devices.len(), models.len());
        let hungry = (0..devices.len()).map(|rank| (false, rank)).collect();
        let speeds = workload.devices.iter().map(|device| device.speed).sum();
        let result = Simulation {
            policy: policy.name(),
            first_start_s: f64::INFINITY,
            promoted_bytes: Some(0),
            finished_s: vec![0.0; models.len()],
            peak_bytes: vec![0; devices.len()],
            reads: if options.record { vec![Vec::new(); devices.len()] } else { Vec::new() },
            ..Simulation::default()
        };
        Ok(Self {
            workload,
            times,
            policy,
            options,
            now_s: 0.0,
            events: BinaryHeap::new(),
            processors: Processors::default(),
            host_memory: SimulatedHostMemory::new(workload),
            offers: Offers { queue: queue(), joinable: queue(), cached },
            requests: Requests { ranked, hungry, ..Requests::default() },
            forecast: Forecast { waiting: BTreeMap::new(), left_s, speeds },
            models,
            devices,
            readers: readers(workload),
            result,
        })
    }

    pub(super) fn work(&mut self) -> Result<(), SimulationError> {
        for (model, task) in self.workload.tasks.iter().enumerate() {
            self.events.push(Reverse((ordered(task.arrival_s), SimulatedEvent::Final { model })));
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

    /// Checks the end of the run. If no event is left, nothing computes or is being promoted or updated, and
    /// no model arrives. Any work left then was refused by the policy.
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
            count: self.offers.queue.len(),
            claimable: self.offers.some_claimable(),
        })
    }

    fn pop_at(&mut self, key: u64) -> Option<Reverse<(u64, SimulatedEvent)>> {
        let same = self.events.peek().is_some_and(|Reverse((next, _))| *next == key);
        if same { self.events.pop() } else { None }
    }

    fn at(&mut self, time_s: f64, event: SimulatedEvent) {
        self.events.push(Reverse((ordered(time_s), event)));
    }

    fn handle(&mut self, event: SimulatedEvent) {
        match event {
            SimulatedEvent::End { device } => self.end(device),
            SimulatedEvent::Final { model } => self.release(model),
            SimulatedEvent::Promoted { device } => self.start(device),
            SimulatedEvent::Downloaded { device } => self.downloaded(device),
            SimulatedEvent::Stepped => self.stepped(),
        }
    }

    /// Ends a shard task: its duration corrects the estimate, and the device continues.
    fn end(&mut self, device: usize) {
        self.progress();
        let (state, now_s) = (&mut self.devices[device], ordered(self.now_s));
        // A shard task that was slowed down since ends later.
        let Some(Active { claim, start_s, span, .. }) = state.active.take_if(|of| ordered(of.end_s) <= now_s)
        else {
            return;
        };
        let Claim { model, replica, task, .. } = claim;
        let took_s = self.now_s - start_s;
        self.result.spans.get_mut(span).into_iter().for_each(|span| span.end_s = self.now_s);
        state.busy_s += took_s;
        state.free_since_s = self.now_s;
        self.requests.hungry.remove(&(true, state.rank));
        if state.next.is_none() {
            self.requests.hungry.insert((false, state.rank));
        }
        let state = &mut self.models[model];
        state.end(replica, &task, self.now_s);
        state.cost.observe(task.kind, task.shard, took_s * self.workload.devices[device].speed);
        self.result.finished_s[model] = self.now_s;
        self.models[model].made(replica, &task, self.now_s);
        self.leave_memory(device, &claim);
        self.forget_ended(model);
        self.count_left(model);
        self.release(model);
        self.release_processors(device);
        self.start(device);
        self.share_processors();
    }

    /// Queues the update of a shard's master weights in the host optimizer; the copy on the device is stale.
    fn step(&mut self, device: usize, model: usize, shard: usize) {
        self.forget_stepped(device, model, shard);
        let step_s = self.workload.tasks[model].step_s();
        let stepped_s = if step_s > 0.0 { self.queue_step(model, shard, step_s) } else { self.now_s };
        self.finish(model, shard, self.result.finished_s[model], stepped_s);
    }

    /// Records when the master weights of a model's shard, whose last shard task ended at `from_s`, will have
    /// been updated.
    fn finish(&mut self, model: usize, shard: usize, from_s: f64, stepped_s: f64) {
        // It may be waiting for this, until another time now.
        if let Some(ready_s) = self.models[model].ready_s() {
            self.forecast.waiting.remove(&(ordered(ready_s), model));
        }
        let cost = &self.workload.tasks[model];
        let final_s = stepped_s + cost.step_wait_s;
        let state = &mut self.models[model];
        state.final_s[shard] = final_s;
        if shard == cost.first_trained {
            state.waited_s = final_s - from_s;
        }
        if final_s > self.now_s {
            self.at(final_s, SimulatedEvent::Final { model });
        }
    }

    /// Starts the committed shard task, if the device is idle and the parameters are there.
    fn start(&mut self, device: usize) {
        let state = &mut self.devices[device];
        let Some(claim) = state.next.filter(|_| state.active.is_none()) else { return };
        if claim.ready_s > self.now_s {
            self.at(claim.ready_s, SimulatedEvent::Promoted { device });
            return;
        }
        if !self.take_memory(device, &claim) {
            return;
        }
        let Some(could_s) = self.take_processors(device) else { return };
        let Claim { model, replica, task, .. } = claim;
        let speed = self.workload.devices[device].speed;
        let took_s = self.times.get(model, &task);
        let stated_s = || self.workload.shard_task_s(model, &task);
        let left_s = took_s.unwrap_or_else(stated_s) / speed;
        self.progress();
        let end_s = self.now_s + left_s / self.share_of(device);
        let state = &mut self.devices[device];
        let waited_s = could_s - state.free_since_s.max(claim.committed_s);
        state.next = None;
        let span = self.result.spans.len();
        state.active = Some(Active { claim, start_s: self.now_s, left_s, end_s, span });
        state.last = Some(model);
        let rank = state.rank;
        self.models[model].in_flight.start(replica);
        self.result.shard_tasks += 1;
        self.result.first_start_s = self.result.first_start_s.min(self.now_s);
        self.result.promotion_wait_s += waited_s;
        self.record(device, model, &task, Occupation::Compute(task.kind), (self.now_s, end_s));
        self.at(end_s, SimulatedEvent::End { device });
        self.share_processors();
        if self.options.prefetch {
            self.requests.hungry.insert((true, rank));
            self.requests.touched.insert(rank);
        }
    }

    fn record(&mut self, device: usize, task: usize, of: &ShardTask, what: Occupation, at: (f64, f64)) {
        if self.options.record {
            let (start_s, end_s) = at;
            let span = ScheduleSpan {
                device,
                task,
                minibatch: of.step as u64,
                shard: of.shard,
                what,
                start_s,
                end_s,
            };
            self.result.spans.push(span);
        }
    }

    pub(super) fn result(mut self, bounds: LowerBounds) -> Simulation {
        self.result.bounds = bounds;
        self.result.makespan_s = self.result.finished_s.iter().copied().fold(0.0, f64::max);
        self.result.busy_s = self.devices.iter().map(|device| device.busy_s).collect();
        self.result.spans.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
        self.result
    }
}

/// The devices in the order in which idle ones are served.
fn fast_first(workload: &Workload) -> Vec<usize> {
    let speed = |device: &usize| workload.devices[*device].speed;
    let mut ranked: Vec<usize> = (0..workload.devices.len()).collect();
    ranked.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
    ranked
}

/// The models and shards that read each unit of caching, in order.
fn readers(workload: &Workload) -> BTreeMap<CacheKey, Vec<(usize, usize)>> {
    let mut found: BTreeMap<CacheKey, Vec<(usize, usize)>> = BTreeMap::new();
    for (model, task) in workload.tasks.iter().enumerate() {
        for (shard, cost) in task.shards.iter().enumerate() {
            let parts = CachedPart::of((model, shard), cost, 0);
            parts.for_each(|part| found.entry(part.key).or_default().push((model, shard)));
        }
    }
    found
}

fn devices(workload: &Workload, ranked: &[usize]) -> Vec<SimulatedDevice> {
    let mut ranks = vec![0; ranked.len()];
    ranked.iter().enumerate().for_each(|(rank, device)| ranks[*device] = rank);
    let device = |(index, rank): (usize, usize)| {
        let link = if workload.shared_link { 0 } else { index };
        SimulatedDevice { link, rank, ..SimulatedDevice::default() }
    };
    ranks.into_iter().enumerate().map(device).collect()
}

/// Returns the number with these [`ordered`] bits.
fn unordered(key: u64) -> f64 {
    f64::from_bits(if key >> 63 == 1 { key & !(1 << 63) } else { !key })
}
