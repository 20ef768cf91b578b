//! The event loop: one thread that hears what happened and decides what happens next.

use crate::clock::{Clock, Time};
use crate::cursor::{ShardTask, Stage};
use crate::error::EngineError;
use crate::event::{Computed, Event, Output, Ticket, Written};
use crate::host::HostJob;
use crate::model::{Claim, HostInputs, Model, Progress};
use crate::observer::{Observer, RunEvent, Span, Track, Work};
use crate::orchestrator::Setup;
use crate::report::{DeviceReport, REPORT_SCHEMA, RunReport, TaskReport, TaskState, Transfers};
use crate::stop::StopFlag;
use crate::threads::Threads;
use crate::weights::initial_image;
use crate::worker::{ComputeJob, PromoteJob, TakeDownJob};
use crate::writer::WriteJob;
use crossbeam_channel::{Receiver, RecvTimeoutError, unbounded};
use hydra_core::{DeviceId, TaskId};
use hydra_sched::{CostModel, ModelIndex, ModelView, Policy, ShardTaskKind, View};
use hydra_spill::{Budget, ImageId, Masters, Reservation, TierStore};
use rayon::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often the loop looks at the stop flag while nothing happens.
const TICK: Duration = Duration::from_millis(50);

/// A claim that is being promoted, or waits in the double buffer for the one before it.
struct Next {
    claim: Claim,
    /// Tells the compute worker that the task has failed.
    abandoned: Arc<AtomicBool>,
}

#[derive(Default)]
struct DeviceState {
    active: Option<Claim>,
    next: Option<Next>,
    compute_s: f64,
    copy_s: f64,
    stall_s: f64,
    shard_tasks: u64,
}

struct Run {
    models: Vec<Model>,
    devices: Vec<DeviceState>,
    threads: Threads,
    store: Arc<dyn TierStore>,
    host_budget: Budget,
    host_admitted: u64,
    active_bytes: Vec<u64>,
    policy: Box<dyn Policy>,
    prefetch: bool,
    stop: StopFlag,
    stopping: bool,
    observer: Box<dyn Observer>,
    clock: Clock,
    tickets: Ticket,
    decisions: u64,
    first_start_s: Option<f64>,
    last_end_s: f64,
}

/// Trains the admitted tasks.
pub(crate) fn run(setup: Setup) -> Result<RunReport, EngineError> {
    let (events, inbox) = unbounded();
    let clock = Clock::start();
    let mut run = Run::start(setup, events, clock)?;
    run.work(&inbox);
    let report = run.report();
    run.threads.join();
    Ok(report)
}

impl Run {
    fn start(
        setup: Setup,
        events: crossbeam_channel::Sender<Event>,
        clock: Clock,
    ) -> Result<Self, EngineError> {
        let Setup { admitted, tasks, host_memory, policy, prefetch, seed, stop, mut observer } = setup;
        observer.observe(&RunEvent::Admitted(&admitted.admission));
        let host_budget = Budget::new("host memory", host_memory);
        let mut models = Vec::new();
        for (i, (task, plan)) in tasks.into_iter().zip(&admitted.admission.tasks).enumerate() {
            let plan = plan.plan.clone();
            let forward: Vec<f64> = plan.shards.iter().map(|s| s.forward_s).collect();
            let backward = plan.shards.iter().map(|s| s.backward_s).collect();
            let costs = CostModel::new(forward.clone(), backward, forward)?;
            models.push(Model::new(TaskId(i), task, plan, costs));
        }
        for device in &admitted.devices {
            device.probe.reset_peak(device.measured_as());
        }
        let threads = Threads::start(admitted.devices, &admitted.store, &events, clock)?;
        let mut run = Self {
            devices: threads.devices.iter().map(|_| DeviceState::default()).collect(),
            active_bytes: admitted.admission.tasks.iter().map(|t| t.active_bytes).collect(),
            host_admitted: admitted.admission.host_admitted_bytes,
            policy: policy.build(seed),
            store: admitted.store,
            models,
            threads,
            host_budget,
            prefetch,
            stop,
            stopping: false,
            observer,
            clock,
            tickets: 0,
            decisions: 0,
            first_start_s: None,
            last_end_s: 0.0,
        };
        run.fill_store();
        Ok(run)
    }

