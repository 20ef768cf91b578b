//! Ways to train many models on few devices, from the same stated costs.
//!
//! Each strategy has its assumptions in [`Strategy::assumptions`]; where a cost is not known they
//! favour the strategies that SHARP is compared with. All leave out variation, drift and
//! evaluations and know the costs; none waits for a task that has not arrived while another one is there; all but
//! SHARP and spilled task parallelism keep parameters, gradients and optimizer state on the devices, so that they
//! have nothing to promote and step their optimizers in no time.

use std::collections::BTreeSet;
use std::fmt;

use crate::simulate::{Occupation, SimulationOptions, Span, simulate};
use crate::{Policy, ShardTaskKind, ShardedLrtf, ShardedLrtfPatient, SimulationError, TaskCost, Workload};

/// Bytes of training state for each byte of parameters: parameters, gradients and AdamW's two moments.
const STATE: u64 = 4;

/// A way to train many models on few devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// The shards of a model pinned to all devices, one model at a time.
    ModelParallel,
    /// The same with microbatches in a pipeline that is flushed at each step, as GPipe does it.
    Pipeline,
    /// Whole models on single devices, the longest first.
    TaskParallel,
    /// The same, but for models larger than a device: each is spilled by itself.
    SpilledTaskParallel,
    /// The batch of one model split over all devices, its state sharded over them, as ZeRO-3 does it.
    DataParallel,
    /// Model parallelism within groups of devices, task parallelism over the groups.
    Hybrid,
    /// Shard tasks of all models on all devices, under Sharded-LRTF as the engine runs it.
    Sharp,
    /// The same under [`ShardedLrtfPatient`].
    SharpPatient,
}

impl Strategy {
    /// Every strategy, in the order of the table.
    pub const ALL: [Self; 8] = [
        Self::ModelParallel,
        Self::Pipeline,
        Self::DataParallel,
        Self::Hybrid,
        Self::TaskParallel,
        Self::SpilledTaskParallel,
        Self::Sharp,
        Self::SharpPatient,
    ];

    /// Its name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ModelParallel => "model-parallel",
            Self::Pipeline => "pipeline",
            Self::TaskParallel => "task-parallel",
            Self::SpilledTaskParallel => "spilled-task-parallel",
            Self::DataParallel => "data-parallel",
            Self::Hybrid => "hybrid",
            Self::Sharp => "sharp",
            Self::SharpPatient => "sharp-patient",
        }
    }

    /// What its figures rest on.
    pub const fn assumptions(self) -> &'static str {
        match self {
            Self::ModelParallel => {
                "Shards in contiguous stages of even compute over all devices, models in submission order; \
                 activations cross devices in no time."
            }
            Self::Pipeline => {
                "Model parallelism with each minibatch in microbatches, all forwards before all backwards, a flush \
                 at each step; a microbatch of 1/K computes in 1/K of the time, which favours it."
            }
            Self::TaskParallel => {
                "Longest model first, each on the device that ends it first; every model must fit a device with \
                 4 bytes of state for each byte of parameters."
            }
            Self::SpilledTaskParallel => {
                "Longest model first, each spilled on one device with double buffering: nothing fills its waits for \
                 optimizer and promotions; it never waits for another model's step, which favours it."
            }
            Self::DataParallel => {
                "Parameters gathered before each forward and each backward, gradients scattered after it: a device \
                 moves (m-1)/m of a shard each time, over its link and behind that shard's own compute; the batch \
                 splits evenly in compute."
            }
            Self::Hybrid => {
                "Groups of devices as small as the largest model allows where memory is known, else halves; within \
                 a group model parallelism, over groups the longest model first."
            }
            Self::Sharp => {
                "The simulator under Sharded-LRTF, with promotions, one prefetched shard a device, and the host's one \
                 optimizer."
            }
            Self::SharpPatient => "The same, waiting for the model that decides when the run ends.",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A device's electric power: what stands for it in the table's energy.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct PowerModel {
    /// Watts while it computes.
    pub busy_w: f64,
    /// Watts while it does not.
    pub idle_w: f64,
}

impl Default for PowerModel {
    /// 300 W and 60 W: the order of a data-centre GPU.
    fn default() -> Self {
        Self { busy_w: 300.0, idle_w: 60.0 }
    }
}

/// How the strategies are set.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CompareOptions {
    /// Microbatches of the pipeline; as many as there are stages where nothing is said.
    pub microbatches: Option<usize>,
    /// Devices of a group of the hybrid; see [`Strategy::assumptions`] where nothing is said.
    pub group: Option<usize>,
    /// Keep spans for pictures.
    pub record: bool,
    /// The power model.
    pub power: PowerModel,
}

