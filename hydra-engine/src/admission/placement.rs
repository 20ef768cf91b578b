//! Third step: places each task's optimizer on the host, or on the device if its masters can be resident there.
//!
//! A device-resident task has no transfers. The device is therefore chosen if everything fits there together and its
//! step is bit-exact with the host's, and otherwise only on request.

use super::buffers::{master_bytes, waiting};
use super::cut::{CutTask, Limits};
use super::shared::shared_buffers;
use crate::device::{DeviceKind, LogicalDevice};
use crate::error::{EngineError, guarded, with_causes};
use crate::optimizer::{DeviceStepper, OptimizerCheck, Tried};
use crate::train_task::TrainTask;
use hydra_core::{ByteSize, Chain, FloatType, OptimizerSpec, ParamBufferLayout, TrainSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The requested placement of optimizers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerPlacement {
    /// On the device if everything fits there and its step is bit-exact with the host's, else on the host.
    #[default]
    Auto,
    /// On the host.
    Host,
    /// On the device, even if its step is not bit-exact with the host's. A run in which this is impossible is
    /// refused.
    Device,
}

/// Where an optimizer steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// On the host, on the masters there.
    #[default]
    Host,
    /// On the device, where the masters are resident while the task runs.
    Device,
}

/// Where a task's optimizer steps, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The place.
    pub on: Place,
    /// True if its steps are bit-exact with the host's.
    pub exact: bool,
    /// The reason, as text.
    pub why: String,
}

impl Default for Placement {
    fn default() -> Self {
        Self::host("")
    }
}

impl Placement {
    pub(super) fn host(why: impl Into<String>) -> Self {
        Self { on: Place::Host, exact: true, why: why.into() }
    }

    /// Returns whether the task is device-resident.
    pub(crate) fn on_device(&self) -> bool {
        self.on == Place::Device
    }
}

/// The device memory of a task, as far as placement depends on it.
struct DevicePeaks<'a> {
    name: &'a str,
    /// The reason why the host must step it, if there is one.
    obstacle: Option<String>,
    /// True if nothing is trained.
    untrained: bool,
    /// Bytes for the whole run if the task is device-resident: masters, moments and pending gradients.
    device_resident: u64,
    /// Bytes of its largest shard task without parameters.
    compute: u64,
    /// Bytes of the parameters of its largest shard.
    params: u64,
}

/// The device memory of a run, as far as placement depends on it.
struct DeviceHeadroom<'a> {
    name: &'a str,
    /// Devices of the run.
    devices: usize,
    gpu: bool,
    budget: u64,
    /// Bytes of the double buffer, into which spilled tasks are promoted.
    reserve: u64,
    margin: u64,
}

/// Places the optimizer of every task of a run.
pub(super) fn place(
    asked: OptimizerPlacement,
    tasks: &[CutTask<'_>],
    limits: &Limits,
    devices: &[LogicalDevice],
) -> Result<Vec<Placement>, EngineError> {
    let device = devices.first().ok_or(EngineError::NoDevice)?;
    let headroom = DeviceHeadroom {
        name: &device.spec.name,
        devices: devices.len(),
        gpu: device.spec.kind != DeviceKind::Cpu,
        budget: device.spec.memory.bytes(),
        reserve: limits.reserve,
        margin: tasks.iter().map(|cut| cut.plan.rules.margin).max().unwrap_or(0),
    };
    let stepper = device.stepper();
    let mut peaks: Vec<DevicePeaks<'_>> = tasks.iter().map(|cut| DevicePeaks::of(cut, &stepper)).collect();
    count_shared_once(&mut peaks, tasks);
    let device_resident =
        tasks.iter().zip(&peaks).filter(|(_, peaks)| peaks.may_be_device_resident()).map(|(cut, _)| cut.task);
    choose(asked, &peaks, &headroom, || step_is_exact(device, &stepper, device_resident))
}

/// Counts buffers that several tasks share for only one of them, among tasks that may be device-resident.
fn count_shared_once(peaks: &mut [DevicePeaks<'_>], tasks: &[CutTask<'_>]) {
    let device_resident =
        tasks.iter().zip(peaks.iter()).map(|(cut, peaks)| (cut.task, peaks.may_be_device_resident()));
    let shared = shared_buffers(device_resident);
    let mut seen = BTreeSet::new();
    let all = tasks.iter().zip(peaks).zip(shared);
    for ((cut, peaks), shared) in all.filter(|((_, peaks), _)| peaks.may_be_device_resident()) {
        let buffers = cut.task.chain.buffers().iter().zip(shared);
        let again = buffers.filter(|(_, shared)| shared.is_some_and(|shared| !seen.insert(shared)));
        peaks.device_resident -= again.map(|(buffer, _)| master_bytes(buffer, &cut.task.spec)).sum::<u64>();
    }
}

/// Tries one step per task and returns whether the device's result is bit-exact with the host's.
fn step_is_exact<'a>(
    device: &LogicalDevice,
    stepper: &DeviceStepper,
    tasks: impl Iterator<Item = &'a TrainTask>,
) -> Result<bool, EngineError> {
    let stepped: Vec<(OptimizerSpec, FloatType)> =
        tasks.map(|task| (task.spec.optimizer.clone(), task.chain.float_type())).collect();
    let compare = || stepper.memory.compare(Tried::Tasks(&stepped));
    let check = guarded("the optimizer's step on the device", || Ok(device.pool.install(compare)?))?;
    // For a CPU device the host's code steps.
    Ok(check.is_none_or(|check: OptimizerCheck| check.is_exact()))
}

