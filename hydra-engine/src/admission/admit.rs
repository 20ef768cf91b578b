//! Runs the steps of admission in order and collects their result.

use super::alike::equal_first_evaluations;
use super::buffers::{ResidentBytes, ShardBuffers, shard_buffers};
use super::check::check;
use super::cut::CutTask;
use super::division::StoredBuffers;
use super::gradients::Window;
use super::host_memory::{HostMemory, HostMemoryPlan};
use super::measure::{OnProgress, PilotContext, measure};
use super::microbatch_group::{GroupDevices, widest};
use super::placement::Placement;
use super::plan::{CutTasks, Plan, Planner};
use super::running::HostShare;
use super::settings::AdmissionSettings;
use super::shared::{SharedBuffer, bytes_once};
use super::sizes::TaskSizes;
use super::skipped::Skipped;
use super::sums::costs_with_sums;
use super::traffic::accumulation_bytes;
use crate::device::LogicalDevice;
use crate::error::EngineError;
use crate::train_task::TrainTask;
use hydra_core::{Chain, Length, ParamBufferLayout, TaskId};
use hydra_partition::{PartitionPlan, Profile};
use hydra_sched::program::{EvaluationKind, MicrobatchGroup, Program, Stage};
use hydra_spill::ParamBufferId;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// An admitted task. Its plan is not serialized with it; plans are saved in files of their own.
#[derive(Clone, Debug, Serialize)]
pub struct AdmittedTask {
    /// The task's name.
    pub name: String,
    /// Parameters of the model.
    pub parameters: u64,
    /// Trained parameters of the model; the others are frozen.
    pub trained_parameters: u64,
    /// Minibatches to train.
    pub steps: usize,
    /// The data that it trains on.
    #[serde(flatten)]
    pub data: TrainingData,
    /// The plan of the shards.
    #[serde(skip)]
    pub plan: Arc<PartitionPlan>,
    /// Where its parameter buffers are stored.
    #[serde(flatten)]
    pub storage: Storage,
    /// The memory that it takes within a minibatch.
    #[serde(flatten)]
    pub memory: MinibatchMemory,
    /// The microbatch passes of a microbatch group, which each shard computes one after the other.
    pub microbatch_group: MicrobatchGroup,
    /// The largest number of microbatch groups in flight, and so of devices that compute the task at the same time.
    pub replicas: usize,
    /// If this task is finished: a new task of the same shape as it would be admitted, if one fits.
    #[serde(skip)]
    restarted: Option<Box<Self>>,
    /// The first task, possibly this one, with which this task can share the evaluation before training; none if no
    /// other task can share it.
    #[serde(skip)]
    pub(crate) first_evaluation: Option<usize>,
    /// Estimated seconds of compute.
    pub estimated_s: f64,
    /// The parts of `estimated_s`.
    pub estimate: Estimate,
    /// Where the optimizer steps.
    pub optimizer: Placement,
}

/// The amount of data that a task trains on.
#[derive(Clone, Debug, Serialize)]
pub struct TrainingData {
    /// Items of the training data.
    pub items: usize,
    /// Tokens (or items) to train on.
    pub units: u64,
    /// The unit that `units` counts.
    pub unit: String,
}

/// The places in which the parameter buffers of a task are stored, and their bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Storage {
    /// Bytes of master weights and optimizer state over the whole run, in every tier.
    pub master_bytes: u64,
    /// The part of `master_bytes` that is shared with other tasks and stored once for all of them.
    pub shared_bytes: u64,
    /// The part of `master_bytes` that is on the disk and not shared.
    pub disk_bytes: u64,
    /// Bytes of frozen weights that are read in place; `master_bytes` does not contain them.
    pub in_place_bytes: u64,
    /// For each buffer, the stored buffer that several tasks share, if there is one.
    #[serde(skip)]
    pub(crate) shared: Vec<Option<SharedBuffer>>,
    /// The buffers of each shard.
    #[serde(skip)]
    pub(crate) buffers: Vec<ShardBuffers>,
    /// For each buffer, whether it is on the disk.
    #[serde(skip)]
    pub(crate) on_disk: Vec<bool>,
    /// For each buffer, whether it is read in place.
    #[serde(skip)]
    pub(crate) in_place: Vec<bool>,
    /// The bytes of buffers that are resident on the device.
    #[serde(skip)]
    pub(crate) resident: ResidentBytes,
}