/// What came of a strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// From the start to the end of the last model, in seconds.
    pub runtime_s: f64,
    /// Seconds of compute, per device.
    pub busy_s: Vec<f64>,
    /// Bytes that all devices received from each other or from the host, where sizes are known.
    pub moved_bytes: Option<u64>,
    /// What the devices did, if it was recorded.
    pub spans: Vec<Span>,
}

impl Outcome {
    /// The share of all devices' time in which they computed.
    pub fn utilization(&self) -> f64 {
        let all_s = self.runtime_s * self.busy_s.len() as f64;
        if all_s > 0.0 { self.busy_s.iter().sum::<f64>() / all_s } else { 0.0 }
    }

    /// Devices times runtime, in hours.
    pub fn device_hours(&self) -> f64 {
        self.runtime_s * self.busy_s.len() as f64 / 3600.0
    }

    /// Kilowatt-hours under a power model.
    pub fn energy_kwh(&self, power: PowerModel) -> f64 {
        let busy_s: f64 = self.busy_s.iter().sum();
        let idle_s = (self.runtime_s * self.busy_s.len() as f64 - busy_s).max(0.0);
        (busy_s * power.busy_w + idle_s * power.idle_w) / 3.6e6
    }
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The strategy.
    pub strategy: Strategy,
    /// What came of it, or the first task that it has no room for.
    pub outcome: Result<Outcome, DoesNotFit>,
}

/// A strategy has no room for a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "task `{task}` needs {needed} bytes for parameters, gradients and optimizer state, and there are {available}"
)]
pub struct DoesNotFit {
    /// The task.
    pub task: String,
    /// Bytes of its training state.
    pub needed: u64,
    /// Bytes of the devices that it would be on.
    pub available: u64,
}

/// Every strategy on one workload, with the stated costs.
///
/// # Errors
///
/// [`SimulationError::Workload`] when the workload breaks a rule of [`Workload::check`].
pub fn compare(workload: &Workload, options: CompareOptions) -> Result<Vec<Row>, SimulationError> {
    workload.check()?;
    let mut stated = workload.clone();
    stated.variation = None;
    for task in &mut stated.tasks {
        (task.drift, task.estimate_factor) = (0.0, 1.0);
        task.evaluations.clear();
    }
    let row = |strategy| Ok(Row { strategy, outcome: outcome(&stated, strategy, options)? });
    Strategy::ALL.into_iter().map(row).collect()
}

fn outcome(
    workload: &Workload,
    strategy: Strategy,
    options: CompareOptions,
) -> Result<Result<Outcome, DoesNotFit>, SimulationError> {
    let devices = workload.devices.len();
    Ok(match strategy {
        Strategy::ModelParallel => groups(workload, devices, Inside::OneByOne, options),
        Strategy::Pipeline => groups(workload, devices, Inside::Pipelined, options),
        Strategy::TaskParallel => groups(workload, 1, Inside::OneByOne, options),
        Strategy::Hybrid => groups(workload, group(workload, options), Inside::OneByOne, options),
        Strategy::DataParallel => fits(workload, devices).map(|()| data_parallel(workload, options)),
        Strategy::SpilledTaskParallel => Ok(spilled(workload, options)?),
        Strategy::Sharp => Ok(sharp(workload, &mut ShardedLrtf, options)?),
        Strategy::SharpPatient => Ok(sharp(workload, &mut ShardedLrtfPatient::default(), options)?),
    })
}

