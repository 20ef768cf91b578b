//! Admission itself: all steps in their order, and what comes of them.

use super::alike::equal_first_evaluations;
use super::buffers::{ShardBuffers, shard_buffers};
use super::check::check;
use super::cut::CutTask;
use super::fit::{Fit, Fitting};
use super::gradients::Window;
use super::host_memory::{HostMemory, Room};
use super::measure::{Pilot, Tell, measure};
use super::microbatch_group::{GroupDevices, least_sizes, widen};
use super::placement::Placement;
use super::settings::AdmissionSettings;
use super::shared::SharedBuffer;
use super::sizes::TaskSizes;
use super::skipped::Skipped;
use super::sums::costs_with_sums;
use super::traffic::accumulation_bytes;
use crate::device::LogicalDevice;
use crate::error::EngineError;
use crate::stages::{EvaluationKind, MicrobatchGroup, Program, Stage};
use crate::train_task::TrainTask;
use hydra_core::{Chain, Length, ParamBufferLayout, TaskId};
use hydra_partition::{PartitionPlan, Profile};
use hydra_spill::ParamBufferId;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A task that was admitted. Its plan is not serialized with it; plans are saved in files of their own.
#[derive(Clone, Debug, Serialize)]
pub struct AdmittedTask {
    /// The task's name.
    pub name: String,
    /// Parameters of the model.
    pub parameters: u64,
    /// Those of them that are trained; the others are frozen.
    pub trained_parameters: u64,
    /// Minibatches it will train.
    pub steps: usize,
    /// Items of its training data.
    pub items: usize,
    /// Tokens (or items) it will train on.
    pub units: u64,
    /// The name of what `units` counts.
    pub unit: String,
    /// The plan of its shards.
    #[serde(skip)]
    pub plan: Arc<PartitionPlan>,
    /// Bytes of masters and optimizer state, for the whole run, wherever they live.
    pub master_bytes: u64,
    /// Those of them that other tasks have too: they are there once for all of these.
    pub shared_bytes: u64,
    /// Those of them on the disk that are its own.
    pub disk_bytes: u64,
    /// For each buffer the one that it has in common with others.
    #[serde(skip)]
    pub(crate) shared: Vec<Option<SharedBuffer>>,
    /// The buffers of each shard.
    #[serde(skip)]
    pub(crate) buffers: Vec<ShardBuffers>,
    /// True for each buffer on the disk.
    #[serde(skip)]
    pub(crate) on_disk: Vec<bool>,
    /// Host bytes of gradients and boundary activations while it is within a minibatch.
    pub active_bytes: u64,
    /// The microbatch passes that it makes together, shard by shard.
    pub microbatch_group: MicrobatchGroup,
    /// The most microbatch groups of it that are under way at once, and so the most devices that compute it at once.
    pub replicas: usize,
    /// For each shard the bytes of the gradients of the microbatches of a microbatch group that add up on a device.
    #[serde(skip)]
    pub(crate) accumulation_bytes: Vec<u64>,
    /// The microbatches whose gradients may wait for those of earlier ones.
    #[serde(skip)]
    pub(crate) gradient_window: Window,
    /// Those of them for the batches of a minibatch.
    #[serde(skip)]
    pub(crate) batch_bytes: u64,
    /// Those of them for gradients that the optimizer may step with as they come.
    #[serde(skip)]
    pub(crate) gradient_bytes: u64,
    /// A task of its shape that begins, where this one is over and there is room for that.
    #[serde(skip)]
    restarted: Option<Box<Self>>,
    /// The first of the tasks, this one among them, whose evaluations before training may be one; none if no other's may
    /// be this one's.
    #[serde(skip)]
    pub(crate) first_evaluation: Option<usize>,
    /// Estimated seconds of compute.
    pub estimated_s: f64,
    /// The parts of this estimate.
    pub estimate: Estimate,
    /// The place where its optimizer steps.
    pub optimizer: Placement,
}

/// The estimated compute of a task by its parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Estimate {
    /// Seconds of a minibatch.
    pub minibatch_s: f64,
    /// Seconds of a batch of an evaluation.
    pub evaluation_batch_s: f64,
    /// Batches of the evaluations ahead of it, without those before training.
    pub evaluation_batches: u64,
}

