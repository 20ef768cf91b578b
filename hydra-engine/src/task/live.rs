//! A running task: the shard tasks that it can run next, and the effects of their results.
//!
//! A *shard task* is the unit of scheduling: the forward, backward or evaluation pass of one microbatch through one
//! shard (a range of layers). A *microbatch pass* is the chain of shard tasks that takes one microbatch forward and
//! backward through the model. A *microbatch group* runs several microbatch passes together, shard by shard, so that
//! each promoted shard is used for all of them. A *replica* works on one microbatch group at a time; with several
//! replicas, several devices train one model on different microbatches. The *phase* of a task is its state between
//! submission and end.
//!
//! The life of a shard task: a device claims it ([`LiveTask::claim`]), its parameters are promoted to the device, it
//! computes ([`LiveTask::finished`]), its outputs are downloaded, and the optimizer steps the buffers whose gradients
//! are complete ([`LiveTask::stepped`]).

use super::checkpoint_clock::CheckpointClock;
use super::costs::Costs;
use super::in_flight::{InFlight, Next};
use super::info::TaskInfo;
use super::microbatch_pass::{BatchReader, PassBuffers};
use super::pause::Pause;
use super::pending_gradients::PendingGradientBudget;
use super::phase::Phase;
use super::results::{Ended, Progress, Results};
use super::waits::Waits;
use crate::admission::GradientBytes;
use crate::device::{Adding, ShardWork};
use crate::error::{EngineError, guarded};
use crate::optimizer::MicroStep;
use crate::protocol::{Inputs, Loaded, Output, Reading, Ticket, Time, statistic_of_targets};
use crate::train_task::round_batches;
use hydra_core::{DeviceId, HostTensor, Measured, Pass, TaskId};
use hydra_sched::program::{Cursor, EvaluationKind, MicrobatchPass, RoundBatches, ShardTask, Stage};
use hydra_sched::{CopyUse, ModelIndex, ModelView, ShardTaskKind};
use hydra_spill::Reservation;
use std::sync::Arc;

/// The cost of promoting a byte from the disk, relative to one from host memory: it moves twice.
const DISK_COST: f64 = 2.0;

/// Bytes of the parameters that shard tasks read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ParameterBytes {
    /// Uploaded to the device.
    pub promoted: u64,
    /// Found in the device's parameter cache.
    pub cached: u64,
}

/// A shard task that a device has claimed.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub ticket: Ticket,
    pub task: TaskId,
    pub what: ShardTask,
    /// The replica that works on its microbatch group.
    pub replica: usize,
    pub work: ShardWork,
    pub at: MicroStep,
    /// Loss targets of the microbatch or evaluation batch.
    pub loss_targets: usize,
    /// Tokens (or items) of the microbatch or evaluation batch.
    pub units: usize,
    /// True if its primary input is the output of the previous shard task, which is on the device.
    pub from_handoff: bool,
    pub adding: Adding,
    pub parameters: ParameterBytes,
}

impl Claim {
    /// Returns whether both are of one task and one of its replicas.
    pub(crate) fn same_replica(&self, other: &Self) -> bool {
        (self.task, self.replica) == (other.task, other.replica)
    }
}

/// A request to another thread; the task stays at rest until the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThreadRequest {
    InitialWeights,
    Checkpoint,
    /// Writes the checkpoint that other tasks are forked from.
    Save,
    Restore,
    Write,
}

/// The memory of a task other than its master weights.
pub(crate) struct TaskMemory {
    /// Host memory during a microbatch pass: gradients and boundary activations.
    pub active: Option<Reservation>,
    /// The pending-gradient budget within `active`.
    pub gradients: PendingGradientBudget,
    /// Device memory for pending gradients, if the master weights are resident on the device.
    pub waiting: Option<Reservation>,
    /// Finished shard tasks with a download to host memory that may still be pending.
    pub downloads: usize,
}