/// The memory that a task takes while it is within a minibatch.
#[derive(Clone, Debug, Serialize)]
pub struct MinibatchMemory {
    /// Host bytes of gradients, boundary activations and batches.
    pub active_bytes: u64,
    /// For each shard, the bytes of its gradient accumulation buffer on a device.
    #[serde(skip)]
    pub(crate) accumulation_bytes: Vec<u64>,
    /// The microbatches whose gradients may wait for those of earlier microbatches.
    #[serde(skip)]
    pub(crate) gradient_window: Window,
    /// The part of `active_bytes` for the batches of a minibatch.
    #[serde(skip)]
    pub(crate) batch_bytes: u64,
    /// The part of `active_bytes` for gradients that the optimizer may step with as they arrive.
    #[serde(skip)]
    pub(crate) gradient_bytes: u64,
}

/// The estimated compute time of a task, by its parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Estimate {
    /// Seconds of a minibatch.
    pub minibatch_s: f64,
    /// Seconds of a batch of an evaluation.
    pub evaluation_batch_s: f64,
    /// Batches of the evaluations still to come, without those before training.
    pub evaluation_batches: u64,
}

/// The memory of a run that fits. A run that does not fit is refused before anything trains.
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
    /// The most host bytes that the run uses.
    pub host_admitted_bytes: u64,
    /// The part of `host_admitted_bytes` for batches that are read ahead: the budget that everything else leaves, up
    /// to the batches of a minibatch of every task.
    pub host_ahead_bytes: u64,
    /// The part of `host_admitted_bytes` in which data on the disk is read, stepped and written.
    pub host_working_bytes: u64,
    /// Bytes of master weights and optimizer state on the disk.
    pub disk_bytes: u64,
    /// The budget of the disk, if the run has one.
    pub disk_budget_bytes: Option<u64>,
    /// Models that may be within a minibatch at the same time. A task that ends frees its masters, which may let more
    /// models in.
    pub active_models: usize,
    /// The most tasks that run at the same time when tasks are queued for memory: a queued task starts when its
    /// masters fit. `None` if all tasks start at the beginning.
    pub max_concurrent: Option<usize>,
    /// Tasks that can never fit; the run goes on without them.
    pub skipped: Vec<Skipped>,
    /// Estimated seconds of the run: the larger of all compute divided by the devices, and of the longest task
    /// divided by its replicas.
    pub estimated_s: f64,
}