    /// Puts every task's first masters into the store. A task whose weights cannot be read fails.
    fn fill_store(&mut self) {
        for index in 0..self.models.len() {
            let model = &self.models[index];
            let images: Result<Vec<Vec<f32>>, _> = (0..model.chain().images().len())
                .into_par_iter()
                .map(|image| initial_image(model.chain(), image, model.task.spec.seed))
                .collect();
            let inserted = images.map_err(EngineError::from).and_then(|images| {
                images
                    .into_iter()
                    .enumerate()
                    .try_for_each(|(image, params)| self.insert(index, image, params))
            });
            let model = &self.models[index];
            let job = HostJob::Register {
                task: model.id,
                chain: model.chain().clone(),
                spec: model.task.spec.clone(),
                steps: model.cursor.program().steps,
            };
            let _ = self.threads.host.send(job);
            if let Err(error) = inserted {
                self.fail(index, &error);
            }
        }
    }

    fn insert(&self, index: usize, image: usize, params: Vec<f32>) -> Result<(), EngineError> {
        let model = &self.models[index];
        let layout = &model.chain().images()[image];
        let moments = if layout.trained { model.task.spec.optimizer.moments() } else { 0 };
        let bytes = layout.bytes() * (1 + moments as u64);
        let reservation =
            self.host_budget.reserve(bytes, &model.task.name).map_err(hydra_spill::SpillError::from)?;
        let moments = vec![vec![0.0; params.len()]; moments];
        self.store.insert(ImageId { task: model.id, image }, Masters { params, moments }, reservation)?;
        Ok(())
    }