/// A task while it runs.
pub(crate) struct LiveTask {
    pub info: Arc<TaskInfo>,
    pub phase: Phase,
    pub request: Option<ThreadRequest>,
    pub cursor: Cursor,
    pub costs: Costs,
    /// Minibatches that each buffer has been stepped for; `usize::MAX` for frozen buffers.
    pub(super) versions: Vec<usize>,
    pub in_flight: InFlight,
    pub microbatch_pass: PassBuffers,
    pub reader: BatchReader,
    pub memory: TaskMemory,
    pub results: Results,
    pub checkpoint: CheckpointClock,
    /// The hash of its frozen parameters, for its checkpoints.
    pub frozen: Option<String>,
    pub waits: Waits,
    pub pause: Pause,
}

impl LiveTask {
    pub(crate) fn new(info: TaskInfo, costs: Costs) -> Self {
        let (chain, spec) = (info.chain(), &info.task.spec);
        let cursor = Cursor::new(info.program());
        let gradients = GradientBytes::of(chain, spec, &info.shards, |buffer| info.is_resident(buffer));
        let (limit, window) = (info.admitted.memory.gradient_bytes, info.admitted.memory.gradient_window);
        let gradients = PendingGradientBudget::new(gradients, limit, window, chain.buffers().len());
        let frozen = |trained: bool| if trained { 0 } else { usize::MAX };
        Self {
            phase: Phase::Waiting,
            request: None,
            costs,
            versions: chain.buffers().iter().map(|buffer| frozen(buffer.trained)).collect(),
            in_flight: InFlight::new(cursor.replicas()),
            microbatch_pass: PassBuffers::new(&info.shards, info.targets_from(), cursor.replicas()),
            reader: BatchReader::new(info.task.train.len(), spec),
            memory: TaskMemory { active: None, gradients, waiting: None, downloads: 0 },
            results: Results::default(),
            // At its first stage there is nothing to save: the initial weights can be computed or read again.
            checkpoint: CheckpointClock::new(&cursor, 0.0, info.admitted.storage.master_bytes),
            frozen: None,
            waits: Waits::default(),
            pause: Pause::of(info.task.control.until, info.task.control.ends),
            cursor,
            info: Arc::new(info),
        }
    }

    pub(crate) fn id(&self) -> TaskId {
        self.info.id
    }

    /// Returns whether it has started and is not over: its master weights are loaded or being loaded.
    pub(crate) fn has_begun(&self) -> bool {
        !self.phase.is_over() && !self.phase.is_waiting()
    }

    /// Estimated seconds of compute that is not claimed yet.
    pub(crate) fn remaining_s(&self) -> f64 {
        self.cursor.remaining_s(&self.costs.now())
    }

    /// The task as policies see it, if its next shard task is `next`.
    pub(crate) fn view(&self, next: &ShardTask) -> ModelView {
        self.view_of(next.shard)
    }

    /// The task as policies see it before it starts.
    pub(crate) fn first_view(&self) -> ModelView {
        self.view_of(0)
    }

    fn view_of(&self, next_shard: usize) -> ModelView {
        ModelView {
            model: ModelIndex(self.id().0),
            remaining_s: self.remaining_s(),
            submitted: self.id().0 as u64,
            next_shard,
            cached: false,
            continues: self.in_flight.computing().next().is_some(),
            ran_on: None,
        }
    }

    /// The value of keeping a copy of a buffer on a device after its shard task, if one of `devices` devices will
    /// read it next. The parameter cache keeps the buffers of the highest value.
    pub(crate) fn copy_worth(&self, buffer: usize, devices: usize) -> f64 {
        // A copy that is about to be stepped becomes stale.
        let final_ = self.versions[buffer] >= self.cursor.step() && !self.phase.is_over();
        let trained = self.info.chain().buffers()[buffer].trained;
        let costs = self.costs.now();
        let reads = |shard: &usize| self.cursor.until_read_s(&costs, *shard, trained);
        let readers = self.info.readers[buffer].iter();
        let next_use_s = readers.filter_map(reads).min_by(f64::total_cmp).filter(|_| final_);
        // A buffer in a file is read from there first.
        let in_file = self.info.lives_on_disk(buffer) || self.info.is_in_place(buffer);
        let cost_per_byte = if in_file { DISK_COST } else { 1.0 };
        CopyUse { next_use_s, cost_per_byte, devices }.worth()
    }