fn sharp(
    workload: &Workload,
    policy: &mut dyn Policy,
    options: CompareOptions,
) -> Result<Outcome, SimulationError> {
    let run = simulate(workload, policy, SimulationOptions { prefetch: true, record: options.record })?;
    Ok(Outcome {
        runtime_s: run.makespan_s,
        busy_s: run.busy_s,
        moved_bytes: run.promoted_bytes,
        spans: run.spans,
    })
}

/// Each model by itself on one device, simulated; the models in turn, the longest first.
fn spilled(workload: &Workload, options: CompareOptions) -> Result<Outcome, SimulationError> {
    let mut all_runs = Vec::new();
    for cost in &workload.tasks {
        let Workload { shared_link, variation, .. } = *workload;
        let mut alone = Workload { tasks: vec![cost.clone()], devices: Vec::new(), shared_link, variation };
        alone.tasks[0].arrival_s = 0.0;
        let mut runs = Vec::new();
        for device in &workload.devices {
            alone.devices = vec![device.clone()];
            let seen = runs.iter().find(|(of, _): &&(_, _)| of == device).map(|(_, run)| Clone::clone(run));
            let run = match seen {
                Some(run) => run,
                None => sharp(&alone, &mut ShardedLrtf, options)?,
            };
            runs.push((device.clone(), run));
        }
        all_runs.push(runs);
    }
    let mut order: Vec<usize> = (0..workload.tasks.len()).collect();
    order.sort_by(|a, b| all_runs[*b][0].1.runtime_s.total_cmp(&all_runs[*a][0].1.runtime_s));
    let mut sheet = Sheet::new(workload, options.record);
    let mut line = Line::new(workload, order);
    let free_s = |sheet: &Sheet| sheet.free_s.iter().copied().fold(f64::INFINITY, f64::min);
    while let Some(task) = line.next(workload, free_s(&sheet)) {
        let runs = &all_runs[task];
        let start_s = |device: usize| sheet.free_s[device].max(workload.tasks[task].arrival_s);
        let end_s = |device: usize| start_s(device) + runs[device].1.runtime_s;
        let device = (0..runs.len()).min_by(|a, b| end_s(*a).total_cmp(&end_s(*b))).unwrap_or(0);
        let (start_s, end_s, run) = (start_s(device), end_s(device), &runs[device].1);
        sheet.free_s[device] = end_s;
        sheet.busy_s[device] += run.busy_s[0];
        sheet.moved = sheet.moved.zip(run.moved_bytes).map(|(a, b)| a.saturating_add(b));
        let moved = |span: &Span| Span {
            device,
            task,
            start_s: span.start_s + start_s,
            end_s: span.end_s + start_s,
            ..*span
        };
        sheet.spans.extend(run.spans.iter().map(moved));
    }
    Ok(sheet.outcome())
}

/// Tasks that wait in an order. Who is free takes the first of those that have arrived, and the next one to arrive
/// where none has.
struct Line {
    /// Tasks in their order.
    order: Vec<usize>,
    /// Places of those that have not arrived, the next one last.
    later: Vec<usize>,
    /// Places of those that have.
    here: BTreeSet<usize>,
}

impl Line {
    fn new(workload: &Workload, order: Vec<usize>) -> Self {
        let mut later: Vec<usize> = (0..order.len()).rev().collect();
        let arrival_s = |place: usize| workload.tasks[order[place]].arrival_s;
        later.sort_by(|a, b| arrival_s(*b).total_cmp(&arrival_s(*a)));
        Self { order, later, here: BTreeSet::new() }
    }

    /// The task that is taken at this time, or as soon as there is one.
    fn next(&mut self, workload: &Workload, free_s: f64) -> Option<usize> {
        while let Some(place) = self.later.last().copied() {
            if self.here.is_empty() || workload.tasks[self.order[place]].arrival_s <= free_s {
                self.here.insert(place);
                self.later.pop();
            } else {
                break;
            }
        }
        self.here.pop_first().map(|place| self.order[place])
    }
}

