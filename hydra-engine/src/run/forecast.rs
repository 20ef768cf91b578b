//! Builds a workload from the costs that are known before a run starts, so that the simulator can predict its time.
//!
//! Compute times come from the pilot pass; short shards are timed again on all devices. Link rates are as configured
//! or measured by a few uploads. HostRates optimizer and disk are measured on a synthetic buffer
//! ([`rates`](super::rates)). Unmeasured costs are 0: reading batches and writing models.

use super::costs::{device_cost, host_bytes, split_off_cache, working_bytes};
use super::rates::{HostRates, Seconds};
use super::setup::{AdmittedRun, PolicyChoice};
use super::threads::host_threads;
use crate::admission::{
    AdmittedTask, Boundaries, Place, ShardBuffers, gradient_bytes, stored_bytes, timed_plans,
};
use crate::device::{LogicalDevice, processors};
use crate::error::EngineError;
use crate::protocol::Clock;
use crate::train_task::TrainTask;
use hydra_core::{HostTensor, ParamBufferLayout};
use hydra_partition::{PartitionPlan, ShardPlan};
use hydra_sched::program::{Microbatches, Program};
use hydra_sched::{DeviceCost, Epoch, EvaluationCost, PolicyKind, ShardCost, TaskCost, Workload};
use hydra_spill::SpillError;
use serde::Serialize;

/// Bytes of an upload that measures a link.
const MEASURED_BYTES: u64 = 16 << 20;
/// Measured uploads.
const UPLOADS: u32 = 4;

/// The bandwidth of a device's link, in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum LinkRate {
    /// The device reads the masters in place; parameters are not moved.
    ZeroCopy,
    /// A simulated link.
    Simulated {
        /// Bytes per second.
        bytes_per_s: f64,
    },
    /// Measured by a few uploads.
    Measured {
        /// Mean bytes per second.
        bytes_per_s: f64,
        /// Bytes of an upload.
        bytes: u64,
    },
}

impl LinkRate {
    /// Bytes per second; `None` if nothing is moved.
    pub fn bytes_per_s(self) -> Option<f64> {
        match self {
            Self::ZeroCopy => None,
            Self::Simulated { bytes_per_s } | Self::Measured { bytes_per_s, .. } => Some(bytes_per_s),
        }
    }

    /// The link with its bandwidth multiplied by `factor`.
    fn times(self, factor: f64) -> Self {
        match self {
            Self::ZeroCopy => Self::ZeroCopy,
            Self::Simulated { bytes_per_s } => Self::Simulated { bytes_per_s: bytes_per_s * factor },
            Self::Measured { bytes_per_s, bytes } => {
                Self::Measured { bytes_per_s: bytes_per_s * factor, bytes }
            }
        }
    }
}

/// The bytes that a task moves by promotions, microbatch passes and optimizer steps.
#[derive(Clone, Debug, Serialize)]
pub struct ForecastTask {
    /// The task's name.
    pub name: String,
    /// Bytes of the parameters of all shards, which one pass over them reads on the device.
    pub parameter_bytes: u64,
    /// The least bytes of boundary activations and their gradients that a minibatch uploads. Those that stay on the
    /// device from one shard task to the next are not counted.
    pub boundary_up_bytes: u64,
    /// Bytes of boundary activations and their gradients that a minibatch downloads.
    pub boundary_down_bytes: u64,
    /// Bytes of parameter gradients that a minibatch downloads, as single microbatches or sums of them.
    pub gradient_down_bytes: u64,
    /// The part of `parameter_bytes` that promotions read from the disk.
    pub disk_parameter_bytes: u64,
    /// Bytes of masters and moments on the disk that the step of a minibatch reads and writes.
    pub disk_step_bytes: u64,
    /// True if the task is device-resident; then neither parameters nor their gradients are moved.
    pub device_resident: bool,
    /// True if any buffer is resident on the device.
    #[serde(skip)]
    has_resident: bool,
    /// For each shard, bytes of its gradients and of its input (0 for the first).
    #[serde(skip)]
    shards: Vec<(u64, u64)>,
    /// For each shard, the seconds in which a promotion reads it from the disk.
    #[serde(skip)]
    read_s: Vec<f64>,
}