    /// The next shard task, if it only waits for the optimizer and any device may claim it afterwards.
    pub(crate) fn awaited(&self) -> Option<ShardTask> {
        let open = self.has_begun() && !self.in_flight.has_claims();
        let waits = |next: &ShardTask| !self.stops_before(next) && !self.has_final_masters(next);
        self.cursor.peek().filter(|next| open && waits(next))
    }

    /// Returns whether the task ends, pauses or is saved before `next`, its next shard task.
    pub(super) fn stops_before(&self, next: &ShardTask) -> bool {
        let rests = self.phase.ends_at_rest() || self.checkpoint.due;
        rests && self.is_between_passes(next) || self.pauses_before(next)
    }

    /// Estimated time at which the shard that waits for the optimizer is promoted; `None` before the first
    /// measurement.
    pub(crate) fn promoted_s(&self) -> Option<f64> {
        self.waits.promoted_s().filter(|_| self.in_flight.computing().next().is_none())
    }

    /// Estimated seconds to the end of the task if it waits for no other task and has a device for each replica.
    pub(crate) fn alone_s(&self) -> f64 {
        let minibatches = self.cursor.program().steps.saturating_sub(self.cursor.step());
        self.remaining_s() / self.cursor.replicas() as f64 + self.waits.of_minibatches(minibatches)
    }

    /// Returns whether this shard task starts a minibatch or a microbatch group of an evaluation. The task may end
    /// before it if nothing else is in flight.
    fn is_between_passes(&self, next: &ShardTask) -> bool {
        let begins = self.cursor.first_of_next() == Some(*next);
        begins && (self.cursor.at_minibatch_start() || matches!(next.stage, Stage::Evaluate { .. }))
    }

    /// Returns whether an evaluation in flight may end the training early.
    pub(super) fn awaits_verdict(&self) -> bool {
        let periodic = EvaluationKind::Periodic;
        let evaluates =
            |task: &ShardTask| matches!(task.stage, Stage::Evaluate { kind, .. } if kind == periodic);
        let may_end = self.info.task.spec.patience.is_some() && self.in_flight.has(evaluates);
        may_end && self.cursor.at_minibatch_start()
    }

    /// Returns whether the loss of `next` waits for the statistic of its minibatch.
    pub(super) fn awaits_statistic(&self, next: &ShardTask) -> bool {
        let measures = self.cursor.program().measured_of(next.step) > 0;
        measures && matches!(next.stage, Stage::Train { .. }) && self.microbatch_pass.statistic.is_none()
    }

    pub(super) fn has_final_masters(&self, next: &ShardTask) -> bool {
        self.info.buffers[next.shard].iter().all(|buffer| self.versions[*buffer] >= next.step)
    }

    /// Returns whether every trained buffer has been stepped for every trained minibatch.
    pub(crate) fn is_settled(&self) -> bool {
        self.versions.iter().all(|version| *version >= self.cursor.step())
    }

    pub(super) fn lacks_pending_gradient_space(&self, next: &ShardTask) -> bool {
        let backward = next.kind == ShardTaskKind::Backward;
        backward && !self.memory.gradients.has_space(next.shard, next.stage.microbatch_pass())
    }

    /// Returns whether a next shard task waits until the optimizer has accumulated or released gradients.
    pub(crate) fn awaits_steps(&self) -> bool {
        let nexts = (0..self.cursor.replicas()).filter_map(|replica| self.cursor.peek_in(replica));
        nexts.into_iter().any(|next| self.lacks_pending_gradient_space(&next))
    }

