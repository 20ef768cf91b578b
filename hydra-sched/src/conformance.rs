//! What holds for every policy, tested on views and on whole schedules.
//!
//! The schedules come from a small list scheduler in virtual time: whenever a device is free, it
//! asks the policy. Shard tasks take other times than estimated, and the measured ones correct the
//! estimates, as in a real run. After each training sweep a model waits for its optimizer, and a device
//! may be held back for it.

use std::collections::VecDeque;
use std::ops::Range;

use proptest::prelude::*;

use crate::sweep::tests::tasks_from;
use crate::{Asking, CostModel, ModelIndex, ModelView, Policy, PolicyKind, ShardTaskKind, View, WorkLeft};

/// Models of the given remaining seconds and submission counts, in this order.
pub(crate) fn models(of: &[(f64, u64)]) -> Vec<ModelView> {
    let model = |(index, &(remaining_s, submitted))| ModelView {
        model: ModelIndex(index),
        remaining_s,
        submitted,
        next_shard: 0,
        resident: false,
        continues: false,
    };
    of.iter().enumerate().map(model).collect()
}

/// The view of the only device at its first decision.
pub(crate) fn view_of(claimable: &[ModelView]) -> View<'_> {
    View { asking: Asking::new(0, 1, 0), claimable }
}

/// Models with any remaining times, not-a-number and many equal ones among them.
pub(crate) fn any_models(count: Range<usize>) -> impl Strategy<Value = Vec<ModelView>> {
    let seconds = prop_oneof![4 => (0..5u8).prop_map(f64::from), 1 => any::<f64>()];
    prop::collection::vec((seconds, 0..6u64, any::<bool>(), any::<bool>()), count).prop_map(|of| {
        let times: Vec<_> = of.iter().map(|&(seconds, submitted, ..)| (seconds, submitted)).collect();
        let mut models = models(&times);
        for (model, (.., resident, continues)) in models.iter_mut().zip(of) {
            (model.resident, model.continues) = (resident, continues);
        }
        models
    })
}

/// One model's work: what is estimated, what is true, and its sweeps in order.
#[derive(Clone, Debug)]
struct Workload {
    estimate: CostModel,
    truth: CostModel,
    /// The first shard task of each sweep.
    sweeps: VecDeque<(ShardTaskKind, usize)>,
    /// Seconds of the optimizer after each training sweep.
    step_s: f64,
}

impl Workload {
    /// A model whose estimates are right, with training sweeps only.
    fn exact(forward_s: &[f64], backward_s: &[f64], sweeps: usize) -> Self {
        let cost = CostModel::new(forward_s.to_vec(), backward_s.to_vec(), forward_s.to_vec());
        let cost = cost.unwrap();
        let start = ShardTaskKind::training_start(cost.shards());
        Self { estimate: cost.clone(), truth: cost, sweeps: vec![start; sweeps].into(), step_s: 0.0 }
    }

    /// All shard tasks, in the order in which they have to run.
    fn tasks(&self) -> Vec<(ShardTaskKind, usize)> {
        self.sweeps.iter().flat_map(|&start| tasks_from(start, self.truth.shards())).collect()
    }

    /// True seconds of all shard tasks.
    fn total_s(&self) -> f64 {
        self.tasks().iter().map(|&(kind, shard)| self.truth.of(kind, shard)).sum()
    }
}

/// A shard task as it was scheduled.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Slot {
    device: usize,
    model: usize,
    task: (ShardTaskKind, usize),
    start_s: f64,
    end_s: f64,
}

/// A model in the middle of a simulated run.
struct Progress {
    work: Workload,
    /// The next shard task of the sweep that has begun.
    position: Option<(ShardTaskKind, usize)>,
    running: bool,
    /// When its masters are final.
    final_s: f64,
}

impl Progress {
    fn next_task(&self) -> Option<(ShardTaskKind, usize)> {
        self.position.or_else(|| self.work.sweeps.front().copied())
    }

    fn remaining_s(&self) -> f64 {
        let evaluations = self.work.sweeps.iter().filter(|s| s.0 == ShardTaskKind::Evaluate).count();
        let left = WorkLeft {
            sweeps: (self.work.sweeps.len() - evaluations) as u64,
            evaluations: evaluations as u64,
            position: self.position,
        };
        self.work.estimate.remaining_s(&left)
    }

    /// Takes the next shard task and gives it with its true seconds.
    fn begin(&mut self) -> ((ShardTaskKind, usize), f64) {
        let (kind, shard) = self.next_task().expect("only models with work are claimable");
        if self.position.is_none() {
            self.work.sweeps.pop_front();
        }
        self.position = kind.following(shard, self.work.truth.shards());
        self.running = true;
        ((kind, shard), self.work.truth.of(kind, shard))
    }
}

