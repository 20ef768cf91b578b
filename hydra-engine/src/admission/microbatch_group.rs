//! The choice of how many microbatch passes a microbatch group has: what moves over the link decides, and host memory limits it.
//!
//! With `K` microbatches in a microbatch group a minibatch of `N` promotes what its device has no room for `2 ceil(N / K)` times, and the
//! gradients of the first microbatch group go down as one sum where there is room for that. The boundary activations and gradients of more
//! than one do not stay on the device between two shards: they go down and come up again.
//!
//! As many microbatch groups are under way at once as there are devices for them, each in a replica of its own; host memory limits that too.

use super::cut::CutTask;
use super::host_memory::{HostMemory, Room};
use super::placement::Placement;
use super::sizes::{Pace, TaskSizes};
use super::traffic::{MOST_BATCHES, Traffic, accumulation_bytes, cheapest};
use crate::error::EngineError;
use crate::stages::MicrobatchGroup;
use crate::train_task::TrainTask;

/// The devices of a run, as microbatch groups depend on them.
pub(super) struct GroupDevices {
    pub count: usize,
    /// True if copies stay on them after their shard task.
    pub cache: bool,
}

/// The microbatch groups that a task wants, whatever host memory it takes: with the microbatches that were asked for, or those with
/// which the least moves; and as many at once as there are devices.
fn wanted(cut: &CutTask<'_>, on: &Placement, devices: &GroupDevices, tasks: usize) -> Pace {
    let microbatch_group = wanted_group(cut, on, devices, tasks);
    Pace { microbatch_group, replicas: replicas(cut, on, microbatch_group, devices), flows: true }
}

fn wanted_group(cut: &CutTask<'_>, on: &Placement, devices: &GroupDevices, tasks: usize) -> MicrobatchGroup {
    let least = least(cut, on);
    if on.on_device() || !devices.cache {
        return least;
    }
    let program = cut.task.program(&cut.plan.shards(), 0, MicrobatchGroup::ONE);
    let accumulation_bytes = |shard| accumulation_bytes(cut.task, &cut.plan, shard);
    let traffic = Traffic::of_plan(&cut.plan, tasks.div_ceil(devices.count.max(1)), accumulation_bytes);
    let microbatches = program.microbatches;
    let most = devices.most_microbatches(cut.task, microbatches, tasks);
    let chosen =
        || cheapest(1..=most, |microbatch_group| traffic.minibatch(microbatches, microbatch_group)).0;
    let batches = program.validation.max(program.test);
    let batches = batches.div_ceil(devices.each(cut.task, tasks)).clamp(1, MOST_BATCHES);
    MicrobatchGroup {
        microbatches: cut.task.microbatch_group.unwrap_or_else(chosen),
        batches: cheapest(1..=batches, |microbatch_group| traffic.evaluation(microbatch_group)).0,
    }
}

impl GroupDevices {
    /// The devices that compute a task, one of so many, at once: those that would have nothing else to compute take microbatch groups of
    /// their own, each over its own link.
    fn each(&self, task: &TrainTask, tasks: usize) -> usize {
        self.count.div_ceil(tasks.max(1)).min(task.most_devices.unwrap_or(usize::MAX)).max(1)
    }

    /// The most of so many microbatches that a microbatch group of a task should have, with a microbatch group for each device that computes it.
    pub(super) fn most_microbatches(&self, task: &TrainTask, microbatches: usize, tasks: usize) -> usize {
        microbatches.div_ceil(self.each(task, tasks))
    }
}

/// The microbatch groups of this length that can be under way at once: no more than there are of a minibatch or an evaluation. What is
/// device-homed is on one device.
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
    let trained =
        if cut.task.evaluate_only { 0 } else { program.microbatches.div_ceil(microbatch_group.microbatches) };
    let evaluated = program.validation.max(program.test).div_ceil(microbatch_group.batches);
    let most = cut.task.most_devices.unwrap_or(usize::MAX).min(devices.count);
    most.min(trained.max(evaluated)).max(1)
}

/// The microbatch groups that a task has at least: one microbatch pass each, if it did not ask for more.
fn least(cut: &CutTask<'_>, on: &Placement) -> MicrobatchGroup {
    MicrobatchGroup { microbatches: asked(cut, on).unwrap_or(1), ..MicrobatchGroup::ONE }
}

/// The microbatches that were asked for; one that is device-homed has nothing to promote, and makes one microbatch pass after another.
fn asked(cut: &CutTask<'_>, on: &Placement) -> Option<usize> {
    if on.on_device() { Some(1) } else { cut.task.microbatch_group }
}

