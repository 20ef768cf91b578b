//! The host optimizer: accumulates gradients and steps master weights on its own threads while devices compute.
//!
//! It is one actor. Gradients of layers arrive in any order; each buffer adds those of one microbatch in chain order,
//! and microbatches in index order, so the result never depends on devices or timing. A buffer is stepped when its
//! last gradient has arrived, or with clipping when all gradients have. Among several such buffers of a task, the one
//! that the chain reads first is stepped first: the next forward pass begins there, while the others are stepped. Tasks
//! come in the order in which their first buffer was complete. Master weights resident on a device are stepped there.

use super::arithmetic::{TaskStep, clip_factor, global_norm};
use super::gradient::{BufferGradient, BufferSum, HostAdder, ParamGradient};
use super::on_device::{DeviceGradient, DeviceStepper};
use crate::error::{EngineError, guarded};
use crate::io::writer::{CheckpointJob, WriterJob};
use crate::protocol::{Event, Reporter};
use crossbeam_channel::{Receiver, Sender};
use hydra_core::profile::{self, Part};
use hydra_core::{
    BufferParam, Chain, DeviceTensor, HostTensor, ParamBufferLayout, StateRule, TaskId, TrainSpec,
};
use hydra_spill::{Masters, MastersPart, ParamBufferId, Reservation, SpillError, TierStore};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// One layer's gradient of one buffer, by slot; `None` if the loss does not depend on a parameter.
pub(crate) struct Contribution<T = HostTensor> {
    pub layer: usize,
    pub buffer: usize,
    /// The first microbatch included in these gradients: the microbatch itself, or the first of the minibatch if they
    /// were accumulated on the device.
    pub first: usize,
    pub gradients: Vec<Option<T>>,
}

pub(crate) enum HostJob {
    /// A task starts, with or without best weights. `together` is true if host memory fits the gradients of all
    /// microbatches of a minibatch.
    Register { task: TaskId, chain: Arc<Chain>, spec: TrainSpec, steps: usize, best: bool, together: bool },
    /// Gradients of one shard of one microbatch.
    Gradients { task: TaskId, at: MicroStep, contributions: Vec<Contribution> },
    /// The same for master weights resident on the device; the reservation covers the gradients there.
    DeviceGradients {
        task: TaskId,
        at: MicroStep,
        contributions: Vec<Contribution<DeviceTensor>>,
        reservation: Reservation,
    },
    /// Snapshot the master weights as the best ones.
    Snapshot { task: TaskId },
    /// Pass a checkpoint to the writer, with the best weights so far.
    Checkpoint(CheckpointJob),
    /// Restore the best weights.
    Restore { task: TaskId },
    /// A task ended: drop its gradients and snapshots.
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

/// One layer's gradients of a buffer, by slot.
type UsesOf<S> = Vec<Option<<S as BufferSum>::Use>>;

/// The gradient of one buffer in one minibatch, while it is accumulated.
#[derive(Default)]
struct Gathered<S: BufferSum> {
    /// By microbatch: the gradients that have arrived, by index of their layer among those of the buffer.
    waiting: BTreeMap<usize, Vec<Option<UsesOf<S>>>>,
    /// Microbatches accumulated.
    added: usize,
    sum: Option<S>,
}

struct TaskState {
    chain: Arc<Chain>,
    spec: TrainSpec,
    steps: usize,
    buffers: Vec<Gathered<BufferGradient>>,
    /// The same for master weights resident on the device.
    device_buffers: Vec<Gathered<DeviceGradient>>,
    /// True if the store has its best weights.
    best: bool,
    adder: HostAdder,
}

pub(crate) struct HostOptimizer {
    store: Arc<dyn TierStore>,
    pool: Arc<rayon::ThreadPool>,
    /// Steps master weights that are resident on the device.
    device: DeviceStepper,
    writer: Sender<WriterJob>,
    reporter: Reporter,
    tasks: HashMap<TaskId, TaskState>,
    /// Buffers whose gradients are complete.
    due: Vec<Due>,
}

/// A buffer to be stepped.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Due {
    task: TaskId,
    step: usize,
    buffer: usize,
    /// The first layer that reads it.
    layer: usize,
    factor: Option<f32>,
}

