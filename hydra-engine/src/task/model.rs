//! One task while it runs: where it stands, what it waits for, and what it has to show.

use super::Waits;
use super::checkpoint::Kept;
use super::gradient_room::GradientRoom;
use crate::admission::{AdmittedTask, GradientBytes, Placement, stored_bytes};
use crate::device::ShardWork;
use crate::error::EngineError;
use crate::optimizer::MicroStep;
use crate::protocol::{Evaluation, Gradient, Inputs, Loaded, Output, Reading, Sums, Ticket, Time};
use crate::stages::{Cursor, EvaluationKind, ShardTask, Stage, Sweep, TaskState};
use crate::train_task::TrainTask;
use hydra_core::{Batch, Chain, Dataset, DeviceId, HostTensor, Measured, Pass, Sampler, TaskId};
use hydra_partition::PartitionPlan;
use hydra_sched::{CostError, CostModel, ShardTaskKind};
use hydra_spill::Reservation;
use std::ops::Range;
use std::sync::Arc;

/// A shard task that a device has claimed.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub ticket: Ticket,
    pub task: TaskId,
    pub what: ShardTask,
    pub work: ShardWork,
    pub at: MicroStep,
    /// Loss terms of the microbatch or evaluation batch.
    pub terms: usize,
    /// Whether its primary input is what the shard task before it on the device leaves.
    pub from_handoff: bool,
}

/// A slot for an input that a shard task of the sweep makes.
#[derive(Debug)]
struct Slot<T> {
    maker: Ticket,
    value: Option<T>,
}

/// What a task has to show so far.
#[derive(Debug, Default)]
pub(crate) struct Results {
    pub losses: Vec<f64>,
    pub units: u64,
    pub initial: Option<Evaluation>,
    pub validation: Option<Evaluation>,
    pub test: Option<Evaluation>,
    pub periodic: Vec<(usize, Evaluation)>,
    pub best: Option<(usize, Evaluation)>,
    /// Why the last checkpoint could not be written.
    pub checkpoint_error: Option<String>,
    pub sha256: Option<String>,
    pub dir: Option<std::path::PathBuf>,
    pub compute_s: f64,
    pub optimizer_stall_s: f64,
    pub failure: Option<Arc<EngineError>>,
}

/// What finishing a shard task brought about.
#[derive(Debug, PartialEq)]
pub(crate) enum Progress {
    Nothing,
    Minibatch { step: usize, loss: f64, units: usize },
    Evaluating { kind: EvaluationKind, batch: usize, batches: usize, units: usize },
    Evaluated { kind: EvaluationKind, step: usize, result: Evaluation, best: bool },
}

pub(crate) struct Model {
    pub id: TaskId,
    pub task: TrainTask,
    pub plan: Arc<PartitionPlan>,
    pub placement: Placement,
    pub shards: Vec<Range<usize>>,
    pub costs: CostModel,
    pub cursor: Cursor,
    pub running: Option<(DeviceId, Ticket)>,
    pub claimed: Option<DeviceId>,
    /// Host memory of a model within a sweep: gradients and boundary activations.
    pub active: Option<Reservation>,
    /// What its gradients take of that.
    gradients: GradientRoom,
    /// Memory of the device that the task lives on, for gradients that wait there.
    pub waiting: Option<Reservation>,
    /// Whether each image lives on the disk; nothing where none does.
    pub on_disk: Vec<bool>,
    /// Bytes of masters on the disk.
    pub disk_bytes: u64,
    pub ended: Option<TaskState>,
    /// Whether the host was asked to restore, to write or to keep.
    pub asked: bool,
    pub stopping: bool,
    /// Whether the run was stopped before the task had come to its end.
    pub cut_short: bool,
    /// Whether a checkpoint is to be written before the next minibatch.
    pub keep_due: bool,
    /// Whether one is being written.
    pub keeping: bool,
    /// Where the last one was written.
    pub kept: Kept,
    pub results: Results,
    pub waits: Waits,
    pub running_task: Option<ShardTask>,
    images: Vec<Vec<usize>>,
    /// Minibatches that each image has been stepped for; frozen ones are always up to date.
    pub versions: Vec<usize>,
    sampler: Sampler,
    /// Bytes of the batches of a sweep.
    pub batch_bytes: u64,
    /// The sweep whose batches are being read.
    loading: Option<Sweep>,
    loaded: Option<Loaded>,
    batches: Vec<Batch>,
    boundaries: Vec<Option<Slot<Vec<HostTensor>>>>,
    gradient: Option<(usize, Slot<Gradient<HostTensor>>)>,
    loss: f64,
    /// The evaluation that is under way.
    pub evaluation: Sums,
    /// When the last minibatch ended, while the next shard task waits for its optimizer.
    pub minibatch_done_s: Option<f64>,
    /// Why the task ends before its next minibatch.
    pub cannot_go_on: Option<EngineError>,
    /// The shard task that failed, before which the task ends: what was claimed after it comes to nothing.
    pub ends_before: Option<Ticket>,
    /// Shard tasks that are done, of which something may still be on its way down.
    pub coming_down: usize,
}