    /// Claims `next` for `device`: advances the cursor and returns the claim with its inputs on the host. `sums_wait`
    /// is true if the device holds the accumulated gradients of the previous microbatch, so that this one can add to
    /// them.
    ///
    /// # Errors
    /// Data that cannot be read.
    pub(crate) fn claim(
        &mut self,
        ticket: Ticket,
        device: DeviceId,
        Next { replica, what: next }: Next,
        sums_wait: bool,
    ) -> Result<(Claim, Inputs<HostTensor>), EngineError> {
        if !self.cursor.is_in_group(replica) {
            self.begin_group(replica, &next)?;
        }
        let (inputs, from_handoff) = self.microbatch_pass.inputs(replica, &next);
        assert!(!from_handoff || self.in_flight.replica_on(device) == Some(replica));
        let (batch, total) = self.microbatch_pass.batch(replica, &next);
        let (loss_targets, units) = (batch.loss_targets, batch.units);
        let weight = loss_targets as f64 / total.max(1) as f64;
        let microbatch = match next.stage {
            Stage::Train { microbatch } => microbatch,
            _ => 0,
        };
        let program = self.cursor.program();
        let at = MicroStep { step: next.step, microbatch, of: program.microbatches.of(next.step) };
        let work = ShardWork {
            layers: self.info.shards[next.shard].clone(),
            kind: next.kind,
            last: next.shard + 1 == self.info.shards.len(),
            input_gradients: next.kind == ShardTaskKind::Backward && next.shard > program.first_trained,
            weight,
            statistic: self.microbatch_pass.statistic.filter(|_| matches!(next.stage, Stage::Train { .. })),
            key: Pass::key_of(self.info.task.spec.seed, next.step, microbatch),
            step: next.step,
        };
        if next.kind == ShardTaskKind::Backward {
            self.memory.gradients.claimed(next.shard);
        }
        let adding = self.adding(replica, &next, sums_wait);
        let (task, what, parameters) = (self.id(), next, ParameterBytes::default());
        let claim = Claim {
            ticket,
            task,
            what,
            replica,
            work,
            at,
            loss_targets,
            units,
            from_handoff,
            adding,
            parameters,
        };
        self.cursor.advance(replica);
        self.record_claim(&claim, device);
        Ok((claim, inputs))
    }

    /// Returns whether the next, unclaimed shard task adds its gradients to those of `claim` if it runs on the same
    /// device.
    pub(crate) fn may_add_to(&self, claim: &Claim) -> bool {
        let open =
            !self.phase.is_over() && !self.phase.gave_up() && !matches!(self.phase, Phase::Failing { .. });
        let goes_on =
            open && self.cursor.is_in_group(claim.replica) && !self.in_flight.is_claimed(claim.replica);
        let next = self.cursor.peek_in(claim.replica).filter(|_| goes_on);
        claim.adding != Adding::Nothing && next.is_some_and(|next| claim.what.is_microbatch_before(&next))
    }

    /// The role of a backward shard task in gradient accumulation on its device, which is possible only in a
    /// microbatch group that starts with the minibatch.
    fn adding(&self, replica: usize, next: &ShardTask, sums_wait: bool) -> Adding {
        let microbatch_group = self.cursor.microbatch_group(replica);
        let possible = next.kind == ShardTaskKind::Backward
            && (microbatch_group.start == 0 && microbatch_group.len() > 1)
            && self.info.admitted.memory.accumulation_bytes[next.shard] > 0;
        match next.stage.microbatch_pass() {
            _ if !possible => Adding::Nothing,
            0 => Adding::First,
            _ if sums_wait || self.adds_before(replica, next) => Adding::Next,
            _ => Adding::Nothing,
        }
    }