/// The bytes of the masters and pending gradients of a device-resident task.
fn device_resident_bytes(chain: &Chain, spec: &TrainSpec) -> u64 {
    chain.buffers().iter().map(|buffer| master_bytes(buffer, spec)).sum::<u64>() + waiting(chain, spec)
}

impl<'a> DevicePeaks<'a> {
    fn of(cut: &CutTask<'a>, stepper: &DeviceStepper) -> Self {
        let (task, shards) = (cut.task, &cut.plan.shards);
        let compute = shards.iter().map(|shard| shard.most_bytes().saturating_sub(shard.param_bytes)).max();
        let clipped =
            task.spec.clip.map(|_| "gradient clipping waits for the norm of all gradients".to_owned());
        let steps = stepper.memory.steps(&*task.spec.optimizer);
        let name = task.spec.optimizer.name();
        let has_state = task.chain.buffers().iter().any(ParamBufferLayout::is_state);
        let states = has_state.then(|| "the host updates its running statistics".to_owned());
        let without_kernel = (!steps).then(|| format!("the device has no kernel for the optimizer `{name}`"));
        Self {
            name: &task.name,
            obstacle: clipped.or(without_kernel).or(states),
            untrained: task.evaluate_only,
            device_resident: device_resident_bytes(&task.chain, &task.spec),
            compute: compute.unwrap_or(0),
            params: shards.iter().map(|shard| shard.param_bytes).max().unwrap_or(0),
        }
    }

    fn may_be_device_resident(&self) -> bool {
        !self.untrained && self.obstacle.is_none()
    }

    /// The placement of this task, if tasks that may be device-resident are placed at `device_resident`.
    fn placed(&self, device_resident: &Placement) -> Placement {
        match (self.untrained, &self.obstacle) {
            (true, _) => Placement::host("nothing is trained"),
            (_, Some(obstacle)) => Placement::host(obstacle.clone()),
            _ => device_resident.clone(),
        }
    }
}