    fn work(&mut self, inbox: &Receiver<Event>) {
        while self.models.iter().any(|model| model.ended.is_none()) {
            self.check_stop();
            (0..self.models.len()).for_each(|index| self.settle(index));
            (0..self.devices.len()).for_each(|device| self.fill(device));
            match inbox.recv_timeout(TICK) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            while let Ok(event) = inbox.try_recv() {
                self.handle(event);
            }
        }
        // Claims of failed tasks may still be under way; their events must not outlive the loop's bookkeeping.
        while self.devices.iter().any(|d| d.active.is_some() || d.next.is_some()) {
            match inbox.recv_timeout(TICK) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn check_stop(&mut self) {
        if self.stopping || !self.stop.is_stopped() {
            return;
        }
        self.stopping = true;
        self.models.iter_mut().for_each(|model| model.stopping = true);
        self.observer.observe(&RunEvent::Stopping);
    }

    /// Moves a task on that waits for no shard task: releases what a finished sweep held, ends training
    /// when the run is stopping, and asks the host to restore or write.
    fn settle(&mut self, index: usize) {
        let model = &mut self.models[index];
        if model.ended.is_some() || !model.at_rest() {
            return;
        }
        if model.active.is_some() {
            model.release();
        }
        let training = !matches!(model.cursor.stage(), Stage::Restore | Stage::Write | Stage::Finished);
        if model.stopping && training {
            model.cursor.stop(model.results.best.is_some());
        }
        if model.asked {
            return;
        }
        match model.cursor.stage() {
            Stage::Restore => {
                model.asked = true;
                let _ = self.threads.host.send(HostJob::Restore { task: model.id });
            }
            Stage::Write => {
                model.asked = true;
                let chain = model.chain().clone();
                let job = WriteJob { task: model.id, chain, output: model.task.output.clone() };
                let _ = self.threads.writer.send(job);
            }
            _ => {}
        }
    }

    /// Claims what a device runs next, as soon as there is room for it in the double buffer.
    fn fill(&mut self, device: usize) {
        let state = &self.devices[device];
        if state.next.is_none() && (self.prefetch || state.active.is_none()) {
            self.claim(device);
        }
    }

    /// Claims a shard task for the device, if one can be, and sends it to the workers.
    fn claim(&mut self, device: usize) {
        let views: Vec<ModelView> = self.models.iter().filter_map(|m| self.view(m, device)).collect();
        let view = View { device, devices: self.devices.len(), decision: self.decisions, claimable: &views };
        let Some(ModelIndex(index)) = self.policy.choose(&view) else { return };
        let Some(next) = self.models[index].claimable(DeviceId(device), self.prefetch) else { return };
        if !self.activate(index) {
            return;
        }
        if let Err(error) = self.begin_claim(index, device, next) {
            self.fail(index, &error);
        }
    }

    fn view(&self, model: &Model, device: usize) -> Option<ModelView> {
        let next = model.claimable(DeviceId(device), self.prefetch)?;
        if model.active.is_none() && self.host_budget.available() < self.active_bytes[model.id.0] {
            return None;
        }
        Some(ModelView {
            model: ModelIndex(model.id.0),
            remaining_s: model.remaining_s(),
            submitted: model.id.0 as u64,
            next_shard: next.shard,
            resident: false,
            continues: model.running.is_some(),
        })
    }

    /// Reserves the host memory of a model within a sweep; whether it has it.
    fn activate(&mut self, index: usize) -> bool {
        let model = &mut self.models[index];
        if model.active.is_none() {
            model.active = self.host_budget.try_reserve(self.active_bytes[index], &model.task.name);
        }
        model.active.is_some()
    }

    /// Does nothing if device memory for the promotion is not there yet.
    fn begin_claim(&mut self, index: usize, device: usize, next: ShardTask) -> Result<(), EngineError> {
        let threads = &self.threads.devices[device];
        let model = &mut self.models[index];
        let shard = &model.plan.shards[next.shard];
        let budget = threads.device.manager.budget();
        // The parameters first: the rules leave room for them beside any shard that computes.
        let Some(mut reservation) = budget.try_reserve(shard.param_bytes, &model.task.name) else {
            return Ok(());
        };
        let ticket = self.tickets;
        let (claim, inputs) = model.claim(ticket, DeviceId(device), next)?;
        self.tickets += 1;
        self.decisions += 1;
        let (inputs, late) = match budget.try_reserve(inputs.bytes(), &model.task.name) {
            Some(more) => {
                reservation.merge(more);
                (inputs, HostInputs::default())
            }
            None => (HostInputs::default(), inputs),
        };
        let fill = threads.buffer.begin_fill(ticket).map_err(hydra_spill::SpillError::from)?;
        let abandoned = Arc::new(AtomicBool::new(false));
        let compute = ComputeJob {
            ticket,
            chain: model.chain().clone(),
            work: claim.work.clone(),
            follows: claim.from_handoff,
            late,
            rest: need_bytes(&model.plan, next.shard, next.kind).saturating_sub(reservation.bytes()),
            abandoned: abandoned.clone(),
        };
        let images = model.images_of_shard(next.shard).to_vec();
        let promote = PromoteJob { ticket, task: model.id, fill, images, inputs, reservation };
        // A worker's channel closes only with the run.
        let _ = threads.promote.send(promote);
        let _ = threads.compute.send(compute);
        self.devices[device].next = Some(Next { claim, abandoned });
        Ok(())
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Promoted { device, ticket, time, failure } => self.promoted(device, ticket, time, failure),
            Event::Started { device, ticket } => self.started(device, ticket),
            Event::ShardDone { device, ticket, time, stalled_s, result } => {
                self.shard_done(device, ticket, (time, stalled_s), result);
            }
            Event::OutputDown { device, task, ticket, time, result } => {
                self.copied(device, task, Work::TakeDown, ticket, time);
                match result {
                    Ok(output) => self.models[task.0].output_arrived(ticket, output),
                    Err(error) => self.fail(task.0, &error),
                }
            }
            Event::GradientsDown { device, task, ticket, time, failure } => {
                self.copied(device, task, Work::TakeDown, ticket, time);
                if let Some(error) = failure {
                    self.fail(task.0, &error);
                }
            }
            Event::Stepped { task, image, step, time } => {
                self.models[task.0].stepped(image, step, time);
                self.span(Track::Optimizer, task, Work::Step, image, step, time);
            }
            Event::HostFailed { task, error } => self.fail(task.0, &error),
            Event::Restored { task } => {
                let model = &mut self.models[task.0];
                model.asked = false;
                model.cursor.waited(model.stopping);
            }
            Event::Written { task, result } => self.written(task.0, result),
        }
    }

    /// The compute worker, which waits for the promotion, hears of a failure too and ends the claim.
    fn promoted(&mut self, device: DeviceId, ticket: Ticket, time: Time, failure: Option<EngineError>) {
        let state = &self.devices[device.0];
        let mut claims = state.next.iter().map(|next| &next.claim).chain(&state.active);
        let Some(task) = claims.find(|claim| claim.ticket == ticket).map(|claim| claim.task) else { return };
        self.copied(device, task, Work::Promote, ticket, time);
        if let Some(error) = failure {
            self.fail(task.0, &error);
        }
    }

    fn started(&mut self, device: DeviceId, ticket: Ticket) {
        let state = &mut self.devices[device.0];
        let Some(next) = state.next.take_if(|next| next.claim.ticket == ticket) else { return };
        self.models[next.claim.task.0].started(&next.claim, device);
        state.active = Some(next.claim);
    }

    fn copied(&mut self, device: DeviceId, task: TaskId, work: Work, _ticket: Ticket, time: Time) {
        self.devices[device.0].copy_s += time.seconds();
        let model = &self.models[task.0];
        self.span(Track::Copy(device), task, work, 0, model.cursor.step(), time);
    }

    fn span(&mut self, track: Track, task: TaskId, work: Work, shard: usize, step: usize, time: Time) {
        let span = Span { track, task, work, shard, step, start_s: time.start_s, end_s: time.end_s };
        self.observer.observe(&RunEvent::Span(span));
    }

    fn shard_done(
        &mut self,
        device: DeviceId,
        ticket: Ticket,
        (time, stalled_s): (Time, f64),
        result: Result<Option<(Computed, Reservation)>, EngineError>,
    ) {
        let state = &mut self.devices[device.0];
        // A claim that could not start has ended in the double buffer.
        let ended = state.active.take_if(|claim| claim.ticket == ticket);
        let ended = ended.or_else(|| state.next.take_if(|n| n.claim.ticket == ticket).map(|n| n.claim));
        let Some(claim) = ended else { return };
        let (made, mut reservation) = match result {
            Ok(Some(made)) => made,
            Ok(None) => return,
            Err(error) => return self.fail(claim.task.0, &error),
        };
        state.compute_s += time.seconds();
        state.stall_s += stalled_s;
        state.shard_tasks += 1;
        self.first_start_s.get_or_insert(time.start_s);
        self.last_end_s = self.last_end_s.max(time.end_s);
        let work = match claim.what.kind {
            ShardTaskKind::Forward => Work::Forward,
            ShardTaskKind::Backward => Work::Backward,
            ShardTaskKind::Evaluate => Work::Evaluate,
        };
        self.span(Track::Compute(device), claim.task, work, claim.what.shard, claim.what.step, time);
        if self.models[claim.task.0].ended.is_some() {
            return;
        }
        let made = self.hand_over(device, &claim, made);
        reservation.shrink_to(made.bytes());
        let model = &mut self.models[claim.task.0];
        let progress = model.finished(&claim, made.loss, time);
        let job = TakeDownJob {
            ticket,
            task: claim.task,
            chain: model.chain().clone(),
            at: claim.at,
            made,
            reservation,
        };
        match progress {
            Ok(progress) => {
                let _ = self.threads.devices[device.0].take_down.send(job);
                self.tell(claim.task, progress, time);
            }
            Err(error) => self.fail(claim.task.0, &error),
        }
    }

    /// Keeps of the output what is needed on the host: nothing if the shard task that follows on the same
    /// device takes it there and no other will.
    fn hand_over(&mut self, device: DeviceId, claim: &Claim, mut made: Computed) -> Computed {
        let next = self.devices[device.0].next.as_ref().map(|next| &next.claim);
        let handed = next.is_some_and(|next| next.task == claim.task && next.from_handoff);
        let model = &mut self.models[claim.task.0];
        if !model.needs_output(claim, handed) {
            made.output = Output::None;
        }
        if !matches!(made.output, Output::None) {
            model.expect_output(claim);
        }
        made
    }

    fn tell(&mut self, task: TaskId, progress: Progress, time: Time) {
        let at_s = time.end_s;
        let model = &self.models[task.0];
        match progress {
            Progress::Nothing => {}
            Progress::Minibatch { step, loss, units } => {
                let steps = model.cursor.program().steps;
                let rate = model.task.spec.rate(step, steps);
                self.observer.observe(&RunEvent::Minibatch { task, step, steps, loss, rate, units, at_s });
            }
            Progress::Evaluated { kind, step, result, best } => {
                if best {
                    let _ = self.threads.host.send(HostJob::Snapshot { task });
                }
                self.observer.observe(&RunEvent::Evaluated { task, kind, step, result, at_s });
            }
        }
    }

    fn written(&mut self, index: usize, result: Result<Written, EngineError>) {
        if self.models[index].ended.is_some() {
            return;
        }
        match result {
            Ok(written) => {
                let model = &mut self.models[index];
                model.results.sha256 = Some(written.sha256);
                model.results.dir = written.dir;
                model.cursor.waited(false);
                let early = model.stopping && model.results.losses.len() < model.cursor.program().steps;
                let unfinished = early || model.stopping && model.missing_evaluation();
                let state = if unfinished { TaskState::Stopped } else { TaskState::Done };
                self.end(index, state);
            }
            Err(error) => self.fail(index, &error),
        }
    }

    /// Sets a task aside; the run goes on.
    fn fail(&mut self, index: usize, error: &EngineError) {
        if self.models[index].ended.is_some() {
            return;
        }
        let model = &mut self.models[index];
        model.results.error = Some(with_causes(error));
        for next in self.devices.iter().flat_map(|state| &state.next).filter(|n| n.claim.task == model.id) {
            next.abandoned.store(true, Ordering::Relaxed);
        }
        self.end(index, TaskState::Failed);
    }

    fn end(&mut self, index: usize, state: TaskState) {
        let model = &mut self.models[index];
        model.ended = Some(state);
        model.release();
        let task = model.id;
        let _ = self.threads.host.send(HostJob::Forget { task });
        for image in 0..model.chain().images().len() {
            // A failed task's image may be out for writing; its memory is then released with the run.
            let _ = self.store.remove(ImageId { task, image });
        }
        let error = self.models[index].results.error.clone();
        let at_s = self.clock.now();
        self.observer.observe(&RunEvent::Ended { task, state, error: error.as_deref(), at_s });
    }

    fn report(&self) -> RunReport {
        let makespan_s = (self.last_end_s - self.first_start_s.unwrap_or(self.last_end_s)).max(0.0);
        let devices: Vec<DeviceReport> =
            (0..self.devices.len()).map(|device| self.device_report(device, makespan_s)).collect();
        let compute: f64 = devices.iter().map(|d| d.compute_s).sum();
        let chain_s = |m: &Model| m.results.compute_s + m.results.optimizer_stall_s;
        let longest = self.models.iter().map(chain_s).fold(0.0, f64::max);
        let units: u64 = self.models.iter().map(|m| m.results.units).sum();
        let managers = || self.threads.devices.iter().map(|d| &d.device.manager);
        RunReport {
            schema: REPORT_SCHEMA,
            makespan_s,
            lower_bound_s: longest.max(compute / devices.len().max(1) as f64),
            tokens_per_s: if makespan_s > 0.0 { units as f64 / makespan_s } else { 0.0 },
            policy: self.policy.name().to_owned(),
            prefetch: self.prefetch,
            tasks: self.models.iter().map(task_report).collect(),
            devices,
            transfers: Transfers {
                promoted_bytes: managers().map(|m| m.promoted_bytes()).sum(),
                demoted_bytes: managers().map(|m| m.demoted_bytes()).sum(),
            },
            host_admitted_bytes: self.host_admitted,
            host_budget_bytes: self.host_budget.capacity(),
        }
    }

    fn device_report(&self, index: usize, makespan_s: f64) -> DeviceReport {
        let state = &self.devices[index];
        let device = &self.threads.devices[index].device;
        let measured = device.probe.measures();
        let budget = device.manager.budget();
        DeviceReport {
            name: device.spec.name.clone(),
            threads: device.spec.threads,
            budget_bytes: budget.capacity(),
            peak_bytes: if measured { device.probe.peak(device.measured_as()) } else { budget.peak() },
            peak_measured: measured,
            compute_s: state.compute_s,
            copy_s: state.copy_s,
            stall_s: state.stall_s,
            utilization: if makespan_s > 0.0 { state.compute_s / makespan_s } else { 0.0 },
            shard_tasks: state.shard_tasks,
        }
    }
}

fn task_report(model: &Model) -> TaskReport {
    let results = &model.results;
    TaskReport {
        name: model.task.name.clone(),
        config: model.task.config.clone(),
        state: model.ended.unwrap_or(TaskState::Failed),
        error: results.error.clone(),
        shards: model.shards.len(),
        cut_points: model.plan.cut_points.clone(),
        steps: results.losses.len(),
        losses: results.losses.clone(),
        initial_validation: results.initial,
        validation: results.validation,
        test: results.test,
        evaluations: results.periodic.clone(),
        best_step: results.best.map(|(step, _)| step),
        weights_sha256: results.sha256.clone(),
        model_dir: results.dir.clone(),
        compute_s: results.compute_s,
        optimizer_stall_s: results.optimizer_stall_s,
        parameters: model.chain().parameters(),
    }
}

/// Device bytes of a shard task. A forward makes no gradients.
fn need_bytes(plan: &hydra_partition::PartitionPlan, shard: usize, kind: ShardTaskKind) -> u64 {
    let shard = &plan.shards[shard];
    let need = shard.need_bytes.max(shard.verified_bytes.unwrap_or(0));
    match kind {
        ShardTaskKind::Backward => need,
        ShardTaskKind::Forward | ShardTaskKind::Evaluate => need.saturating_sub(shard.gradient_bytes),
    }
}

/// An error and its causes in one line.
fn with_causes(error: &EngineError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