/// Checks, measures, cuts and places the tasks, and fits them into memory. `shapes` are tasks whose copies may be added
/// later: they are measured and cut with the tasks and returned as such copies would be admitted, but take no memory of
/// the run.
pub(crate) fn admit(
    (tasks, shapes): (&[TrainTask], &[TrainTask]),
    devices: &[LogicalDevice],
    settings: &AdmissionSettings,
    on_progress: OnProgress<'_>,
) -> Result<(Admission, Vec<AdmittedTask>), EngineError> {
    // More threads keep more memory for themselves, so the device with the most threads is measured for all.
    let device = devices.iter().max_by_key(|device| device.spec.threads).ok_or(EngineError::NoDevice)?;
    let pilot = PilotContext { device, plans: &settings.plans, on_progress, stop: &settings.stop };
    check(tasks, shapes)?;
    let memory = devices.iter().map(|device| device.spec.memory.bytes()).min().unwrap_or(0);
    let cache = devices.iter().all(|device| device.manager.caches_copies());
    let microbatch_groups = GroupDevices { count: devices.len(), cache };
    let with_sums = |task: &TrainTask, profile: &Profile| {
        costs_with_sums((task, tasks.len()), profile, &microbatch_groups, memory)
    };
    let measured = measure(tasks.iter().chain(shapes), &pilot, &with_sums)?;
    let disk = settings.disk.as_ref();
    // A copying link frees the source of one copy before it makes the next.
    let copies = devices.iter().all(|device| !device.manager.link().zero_copy());
    let promotions = if copies { 1 } else { 2 };
    let concurrent = settings.concurrent;
    let budget = settings.host_memory.bytes();
    let stages = devices.iter().any(|device| !device.manager.link().fills());
    let host = HostMemory { budget, disk, devices: devices.len(), promotions, stages, concurrent };
    let planner = Planner {
        shapes,
        devices,
        memory,
        depth: device.spec.kind.pipeline_depth(),
        microbatch_groups: &microbatch_groups,
        host: &host,
        pilot: &pilot,
        settings,
    };
    let Plan { cut, placed, sizes, host: host_plan } = planner.plan(&measured)?;
    let CutTasks { tasks: cut, shaped, limits, mut skipped } = cut;
    let equal = equal_first_evaluations(&cut.iter().map(|cut| cut.task).collect::<Vec<_>>());
    // Tasks that are added later get no disk, and only the host memory of the run.
    let admitted_bytes = if settings.controlled { budget } else { host_plan.admitted };
    let for_others = HostMemory { budget: admitted_bytes, disk: None, ..host };
    let admitted = |(index, (cut, on)): (usize, (CutTask<'_>, Placement))| {
        let (id, over) = (TaskId(index), cut.task.is_finished().then(|| cut.task.without_state()));
        let anew =
            over.and_then(|task| admit_shape(cut.with_task(&task), id, &microbatch_groups, &for_others).ok());
        let task = AdmittedTask::new(cut, on, (&sizes[index], &host_plan, index), (id, equal[index]));
        AdmittedTask { restarted: anew.map(Box::new), ..task }
    };
    let tasks: Vec<AdmittedTask> = cut.into_iter().zip(placed).enumerate().map(admitted).collect();
    let mut admitted_shapes = Vec::new();
    for (cut, id) in shaped.into_iter().zip((tasks.len()..).map(TaskId)) {
        let task = cut.task;
        match admit_shape(cut, id, &microbatch_groups, &host) {
            Ok(admitted) => admitted_shapes.push(admitted),
            Err(error) => skipped.skip(task, error)?,
        }
    }
    skipped.warn();
    let named = |device: &LogicalDevice| (device.spec.name.clone(), device.spec.memory.bytes());
    let admission = Admission {
        devices: devices.iter().map(named).collect(),
        reserve_bytes: limits.reserve,
        host_budget_bytes: budget,
        host_admitted_bytes: admitted_bytes,
        host_ahead_bytes: host_plan.ahead,
        host_working_bytes: host_plan.division.working,
        disk_bytes: host_plan.division.disk,
        disk_budget_bytes: disk.map(|disk| disk.budget.bytes()),
        active_models: host_plan.active_models,
        max_concurrent: host_plan.max_concurrent,
        skipped: skipped.skipped,
        estimated_s: run_s(&tasks, devices.len()),
        tasks,
    };
    Ok((admission, admitted_shapes))
}

/// Admits a task of a shape as if the host had memory for it; a task that is added later waits until it fits. Half of
/// the host memory is left to other tasks if the other half suffices.
fn admit_shape(
    cut: CutTask<'_>,
    id: TaskId,
    devices: &GroupDevices,
    host: &HostMemory<'_>,
) -> Result<AdmittedTask, EngineError> {
    let placed = [Placement::host("tasks that are added later are stepped on the host")];
    let alone = std::slice::from_ref(&cut);
    let half = HostMemory { budget: host.budget / 2, ..*host };
    let widest = |host: &HostMemory<'_>| widest(alone, &placed, devices, host);
    let (_, (sizes, host_plan)) = widest(&half).or_else(|_| widest(host))?;
    let [placed] = placed;
    Ok(AdmittedTask::new(cut, placed, (&sizes[0], &host_plan, 0), (id, None)))
}

impl Admission {
    /// Bytes of masters that several tasks share, each counted once.
    pub fn shared_bytes(&self) -> u64 {
        bytes_once(self.tasks.iter().flat_map(|task| task.storage.shared.iter().copied().flatten()))
    }

    /// The buffers that are resident on the device, by their ids in the store, with the bytes of their masters.
    pub(crate) fn resident_buffers(&self) -> BTreeMap<ParamBufferId, u64> {
        let of = |(index, task): (usize, &AdmittedTask)| {
            let with_id = |&(buffer, bytes): &(usize, u64)| {
                let own = ParamBufferId::new(TaskId(index), buffer);
                (task.storage.shared[buffer].map_or(own, |of| of.id), bytes)
            };
            task.storage.resident.masters.iter().map(with_id).collect::<Vec<_>>()
        };
        self.tasks.iter().enumerate().flat_map(of).collect()
    }

    /// The device bytes of resident buffers and of their pending gradients.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let pending: u64 = self.tasks.iter().map(|task| task.storage.resident.pending).sum();
        pending + self.resident_buffers().into_values().sum::<u64>()
    }
}

