//! Deciding whether a run fits, before anything trains: pilot passes, cuts, memory.

use super::division::{StoredImages, stored_bytes};
use super::gradients::{FLOWING, GradientBytes};
use super::host_memory::{HostMemory, HostNeeds};
use super::placement::{self, OptimizerPlacement, Placement};
use super::{Admission, AdmittedTask};
use crate::checkpoint::Checkpoint;
use crate::device::LogicalDevice;
use crate::error::{EngineError, guarded, refused};
use crate::stages::Cursor;
use crate::train_task::TrainTask;
use hydra_core::{Batch, Chain, CoreError, Dataset, ImageLayout, gather, gather_items};
use hydra_partition::{
    Demand, Fingerprint, FirstValues, PartitionError, PartitionPlan, PilotPartitioner, PilotProgress,
    Profile, Rules, choose_reserve,
};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

/// The costs that tasks of one architecture and batch share.
struct Measured {
    chain: Arc<Chain>,
    fingerprint: Fingerprint,
    profile: Profile,
}

/// A task with the microbatch that stands for all of its own.
struct Candidate<'a> {
    task: &'a TrainTask,
    batch: Batch,
    measured: usize,
}

/// What plans are looked for, and how they are told from others.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plans {
    /// A file, or a directory of them, in which there may be some.
    pub path: Option<PathBuf>,
    /// What decides costs and shows neither in chains nor in devices.
    pub config: String,
}

/// Hears of a task's name how far its pilot pass is.
pub(crate) type Tell<'a> = &'a dyn Fn(&str, PilotProgress);

/// Checks the tasks, measures what has not been measured, cuts every model and adds up the memory.
pub(crate) fn admit(
    tasks: &[TrainTask],
    devices: &[LogicalDevice],
    host: &HostMemory<'_>,
    plans: &Plans,
    placement: OptimizerPlacement,
    tell: Tell<'_>,
) -> Result<Admission, EngineError> {
    // More threads keep more memory for themselves: the device with the most stands for all.
    let device = devices.iter().max_by_key(|device| device.spec.threads).ok_or(EngineError::NoDevice)?;
    check_tasks(tasks)?;
    let mut measured: Vec<Measured> = Vec::new();
    let mut candidates = Vec::new();
    for task in tasks {
        candidates.push(candidate(task, device, plans, &mut measured, tell).map_err(refused(&task.name))?);
    }
    let budget = devices.iter().map(|d| d.spec.memory.bytes()).min().unwrap_or(0);
    let reserve = reserve(&candidates, &measured, budget)?;
    let cutting = Cutting { device, budget, reserve, plans, tell };
    let mut cut: Vec<Cut> = Vec::new();
    let mut admitted = Vec::new();
    for candidate in &candidates {
        let plan = cutting.plan(candidate, &measured[candidate.measured], &mut cut);
        let plan = plan.map_err(refused(&candidate.task.name))?;
        admitted.push(admitted_task(candidate, plan));
    }
    let planned = tasks.iter().zip(&admitted).map(|(task, admitted)| (task, admitted.plan.as_ref()));
    let placements = placement::place(placement, planned, devices)?;
    admitted.iter_mut().zip(placements).for_each(|(task, placement)| task.optimizer = placement);
    let stored: Vec<StoredImages> = tasks.iter().zip(&admitted).map(stored_images).collect();
    let batches: Vec<&Batch> = candidates.iter().map(|candidate| &candidate.batch).collect();
    let needs = host_needs(host, tasks, &batches, &mut admitted, &stored)?;
    for ((task, stored_images), on_disk) in admitted.iter_mut().zip(&stored).zip(needs.division.on_disk) {
        let there = stored_images.masters.iter().zip(&on_disk).filter(|(_, on_disk)| **on_disk);
        task.disk_bytes = there.map(|(bytes, _)| bytes).sum();
        task.on_disk = on_disk;
    }
    let compute: f64 = admitted.iter().map(|t| t.estimated_s).sum();
    let longest = admitted.iter().map(|t| t.estimated_s).fold(0.0, f64::max);
    Ok(Admission {
        devices: devices.iter().map(|d| (d.spec.name.clone(), d.spec.memory.bytes())).collect(),
        reserve_bytes: reserve,
        host_budget_bytes: host.budget,
        host_admitted_bytes: needs.admitted,
        host_ahead_bytes: needs.ahead,
        host_working_bytes: needs.division.working,
        disk_bytes: needs.division.disk,
        disk_budget_bytes: host.disk.map(|disk| disk.budget.bytes()),
        active_models: needs.active_models,
        estimated_s: longest.max(compute / devices.len() as f64),
        tasks: admitted,
    })
}

