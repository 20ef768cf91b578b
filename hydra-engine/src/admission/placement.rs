//! Where each task's optimizer steps: on the host, where spilled masters are, or on the device, if all stays there.
//!
//! What stays on a device costs no copies: neither its parameters nor its gradients travel. That pays whenever it
//! is possible, so the choice is one of room and of bits: a step on the device is chosen where everything fits at
//! once and where it is the host's to the bit, and otherwise only on request.

use crate::device::{DeviceKind, LogicalDevice};
use crate::error::{EngineError, guarded, with_causes};
use crate::optimizer::{self, DeviceStepper, OptimizerCheck, Tried};
use crate::train_task::TrainTask;
use hydra_core::{ByteSize, Chain, FloatType, ImageLayout, OptimizerSpec, TrainSpec};
use hydra_partition::PartitionPlan;
use serde::{Deserialize, Serialize};

/// Where optimizers are to step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerPlacement {
    /// On the device where that is possible and gives the host's bits, else on the host.
    #[default]
    Auto,
    /// On the host.
    Host,
    /// On the device, also where its bits are not the host's; a run in which that is impossible is refused.
    Device,
}

/// Where an optimizer steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// On the host, over the masters there.
    #[default]
    Host,
    /// On the device, on which the masters live for as long as the task runs.
    Device,
}

/// Where a task's optimizer steps, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Where.
    pub on: Place,
    /// Whether its steps are the host's to the bit.
    pub exact: bool,
    /// Why there.
    pub why: String,
}

impl Default for Placement {
    fn default() -> Self {
        Self::host("")
    }
}

impl Placement {
    fn host(why: impl Into<String>) -> Self {
        Self { on: Place::Host, exact: true, why: why.into() }
    }

    /// Whether the task lives on the device.
    pub(crate) fn on_device(&self) -> bool {
        self.on == Place::Device
    }
}

/// What a task would take of the device that it lives on.
struct Lodger<'a> {
    name: &'a str,
    /// Why the host has to step it.
    obstacle: Option<&'static str>,
    /// Whether there is nothing to step.
    untrained: bool,
    /// Bytes for the whole run: masters, moments, and gradients that wait for others.
    standing: u64,
    /// Bytes of its largest shard task, without parameters if it lives there.
    compute: u64,
    params: u64,
}

/// The device, as far as the choice depends on it.
struct House<'a> {
    name: &'a str,
    devices: usize,
    gpu: bool,
    budget: u64,
    /// The double buffer, which promotions of spilled tasks need.
    reserve: u64,
    margin: u64,
}

/// Chooses for every task of a run, given with its plan.
pub(crate) fn place<'a>(
    asked: OptimizerPlacement,
    tasks: impl Iterator<Item = (&'a TrainTask, &'a PartitionPlan)> + Clone,
    devices: &[LogicalDevice],
) -> Result<Vec<Placement>, EngineError> {
    let device = devices.first().ok_or(EngineError::NoDevice)?;
    let rules = tasks.clone().map(|(_, plan)| plan.rules);
    let house = House {
        name: &device.spec.name,
        devices: devices.len(),
        gpu: device.spec.kind != DeviceKind::Cpu,
        budget: device.spec.memory.bytes(),
        reserve: rules.clone().map(|rules| rules.reserve).max().unwrap_or(0),
        margin: rules.map(|rules| rules.margin).max().unwrap_or(0),
    };
    let stepper = device.stepper();
    let may_stay =
        |(task, _): &(&TrainTask, &PartitionPlan)| obstacle(task, &stepper).is_none() && !task.evaluate_only;
    let stepped: Vec<(OptimizerSpec, FloatType)> = tasks
        .clone()
        .filter(may_stay)
        .map(|(task, _)| (task.spec.optimizer.clone(), task.chain.float_type()))
        .collect();
    let lodgers: Vec<Lodger<'_>> = tasks.map(|(task, plan)| lodger(task, plan, &stepper)).collect();
    let exact = || {
        let tried = Tried::Tasks(&stepped);
        let check = || optimizer::compare(device.manager.shared_link(), &device.burn, tried);
        let check = || Ok(device.pool.install(check)?);
        // A CPU device is stepped by the host's code.
        let exact = |check: Option<OptimizerCheck>| check.is_none_or(|check| check.is_exact());
        guarded("the optimizer's step on the device", check).map(exact)
    };
    choose(asked, &lodgers, &house, exact)
}