/// The needs of a run that fits; one that does not is refused before anything trains.
#[derive(Clone, Debug, Serialize)]
pub struct Admission {
    /// The tasks.
    pub tasks: Vec<AdmittedTask>,
    /// The devices' names and budgets.
    pub devices: Vec<(String, u64)>,
    /// The double-buffer reserve of each device.
    pub reserve_bytes: u64,
    /// The host budget.
    pub host_budget_bytes: u64,
    /// Host bytes that the run uses at most.
    pub host_admitted_bytes: u64,
    /// Host bytes of these that are for batches that are read ahead: what the rest leaves of the budget, up to the batches
    /// of a minibatch of every task.
    pub host_ahead_bytes: u64,
    /// Host bytes of these that are for what lives on the disk, where it is used.
    pub host_working_bytes: u64,
    /// Bytes of masters and optimizer state on the disk.
    pub disk_bytes: u64,
    /// The budget of the disk, where there is one.
    pub disk_budget_bytes: Option<u64>,
    /// Models that may be within a minibatch at once, until the masters of a task that ended leave room for more.
    pub active_models: usize,
    /// The most tasks that have begun at once, where they begin in turn: as host memory has room, and others end.
    pub queued: Option<usize>,
    /// Tasks that can never fit, without which the run goes on.
    pub skipped: Vec<Skipped>,
    /// Estimated seconds of the run: all compute over the devices, or the longest task on as many as compute it.
    pub estimated_s: f64,
}

/// Checks, measures, cuts and places the tasks, and finds room for them. `shapes` are those of tasks that may be added later:
/// they are measured and cut beside the tasks, and returned as tasks of theirs would be admitted, but have no room.
pub(crate) fn admit(
    (tasks, shapes): (&[TrainTask], &[TrainTask]),
    devices: &[LogicalDevice],
    settings: &AdmissionSettings,
    tell: Tell<'_>,
) -> Result<(Admission, Vec<AdmittedTask>), EngineError> {
    // More threads keep more memory for themselves: the device with the most stands for all.
    let device = devices.iter().max_by_key(|device| device.spec.threads).ok_or(EngineError::NoDevice)?;
    let pilot = Pilot { device, plans: &settings.plans, tell, stop: &settings.stop };
    check(tasks, shapes)?;
    let memory = devices.iter().map(|device| device.spec.memory.bytes()).min().unwrap_or(0);
    let cache = devices.iter().all(|device| device.manager.caches_copies());
    let microbatch_groups = GroupDevices { count: devices.len(), cache };
    let with_sums = |task: &TrainTask, profile: &Profile| {
        costs_with_sums((task, tasks.len()), profile, &microbatch_groups, memory)
    };
    let measured = measure(tasks.iter().chain(shapes), &pilot, &with_sums)?;
    let disk = settings.disk.as_ref();
    // A copy lets go of what it is made from before the next one is made.
    let copies = devices.iter().all(|device| !device.manager.link().zero_copy());
    let promotions = if copies { 1 } else { 2 };
    let concurrent = settings.concurrent;
    let budget = settings.host_memory.bytes();
    let host = HostMemory { budget, disk, devices: devices.len(), promotions, concurrent };
    let fitting = Fitting {
        shapes,
        devices,
        memory,
        microbatch_groups: &microbatch_groups,
        host: &host,
        pilot: &pilot,
        settings,
    };
    let Fit { cut, shaped, limits, mut skipped_tasks, placed, sizes, room } = fitting.best(measured)?;
    let equal = equal_first_evaluations(&cut.iter().map(|cut| cut.task).collect::<Vec<_>>());
    // What is added has no room on the disk, and none but what the run has.
    let admitted_bytes = if settings.controlled { budget } else { room.admitted };
    let for_others = HostMemory { budget: admitted_bytes, disk: None, ..host };
    let admitted = |(index, (cut, on)): (usize, (CutTask<'_>, Placement))| {
        let (id, over) = (TaskId(index), cut.task.is_finished().then(|| cut.task.without_state()));
        let anew =
            over.and_then(|task| of_shape(cut.with_task(&task), id, &microbatch_groups, &for_others).ok());
        let task = AdmittedTask::new(cut, on, (&sizes[index], &room, index), (id, equal[index]));
        AdmittedTask { restarted: anew.map(Box::new), ..task }
    };
    let tasks: Vec<AdmittedTask> = cut.into_iter().zip(placed).enumerate().map(admitted).collect();
    let mut of_shapes = Vec::new();
    for (cut, id) in shaped.into_iter().zip((tasks.len()..).map(TaskId)) {
        let task = cut.task;
        match of_shape(cut, id, &microbatch_groups, &host) {
            Ok(admitted) => of_shapes.push(admitted),
            Err(error) => skipped_tasks.leave(task, error)?,
        }
    }
    let named = |device: &LogicalDevice| (device.spec.name.clone(), device.spec.memory.bytes());
    let admission = Admission {
        devices: devices.iter().map(named).collect(),
        reserve_bytes: limits.reserve,
        host_budget_bytes: budget,
        host_admitted_bytes: admitted_bytes,
        host_ahead_bytes: room.ahead,
        host_working_bytes: room.division.working,
        disk_bytes: room.division.disk,
        disk_budget_bytes: disk.map(|disk| disk.budget.bytes()),
        active_models: room.active_models,
        queued: room.queued,
        skipped: skipped_tasks.skipped,
        estimated_s: run_s(&tasks, devices.len()),
        tasks,
    };
    Ok((admission, of_shapes))
}

/// A task of a shape as it would be admitted if the host had room for it. One that is added later waits for room; half of the
/// memory is left to the others where that is enough.
fn of_shape(
    cut: CutTask<'_>,
    id: TaskId,
    devices: &GroupDevices,
    host: &HostMemory<'_>,
) -> Result<AdmittedTask, EngineError> {
    let placed = [Placement::host("tasks that are added later are stepped on the host")];
    let alone = std::slice::from_ref(&cut);
    let room = |host: &HostMemory<'_>| {
        widen(alone, &placed, devices, host, least_sizes(alone, &placed, devices.count))
    };
    let half = HostMemory { budget: host.budget / 2, ..*host };
    let (sizes, room) = room(&half).or_else(|_| room(host))?;
    let [placed] = placed;
    Ok(AdmittedTask::new(cut, placed, (&sizes[0], &room, 0), (id, None)))
}

