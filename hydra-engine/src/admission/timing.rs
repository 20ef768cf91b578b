//! Times shards again while all devices compute; the pilot pass times them on a device that computes alone.

use super::AdmittedTask;
use super::measure::largest_microbatch;
use crate::device::{LogicalDevice, processors};
use crate::error::{EngineError, guarded};
use crate::train_task::TrainTask;
use hydra_core::Batch;
use hydra_partition::{InitialValues, PartitionPlan, PilotPartitioner, ShardPlan};
use std::panic::resume_unwind;
use std::sync::Arc;

/// A plan whose shards take longer than this in total is not timed again: a short disturbance of the machine weighs
/// little there.
const LONGEST_S: f64 = 1.0;
/// The least and the most rounds over all plans. For each shard, the middle half of its times counts, since a few may
/// be disturbed.
const ROUNDS: std::ops::Range<usize> = 3..100;
/// The part of the estimated compute time of the run after which no further round starts, so that short runs are
/// predicted soon.
const ENOUGH_PART: f64 = 0.1;
/// The least and the most seconds of shard tasks for that. Several rounds average over slow and fast moments of a machine.
const ENOUGH_S: std::ops::RangeInclusive<f64> = 0.1..=2.0;

/// The plans of the tasks with the times of their shards for an average batch, measured while as many devices compute
/// as there are processors for.
pub(crate) fn timed_plans(
    tasks: &[TrainTask],
    admitted: &[AdmittedTask],
    devices: &[LogicalDevice],
) -> Result<Vec<Arc<PartitionPlan>>, EngineError> {
    let mut timed: Vec<Timed<'_>> = Vec::new();
    for (task, of) in tasks.iter().zip(admitted) {
        if !timed.iter().any(|timed| Arc::ptr_eq(timed.plan, &of.plan)) {
            // Those of another seed do as well.
            let drawn = timed.iter().find(|timed| Arc::ptr_eq(&timed.task.chain, &task.chain));
            let values = drawn.map(|timed| timed.values.clone());
            let values = values.unwrap_or_else(|| Arc::new(InitialValues::new(&task.chain, task.spec.seed)));
            let batch = largest_microbatch(task)?;
            timed.push(Timed { task, values, batch, plan: &of.plan, rounds: Vec::new() });
        }
    }
    let devices = concurrent_devices(devices);
    let run_s: f64 = admitted.iter().map(|task| task.estimated_s).sum();
    let enough_s = (ENOUGH_PART * run_s).clamp(*ENOUGH_S.start(), *ENOUGH_S.end());
    for round in 0..ROUNDS.end {
        let taken_s: f64 = timed.iter().map(Timed::taken_s).sum();
        if round >= ROUNDS.start && taken_s >= enough_s {
            break;
        }
        timed.iter_mut().filter(|timed| timed.is_short()).try_for_each(|timed| timed.time_round(&devices))?;
    }
    let plans: Vec<(&Arc<PartitionPlan>, Arc<PartitionPlan>)> =
        timed.iter().map(|timed| (timed.plan, Arc::new(timed.typical()))).collect();
    let of = |(task, of): (&TrainTask, &AdmittedTask)| {
        let timed = plans.iter().find(|(own, _)| Arc::ptr_eq(own, &of.plan));
        for_mean_batch(timed.map_or(&of.plan, |(_, timed)| timed), task.train.mean_part())
    };
    Ok(tasks.iter().zip(admitted).map(of).collect())
}

/// Scales the times of a plan by `part`, the size of an average batch relative to the largest.
fn for_mean_batch(plan: &Arc<PartitionPlan>, part: f64) -> Arc<PartitionPlan> {
    if part >= 1.0 {
        return plan.clone();
    }
    let mut plan = PartitionPlan::clone(plan);
    plan.shards.iter_mut().for_each(|shard| {
        (shard.forward_s, shard.backward_s) = (shard.forward_s * part, shard.backward_s * part);
    });
    Arc::new(plan)
}

