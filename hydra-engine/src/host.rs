//! The host optimizer: gathers gradients and steps masters, on its own threads, while devices compute.
//!
//! It is one actor. Contributions of layers arrive in any order; each image adds those of one microbatch
//! in chain order and microbatches in theirs, so the sum never depends on devices or timing. An image is
//! stepped as soon as its last contribution is there, or, with clipping, when the whole gradient is.

use crate::clock::{Clock, Time};
use crate::error::{EngineError, guarded};
use crate::event::Event;
use crate::optimizer::{Step, clip_factor, global_norm};
use crossbeam_channel::{Receiver, Sender};
use hydra_core::{Chain, TaskId, TrainSpec};
use hydra_spill::{ImageId, TierStore};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// One layer's gradient of one image, laid out as the image.
pub(crate) struct Contribution {
    pub layer: usize,
    pub image: usize,
    pub values: Vec<f32>,
}

pub(crate) enum HostJob {
    /// A task begins.
    Register { task: TaskId, chain: Arc<Chain>, spec: TrainSpec, steps: usize },
    /// Gradients of one shard of one microbatch.
    Gradients { task: TaskId, at: MicroStep, contributions: Vec<Contribution> },
    /// Keep a copy of the masters as the best ones.
    Snapshot { task: TaskId },
    /// Put the best masters back.
    Restore { task: TaskId },
    /// A task ended: forget its gradients and copies.
    Forget { task: TaskId },
}

/// A microbatch of a minibatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MicroStep {
    pub step: usize,
    pub microbatch: usize,
    /// Microbatches of this minibatch.
    pub of: usize,
}

/// The gradient of one image of one minibatch, as it arrives.
#[derive(Default)]
struct Gathered {
    /// Per microbatch: the contributions by the position of their layer among the image's.
    waiting: BTreeMap<usize, Vec<Option<Vec<f32>>>>,
    /// Microbatches in the sum.
    added: usize,
    sum: Option<Vec<f32>>,
}

struct TaskState {
    chain: Arc<Chain>,
    spec: TrainSpec,
    steps: usize,
    images: Vec<Gathered>,
    best: Option<Vec<Vec<f32>>>,
}

pub(crate) struct HostOptimizer {
    store: Arc<dyn TierStore>,
    pool: Arc<rayon::ThreadPool>,
    events: Sender<Event>,
    clock: Clock,
    tasks: HashMap<TaskId, TaskState>,
}

impl HostOptimizer {
    pub(crate) fn new(
        store: Arc<dyn TierStore>,
        pool: Arc<rayon::ThreadPool>,
        events: Sender<Event>,
        clock: Clock,
    ) -> Self {
        Self { store, pool, events, clock, tasks: HashMap::new() }
    }

    /// Works until every sender of jobs is gone.
    pub(crate) fn run(mut self, jobs: &Receiver<HostJob>) {
        for job in jobs {
            let task = match job {
                HostJob::Register { task, .. }
                | HostJob::Gradients { task, .. }
                | HostJob::Snapshot { task }
                | HostJob::Restore { task }
                | HostJob::Forget { task } => task,
            };
            if let Err(error) = guarded("the host optimizer", || self.handle(job)) {
                self.tasks.remove(&task);
                self.send(Event::HostFailed { task, error });
            }
        }
    }

    fn handle(&mut self, job: HostJob) -> Result<(), EngineError> {
        match job {
            HostJob::Register { task, chain, spec, steps } => {
                let images = chain.images().iter().map(|_| Gathered::default()).collect();
                self.tasks.insert(task, TaskState { chain, spec, steps, images, best: None });
            }
            HostJob::Gradients { task, at, contributions } => self.gather(task, at, contributions)?,
            HostJob::Snapshot { task } => self.snapshot(task)?,
            HostJob::Restore { task } => {
                self.restore(task)?;
                self.send(Event::Restored { task });
            }
            HostJob::Forget { task } => {
                self.tasks.remove(&task);
            }
        }
        Ok(())
    }

    fn send(&self, event: Event) {
        // The orchestrator outlives its workers; if it is gone, the run was given up.
        let _ = self.events.send(event);
    }

    fn gather(
        &mut self,
        task: TaskId,
        at: MicroStep,
        contributions: Vec<Contribution>,
    ) -> Result<(), EngineError> {
        // A task that failed meanwhile has been forgotten; its late gradients go with it.
        let Some(state) = self.tasks.get_mut(&task) else { return Ok(()) };
        let mut complete = Vec::new();
        for contribution in contributions {
            let image = contribution.image;
            if state.add(at, contribution)? {
                complete.push(image);
            }
        }
        if state.spec.clip.is_none() {
            return complete.into_iter().try_for_each(|image| self.step(task, at.step, image, None));
        }
        if complete.is_empty() || !state.all_complete(at.of) {
            return Ok(());
        }
        let state = &self.tasks[&task];
        let norm = self
            .pool
            .install(|| global_norm(&state.chain, |i| state.images[i].sum.as_deref().unwrap_or(&[])));
        let factor = state.spec.clip.map(|clip| clip_factor(clip, norm));
        let trained: Vec<usize> =
            (0..state.images.len()).filter(|i| state.chain.images()[*i].trained).collect();
        trained.into_iter().try_for_each(|image| self.step(task, at.step, image, factor))
    }