fn lodger<'a>(task: &'a TrainTask, plan: &PartitionPlan, stepper: &DeviceStepper) -> Lodger<'a> {
    let largest = plan.shards.iter().max_by_key(|shard| need_beside_params(shard));
    Lodger {
        name: &task.name,
        obstacle: obstacle(task, stepper),
        untrained: task.evaluate_only,
        standing: standing(&task.chain, &task.spec),
        compute: largest.map_or(0, need_beside_params),
        params: plan.shards.iter().map(|shard| shard.param_bytes).max().unwrap_or(0),
    }
}

/// The bytes of masters, with what they are rounded to, moments, and gradients that wait.
fn standing(chain: &Chain, spec: &TrainSpec) -> u64 {
    let of = |image: &ImageLayout| {
        let moments = spec.optimizer.moments() as u64 * image.moment_bytes();
        image.master_bytes() + if image.trained { moments } else { 0 }
    };
    chain.images().iter().map(of).sum::<u64>() + waiting(chain, spec)
}

/// The bytes of gradients that wait, for which a task that lives on a device has room there as long as it runs.
/// Beside them one parameter is there once more, while a sum is made of it or its best values are put back.
pub(crate) fn waiting(chain: &Chain, spec: &TrainSpec) -> u64 {
    let accumulates = spec.accumulate > 1;
    let trained = || chain.images().iter().filter(|image| image.trained);
    let again = |image: &&ImageLayout| accumulates || spec.eval_every.is_some() || image.layers.len() > 1;
    let params = trained().filter(again).flat_map(|image| &image.params);
    let largest = params.map(|param| (param.len * size_of::<f32>()) as u64).max().unwrap_or(0);
    trained().map(|image| waiting_of(image, accumulates)).sum::<u64>() + largest
}

/// The bytes of gradients of an image that wait: the uses of a tied parameter for each other, microbatches for
/// their sum. What is added up is `f32`, in memory of its own where the gradients are narrower.
fn waiting_of(image: &ImageLayout, accumulates: bool) -> u64 {
    let uses = image.layers.len() as u64;
    let sum = if image.float == FloatType::F32 { 0 } else { image.moment_bytes() };
    let tied = if uses > 1 { uses * image.bytes() + sum } else { 0 };
    tied + if accumulates { image.moment_bytes() } else { 0 }
}

/// Why the host has to step a task.
fn obstacle(task: &TrainTask, stepper: &DeviceStepper) -> Option<&'static str> {
    let clipped = task.spec.clip.map(|_| "its gradients are clipped by the norm of all of them");
    let steps = stepper.steps(&*task.spec.optimizer);
    clipped.or_else(|| (!steps).then_some("the device has no kernel for its optimizer"))
}

/// The bytes of a shard's largest shard task without its parameters.
fn need_beside_params(shard: &hydra_partition::ShardPlan) -> u64 {
    shard.need_bytes.max(shard.verified_bytes.unwrap_or(0)).saturating_sub(shard.param_bytes)
}

impl Lodger<'_> {
    fn may_stay(&self) -> bool {
        !self.untrained && self.obstacle.is_none()
    }

    /// Where it goes if those that may stay go `there`.
    fn placed(&self, there: &Placement) -> Placement {
        match (self.untrained, self.obstacle) {
            (true, _) => Placement::host("nothing is trained"),
            (_, Some(obstacle)) => Placement::host(obstacle),
            _ => there.clone(),
        }
    }
}

impl House<'_> {
    /// The bytes with which all tasks that may stay on the device do, and the others are spilled.
    fn needed(&self, lodgers: &[Lodger<'_>]) -> u64 {
        let staying = lodgers.iter().filter(|lodger| lodger.may_stay());
        let standing: u64 = staying.map(|lodger| lodger.standing).sum();
        let compute = lodgers.iter().map(|lodger| match lodger.may_stay() {
            true => lodger.compute,
            false => lodger.compute + lodger.params + self.reserve,
        });
        standing.saturating_add(compute.max().unwrap_or(0)).saturating_add(self.margin)
    }
}