/// The devices that can compute at the same time on separate processors, at least one.
fn concurrent_devices(devices: &[LogicalDevice]) -> Vec<&LogicalDevice> {
    let mut left = processors();
    let mut fits = |device: &LogicalDevice| {
        let threads = device.spec.threads_here();
        let fits = threads <= left;
        left = if fits { left - threads } else { left };
        fits
    };
    let some: Vec<&LogicalDevice> = devices.iter().filter(|device| fits(device)).collect();
    if some.is_empty() { devices.iter().take(1).collect() } else { some }
}

/// A plan, a task that has it, and the plan with the times of each round.
struct Timed<'a> {
    task: &'a TrainTask,
    values: Arc<InitialValues<'a>>,
    batch: Batch,
    plan: &'a Arc<PartitionPlan>,
    rounds: Vec<PartitionPlan>,
}

impl Timed<'_> {
    fn is_short(&self) -> bool {
        self.plan.shards.iter().map(|of| of.forward_s + of.backward_s).sum::<f64>() <= LONGEST_S
    }

    /// Seconds of all rounds so far.
    fn taken_s(&self) -> f64 {
        let shards = self.rounds.iter().flat_map(|round| &round.shards);
        shards.map(|of| of.forward_s + of.backward_s).sum()
    }

    /// Times the shards on all devices concurrently and records the mean.
    fn time_round(&mut self, devices: &[&LogicalDevice]) -> Result<(), EngineError> {
        let Self { task, values, plan, batch, .. } = &*self;
        let on = |device: &LogicalDevice| -> Result<PartitionPlan, EngineError> {
            let mut plan = PartitionPlan::clone(plan);
            let partitioner = PilotPartitioner::new(&**values);
            guarded("the pilot pass", || Ok(partitioner.time(&mut plan, &task.chain, batch, device)?))?;
            Ok(plan)
        };
        let all: Vec<PartitionPlan> = std::thread::scope(|scope| {
            let threads: Vec<_> = devices.iter().map(|device| scope.spawn(|| on(device))).collect();
            let joined =
                threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            joined.collect::<Result<_, _>>()
        })?;
        let mut round = PartitionPlan::clone(plan);
        for (index, shard) in round.shards.iter_mut().enumerate() {
            let mean = |seconds: fn(&ShardPlan) -> f64| {
                all.iter().map(|plan| seconds(&plan.shards[index])).sum::<f64>() / all.len() as f64
            };
            (shard.forward_s, shard.backward_s) = (mean(|of| of.forward_s), mean(|of| of.backward_s));
        }
        self.rounds.push(round);
        Ok(())
    }

    /// The plan with the mean of the middle times of each shard.
    fn typical(&self) -> PartitionPlan {
        let mut typical = PartitionPlan::clone(self.plan);
        for (index, shard) in typical.shards.iter_mut().enumerate().filter(|_| !self.rounds.is_empty()) {
            let of = |seconds: fn(&ShardPlan) -> f64| {
                middle(self.rounds.iter().map(|of| seconds(&of.shards[index])).collect())
            };
            (shard.forward_s, shard.backward_s) = (of(|of| of.forward_s), of(|of| of.backward_s));
        }
        typical
    }
}

/// The mean of the times without the shortest and the longest quarter; of three times, the middle one.
fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    let skipped = times.len().div_ceil(4).min(times.len().saturating_sub(1) / 2);
    let of = &times[skipped..times.len() - skipped];
    of.iter().sum::<f64>() / of.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_disturbed_times_count_for_nothing() {
        assert_eq!(middle(vec![3.0]), 3.0);
        assert_eq!(middle(vec![1.0, 2.0, 6.0]), 2.0);
        assert_eq!(middle(vec![99.0, 2.0, 4.0, 0.0]), 3.0);
    }
}