    fn step(
        &mut self,
        task: TaskId,
        step: usize,
        image: usize,
        factor: Option<f32>,
    ) -> Result<(), EngineError> {
        let start_s = self.clock.now();
        let Some(state) = self.tasks.get_mut(&task) else { return Ok(()) };
        let Some(gradient) = std::mem::take(&mut state.images[image]).sum else { return Ok(()) };
        let mut writer = self.store.write(ImageId { task, image })?;
        let masters = &mut *writer;
        let rate = state.spec.rate(step, state.steps);
        let layout = &state.chain.images()[image];
        let update = Step { spec: &state.spec, rate, step, factor };
        self.pool.install(|| update.image(layout, masters, &gradient));
        writer.commit();
        let time = Time { start_s, end_s: self.clock.now() };
        self.send(Event::Stepped { task, image, step, time });
        Ok(())
    }

    fn snapshot(&mut self, task: TaskId) -> Result<(), EngineError> {
        let Some(state) = self.tasks.get_mut(&task) else { return Ok(()) };
        let best = state.best.get_or_insert_with(|| {
            state.chain.images().iter().map(|i| vec![0.0; if i.trained { i.elements } else { 0 }]).collect()
        });
        for (image, copy) in best.iter_mut().enumerate().filter(|(_, copy)| !copy.is_empty()) {
            let view = self.store.read(ImageId { task, image })?;
            copy.copy_from_slice(bytemuck::cast_slice(&view.bytes));
        }
        Ok(())
    }

    fn restore(&mut self, task: TaskId) -> Result<(), EngineError> {
        let Some(best) = self.tasks.get_mut(&task).and_then(|state| state.best.take()) else { return Ok(()) };
        for (image, copy) in best.into_iter().enumerate().filter(|(_, copy)| !copy.is_empty()) {
            let mut writer = self.store.write(ImageId { task, image })?;
            writer.params.copy_from_slice(&copy);
            writer.commit();
        }
        Ok(())
    }
}

impl TaskState {
    /// Adds a contribution; whether the image's gradient of the minibatch is complete now.
    fn add(&mut self, at: MicroStep, contribution: Contribution) -> Result<bool, EngineError> {
        let Contribution { layer, image, .. } = contribution;
        let layers = &self.chain.images()[image].layers;
        let position = layers.iter().position(|l| *l == layer);
        let position = position.ok_or(EngineError::StrayGradient { layer, image })?;
        let gathered = &mut self.images[image];
        let uses =
            gathered.waiting.entry(at.microbatch).or_insert_with(|| layers.iter().map(|_| None).collect());
        uses[position] = Some(contribution.values);
        gathered.sum_up();
        Ok(gathered.added == at.of)
    }

    fn all_complete(&self, microbatches: usize) -> bool {
        let trained = self.chain.images().iter().zip(&self.images).filter(|(layout, _)| layout.trained);
        trained.into_iter().all(|(_, gathered)| gathered.added == microbatches)
    }
}

impl Gathered {
    /// Adds every microbatch whose turn it is and whose contributions are all there.
    fn sum_up(&mut self) {
        while self.waiting.get(&self.added).is_some_and(|uses| uses.iter().all(Option::is_some)) {
            let uses = self.waiting.remove(&self.added).unwrap_or_default();
            let micro = uses.into_iter().flatten().reduce(|mut total, part| {
                add(&mut total, &part);
                total
            });
            self.sum = match (self.sum.take(), micro) {
                (Some(mut sum), Some(micro)) => {
                    add(&mut sum, &micro);
                    Some(sum)
                }
                (sum, micro) => sum.or(micro),
            };
            self.added += 1;
        }
    }
}

fn add(total: &mut [f32], part: &[f32]) {
    total.iter_mut().zip(part).for_each(|(total, part)| *total += *part);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gather(order: &[(usize, usize)]) -> (Option<Vec<f32>>, usize) {
        let mut gathered = Gathered::default();
        for &(microbatch, use_) in order {
            let uses = gathered.waiting.entry(microbatch).or_insert_with(|| vec![None, None]);
            uses[use_] = Some(vec![[1e8, 1.0], [-1e8, 3.0]][microbatch][use_..=use_].to_vec());
            gathered.sum_up();
        }
        (gathered.sum, gathered.added)
    }

    #[test]
    fn the_sum_does_not_depend_on_the_order_of_arrival() {
        let in_order = gather(&[(0, 0), (0, 1), (1, 0), (1, 1)]);
        assert_eq!(in_order.1, 2);
        assert_eq!(gather(&[(1, 1), (0, 1), (1, 0), (0, 0)]), in_order);
        assert_eq!(gather(&[(0, 1), (1, 0), (1, 1), (0, 0)]), in_order);
    }

    #[test]
    fn a_microbatch_waits_for_all_uses_of_a_tied_parameter() {
        assert_eq!(gather(&[(0, 1)]).1, 0);
        assert_eq!(gather(&[(0, 1), (0, 0)]).1, 1);
    }
}
