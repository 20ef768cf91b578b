//! Models on groups of devices that hold them whole: model, pipeline and data parallelism, and hybrids.

use super::sheet::{Bar, Line, Minibatch, Sheet};
use super::{DoesNotFit, STATE, StrategyOutcome};
use crate::policy::ShardTaskKind;
use crate::simulator::{TaskCost, Workload};

/// How a group of devices processes its model.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Inside {
    /// One shard task at a time.
    OneByOne,
    /// Microbatches in a pipeline.
    Pipelined,
}

/// Groups of `size` devices, each with one model at a time; the longest models first if there are several
/// groups.
pub(super) fn groups(
    workload: &Workload,
    size: usize,
    inside: Inside,
    record: bool,
) -> Result<StrategyOutcome, DoesNotFit> {
    fits(workload, size)?;
    // Remaining devices that do not form a whole group stay idle.
    let groups: Vec<Vec<usize>> = (0..workload.devices.len() / size)
        .map(|group| (group * size..(group + 1) * size).collect())
        .collect();
    let mut order: Vec<usize> = (0..workload.tasks.len()).collect();
    let length = |task: &usize| workload.tasks[*task].pass_s() * workload.tasks[*task].minibatches as f64;
    if groups.len() > 1 {
        order.sort_by(|a, b| length(b).total_cmp(&length(a)));
    }
    let mut sheet = Sheet::new(workload, record);
    let mut line = Line::new(workload, order);
    let free_s =
        |sheet: &Sheet| groups.iter().map(|group| sheet.free_s[group[0]]).fold(f64::INFINITY, f64::min);
    while let Some(task) = line.next(workload, free_s(&sheet)) {
        let cost = &workload.tasks[task];
        let plan = |group: &Vec<usize>| Minibatch::of(workload, cost, group, inside);
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

pub(super) fn data_parallel(workload: &Workload, record: bool) -> StrategyOutcome {
    let devices: Vec<usize> = (0..workload.devices.len()).collect();
    let speed: f64 = workload.devices.iter().map(|device| device.speed).sum();
    let share = (devices.len() - 1) as f64 / devices.len() as f64;
    let mut sheet = Sheet::new(workload, record);
    let (mut now_s, mut moved) = (0.0f64, Some(0.0));
    let mut line = Line::new(workload, (0..workload.tasks.len()).collect());
    while let Some(task) = line.next(workload, now_s) {
        let cost = &workload.tasks[task];
        let mut minibatch = Minibatch { length_s: 0.0, bars: Vec::new() };
        for (kind, shard) in cost.microbatch_pass() {
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

impl Minibatch {
    fn of(workload: &Workload, cost: &TaskCost, group: &[usize], inside: Inside) -> Self {
        let first = stages(cost, group.len());
        let stage_of = |shard: usize| first.partition_point(|first| *first <= shard) - 1;
        match inside {
            Inside::OneByOne => {
                let mut made = Self { length_s: 0.0, bars: Vec::new() };
                for (kind, shard) in cost.microbatch_pass() {
                    let device = group[stage_of(shard)];
                    let seconds = cost.shards[shard].seconds(kind) / workload.devices[device].speed;
                    made.push(device, kind, shard, made.length_s, seconds);
                }
                made
            }
            Inside::Pipelined => {
                let mut stages = vec![(0.0, 0.0); first.len()];
                for (kind, shard) in cost.microbatch_pass() {
                    let (stage, costs) = (stage_of(shard), &cost.shards[shard]);
                    // A microbatch per stage.
                    let share = 1.0 / (workload.devices[group[stage]].speed * first.len() as f64);
                    // The last shard's forward is fused with its backward only if nothing runs between them.
                    let fused = kind == ShardTaskKind::Backward && shard + 1 == cost.shards.len();
                    let forward_s = match kind {
                        ShardTaskKind::Backward if !fused => 0.0,
                        _ => costs.forward_s.min(costs.seconds(kind)),
                    };
                    stages[stage].0 += forward_s * share;
                    stages[stage].1 += (costs.seconds(kind) - forward_s) * share;
                }
                Self::pipelined(&stages, group, &first)
            }
        }
    }

    /// GPipe: the forwards of all microbatches, then the backwards, the last first.
    fn pipelined(stages: &[(f64, f64)], group: &[usize], first: &[usize]) -> Self {
        let mut made = Self { length_s: 0.0, bars: Vec::new() };
        let mut free_s = vec![0.0f64; stages.len()];
        for kind in [ShardTaskKind::Forward, ShardTaskKind::Backward] {
            for _microbatch in 0..stages.len() {
                let mut input_s = 0.0f64;
                for place in 0..stages.len() {
                    let forward = kind == ShardTaskKind::Forward;
                    let stage = if forward { place } else { stages.len() - 1 - place };
                    let seconds = if forward { stages[stage].0 } else { stages[stage].1 };
                    let start_s = input_s.max(free_s[stage]);
                    made.push(group[stage], kind, first[stage], start_s, seconds);
                    input_s = start_s + seconds;
                    free_s[stage] = input_s;
                }
            }
        }
        made
    }
}

/// The first shards of at most `most` contiguous stages that minimize the longest stage.
pub(super) fn stages(cost: &TaskCost, most: usize) -> Vec<usize> {
    let mut seconds = vec![0.0; cost.shards.len()];
    cost.microbatch_pass().for_each(|(kind, shard)| seconds[shard] += cost.shards[shard].seconds(kind));
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
    // Fifty halvings are below the precision of a double.
    for _ in 0..50 {
        let middle = 0.5 * (low + high);
        if cut(middle).len() <= most { high = middle } else { low = middle }
    }
    cut(high * (1.0 + 1e-12))
}

/// Checks that every model's training state fits groups of this many devices; unknown sizes fit.
pub(super) fn fits(workload: &Workload, size: usize) -> Result<(), DoesNotFit> {
    let memory: Option<Vec<u64>> = workload.devices.iter().map(|device| device.memory_bytes).collect();
    let Some(memory) = memory else { return Ok(()) };
    let sum = |bytes: &mut dyn Iterator<Item = u64>| bytes.fold(0, u64::saturating_add);
    let groups = memory.chunks_exact(size).map(|group| sum(&mut group.iter().copied()));
    let available = groups.min().unwrap_or(0);
    for task in &workload.tasks {
        // If memory is stated, so is every size. Frozen shards have only parameters.
        let state = |shard: usize| if shard < task.first_trained { 1 } else { STATE };
        let sizes = task.shards.iter().enumerate();
        let needed =
            sum(&mut sizes.filter_map(|(index, shard)| Some(shard.bytes?.saturating_mul(state(index)))));
        if needed > available {
            return Err(DoesNotFit { task: task.name.clone(), needed, available });
        }
    }
    Ok(())
}

pub(super) fn group(workload: &Workload) -> usize {
    let devices = workload.devices.len();
    let known = workload.devices.iter().all(|device| device.memory_bytes.is_some());
    let smallest = (1..=devices).find(|size| known && fits(workload, *size).is_ok());
    smallest.unwrap_or(devices / 2).clamp(1, devices)
}