fn check_tasks(tasks: &[TrainTask]) -> Result<(), EngineError> {
    if tasks.is_empty() {
        return Err(EngineError::NoTask);
    }
    let mut names = BTreeSet::new();
    for task in tasks {
        if !names.insert(&task.name) {
            return Err(EngineError::DuplicateTask { name: task.name.clone() });
        }
        let check = || -> Result<(), EngineError> {
            task.spec.validate()?;
            let data = [Some(&task.train), task.validation.as_ref(), task.test.as_ref()];
            if let Some(data) = data.iter().flatten().find(|data| data.is_empty()) {
                let dataset = data.name().to_owned();
                return Err(EngineError::EmptyDataset { task: task.name.clone(), dataset });
            }
            check_order(task)?;
            let expected = item_shapes(task.train.as_ref())?;
            data.into_iter().flatten().try_for_each(|data| match item_shapes(data.as_ref())? {
                found if found == expected => Ok(()),
                found => {
                    let (dataset, expected) = (data.name().to_owned(), expected.clone());
                    Err(EngineError::ItemShapes { dataset, expected, found })
                }
            })
        };
        check().map_err(refused(&task.name))?;
    }
    Ok(())
}

/// Refuses an order of items that no memory holds.
fn check_order(task: &TrainTask) -> Result<(), CoreError> {
    let draws_order = task.spec.shuffle && !task.evaluate_only;
    if draws_order && u32::try_from(task.train.len()).is_err() {
        let expected =
            "false for a dataset of more than 4294967295 items: each has 8 bytes in the order of an epoch";
        return Err(CoreError::Spec { name: "shuffle", found: "true".to_owned(), expected });
    }
    Ok(())
}

/// The shapes of the tensors of a batch of one item.
fn item_shapes(data: &dyn Dataset) -> Result<Vec<Vec<usize>>, EngineError> {
    let batch = guarded("reading a batch", || Ok(gather_items(data, &[0])?))?;
    Ok(batch.inputs.parts.into_iter().chain(batch.targets.parts).map(|part| part.shape).collect())
}

fn candidate<'a>(
    task: &'a TrainTask,
    device: &LogicalDevice,
    plans: &Plans,
    measured: &mut Vec<Measured>,
    tell: Tell<'_>,
) -> Result<Candidate<'a>, EngineError> {
    let items: Vec<usize> = (0..task.spec.microbatch().min(task.train.len())).collect();
    let batch = guarded("reading a batch", || Ok(gather(task.train.as_ref(), &items)?))?;
    let batch = batch.in_type(task.chain.float_type());
    let fingerprint =
        Fingerprint::new(&task.chain, &batch, &plans.config).on(device.spec.threads, &device.model);
    let same = |m: &Measured| same_model(&m.chain, &task.chain) && m.fingerprint.same_costs(&fingerprint);
    if let Some(index) = measured.iter().position(same) {
        return Ok(Candidate { task, batch, measured: index });
    }
    let known = plans
        .path
        .as_ref()
        .map(|path| PartitionPlan::find_profile(path, &fingerprint))
        .transpose()?
        .flatten();
    let profile = match known {
        Some(profile) => profile,
        None => {
            let values = FirstValues::new(&task.chain, task.spec.seed);
            let told = |progress| tell(&task.name, progress);
            let partitioner = PilotPartitioner::new(&values).telling(&told);
            let measure = || Ok(partitioner.measure(&task.chain, &batch, device)?);
            guarded("the pilot pass", measure)?
        }
    };
    measured.push(Measured { chain: task.chain.clone(), fingerprint, profile });
    Ok(Candidate { task, batch, measured: measured.len() - 1 })
}

/// Whether what was measured of one chain holds for the other. Names and shapes do not say what a layer computes, so
/// they are enough only where whoever built the chains says the rest.
fn same_model(one: &Arc<Chain>, other: &Arc<Chain>) -> bool {
    Arc::ptr_eq(one, other) || !one.note().is_empty() && one.architecture() == other.architecture()
}