/// The predicted costs of a run before it starts.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// The costs, as input of the simulator.
    pub workload: Workload,
    /// The names of the devices.
    pub devices: Vec<String>,
    /// Their links.
    pub links: Vec<LinkRate>,
    /// The tasks, in the workload's order.
    pub tasks: Vec<ForecastTask>,
    /// The policy. The default policy if the run has a custom one.
    pub policy: PolicyKind,
    /// The seed of the policy.
    pub seed: u64,
    /// True if the next shard task is promoted while one computes.
    pub prefetch: bool,
    /// The budget of each device.
    budgets: Vec<u64>,
    /// Bytes that the largest shard task reserves beyond those it used when measured.
    unused_bytes: u64,
    /// Standing bytes of a device, independent of what it computes.
    standing_bytes: u64,
    /// Bytes of resident masters and of their pending gradients.
    resident_bytes: u64,
}

impl AdmittedRun {
    /// Predicts the costs of the whole run. `None` if a task trains nothing or resumes from a checkpoint, or if the
    /// simulator does not take the costs. Links that are not simulated are measured by a few small uploads.
    ///
    /// # Errors
    /// Errors of the measured link or disk.
    pub fn forecast(&self) -> Result<Option<Forecast>, EngineError> {
        let links: Vec<LinkRate> = self.devices.iter().map(link_rate).collect::<Result<_, _>>()?;
        let (tasks, admitted) = (&self.tasks, &self.admission.tasks);
        if tasks.iter().any(|task| task.evaluate_only || task.start.state().is_some()) {
            return Ok(None);
        }
        let device = |(device, link): (&LogicalDevice, &LinkRate)| DeviceCost {
            link_bytes_per_s: link.bytes_per_s(),
            ..device_cost(device)
        };
        let mut devices: Vec<DeviceCost> = self.devices.iter().zip(&links).map(device).collect();
        split_off_cache(devices.iter_mut(), &self.admission);
        let programs: Vec<Program> = tasks.iter().zip(admitted).map(program).collect();
        let evaluated = first_evaluations(admitted, &programs, devices.len());
        let moves = links.iter().any(|link| link.bytes_per_s().is_some());
        let mut host = HostRates::new(&self.devices, self.disk.dir())?;
        let seconds = |(task, admitted): (&TrainTask, &AdmittedTask)| {
            host.seconds(task, admitted.storage.on_disk.contains(&true))
        };
        let seconds: Vec<Seconds> = tasks.iter().zip(admitted).map(seconds).collect::<Result<_, _>>()?;
        let plans = timed_plans(tasks, admitted, &self.devices)?;
        let costs = admitted.iter().zip(&plans).zip(&programs).zip(evaluated).zip(tasks.iter().zip(&seconds));
        let costs = costs.map(|((((admitted, plan), program), initial), (task, seconds))| {
            let optimizer_s = optimizer_s(task, admitted, program, seconds);
            TaskCost { optimizer_s, ..task_cost((admitted, plan), program, initial, moves) }
        });
        let mut forecast = Forecast {
            workload: Workload {
                host_bytes: host_bytes(&self.admission),
                processors: Some(processors()),
                optimizer_threads: host_threads(self.devices.iter().map(|of| &of.spec), processors()),
                ..Workload::new(costs.collect(), devices)
            },
            devices: self.devices.iter().map(|device| device.spec.name.clone()).collect(),
            tasks: tasks
                .iter()
                .zip(admitted)
                .zip(programs.iter().zip(&seconds))
                .map(|((task, admitted), (program, seconds))| ForecastTask {
                    read_s: read_s(task, admitted, seconds),
                    ..moved(((task, admitted), program), moves)
                })
                .collect(),
            policy: match self.settings.policy {
                PolicyChoice::Kind(kind) => kind,
                PolicyChoice::Own(_) => PolicyKind::default(),
            },
            seed: self.settings.seed,
            prefetch: self.settings.prefetch,
            budgets: self.devices.iter().map(|device| device.spec.memory.bytes()).collect(),
            unused_bytes: unused_bytes(admitted),
            resident_bytes: self.admission.resident_bytes(),
            standing_bytes: self.devices.iter().map(LogicalDevice::standing_bytes).max().unwrap_or(0),
            links,
        };
        forecast.update_costs();
        Ok(forecast.workload.check().is_ok().then_some(forecast))
    }
}