impl DeviceHeadroom<'_> {
    /// The bytes needed if every task that may be device-resident is, and the others are spilled.
    fn needed(&self, tasks: &[DevicePeaks<'_>]) -> u64 {
        let device_resident: u64 =
            tasks.iter().filter(|task| task.may_be_device_resident()).map(|task| task.device_resident).sum();
        let compute = tasks.iter().map(|task| match task.may_be_device_resident() {
            true => task.compute,
            false => task.compute + task.params + self.reserve,
        });
        device_resident.saturating_add(compute.max().unwrap_or(0)).saturating_add(self.margin)
    }

    /// The reason why no task can be device-resident, if there is one.
    fn obstacle(&self, tasks: &[DevicePeaks<'_>]) -> Option<String> {
        if self.devices > 1 {
            let devices = self.devices;
            return Some(format!(
                "the run has {devices} devices, and resident masters are on one device only"
            ));
        }
        let needed = self.needed(tasks);
        (needed > self.budget).then(|| {
            let (needed, budget) = (ByteSize(needed).at_least(), ByteSize(self.budget));
            format!("with moments, everything would take {needed} of {budget} on {}", self.name)
        })
    }

    /// The placement of tasks that may be device-resident, given the result of the bit-exactness check.
    fn placement(
        &self,
        is_required: bool,
        exact: Result<bool, EngineError>,
    ) -> Result<Placement, EngineError> {
        let name = self.name;
        let why = match (&exact, is_required) {
            (Ok(true), true) => "requested; its step is bit-exact with the host's".to_owned(),
            (Ok(true), false) => {
                format!("everything fits on {name}, and its step is bit-exact with the host's")
            }
            (Ok(false), true) => "requested, although its step is not bit-exact with the host's".to_owned(),
            (Ok(false), false) => format!("a step on {name} would not be bit-exact with the host's"),
            (Err(error), _) => format!("a trial step on {name} failed: {}", with_causes(error)),
        };
        match exact {
            Err(error) if is_required => Err(error),
            Ok(exact) if exact || is_required => Ok(Placement { on: Place::Device, exact, why }),
            _ => Ok(Placement::host(why)),
        }
    }
}

fn choose(
    asked: OptimizerPlacement,
    tasks: &[DevicePeaks<'_>],
    headroom: &DeviceHeadroom<'_>,
    exact: impl FnOnce() -> Result<bool, EngineError>,
) -> Result<Vec<Placement>, EngineError> {
    let all_on_host = |why: &str| Ok(tasks.iter().map(|_| Placement::host(why)).collect());
    let is_required = asked == OptimizerPlacement::Device;
    if asked == OptimizerPlacement::Host {
        return all_on_host("requested");
    }
    if !is_required && !headroom.gpu {
        return all_on_host("resident masters save nothing on a CPU device");
    }
    let Some(first) = tasks.iter().find(|task| !task.untrained) else {
        return all_on_host("nothing is trained");
    };
    if let Some(problem) = headroom.obstacle(tasks) {
        return if is_required { Err(refusal(first, problem)) } else { all_on_host(&problem) };
    }
    if let Some((task, obstacle)) = tasks.iter().find_map(|task| Some((task, task.obstacle.as_ref()?)))
        && is_required
    {
        return Err(refusal(task, obstacle.clone()));
    }
    let device_resident = match tasks.iter().any(DevicePeaks::may_be_device_resident) {
        true => headroom.placement(is_required, exact())?,
        false => Placement::default(),
    };
    Ok(tasks.iter().map(|task| task.placed(&device_resident)).collect())
}

fn refusal(task: &DevicePeaks<'_>, problem: String) -> EngineError {
    EngineError::OptimizerPlacement { task: task.name.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADROOM: DeviceHeadroom<'static> =
        DeviceHeadroom { name: "cuda:0", devices: 1, gpu: true, budget: 1000, reserve: 100, margin: 50 };

    fn task(name: &str, device_resident: u64) -> DevicePeaks<'_> {
        DevicePeaks { name, obstacle: None, untrained: false, device_resident, compute: 200, params: 100 }
    }

    fn placed(
        asked: OptimizerPlacement,
        tasks: &[DevicePeaks<'_>],
        headroom: &DeviceHeadroom<'_>,
        exact: bool,
    ) -> String {
        let placements = choose(asked, tasks, headroom, || Ok(exact));
        let shown =
            |p: Placement| format!("{:?}{}: {}", p.on, if p.exact { "" } else { " (inexact)" }, p.why);
        match placements {
            Ok(placements) => placements.into_iter().map(shown).collect::<Vec<_>>().join("\n"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn auto_takes_the_device_where_all_fits_and_the_bits_are_the_hosts() {
        let auto = |tasks: &[DevicePeaks<'_>], headroom, exact| {
            placed(OptimizerPlacement::Auto, tasks, headroom, exact)
        };
        let two = [task("a", 300), task("b", 450)];
        let fits = "Device: everything fits on cuda:0, and its step is bit-exact with the host's";
        assert_eq!(auto(&two, &HEADROOM, true), [fits, fits].join("\n"));
        assert!(auto(&two, &HEADROOM, false).starts_with("Host: a step on cuda:0 would not be bit-exact"));
        let too_large = auto(&[task("a", 300), task("b", 451)], &HEADROOM, true);
        let expected = "Host: with moments, everything would take 1001 B of 1000 B on cuda:0";
        assert_eq!(too_large, [expected, expected].join("\n"));
        let several = DeviceHeadroom { devices: 2, ..HEADROOM };
        assert!(auto(&two, &several, true).starts_with("Host: the run has 2 devices"));
        let failed = || Err(EngineError::NoDevice);
        let tried = choose(OptimizerPlacement::Auto, &two, &HEADROOM, failed).unwrap().remove(0);
        assert_eq!((tried.on, tried.exact), (Place::Host, true));
        assert!(tried.why.starts_with("a trial step on cuda:0 failed: "), "{}", tried.why);
        assert!(choose(OptimizerPlacement::Device, &two, &HEADROOM, failed).is_err());
        let cpu = DeviceHeadroom { gpu: false, ..HEADROOM };
        assert!(auto(&two, &cpu, true).starts_with("Host: resident masters save nothing"));
    }

    #[test]
    fn a_clipped_task_is_stepped_on_the_host_beside_others_that_are_not() {
        let clipped = || DevicePeaks { obstacle: Some("clipped".to_owned()), ..task("b", 10_000) };
        let untrained = || DevicePeaks { untrained: true, ..task("c", 10_000) };
        let shown =
            placed(OptimizerPlacement::Auto, &[task("a", 550), clipped(), untrained()], &HEADROOM, true);
        let lines: Vec<&str> = shown.lines().collect();
        assert!(
            lines[0].starts_with("Device: ") && lines[1..] == ["Host: clipped", "Host: nothing is trained"]
        );
        let full = placed(OptimizerPlacement::Auto, &[task("a", 551), clipped()], &HEADROOM, true);
        assert!(
            full.starts_with("Host: with moments, everything"),
            "a spilled task needs its double buffer: {full}"
        );
        let only = placed(OptimizerPlacement::Auto, &[clipped()], &HEADROOM, true);
        assert_eq!(only, "Host: clipped");
        assert_eq!(
            placed(OptimizerPlacement::Auto, &[untrained()], &HEADROOM, true),
            "Host: nothing is trained"
        );
    }

    #[test]
    fn masters_moments_and_what_they_are_rounded_to_are_counted() {
        let spec = |optimizer: &OptimizerSpec, accumulate| TrainSpec {
            accumulate,
            ..TrainSpec::new(optimizer.clone(), 1)
        };
        let (adamw, sgd) = (OptimizerSpec::adamw(1.0), OptimizerSpec::sgd(1.0));
        for (float, each) in [(FloatType::F32, [12, 8, 16]), (FloatType::Bf16, [14, 10, 18])] {
            let chain = hydra_models::mlp::chain(&[2, 16, 16], 3).unwrap().with_float_type(float);
            let elements: u64 = chain.buffers().iter().map(|buffer| buffer.elements as u64).sum();
            let found = [spec(&adamw, 1), spec(&sgd, 1), spec(&adamw, 2)]
                .map(|spec| device_resident_bytes(&chain, &spec));
            let [adamw, sgd, accumulated] = each.map(|bytes| bytes * elements);
            // A sum of the largest parameter is computed into separate memory.
            assert_eq!(found, [adamw, sgd, accumulated + 16 * 16 * 4], "{float}");
        }
    }

    #[test]
    fn a_request_is_kept_or_refused() {
        let device = |tasks: &[DevicePeaks<'_>], headroom, exact| {
            placed(OptimizerPlacement::Device, tasks, headroom, exact)
        };
        let a = || task("a", 300);
        assert!(device(&[a()], &HEADROOM, true).starts_with("Device: requested; "));
        assert!(device(&[a()], &HEADROOM, false).starts_with("Device (inexact): requested, although"));
        let refused = "the optimizer of task `a` cannot step on the device: ";
        let several = DeviceHeadroom { devices: 2, ..HEADROOM };
        assert!(device(&[a()], &several, true).starts_with(&format!("{refused}the run has 2 devices")));
        assert!(
            device(&[task("a", 5000)], &HEADROOM, true)
                .starts_with(&format!("{refused}with moments, everything"))
        );
        let clipped = DevicePeaks { obstacle: Some("clipped".to_owned()), ..task("b", 1) };
        let shown = device(&[a(), clipped], &HEADROOM, true);
        assert!(shown.starts_with("the optimizer of task `b` cannot step on the device: clipped"), "{shown}");
        assert_eq!(placed(OptimizerPlacement::Host, &[a()], &HEADROOM, true), "Host: requested");
    }
}
