//! Third step: places each task's optimizer on the host, or on the device if its masters can be resident there.
//!
//! A device-resident task has no transfers. The device is therefore chosen if everything fits there together and its
//! step is bit-exact with the host's. If not everything fits, a GPU has the masters of the buffers that do
//! ([`partial`](super::partial)).

use super::buffers::{master_bytes, waiting};
use super::cut::{CutTask, Limits};
use super::measure::MeasuredTask;
use super::partial::{free_bytes, resident_buffers};
use super::shared::shared_buffers;
use crate::device::{DeviceKind, LogicalDevice};
use crate::error::{EngineError, guarded, with_causes};
use crate::optimizer::{DeviceStepper, OptimizerCheck, Tried};
use crate::train_task::TrainTask;
use hydra_core::{ByteSize, Chain, FloatType, OptimizerSpec, ParamBufferLayout, TrainSpec};
use hydra_partition::margin;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The requested placement of optimizers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerPlacement {
    /// On a GPU if everything fits there and its step is bit-exact with the host's; if not everything fits, as
    /// [`Partial`](Self::Partial); else on the host.
    #[default]
    Auto,
    /// On the host.
    Host,
    /// On the device for the buffers whose masters fit there, on the host for the others (partial offload). Where
    /// the device's step is not bit-exact with the host's, all are on the host.
    Partial,
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
    /// On the device for some buffers, whose masters are resident there while the task runs, and on the host for the
    /// others.
    Partial,
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
    /// The buffers of the chain that are resident on the device, if only some are.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub resident: BTreeSet<usize>,
}

impl Default for Placement {
    fn default() -> Self {
        Self::host("")
    }
}

impl Placement {
    pub(super) fn host(why: impl Into<String>) -> Self {
        Self { on: Place::Host, exact: true, why: why.into(), resident: BTreeSet::new() }
    }

    /// Returns whether the task is device-resident.
    pub(crate) fn on_device(&self) -> bool {
        self.on == Place::Device
    }

    /// Returns whether the masters of a buffer are resident on the device.
    pub(crate) fn is_resident(&self, buffer: usize) -> bool {
        match self.on {
            Place::Host => false,
            Place::Partial => self.resident.contains(&buffer),
            Place::Device => true,
        }
    }
}

/// The device memory of a task, as far as placement depends on it.
#[derive(Default)]
struct DevicePeaks<'a> {
    name: &'a str,
    /// The reason why the host must step it, if there is one.
    obstacle: Option<String>,
    /// Its parameter buffers.
    buffers: usize,
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
    /// The buffers of each task that are resident if they are divided; empty if they may not be.
    partial: &'a [BTreeSet<usize>],
}

/// Returns whether a device that does not fit all masters may have some of them.
pub(super) fn may_divide(asked: OptimizerPlacement, devices: &[LogicalDevice]) -> bool {
    let [device] = devices else { return false };
    match asked {
        OptimizerPlacement::Partial => true,
        OptimizerPlacement::Auto => device.spec.kind != DeviceKind::Cpu,
        OptimizerPlacement::Host | OptimizerPlacement::Device => false,
    }
}

/// Places the optimizer of every task of a run, in which copies of the `shaped` tasks may be added later.
pub(super) fn place(
    asked: OptimizerPlacement,
    (tasks, shaped): (&[CutTask<'_>], &[CutTask<'_>]),
    limits: &Limits,
    devices: &[LogicalDevice],
) -> Result<Vec<Placement>, EngineError> {
    let device = devices.first().ok_or(EngineError::NoDevice)?;
    let stepper = device.stepper();
    let gpu = device.spec.kind != DeviceKind::Cpu;
    let partial = match may_divide(asked, devices) {
        true => {
            let free = free_bytes(tasks.iter().chain(shaped), limits);
            resident_buffers(tasks, free, |task| obstacle(task, &stepper))
        }
        false => Vec::new(),
    };
    let headroom = DeviceHeadroom {
        name: &device.spec.name,
        devices: devices.len(),
        gpu,
        budget: device.spec.memory.bytes(),
        reserve: limits.reserve,
        margin: tasks.iter().map(|cut| cut.plan.rules.margin).max().unwrap_or(0),
        partial: &partial,
    };
    let mut peaks: Vec<DevicePeaks<'_>> = tasks.iter().map(|cut| DevicePeaks::of(cut, &stepper)).collect();
    count_shared_once(&mut peaks, tasks);
    let device_resident =
        tasks.iter().zip(&peaks).filter(|(_, peaks)| peaks.may_be_device_resident()).map(|(cut, _)| cut.task);
    choose(asked, &peaks, &headroom, || step_is_exact(device, &stepper, device_resident))
}

