//! The choice of how many sweeps a visit has: what moves over the link decides, and host memory limits it.
//!
//! With `K` microbatches in a visit a minibatch of `N` promotes what its device has no room for `2 ceil(N / K)` times, and the
//! gradients of the first visit go down as one sum where there is room for that. The boundary activations and gradients of more
//! than one do not stay on the device between two shards: they go down and come up again.
//!
//! As many visits are under way at once as there are devices for them, each in a lane of its own; host memory limits that too.

use super::cut::CutTask;
use super::host_memory::{HostMemory, Room};
use super::placement::Placement;
use super::sizes::{Pace, TaskSizes};
use super::traffic::{MOST_BATCHES, Traffic, cheapest, sum_bytes};
use crate::error::EngineError;
use crate::stages::Visit;
use crate::train_task::TrainTask;

/// The devices of a run, as visits depend on them.
pub(super) struct VisitDevices {
    pub count: usize,
    /// True if copies stay on them after their shard task.
    pub cache: bool,
}

/// The visits that a task wants, whatever host memory it takes: with the microbatches that were asked for, or those with
/// which the least moves; and as many at once as there are devices.
fn wanted(cut: &CutTask<'_>, on: &Placement, devices: &VisitDevices, tasks: usize) -> Pace {
    let visit = wanted_visit(cut, on, devices, tasks);
    Pace { visit, lanes: lanes(cut, on, visit, devices), flows: true }
}

fn wanted_visit(cut: &CutTask<'_>, on: &Placement, devices: &VisitDevices, tasks: usize) -> Visit {
    let least = least(cut, on);
    if on.on_device() || !devices.cache {
        return least;
    }
    let program = cut.task.program(&cut.plan.shards(), 0, Visit::ONE);
    let sum_bytes = |shard| sum_bytes(cut.task, &cut.plan, shard);
    let traffic = Traffic::of_plan(&cut.plan, tasks.div_ceil(devices.count.max(1)), sum_bytes);
    let microbatches = program.microbatches;
    let most = devices.most_microbatches(cut.task, microbatches, tasks);
    let chosen = || cheapest(1..=most, |visit| traffic.minibatch(microbatches, visit)).0;
    let batches = program.validation.max(program.test);
    let batches = batches.div_ceil(devices.each(cut.task, tasks)).clamp(1, MOST_BATCHES);
    Visit {
        microbatches: cut.task.visit.unwrap_or_else(chosen),
        batches: cheapest(1..=batches, |visit| traffic.evaluation(visit)).0,
    }
}

impl VisitDevices {
    /// The devices that compute a task, one of so many, at once: those that would have nothing else to compute take visits of
    /// their own, each over its own link.
    fn each(&self, task: &TrainTask, tasks: usize) -> usize {
        self.count.div_ceil(tasks.max(1)).min(task.most_devices.unwrap_or(usize::MAX)).max(1)
    }

    /// The most of so many microbatches that a visit of a task should have, with a visit for each device that computes it.
    pub(super) fn most_microbatches(&self, task: &TrainTask, microbatches: usize, tasks: usize) -> usize {
        microbatches.div_ceil(self.each(task, tasks))
    }
}

/// The visits of this length that can be under way at once: no more than there are of a minibatch or an evaluation. What is
/// device-homed is on one device.
fn lanes(cut: &CutTask<'_>, on: &Placement, visit: Visit, devices: &VisitDevices) -> usize {
    if on.on_device() {
        return 1;
    }
    let program = cut.task.program(&cut.plan.shards(), 0, Visit::ONE);
    let trained = if cut.task.evaluate_only { 0 } else { program.microbatches.div_ceil(visit.microbatches) };
    let evaluated = program.validation.max(program.test).div_ceil(visit.batches);
    let most = cut.task.most_devices.unwrap_or(usize::MAX).min(devices.count);
    most.min(trained.max(evaluated)).max(1)
}

/// The visits that a task has at least: one sweep each, if it did not ask for more.
fn least(cut: &CutTask<'_>, on: &Placement) -> Visit {
    Visit { microbatches: asked(cut, on).unwrap_or(1), ..Visit::ONE }
}

/// The microbatches that were asked for; one that is device-homed has nothing to promote, and makes one sweep after another.
fn asked(cut: &CutTask<'_>, on: &Placement) -> Option<usize> {
    if on.on_device() { Some(1) } else { cut.task.visit }
}

