//! Chooses the number of microbatch passes in a microbatch group: the one with the least link traffic, within host
//! memory.
//!
//! With `K` microbatches in a group, a minibatch of `N` promotes the parameters that its device cannot cache `2
//! ceil(N / K)` times, and the gradients of the first group are downloaded as one sum if there is memory for it. With
//! `K > 1`, boundary activations and gradients do not stay on the device between two shards: they are downloaded and
//! uploaded again.
//!
//! One microbatch group is in flight per device that is free for the task, each in its own replica, within host
//! memory.

use super::cut::CutTask;
use super::host_memory::{HostMemory, HostMemoryPlan};
use super::placement::Placement;
use super::search::{Cost, best};
use super::sizes::{Concurrency, TaskSizes};
use super::traffic::{MOST_BATCHES, Traffic, accumulation_bytes, cheapest};
use crate::error::EngineError;
use crate::train_task::TrainTask;
use hydra_sched::program::MicrobatchGroup;

/// The properties of the run's devices on which microbatch groups depend.
pub(super) struct GroupDevices {
    pub count: usize,
    /// True if devices cache parameters after their shard task.
    pub cache: bool,
}

/// The microbatch groups that a task wants regardless of host memory: the length that the user set or the one with
/// the least traffic, and one replica per device.
fn wanted(cut: &CutTask<'_>, on: &Placement, devices: &GroupDevices, tasks: usize) -> Concurrency {
    let microbatch_group = wanted_group(cut, on, devices, tasks);
    Concurrency { microbatch_group, replicas: replicas(cut, on, microbatch_group, devices), flows: true }
}

fn wanted_group(cut: &CutTask<'_>, on: &Placement, devices: &GroupDevices, tasks: usize) -> MicrobatchGroup {
    let least = least(cut, on);
    if on.on_device() || !devices.cache {
        return least;
    }
    let program = cut.task.program(&cut.plan.shards(), cut.task.chain.first_trained(), MicrobatchGroup::ONE);
    let accumulation_bytes = |shard| accumulation_bytes(cut.task, &cut.plan, shard);
    let shared_by = tasks.div_ceil(devices.count.max(1));
    let traffic = Traffic::of_plan((&cut.plan, program.first_trained), shared_by, accumulation_bytes);
    let microbatches = program.microbatches.each;
    let most = devices.most_microbatches(cut.task, microbatches, tasks);
    let chosen =
        || cheapest(1..=most, |microbatch_group| traffic.minibatch(microbatches, microbatch_group)).0;
    let batches = program.most_batches();
    let batches = batches.div_ceil(devices.each(cut.task, tasks)).clamp(1, MOST_BATCHES);
    MicrobatchGroup {
        microbatches: cut.task.execution.microbatch_group.unwrap_or_else(chosen),
        batches: cheapest(1..=batches, |microbatch_group| traffic.evaluation(microbatch_group)).0,
    }
}

impl GroupDevices {
    /// The number of devices that compute one of `tasks` tasks at the same time: devices without another task take
    /// microbatch groups of this one, each over its own link.
    fn each(&self, task: &TrainTask, tasks: usize) -> usize {
        self.count.div_ceil(tasks.max(1)).min(task.execution.most_devices.unwrap_or(usize::MAX)).max(1)
    }

    /// The longest useful microbatch group for a task with `microbatches` microbatches, so that each device that
    /// computes it has a group.
    pub(super) fn most_microbatches(&self, task: &TrainTask, microbatches: usize, tasks: usize) -> usize {
        microbatches.div_ceil(self.each(task, tasks))
    }
}