impl Admission {
    /// Bytes of masters that several tasks have in common, each counted once.
    pub fn shared_bytes(&self) -> u64 {
        let buffers = self.tasks.iter().flat_map(|task| task.shared.iter().flatten());
        buffers.collect::<BTreeSet<_>>().into_iter().map(|buffer| buffer.bytes).sum()
    }
}

impl AdmittedTask {
    /// The bytes of the masters in host memory that are its own.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.master_bytes - self.shared_bytes - self.disk_bytes
    }

    /// The buffers that it has in common with other tasks: the index of each in its chain, what it is in the store, and
    /// whether it lives on the disk.
    pub(crate) fn shared(&self) -> impl Iterator<Item = (usize, SharedBuffer, bool)> {
        let buffers = self.shared.iter().zip(&self.on_disk).enumerate();
        buffers.filter_map(|(buffer, (shared, on_disk))| Some((buffer, (*shared)?, *on_disk)))
    }

    /// What another task of its shape is admitted as that begins, if there is room for one where this task, `of`, is over.
    pub(crate) fn begun(&self, of: &TrainTask) -> Option<&Self> {
        if of.is_finished() { self.restarted.as_deref() } else { Some(self) }
    }

    /// A task of the same shape as another one, all of whose masters are in host memory.
    pub(crate) fn like((other, of): (&Self, &TrainTask), task: &TrainTask) -> Self {
        let (other, items) = (other.begun(of).unwrap_or(other), task.train.len());
        Self {
            name: task.name.clone(),
            steps: task.spec.steps(items),
            units: part_of(other.units, trained_items(task), trained_items(of)),
            first_evaluation: None,
            estimated_s: task_s(task, &other.plan, false),
            estimate: Estimate::of(task, &other.plan),
            ..other.clone()
        }
    }

    /// The task of this place in a room, with its number and the first of those whose first evaluation may be its own.
    fn new(
        cut: CutTask<'_>,
        optimizer: Placement,
        (sizes, room, index): (&TaskSizes, &Room, usize),
        (id, first_evaluation): (TaskId, Option<usize>),
    ) -> Self {
        let evaluates_for_others = first_evaluation == Some(id.0);
        let CutTask { task, batch, plan, shared, .. } = cut;
        let buffers = shared.into_iter().zip(&sizes.buffers.masters);
        let shared: Vec<Option<SharedBuffer>> =
            buffers.map(|(id, bytes)| id.map(|id| SharedBuffer { id, bytes: *bytes })).collect();
        let items = task.train.len();
        let on_disk = room.division.on_disk[index].clone();
        let several = sizes.microbatch_group.microbatches > 1 && !optimizer.on_device();
        let accumulation_bytes =
            |shard: usize| if several { accumulation_bytes(task, &plan, shard) } else { 0 };
        let accumulation_bytes = (0..plan.shards.len()).map(accumulation_bytes).collect();
        Self {
            name: task.name.clone(),
            parameters: task.chain.parameters(),
            trained_parameters: trained_parameters(&task.chain),
            steps: if task.evaluate_only { 0 } else { task.spec.steps(items) },
            items,
            units: part_of(batch.units as u64, trained_items(task), batch.items as u64),
            unit: task.train.unit().to_owned(),
            master_bytes: sizes.buffers.masters.iter().sum(),
            shared_bytes: shared.iter().flatten().map(|shared| shared.bytes).sum(),
            disk_bytes: sizes.buffers.own_disk_bytes(&on_disk),
            buffers: shard_buffers(&task.chain, &plan, |buffer| {
                shared[buffer].map_or(ParamBufferId::new(id, buffer), |of| of.id)
            }),
            shared,
            on_disk,
            active_bytes: room.active[index],
            microbatch_group: sizes.microbatch_group,
            replicas: sizes.replicas,
            accumulation_bytes,
            gradient_window: sizes.window,
            batch_bytes: sizes.batches,
            gradient_bytes: sizes.pending_gradients(room.gradient_shards),
            restarted: None,
            first_evaluation,
            estimated_s: task_s(task, &plan, first_evaluation.is_some() && !evaluates_for_others),
            estimate: Estimate::of(task, &plan),
            optimizer,
            plan,
        }
    }
}

