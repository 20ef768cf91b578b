//! The plan of a run: how its tasks are cut, where everything is stored, and how much is computed at the same time.
//!
//! [`best`] searches the cuts (with memory for gradient accumulation or without) and for each of them the storage
//! (resident buffers, frozen weights in place).

use super::cut::{CutTask, Limits, cut};
use super::host_memory::{HostMemory, HostMemoryPlan};
use super::in_place::{FrozenWeights, choose, has_readable};
use super::measure::{MeasuredTask, PilotContext};
use super::microbatch_group::{GroupDevices, least_sizes, widest};
use super::placement::{OptimizerPlacement, Place, Placement, all_resident, may_divide, place};
use super::search::{AccumulationBuffers, Cost, Tier, best};
use super::settings::AdmissionSettings;
use super::shared::shared_buffers;
use super::sizes::TaskSizes;
use super::skipped::SkippedTasks;
use crate::device::LogicalDevice;
use crate::error::EngineError;
use crate::train_task::TrainTask;
use hydra_partition::Pipeline;

/// The tasks of a run with their cuts.
pub(super) struct CutTasks<'a> {
    pub tasks: Vec<CutTask<'a>>,
    /// The tasks whose copies may be added later.
    pub shaped: Vec<CutTask<'a>>,
    pub limits: Limits,
    pub skipped: SkippedTasks,
}

/// The plan of a run.
pub(super) struct Plan<'a> {
    pub cut: CutTasks<'a>,
    /// Where the optimizer of each task steps.
    pub placed: Vec<Placement>,
    /// The sizes of each task, with its microbatch groups and replicas.
    pub sizes: Vec<TaskSizes>,
    pub host: HostMemoryPlan,
}

/// Where masters may be that need not be in host memory.
#[derive(Clone, Copy)]
struct StorageOptions {
    /// True if a device that does not fit all masters of its tasks may have some of them.
    partial: bool,
    /// True if frozen weights are read in place where they can be.
    in_place: bool,
}

/// The inputs of a plan.
pub(super) struct Planner<'f> {
    pub shapes: &'f [TrainTask],
    pub devices: &'f [LogicalDevice],
    /// Bytes of the smallest device.
    pub memory: u64,
    /// The devices' pipeline depth ([`DeviceKind::pipeline_depth`](crate::DeviceKind::pipeline_depth)).
    pub depth: usize,
    pub microbatch_groups: &'f GroupDevices,
    pub host: &'f HostMemory<'f>,
    pub pilot: &'f PilotContext<'f>,
    pub settings: &'f AdmissionSettings,
}