/// The sizes of tasks with one microbatch group at a time of one microbatch pass, where nothing else was asked for.
pub(super) fn least_sizes(cut: &[CutTask<'_>], placed: &[Placement], devices: usize) -> Vec<TaskSizes> {
    let least = |(cut, on)| {
        TaskSizes::of(cut, on, Pace { microbatch_group: least(cut, on), replicas: 1, flows: false }, devices)
    };
    cut.iter().zip(placed).map(least).collect()
}

/// Widens microbatch groups, has several of them under way at once, and gives these room for gradients that wait for a sum, as far as
/// tasks want it and host memory has room for: nothing goes to the disk for it, and no device stays without a model, nor a
/// model alone with the waits that another one fills. Gives the sizes and the room.
pub(super) fn widen(
    cut: &[CutTask<'_>],
    placed: &[Placement],
    devices: &GroupDevices,
    host: &HostMemory<'_>,
    least_sizes: Vec<TaskSizes>,
) -> Result<(Vec<TaskSizes>, Room), EngineError> {
    let least_room = host.find_space(&least_sizes)?;
    let is_as_good = |room: &Room| {
        room.division.disk <= least_room.division.disk
            && room.active_models >= least_room.active_models.min(devices.count + 1)
            && room.ahead >= least_room.ahead
            && room.gradient_shards >= least_room.gradient_shards
            && room.queued == least_room.queued
    };
    let wanted: Vec<Pace> =
        cut.iter().zip(placed).map(|(task, on)| wanted(task, on, devices, cut.len())).collect();
    let limits = limits(&wanted, cut.len() < devices.count);
    for (limit, flows) in limits.into_iter().flat_map(|limit| [(limit, true), (limit, false)]) {
        let sizes = |((task, on), wanted): ((&CutTask<'_>, &Placement), &Pace)| {
            let pace = Pace { flows, ..wanted.limited(limit, asked(task, on)) };
            TaskSizes::of(task, on, pace, devices.count)
        };
        let sizes: Vec<TaskSizes> = cut.iter().zip(placed).zip(&wanted).map(sizes).collect();
        if let Some(room) = host.find_space(&sizes).ok().filter(is_as_good) {
            return Ok((sizes, room));
        }
    }
    Ok((least_sizes, least_room))
}

/// The limits of microbatch passes and replicas to try, the best ones first: several microbatch groups at once matter more than long ones where devices
/// would otherwise have nothing to compute.
fn limits(wanted: &[Pace], devices_idle: bool) -> Vec<(usize, usize)> {
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

/// A number, its half, and so on down to one.
fn halves(most: usize) -> Vec<usize> {
    std::iter::successors(Some(most), |n| Some(n / 2)).take_while(|n| *n > 0).collect()
}

impl Pace {
    /// This pace with at most so many microbatch passes a microbatch group, but for the microbatches that were `asked` for, and so many microbatch groups.
    fn limited(self, (microbatch_passes, replicas): (usize, usize), asked: Option<usize>) -> Self {
        let microbatches = asked.unwrap_or(self.microbatch_group.microbatches.min(microbatch_passes));
        let microbatch_group =
            MicrobatchGroup { microbatches, batches: self.microbatch_group.batches.min(microbatch_passes) };
        Self { microbatch_group, replicas: self.replicas.min(replicas), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_as_long_as_saves_more_than_boundaries_cost() {
        let chosen = |promoted, boundaries, microbatches| {
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
        // The boundaries of four microbatches, down and up and both ways again as gradients, against three promotions of everything.
        assert_eq!((chosen(80, 30, 4).0, chosen(80, 29, 4).0), (1, 4));
        // Those of sixteen batches, down and up, against fifteen promotions.
        assert_eq!((chosen(64, 30, 4).1, chosen(64, 29, 4).1), (1, 16));
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
        let pace = Pace {
            microbatch_group: MicrobatchGroup { microbatches: 8, batches: 16 },
            replicas: 4,
            ..Pace::ONE
        };
        let limited = |asked| {
            let Pace { microbatch_group, replicas, .. } = pace.limited((4, 2), asked);
            (microbatch_group.microbatches, microbatch_group.batches, replicas)
        };
        assert_eq!((limited(None), limited(Some(8))), ((4, 4, 2), (8, 4, 2)));
    }

    #[test]
    fn several_groups_at_once_go_last_where_devices_would_idle() {
        let wanted = [
            Pace {
                microbatch_group: MicrobatchGroup { microbatches: 4, batches: 1 },
                replicas: 2,
                ..Pace::ONE
            },
            Pace::ONE,
        ];
        let busy = [(4, 2), (4, 1), (2, 2), (2, 1), (1, 2), (1, 1)];
        assert_eq!(limits(&wanted, false), busy);
        assert_eq!(limits(&wanted, true), [(4, 2), (2, 2), (1, 2), (4, 1), (2, 1), (1, 1)]);
        assert_eq!(limits(&[], true), [(1, 1)]);
    }
}