/// How a group of devices works on its one model.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Inside {
    /// One shard task after the other.
    OneByOne,
    /// Microbatches in a pipeline.
    Pipelined,
}

/// Groups of `size` devices, each with one model at a time; the longest models first where there are
/// several groups.
fn groups(
    workload: &Workload,
    size: usize,
    inside: Inside,
    options: CompareOptions,
) -> Result<Outcome, DoesNotFit> {
    let size = size.clamp(1, workload.devices.len());
    fits(workload, size)?;
    // A rest of devices that makes no whole group stays idle.
    let groups: Vec<Vec<usize>> = (0..workload.devices.len() / size)
        .map(|group| (group * size..(group + 1) * size).collect())
        .collect();
    let mut order: Vec<usize> = (0..workload.tasks.len()).collect();
    let length = |task: &usize| workload.tasks[*task].sweep_s() * workload.tasks[*task].minibatches as f64;
    if groups.len() > 1 {
        order.sort_by(|a, b| length(b).total_cmp(&length(a)));
    }
    let mut sheet = Sheet::new(workload, options.record);
    let mut line = Line::new(workload, order);
    let free_s =
        |sheet: &Sheet| groups.iter().map(|group| sheet.free_s[group[0]]).fold(f64::INFINITY, f64::min);
    while let Some(task) = line.next(workload, free_s(&sheet)) {
        let cost = &workload.tasks[task];
        let plan = |group: &Vec<usize>| Minibatch::of(workload, cost, group, inside, options.microbatches);
        let plans: Vec<Minibatch> = groups.iter().map(plan).collect();
        let start_s = |group: usize| sheet.free_s[groups[group][0]].max(cost.arrival_s);
        let end_s = |group: usize| start_s(group) + plans[group].length_s * cost.minibatches as f64;
        let group = (0..groups.len()).min_by(|a, b| end_s(*a).total_cmp(&end_s(*b))).unwrap_or(0);
        let (start_s, end_s) = (start_s(group), end_s(group));
        sheet.run(task, cost.minibatches, start_s, &plans[group]);
        groups[group].iter().for_each(|device| sheet.free_s[*device] = end_s);
    }
    sheet.moved = None;
    Ok(sheet.outcome())
}

fn data_parallel(workload: &Workload, options: CompareOptions) -> Outcome {
    let devices: Vec<usize> = (0..workload.devices.len()).collect();
    let speed: f64 = workload.devices.iter().map(|device| device.speed).sum();
    let share = (devices.len() - 1) as f64 / devices.len() as f64;
    let mut sheet = Sheet::new(workload, options.record);
    let (mut now_s, mut moved) = (0.0f64, Some(0.0));
    let mut line = Line::new(workload, (0..workload.tasks.len()).collect());
    while let Some(task) = line.next(workload, now_s) {
        let cost = &workload.tasks[task];
        let mut minibatch = Minibatch { length_s: 0.0, bars: Vec::new() };
        for (kind, shard) in cost.sweep() {
            let compute_s = cost.shards[shard].seconds(kind) / speed;
            let link_s = devices.iter().map(|d| workload.promote_s(*d, task, shard)).fold(0.0, f64::max);
            let times = if kind == ShardTaskKind::Forward { 1.0 } else { 2.0 };
            let (start_s, end_s) = (minibatch.length_s, minibatch.length_s + compute_s);
            minibatch.bars.extend(devices.iter().map(|d| Bar { device: *d, kind, shard, start_s, end_s }));
            minibatch.length_s += compute_s.max(times * share * link_s);
            let bytes = cost.shards[shard].bytes.map(|b| b as f64 * times * share * devices.len() as f64);
            moved = moved.zip(bytes).map(|(a, b)| a + b * cost.minibatches as f64);
        }
        let start_s = now_s.max(cost.arrival_s);
        sheet.run(task, cost.minibatches, start_s, &minibatch);
        now_s = start_s + minibatch.length_s * cost.minibatches as f64;
    }
    sheet.free_s.fill(now_s);
    sheet.moved = moved.map(|bytes| bytes as u64);
    sheet.outcome()
}