/// The number of microbatch groups of this length that can be in flight, at most those of a minibatch or an
/// evaluation. A device-resident task is on one device.
fn replicas(
    cut: &CutTask<'_>,
    on: &Placement,
    microbatch_group: MicrobatchGroup,
    devices: &GroupDevices,
) -> usize {
    if on.on_device() {
        return 1;
    }
    let program = cut.task.program(&cut.plan.shards(), 0, MicrobatchGroup::ONE);
    let trained = if cut.task.evaluate_only {
        0
    } else {
        program.microbatches.each.div_ceil(microbatch_group.microbatches)
    };
    let evaluated = program.most_batches().div_ceil(microbatch_group.batches);
    let most = cut.task.execution.most_devices.unwrap_or(usize::MAX).min(devices.count);
    most.min(trained.max(evaluated)).max(1)
}

/// The shortest microbatch group of a task: the length that the user set, or one.
fn least(cut: &CutTask<'_>, on: &Placement) -> MicrobatchGroup {
    MicrobatchGroup { microbatches: user_length(cut, on).unwrap_or(1), ..MicrobatchGroup::ONE }
}

/// The length of microbatch groups that the user set. A device-resident task has nothing to promote and uses one.
fn user_length(cut: &CutTask<'_>, on: &Placement) -> Option<usize> {
    if on.on_device() { Some(1) } else { cut.task.execution.microbatch_group }
}