/// The sizes of tasks with one visit at a time of one sweep, where nothing else was asked for.
pub(super) fn least_sizes(cut: &[CutTask<'_>], placed: &[Placement], devices: usize) -> Vec<TaskSizes> {
    let least =
        |(cut, on)| TaskSizes::of(cut, on, Pace { visit: least(cut, on), lanes: 1, flows: false }, devices);
    cut.iter().zip(placed).map(least).collect()
}

/// Widens visits, has several of them under way at once, and gives these room for gradients that wait for a sum, as far as
/// tasks want it and host memory has room for: nothing goes to the disk for it, and no device stays without a model, nor a
/// model alone with the waits that another one fills. Gives the sizes and the room.
pub(super) fn widen(
    cut: &[CutTask<'_>],
    placed: &[Placement],
    devices: &VisitDevices,
    host: &HostMemory<'_>,
    least_sizes: Vec<TaskSizes>,
) -> Result<(Vec<TaskSizes>, Room), EngineError> {
    let least_room = host.find_room(&least_sizes)?;
    let is_as_good = |room: &Room| {
        room.division.disk <= least_room.division.disk
            && room.active_models >= least_room.active_models.min(devices.count + 1)
            && room.ahead >= least_room.ahead
            && room.gradient_shards >= least_room.gradient_shards
            && room.in_turn == least_room.in_turn
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
        if let Some(room) = host.find_room(&sizes).ok().filter(is_as_good) {
            return Ok((sizes, room));
        }
    }
    Ok((least_sizes, least_room))
}

/// The limits of sweeps and lanes to try, the best ones first: several visits at once matter more than long ones where devices
/// would otherwise have nothing to compute.
fn limits(wanted: &[Pace], devices_idle: bool) -> Vec<(usize, usize)> {
    let sweeps = wanted.iter().map(|of| of.visit.microbatches.max(of.visit.batches)).max();
    let lanes = wanted.iter().map(|of| of.lanes).max();
    let [sweeps, lanes] = [sweeps, lanes].map(|most| halves(most.unwrap_or(1)));
    let mut limits: Vec<(usize, usize)> =
        sweeps.iter().flat_map(|sweeps| lanes.iter().map(|lanes| (*sweeps, *lanes))).collect();
    if devices_idle {
        limits.sort_by_key(|(_, lanes)| std::cmp::Reverse(*lanes));
    }
    limits
}

/// A number, its half, and so on down to one.
fn halves(most: usize) -> Vec<usize> {
    std::iter::successors(Some(most), |n| Some(n / 2)).take_while(|n| *n > 0).collect()
}

impl Pace {
    /// This pace with at most so many sweeps a visit, but for the microbatches that were `asked` for, and so many visits.
    fn limited(self, (sweeps, lanes): (usize, usize), asked: Option<usize>) -> Self {
        let microbatches = asked.unwrap_or(self.visit.microbatches.min(sweeps));
        let visit = Visit { microbatches, batches: self.visit.batches.min(sweeps) };
        Self { visit, lanes: self.lanes.min(lanes), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_visit_is_as_long_as_saves_more_than_boundaries_cost() {
        let chosen = |promoted, boundaries, microbatches| {
            let traffic = Traffic { passes: 2, promoted, boundaries, ..Traffic::default() };
            let training = cheapest(1..=microbatches, |visit| traffic.minibatch(microbatches, visit));
            (training.0, cheapest(1..=MOST_BATCHES, |visit| traffic.evaluation(visit)).0)
        };
        assert_eq!(chosen(1000, 1, 8), (8, 16));
        assert_eq!(chosen(1000, 1, 1), (1, 16));
        // The boundaries of four microbatches, down and up and both ways again as gradients, against three promotions of everything.
        assert_eq!((chosen(80, 30, 4).0, chosen(80, 29, 4).0), (1, 4));
        // Those of sixteen batches, down and up, against fifteen promotions.
        assert_eq!((chosen(64, 30, 4).1, chosen(64, 29, 4).1), (1, 16));
        let adds_up = Traffic { gradients: 100, summed: 40, ..Traffic::default() };
        assert_eq!(cheapest(1..=8, |visit| adds_up.minibatch(8, visit)), (8, 520), "one sum goes down");
        assert_eq!(chosen(0, 1, 8), (1, 1), "what stays on the device need not be visited");
    }

    #[test]
    fn what_was_asked_for_is_not_limited() {
        let pace = Pace { visit: Visit { microbatches: 8, batches: 16 }, lanes: 4, ..Pace::ONE };
        let limited = |asked| {
            let Pace { visit, lanes, .. } = pace.limited((4, 2), asked);
            (visit.microbatches, visit.batches, lanes)
        };
        assert_eq!((limited(None), limited(Some(8))), ((4, 4, 2), (8, 4, 2)));
    }

    #[test]
    fn several_visits_at_once_go_last_where_devices_would_idle() {
        let wanted =
            [Pace { visit: Visit { microbatches: 4, batches: 1 }, lanes: 2, ..Pace::ONE }, Pace::ONE];
        let busy = [(4, 2), (4, 1), (2, 2), (2, 1), (1, 2), (1, 1)];
        assert_eq!(limits(&wanted, false), busy);
        assert_eq!(limits(&wanted, true), [(4, 2), (2, 2), (1, 2), (4, 1), (2, 1), (1, 1)]);
        assert_eq!(limits(&[], true), [(1, 1)]);
    }
}