/// One minibatch of one model on a group of devices, from time 0.
struct Minibatch {
    length_s: f64,
    bars: Vec<Bar>,
}

struct Bar {
    device: usize,
    kind: ShardTaskKind,
    shard: usize,
    start_s: f64,
    end_s: f64,
}

impl Minibatch {
    fn of(
        workload: &Workload,
        cost: &TaskCost,
        group: &[usize],
        inside: Inside,
        microbatches: Option<usize>,
    ) -> Self {
        let first = stages(cost, group.len());
        let stage_of = |shard: usize| first.partition_point(|first| *first <= shard) - 1;
        match inside {
            Inside::OneByOne => {
                let mut made = Self { length_s: 0.0, bars: Vec::new() };
                for (kind, shard) in cost.sweep() {
                    let device = group[stage_of(shard)];
                    let seconds = cost.shards[shard].seconds(kind) / workload.devices[device].speed;
                    made.push(device, kind, shard, made.length_s, seconds);
                }
                made
            }
            Inside::Pipelined => {
                let microbatches = microbatches.unwrap_or(first.len()).max(1);
                let mut stages = vec![(0.0, 0.0); first.len()];
                for (kind, shard) in cost.sweep() {
                    let (stage, costs) = (stage_of(shard), &cost.shards[shard]);
                    let share = 1.0 / (workload.devices[group[stage]].speed * microbatches as f64);
                    // The last shard's forward is fused with its backward only where nothing is
                    // between them.
                    let fused = kind == ShardTaskKind::Backward && shard + 1 == cost.shards.len();
                    let forward_s = match kind {
                        ShardTaskKind::Backward if !fused => 0.0,
                        _ => costs.forward_s.min(costs.seconds(kind)),
                    };
                    stages[stage].0 += forward_s * share;
                    stages[stage].1 += (costs.seconds(kind) - forward_s) * share;
                }
                Self::pipelined(&stages, group, &first, microbatches)
            }
        }
    }

    /// GPipe: the forwards of all microbatches, then the backwards, the last first.
    fn pipelined(stages: &[(f64, f64)], group: &[usize], first: &[usize], microbatches: usize) -> Self {
        let mut made = Self { length_s: 0.0, bars: Vec::new() };
        let mut free_s = vec![0.0f64; stages.len()];
        for _ in 0..microbatches {
            let mut input_s = 0.0f64;
            for (stage, (forward_s, _)) in stages.iter().enumerate() {
                let start_s = input_s.max(free_s[stage]);
                made.push(group[stage], ShardTaskKind::Forward, first[stage], start_s, *forward_s);
                input_s = start_s + forward_s;
                free_s[stage] = input_s;
            }
        }
        for _ in 0..microbatches {
            let mut input_s = 0.0f64;
            for (stage, (_, backward_s)) in stages.iter().enumerate().rev() {
                let start_s = input_s.max(free_s[stage]);
                made.push(group[stage], ShardTaskKind::Backward, first[stage], start_s, *backward_s);
                input_s = start_s + backward_s;
                free_s[stage] = input_s;
            }
        }
        made
    }

    fn push(&mut self, device: usize, kind: ShardTaskKind, shard: usize, start_s: f64, seconds: f64) {
        let end_s = start_s + seconds;
        if seconds > 0.0 {
            self.bars.push(Bar { device, kind, shard, start_s, end_s });
        }
        self.length_s = self.length_s.max(end_s);
    }
}

/// The first shards of at most `most` contiguous stages, whose longest is as short as can be.
fn stages(cost: &TaskCost, most: usize) -> Vec<usize> {
    let mut seconds = vec![0.0; cost.shards.len()];
    cost.sweep().for_each(|(kind, shard)| seconds[shard] += cost.shards[shard].seconds(kind));
    let cut = |limit: f64| {
        let (mut first, mut sum) = (vec![0], 0.0);
        for (shard, s) in seconds.iter().enumerate() {
            if shard > 0 && sum + s > limit {
                first.push(shard);
                sum = 0.0;
            }
            sum += s;
        }
        first
    };
    let (mut low, mut high) = (seconds.iter().copied().fold(0.0, f64::max), seconds.iter().sum::<f64>());
    if cut(low).len() <= most {
        return cut(low);
    }
    // Fifty halvings leave nothing that a double could tell.
    for _ in 0..50 {
        let middle = 0.5 * (low + high);
        if cut(middle).len() <= most { high = middle } else { low = middle }
    }
    cut(high * (1.0 + 1e-12))
}