fn choose(
    asked: OptimizerPlacement,
    lodgers: &[Lodger<'_>],
    house: &House<'_>,
    exact: impl FnOnce() -> Result<bool, EngineError>,
) -> Result<Vec<Placement>, EngineError> {
    let all_on_host = |why: &str| Ok(lodgers.iter().map(|_| Placement::host(why)).collect());
    let insists = asked == OptimizerPlacement::Device;
    if asked == OptimizerPlacement::Host {
        return all_on_host("asked for");
    }
    if !insists && !house.gpu {
        return all_on_host("the masters are at hand for a CPU");
    }
    let Some(first) = lodgers.iter().find(|lodger| !lodger.untrained) else {
        return all_on_host("nothing is trained");
    };
    let refused =
        |task: &str, problem: String| Err(EngineError::OptimizerPlacement { task: task.to_owned(), problem });
    match impossible(lodgers, house) {
        Some(problem) if insists => return refused(first.name, problem),
        Some(problem) => return all_on_host(&problem),
        None => {}
    }
    if let Some((lodger, obstacle)) = lodgers.iter().find_map(|l| Some((l, l.obstacle?)))
        && insists
    {
        return refused(lodger.name, obstacle.to_owned());
    }
    let there = match lodgers.iter().any(Lodger::may_stay) {
        true => there(insists, house, exact())?,
        // It is nobody's.
        false => Placement::default(),
    };
    Ok(lodgers.iter().map(|lodger| lodger.placed(&there)).collect())
}

/// Where the tasks go that may stay on the device, when it is known whether its steps are `exact`.
fn there(
    insists: bool,
    house: &House<'_>,
    exact: Result<bool, EngineError>,
) -> Result<Placement, EngineError> {
    let stays = |exact, why: String| Ok(Placement { on: Place::Device, exact, why });
    match (exact, insists) {
        (Ok(true), true) => stays(true, "asked for; a step there is the host's to the bit".to_owned()),
        (Ok(false), true) => {
            stays(false, "asked for, although a step there is not the host's to the bit".to_owned())
        }
        (Err(error), true) => Err(error),
        (Ok(true), false) => {
            stays(true, format!("everything fits {}, and a step there is the host's to the bit", house.name))
        }
        (Ok(false), false) => {
            Ok(Placement::host(format!("a step on {} would not be the host's to the bit", house.name)))
        }
        (Err(error), false) => Ok(Placement::host(format!(
            "a step on {} failed when it was tried: {}",
            house.name,
            with_causes(&error)
        ))),
    }
}

/// Why no task can live on the device.
fn impossible(lodgers: &[Lodger<'_>], house: &House<'_>) -> Option<String> {
    if house.devices > 1 {
        return Some(format!("the run has {} devices, and what stays on one is on no other", house.devices));
    }
    let needed = house.needed(lodgers);
    (needed > house.budget).then(|| {
        let (needed, budget) = (ByteSize(needed).at_least(), ByteSize(house.budget));
        format!("to stay on {} with its moments everything would take {needed} of {budget}", house.name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUSE: House<'static> =
        House { name: "cuda:0", devices: 1, gpu: true, budget: 1000, reserve: 100, margin: 50 };

    fn lodger(name: &str, standing: u64) -> Lodger<'_> {
        Lodger { name, obstacle: None, untrained: false, standing, compute: 200, params: 100 }
    }

    fn placed(asked: OptimizerPlacement, lodgers: &[Lodger<'_>], house: &House<'_>, exact: bool) -> String {
        let placements = choose(asked, lodgers, house, || Ok(exact));
        let shown =
            |p: Placement| format!("{:?}{}: {}", p.on, if p.exact { "" } else { " (inexact)" }, p.why);
        match placements {
            Ok(placements) => placements.into_iter().map(shown).collect::<Vec<_>>().join("\n"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn auto_takes_the_device_where_all_fits_and_the_bits_are_the_hosts() {
        let auto =
            |lodgers: &[Lodger<'_>], house, exact| placed(OptimizerPlacement::Auto, lodgers, house, exact);
        let two = [lodger("a", 300), lodger("b", 450)];
        let fits = "Device: everything fits cuda:0, and a step there is the host's to the bit";
        assert_eq!(auto(&two, &HOUSE, true), [fits, fits].join("\n"));
        assert!(auto(&two, &HOUSE, false).starts_with("Host: a step on cuda:0 would not be the host's"));
        let too_large = auto(&[lodger("a", 300), lodger("b", 451)], &HOUSE, true);
        let says = "Host: to stay on cuda:0 with its moments everything would take 1001 B of 1000 B";
        assert_eq!(too_large, [says, says].join("\n"));
        let several = House { devices: 2, ..HOUSE };
        assert!(auto(&two, &several, true).starts_with("Host: the run has 2 devices"));
        let failed = || Err(EngineError::NoDevice);
        let tried = choose(OptimizerPlacement::Auto, &two, &HOUSE, failed).unwrap().remove(0);
        assert_eq!((tried.on, tried.exact), (Place::Host, true));
        assert!(tried.why.starts_with("a step on cuda:0 failed when it was tried: "), "{}", tried.why);
        assert!(choose(OptimizerPlacement::Device, &two, &HOUSE, failed).is_err());
        let cpu = House { gpu: false, ..HOUSE };
        assert!(auto(&two, &cpu, true).starts_with("Host: the masters are at hand"));
    }

    #[test]
    fn a_clipped_task_is_stepped_on_the_host_beside_others_that_are_not() {
        let clipped = || Lodger { obstacle: Some("clipped"), ..lodger("b", 10_000) };
        let untrained = || Lodger { untrained: true, ..lodger("c", 10_000) };
        let says =
            placed(OptimizerPlacement::Auto, &[lodger("a", 550), clipped(), untrained()], &HOUSE, true);
        let lines: Vec<&str> = says.lines().collect();
        assert!(
            lines[0].starts_with("Device: ") && lines[1..] == ["Host: clipped", "Host: nothing is trained"]
        );
        let full = placed(OptimizerPlacement::Auto, &[lodger("a", 551), clipped()], &HOUSE, true);
        assert!(full.starts_with("Host: to stay"), "a spilled task needs its double buffer: {full}");
        let only = placed(OptimizerPlacement::Auto, &[clipped()], &HOUSE, true);
        assert_eq!(only, "Host: clipped");
        assert_eq!(
            placed(OptimizerPlacement::Auto, &[untrained()], &HOUSE, true),
            "Host: nothing is trained"
        );
    }

    #[test]
    fn what_waits_is_counted_with_the_sums_that_it_is_added_up_in() {
        let image = |float, layers| ImageLayout {
            name: "image".to_owned(),
            params: Vec::new(),
            elements: 100,
            layers,
            trained: true,
            float,
        };
        let of = |float| {
            let (one, tied) = (image(float, vec![0]), image(float, vec![0, 3]));
            [(&one, false), (&one, true), (&tied, false), (&tied, true)]
                .map(|(image, sums)| waiting_of(image, sums))
        };
        assert_eq!(of(FloatType::F32), [0, 400, 800, 1200]);
        assert_eq!(of(FloatType::Bf16), [0, 400, 800, 1200]);
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
            let elements: u64 = chain.images().iter().map(|image| image.elements as u64).sum();
            let found = [spec(&adamw, 1), spec(&sgd, 1), spec(&adamw, 2)].map(|spec| standing(&chain, &spec));
            let [adamw, sgd, accumulated] = each.map(|bytes| bytes * elements);
            // A sum of the largest parameter is made beside what it is the sum of.
            assert_eq!(found, [adamw, sgd, accumulated + 16 * 16 * 4], "{float}");
        }
    }

    #[test]
    fn a_request_is_kept_or_refused() {
        let device =
            |lodgers: &[Lodger<'_>], house, exact| placed(OptimizerPlacement::Device, lodgers, house, exact);
        let a = || lodger("a", 300);
        assert!(device(&[a()], &HOUSE, true).starts_with("Device: asked for; "));
        assert!(device(&[a()], &HOUSE, false).starts_with("Device (inexact): asked for, although"));
        let refused = "the optimizer of task `a` cannot step on the device: ";
        let several = House { devices: 2, ..HOUSE };
        assert!(device(&[a()], &several, true).starts_with(&format!("{refused}the run has 2 devices")));
        assert!(
            device(&[lodger("a", 5000)], &HOUSE, true).starts_with(&format!("{refused}to stay on cuda:0"))
        );
        let clipped = Lodger { obstacle: Some("clipped"), ..lodger("b", 1) };
        let says = device(&[a(), clipped], &HOUSE, true);
        assert!(says.starts_with("the optimizer of task `b` cannot step on the device: clipped"), "{says}");
        assert_eq!(placed(OptimizerPlacement::Host, &[a()], &HOUSE, true), "Host: asked for");
    }
}