/// The double-buffer reserve of the run. A task that does not fit is named.
fn reserve(candidates: &[Candidate<'_>], measured: &[Measured], budget: u64) -> Result<u64, EngineError> {
    let demand = |c: &Candidate<'_>| Demand { profile: &measured[c.measured].profile, cuts: None };
    let with_cuts: Vec<(Demand<'_>, Option<&[usize]>)> =
        candidates.iter().map(|c| (demand(c), c.task.cuts.as_deref())).collect();
    let demands: Vec<Demand<'_>> = with_cuts.iter().map(|(d, cuts)| Demand { cuts: *cuts, ..*d }).collect();
    choose_reserve(&demands, budget).map_err(|error| {
        let alone = candidates.iter().zip(&demands).find(|(_, d)| choose_reserve(&[**d], budget).is_err());
        let task = alone.or(candidates.iter().zip(&demands).next()).map(|(c, _)| c.task.name.as_str());
        refused(task.unwrap_or_default())(error.into())
    })
}

/// A model that was cut.
struct Cut {
    /// What was measured of it.
    measured: usize,
    plan: Arc<PartitionPlan>,
}

/// What all models are cut under.
struct Cutting<'a> {
    device: &'a LogicalDevice,
    budget: u64,
    reserve: u64,
    plans: &'a Plans,
    tell: Tell<'a>,
}

impl Cutting<'_> {
    /// The plan of a task: that of another of its kind in `cut`, one from a file, or a new one.
    fn plan(
        &self,
        candidate: &Candidate<'_>,
        measured: &Measured,
        cut: &mut Vec<Cut>,
    ) -> Result<Arc<PartitionPlan>, EngineError> {
        let task = candidate.task;
        let fingerprint = measured.fingerprint.clone();
        let complete = fingerprint.under(self.budget, self.reserve).cut_at(task.cuts.as_deref());
        let same = |cut: &&Cut| cut.measured == candidate.measured && cut.plan.fingerprint == complete;
        if let Some(known) = cut.iter().find(same) {
            return Ok(known.plan.clone());
        }
        let find = |path| PartitionPlan::find(path, &complete);
        let rules = Rules::new(self.budget, self.reserve, measured.profile.measured);
        let plan = match self.plans.path.as_deref().map(find).transpose()?.flatten() {
            Some(plan) if plan.rules == rules => plan.check_layers(&task.chain).map(|()| plan)?,
            // None, or one with another margin.
            _ => self.new_plan(candidate, &measured.profile, complete, rules)?,
        };
        tracing::info!(task = task.name, "partition plan\n{plan}");
        let plan = Arc::new(plan);
        cut.push(Cut { measured: candidate.measured, plan: plan.clone() });
        Ok(plan)
    }

    fn new_plan(
        &self,
        candidate: &Candidate<'_>,
        profile: &Profile,
        fingerprint: Fingerprint,
        rules: Rules,
    ) -> Result<PartitionPlan, PartitionError> {
        let task = candidate.task;
        let values = FirstValues::new(&task.chain, task.spec.seed);
        let told = |progress| (self.tell)(&task.name, progress);
        let partitioner = PilotPartitioner::new(&values).telling(&told);
        let mut plan = partitioner.plan(profile, fingerprint, rules, task.cuts.as_deref())?;
        partitioner.verify(&mut plan, &task.chain, &candidate.batch, self.device)?;
        Ok(plan)
    }
}

fn admitted_task(candidate: &Candidate<'_>, plan: Arc<PartitionPlan>) -> AdmittedTask {
    let Candidate { task, batch, .. } = candidate;
    let items = task.train.len();
    let steps = if task.evaluate_only { 0 } else { task.spec.steps(items) };
    let per_item = (batch.units / batch.items.max(1)) as u64;
    let trained_items = match task.spec.length {
        _ if task.evaluate_only => 0,
        hydra_core::Length::Epochs(epochs) => epochs.saturating_mul(items) as u64,
        hydra_core::Length::Steps(steps) => {
            let per_epoch = items.div_ceil(task.spec.batch).max(1);
            let rest = (steps % per_epoch * task.spec.batch).min(items);
            (steps / per_epoch * items + rest) as u64
        }
    };
    let needs = |bytes: u64| if task.is_finished() { 0 } else { bytes };
    AdmittedTask {
        name: task.name.clone(),
        parameters: task.chain.parameters(),
        steps,
        items,
        units: trained_items.saturating_mul(per_item),
        unit: task.train.unit().to_owned(),
        master_bytes: needs(master_bytes(task)),
        disk_bytes: 0,
        on_disk: Vec::new(),
        active_bytes: 0,
        batch_bytes: batch_bytes(task, batch),
        gradient_bytes: 0,
        estimated_s: estimated_s(task, &plan),
        optimizer: Placement::default(),
        plan,
    }
}

/// Seconds of compute that a task has before it.
fn estimated_s(task: &TrainTask, plan: &PartitionPlan) -> f64 {
    let program = task.program(&plan.shards(), 0);
    let cursor = match task.resume.as_ref().map(Checkpoint::state) {
        Some(state) => Cursor::resumed(program, state.step, state.position.stage()),
        None => Cursor::new(program),
    };
    let forward: f64 = plan.shards.iter().map(|s| s.forward_s).sum();
    let backward: f64 = plan.shards.iter().map(|s| s.backward_s).sum();
    // The last shard's forward is in its backward.
    let last = plan.shards.last().map_or(0.0, |s| s.forward_s);
    let left = cursor.left();
    left.sweeps as f64 * (forward - last + backward) + left.evaluations as f64 * forward
}