impl AdmittedTask {
    /// Bytes of a shard's parameters that are promoted.
    pub(crate) fn promoted_bytes(&self, shard: usize) -> u64 {
        self.plan.shards[shard].param_bytes.saturating_sub(self.storage.resident.shards[shard])
    }

    /// The host memory that it takes while it runs.
    pub(crate) fn host_share(&self) -> HostShare {
        let (own, shared) = (self.storage.memory_bytes(), self.storage.shared_in_memory().collect());
        HostShare { own, shared, active: self.memory.active_bytes }
    }

    /// The admission of another task of this shape that starts from the beginning. `of` is the training task of
    /// `self`; if that is finished, the result is `None` unless a new one fits.
    pub(crate) fn fresh(&self, of: &TrainTask) -> Option<&Self> {
        if of.is_finished() { self.restarted.as_deref() } else { Some(self) }
    }

    /// Admits `task`, which has the shape of `other` (trained by `of`), with all masters in host memory.
    pub(crate) fn with_shape_of((other, of): (&Self, &TrainTask), task: &TrainTask) -> Self {
        let other = other.fresh(of).unwrap_or(other);
        Self {
            name: task.name.clone(),
            steps: task.spec.steps(task.train.len()),
            data: TrainingData::of(task, (other.data.units, trained_items(of))),
            first_evaluation: None,
            estimated_s: task_s(task, &other.plan, false),
            estimate: Estimate::of(task, &other.plan),
            ..other.clone()
        }
    }

    /// Task number `index` within `host_plan`, with its id and the first task that can share its first evaluation.
    fn new(
        cut: CutTask<'_>,
        optimizer: Placement,
        (sizes, host_plan, index): (&TaskSizes, &HostMemoryPlan, usize),
        (id, first_evaluation): (TaskId, Option<usize>),
    ) -> Self {
        let storage = Storage::of((&cut, id), &optimizer, &sizes.buffers, &host_plan.division.on_disk[index]);
        let CutTask { task, batch, plan, .. } = cut;
        let several = sizes.microbatch_group.microbatches > 1 && !optimizer.on_device();
        let sums = |shard: usize| if several { accumulation_bytes(task, &plan, shard) } else { 0 };
        Self {
            name: task.name.clone(),
            parameters: task.chain.parameters(),
            trained_parameters: trained_parameters(&task.chain),
            steps: if task.evaluate_only { 0 } else { task.spec.steps(task.train.len()) },
            data: TrainingData::of(task, (batch.units as u64, batch.items as u64)),
            storage,
            memory: MinibatchMemory {
                active_bytes: host_plan.active[index],
                accumulation_bytes: (0..plan.shards.len()).map(sums).collect(),
                gradient_window: sizes.window,
                batch_bytes: sizes.batches,
                gradient_bytes: sizes.pending_gradients(host_plan.gradient_shards),
            },
            microbatch_group: sizes.microbatch_group,
            replicas: sizes.replicas,
            restarted: None,
            first_evaluation,
            estimated_s: task_s(task, &plan, first_evaluation.is_some_and(|first| first != id.0)),
            estimate: Estimate::of(task, &plan),
            optimizer,
            plan,
        }
    }
}

impl TrainingData {
    /// The data of a task, if `items` of its items have `units` units.
    fn of(task: &TrainTask, (units, items): (u64, u64)) -> Self {
        let units = u128::from(units) * u128::from(trained_items(task)) / u128::from(items.max(1));
        let (units, unit) = (units.try_into().unwrap_or(u64::MAX), task.train.unit().to_owned());
        Self { items: task.train.len(), units, unit }
    }
}