/// A simulated run: virtual time moves from one end of a shard task to the next.
struct Simulation<'a> {
    policy: &'a mut dyn Policy,
    models: Vec<Progress>,
    /// What each device computes.
    devices: Vec<Option<Slot>>,
    /// The model and shard that each device computes or computed last.
    resident: Vec<Option<(usize, usize)>>,
    now_s: f64,
    decision: u64,
    slots: Vec<Slot>,
}

/// The schedule that `policy` makes of `workloads` on `devices` devices, in order of starts.
fn schedule(policy: &mut dyn Policy, workloads: &[Workload], devices: usize) -> Vec<Slot> {
    let model =
        |work: &Workload| Progress { work: work.clone(), position: None, running: false, final_s: 0.0 };
    let mut simulation = Simulation {
        policy,
        models: workloads.iter().map(model).collect(),
        devices: vec![None; devices],
        resident: vec![None; devices],
        now_s: 0.0,
        decision: 0,
        slots: Vec::new(),
    };
    simulation.run();
    simulation.slots
}

impl Simulation<'_> {
    fn run(&mut self) {
        loop {
            for device in 0..self.devices.len() {
                if self.devices[device].is_none() {
                    self.ask(device);
                }
            }
            let ends = self.devices.iter().flatten().map(|slot| slot.end_s);
            let steps = self.models.iter().map(|model| model.final_s).filter(|s| *s > self.now_s);
            match ends.chain(steps).min_by(f64::total_cmp) {
                Some(next_s) => self.advance(next_s),
                None => return,
            }
        }
    }

    fn ask(&mut self, device: usize) {
        let claimable = self.claimable(device);
        let asking = self.asking(device);
        let chosen = self.policy.choose(&View { asking, claimable: &claimable });
        self.decision += 1;
        if claimable.is_empty() {
            assert_eq!(chosen, None, "there was nothing to choose");
        } else if asking.awaited.is_none() {
            assert!(chosen.is_some(), "a device was held back for nothing");
        }
        if let Some(ModelIndex(model)) = chosen {
            assert!(claimable.iter().any(|m| m.model.0 == model), "model {model} is not claimable");
            self.start(device, model);
        }
    }

    fn claimable(&self, device: usize) -> Vec<ModelView> {
        let there = |model: &&usize| self.models[**model].final_s <= self.now_s;
        let models: Vec<usize> = (0..self.models.len()).collect();
        models.iter().filter(there).filter_map(|model| self.view(device, *model)).collect()
    }

    fn view(&self, device: usize, index: usize) -> Option<ModelView> {
        let model = &self.models[index];
        let (_, next_shard) = model.next_task().filter(|_| !model.running)?;
        Some(ModelView {
            model: ModelIndex(index),
            remaining_s: model.remaining_s(),
            submitted: index as u64,
            next_shard,
            resident: self.resident[device] == Some((index, next_shard)),
            continues: false,
        })
    }

    /// With the model that the device computed last, if that waits for its optimizer.
    fn asking(&self, device: usize) -> Asking {
        let last = self.resident[device].map(|(model, _)| model);
        let waits = last.filter(|model| self.models[*model].final_s > self.now_s);
        let awaited = waits.and_then(|model| self.view(device, model));
        let left_s: f64 = self.models.iter().map(Progress::remaining_s).sum();
        Asking {
            awaited,
            awaited_s: awaited.map_or(0.0, |model| model.remaining_s),
            even_s: left_s / self.devices.len() as f64,
            ..Asking::new(device, self.devices.len(), self.decision)
        }
    }

    fn start(&mut self, device: usize, model: usize) {
        let (task, seconds) = self.models[model].begin();
        let end_s = self.now_s + seconds;
        let slot = Slot { device, model, task, start_s: self.now_s, end_s };
        self.devices[device] = Some(slot);
        self.resident[device] = Some((model, task.1));
        self.slots.push(slot);
    }

    /// Moves to `now_s` and ends what ends there.
    fn advance(&mut self, now_s: f64) {
        self.now_s = now_s;
        for device in &mut self.devices {
            if let Some(slot) = device.take_if(|slot| slot.end_s <= now_s) {
                let model = &mut self.models[slot.model];
                model.running = false;
                if slot.task.0 == ShardTaskKind::Backward && model.position.is_none() {
                    model.final_s = now_s + model.work.step_s;
                }
                model.work.estimate.observe(slot.task.0, slot.task.1, slot.end_s - slot.start_s);
            }
        }
    }
}