    fn begin_group(&mut self, replica: usize, next: &ShardTask) -> Result<(), EngineError> {
        self.microbatch_pass.begin(replica, next, self.cursor.next_passes());
        if let Some(loaded) = self.reader.take(MicrobatchPass::of(next)) {
            self.microbatch_pass.read(replica, next.stage, loaded.batches?);
        } else if let Some(reading) = self.reading(next) {
            self.microbatch_pass.read(replica, next.stage, reading.batches()?);
        }
        if next.stage == (Stage::Train { microbatch: 0 }) && self.microbatch_pass.statistic.is_none() {
            let minibatch = self.microbatch_pass.minibatch();
            self.microbatch_pass.statistic = statistic_of_targets(self.info.chain(), minibatch)?;
        }
        Ok(())
    }

    /// The items to read for a microbatch group that starts with `next`; `None` if its batches have been read.
    fn reading(&mut self, next: &ShardTask) -> Option<Reading> {
        let task = &self.info.task;
        let float = task.chain.float_type();
        let (data, parts) = match next.stage {
            stage if stage == self.cursor.program().minibatch_start(next.step) => {
                let items = self.reader.sampler.items(next.step);
                let parts = task.spec.microbatches(&items).into_iter().map(<[usize]>::to_vec).collect();
                (task.train.clone(), parts)
            }
            Stage::Evaluate { kind, rounds, .. } => {
                let data = self.info.evaluation_data(kind, rounds);
                let size = if rounds { 1 } else { task.evaluation_batch() };
                let part = |batch: usize| (batch * size..((batch + 1) * size).min(data.len())).collect();
                let parts = self.cursor.next_passes().map(part).collect();
                (data, parts)
            }
            _ => return None,
        };
        Some(Reading { data, parts, float })
    }

    /// The first shard task of the microbatch group whose batches can be read ahead now.
    pub(crate) fn next_to_read(&mut self) -> Option<ShardTask> {
        if !self.has_begun() || self.phase.ends_at_rest() || self.reader.reads() {
            return None;
        }
        let has_replica = self.cursor.replicas_in_group().len() < self.cursor.replicas();
        let next = self.cursor.first_of_next().filter(|_| has_replica)?;
        // Reading a round begins sequences, whose memory is that of an active task.
        let has_memory = !self.cursor.is_in_rounds() || self.memory.active.is_some();
        let goes_on = has_memory && !self.pauses_before(&next);
        (goes_on && self.reader.is_free_for(MicrobatchPass::of(&next))).then_some(next)
    }

    /// Starts to read ahead; returns the microbatch pass and the items to read.
    pub(crate) fn read_ahead(&mut self, next: &ShardTask) -> Option<(MicrobatchPass, Reading)> {
        let reading = self.reading(next)?;
        self.reader.begin(MicrobatchPass::of(next));
        Some((MicrobatchPass::of(next), reading))
    }

    /// Stores batches that were read ahead, or the error.
    pub(crate) fn loaded(&mut self, loaded: Loaded) {
        self.reader.arrived(loaded, !self.phase.is_over());
    }

    /// Keeps the part of the output of `claim` that is used on the host: nothing if `handed`, unless a later shard
    /// task reads it too.
    pub(crate) fn keep_host_copy<T>(&mut self, claim: &Claim, handed: bool, output: &mut Output<T>) {
        if !self.microbatch_pass.needs_output(claim, handed) {
            *output = Output::None;
        }
        if !matches!(output, Output::None) {
            self.microbatch_pass.expect_output(claim);
        }
    }

    /// Ends a shard task that succeeded: records its loss and returns the progress that it completed.
    ///
    /// # Errors
    /// A loss that is not finite, or an objective without the figures of its metrics.
    pub(crate) fn finished(
        &mut self,
        claim: &Claim,
        measured: Option<Measured>,
        time: Time,
    ) -> Result<Progress, EngineError> {
        self.end_claim(claim);
        self.results.compute_s += time.seconds();
        self.costs.observe(claim.what.kind, claim.what.shard, time.seconds());
        if let Some(measured) = measured {
            self.add_loss(claim, measured)?;
        }
        Ok(match claim.what.stage {
            Stage::Measure { .. } if claim.work.last => self.end_measured(claim)?,
            Stage::Train { .. } if self.ends_minibatch(claim) => self.end_minibatch(claim, time),
            Stage::Evaluate { kind, rounds: true, .. } if claim.work.last => self.end_round(kind, claim)?,
            Stage::Evaluate { kind, batch, .. } if claim.work.last => self.end_batch(kind, batch, claim)?,
            _ => Progress::Nothing,
        })
    }