impl Forecast {
    /// Bytes that the largest shard task reserves on a device beyond those it used when measured.
    pub fn unused_bytes(&self) -> u64 {
        self.unused_bytes
    }

    /// Standing bytes of a device, independent of what it computes.
    pub fn standing_bytes(&self) -> u64 {
        self.standing_bytes
    }

    /// Bytes of the masters that are resident on the run's only device, and of their pending gradients.
    pub fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    /// Returns whether the device caches parameters in free memory.
    pub fn keeps_copies(&self, device: usize) -> bool {
        self.workload.devices[device].keeps_copies
    }

    /// The same run on devices with `times` the memory. The cuts stay the same.
    pub fn with_memory(mut self, times: u64) -> Self {
        for (device, budget) in self.workload.devices.iter_mut().zip(&self.budgets) {
            let more = budget.saturating_mul(times.saturating_sub(1));
            device.memory_bytes = device.memory_bytes.map(|memory| memory.saturating_add(more));
        }
        self.update_costs();
        self
    }

    /// The same run with links that are `times` as fast.
    pub fn with_links(mut self, times: f64) -> Self {
        self.links.iter_mut().for_each(|link| *link = link.times(times));
        self.update_costs();
        self
    }

    /// The same run on devices that compute `times` as fast.
    pub fn with_speed(mut self, times: f64) -> Self {
        self.workload.devices.iter_mut().for_each(|device| device.speed *= times);
        self.update_costs();
        self
    }

    /// The same run with one more device like the last one. A task that all devices compute gets one more replica.
    pub fn with_another_device(mut self) -> Self {
        let (tasks, devices) = (self.workload.tasks.len(), self.workload.devices.len());
        for (cost, task) in self.workload.tasks.iter_mut().zip(&self.tasks) {
            if cost.replicas == devices && !task.has_resident {
                cost.replicas += 1;
            }
            if tasks <= devices {
                cost.microbatch_group =
                    cost.microbatch_group.min(cost.microbatches.div_ceil(cost.replicas as u64));
            }
        }
        let device = self.workload.devices.last().cloned();
        self.workload.optimizer_threads += device.as_ref().map_or(0, |device| device.threads);
        self.workload.devices.extend(device);
        self.links.extend(self.links.last().copied());
        self.budgets.extend(self.budgets.last().copied());
        self.devices.push("additional".to_owned());
        self
    }

    /// The same items in minibatches with `times` the microbatches, one microbatch group per device, and so fewer
    /// minibatches. This trains differently.
    pub fn with_microbatches(mut self, times: u64) -> Self {
        for (cost, task) in self.workload.tasks.iter_mut().zip(&mut self.tasks) {
            cost.minibatches = cost.minibatches.div_ceil(times);
            cost.microbatches *= times;
            cost.microbatch_group = cost.microbatches.div_ceil(cost.replicas as u64);
            cost.epoch = None;
            merge_evaluations(cost, |minibatches| minibatches.div_ceil(times));
            task.gradient_down_bytes *= times;
            task.boundary_down_bytes *= times;
        }
        self.update_costs();
        self
    }

