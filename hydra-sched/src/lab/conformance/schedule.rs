//! A small list scheduler in virtual time: whenever a device is free, it asks the policy.
//!
//! Shard tasks take other times than estimated, and the measured ones correct the estimates, as in a real
//! run. After each training sweep a model waits for its optimizer, and a device may be held back for it.

use std::collections::VecDeque;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use crate::policy::sweep::tasks_from;
use crate::policy::{Asking, CostModel, ModelIndex, ModelView, Policy, ShardTaskKind, View, WorkLeft};

/// One model's work: what is estimated, what is true, and its sweeps in order.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    estimate: CostModel,
    truth: CostModel,
    /// The first shard task of each sweep.
    sweeps: VecDeque<(ShardTaskKind, usize)>,
    /// Seconds of the optimizer after each training sweep.
    pub(crate) step_s: f64,
}

impl Workload {
    /// A model whose estimates are right, with training sweeps only.
    #[cfg(test)]
    fn exact(forward_s: &[f64], backward_s: &[f64], sweeps: usize) -> Self {
        let cost = CostModel::new(forward_s.to_vec(), backward_s.to_vec(), forward_s.to_vec());
        let cost = cost.unwrap();
        let start = ShardTaskKind::training_start(cost.shards());
        Self { estimate: cost.clone(), truth: cost, sweeps: vec![start; sweeps].into(), step_s: 0.0 }
    }

    /// All shard tasks, in the order in which they have to run.
    pub(crate) fn tasks(&self) -> Vec<(ShardTaskKind, usize)> {
        self.sweeps.iter().flat_map(|&start| tasks_from(start, self.truth.shards())).collect()
    }

    /// True seconds of all shard tasks.
    pub(crate) fn total_s(&self) -> f64 {
        self.tasks().iter().map(|&(kind, shard)| self.truth.of(kind, shard)).sum()
    }
}

/// A shard task as it was scheduled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slot {
    pub(crate) device: usize,
    pub(crate) model: usize,
    pub(crate) task: (ShardTaskKind, usize),
    pub(crate) start_s: f64,
    pub(crate) end_s: f64,
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

/// The schedule that `policy` makes of `workloads` on `devices` devices, in order of starts; an answer that it
/// must not give is the error.
pub(crate) fn schedule(
    policy: &mut dyn Policy,
    workloads: &[Workload],
    devices: usize,
) -> Result<Vec<Slot>, TestCaseError> {
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
    simulation.run()?;
    Ok(simulation.slots)
}

impl Simulation<'_> {
    fn run(&mut self) -> Result<(), TestCaseError> {
        loop {
            for device in 0..self.devices.len() {
                if self.devices[device].is_none() {
                    self.ask(device)?;
                }
            }
            let ends = self.devices.iter().flatten().map(|slot| slot.end_s);
            let steps = self.models.iter().map(|model| model.final_s).filter(|s| *s > self.now_s);
            match ends.chain(steps).min_by(f64::total_cmp) {
                Some(next_s) => self.advance(next_s),
                None => return Ok(()),
            }
        }
    }

    fn ask(&mut self, device: usize) -> Result<(), TestCaseError> {
        let claimable = self.claimable(device);
        let asking = self.asking(device);
        let chosen = self.policy.choose(&View { asking, claimable: &claimable });
        self.decision += 1;
        if claimable.is_empty() {
            prop_assert_eq!(chosen, None, "there was nothing to choose");
        } else if asking.awaited.is_none() {
            prop_assert!(chosen.is_some(), "a device was held back for nothing");
        }
        if let Some(ModelIndex(model)) = chosen {
            prop_assert!(claimable.iter().any(|m| m.model.0 == model), "model {} is not claimable", model);
            self.start(device, model);
        }
        Ok(())
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

/// When the last shard task ends.
pub(crate) fn makespan_s(slots: &[Slot]) -> f64 {
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

/// No model up to seven.
pub(crate) fn any_workloads() -> impl Strategy<Value = Vec<Workload>> {
    prop::collection::vec(any_workload(), 0..8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicyKind;

    /// The schedule of a policy that keeps the rules.
    fn of(policy: &mut dyn Policy, workloads: &[Workload], devices: usize) -> Vec<Slot> {
        schedule(policy, workloads, devices).unwrap()
    }

    /// A long model and two short ones on two devices: the patient policy waits for the long one's optimizer
    /// where others would let it wait for a shard task, and what it left is done all the same.
    #[test]
    fn the_patient_one_waits_and_nothing_starves() {
        let long = Workload { step_s: 1.0, ..Workload::exact(&[1.0], &[2.0], 10) };
        let short = Workload::exact(&[1.0], &[5.0], 1);
        let workloads = [long, short.clone(), short];
        let end_of_long = |kind: PolicyKind| {
            let slots = of(&mut *kind.build(0), &workloads, 2);
            assert_eq!(slots.len(), 12, "{kind}");
            makespan_s(&slots.into_iter().filter(|slot| slot.model == 0).collect::<Vec<_>>())
        };
        assert_eq!(end_of_long(PolicyKind::ShardedLrtf), 10.0 * 2.0 + 9.0 * 1.0);
        assert!(end_of_long(PolicyKind::ShardedLrtfEager) > 10.0 * 2.0 + 9.0 * 1.0);
    }

    /// Two short models and a long one on two devices: who starts the long one last, waits for it.
    #[test]
    fn lrtf_levels_what_the_others_leave_to_the_end() {
        let short = Workload::exact(&[1.0], &[2.0], 1);
        let long = Workload::exact(&[1.0], &[2.0], 2);
        let workloads = [short.clone(), short, long];
        let makespan = |kind: PolicyKind| makespan_s(&of(&mut *kind.build(0), &workloads, 2));
        assert_eq!(makespan(PolicyKind::ShardedLrtfEager), 4.0);
        assert_eq!(makespan(PolicyKind::Fifo), 6.0);
        assert_eq!(makespan(PolicyKind::Srtf), 6.0);
    }

    /// The whole schedule of two models on one device, by hand.
    #[test]
    fn lrtf_alternates_between_models_of_equal_length() {
        use ShardTaskKind::{Backward, Forward};
        let model = Workload::exact(&[1.0, 9.0], &[2.0, 3.0], 1);
        let slots = of(&mut crate::ShardedLrtfEager, &[model.clone(), model], 1);
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
            let slots = of(&mut *kind.build(1), &workloads, 4);
            assert_eq!((slots.len(), makespan_s(&slots)), (12, 6.0), "{kind}");
        }
    }

    #[test]
    fn random_makes_different_schedules_of_different_seeds() {
        let workloads = vec![Workload::exact(&[1.0, 1.0], &[2.0, 2.0], 3); 5];
        let drawn = |seed| of(&mut *PolicyKind::Random.build(seed), &workloads, 2);
        assert_ne!(drawn(1), drawn(2));
    }
}