fn makespan_s(slots: &[Slot]) -> f64 {
    slots.iter().map(|slot| slot.end_s).fold(0.0, f64::max)
}

/// Eighths of seconds, so that the sums in these tests are exact.
fn any_cost(shards: usize) -> impl Strategy<Value = CostModel> {
    let times = || prop::collection::vec((0..40u8).prop_map(|eighths| f64::from(eighths) / 8.0), shards);
    (times(), times(), times()).prop_map(|(f, b, e)| CostModel::new(f, b, e).unwrap())
}

fn any_workload() -> impl Strategy<Value = Workload> {
    (1..5usize).prop_flat_map(|shards| {
        let start = prop_oneof![
            3 => Just(ShardTaskKind::training_start(shards)),
            1 => Just(ShardTaskKind::evaluation_start()),
        ];
        let sweeps = prop::collection::vec(start, 0..6).prop_map(VecDeque::from);
        (any_cost(shards), any_cost(shards), sweeps, 0..5u8).prop_map(|(estimate, truth, sweeps, step)| {
            Workload { estimate, truth, sweeps, step_s: f64::from(step) / 2.0 }
        })
    })
}

fn any_workloads() -> impl Strategy<Value = Vec<Workload>> {
    prop::collection::vec(any_workload(), 0..8)
}

/// A long model and two short ones on two devices: the patient policy waits for the long one's optimizer
/// where others would let it wait for a shard task, and what it left is done all the same.
#[test]
fn the_patient_one_waits_and_nothing_starves() {
    let long = Workload { step_s: 1.0, ..Workload::exact(&[1.0], &[2.0], 10) };
    let short = Workload::exact(&[1.0], &[5.0], 1);
    let workloads = [long, short.clone(), short];
    let end_of_long = |kind: PolicyKind| {
        let slots = schedule(&mut *kind.build(0), &workloads, 2);
        assert_eq!(slots.len(), 12, "{kind}");
        makespan_s(&slots.into_iter().filter(|slot| slot.model == 0).collect::<Vec<_>>())
    };
    assert_eq!(end_of_long(PolicyKind::ShardedLrtfPatient), 10.0 * 2.0 + 9.0 * 1.0);
    assert!(end_of_long(PolicyKind::ShardedLrtf) > 10.0 * 2.0 + 9.0 * 1.0);
}

/// Two short models and a long one on two devices: who starts the long one last, waits for it.
#[test]
fn lrtf_levels_what_the_others_leave_to_the_end() {
    let short = Workload::exact(&[1.0], &[2.0], 1);
    let long = Workload::exact(&[1.0], &[2.0], 2);
    let workloads = [short.clone(), short, long];
    let makespan = |kind: PolicyKind| makespan_s(&schedule(&mut *kind.build(0), &workloads, 2));
    assert_eq!(makespan(PolicyKind::ShardedLrtf), 4.0);
    assert_eq!(makespan(PolicyKind::Fifo), 6.0);
    assert_eq!(makespan(PolicyKind::Srtf), 6.0);
}

/// The whole schedule of two models on one device, by hand.
#[test]
fn lrtf_alternates_between_models_of_equal_length() {
    use ShardTaskKind::{Backward, Forward};
    let model = Workload::exact(&[1.0, 9.0], &[2.0, 3.0], 1);
    let slots = schedule(&mut crate::ShardedLrtf, &[model.clone(), model], 1);
    let order: Vec<_> = slots.iter().map(|slot| (slot.model, slot.task)).collect();
    // Remaining before each choice: 6 6, 5 6, 5 5, 2 5, 2 2, - 2.
    let expected = [
        (0, (Forward, 0)),
        (1, (Forward, 0)),
        (0, (Backward, 1)),
        (1, (Backward, 1)),
        (0, (Backward, 0)),
        (1, (Backward, 0)),
    ];
    assert_eq!(order, expected);
    assert_eq!(makespan_s(&slots), 12.0);
}

#[test]
fn models_of_one_shard_run_on_every_device_at_once() {
    let workloads = vec![Workload::exact(&[1.0], &[2.0], 3); 4];
    for kind in PolicyKind::ALL {
        let slots = schedule(&mut *kind.build(1), &workloads, 4);
        assert_eq!((slots.len(), makespan_s(&slots)), (12, 6.0), "{kind}");
    }
}

#[test]
fn random_makes_different_schedules_of_different_seeds() {
    let workloads = vec![Workload::exact(&[1.0, 1.0], &[2.0, 2.0], 3); 5];
    let of = |seed| schedule(&mut *PolicyKind::Random.build(seed), &workloads, 2);
    assert_ne!(of(1), of(2));
}