impl Model {
    pub(crate) fn new(id: TaskId, task: TrainTask, admitted: &AdmittedTask) -> Result<Self, CostError> {
        let plan = admitted.plan.clone();
        let shards = plan.shards();
        let chain = &task.chain;
        let first = chain.first_trained();
        let program = task.program(&shards, first);
        let cursor = Cursor::new(program);
        let kept = Kept::before(&cursor);
        let images = shards.iter().map(|range| chain.images_of(range.clone())).collect();
        let gradients = GradientBytes::of(chain, &task.spec, &shards);
        let gradients = GradientRoom::new(gradients, admitted.gradient_bytes, chain.images().len());
        let frozen = |trained: bool| if trained { 0 } else { usize::MAX };
        let forward: Vec<f64> = plan.shards.iter().map(|s| s.forward_s).collect();
        let backward = plan.shards.iter().map(|s| s.backward_s).collect();
        Ok(Self {
            id,
            costs: CostModel::new(forward.clone(), backward, forward)?,
            cursor,
            running: None,
            claimed: None,
            active: None,
            gradients,
            waiting: None,
            on_disk: admitted.on_disk.clone(),
            disk_bytes: admitted.disk_bytes,
            ended: None,
            asked: false,
            stopping: false,
            keep_due: false,
            keeping: false,
            kept,
            cut_short: false,
            results: Results::default(),
            waits: Waits::default(),
            running_task: None,
            images,
            versions: chain.images().iter().map(|image| frozen(image.trained)).collect(),
            sampler: Sampler::new(task.train.len(), task.spec.batch, task.spec.seed, task.spec.shuffle),
            batch_bytes: admitted.batch_bytes,
            loading: None,
            loaded: None,
            batches: Vec::new(),
            boundaries: (0..shards.len()).map(|_| None).collect(),
            gradient: None,
            loss: 0.0,
            evaluation: Sums::default(),
            minibatch_done_s: None,
            cannot_go_on: None,
            ends_before: None,
            coming_down: 0,
            shards,
            plan,
            placement: admitted.optimizer.clone(),
            task,
        })
    }

    pub(crate) fn chain(&self) -> &Arc<Chain> {
        &self.task.chain
    }

    pub(crate) fn images_of_shard(&self, shard: usize) -> &[usize] {
        &self.images[shard]
    }

    /// Estimated seconds of compute that no one has claimed yet.
    pub(crate) fn remaining_s(&self) -> f64 {
        self.costs.remaining_s(&self.cursor.left())
    }

    pub(crate) fn lives_on_disk(&self, image: usize) -> bool {
        self.on_disk.get(image).copied().unwrap_or(false)
    }

    pub(crate) fn stored_bytes(&self, image: usize) -> u64 {
        stored_bytes(&self.task.chain.images()[image], &self.task.spec)
    }

    /// The next shard task, if `device` can claim it now.
    pub(crate) fn claimable(&self, device: DeviceId, prefetch: bool) -> Option<ShardTask> {
        if self.ended.is_some() || self.claimed.is_some() || self.asked {
            return None;
        }
        let follows = match self.running {
            None => None,
            Some((on, _)) if prefetch && on == device => self.running_task,
            Some(_) => return None,
        };
        let next = self.cursor.peek().filter(|_| self.cannot_go_on.is_none())?;
        if (self.stopping || self.keep_due) && self.between_sweeps() || self.awaits_verdict() {
            return None;
        }
        let ready = self.loading.is_none_or(|sweep| sweep != Sweep::of(&next))
            && self.masters_final(&next)
            && self.inputs_there(&next, follows.as_ref())
            && (next.kind != ShardTaskKind::Backward || self.gradients.has_room(next.shard));
        ready.then_some(next)
    }

    /// Whether what is next begins a minibatch or an evaluation batch, so that the task may end here.
    pub(crate) fn between_sweeps(&self) -> bool {
        let evaluation_start = self
            .cursor
            .peek()
            .is_some_and(|next| matches!(next.stage, Stage::Evaluate { .. }) && next.shard == 0);
        self.cursor.at_minibatch_start() || evaluation_start
    }

