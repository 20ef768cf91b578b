//! Cuts, places and fits tasks: first in the way that is fastest, then in the way that takes less memory.

use super::cut::{CutTask, Limits, cut};
use super::host_memory::{HostMemory, HostMemoryPlan};
use super::in_place::{FrozenWeights, choose};
use super::measure::{MeasuredTask, Pilot};
use super::microbatch_group::{GroupDevices, least_sizes, widen};
use super::placement::{OptimizerPlacement, Place, Placement, all_resident, place};
use super::settings::AdmissionSettings;
use super::shared::shared_buffers;
use super::sizes::TaskSizes;
use super::skipped::SkippedTasks;
use crate::device::LogicalDevice;
use crate::error::EngineError;
use crate::train_task::TrainTask;
use hydra_partition::Pipeline;

/// The inputs of the search.
pub(super) struct Fitting<'f> {
    pub shapes: &'f [TrainTask],
    pub devices: &'f [LogicalDevice],
    /// Bytes of the smallest device.
    pub memory: u64,
    /// The devices' pipeline depth ([`DeviceKind::pipeline_depth`](crate::DeviceKind::pipeline_depth)).
    pub depth: usize,
    pub microbatch_groups: &'f GroupDevices,
    pub host: &'f HostMemory<'f>,
    pub pilot: &'f Pilot<'f>,
    pub settings: &'f AdmissionSettings,
}

/// Tasks that were cut and placed, and the memory that they take.
pub(super) struct Fit<'a> {
    pub cut: Vec<CutTask<'a>>,
    pub shaped: Vec<CutTask<'a>>,
    pub limits: Limits,
    pub skipped_tasks: SkippedTasks,
    pub placed: Vec<Placement>,
    pub sizes: Vec<TaskSizes>,
    pub host_plan: HostMemoryPlan,
}

impl Fit<'_> {
    /// The cost by which two fits are compared, lower is better: skipped tasks, bytes on the disk, and whether tasks
    /// were cut for gradient accumulation that no microbatch group of theirs uses.
    fn costs(&self, for_sums: bool) -> (usize, u64, bool) {
        let makes_none = self.sizes.iter().all(|sizes| sizes.microbatch_group.microbatches < 2);
        (self.skipped_tasks.skipped.len(), self.host_plan.division.disk, for_sums && makes_none)
    }
}