/// Takes the buffer that the chain of a task reads first; by default of the task that has waited for the longest time.
fn take_first(due: &mut Vec<Due>, task: Option<TaskId>) -> Option<Due> {
    let task = task.or_else(|| due.first().map(|due| due.task))?;
    let of_task = due.iter().enumerate().filter(|(_, due)| due.task == task);
    let (first, _) = of_task.min_by_key(|(_, due)| due.layer)?;
    Some(due.remove(first))
}

impl HostOptimizer {
    pub(crate) fn new(
        store: Arc<dyn TierStore>,
        pool: Arc<rayon::ThreadPool>,
        device: DeviceStepper,
        writer: Sender<WriterJob>,
        reporter: Reporter,
    ) -> Self {
        Self { store, pool, device, writer, reporter, tasks: HashMap::new(), due: Vec::new() }
    }

    /// Handles jobs until every sender is dropped.
    pub(crate) fn run(mut self, jobs: &Receiver<HostJob>) {
        loop {
            // A gradient that has arrived may complete a buffer that is needed earlier than those due.
            let job = if self.due.is_empty() { jobs.recv().ok() } else { jobs.try_recv().ok() };
            match job {
                Some(job) => self.handle_guarded(job),
                None => match take_first(&mut self.due, None) {
                    Some(due) => self.guarded(due.task, |this| this.step(due)),
                    None => return,
                },
            }
        }
    }

    fn handle_guarded(&mut self, job: HostJob) {
        let task = match job {
            HostJob::Register { task, .. }
            | HostJob::Gradients { task, .. }
            | HostJob::DeviceGradients { task, .. } => task,
            // These read the master weights.
            HostJob::Snapshot { task }
            | HostJob::Checkpoint(CheckpointJob { task, .. })
            | HostJob::Restore { task } => {
                while let Some(due) = take_first(&mut self.due, Some(task)) {
                    self.guarded(task, |this| this.step(due));
                }
                task
            }
            HostJob::Forget { task } => {
                self.due.retain(|due| due.task != task);
                task
            }
        };
        self.guarded(task, |this| this.handle(job));
    }

    /// Reports a failure of work for a task, and drops the task.
    fn guarded(&mut self, task: TaskId, work: impl FnOnce(&mut Self) -> Result<(), EngineError>) {
        if let Err(error) = guarded("the host optimizer", || work(self)) {
            self.tasks.remove(&task);
            self.due.retain(|due| due.task != task);
            self.reporter.send(Event::HostFailed { task, error });
        }
    }

    fn handle(&mut self, job: HostJob) -> Result<(), EngineError> {
        match job {
            HostJob::Register { task, chain, spec, steps, best, together } => {
                let buffers = chain.buffers().iter().map(|_| Gathered::default()).collect();
                let device_buffers = chain.buffers().iter().map(|_| Gathered::default()).collect();
                let adder = HostAdder { pool: self.pool.clone(), as_read: together };
                let state = TaskState { chain, spec, steps, buffers, device_buffers, best, adder };
                self.tasks.insert(task, state);
            }
            HostJob::Gradients { task, at, contributions } => self.gather(task, at, contributions)?,
            HostJob::DeviceGradients { task, at, contributions, reservation } => {
                self.gather_on_device(task, at, contributions)?;
                // Gradients that still wait for others have memory of their own, reserved at admission.
                drop(reservation);
            }
            HostJob::Snapshot { task } => self.snapshot(task)?,
            HostJob::Checkpoint(job) => {
                // A task that failed meanwhile is unregistered, and its failure was reported.
                let Some(state) = self.tasks.get(&job.task) else { return Ok(()) };
                // The writer outlives this actor.
                let _ = self.writer.send(WriterJob::Checkpoint { job, best: state.best });
            }
            HostJob::Restore { task } => {
                self.restore(task)?;
                self.reporter.send(Event::Restored { task });
            }
            HostJob::Forget { task } => {
                self.tasks.remove(&task);
            }
        }
        Ok(())
    }