    pub(crate) fn masters_final(&self, next: &ShardTask) -> bool {
        self.images[next.shard].iter().all(|image| self.versions[*image] >= next.step)
    }

    /// Whether every trained image has been stepped for every minibatch that was trained.
    pub(crate) fn settled(&self) -> bool {
        self.versions.iter().all(|version| *version >= self.cursor.step())
    }

    /// Whether the next shard task waits for the optimizer to let go of gradients.
    pub(crate) fn awaits_steps(&self) -> bool {
        let backward = |next: &ShardTask| next.kind == ShardTaskKind::Backward;
        self.cursor.peek().filter(backward).is_some_and(|next| !self.gradients.has_room(next.shard))
    }

    fn inputs_there(&self, next: &ShardTask, follows: Option<&ShardTask>) -> bool {
        let activation = next.shard == 0
            || self.boundary(next.shard).is_some()
            || follows.is_some_and(|running| hands_activation(running, next));
        let upstream = !self.needs_upstream(next)
            || self.upstream(next.shard).is_some()
            || follows.is_some_and(|running| hands_gradient(running, next));
        activation && upstream
    }

    fn needs_upstream(&self, next: &ShardTask) -> bool {
        next.kind == ShardTaskKind::Backward && next.shard + 1 < self.shards.len()
    }

    fn boundary(&self, shard: usize) -> Option<&Vec<HostTensor>> {
        self.boundaries[shard].as_ref().and_then(|slot| slot.value.as_ref())
    }

    fn upstream(&self, shard: usize) -> Option<&Gradient<HostTensor>> {
        let (of, slot) = self.gradient.as_ref()?;
        (*of == shard).then_some(())?;
        slot.value.as_ref()
    }

    fn starts_sweep(&self, next: &ShardTask) -> bool {
        next.shard == 0 && next.kind != ShardTaskKind::Backward
            || self.shards.len() == 1 && next.kind == ShardTaskKind::Backward
    }

    /// Claims `next` for `device`: moves the cursor and gives the claim with the inputs that are there.
    pub(crate) fn claim(
        &mut self,
        ticket: Ticket,
        device: DeviceId,
        next: ShardTask,
    ) -> Result<(Claim, Inputs<HostTensor>), EngineError> {
        if self.starts_sweep(&next) {
            self.start_sweep(&next)?;
        }
        let follows = self.running_task.filter(|_| self.running.is_some());
        let last = next.shard + 1 == self.shards.len();
        let (batch, total) = self.batch(&next);
        let mut inputs = Inputs {
            activation: if next.shard == 0 {
                Some(batch.inputs.parts.clone())
            } else {
                self.boundary(next.shard).cloned()
            },
            targets: if last { batch.targets.parts.clone() } else { Vec::new() },
            upstream: None,
        };
        let terms = batch.terms;
        let weight = terms as f64 / total.max(1) as f64;
        if self.needs_upstream(&next) {
            inputs.upstream = self.upstream(next.shard).cloned();
        }
        let from_handoff =
            inputs.activation.is_none() || self.needs_upstream(&next) && inputs.upstream.is_none();
        debug_assert!(!from_handoff || follows.is_some());
        let microbatch = match next.stage {
            Stage::Train { microbatch } => microbatch,
            _ => 0,
        };
        let program = self.cursor.program();
        let at = MicroStep { step: next.step, microbatch, of: program.microbatches_of(next.step) };
        let work = ShardWork {
            layers: self.shards[next.shard].clone(),
            kind: next.kind,
            last,
            input_gradients: next.kind == ShardTaskKind::Backward && next.shard > program.first_trained,
            weight,
            key: Pass::key_of(self.task.spec.seed, next.step, microbatch),
            step: next.step,
        };
        if next.kind == ShardTaskKind::Backward {
            self.gradients.claimed(next.shard);
        }
        self.cursor.advance();
        self.claimed = Some(device);
        Ok((Claim { ticket, task: self.id, what: next, work, at, terms, from_handoff }, inputs))
    }

    fn start_sweep(&mut self, next: &ShardTask) -> Result<(), EngineError> {
        self.boundaries.iter_mut().for_each(|slot| *slot = None);
        self.gradient = None;
        if let Some(loaded) = self.loaded.take().filter(|loaded| loaded.of == Sweep::of(next)) {
            self.batches = loaded.batches?;
        } else if let Some(reading) = self.reading(next) {
            self.batches = reading.batches()?;
        }
        Ok(())
    }

