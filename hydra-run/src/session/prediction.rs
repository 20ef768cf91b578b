//! Predicts the time of a run by simulating its costs, also with more resources.

use anyhow::Result;
use hydra_engine::{Admission, AdmittedRun, Forecast, ForecastTask, LinkRate};
use hydra_sched::{
    Occupation, ScheduleSpan, ShardCost, ShardTaskKind, Simulation, SimulationOptions, TaskCost, Workload,
    simulate,
};
use serde::Serialize;
use std::collections::BTreeMap;

/// The maximum number of simulated shard tasks. Of a longer run, an even part is simulated.
const MOST_SHARD_TASKS: u64 = 400_000;
/// Simulated minibatches of each task from which the time of one is derived.
const SHOWN_MINIBATCHES: u64 = 6;
/// The minimum speedup of a change that is reported.
const HELPS: f64 = 1.1;
/// The minimum utilization of a resource that counts as the bottleneck.
const BUSY: f64 = 0.5;

/// The prediction of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Prediction {
    /// Seconds from the start of the first shard task to the end of the last one, as in reports.
    pub(crate) makespan_s: f64,
    /// One in `simulated_one_in` minibatches was simulated.
    pub(crate) simulated_one_in: u64,
    /// The devices with their links and utilization.
    pub(crate) devices: Vec<DevicePrediction>,
    /// Mean utilization of the host-to-device links by parameters, and of the device-to-host links by activations and
    /// gradients; 0 if nothing is moved.
    pub(crate) link_up: f64,
    pub(crate) link_down: f64,
    /// Bytes of the parameters of all tasks; shared parameters count once.
    pub(crate) parameter_bytes: u64,
    /// Bytes of parameters that the run promotes, and the share of promotions that the cache avoids.
    pub(crate) promoted_bytes: u64,
    pub(crate) saved: f64,
    pub(crate) tasks: Vec<TaskPrediction>,
    pub(crate) binding: Binding,
    /// The utilization of the bottleneck.
    pub(crate) busy: f64,
    /// The changes that help, largest speedup first.
    pub(crate) relief: Vec<Relief>,
    /// Work that the prediction does not include.
    pub(crate) excluded: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct DevicePrediction {
    pub(crate) name: String,
    pub(crate) link: LinkRate,
    pub(crate) computes: f64,
    /// Bytes of the parameter cache; `null` if there is none.
    pub(crate) copies_bytes: Option<u64>,
    /// Peak memory of the run on the device.
    pub(crate) peak_bytes: u64,
}

/// A minibatch of a task while the other tasks run, and the task's end.
#[derive(Debug, Serialize)]
pub(crate) struct TaskPrediction {
    #[serde(flatten)]
    pub(crate) moved: ForecastTask,
    /// Seconds from the end of a minibatch to that of the next.
    pub(crate) minibatch_s: f64,
    /// Bytes of parameters promoted per minibatch.
    pub(crate) promoted_bytes: u64,
    /// The end of the task, in seconds from the start of the run.
    pub(crate) finished_s: f64,
}

/// The bottleneck of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Binding {
    Compute,
    LinkUp,
    LinkDown,
    /// No device or link is busy most of the time: shard tasks wait for their own steps and promotions.
    Waits,
}

/// A change that makes the run faster.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Relief {
    pub(crate) change: &'static str,
    /// The speedup: the time without the change divided by the time with it.
    pub(crate) factor: f64,
}

/// A simulated run.
struct PredictedOutcome {
    run: Simulation,
    one_in: u64,
    makespan_s: f64,
    up: f64,
    down: f64,
}

impl Prediction {
    /// Predicts a run whose largest minibatch has `batch` items. Returns `None` if the run is too large for the simulator.
    pub(crate) fn of_run(run: &AdmittedRun, batch: usize) -> Result<Option<Self>> {
        let admission = run.admission();
        let Some(forecast) = run.forecast()? else { return Ok(None) };
        let excluded = excluded(admission, moves(&forecast));
        let batch_may_grow = admission.tasks.iter().all(|task| 4 * batch <= task.data.items);
        Self::simulated(forecast, excluded, batch_may_grow).map(Some)
    }