    fn gather(
        &mut self,
        task: TaskId,
        at: MicroStep,
        contributions: Vec<Contribution>,
    ) -> Result<(), EngineError> {
        // A task that failed meanwhile is unregistered; its late gradients are dropped.
        let Some(state) = self.tasks.get_mut(&task) else { return Ok(()) };
        let mut complete = Vec::new();
        profile::time(Part::Optimizer, || {
            contributions.into_iter().try_for_each(|contribution| {
                let (buffer, layout) = (contribution.buffer, &state.chain.buffers()[contribution.buffer]);
                let gathered = &mut state.buffers[buffer];
                let before = gathered.added;
                if layout.is_state() && at.of > 1 && gathered.sum.is_none() && !state.adder.as_read {
                    gathered.sum = Some(values_of(&*self.store, ParamBufferId::new(task, buffer), layout)?);
                }
                match gathered.take(layout, at, contribution, &state.adder)? {
                    microbatches if microbatches == at.of => complete.push(buffer),
                    microbatches if microbatches > before => {
                        self.reporter.send(Event::Added { task, buffer, microbatches });
                    }
                    _ => {}
                }
                Ok::<_, EngineError>(())
            })
        })?;
        if state.spec.clip.is_none() {
            self.add_due(task, at.step, complete, None);
            return Ok(());
        }
        let trained = state.trained();
        if complete.is_empty() || trained.iter().any(|buffer| state.buffers[*buffer].added != at.of) {
            return Ok(());
        }
        let state = &self.tasks[&task];
        let squares = |buffer: usize, slot: usize| {
            state.buffers[buffer].sum.as_ref().map_or(0.0, |sum| sum[slot].sum_of_squares())
        };
        let norm = || self.pool.install(|| global_norm(&state.chain, squares));
        let norm = profile::time(Part::Optimizer, norm);
        let factor = state.spec.clip.map(|clip| clip_factor(clip, norm));
        self.add_due(task, at.step, trained, factor);
        Ok(())
    }

    fn add_due(&mut self, task: TaskId, step: usize, buffers: Vec<usize>, factor: Option<f32>) {
        let Some(state) = self.tasks.get(&task) else { return };
        let layer = |buffer: usize| state.chain.buffers()[buffer].layers.first().copied().unwrap_or(0);
        let due = buffers.into_iter().map(|buffer| Due { task, step, buffer, layer: layer(buffer), factor });
        self.due.extend(due);
    }

    fn step(&mut self, Due { task, step, buffer, factor, .. }: Due) -> Result<(), EngineError> {
        let start_s = self.reporter.now();
        let Some(state) = self.tasks.get_mut(&task) else { return Ok(()) };
        let Some(gradient) = std::mem::take(&mut state.buffers[buffer]).sum else { return Ok(()) };
        let layout = &state.chain.buffers()[buffer];
        let task_step = TaskStep::new(&state.spec, step, state.steps, factor);
        // Within the pool, so that a piece stays on one thread between its read and its step.
        self.pool.install(|| {
            self.store.write_pieces(ParamBufferId::new(task, buffer), &mut |start, masters| {
                let step_piece = || task_step.piece(layout, start, masters, &gradient);
                profile::time(Part::Optimizer, step_piece);
                Ok(())
            })
        })?;
        // Free the gradient before the step is reported: its memory may admit the next one.
        drop(gradient);
        let time = self.reporter.since(start_s);
        self.reporter.send(Event::Stepped { task, buffer, step, time });
        Ok(())
    }

