//! The choice of how many sweeps a visit has: what moves over the link decides, and host memory limits it.
//!
//! With `K` microbatches in a visit a minibatch of `N` promotes what its device has no room for `2 ceil(N / K)` times.
//! The boundary activations and gradients of more than one do not stay on the device between two shards: they go down and
//! come up again.
//!
//! As many visits are under way at once as there are devices for them, each in a lane of its own; host memory limits that too.

use super::cut::CutTask;
use super::host_memory::{HostMemory, Room};
use super::placement::Placement;
use super::sizes::{Pace, TaskSizes};
use crate::error::EngineError;
use crate::stages::Visit;

/// The most batches that a visit of an evaluation has: with as many, parameters are a sixteenth of what moved before, and
/// checkpoints within the evaluation are no further apart.
const MOST_BATCHES: usize = 16;

/// The bytes of a model that move over the link to its device.
struct Traffic {
    /// Parameters that one pass over all shards promotes.
    promoted: u64,
    /// Boundary activations of one sweep.
    boundaries: u64,
}

impl Traffic {
    /// Those of a task on a device with so much memory, which so many tasks share.
    fn of(cut: &CutTask<'_>, budget: u64, tasks: usize) -> Self {
        let shards = &cut.plan.shards;
        let parameters: u64 = shards.iter().map(|shard| shard.param_bytes).sum();
        let need = shards.iter().map(|shard| shard.need_bytes.max(shard.verified_bytes.unwrap_or(0))).max();
        let stays = budget.saturating_sub(need.unwrap_or(0)) / tasks.max(1) as u64;
        let inputs = shards.iter().skip(1).map(|shard| cut.plan.layers[shard.first].input_bytes);
        Self { promoted: parameters.saturating_sub(stays), boundaries: inputs.sum() }
    }

    /// Bytes up the link in a minibatch of so many microbatches.
    fn minibatch(&self, microbatches: usize, visit: usize) -> u64 {
        let visits = microbatches.div_ceil(visit) as u64;
        let again = if visit > 1 { 2 * microbatches as u64 * self.boundaries } else { 0 };
        (2 * visits).saturating_mul(self.promoted).saturating_add(again)
    }

    /// Bytes up the link in [`MOST_BATCHES`] batches of an evaluation, or a little more.
    fn evaluation(&self, visit: usize) -> u64 {
        let again = if visit > 1 { MOST_BATCHES as u64 * self.boundaries } else { 0 };
        (MOST_BATCHES.div_ceil(visit) as u64).saturating_mul(self.promoted).saturating_add(again)
    }
}

/// The number of sweeps with which the least moves; of equal ones the smallest, which takes the least host memory.
fn cheapest(most: usize, bytes: impl Fn(usize) -> u64) -> usize {
    (1..=most).min_by_key(|visit| (bytes(*visit), *visit)).unwrap_or(1)
}

/// The devices of a run, as visits depend on them.
pub(super) struct VisitDevices {
    /// Bytes of the smallest one.
    pub budget: u64,
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
    if on.on_device() || !devices.cache || cut.plan.shards.len() < 2 {
        return least;
    }
    let program = cut.task.program(&cut.plan.shards(), 0, Visit::ONE);
    let traffic = Traffic::of(cut, devices.budget, tasks.div_ceil(devices.count.max(1)));
    // Devices that would have nothing else to compute take visits of their own, each over its own link.
    let each = devices.count.div_ceil(tasks.max(1)).min(cut.task.most_devices.unwrap_or(usize::MAX)).max(1);
    let microbatches = program.microbatches;
    let most = microbatches.div_ceil(each);
    let chosen = || cheapest(most, |visit| traffic.minibatch(microbatches, visit));
    let batches = program.validation.max(program.test).div_ceil(each).min(MOST_BATCHES);
    Visit {
        microbatches: cut.task.visit.unwrap_or_else(chosen),
        batches: cheapest(batches, |visit| traffic.evaluation(visit)),
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
            let traffic = Traffic { promoted, boundaries };
            let training = cheapest(microbatches, |visit| traffic.minibatch(microbatches, visit));
            (training, cheapest(MOST_BATCHES, |visit| traffic.evaluation(visit)))
        };
        assert_eq!(chosen(1000, 1, 8), (8, 16));
        assert_eq!(chosen(1000, 1, 1), (1, 16));
        // Twice four microbatches' boundaries cost as much as three promotions of everything.
        assert_eq!(chosen(100, 75, 4), (1, 16));
        assert_eq!(chosen(100, 74, 4).0, 4);
        assert_eq!(chosen(100, 94, 4).1, 1);
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