/// Whether every model's training state fits groups of this many devices; what is not known fits.
fn fits(workload: &Workload, size: usize) -> Result<(), DoesNotFit> {
    let memory: Option<Vec<u64>> = workload.devices.iter().map(|device| device.memory_bytes).collect();
    let Some(memory) = memory else { return Ok(()) };
    let sum = |bytes: &mut dyn Iterator<Item = u64>| bytes.fold(0, u64::saturating_add);
    let groups = memory.chunks_exact(size).map(|group| sum(&mut group.iter().copied()));
    let available = groups.min().unwrap_or(0);
    for task in &workload.tasks {
        // Where memory is known, so is every size.
        let bytes = sum(&mut task.shards.iter().filter_map(|shard| shard.bytes));
        let needed = bytes.saturating_mul(STATE);
        if needed > available {
            return Err(DoesNotFit { task: task.name.clone(), needed, available });
        }
    }
    Ok(())
}

fn group(workload: &Workload, options: CompareOptions) -> usize {
    let devices = workload.devices.len();
    let known = workload.devices.iter().all(|device| device.memory_bytes.is_some());
    let smallest = (1..=devices).find(|size| known && fits(workload, *size).is_ok());
    options.group.or(smallest).unwrap_or(devices / 2).clamp(1, devices)
}

/// What the devices have done so far.
struct Sheet {
    record: bool,
    free_s: Vec<f64>,
    busy_s: Vec<f64>,
    moved: Option<u64>,
    spans: Vec<Span>,
}

impl Sheet {
    fn new(workload: &Workload, record: bool) -> Self {
        let devices = workload.devices.len();
        Self {
            record,
            free_s: vec![0.0; devices],
            busy_s: vec![0.0; devices],
            moved: Some(0),
            spans: Vec::new(),
        }
    }

    /// The same minibatch again and again.
    fn run(&mut self, task: usize, minibatches: u64, start_s: f64, minibatch: &Minibatch) {
        for bar in &minibatch.bars {
            self.busy_s[bar.device] += (bar.end_s - bar.start_s) * minibatches as f64;
        }
        let recorded = if self.record { minibatches } else { 0 };
        for minibatch_index in 0..recorded {
            let from_s = start_s + minibatch.length_s * minibatch_index as f64;
            self.spans.extend(minibatch.bars.iter().map(|bar| Span {
                device: bar.device,
                task,
                minibatch: minibatch_index,
                shard: bar.shard,
                what: Occupation::Compute(bar.kind),
                start_s: from_s + bar.start_s,
                end_s: from_s + bar.end_s,
            }));
        }
    }

    fn outcome(self) -> Outcome {
        let runtime_s = self.free_s.iter().copied().fold(0.0, f64::max);
        Outcome { runtime_s, busy_s: self.busy_s, moved_bytes: self.moved, spans: self.spans }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceCost, Draw, LowerBounds, ShardCost};

    fn workload(models: usize, shards: usize, devices: usize) -> Workload {
        let mut list = vec![ShardCost { bytes: Some(10), ..ShardCost::new(1.0, 2.0, 0.25) }; shards];
        // The fused task of the last shard is its forward and its backward.
        list[shards - 1].backward_s = 3.0;
        let task = |index: usize| TaskCost::new(index.to_string(), 2, list.clone());
        let devices = vec![DeviceCost::default(); devices];
        Workload { tasks: (0..models).map(task).collect(), devices, shared_link: false, variation: None }
    }