    /// The first `most` minibatches of each task, with or without evaluations.
    pub fn first_minibatches(mut self, most: u64, evaluations: bool) -> Self {
        for cost in &mut self.workload.tasks {
            cost.minibatches = cost.minibatches.min(most);
            let left = cost.minibatches;
            cost.evaluations.retain(|of| evaluations && of.after <= left);
        }
        self
    }

    /// The run with the number of minibatches and of evaluation passes divided by `by`.
    pub fn divided(mut self, by: u64) -> Self {
        for cost in &mut self.workload.tasks {
            cost.minibatches = cost.minibatches.div_ceil(by);
            cost.evaluations
                .iter_mut()
                .for_each(|of| of.microbatch_passes = of.microbatch_passes.div_ceil(by));
            merge_evaluations(cost, |minibatches| minibatches.div_ceil(by));
        }
        self
    }

    /// Bytes that a task downloads in total: boundary activations and gradients.
    pub fn downloaded_bytes(&self, task: usize) -> f64 {
        let (cost, moved) = (&self.workload.tasks[task], &self.tasks[task]);
        let boundaries: u64 = moved.shards.iter().map(|(_, input)| input).sum();
        let each = (moved.gradient_down_bytes + moved.boundary_down_bytes) as f64;
        let microbatch_passes = cost.training_passes() as f64 / cost.microbatches as f64;
        microbatch_passes * each + (cost.evaluation_passes() * boundaries) as f64
    }

    /// Updates the workload after a change of links, devices or microbatches.
    fn update_costs(&mut self) {
        let Workload { tasks, devices, .. } = &mut self.workload;
        let rates = self.links.iter().map(|link| link.bytes_per_s());
        devices.iter_mut().zip(rates).for_each(|(device, rate)| device.link_bytes_per_s = rate);
        let rate = self.links.iter().filter_map(|link| link.bytes_per_s()).reduce(f64::min);
        for (cost, task) in tasks.iter_mut().zip(&self.tasks).filter(|(_, task)| !task.device_resident) {
            for (shard, read_s) in cost.shards.iter_mut().zip(&task.read_s) {
                shard.promote_s = Some(*read_s);
            }
            let Some(rate) = rate else { continue };
            for (index, shard) in cost.shards.iter_mut().enumerate() {
                shard.download_s = output_bytes(&task.shards, index, cost.first_trained) / rate;
            }
            let activations = (0..cost.shards.len()).map(|shard| activation_bytes(cost, &task.shards, shard));
            let activations: Vec<f64> = activations.collect();
            for ((shard, with), read_s) in cost.shards.iter_mut().zip(activations).zip(&task.read_s) {
                shard.promote_s = Some(read_s + (shard.bytes.unwrap_or(0) as f64 + with) / rate);
            }
            for (shard, (gradients, _)) in cost.shards.iter_mut().zip(&task.shards) {
                shard.gradients_s = *gradients as f64 / rate;
            }
        }
    }
}

/// Mean bytes of a shard's output over its shard tasks: the input of the next shard in the forward pass, and the
/// gradient of its own input in the backward pass.
fn output_bytes(moved: &[(u64, u64)], shard: usize, first_trained: usize) -> f64 {
    let (input, output) = (moved[shard].1 as f64, moved.get(shard + 1).map(|next| next.1 as f64));
    match output {
        None => input,
        Some(output) if shard > first_trained => f64::midpoint(input, output),
        Some(output) => output,
    }
}

