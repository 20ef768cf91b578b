//! Ways to train many models on few devices, compared by the same stated costs.
//!
//! [`Strategy::assumptions`] states the assumptions of each strategy; unknown costs favor the strategies that
//! SHARP is compared with. All ignore variation, drift and evaluations and know the costs; none waits for a
//! task that has not arrived while another one is available. All except SHARP and spilled task parallelism
//! keep parameters, gradients and optimizer state on the devices, so they promote nothing and their optimizer
//! steps take no time.

use std::fmt;

use self::groups::{Inside, data_parallel, fits, group, groups};
use self::sheet::{Line, Sheet};
use super::{ScheduleSpan, SimulationError, SimulationOptions, TaskCost, Workload, simulate};
use crate::policy::ShardedLrtf;

mod groups;
mod sheet;
#[cfg(test)]
mod tests;

/// Bytes of training state per byte of parameters: parameters, gradients and AdamW's two moments.
const STATE: u64 = 4;

/// A way to train many models on few devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// The shards of a model pinned to all devices, one model at a time.
    ModelParallel,
    /// The same with microbatches in a pipeline that is flushed at each step, as in GPipe.
    Pipeline,
    /// Whole models on single devices, the longest first.
    TaskParallel,
    /// The same for models larger than a device: each is spilled on its own.
    SpilledTaskParallel,
    /// The batch of one model split over all devices, with its state sharded over them, as in ZeRO-3.
    DataParallel,
    /// Model parallelism within groups of devices, task parallelism over the groups.
    Hybrid,
    /// Shard tasks of all models on all devices, under [`ShardedLrtf`] as the engine runs it.
    Sharp,
}

impl Strategy {
    /// Every strategy, in the order of the table.
    pub const ALL: [Self; 7] = [
        Self::ModelParallel,
        Self::Pipeline,
        Self::DataParallel,
        Self::Hybrid,
        Self::TaskParallel,
        Self::SpilledTaskParallel,
        Self::Sharp,
    ];

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ModelParallel => "model-parallel",
            Self::Pipeline => "pipeline",
            Self::TaskParallel => "task-parallel",
            Self::SpilledTaskParallel => "spilled-task-parallel",
            Self::DataParallel => "data-parallel",
            Self::Hybrid => "hybrid",
            Self::Sharp => "sharp",
        }
    }

    /// The assumptions behind its figures.
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
        }
    }

    /// The reason why devices are idle under it, for reports.
    pub const fn leaves_idle(self) -> &'static str {
        match self {
            Self::ModelParallel => {
                "one stage of one model computes at a time, and the other devices wait for it"
            }
            Self::Pipeline => "stages wait while each minibatch's microbatches fill and drain the pipeline",
            Self::TaskParallel => "a device without remaining models waits for those that still train",
            Self::SpilledTaskParallel => {
                "nothing fills a model's waits for its optimizer and its promotions, and a device without remaining models \
                 waits for those that still train"
            }
            Self::DataParallel => "devices wait for shards that take longer to move than to compute",
            Self::Hybrid => {
                "within a group one device computes at a time, and a group without remaining models waits"
            }
            Self::Sharp => "devices wait only if no model has a shard task to compute",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A device's electric power, for the energy column of the table.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct PowerModel {
    /// Watts while it computes.
    pub busy_w: f64,
    /// Watts while it is idle.
    pub idle_w: f64,
}

impl Default for PowerModel {
    /// 300 W and 60 W, typical of a data-center GPU.
    fn default() -> Self {
        Self { busy_w: 300.0, idle_w: 60.0 }
    }
}

/// The outcome of a strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct StrategyOutcome {
    /// The end of the last model, in seconds from the start.
    pub runtime_s: f64,
    /// Seconds of compute, per device.
    pub busy_s: Vec<f64>,
    /// Bytes that all devices received from each other or from the host, if sizes are known.
    pub moved_bytes: Option<u64>,
    /// The spans of all devices, if recorded.
    pub spans: Vec<ScheduleSpan>,
}

impl StrategyOutcome {
    /// Returns the fraction of all devices' time in which they computed.
    pub fn utilization(&self) -> f64 {
        let all_s = self.runtime_s * self.busy_s.len() as f64;
        if all_s > 0.0 { self.busy_s.iter().sum::<f64>() / all_s } else { 0.0 }
    }

    /// Returns the number of devices times the runtime, in hours.
    pub fn device_hours(&self) -> f64 {
        self.runtime_s * self.busy_s.len() as f64 / 3600.0
    }

    /// Returns the energy in kilowatt-hours under a power model.
    pub fn energy_kwh(&self, power: PowerModel) -> f64 {
        let busy_s: f64 = self.busy_s.iter().sum();
        let idle_s = (self.runtime_s * self.busy_s.len() as f64 - busy_s).max(0.0);
        (busy_s * power.busy_w + idle_s * power.idle_w) / 3.6e6
    }
}