    fn of(workload: &Workload, strategy: Strategy) -> Outcome {
        let options = CompareOptions { record: true, ..CompareOptions::default() };
        let rows = compare(workload, options).unwrap();
        rows.into_iter().find(|row| row.strategy == strategy).unwrap().outcome.unwrap()
    }

    /// Four models of 2 x 12 seconds on four devices, by hand.
    #[test]
    fn the_strategies_of_figure_1() {
        let workload = workload(4, 4, 4);
        let model = of(&workload, Strategy::ModelParallel);
        assert_eq!((model.runtime_s, model.utilization()), (4.0 * 24.0, 0.25));
        assert_eq!(of(&workload, Strategy::TaskParallel).runtime_s, 24.0);
        assert_eq!(of(&workload, Strategy::Hybrid).runtime_s, 48.0, "halves, one model at a time in each");
        // Four stages and four microbatches, of forward 1/4 and backward 2/4: seven of each in a row.
        let pipeline = of(&workload, Strategy::Pipeline);
        assert_eq!(pipeline.runtime_s, 4.0 * 2.0 * 7.0 * (0.25 + 0.5));
        assert_eq!(pipeline.busy_s, model.busy_s);
        assert_eq!(of(&workload, Strategy::DataParallel).runtime_s, 24.0, "communication hides here");
    }

    #[test]
    fn data_parallelism_waits_for_its_communication() {
        let mut workload = workload(1, 1, 4);
        workload.tasks[0].shards[0].promote_s = Some(4.0);
        let outcome = of(&workload, Strategy::DataParallel);
        // Gather and scatter move 3/4 of the shard each, in 3 seconds each; compute takes 3/4.
        assert_eq!((outcome.runtime_s, outcome.busy_s), (2.0 * 6.0, vec![1.5; 4]));
        assert_eq!(outcome.moved_bytes, Some(2 * 4 * 15));
    }

    #[test]
    fn what_does_not_fit_says_which_model() {
        let mut workload = workload(2, 4, 4);
        workload.devices.iter_mut().for_each(|device| device.memory_bytes = Some(100));
        let rows = compare(&workload, CompareOptions::default()).unwrap();
        let of = |strategy| &rows.iter().find(|row| row.strategy == strategy).unwrap().outcome;
        let expected = DoesNotFit { task: "0".into(), needed: 160, available: 100 };
        assert_eq!(of(Strategy::TaskParallel), &Err(expected));
        assert!(of(Strategy::ModelParallel).is_ok() && of(Strategy::Sharp).is_ok());
        assert_eq!(of(Strategy::Hybrid).as_ref().unwrap().runtime_s, 24.0, "two devices hold a model");
    }

    /// The first and longest task arrives late, and nobody waits for it while another one is there.
    #[test]
    fn no_strategy_waits_for_a_task_while_another_is_there() {
        let mut workload = workload(3, 1, 1);
        workload.tasks.iter_mut().for_each(|task| task.shards[0].promote_s = Some(0.0));
        (workload.tasks[0].arrival_s, workload.tasks[0].minibatches) = (10.0, 4);
        workload.tasks[2].arrival_s = 30.0;
        for strategy in Strategy::ALL {
            let outcome = of(&workload, strategy);
            // Two minibatches of 3 s from 0, four from 10, and two from 30.
            assert_eq!(outcome.runtime_s, 36.0, "{strategy}");
            let starts: Vec<f64> = [0, 1, 2]
                .map(|task| {
                    let own =
                        outcome.spans.iter().filter(|s| s.task == task && s.what != Occupation::Promote);
                    own.map(|span| span.start_s).fold(f64::INFINITY, f64::min)
                })
                .into();
            assert_eq!(starts, [10.0, 0.0, 30.0], "{strategy}");
        }
    }