    /// Simulates a forecast. `batch_may_grow` is false if the data is too small for four times the batch size.
    fn simulated(forecast: Forecast, excluded: Vec<String>, batch_may_grow: bool) -> Result<Self> {
        let whole = outcome(&forecast)?;
        let computes = share_of(&whole.run.busy_s, whole.makespan_s / whole.one_in as f64);
        let (binding, busy) = binding(compute_share(&forecast.workload, &computes), whole.up, whole.down);
        let device = |(index, name): (usize, &String)| DevicePrediction {
            name: name.clone(),
            link: forecast.links[index],
            computes: computes[index],
            copies_bytes: forecast.workload.devices[index]
                .memory_bytes
                .filter(|_| forecast.keeps_copies(index)),
            peak_bytes: peak_bytes(&forecast, &whole.run, index),
        };
        let promoted = whole.run.promoted_bytes.unwrap_or(0).saturating_mul(whole.one_in);
        let all = (whole.run.promotions + whole.run.promotions_saved).max(1);
        Ok(Self {
            makespan_s: whole.makespan_s,
            simulated_one_in: whole.one_in,
            devices: forecast.devices.iter().enumerate().map(device).collect(),
            link_up: whole.up,
            link_down: whole.down,
            parameter_bytes: parameter_bytes(&forecast.workload),
            promoted_bytes: if moves(&forecast) { promoted } else { 0 },
            saved: whole.run.promotions_saved as f64 / all as f64,
            tasks: tasks(&forecast, &whole)?,
            binding,
            busy,
            relief: relief(&forecast, whole.makespan_s, batch_may_grow)?,
            excluded,
        })
    }
}

/// Returns the peak memory of a run on a device: what is resident there, the working memory of shard tasks, and the promoted
/// parameters. Without a
/// parameter cache these are the parameters of two shards (double buffer), or of one without promotions.
fn peak_bytes(forecast: &Forecast, run: &Simulation, device: usize) -> u64 {
    let shards = || forecast.workload.tasks.iter().flat_map(|task| &task.shards);
    let largest = shards().filter_map(|shard| shard.bytes).max().unwrap_or(0);
    let working = shards().map(|shard| shard.working.most()).max().unwrap_or(0);
    let working = working.saturating_sub(forecast.unused_bytes());
    let most = match (forecast.links[device], forecast.keeps_copies(device)) {
        (LinkRate::ZeroCopy, _) => largest + working,
        (_, true) => run.peak_bytes[device].saturating_sub(forecast.unused_bytes()),
        (_, false) if forecast.prefetch => 2 * largest + working,
        (_, false) => largest + working,
    };
    forecast.standing_bytes() + forecast.resident_bytes() + most
}

/// Returns the bytes of the parameters of all tasks. Frozen parts with the same id count once.
fn parameter_bytes(workload: &Workload) -> u64 {
    let shards = || workload.tasks.iter().flat_map(|task| &task.shards);
    let frozen: BTreeMap<u64, u64> =
        shards().flat_map(|shard| &shard.frozen).map(|part| (part.id, part.bytes)).collect();
    shards().map(ShardCost::own_bytes).sum::<u64>() + frozen.values().sum::<u64>()
}

/// Returns the work that the prediction does not include.
fn excluded(admission: &Admission, moves: bool) -> Vec<String> {
    let mut excluded = vec!["reading batches".to_owned()];
    if moves {
        excluded.push("uploads of activations to shards whose parameters are cached".to_owned());
    }
    if admission.max_concurrent.is_some() {
        excluded.push("queueing for host memory (the simulation starts all tasks together)".to_owned());
    }
    excluded
}

fn moves(forecast: &Forecast) -> bool {
    forecast.tasks.iter().any(|task| !task.device_resident)
        && forecast.links.iter().any(|link| link.bytes_per_s().is_some())
}

fn share_of(busy_s: &[f64], makespan_s: f64) -> Vec<f64> {
    busy_s.iter().map(|busy| if makespan_s > 0.0 { busy / makespan_s } else { 0.0 }).collect()
}