impl Planner<'_> {
    /// Plans a run. Shards leave device memory for gradient accumulation where tasks want it and nothing else costs more
    /// for it.
    pub(super) fn plan<'a>(&self, measured: &[MeasuredTask<'a>]) -> Result<Plan<'a>, EngineError> {
        let wanted = measured.iter().any(|task| task.with_sums.is_some());
        let cuts = if wanted {
            &[AccumulationBuffers::Used, AccumulationBuffers::Plain][..]
        } else {
            &[AccumulationBuffers::Plain]
        };
        let cuts = cuts.iter().map(|sums| (Cost { sums: *sums, ..Cost::default() }, *sums));
        let planned = best(cuts, |sums| {
            let cut = self.cut(measured, sums)?;
            let (cost, plan) = best(self.storage_options(&cut.tasks), |options| self.store(&cut, options))?;
            let is_unused = plan.sizes.iter().all(|sizes| sizes.microbatch_group.microbatches < 2);
            let sums = if sums == AccumulationBuffers::Used && is_unused {
                AccumulationBuffers::Unused
            } else {
                sums
            };
            Ok((Cost { sums, ..cost }, plan))
        });
        planned.map(|(_, plan)| plan)
    }

    fn cut<'a>(
        &self,
        measured: &[MeasuredTask<'a>],
        sums: AccumulationBuffers,
    ) -> Result<CutTasks<'a>, EngineError> {
        let pipeline = Pipeline {
            depth: self.depth,
            cuts_all: self.depth > 1 && self.waits_for_its_optimizer(measured),
        };
        let measured = measured.iter().map(|task| task.cut_with(sums == AccumulationBuffers::Used)).collect();
        let mut skipped = SkippedTasks::new(self.settings.leave_out);
        let (measured, limits) = Limits::for_those_that_fit(measured, (self.memory, pipeline), &mut skipped)?;
        let mut tasks = cut(measured, &limits, self.pilot, &mut skipped)?;
        // Shapes were measured after the tasks, so they come last.
        let is_shape = |cut: &CutTask<'_>| self.shapes.iter().any(|shape| std::ptr::eq(shape, cut.task));
        let shaped = tasks.split_off(tasks.partition_point(|cut| !is_shape(cut)));
        skipped.check(&tasks)?;
        Ok(CutTasks { tasks, shaped, limits, skipped })
    }

    /// The options of storage. A buffer on the disk is stored there for all of its tasks, so that no device has a part of
    /// the masters if there is a disk.
    fn storage_options(&self, cut: &[CutTask<'_>]) -> impl Iterator<Item = (Cost, StorageOptions)> {
        let in_place: &[bool] = match self.settings.frozen {
            FrozenWeights::Auto if has_readable(cut) => &[false, true],
            FrozenWeights::Auto | FrozenWeights::Memory => &[false],
            FrozenWeights::Files => &[true],
        };
        let divides = self.host.disk.is_none() && may_divide(self.placement(), self.devices);
        let partial: &[bool] = if divides { &[true, false] } else { &[false] };
        in_place.iter().enumerate().flat_map(move |(index, in_place)| {
            let tier = if index == 0 { Tier::Memory } else { Tier::Files };
            let options = |partial: &bool| StorageOptions { partial: *partial, in_place: *in_place };
            partial.iter().map(move |partial| (Cost { tier, ..Cost::default() }, options(partial)))
        })
    }

    /// Plans a run with these cuts and this storage. A task with resident buffers does not leave host memory.
    fn store<'a>(
        &self,
        cut: &CutTasks<'a>,
        options: StorageOptions,
    ) -> Result<(Cost, Plan<'a>), EngineError> {
        let Self { devices, microbatch_groups, host, .. } = *self;
        let (tasks, shaped) = (cut.tasks.clone(), cut.shaped.clone());
        let mut cut = CutTasks { tasks, shaped, skipped: cut.skipped.without_error(), limits: cut.limits };
        let placed = loop {
            let CutTasks { tasks, shaped, limits, skipped } = &mut cut;
            let mut placed = place(self.placement(), (tasks, shaped), limits, devices)?;
            placed.iter_mut().filter(|of| is_partial(of) && !options.partial).for_each(|of| {
                *of = Placement::host(
                    "the run has a disk, or not all tasks fit in host memory at the same time",
                );
            });
            share(tasks, &placed, shaped);
            choose(tasks, shaped, &placed, options.in_place);
            if !skip_too_large(tasks, &least_sizes(tasks, &placed, devices.len()), host, skipped)? {
                break placed;
            }
        };
        let (cost, (sizes, plan)) = widest(&cut.tasks, &placed, microbatch_groups, host)?;
        if placed.iter().any(is_partial) {
            HostMemory { concurrent: None, ..*host }.find_space(&sizes)?;
        }
        let skipped = cut.skipped.skipped.len();
        Ok((Cost { skipped, ..cost }, Plan { cut, placed, sizes, host: plan }))
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
}

fn is_partial(placed: &Placement) -> bool {
    placed.on == Place::Partial
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
    skipped: &mut SkippedTasks,
) -> Result<bool, EngineError> {
    if !skipped.allowed {
        return Ok(false);
    }
    let (all, mut sizes) = (cut.len(), sizes.iter());
    let mut left = Ok(());
    cut.retain(|task| {
        let alone = sizes.next().map(|sizes| host.find_space(std::slice::from_ref(sizes)));
        let Some(Err(error)) = alone else { return true };
        if left.is_ok() {
            left = skipped.skip(task.task, error);
        }
        false
    });
    left?;
    skipped.check(cut)?;
    Ok(cut.len() < all)
}