/// The sizes of tasks with the shortest microbatch groups and one replica.
pub(super) fn least_sizes(cut: &[CutTask<'_>], placed: &[Placement], devices: usize) -> Vec<TaskSizes> {
    let of = |(cut, on)| TaskSizes::of(cut, on, least_of(cut, on), devices);
    cut.iter().zip(placed).map(of).collect()
}

fn least_of(cut: &CutTask<'_>, on: &Placement) -> Concurrency {
    Concurrency { microbatch_group: least(cut, on), replicas: 1, flows: false }
}

/// The sizes of tasks and their memory, with the longest microbatch groups, the most replicas and the most gradients
/// that wait for a sum that tasks want, as far as host memory allows: nothing costs more than with the least.
pub(super) fn widest(
    cut: &[CutTask<'_>],
    placed: &[Placement],
    devices: &GroupDevices,
    host: &HostMemory<'_>,
) -> Result<(Cost, (Vec<TaskSizes>, HostMemoryPlan)), EngineError> {
    // The least concurrency takes the least memory, so that no other candidate costs less.
    let (bound, least) = host.cheapest(&least_sizes(cut, placed, devices.count))?;
    let wanted: Vec<Concurrency> =
        cut.iter().zip(placed).map(|(task, on)| wanted(task, on, devices, cut.len())).collect();
    let limits = limits(&wanted, cut.len() < devices.count);
    let wide = limits.into_iter().flat_map(|limit| [Some((limit, true)), Some((limit, false))]);
    best(wide.chain([None]).map(|limit| (bound, limit)), |limit| {
        let sizes = |((task, on), wanted): ((&CutTask<'_>, &Placement), &Concurrency)| {
            let limited =
                |(limit, flows)| Concurrency { flows, ..wanted.limited(limit, user_length(task, on)) };
            TaskSizes::of(task, on, limit.map_or(least_of(task, on), limited), devices.count)
        };
        let sizes: Vec<TaskSizes> = cut.iter().zip(placed).zip(&wanted).map(sizes).collect();
        let (cost, plan) = host.cheapest(&sizes)?;
        Ok((Cost { ahead: least.ahead.saturating_sub(plan.ahead), ..cost }, (sizes, plan)))
    })
}

/// The limits of group length and replicas to try, the best first. If devices would be idle, replicas matter more
/// than length.
fn limits(wanted: &[Concurrency], devices_idle: bool) -> Vec<(usize, usize)> {
    let microbatch_passes =
        wanted.iter().map(|of| of.microbatch_group.microbatches.max(of.microbatch_group.batches)).max();
    let replicas = wanted.iter().map(|of| of.replicas).max();
    let [microbatch_passes, replicas] = [microbatch_passes, replicas].map(|most| halves(most.unwrap_or(1)));
    let mut limits: Vec<(usize, usize)> = microbatch_passes
        .iter()
        .flat_map(|microbatch_passes| replicas.iter().map(|replicas| (*microbatch_passes, *replicas)))
        .collect();
    if devices_idle {
        limits.sort_by_key(|(_, replicas)| std::cmp::Reverse(*replicas));
    }
    limits
}

/// `most`, its half, and so on down to one.
fn halves(most: usize) -> Vec<usize> {
    std::iter::successors(Some(most), |n| Some(n / 2)).take_while(|n| *n > 0).collect()
}

impl Concurrency {
    /// Limits the length of microbatch groups, except one that was `asked` for, and the number of replicas.
    fn limited(self, (microbatch_passes, replicas): (usize, usize), asked: Option<usize>) -> Self {
        let microbatches = asked.unwrap_or(self.microbatch_group.microbatches.min(microbatch_passes));
        let microbatch_group =
            MicrobatchGroup { microbatches, batches: self.microbatch_group.batches.min(microbatch_passes) };
        Self { microbatch_group, replicas: self.replicas.min(replicas), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::super::traffic::Boundaries;
    use super::*;

    #[test]
    fn a_group_is_as_long_as_saves_more_than_boundaries_cost() {
        let chosen = |promoted, boundaries, microbatches| {
            let boundaries = Boundaries::new(&[0, boundaries], 0);
            let traffic = Traffic { passes: 2, promoted, boundaries, ..Traffic::default() };
            let training = cheapest(1..=microbatches, |microbatch_group| {
                traffic.minibatch(microbatches, microbatch_group)
            });
            (
                training.0,
                cheapest(1..=MOST_BATCHES, |microbatch_group| traffic.evaluation(microbatch_group)).0,
            )
        };
        assert_eq!(chosen(1000, 1, 8), (8, 16));
        assert_eq!(chosen(1000, 1, 1), (1, 16));
        // The boundaries of four microbatches, up again as activations and as gradients, against three promotions of
        // everything.
        assert_eq!((chosen(80, 60, 4).0, chosen(80, 59, 4).0), (1, 4));
        // The boundaries of sixteen batches, up again, against fifteen promotions.
        assert_eq!((chosen(64, 60, 4).1, chosen(64, 59, 4).1), (1, 16));
        let adds_up = Traffic { gradients: 100, summed: 40, ..Traffic::default() };
        assert_eq!(
            cheapest(1..=8, |microbatch_group| adds_up.minibatch(8, microbatch_group)),
            (8, 520),
            "one sum goes down"
        );
        assert_eq!(chosen(0, 1, 8), (1, 1), "what stays on the device need not be visited");
    }

    #[test]
    fn what_was_asked_for_is_not_limited() {
        let concurrency = Concurrency {
            microbatch_group: MicrobatchGroup { microbatches: 8, batches: 16 },
            replicas: 4,
            ..Concurrency::ONE
        };
        let limited = |asked| {
            let Concurrency { microbatch_group, replicas, .. } = concurrency.limited((4, 2), asked);
            (microbatch_group.microbatches, microbatch_group.batches, replicas)
        };
        assert_eq!((limited(None), limited(Some(8))), ((4, 4, 2), (8, 4, 2)));
    }

    #[test]
    fn several_groups_at_once_go_last_where_devices_would_idle() {
        let wanted = [
            Concurrency {
                microbatch_group: MicrobatchGroup { microbatches: 4, batches: 1 },
                replicas: 2,
                ..Concurrency::ONE
            },
            Concurrency::ONE,
        ];
        let busy = [(4, 2), (4, 1), (2, 2), (2, 1), (1, 2), (1, 1)];
        assert_eq!(limits(&wanted, false), busy);
        assert_eq!(limits(&wanted, true), [(4, 2), (2, 2), (1, 2), (4, 1), (2, 1), (1, 1)]);
        assert_eq!(limits(&[], true), [(1, 1)]);
    }
}