/// Returns the mean compute utilization. If the devices have more threads than there are processors, so that they share them by
/// time slicing, it is relative to the processors.
fn compute_share(workload: &Workload, computes: &[f64]) -> f64 {
    let threads: usize = workload.devices.iter().map(|device| device.threads).sum();
    match workload.processors.filter(|processors| threads > *processors) {
        Some(processors) => {
            let busy =
                workload.devices.iter().zip(computes).map(|(device, share)| device.threads as f64 * share);
            (busy.sum::<f64>() / processors as f64).min(1.0)
        }
        None => computes.iter().sum::<f64>() / computes.len().max(1) as f64,
    }
}

/// Returns the resource with the highest utilization, and the utilization.
fn binding(computes: f64, up: f64, down: f64) -> (Binding, f64) {
    let shares = [(Binding::Compute, computes), (Binding::LinkUp, up), (Binding::LinkDown, down)];
    let (of, share) = shares
        .into_iter()
        .fold((Binding::Waits, 0.0), |best, next| if next.1 > best.1 { next } else { best });
    if share < BUSY { (Binding::Waits, share) } else { (of, share) }
}

/// Simulates a run, or an even part of a long one.
fn outcome(forecast: &Forecast) -> Result<PredictedOutcome> {
    let one_in = forecast.workload.shard_tasks().div_ceil(MOST_SHARD_TASKS).max(1);
    let part = forecast.clone().divided(one_in);
    let run = simulated(&part, false)?;
    let rates = part.links.iter().filter_map(|link| link.bytes_per_s());
    let (rate, links) = (rates.clone().fold(f64::INFINITY, f64::min), rates.count().max(1));
    let down_s =
        (0..part.tasks.len()).map(|task| part.downloaded_bytes(task)).sum::<f64>() / rate / links as f64;
    let part_s = run.makespan_s - run.first_start_s;
    let device_resident = |task: usize| part.tasks[task].device_resident;
    let all_device_resident = (0..part.tasks.len()).all(device_resident);
    let promoted = if all_device_resident { 0 } else { run.promoted_bytes.unwrap_or(0) };
    let up_s = promoted as f64 / rate / links as f64;
    let share = |s: f64| if part_s > 0.0 { s / part_s } else { 0.0 };
    Ok(PredictedOutcome {
        one_in,
        makespan_s: part_s * one_in as f64,
        up: share(up_s),
        down: share(down_s),
        run,
    })
}

fn simulated(forecast: &Forecast, record: bool) -> Result<Simulation> {
    let options = SimulationOptions { prefetch: forecast.prefetch, record };
    Ok(simulate(&forecast.workload, &mut *forecast.policy.build(forecast.seed), options)?)
}

/// Predicts the minibatches of the tasks from the first few of all tasks, without evaluations.
fn tasks(forecast: &Forecast, whole: &PredictedOutcome) -> Result<Vec<TaskPrediction>> {
    let first = forecast.clone().first_minibatches(SHOWN_MINIBATCHES, false);
    let run = simulated(&first, true)?;
    let task = |(index, moved): (usize, &ForecastTask)| {
        let spans = || run.spans.iter().filter(move |span| span.task == index);
        let (minibatch_s, promoted_bytes) = minibatch(&first.workload.tasks[index], spans());
        TaskPrediction {
            moved: moved.clone(),
            minibatch_s,
            promoted_bytes: if moves(forecast) && !moved.device_resident { promoted_bytes } else { 0 },
            finished_s: (whole.run.finished_s[index] - whole.run.first_start_s) * whole.one_in as f64,
        }
    };
    Ok(forecast.tasks.iter().enumerate().map(task).collect())
}