/// Mean bytes of activations and their gradients that are uploaded with a shard's parameters, over its promotions in
/// a training microbatch group: the input of its backward and, in a group of several passes, the values that
/// otherwise stay on the device.
fn activation_bytes(cost: &TaskCost, moved: &[(u64, u64)], shard: usize) -> f64 {
    let (trained, last) = (shard >= cost.first_trained, shard + 1 == moved.len());
    let (input, gradient) = (moved[shard].1, moved.get(shard + 1).map_or(0, |next| next.1));
    let unless_handed_on = |bytes| if cost.microbatch_group == 1 { 0 } else { bytes };
    let forward = if last { 0 } else { unless_handed_on(input) };
    let backward = match (trained, last) {
        (false, _) => 0,
        (true, true) => unless_handed_on(input),
        (true, false) => input + unless_handed_on(gradient),
    };
    let promotions = u64::from(!last) + u64::from(trained);
    (cost.microbatch_group * (forward + backward)) as f64 / promotions.max(1) as f64
}

/// Renumbers the evaluations of a task after its minibatches changed, and merges those that come after the same
/// minibatch.
fn merge_evaluations(cost: &mut TaskCost, after: impl Fn(u64) -> u64) {
    let mut merged: Vec<EvaluationCost> = Vec::new();
    for of in &cost.evaluations {
        let after = after(of.after).min(cost.minibatches);
        match merged.last_mut().filter(|last| last.after == after) {
            Some(last) => last.microbatch_passes += of.microbatch_passes,
            None => merged.push(EvaluationCost { after, microbatch_passes: of.microbatch_passes }),
        }
    }
    cost.evaluations = merged;
}

/// The rate of a device's link, measured unless it is simulated.
fn link_rate(device: &LogicalDevice) -> Result<LinkRate, EngineError> {
    if let Some(rate) = device.spec.link {
        return Ok(LinkRate::Simulated { bytes_per_s: rate.0 });
    }
    if device.manager.link().zero_copy() {
        return Ok(LinkRate::ZeroCopy);
    }
    let elements = MEASURED_BYTES.min(device.manager.budget().available() / 2) as usize / size_of::<f32>();
    let bytes = (elements.max(1) * size_of::<f32>()) as u64;
    let _reservation =
        device.manager.budget().reserve(bytes, "the link measurement").map_err(SpillError::from)?;
    let sent = [HostTensor::float(vec![1.0; elements.max(1)], [elements.max(1)])];
    // Warm-up: allocates memory that the measured uploads reuse.
    drop(device.stream.executes(|| device.manager.upload(&sent))?);
    let clock = Clock::start();
    for _ in 0..UPLOADS {
        drop(device.stream.executes(|| device.manager.upload(&sent))?);
    }
    let each_s = clock.now() / f64::from(UPLOADS);
    Ok(LinkRate::Measured { bytes_per_s: bytes as f64 / each_s.max(1e-9), bytes })
}

fn program((task, admitted): (&TrainTask, &AdmittedTask)) -> Program {
    task.program(&admitted.plan.shards(), task.chain.first_trained(), admitted.microbatch_group)
}

/// The batches of each task's evaluation before training. Tasks with the same one divide it among at most as many
/// tasks as there are devices.
fn first_evaluations(tasks: &[AdmittedTask], programs: &[Program], devices: usize) -> Vec<u64> {
    let batches = |index: usize| {
        let program = &programs[index];
        if program.initial_validation && program.steps > 0 { program.validation as u64 } else { 0 }
    };
    let of = |index: usize| {
        let Some(first) = tasks[index].first_evaluation else { return batches(index) };
        let same = |task: &&AdmittedTask| task.first_evaluation == Some(first);
        let rank = tasks[..index].iter().filter(same).count() as u64;
        let share = tasks.iter().filter(same).count().min(devices).max(1) as u64;
        let all = batches(index);
        if rank < share { all / share + u64::from(rank < all % share) } else { 0 }
    };
    (0..tasks.len()).map(of).collect()
}