/// The units of so many items, if `of` have so many.
fn part_of(units: u64, items: u64, of: u64) -> u64 {
    let units = u128::from(units) * u128::from(items) / u128::from(of.max(1));
    units.try_into().unwrap_or(u64::MAX)
}

/// Items that a task trains on, each as often as it does.
fn trained_items(task: &TrainTask) -> u64 {
    let items = task.train.len();
    match task.spec.length {
        _ if task.evaluate_only => 0,
        Length::Epochs(epochs) => epochs.saturating_mul(items) as u64,
        Length::Steps(steps) => {
            let per_epoch = items.div_ceil(task.spec.batch).max(1);
            let rest = (steps % per_epoch * task.spec.batch).min(items);
            (steps / per_epoch * items + rest) as u64
        }
    }
}

fn trained_parameters(chain: &Chain) -> u64 {
    chain.buffers().iter().filter(|buffer| buffer.trained).map(ParamBufferLayout::parameters).sum()
}

impl Estimate {
    /// The estimate of a task with this plan.
    fn of(task: &TrainTask, plan: &PartitionPlan) -> Self {
        let cursor = task.beginning(task.program(&plan.shards(), 0, MicrobatchGroup::ONE));
        let [pass_s, forward_s] = pass_s(plan).map(|seconds| seconds * task.train.mean_part());
        let before = match cursor.stage() {
            Stage::Evaluate { kind: EvaluationKind::Initial, batch } => {
                cursor.program().validation.saturating_sub(batch)
            }
            _ => 0,
        };
        Self {
            minibatch_s: cursor.program().microbatches as f64 * pass_s,
            evaluation_batch_s: forward_s,
            evaluation_batches: cursor.left().evaluations.saturating_sub(before as u64),
        }
    }
}

/// Seconds of the largest microbatch's forward and backward, and of its forward alone.
fn pass_s(plan: &PartitionPlan) -> [f64; 2] {
    let forward: f64 = plan.shards.iter().map(|shard| shard.forward_s).sum();
    let backward: f64 = plan.shards.iter().map(|shard| shard.backward_s).sum();
    // The last shard's forward is in its backward.
    let last = plan.shards.last().map_or(0.0, |shard| shard.forward_s);
    [forward - last + backward, forward]
}

/// Seconds of compute that a task has before it, without its first evaluation if that is `shared` and another's.
fn task_s(task: &TrainTask, plan: &PartitionPlan, shared: bool) -> f64 {
    let program = Program { shared, ..task.program(&plan.shards(), 0, MicrobatchGroup::ONE) };
    let cursor = task.beginning(program);
    let [pass_s, forward_s] = pass_s(plan);
    let left = cursor.left();
    let largest = left.microbatch_passes as f64 * pass_s + left.evaluations as f64 * forward_s;
    largest * task.train.mean_part()
}

/// Seconds that a run takes at least: all compute over the devices, or the longest task on as many as compute it.
fn run_s(tasks: &[AdmittedTask], devices: usize) -> f64 {
    let compute: f64 = tasks.iter().map(|task| task.estimated_s).sum();
    let longest = tasks.iter().map(|task| task.estimated_s / task.replicas as f64).fold(0.0, f64::max);
    longest.max(compute / devices as f64)
}