/// Returns whether a task that runs alone on a device of `budget` bytes could be device-resident in one shard.
pub(super) fn all_resident(measured: &MeasuredTask<'_>, device: &LogicalDevice, budget: u64) -> bool {
    let (task, profile) = (measured.task, &measured.costs.profile);
    let whole = profile.shard_memory(0..profile.len());
    let compute = whole.peak_bytes().saturating_sub(whole.param_bytes);
    let needed = [device_resident_bytes(&task.chain, &task.spec), compute, margin(budget, profile.measured)];
    obstacle(task, &device.stepper()).is_none() && needed.into_iter().fold(0, u64::saturating_add) <= budget
}

/// Counts buffers that several tasks share for only one of them, among tasks that may be device-resident.
fn count_shared_once(peaks: &mut [DevicePeaks<'_>], tasks: &[CutTask<'_>]) {
    let device_resident =
        tasks.iter().zip(peaks.iter()).map(|(cut, peaks)| (cut.task, |_| peaks.may_be_device_resident()));
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
    let masters: u64 = chain.buffers().iter().map(|buffer| master_bytes(buffer, spec)).sum();
    masters + waiting(chain, spec, |_| true)
}

/// The reason why the host must step a task, if there is one.
fn obstacle(task: &TrainTask, stepper: &DeviceStepper) -> Option<String> {
    let clipped = task.spec.clip.map(|_| "gradient clipping waits for the norm of all gradients".to_owned());
    let steps = stepper.memory.steps(&*task.spec.optimizer);
    let name = task.spec.optimizer.name();
    let has_state = task.chain.buffers().iter().any(ParamBufferLayout::is_state);
    let states = has_state.then(|| "the host updates its running statistics".to_owned());
    let without_kernel = (!steps).then(|| format!("the device has no kernel for the optimizer `{name}`"));
    clipped.or(without_kernel).or(states)
}