/// Returns the mean seconds and promoted bytes of a minibatch, without the first one if there are several.
fn minibatch<'a>(cost: &TaskCost, spans: impl Iterator<Item = &'a ScheduleSpan>) -> (f64, u64) {
    let mut ends = vec![0.0_f64; cost.minibatches as usize];
    let mut promoted = vec![0_u64; cost.minibatches as usize];
    for span in spans {
        let at = span.minibatch as usize;
        match span.what {
            Occupation::Promote { bytes } => promoted[at] += bytes,
            Occupation::Compute(ShardTaskKind::Backward) => ends[at] = ends[at].max(span.end_s),
            Occupation::Compute(_) => {}
        }
    }
    let (first_s, skipped) = if ends.len() > 1 { (ends[0], 1) } else { (0.0, 0) };
    let count = (ends.len() - skipped).max(1);
    let last_s = ends.last().copied().unwrap_or(0.0);
    let bytes: u64 = promoted.iter().skip(skipped).sum();
    ((last_s - first_s) / count as f64, bytes / count as u64)
}

/// Returns the changes that help.
fn relief(forecast: &Forecast, makespan_s: f64, batch_may_grow: bool) -> Result<Vec<Relief>> {
    let mut changes: Vec<(&'static str, Forecast)> = vec![
        ("twice the device memory", forecast.clone().with_memory(2)),
        ("one device more", forecast.clone().with_another_device()),
        ("devices that compute twice as fast", forecast.clone().with_speed(2.0)),
    ];
    if moves(forecast) {
        changes.push(("a link twice as fast", forecast.clone().with_links(2.0)));
        let long = forecast.workload.tasks.iter().all(|task| task.minibatches >= 4);
        if batch_may_grow && long {
            let change = "4 times the microbatches per minibatch (--batch and --accumulate times 4, which changes training)";
            changes.push((change, forecast.clone().with_microbatches(4)));
        }
    }
    let mut relief = Vec::new();
    for (change, forecast) in changes {
        let factor = makespan_s / outcome(&forecast)?.makespan_s;
        if factor > HELPS && factor.is_finite() {
            relief.push(Relief { change, factor });
        }
    }
    relief.sort_by(|a, b| b.factor.total_cmp(&a.factor));
    Ok(relief)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_sched::DeviceCost;

    #[test]
    fn the_busiest_binds_and_nothing_does_that_is_idle_most_of_the_time() {
        assert_eq!(binding(0.3, 0.71, 0.2), (Binding::LinkUp, 0.71));
        assert_eq!(binding(0.9, 0.71, 0.2), (Binding::Compute, 0.9));
        assert_eq!(binding(0.3, 0.4, 0.95), (Binding::LinkDown, 0.95));
        assert_eq!(binding(0.3, 0.4, 0.2), (Binding::Waits, 0.4));
    }

    #[test]
    fn devices_that_take_turns_compute_all_the_time_if_the_processors_do() {
        let device = |threads| DeviceCost { threads, ..DeviceCost::default() };
        let workload = |processors, threads: [usize; 4]| {
            let devices = threads.into_iter().map(device).collect();
            Workload { processors, ..Workload::new(Vec::new(), devices) }
        };
        let shares = [0.5, 0.5, 0.25, 0.75];
        assert_eq!(compute_share(&workload(Some(2), [1; 4]), &shares), 1.0);
        assert_eq!(compute_share(&workload(Some(4), [1; 4]), &shares), 0.5);
        assert_eq!(compute_share(&workload(Some(4), [2, 2, 1, 1]), &shares), 0.75);
        assert_eq!(compute_share(&workload(None, [1; 4]), &shares), 0.5);
    }

    #[test]
    fn a_minibatch_is_what_comes_between_two_ends() {
        let shard = ShardCost { bytes: Some(7), ..ShardCost::new(1.0, 2.0, 1.0) };
        let cost = TaskCost::new("a", 3, vec![shard]);
        let span = |minibatch: u64, what, start_s: f64, end_s: f64| ScheduleSpan {
            device: 0,
            task: 0,
            minibatch,
            shard: 0,
            what,
            start_s,
            end_s,
        };
        let train = Occupation::Compute(ShardTaskKind::Backward);
        let spans: Vec<ScheduleSpan> = (0..3)
            .flat_map(|m| {
                let at = 10.0 * m as f64;
                [span(m, Occupation::Promote { bytes: 7 }, at, at + 1.0), span(m, train, at + 1.0, at + 3.0)]
            })
            .collect();
        assert_eq!(minibatch(&cost, spans.iter()), (10.0, 7));
    }
}