/// A row of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The strategy.
    pub strategy: Strategy,
    /// The outcome, or the first task that does not fit.
    pub outcome: Result<StrategyOutcome, DoesNotFit>,
}

/// A model does not fit under a strategy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "task `{task}` needs {needed} bytes for parameters, gradients and optimizer state, but {available} are available"
)]
pub struct DoesNotFit {
    /// The task.
    pub task: String,
    /// The bytes of its training state.
    pub needed: u64,
    /// The bytes of the devices that it would be on.
    pub available: u64,
}

/// Evaluates every strategy on one workload, with the stated costs; `record` keeps [`StrategyOutcome::spans`].
///
/// # Errors
/// [`SimulationError::Workload`] if the workload violates a rule of [`Workload::check`].
pub fn compare(workload: &Workload, record: bool) -> Result<Vec<Row>, SimulationError> {
    workload.check()?;
    let mut stated = workload.clone();
    stated.variation = None;
    for task in &mut stated.tasks {
        (task.drift, task.estimate_factor) = (0.0, 1.0);
        task.evaluations.clear();
    }
    let mut whole = stated.clone();
    whole.tasks.iter_mut().for_each(without_microbatches);
    let row = |strategy| {
        let spills = matches!(strategy, Strategy::Sharp | Strategy::SpilledTaskParallel);
        let of = if spills { &stated } else { &whole };
        Ok(Row { strategy, outcome: outcome(of, strategy, record)? })
    };
    Strategy::ALL.into_iter().map(row).collect()
}

/// Merges each minibatch into one microbatch pass of the same total compute: strategies that keep models on
/// devices gather their parameters once for all microbatches, and choose their own microbatches.
fn without_microbatches(task: &mut TaskCost) {
    let microbatch_passes = task.training_passes() as f64 / task.minibatches as f64;
    for shard in &mut task.shards {
        (shard.forward_s, shard.backward_s) =
            (shard.forward_s * microbatch_passes, shard.backward_s * microbatch_passes);
    }
    (task.microbatches, task.epoch) = (1, None);
}

fn outcome(
    workload: &Workload,
    strategy: Strategy,
    record: bool,
) -> Result<Result<StrategyOutcome, DoesNotFit>, SimulationError> {
    let devices = workload.devices.len();
    Ok(match strategy {
        Strategy::ModelParallel => groups(workload, devices, Inside::OneByOne, record),
        Strategy::Pipeline => groups(workload, devices, Inside::Pipelined, record),
        Strategy::TaskParallel => groups(workload, 1, Inside::OneByOne, record),
        Strategy::Hybrid => groups(workload, group(workload), Inside::OneByOne, record),
        Strategy::DataParallel => fits(workload, devices).map(|()| data_parallel(workload, record)),
        Strategy::SpilledTaskParallel => Ok(spilled(workload, record)?),
        Strategy::Sharp => Ok(sharp(workload, record)?),
    })
}

fn sharp(workload: &Workload, record: bool) -> Result<StrategyOutcome, SimulationError> {
    let options = SimulationOptions { record, ..SimulationOptions::default() };
    let run = simulate(workload, &mut ShardedLrtf, options)?;
    Ok(StrategyOutcome {
        runtime_s: run.makespan_s,
        busy_s: run.busy_s,
        moved_bytes: run.promoted_bytes,
        spans: run.spans,
    })
}

/// Simulates each model alone on one device; the models in sequence, the longest first.
fn spilled(workload: &Workload, record: bool) -> Result<StrategyOutcome, SimulationError> {
    let mut all_runs = Vec::new();
    for cost in &workload.tasks {
        let Workload { shared_link, processors, optimizer_threads, variation, .. } = *workload;
        let alone = Workload::new(vec![TaskCost { arrival_s: 0.0, ..cost.clone() }], Vec::new());
        let mut alone = Workload { shared_link, processors, optimizer_threads, variation, ..alone };
        let mut runs = Vec::new();
        for device in &workload.devices {
            alone.devices = vec![device.clone()];
            let seen = runs.iter().find(|(of, _): &&(_, _)| of == device).map(|(_, run)| Clone::clone(run));
            let run = match seen {
                Some(run) => run,
                None => sharp(&alone, record)?,
            };
            runs.push((device.clone(), run));
        }
        all_runs.push(runs);
    }
    let mut order: Vec<usize> = (0..workload.tasks.len()).collect();
    order.sort_by(|a, b| all_runs[*b][0].1.runtime_s.total_cmp(&all_runs[*a][0].1.runtime_s));
    let mut sheet = Sheet::new(workload, record);
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
        let moved = |span: &ScheduleSpan| ScheduleSpan {
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