    /// Adds the loss of a microbatch or evaluation batch as soon as the losses before it are known.
    fn add_loss(&mut self, claim: &Claim, measured: Measured) -> Result<(), EngineError> {
        let (stage, step) = (claim.what.stage, claim.what.step);
        let Claim { loss_targets, units, .. } = *claim;
        let ended = Ended { measured, weight: claim.work.weight, loss_targets, units };
        match stage {
            Stage::Evaluate { kind, .. } if self.cursor.program().shares(kind) => {
                let batch = self.checked(stage, step, ended)?;
                self.results.underway.batch.add(&batch.measured, batch.loss_targets)?;
                return Ok(());
            }
            _ => self.results.underway.ended(stage.microbatch_pass(), ended),
        }
        while let Some(next) = self.results.underway.next() {
            let next = match stage {
                // Nothing is trained with this loss.
                Stage::Measure { .. } => next,
                _ => self.checked(stage, step, next)?,
            };
            match stage {
                Stage::Evaluate { rounds: true, .. } => {
                    self.results.underway.round.extend(next.measured.rows)
                }
                Stage::Evaluate { .. } | Stage::Measure { .. } => {
                    self.results.underway.evaluation.add(&next.measured, next.loss_targets)?;
                }
                _ => self.results.underway.add_to_minibatch(&next),
            }
        }
        if let Stage::Evaluate { kind, rounds: false, .. } = stage
            && self.cursor.is_evaluating(kind, step)
        {
            self.cursor.know_batches(self.results.underway.known);
        }
        Ok(())
    }

    /// Returns the measurement unless its loss is not finite.
    fn checked(&self, stage: Stage, step: usize, ended: Ended) -> Result<Ended, EngineError> {
        let loss = ended.measured.loss;
        let dataset = match stage {
            Stage::Evaluate { kind, rounds, .. } => {
                Some(self.info.evaluation_data(kind, rounds).name().to_owned())
            }
            _ => None,
        };
        if loss.is_finite() { Ok(ended) } else { Err(EngineError::BadLoss { loss, step, dataset }) }
    }

    /// Returns whether this was the last shard task of its minibatch.
    fn ends_minibatch(&mut self, claim: &Claim) -> bool {
        let program = self.cursor.program();
        if claim.what.kind != ShardTaskKind::Backward || claim.what.shard != program.first_trained {
            return false;
        }
        self.results.underway.passes_done += 1;
        self.results.underway.passes_done == program.microbatches.of(claim.what.step)
    }

    /// Computes the objective's statistic with the last microbatch that is measured.
    fn end_measured(&mut self, claim: &Claim) -> Result<Progress, EngineError> {
        if self.results.underway.known == self.cursor.program().measured_of(claim.what.step) {
            let statistic = self.results.underway.end_evaluation().statistic(self.info.chain())?;
            self.microbatch_pass.statistic = Some(statistic);
        }
        Ok(Progress::Nothing)
    }

    fn end_minibatch(&mut self, claim: &Claim, time: Time) -> Progress {
        let (step, (loss, units)) = (claim.what.step, self.results.end_minibatch());
        // Only the wait for the optimizer counts.
        let next = self.cursor.peek().filter(|_| !self.in_flight.has_claims());
        let waits = next.is_some_and(|next| !self.has_final_masters(&next));
        self.waits.begin(waits, time.end_s);
        Progress::Minibatch { step, loss, units }
    }