/// Masters, moments, and the copy of the best parameters where one is kept.
fn master_bytes(task: &TrainTask) -> u64 {
    task.chain.images().iter().map(|image| stored_bytes(image, &task.spec)).sum()
}

/// What a task has in tiers.
fn stored_images((task, admitted): (&TrainTask, &AdmittedTask)) -> StoredImages {
    let images = task.chain.images().iter();
    let there = |bytes: u64| if task.is_finished() { 0 } else { bytes };
    StoredImages {
        masters: images.clone().map(|image| there(stored_bytes(image, &task.spec))).collect(),
        moving: images.map(ImageLayout::bytes).collect(),
        shards: admitted.plan.shards().into_iter().map(|range| task.chain.images_of(range)).collect(),
        may_leave: !admitted.optimizer.on_device() && !task.is_finished(),
    }
}

/// What the tasks need of host memory. A model within a minibatch has room for all of its gradients if then nothing has
/// to leave host memory and each device can have a model; otherwise for those of some shards.
///
/// # Errors
/// As [`HostMemory::needs`] with the least room.
fn host_needs(
    host: &HostMemory<'_>,
    tasks: &[TrainTask],
    batches: &[&Batch],
    admitted: &mut [AdmittedTask],
    stored: &[StoredImages],
) -> Result<HostNeeds, EngineError> {
    let devices = host.devices.min(tasks.iter().filter(|task| !task.is_finished()).count());
    let mut with_room_for = |shards: usize| {
        for ((task, batch), admitted) in tasks.iter().zip(batches).zip(&mut *admitted) {
            let gradients = GradientBytes::of(&task.chain, &task.spec, &admitted.plan.shards());
            let there = admitted.optimizer.on_device();
            admitted.gradient_bytes = if there { u64::MAX } else { gradients.room(shards) };
            let active = active_bytes(task, batch, &admitted.plan, &gradients, shards);
            admitted.active_bytes = if task.is_finished() { 0 } else { active };
        }
        host.needs(admitted, stored)
    };
    let mut most: Option<(usize, usize)> = None;
    for shards in [usize::MAX, FLOWING, 3, 2] {
        let Ok(needs) = with_room_for(shards) else { continue };
        if needs.active_models >= devices && (shards < usize::MAX || needs.division.disk == 0) {
            return Ok(needs);
        }
        most = most.max(Some((needs.active_models, shards)));
    }
    let least = with_room_for(1);
    let models = least.as_ref().map_or(0, |needs| needs.active_models);
    match most.filter(|(most, _)| *most >= models) {
        Some((_, shards)) => with_room_for(shards),
        None => least,
    }
}

/// Gradients, of so many shards where the optimizer lets go of them as they come, the boundary activations at the
/// cut-points with one gradient of them in each direction, and the batch.
fn active_bytes(
    task: &TrainTask,
    batch: &Batch,
    plan: &PartitionPlan,
    gradients: &GradientBytes,
    shards: usize,
) -> u64 {
    let inputs = plan.shards.iter().skip(1).map(|s| plan.layers[s.first].input_bytes);
    let data = batch_bytes(task, batch);
    if task.evaluate_only {
        return inputs.clone().sum::<u64>() + inputs.max().unwrap_or(0) + data;
    }
    let gradients = if task.spec.accumulate > 1 { summed_bytes(task, plan) } else { gradients.room(shards) };
    let boundaries: u64 = inputs.clone().sum::<u64>() + 2 * inputs.max().unwrap_or(0);
    (gradients + boundaries).saturating_add(data)
}

/// The bytes of all microbatches of a minibatch.
fn batch_bytes(task: &TrainTask, batch: &Batch) -> u64 {
    let microbatches = if task.evaluate_only { 1 } else { task.spec.accumulate as u64 };
    (batch.inputs.len_bytes() + batch.targets.len_bytes()).saturating_mul(microbatches)
}

/// The gradients of microbatches, which are added up in `f32`: uses of the next one wait for the last of them, and while
/// the sum is kept the gradients of one more shard arrive.
fn summed_bytes(task: &TrainTask, plan: &PartitionPlan) -> u64 {
    let summed = |image: &ImageLayout| {
        let uses = image.bytes() * image.layers.len() as u64;
        uses.max(image.moment_bytes()) + (uses - image.bytes())
    };
    let sums: u64 = task.chain.images().iter().filter(|image| image.trained).map(summed).sum();
    sums + plan.shards.iter().map(|shard| shard.gradient_bytes).max().unwrap_or(0)
}