/// The costs of a task without those of links.
fn task_cost(
    (task, plan): (&AdmittedTask, &PartitionPlan),
    program: &Program,
    initial: u64,
    moves: bool,
) -> TaskCost {
    let promoted = moves && !task.optimizer.on_device();
    let shard = |(index, (shard, buffers)): (usize, (&ShardPlan, &ShardBuffers))| ShardCost {
        forward_s: shard.forward_s,
        backward_s: shard.backward_s,
        promote_s: (!promoted).then_some(0.0),
        bytes: Some(task.promoted_bytes(index)),
        working: working_bytes(task, plan, index),
        frozen: buffers.frozen.clone(),
        buffers: buffers.stepped.clone(),
        ..ShardCost::default()
    };
    let shards = plan.shards.iter().zip(&task.storage.buffers).enumerate().map(shard).collect();
    let mut cost = TaskCost::new(&task.name, program.steps as u64, shards);
    cost.first_trained = program.first_trained;
    let Microbatches { each, last, epoch } = program.microbatches;
    cost.microbatches = each as u64;
    if last < each {
        cost.epoch = Some(Epoch { minibatches: epoch as u64, last_microbatches: last as u64 });
    }
    cost.replicas = task.replicas;
    (cost.masters_bytes, cost.active_bytes) = (task.storage.memory_bytes(), task.memory.active_bytes);
    // With a single shard, the order of microbatch passes in a replica does not depend on the microbatch group.
    if cost.shards.len() > 1 || cost.replicas > 1 {
        cost.microbatch_group = program.microbatch_group.microbatches as u64;
        cost.evaluation_group = program.microbatch_group.batches as u64;
    }
    cost.evaluations = evaluations(program, initial);
    cost
}

/// The evaluations of a task, with `initial` batches before training.
fn evaluations(program: &Program, initial: u64) -> Vec<EvaluationCost> {
    let during = program.evaluations.iter().map(|(after, batches)| (after as u64, batches as u64));
    let last = (program.steps as u64, program.final_batches() as u64);
    let all = std::iter::once((0, initial)).chain(during).chain([last]);
    let measured = (0..program.steps).filter(|_| program.reads_statistic);
    let measured = measured.map(|step| (step as u64, program.measured_of(step) as u64));
    let mut all: Vec<(u64, u64)> = all.chain(measured).collect();
    all.sort_by_key(|(after, _)| *after);
    let mut evaluations: Vec<EvaluationCost> = Vec::new();
    for (after, microbatch_passes) in all {
        match evaluations.last_mut().filter(|of| of.after == after) {
            Some(of) => of.microbatch_passes += microbatch_passes,
            None if microbatch_passes > 0 => evaluations.push(EvaluationCost { after, microbatch_passes }),
            None => {}
        }
    }
    evaluations
}

/// The seconds of the host optimizer per minibatch: all steps of buffers that are not resident on the device, and the
/// addition of the last gradients to arrive. Earlier gradients are added during compute.
fn optimizer_s(task: &TrainTask, admitted: &AdmittedTask, program: &Program, seconds: &Seconds) -> f64 {
    let microbatch_groups = program.microbatches.each.div_ceil(program.microbatch_group.microbatches);
    let mut sums = admitted.memory.accumulation_bytes.iter().zip(&admitted.plan.shards);
    let summed = sums.all(|(sum, of)| *sum == of.gradient_bytes);
    let adds =
        if program.microbatches.each == 1 || (microbatch_groups == 1 && summed) { 0.0 } else { seconds.add };
    let buffers = task.chain.buffers().iter().zip(&admitted.storage.on_disk).enumerate();
    let stepped = buffers.filter(|(index, (of, _))| of.trained && !admitted.optimizer.is_resident(*index));
    let step = |on_disk: bool| if on_disk { seconds.disk_step } else { seconds.step };
    stepped.map(|(_, (buffer, on_disk))| buffer.elements as f64 * (step(*on_disk) + adds)).sum()
}