    fn end_batch(
        &mut self,
        kind: EvaluationKind,
        batch: usize,
        claim: &Claim,
    ) -> Result<Progress, EngineError> {
        let (batches, units) = (self.cursor.program().batches(kind, claim.what.step), claim.units);
        if self.cursor.program().shares(kind) {
            let sums = std::mem::take(&mut self.results.underway.batch);
            return Ok(Progress::SharedBatch { batch, sums, units });
        }
        if self.results.underway.known < batches {
            let batch = self.results.underway.computed() - 1;
            return Ok(Progress::Evaluating { kind, batch, batches, units });
        }
        if self.cursor.program().has_rounds(kind) {
            self.results.underway.known = 0;
            self.cursor.next_round(self.cursor.program().first_round());
            return Ok(Progress::Evaluating { kind, batch: batches - 1, batches, units });
        }
        self.end_evaluation(kind, claim.what.step)
    }

    /// Ends a batch of a round, and the round with its last one. Its results decide whether there is another one.
    fn end_round(&mut self, kind: EvaluationKind, claim: &Claim) -> Result<Progress, EngineError> {
        let is_over = self.results.underway.known == self.cursor.round();
        let Some(of) = self.info.task.rounds.clone().filter(|_| is_over) else {
            return Ok(Progress::Nothing);
        };
        self.results.underway.known = 0;
        let rows = std::mem::take(&mut self.results.underway.round);
        let data = of.data;
        let round = guarded("the data of an evaluation in rounds", || {
            let goes_on = data.next_round(&rows)?;
            Ok(if goes_on { round_batches(data.as_ref()) } else { RoundBatches::default() })
        })?;
        self.cursor.next_round(round);
        if round.here > 0 { Ok(Progress::Nothing) } else { self.end_evaluation(kind, claim.what.step) }
    }

    /// Records the result of an evaluation.
    fn end_evaluation(&mut self, kind: EvaluationKind, step: usize) -> Result<Progress, EngineError> {
        let task = &self.info.task;
        let mut result = self.results.underway.end_evaluation().mean(&task.chain, &task.spec)?;
        if let Some(of) = task.rounds.as_ref().filter(|_| self.cursor.program().has_rounds(kind)) {
            let of_rounds = || Ok((of.data.metrics(), of.data.report()));
            let (metrics, report) = guarded("the results of an evaluation in rounds", of_rounds)?;
            result.metrics.extend(metrics.into_iter().map(|(metric, value)| (metric.name, value)));
            result.rounds = report;
            result.selected_by = task.spec.metric.as_ref().and_then(|name| task.metric(name).ok());
        }
        let best = self.results.note(kind, step, &result);
        let patience = self.info.task.spec.patience;
        if kind == EvaluationKind::Periodic
            && self.cursor.at_minibatch_start()
            && self.results.exhaust(patience)
        {
            self.cursor.stop(true);
        }
        Ok(Progress::Evaluated { kind, step, result, best })
    }

    /// Records that the optimizer has stepped a buffer.
    pub(crate) fn stepped(&mut self, buffer: usize, step: usize, time: Time) {
        self.versions[buffer] = step + 1;
        self.memory.gradients.stepped(buffer);
        let over = self.cursor.peek().is_none_or(|next| self.has_final_masters(&next));
        self.results.optimizer_stall_s += self.waits.step(time, over);
    }

    /// Records that the optimizer has accumulated `microbatches` microbatches of a buffer's gradient.
    pub(crate) fn added(&mut self, buffer: usize, microbatches: usize) {
        self.memory.gradients.added(buffer, microbatches);
    }

    /// Returns whether the task is between two minibatches or evaluation batches with nothing in flight, so that it
    /// holds no memory of a microbatch pass.
    pub(super) fn is_at_rest(&self) -> bool {
        self.in_flight.is_idle()
            && self.is_settled()
            && self.cursor.peek().is_none_or(|next| self.is_between_passes(&next))
    }

    /// Returns whether early stopping ended the task, or will.
    pub(crate) fn stopped_early(&self) -> bool {
        let shorter = self.results.losses.len() < self.cursor.program().steps;
        let patience = self.info.task.spec.patience;
        self.phase.failure().is_none() && shorter && self.results.exhaust(patience)
    }
}