impl Fitting<'_> {
    /// Cuts shards that leave device memory for gradient accumulation where tasks want it, unless that does not fit
    /// in host memory.
    pub(super) fn best<'a>(&self, measured: Vec<MeasuredTask<'a>>) -> Result<Fit<'a>, EngineError> {
        if measured.iter().all(|task| task.with_sums.is_none()) {
            return self.fit(measured);
        }
        let plain = measured.iter().map(MeasuredTask::without_sums).collect();
        let with_sums = self.fit(measured);
        let costs = with_sums.as_ref().ok().map(|fit| fit.costs(true));
        if costs == Some((0, 0, false)) {
            return with_sums;
        }
        match (with_sums, self.fit(plain)) {
            (Ok(with_sums), Ok(plain)) if with_sums.costs(true) <= plain.costs(false) => Ok(with_sums),
            (Ok(with_sums), Err(_)) => Ok(with_sums),
            (_, plain) => plain,
        }
    }

    /// Returns whether the only task of a run waits for steps on the host: no other task computes meanwhile. The steps of
    /// adapters, and one step for several microbatches, are short in comparison with the computation.
    fn waits_for_its_optimizer(&self, measured: &[MeasuredTask<'_>]) -> bool {
        let [MeasuredTask { task, .. }] = measured else { return false };
        let trained = task.chain.buffers().iter().filter(|buffer| buffer.trained);
        let trained: usize = trained.map(|buffer| buffer.elements).sum();
        let all: usize = task.chain.buffers().iter().map(|buffer| buffer.elements).sum();
        let has_long_steps = task.spec.accumulate <= 1 && 2 * trained > all;
        let trains = !task.evaluate_only && !task.is_finished();
        let is_resident = || match self.devices {
            [device] if self.placement() != OptimizerPlacement::Host => {
                all_resident(&measured[0], device, self.memory)
            }
            _ => false,
        };
        trains && has_long_steps && !is_resident()
    }

    /// The placement that was asked for; only tasks that are there from the start can be device-resident.
    fn placement(&self) -> OptimizerPlacement {
        match self.settings.placement {
            OptimizerPlacement::Auto if self.settings.controlled => OptimizerPlacement::Host,
            other => other,
        }
    }

    fn fit<'a>(&self, measured: Vec<MeasuredTask<'a>>) -> Result<Fit<'a>, EngineError> {
        let Self { shapes, devices, memory, depth, microbatch_groups, host, pilot, settings } = *self;
        let mut skipped_tasks = SkippedTasks::new(settings.leave_out);
        let pipeline = Pipeline { depth, cuts_all: depth > 1 && self.waits_for_its_optimizer(&measured) };
        let (measured, limits) =
            Limits::for_those_that_fit(measured, (memory, pipeline), &mut skipped_tasks)?;
        let mut cut = cut(measured, &limits, pilot, &mut skipped_tasks)?;
        // Shapes were measured after the tasks, so they come last.
        let is_shape = |cut: &CutTask<'_>| shapes.iter().any(|shape| std::ptr::eq(shape, cut.task));
        let mut shaped = cut.split_off(cut.partition_point(|cut| !is_shape(cut)));
        skipped_tasks.check(&cut)?;
        let mut in_place = settings.frozen == FrozenWeights::Files;
        let (placed, sizes) = loop {
            let mut placed = place(self.placement(), (&cut, &shaped), &limits, devices)?;
            let mut settle = |placed: &[Placement], in_place| {
                share(&mut cut, placed, &mut shaped);
                choose(&mut cut, &mut shaped, placed, in_place);
                least_sizes(&cut, placed, devices.len())
            };
            let mut sizes = settle(&placed, in_place);
            // A task with resident buffers does not leave host memory, and on the disk a buffer is stored for all of its
            // tasks.
            let is_partial = |placed: &Placement| placed.on == Place::Partial;
            let stays = || host.disk.is_none() && fits_in_memory(host, &sizes);
            if placed.iter().any(is_partial) && !stays() {
                let why = "the run has a disk, or not all tasks fit in host memory at the same time";
                placed.iter_mut().filter(|of| is_partial(of)).for_each(|of| *of = Placement::host(why));
                sizes = settle(&placed, in_place);
            }
            // Frozen weights are read in place before a task is queued, skipped or stored on the disk.
            if settings.frozen == FrozenWeights::Auto && !in_place && !fits_in_memory(host, &sizes) {
                in_place = choose(&mut cut, &mut shaped, &placed, true);
                sizes = least_sizes(&cut, &placed, devices.len());
            }
            if !skip_too_large(&mut cut, &sizes, host, &mut skipped_tasks)? {
                break (placed, sizes);
            }
        };
        let (sizes, host_plan) = widen(&cut, &placed, microbatch_groups, host, sizes)?;
        Ok(Fit { cut, shaped, limits, skipped_tasks, placed, sizes, host_plan })
    }
}

/// Returns whether all tasks fit in host memory at the same time.
fn fits_in_memory(host: &HostMemory<'_>, sizes: &[TaskSizes]) -> bool {
    HostMemory { concurrent: None, disk: None, ..*host }.find_space(sizes).is_ok()
}

/// Finds buffers that tasks share, including tasks that may be added later, which are stepped on the host.
fn share<'a>(cut: &mut [CutTask<'a>], placed: &[Placement], shaped: &mut [CutTask<'a>]) {
    let placed = placed.iter().map(Some).chain(std::iter::repeat(None));
    let is_resident = |placed: Option<&Placement>, buffer| placed.is_some_and(|on| on.is_resident(buffer));
    let all = cut.iter().chain(&*shaped).zip(placed);
    let shared =
        shared_buffers(all.map(|(cut, placed)| (cut.task, move |buffer| is_resident(placed, buffer))));
    cut.iter_mut().chain(shaped).zip(shared).for_each(|(cut, shared)| cut.shared = shared);
}

/// Skips tasks that do not fit in host memory by themselves, if that is allowed. Returns whether there were any.
fn skip_too_large(
    cut: &mut Vec<CutTask<'_>>,
    sizes: &[TaskSizes],
    host: &HostMemory<'_>,
    skipped_tasks: &mut SkippedTasks,
) -> Result<bool, EngineError> {
    if !skipped_tasks.allowed {
        return Ok(false);
    }
    let (all, mut sizes) = (cut.len(), sizes.iter());
    let mut left = Ok(());
    cut.retain(|task| {
        let alone = sizes.next().map(|sizes| host.find_space(std::slice::from_ref(sizes)));
        let Some(Err(error)) = alone else { return true };
        if left.is_ok() {
            left = skipped_tasks.skip(task.task, error);
        }
        false
    });
    left?;
    skipped_tasks.check(cut)?;
    Ok(cut.len() < all)
}