    /// What is read for a sweep that begins with this shard task; nothing where its batches are there.
    fn reading(&mut self, next: &ShardTask) -> Option<Reading> {
        let float = self.task.chain.float_type();
        let (data, parts) = match next.stage {
            Stage::Train { microbatch: 0 } => {
                let items = self.sampler.items(next.step);
                let parts = self.task.spec.microbatches(&items).into_iter().map(<[usize]>::to_vec).collect();
                (self.task.train.clone(), parts)
            }
            Stage::Evaluate { kind, batch } => {
                let data = evaluation_data(&self.task, kind).clone();
                let size = self.task.evaluation_batch();
                let parts = vec![(batch * size..((batch + 1) * size).min(data.len())).collect()];
                (data, parts)
            }
            _ => return None,
        };
        Some(Reading { data, parts, float })
    }

    /// The shard task with which a sweep begins whose batches can be read ahead now.
    pub(crate) fn ahead(&mut self) -> Option<ShardTask> {
        let ends = self.ended.is_some() || self.stopping || self.cannot_go_on.is_some();
        if ends || self.loading.is_some() {
            return None;
        }
        let next = self.cursor.peek().filter(|next| self.starts_sweep(next))?;
        // What was read for another sweep, nobody wants any more.
        self.loaded.take_if(|loaded| loaded.of != Sweep::of(&next));
        self.loaded.is_none().then_some(next)
    }

    /// Begins to read ahead: what is to be read, and for which sweep.
    pub(crate) fn load(&mut self, next: &ShardTask) -> Option<(Sweep, Reading)> {
        let reading = self.reading(next)?;
        self.loading = Some(Sweep::of(next));
        Some((Sweep::of(next), reading))
    }

    /// Batches were read ahead, or could not be.
    pub(crate) fn loaded(&mut self, loaded: Loaded) {
        self.loading = None;
        self.loaded = Some(loaded).filter(|_| self.ended.is_none());
    }

    /// The batch of a shard task, and the loss terms of its whole minibatch.
    fn batch(&self, next: &ShardTask) -> (&Batch, usize) {
        let index = match next.stage {
            Stage::Train { microbatch } => microbatch,
            _ => 0,
        };
        (&self.batches[index], self.batches.iter().map(|b| b.terms).sum())
    }

    /// A claim has started to compute.
    pub(crate) fn started(&mut self, claim: &Claim, device: DeviceId) {
        self.claimed = None;
        self.running = Some((device, claim.ticket));
        self.running_task = Some(claim.what);
    }

    /// Whether the output of `claim` is needed on the host, if `handed` tells that the next shard task of
    /// the sweep takes it on the device.
    pub(crate) fn needs_output(&self, claim: &Claim, handed: bool) -> bool {
        let checkpoint =
            claim.what.kind == ShardTaskKind::Forward && claim.what.shard + 2 < self.shards.len();
        !handed || checkpoint
    }

    /// Announces that the output of `claim` will arrive on the host.
    pub(crate) fn expect_output(&mut self, claim: &Claim) {
        match claim.what.kind {
            ShardTaskKind::Backward => {
                if let Some(shard) = claim.what.shard.checked_sub(1) {
                    self.gradient = Some((shard, Slot { maker: claim.ticket, value: None }));
                }
            }
            ShardTaskKind::Forward | ShardTaskKind::Evaluate => {
                if let Some(slot) = self.boundaries.get_mut(claim.what.shard + 1) {
                    *slot = Some(Slot { maker: claim.ticket, value: None });
                }
            }
        }
    }

    /// The output of the shard task `maker` is on the host. One of an earlier sweep is dropped.
    pub(crate) fn output_arrived(&mut self, maker: Ticket, output: Output<HostTensor>) {
        match output {
            Output::None => {}
            Output::Activation(value) => {
                let slot = self.boundaries.iter_mut().flatten().find(|slot| slot.maker == maker);
                slot.into_iter().for_each(|slot| slot.value = Some(value.clone()));
            }
            Output::Gradient(value) => {
                let slot = self.gradient.as_mut().filter(|(_, slot)| slot.maker == maker);
                slot.into_iter().for_each(|(_, slot)| slot.value = Some(value.clone()));
            }
        }
    }