/// For each shard, the seconds in which a promotion reads its buffers from the disk.
fn read_s(task: &TrainTask, admitted: &AdmittedTask, seconds: &Seconds) -> Vec<f64> {
    let elements = |buffer: usize| task.chain.buffers()[buffer].elements as f64;
    let of = |shard: &ShardPlan| {
        let (buffers, on_disk) = (task.chain.buffers_of(shard.range()), &admitted.storage.on_disk);
        let read = buffers.into_iter().filter(|buffer| on_disk[*buffer]).map(elements);
        read.sum::<f64>() * seconds.disk_read
    };
    admitted.plan.shards.iter().map(of).collect()
}

/// Bytes that the largest shard task reserves beyond those it used when measured.
fn unused_bytes(admitted: &[AdmittedTask]) -> u64 {
    let shards = admitted.iter().flat_map(|of| of.plan.shards.iter().zip(&of.memory.accumulation_bytes));
    let beside = |(shard, sums): &(&ShardPlan, &u64)| {
        shard.peak_bytes.saturating_sub(shard.param_bytes).saturating_add(sums.saturating_mul(2))
    };
    let largest = shards.max_by_key(beside);
    largest.map_or(0, |(shard, _)| {
        shard.peak_bytes.saturating_sub(shard.verified_bytes.unwrap_or(shard.peak_bytes))
    })
}