    /// Adds gradients on the device and steps complete buffers; gradients there are never clipped.
    fn gather_on_device(
        &mut self,
        task: TaskId,
        at: MicroStep,
        contributions: Vec<Contribution<DeviceTensor>>,
    ) -> Result<(), EngineError> {
        let Some(state) = self.tasks.get_mut(&task) else { return Ok(()) };
        let mut added = false;
        for contribution in contributions {
            let (buffer, start_s) = (contribution.buffer, self.reporter.now());
            let (layout, gathered) = (&state.chain.buffers()[buffer], &mut state.device_buffers[buffer]);
            let memory = self.device.memory.as_ref();
            if self.device.charged(|| gathered.take(layout, at, contribution, memory))? < at.of {
                added = true;
                continue;
            }
            let Some(gradient) = std::mem::take(gathered).sum else { continue };
            let mut writer = self.store.write_on_device(ParamBufferId::new(task, buffer))?;
            let step = TaskStep::new(&state.spec, at.step, state.steps, None);
            let step_buffer = || self.device.step(&step, layout, &mut writer, &gradient);
            profile::time(Part::Optimizer, step_buffer)?;
            writer.commit();
            let time = self.reporter.since(start_s);
            self.reporter.send(Event::Stepped { task, buffer, step: at.step, time });
        }
        // The device may still read the gradients that were added, and their reservation ends here.
        if added { self.device.finish(&[], "adding gradients") } else { Ok(()) }
    }

    fn snapshot(&mut self, task: TaskId) -> Result<(), EngineError> {
        let Some(state) = self.tasks.get_mut(&task) else { return Ok(()) };
        for buffer in state.trained() {
            let id = ParamBufferId::new(task, buffer);
            let store = &*self.store;
            store.write_pieces(id.snapshot(), &mut |start, best| copy(store, id, start, best))?;
        }
        state.best = true;
        Ok(())
    }