    /// A shard task ended well: accounts for its loss and tells what it completed.
    pub(crate) fn finished(
        &mut self,
        claim: &Claim,
        measured: Option<Measured>,
        time: Time,
    ) -> Result<Progress, EngineError> {
        self.running = None;
        self.running_task = None;
        self.results.compute_s += time.seconds();
        self.costs.observe(claim.what.kind, claim.what.shard, time.seconds());
        if let Some(measured) = measured {
            let loss = measured.loss;
            if !loss.is_finite() {
                let dataset = match claim.what.stage {
                    Stage::Evaluate { kind, .. } => Some(evaluation_data(&self.task, kind).name().to_owned()),
                    _ => None,
                };
                return Err(EngineError::BadLoss { loss, step: claim.what.step, dataset });
            }
            match claim.what.stage {
                Stage::Evaluate { .. } => self.evaluation.add(&measured, claim.terms),
                _ => self.loss += claim.work.weight * f64::from(loss),
            }
        }
        Ok(match claim.what.stage {
            Stage::Train { microbatch } if self.ends_minibatch(claim, microbatch) => {
                self.end_minibatch(claim, time)
            }
            Stage::Evaluate { kind, batch } if claim.work.last => {
                let batches = self.cursor.program().batches(kind);
                match batch + 1 == batches {
                    true => self.end_evaluation(kind, claim.what.step),
                    false => {
                        let units = self.task.evaluation_batch() * self.units_per_item();
                        Progress::Evaluating { kind, batch, batches, units }
                    }
                }
            }
            _ => Progress::Nothing,
        })
    }

    fn ends_minibatch(&self, claim: &Claim, microbatch: usize) -> bool {
        let program = self.cursor.program();
        claim.what.kind == ShardTaskKind::Backward
            && claim.what.shard == program.first_trained
            && microbatch + 1 == program.microbatches_of(claim.what.step)
    }

    fn end_minibatch(&mut self, claim: &Claim, time: Time) -> Progress {
        let loss = std::mem::take(&mut self.loss);
        let items = self.sampler.items(claim.what.step).len();
        let per_item = self.units_per_item();
        let units = items * per_item;
        self.results.losses.push(loss);
        self.results.units += units as u64;
        // What the next shard task waits for is the optimizer's; after the last one nothing waits.
        let next = self.cursor.peek().filter(|_| self.claimed.is_none());
        let waits = next.is_some_and(|next| !self.masters_final(&next));
        self.minibatch_done_s = waits.then_some(time.end_s);
        Progress::Minibatch { step: claim.what.step, loss, units }
    }

    fn units_per_item(&self) -> usize {
        self.batches.first().map_or(1, |batch| batch.units / batch.items.max(1))
    }

    /// The optimizer has stepped an image.
    pub(crate) fn stepped(&mut self, image: usize, step: usize, time: Time) {
        self.versions[image] = step + 1;
        self.gradients.stepped(image);
        let Some(done_s) = self.minibatch_done_s else { return };
        self.results.optimizer_stall_s += (time.end_s - time.start_s.max(done_s)).max(0.0);
        if self.cursor.peek().is_none_or(|next| self.masters_final(&next)) {
            self.minibatch_done_s = None;
            self.waits.step_s = (time.end_s - done_s).max(0.0);
        }
    }

    /// Nothing of the task runs or is claimed.
    pub(crate) fn idle(&self) -> bool {
        self.running.is_none() && self.claimed.is_none()
    }

    /// Whether batches are being read ahead. They have memory of their own, and whatever else becomes of the task does not
    /// wait for them.
    pub(crate) fn reads(&self) -> bool {
        self.loading.is_some()
    }

    /// Between two minibatches or evaluation batches, with nothing outstanding: holds no sweep's memory.
    pub(crate) fn at_rest(&self) -> bool {
        self.idle() && self.settled() && (self.cursor.peek().is_none() || self.between_sweeps())
    }

    /// Gives up what a sweep holds.
    pub(crate) fn release(&mut self) {
        self.boundaries.iter_mut().for_each(|slot| *slot = None);
        self.gradient = None;
        self.batches.clear();
        // Of a minibatch that failed there are gradients at the optimizer, until the task has ended.
        if self.ended.is_some() || !self.is_failing() {
            self.active = None;
        }
        if self.ended.is_some() {
            self.loaded = None;
        }
    }
}

fn evaluation_data(task: &TrainTask, kind: EvaluationKind) -> &Arc<dyn Dataset> {
    let data = if kind == EvaluationKind::Test { &task.test } else { &task.validation };
    data.as_ref().unwrap_or(&task.train)
}

fn hands_activation(running: &ShardTask, next: &ShardTask) -> bool {
    running.kind != ShardTaskKind::Backward && running.stage == next.stage && running.shard + 1 == next.shard
}

fn hands_gradient(running: &ShardTask, next: &ShardTask) -> bool {
    running.kind == ShardTaskKind::Backward && running.stage == next.stage && running.shard == next.shard + 1
}