    /// What a check accepts is compared, however many bytes it comes to.
    #[test]
    fn sizes_too_large_to_add_up_are_no_panic() {
        let text = |bytes: u64, minibatches: u64, memory: u64| {
            let shard = format!(r#"{{"forward_s": 1, "backward_s": 1, "bytes": {bytes}}}"#);
            let device = format!(r#"{{"memory_bytes": {memory}, "link_bytes_per_s": 1e9}}"#);
            format!(
                r#"{{"tasks": [{{"name": "a", "minibatches": {minibatches}, "shards": [{shard}, {shard}, {shard}]}},
                               {{"name": "b", "minibatches": 1, "shards": [{shard}]}}],
                     "devices": [{device}, {device}]}}"#
            )
        };
        for (bytes, minibatches, memory) in
            [(1, 1, u64::MAX), (20_000_000_000_000_000, 1_000, u64::MAX), (u64::MAX / 2, 3, u64::MAX)]
        {
            let workload = Workload::from_json(&text(bytes, minibatches, memory)).unwrap();
            let rows = compare(&workload, CompareOptions::default()).unwrap();
            assert!(rows.iter().any(|row| row.outcome.is_ok()), "{bytes}");
        }
    }

    /// A model that promotes much in few of its shard tasks moves more than another one by the same.
    #[test]
    fn bytes_that_move_are_those_that_were_promoted() {
        let mut workload = workload(1, 3, 1);
        workload.tasks[0].shards[2].bytes = Some(1_000);
        let outcome = of(&workload, Strategy::Sharp);
        // All three shards, and the first one again for its backward, in each of two minibatches.
        assert_eq!(outcome.moved_bytes, Some(2 * (10 + 10 + 1_000 + 10)));
        assert_eq!(of(&workload, Strategy::SpilledTaskParallel).moved_bytes, outcome.moved_bytes);
    }

    #[test]
    fn stages_are_contiguous_and_even() {
        let shard = |s: f64| ShardCost::new(0.0, s, 0.0);
        let task = TaskCost::new("a", 1, [1.0, 1.0, 1.0, 3.0, 3.0].map(shard).to_vec());
        assert_eq!(stages(&task, 3), [0, 3, 4]);
        assert_eq!(stages(&task, 1), [0]);
        assert_eq!(stages(&task, 9), [0, 3, 4], "no stage is longer than the longest shard has to be");
    }

    /// No strategy is faster than all its compute on all devices, nor SHARP than its bounds; spans
    /// cover what the devices computed.
    #[test]
    fn every_strategy_does_all_the_work() {
        for seed in 0..20 {
            let draw = Draw {
                models: (1, 6),
                devices: (1, 4),
                shards: (1, 6),
                shard_tasks: (5, 60),
                ..Draw::default()
            };
            let workload = draw.workload(seed);
            let total_s = workload.total_s();
            let rows =
                compare(&workload, CompareOptions { record: true, ..CompareOptions::default() }).unwrap();
            for Row { strategy, outcome } in rows {
                let outcome = outcome.unwrap();
                let busy_s: f64 = outcome.busy_s.iter().sum();
                assert!((busy_s - total_s).abs() < 1e-6 * total_s, "{strategy} {busy_s} {total_s}");
                let compute = outcome.spans.iter().filter(|span| span.what != Occupation::Promote);
                let spans_s: f64 = compute.map(|span| span.end_s - span.start_s).sum();
                assert!((spans_s - total_s).abs() < 1e-6 * total_s, "{strategy}");
                assert!(outcome.spans.iter().all(|span| span.end_s <= outcome.runtime_s * (1.0 + 1e-9)));
                assert!((0.0..=1.0 + 1e-9).contains(&outcome.utilization()));
                if matches!(strategy, Strategy::Sharp | Strategy::SharpPatient) {
                    let bound_s = LowerBounds::of(&workload, true).unwrap().best_s();
                    assert!(outcome.runtime_s >= bound_s * (1.0 - 1e-9));
                }
            }
        }
    }

    #[test]
    fn cost_and_energy_follow_from_the_runtime() {
        let outcome =
            Outcome { runtime_s: 3600.0, busy_s: vec![3600.0, 0.0], moved_bytes: None, spans: Vec::new() };
        assert_eq!((outcome.device_hours(), outcome.utilization()), (2.0, 0.5));
        assert!((outcome.energy_kwh(PowerModel::default()) - 0.36).abs() < 1e-12);
    }
}