    fn restore(&mut self, task: TaskId) -> Result<(), EngineError> {
        let Some(state) = self.tasks.get_mut(&task) else { return Ok(()) };
        if !std::mem::take(&mut state.best) {
            return Ok(());
        }
        for buffer in state.trained() {
            let id = ParamBufferId::new(task, buffer);
            if self.store.on_device(id)?.is_some() {
                let best = self.store.read_masters(id.snapshot())?;
                let best: &[f32] = bytemuck::cast_slice(&best.bytes);
                let mut writer = self.store.write_on_device(id)?;
                self.device.replace(&state.chain.buffers()[buffer], &mut writer, best)?;
                writer.commit();
                continue;
            }
            let store = &*self.store;
            store.write_pieces(id, &mut |start, masters| {
                copy(store, id.snapshot(), start, masters)?;
                masters.round();
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// The values of a buffer of state, to which observations of several microbatches are applied as they arrive.
fn values_of(
    store: &dyn TierStore,
    id: ParamBufferId,
    layout: &ParamBufferLayout,
) -> Result<BufferGradient, SpillError> {
    let value = |param: &BufferParam| {
        let values = store.read_part(id, MastersPart::Params, param.range())?;
        let rule = param.state.unwrap_or(StateRule::SUM);
        Ok(ParamGradient::State { values: bytemuck::cast_slice(&values.bytes).to_vec(), rule })
    };
    layout.params.iter().map(value).collect()
}

/// Copies another buffer's parameters into a piece that starts at this element.
fn copy(
    store: &dyn TierStore,
    from: ParamBufferId,
    start: usize,
    piece: &mut Masters,
) -> Result<(), SpillError> {
    let values = store.read_part(from, MastersPart::Params, start..start + piece.params.len())?;
    piece.params.copy_from_slice(bytemuck::cast_slice(&values.bytes));
    Ok(())
}

impl TaskState {
    /// The trained buffers.
    fn trained(&self) -> Vec<usize> {
        let buffers = self.chain.buffers().iter().enumerate();
        buffers.filter(|(_, layout)| layout.trained).map(|(buffer, _)| buffer).collect()
    }
}

impl<S: BufferSum> Gathered<S> {
    /// Takes a contribution, adds all that can be added, and returns the number of microbatches accumulated.
    fn take(
        &mut self,
        layout: &ParamBufferLayout,
        at: MicroStep,
        contribution: Contribution<S::Use>,
        adder: &S::Adder,
    ) -> Result<usize, EngineError> {
        let Contribution { layer, buffer, first, gradients } = contribution;
        let position = layout.layers.iter().position(|l| *l == layer);
        let position = position.ok_or(EngineError::StrayGradient { layer, buffer })?;
        let none = || layout.layers.iter().map(|_| None).collect();
        // Gradients accumulated on the device count as their last microbatch; earlier ones are not waited for.
        if first < at.microbatch {
            self.added = at.microbatch;
        }
        let uses = self.waiting.entry(at.microbatch).or_insert_with(none);
        uses[position] = Some(gradients);
        self.sum_up(layout, adder);
        Ok(self.added)
    }

    /// Adds each next microbatch, in order, whose contributions have all arrived.
    fn sum_up(&mut self, layout: &ParamBufferLayout, adder: &S::Adder) {
        while self.waiting.get(&self.added).is_some_and(|uses| uses.iter().all(Option::is_some)) {
            let uses = self.waiting.remove(&self.added).unwrap_or_default();
            let micro = S::of_microbatch(layout, uses.into_iter().flatten().collect(), adder);
            self.sum = Some(match self.sum.take() {
                Some(sum) => sum.add(micro, adder),
                None => micro,
            });
            self.added += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::tied;
    use super::*;
    use hydra_core::FloatType;

    #[test]
    fn what_a_chain_reads_first_is_stepped_first() {
        let due = |task, layer| Due { task: TaskId(task), step: 0, buffer: 9 - layer, layer, factor: None };
        let mut all = vec![due(0, 7), due(0, 6), due(1, 8), due(1, 2), due(0, 2)];
        assert_eq!(take_first(&mut all, Some(TaskId(0))), Some(due(0, 2)));
        let order: Vec<Due> = std::iter::from_fn(|| take_first(&mut all, None)).collect();
        assert_eq!(order, [due(0, 6), due(0, 7), due(1, 2), due(1, 8)]);
    }

    fn adder() -> HostAdder {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        HostAdder { pool: Arc::new(pool), as_read: false }
    }

    fn gather(order: &[(usize, usize)]) -> (Option<f32>, usize) {
        let adder = adder();
        let mut gathered = Gathered::<BufferGradient>::default();
        for &(microbatch, use_) in order {
            let uses = gathered.waiting.entry(microbatch).or_insert_with(|| vec![None, None]);
            let value = [[1e8, 1.0], [-1e8, 3.0]][microbatch][use_];
            uses[use_] = Some(vec![Some(HostTensor::float(vec![value], [1]))]);
            gathered.sum_up(&tied(1, 1, FloatType::F32), &adder);
        }
        (gathered.sum.map(|sum| sum[0].chunk(0..1, |c| c[0])), gathered.added)
    }

    #[test]
    fn the_sum_does_not_depend_on_the_order_of_arrival() {
        let in_order = gather(&[(0, 0), (0, 1), (1, 0), (1, 1)]);
        assert_eq!(in_order, (Some((1e8 + 1.0) + (-1e8 + 3.0)), 2));
        assert_eq!(gather(&[(1, 1), (0, 1), (1, 0), (0, 0)]), in_order);
        assert_eq!(gather(&[(0, 1), (1, 0), (1, 1), (0, 0)]), in_order);
    }

    #[test]
    fn a_sum_of_microbatches_stands_for_all_of_them() {
        let adder = adder();
        let mut gathered = Gathered::<BufferGradient>::default();
        let mut layout = tied(1, 1, FloatType::F32);
        layout.layers = vec![0];
        let mut take = |first, microbatch, value: f32| {
            let at = MicroStep { step: 0, microbatch, of: 4 };
            let gradients = vec![Some(HostTensor::float(vec![value], [1]))];
            gathered
                .take(&layout, at, Contribution { layer: 0, buffer: 0, first, gradients }, &adder)
                .unwrap()
        };
        assert_eq!([take(3, 3, 1.0), take(0, 1, 1e8), take(2, 2, -1e8)], [0, 2, 4]);
        assert_eq!(gathered.sum.map(|sum| sum[0].chunk(0..1, |c| c[0])), Some(1.0));
    }

    #[test]
    fn a_microbatch_waits_for_all_uses_of_a_tied_parameter() {
        assert_eq!(gather(&[(0, 1)]).1, 0);
        assert_eq!(gather(&[(0, 1), (0, 0)]).1, 1);
    }
}