proptest! {
    /// The answer is one of the claimable models, and there is one when there is a model, unless the
    /// device waits for another.
    #[test]
    fn chooses_among_the_claimable(
        claimable in any_models(0..12),
        seed: u64,
        decision: u64,
        device in 0..4usize,
        awaited in prop::option::of(any_models(1..2)),
        soon in prop::option::of(any_models(1..2)),
    ) {
        let [awaited, soon] = [awaited, soon].map(|models| models.map(|models| models[0]));
        let awaited_s = awaited.map_or(0.0, |model| model.remaining_s);
        let asking = Asking { awaited, awaited_s, soon, even_s: 2.0, ..Asking::new(device, 4, decision) };
        let view = View { asking, claimable: &claimable };
        for kind in PolicyKind::ALL {
            match kind.build(seed).choose(&view) {
                Some(chosen) => prop_assert!(claimable.iter().any(|m| m.model == chosen)),
                None => prop_assert!(claimable.is_empty() || awaited.is_some() || soon.is_some()),
            }
        }
    }

    /// Neither the order of the models in the view nor earlier answers change the choice, but for
    /// round robin, whose earlier answers do.
    #[test]
    fn is_a_function_of_the_view(
        (claimable, shuffled) in any_models(1..12)
            .prop_flat_map(|models| (Just(models.clone()), Just(models).prop_shuffle())),
        seed: u64,
        decision: u64,
    ) {
        let view = View { asking: Asking::new(1, 2, decision), claimable: &claimable };
        for kind in PolicyKind::ALL {
            let mut policy = kind.build(seed);
            let chosen = policy.choose(&view);
            if kind == PolicyKind::RoundRobin {
                policy = kind.build(seed);
            } else {
                policy.choose(&View { asking: Asking::new(1, 2, decision.wrapping_add(1)), ..view });
            }
            prop_assert_eq!(policy.choose(&View { claimable: &shuffled, ..view }), chosen);
        }
    }

    /// The same seed gives the same schedule.
    #[test]
    fn a_schedule_can_be_repeated(workloads in any_workloads(), devices in 1..5usize, seed: u64) {
        for kind in PolicyKind::ALL {
            let once = schedule(&mut *kind.build(seed), &workloads, devices);
            let again = schedule(&mut *kind.build(seed), &workloads, devices);
            prop_assert_eq!(once, again);
        }
    }

    /// All work finishes, each model's shard tasks in their order and one at a time.
    #[test]
    fn every_model_runs_its_shard_tasks_in_order(
        workloads in any_workloads(),
        devices in 1..5usize,
        seed: u64,
    ) {
        for kind in PolicyKind::ALL {
            let slots = schedule(&mut *kind.build(seed), &workloads, devices);
            for (model, work) in workloads.iter().enumerate() {
                let own: Vec<_> = slots.iter().filter(|slot| slot.model == model).collect();
                let order: Vec<_> = own.iter().map(|slot| slot.task).collect();
                prop_assert_eq!(order, work.tasks());
                prop_assert!(own.windows(2).all(|pair| pair[0].end_s <= pair[1].start_s));
            }
        }
    }

    /// A device computes one shard task at a time.
    #[test]
    fn no_device_computes_two_at_once(
        workloads in any_workloads(),
        devices in 1..5usize,
        seed: u64,
    ) {
        for kind in PolicyKind::ALL {
            let slots = schedule(&mut *kind.build(seed), &workloads, devices);
            prop_assert!(slots.iter().all(|slot| slot.device < devices));
            for device in 0..devices {
                let own: Vec<_> = slots.iter().filter(|slot| slot.device == device).collect();
                prop_assert!(own.windows(2).all(|pair| pair[0].end_s <= pair[1].start_s));
            }
        }
    }

    /// No schedule is shorter than its longest chain or than all work spread evenly, and one in which no
    /// optimizer holds a model or a device back is within Graham's bound of them (R. L. Graham, "Bounds on
    /// Multiprocessing Timing Anomalies", 1969).
    #[test]
    fn the_makespan_keeps_its_bounds(
        mut workloads in any_workloads(),
        devices in 1..5usize,
        seed: u64,
    ) {
        workloads.iter_mut().for_each(|work| work.step_s = 0.0);
        let total: f64 = workloads.iter().map(Workload::total_s).sum();
        let longest = workloads.iter().map(Workload::total_s).fold(0.0, f64::max);
        let count = devices as f64;
        for kind in PolicyKind::ALL {
            let makespan = makespan_s(&schedule(&mut *kind.build(seed), &workloads, devices));
            prop_assert!(makespan >= longest);
            prop_assert!(makespan * count >= total);
            prop_assert!(makespan * count <= total + (count - 1.0) * longest);
        }
    }
}