impl<'a> DevicePeaks<'a> {
    fn of(cut: &CutTask<'a>, stepper: &DeviceStepper) -> Self {
        let (task, shards) = (cut.task, &cut.plan.shards);
        let compute = shards.iter().map(|shard| shard.most_bytes().saturating_sub(shard.param_bytes)).max();
        Self {
            name: &task.name,
            obstacle: obstacle(task, stepper),
            buffers: task.chain.buffers().len(),
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

    /// The reason why nothing can be resident, if there is one.
    fn several_devices(&self) -> Option<String> {
        let devices = self.devices;
        (devices > 1)
            .then(|| format!("the run has {devices} devices, and resident masters are on one device only"))
    }

    /// The reason why not all tasks can be device-resident, if there is one.
    fn shortage(&self, tasks: &[DevicePeaks<'_>]) -> Option<String> {
        let needed = self.needed(tasks);
        (needed > self.budget).then(|| {
            let (needed, budget) = (ByteSize(needed).at_least(), ByteSize(self.budget));
            format!("with moments, everything would take {needed} of {budget} on {}", self.name)
        })
    }

    /// The placements with the resident buffers that fit, `why` not all do, and the result of the bit-exactness check.
    fn partial(
        &self,
        tasks: &[DevicePeaks<'_>],
        why: &str,
        exact: Result<bool, EngineError>,
    ) -> Vec<Placement> {
        let placed = |(task, resident): (&DevicePeaks<'_>, &BTreeSet<usize>)| {
            let (some, all) = (resident.len(), task.buffers);
            match (&exact, &task.obstacle) {
                _ if task.untrained => Placement::host("nothing is trained"),
                (Ok(true), _) if some > 0 => Placement {
                    on: Place::Partial,
                    exact: true,
                    why: format!("{why}; {some} of the {all} parameter buffers are resident there"),
                    resident: resident.clone(),
                },
                (_, Some(obstacle)) => Placement::host(obstacle.clone()),
                (Ok(true), None) => Placement::host(why),
                (exact, _) => Placement::host(self.inexact(exact)),
            }
        };
        tasks.iter().zip(self.partial).map(placed).collect()
    }

    /// The reason why a task is stepped on the host whose step on the device is not bit-exact, or failed.
    fn inexact(&self, exact: &Result<bool, EngineError>) -> String {
        let name = self.name;
        match exact {
            Ok(_) => format!("a step on {name} would not be bit-exact with the host's"),
            Err(error) => format!("a trial step on {name} failed: {}", with_causes(error)),
        }
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
            (Ok(false), false) | (Err(_), _) => self.inexact(&exact),
        };
        match exact {
            Err(error) if is_required => Err(error),
            Ok(exact) if exact || is_required => {
                Ok(Placement { on: Place::Device, exact, ..Placement::host(why) })
            }
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
    if asked == OptimizerPlacement::Auto && !headroom.gpu {
        return all_on_host("resident masters save nothing on a CPU device");
    }
    let Some(first) = tasks.iter().find(|task| !task.untrained) else {
        return all_on_host("nothing is trained");
    };
    let shortage = headroom.shortage(tasks);
    if let Some(problem) = headroom.several_devices().or(shortage.clone().filter(|_| is_required)) {
        return if is_required { Err(refusal(first, problem)) } else { all_on_host(&problem) };
    }
    let requested = || (asked == OptimizerPlacement::Partial).then(|| "requested".to_owned());
    if let Some(why) = requested().or(shortage) {
        return match headroom.partial.iter().all(BTreeSet::is_empty) {
            true => all_on_host(&why),
            false => Ok(headroom.partial(tasks, &why, exact())),
        };
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

    const HEADROOM: DeviceHeadroom<'static> = DeviceHeadroom {
        name: "cuda:0",
        devices: 1,
        gpu: true,
        budget: 1000,
        reserve: 100,
        margin: 50,
        partial: &[],
    };

    fn task(name: &str, device_resident: u64) -> DevicePeaks<'_> {
        let peaks =
            DevicePeaks { name, obstacle: None, buffers: 3, untrained: false, ..DevicePeaks::default() };
        DevicePeaks { device_resident, compute: 200, params: 100, ..peaks }
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
    fn a_part_is_resident_where_not_everything_fits() {
        let resident = [BTreeSet::from([0, 2]), BTreeSet::new()];
        let partial = || DeviceHeadroom { partial: &resident, ..HEADROOM };
        let two = [task("a", 300), task("b", 451)];
        let why = "with moments, everything would take 1001 B of 1000 B on cuda:0";
        let expected =
            format!("Partial: {why}; 2 of the 3 parameter buffers are resident there\nHost: {why}");
        assert_eq!(placed(OptimizerPlacement::Auto, &two, &partial(), true), expected);
        let inexact = placed(OptimizerPlacement::Auto, &two, &partial(), false);
        let not_exact = "Host: a step on cuda:0 would not be bit-exact with the host's";
        assert_eq!(inexact, [not_exact, not_exact].join("\n"));
        assert!(placed(OptimizerPlacement::Device, &two, &partial(), true).contains(why));
        let asked = placed(OptimizerPlacement::Partial, &[task("a", 1), task("b", 1)], &partial(), true);
        assert_eq!(
            asked,
            "Partial: requested; 2 of the 3 parameter buffers are resident there\nHost: requested"
        );
        let cpu = DeviceHeadroom { gpu: false, ..partial() };
        assert!(
            placed(OptimizerPlacement::Auto, &two, &cpu, true).starts_with("Host: resident masters save")
        );
        let several = DeviceHeadroom { devices: 2, ..partial() };
        assert!(placed(OptimizerPlacement::Auto, &two, &several, true).starts_with("Host: the run has 2"));
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