/// The bytes that a task moves; 0 between host and devices that read its memory in place.
fn moved(((task, admitted), program): ((&TrainTask, &AdmittedTask), &Program), moves: bool) -> ForecastTask {
    let (plan, part) = (&admitted.plan, task.train.mean_part());
    let input = |shard: &ShardPlan| match shard.first {
        0 => 0,
        _ if !moves => 0,
        first => (plan.layers[first].input_bytes as f64 * part) as u64,
    };
    let device_resident = admitted.optimizer.on_device();
    let is_moved = |index: usize| index >= program.first_trained && moves && !device_resident;
    let stays = |shard: &ShardPlan| -> u64 {
        let buffers = task.chain.buffers_of(shard.range()).into_iter();
        let buffers = buffers.filter(|buffer| admitted.optimizer.is_resident(*buffer));
        let trained = buffers.map(|buffer| &task.chain.buffers()[buffer]).filter(|buffer| buffer.trained);
        trained.map(ParamBufferLayout::bytes).sum()
    };
    let gradients = |index: usize, shard: &ShardPlan| match is_moved(index) {
        true => shard.gradient_bytes.saturating_sub(stays(shard)),
        false => 0,
    };
    let shards: Vec<(u64, u64)> =
        plan.shards.iter().enumerate().map(|(index, of)| (gradients(index, of), input(of))).collect();
    let each: u64 = shards.iter().map(|(gradients, _)| gradients).sum();
    let summed = (0..shards.len()).filter(|index| is_moved(*index));
    let summed: u64 = summed.map(|index| admitted.memory.accumulation_bytes[index]).sum();
    let (microbatches, microbatch_group) = (program.microbatches.each, program.microbatch_group.microbatches);
    let inputs: Vec<u64> = shards.iter().map(|(_, input)| *input).collect();
    let boundaries = Boundaries::new(&inputs, program.first_trained);
    let on_disk = || task.chain.buffers().iter().zip(&admitted.storage.on_disk).filter(|(_, is)| **is);
    ForecastTask {
        name: admitted.name.clone(),
        parameter_bytes: plan.shards.iter().map(|shard| shard.param_bytes).sum(),
        boundary_up_bytes: microbatches as u64 * boundaries.up(microbatch_group),
        boundary_down_bytes: microbatches as u64 * boundaries.down(),
        gradient_down_bytes: gradient_bytes(microbatches, microbatch_group, each, summed),
        disk_parameter_bytes: on_disk().map(|(buffer, _)| buffer.bytes()).sum(),
        disk_step_bytes: on_disk()
            .filter(|(buffer, _)| buffer.trained)
            .map(|(buffer, _)| stored_bytes(buffer, &task.spec))
            .sum(),
        device_resident,
        has_resident: admitted.optimizer.on != Place::Host,
        shards,
        read_s: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::Evaluations;
    use hydra_sched::program::EvaluationPoints;

    fn program(evaluations: Evaluations) -> Program {
        Program {
            shards: 2,
            first_trained: 0,
            steps: 5,
            microbatches: Microbatches { each: 1, last: 1, epoch: 5 },
            reads_statistic: false,
            microbatch_group: hydra_sched::program::MicrobatchGroup::ONE,
            validation: 3,
            test: 2,
            rounds: None,
            initial_validation: true,
            replicas: 1,
            shared: false,
            evaluations: EvaluationPoints::new(evaluations.within(5).into_iter().map(|after| (after, 3))),
        }
    }

    #[test]
    fn evaluations_come_where_the_cursor_makes_them() {
        let every = [None, Some(2), Some(5), Some(9)].map(|every| Evaluations::new(every, Vec::new()));
        let at = [(None, vec![1, 4]), (Some(2), vec![3, 4]), (None, vec![9])];
        for given in every.into_iter().chain(at.map(|(every, at)| Evaluations::new(every, at))) {
            let microbatches = Microbatches { each: 3, last: 1, epoch: 5 };
            let measured = Program { reads_statistic: true, microbatches, ..program(given.clone()) };
            for program in [program(given.clone()), measured] {
                assert_eq!(evaluations(&program, 3), made(&program), "{given:?}");
            }
        }
    }

    /// The evaluations that the cursor of a task makes.
    fn made(program: &Program) -> Vec<EvaluationCost> {
        let mut cursor = hydra_sched::program::Cursor::new(program.clone());
        let mut made: Vec<EvaluationCost> = Vec::new();
        loop {
            if let Some(task) = cursor.peek() {
                if task.kind == hydra_sched::ShardTaskKind::Evaluate && task.shard == 1 {
                    let after = task.step as u64;
                    match made.last_mut().filter(|of| of.after == after) {
                        Some(of) => of.microbatch_passes += 1,
                        None => made.push(EvaluationCost { after, microbatch_passes: 1 }),
                    }
                }
                cursor.advance(0);
            } else if cursor.stage() == hydra_sched::program::Stage::Restore {
                cursor.waited(false);
            } else {
                return made;
            }
        }
    }

    #[test]
    fn activations_go_up_that_are_not_handed_on() {
        let shard = || ShardCost::new(1.0, 2.0, 0.0);
        let mut cost = TaskCost::new("a", 1, vec![shard(), shard(), shard()]);
        let moved = [(0, 0), (0, 10), (0, 100)];
        let up = |cost: &TaskCost| [0, 1, 2].map(|shard| activation_bytes(cost, &moved, shard));
        // Each shard except the last is promoted for its forward and for its backward.
        assert_eq!(up(&cost), [0.0, 5.0, 0.0]);
        (cost.microbatches, cost.microbatch_group) = (2, 2);
        assert_eq!(up(&cost), [10.0, 120.0, 200.0]);
        cost.first_trained = 2;
        assert_eq!(up(&cost), [0.0, 20.0, 200.0]);
    }

    #[test]
    fn a_part_of_a_run_has_its_evaluations_in_their_places() {
        let mut cost = TaskCost::new("a", 10, vec![ShardCost::new(1.0, 2.0, 0.0)]);
        cost.evaluations = [(0, 4), (4, 4), (5, 4), (10, 8)]
            .map(|(after, microbatch_passes)| EvaluationCost { after, microbatch_passes })
            .to_vec();
        cost.minibatches = 4;
        merge_evaluations(&mut cost, |after| after.div_ceil(3));
        let found: Vec<(u64, u64)> =
            cost.evaluations.iter().map(|of| (of.after, of.microbatch_passes)).collect();
        assert_eq!(found, [(0, 4), (2, 8), (4, 8)]);
    }
}