impl Storage {
    /// The storage of a task whose buffers are on the disk according to `disk`.
    fn of((cut, id): (&CutTask<'_>, TaskId), on: &Placement, sizes: &StoredBuffers, disk: &[bool]) -> Self {
        let CutTask { task, plan, shared, in_place, .. } = cut;
        let of = |(id, bytes): (&Option<_>, &u64)| id.map(|id| SharedBuffer { id, bytes: *bytes });
        let shared: Vec<Option<SharedBuffer>> = shared.iter().zip(&sizes.masters).map(of).collect();
        let is_resident = |buffer| on.is_resident(buffer);
        let name = |buffer: usize| shared[buffer].map_or(ParamBufferId::new(id, buffer), |of| of.id);
        Self {
            master_bytes: sizes.masters.iter().sum(),
            shared_bytes: shared.iter().flatten().map(|shared| shared.bytes).sum(),
            disk_bytes: sizes.own_disk_bytes(disk),
            in_place_bytes: sizes.in_place.iter().sum(),
            buffers: shard_buffers(&task.chain, plan, |buffer| !is_resident(buffer), name),
            resident: ResidentBytes::of(task, plan, is_resident),
            shared,
            on_disk: disk.to_vec(),
            in_place: in_place.clone(),
        }
    }

    /// Bytes of the unshared masters in host memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.master_bytes - self.shared_bytes - self.disk_bytes
    }

    /// The buffers that the task shares with others: index in the chain and stored buffer.
    pub(crate) fn shared(&self) -> impl Iterator<Item = (usize, SharedBuffer)> {
        self.shared.iter().enumerate().filter_map(|(buffer, shared)| Some((buffer, (*shared)?)))
    }

    /// The buffers in host memory that the task shares with others.
    pub(crate) fn shared_in_memory(&self) -> impl Iterator<Item = SharedBuffer> {
        self.shared().filter(|(buffer, _)| !self.on_disk[*buffer]).map(|(_, shared)| shared)
    }

    /// The buffers on the disk that the task shares with others.
    pub(crate) fn shared_on_disk(&self) -> impl Iterator<Item = SharedBuffer> {
        self.shared().filter(|(buffer, _)| self.on_disk[*buffer]).map(|(_, shared)| shared)
    }
}

/// Items that a task trains on, counted once per pass over them.
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
    chain.buffers().iter().filter(|buffer| buffer.is_optimized()).map(ParamBufferLayout::parameters).sum()
}

impl Estimate {
    /// The estimate of a task with this plan.
    fn of(task: &TrainTask, plan: &PartitionPlan) -> Self {
        let cursor = task.initial_cursor(task.program(&plan.shards(), 0, MicrobatchGroup::ONE));
        let [pass_s, forward_s] = pass_s(plan).map(|seconds| seconds * task.train.mean_part());
        let before = match cursor.stage() {
            Stage::Evaluate { kind: EvaluationKind::Initial, batch, .. } => {
                cursor.program().validation.saturating_sub(batch)
            }
            _ => 0,
        };
        Self {
            minibatch_s: cursor.program().microbatches.each as f64 * pass_s,
            evaluation_batch_s: forward_s,
            evaluation_batches: cursor.left().evaluations.saturating_sub(before as u64),
        }
    }
}

/// Seconds of forward and backward of the largest microbatch, and of its forward alone.
fn pass_s(plan: &PartitionPlan) -> [f64; 2] {
    let forward: f64 = plan.shards.iter().map(|shard| shard.forward_s).sum();
    let backward: f64 = plan.shards.iter().map(|shard| shard.backward_s).sum();
    // The backward of the last shard includes its forward.
    let last = plan.shards.last().map_or(0.0, |shard| shard.forward_s);
    [forward - last + backward, forward]
}

/// Seconds of compute that a task has left. The first evaluation is not counted if it is `shared` and another task
/// computes it.
fn task_s(task: &TrainTask, plan: &PartitionPlan, shared: bool) -> f64 {
    let program = Program { shared, ..task.program(&plan.shards(), 0, MicrobatchGroup::ONE) };
    let cursor = task.initial_cursor(program);
    let [pass_s, forward_s] = pass_s(plan);
    let left = cursor.left();
    let largest = left.microbatch_passes as f64 * pass_s + left.evaluations as f64 * forward_s;
    largest * task.train.mean_part()
}

/// A lower bound of the run's seconds: all compute divided by the devices, or the longest task divided by its
/// replicas.
fn run_s(tasks: &[AdmittedTask], devices: usize) -> f64 {
    let compute: f64 = tasks.iter().map(|task| task.estimated_s).sum();
    let longest = tasks.iter().map(|task| task.estimated_s / task.replicas as f64).fold(0.0, f64::max);
    longest.max(compute / devices as f64)
}
