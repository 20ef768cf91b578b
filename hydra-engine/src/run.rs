//! The event loop: one thread that hears what happened and decides what happens next.

use crate::checkpoint::{CheckpointEvery, Identity};
use crate::clock::{Clock, Time};
use crate::cursor::Stage;
use crate::disk::DiskTier;
use crate::error::{EngineError, guarded, with_causes};
use crate::event::{Event, Made, Output, Reporter, Ticket, Written};
use crate::host::HostJob;
use crate::host_room::HostRoom;
use crate::loader::LoadJob;
use crate::model::{Claim, Model, Progress};
use crate::observer::{EvaluationKind, Observer, RunEvent, Span, Track, Work};
use crate::orchestrator::{Chosen, Setup};
use crate::record::{Recorder, replay_s};
use crate::report::{RunReport, TaskState};
use crate::stop::StopFlag;
use crate::threads::{DeviceThreads, Threads};
use crate::worker::TakeDownJob;
use crate::writer::{WriteJob, WriterJob, WriterStores};
use crossbeam_channel::{Receiver, RecvTimeoutError, unbounded};
use hydra_core::{ByteSize, DeviceId, TaskId};
use hydra_sched::{Policy, PolicyKind, ShardTaskKind};
use hydra_spill::{ImageId, Reservation, SpillError, TierStore};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// How often the loop looks at the stop flag while nothing happens.
const TICK: Duration = Duration::from_millis(50);

/// A claim that is being promoted, or waits in the double buffer for the one before it.
pub(crate) struct Next {
    pub(crate) claim: Claim,
    /// Tells the compute worker that the task has failed.
    pub(crate) abandoned: Arc<AtomicBool>,
}

#[derive(Default)]
pub(crate) struct DeviceState {
    pub(crate) active: Option<Claim>,
    pub(crate) next: Option<Next>,
    /// When its last shard task ended.
    pub(crate) ended_s: Option<f64>,
    /// The task that it computes or computed last, if no other device did since.
    pub(crate) last: Option<TaskId>,
    pub(crate) compute_s: f64,
    pub(crate) copy_s: f64,
    pub(crate) stall_s: f64,
    pub(crate) shard_tasks: u64,
    /// Whether it computes nothing any more.
    pub(crate) lost: bool,
    /// Why a shard task that was claimed for it could not be promoted.
    not_promoted: Option<(Ticket, EngineError)>,
}

pub(crate) struct Run {
    pub(crate) models: Vec<Model>,
    pub(crate) devices: Vec<DeviceState>,
    pub(crate) threads: Threads,
    pub(crate) store: Arc<dyn TierStore>,
    /// What it may use of the host's memory, of which there is `host_memory`.
    pub(crate) host_budget: HostRoom,
    pub(crate) host_memory: ByteSize,
    pub(crate) host_admitted: u64,
    pub(crate) disk: DiskTier,
    /// Host memory in which the disk's masters are used, whoever of its users needs how much.
    _working: Reservation,
    pub(crate) active_bytes: Vec<u64>,
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) policy_name: &'static str,
    /// Whether the policy has held back a device for which something could be claimed.
    pub(crate) held_back: bool,
    /// Of each task that keeps checkpoints.
    pub(crate) identities: Vec<Option<Identity>>,
    pub(crate) every: CheckpointEvery,
    pub(crate) prefetch: bool,
    stop: StopFlag,
    stopping: bool,
    pub(crate) observer: Recorder,
    pub(crate) clock: Clock,
    pub(crate) tickets: Ticket,
    pub(crate) decisions: u64,
    /// What shard tasks made and is on its way down.
    taking_down: usize,
    /// Images of tasks that have ended.
    to_discard: Vec<ImageId>,
    pub(crate) first_start_s: Option<f64>,
    pub(crate) last_end_s: f64,
}

/// Trains the admitted tasks.
pub(crate) fn run(setup: Setup) -> Result<RunReport, EngineError> {
    let (events, inbox) = unbounded();
    let clock = Clock::start();
    let (seed, prefetch) = (setup.seed, setup.prefetch);
    let kind = match &setup.policy {
        Chosen::Kind(kind) => Some(*kind),
        Chosen::Own(_) => None,
    };
    let mut run = Run::start(setup, events, clock)?;
    run.work(&inbox);
    let mut report = run.report();
    report.workload = run.observer.workload();
    let from_the_start = report.tasks.iter().all(|task| task.resumed_at.is_none());
    let comparable = from_the_start && report.all_done() && run.observer.is_as_simulated();
    let whole = report.workload.as_ref().filter(|_| comparable);
    report.replay_s = whole.zip(kind).and_then(|(workload, kind)| replay_s(workload, kind, seed, prefetch));
    let reading = run.models.iter().any(Model::reads);
    run.threads.join(reading);
    Ok(report)
}

impl Run {
    fn start(
        setup: Setup,
        events: crossbeam_channel::Sender<Event>,
        clock: Clock,
    ) -> Result<Self, EngineError> {
        let Setup { admitted, tasks, host_memory, policy, prefetch, every, seed, stop, observer } = setup;
        let mut observer =
            Recorder::new(observer, prefetch, admitted.devices.iter().map(|device| &device.spec));
        observer.observe(&RunEvent::Admitted(&admitted.admission));
        let host_budget = HostRoom::new(&admitted.admission);
        let disk = admitted.disk.ok_or(EngineError::NoTask)?;
        let working = host_budget.reserve(disk.working.capacity() + disk.writing, disk.working.name());
        let working = working.map_err(SpillError::from)?;
        let mut models = Vec::new();
        for (i, (task, needs)) in tasks.into_iter().zip(&admitted.admission.tasks).enumerate() {
            let mut model = Model::new(TaskId(i), task, needs)?;
            model.resume(&mut observer, clock.now());
            models.push(model);
        }
        // What the pilot passes left in a device's pools makes room for what stays there and for promotions.
        admitted.devices.iter().for_each(|device| device.probe.reset_peak(device.measured_as()));
        let (disk_store, room) = (disk.store.clone(), disk.writing);
        let stores = WriterStores { device_home: admitted.device_home, disk: disk_store, room };
        let reporter = Reporter::new(events, clock);
        let threads = Threads::start(admitted.devices, models.len(), &admitted.store, stores, &reporter)?;
        let policy = match policy {
            Chosen::Kind(kind) => kind.build(seed),
            Chosen::Own(policy) => policy,
        };
        let mut run = Self {
            policy_name: guarded("the policy", || Ok(policy.name()))?,
            held_back: false,
            devices: threads.devices.iter().map(|_| DeviceState::default()).collect(),
            active_bytes: admitted.admission.tasks.iter().map(|t| t.active_bytes).collect(),
            host_admitted: admitted.admission.host_admitted_bytes,
            policy,
            store: admitted.store,
            models,
            threads,
            identities: admitted.identities,
            every,
            host_budget,
            host_memory,
            disk,
            _working: working,
            prefetch,
            stop,
            stopping: false,
            observer,
            clock,
            tickets: 0,
            decisions: 0,
            taking_down: 0,
            to_discard: Vec::new(),
            first_start_s: None,
            last_end_s: 0.0,
        };
        run.fill_store();
        run.prepare()?;
        Ok(run)
    }

    /// Makes room for promotions of what does not stay on a device.
    fn prepare(&self) -> Result<(), EngineError> {
        let spilled = self.models.iter().filter(|model| !model.placement.on_device());
        let promotion = spilled.map(|model| model.plan.promotion_bytes()).max().unwrap_or(0);
        for DeviceThreads { device, .. } in &self.threads.devices {
            device.manager.link().prepare(promotion).map_err(SpillError::from)?;
            device.probe.reset_peak(device.measured_as());
        }
        Ok(())
    }

    fn work(&mut self, inbox: &Receiver<Event>) {
        while self.models.iter().any(|model| model.ended.is_none()) {
            self.check_stop();
            self.discard();
            self.end_without_devices();
            self.mark_due();
            (0..self.models.len()).for_each(|index| self.settle(index));
            self.load_ahead();
            self.fill();
            match inbox.recv_timeout(TICK) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => self.check_progress(),
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
        for model in self.models.iter_mut().filter(|model| model.task.stop.is_stopped()) {
            model.stopping = true;
        }
        if self.stopping || !self.stop.is_stopped() {
            return;
        }
        self.stopping = true;
        self.models.iter_mut().for_each(|model| model.stopping = true);
        self.observer.observe(&RunEvent::Stopping);
    }

    /// Moves a task on that waits for no shard task: releases what a finished sweep held, keeps a checkpoint that is
    /// due, ends training when the run is stopping, and asks the host to restore or write.
    fn settle(&mut self, index: usize) {
        let model = &mut self.models[index];
        // What is on its way down of a task that failed may be stepped yet.
        let stepped = !model.is_failing() || model.coming_down == 0;
        if model.ended.is_some() || model.asked || !model.at_rest() || !stepped {
            return;
        }
        if model.active.is_some() {
            model.release();
        }
        let training = !matches!(model.cursor.stage(), Stage::Restore | Stage::Write | Stage::Finished);
        if (training || model.cursor.stage() == Stage::Restore) && self.keep(index) {
            return;
        }
        let model = &mut self.models[index];
        if let Some(error) = model.cannot_go_on.take() {
            match model.cursor.step() {
                0 => return self.fail(index, error),
                step => model.give_up(step, error),
            }
        }
        let model = &mut self.models[index];
        if model.stopping && training && !model.gives_up() {
            // Before the test the best masters are there already.
            let tests = matches!(model.cursor.stage(), Stage::Evaluate { kind: EvaluationKind::Test, .. });
            model.cursor.stop(model.results.best.is_some() && !tests);
            model.cut_short = true;
        }
        match model.cursor.stage() {
            Stage::Restore => {
                model.asked = true;
                let _ = self.threads.host.send(HostJob::Restore { task: model.id });
            }
            Stage::Write => {
                model.asked = true;
                let finished = self.finished_state(index);
                let model = &self.models[index];
                let (chain, output) = (model.chain().clone(), model.task.output.clone());
                let job = WriteJob { task: model.id, chain, output, finished };
                let _ = self.threads.writer.send(WriterJob::Model(job));
            }
            _ => {}
        }
    }

    /// Has the batches read that minibatches begin with after those that are under way.
    fn load_ahead(&mut self) {
        for model in &mut self.models {
            let Some(next) = model.ahead() else { continue };
            let Some(room) = self.host_budget.try_ahead(model.batch_bytes, &model.task.name) else {
                continue;
            };
            let Some((of, reading)) = model.load(&next) else { continue };
            self.threads.load(LoadJob { task: model.id, of, reading, room });
        }
    }

    /// A run in which nothing happens, nothing is awaited and nothing can be claimed would wait for ever: its
    /// tasks fail with what they lack.
    fn check_progress(&mut self) {
        let devices_idle = self.devices.iter().all(|d| d.active.is_none() && d.next.is_none());
        let open = || self.models.iter().filter(|model| model.ended.is_none());
        let awaits_nothing = |model: &Model| {
            let asked = model.asked || model.reads() || model.cannot_go_on.is_some();
            model.idle() && model.settled() && !asked && !model.awaits_steps()
        };
        if !devices_idle || self.taking_down > 0 || !open().all(awaits_nothing) {
            return;
        }
        let claimable = |model: &Model| {
            (0..self.devices.len())
                .any(|device| !self.devices[device].lost && self.view(model, device).is_some())
        };
        if open().any(claimable) {
            self.held_back = false;
            self.fill();
            if self.held_back && self.devices.iter().all(|device| device.next.is_none()) {
                self.dismiss("holds devices back although nothing runs");
            }
            return;
        }
        if open().any(|model| model.stopping) {
            return;
        }
        for index in open().map(|model| model.id.0).collect::<Vec<_>>() {
            let (available, needed) = (self.host_budget.available(), self.active_bytes[index]);
            self.fail(index, EngineError::NoProgress { available, needed });
        }
    }

    /// Goes on without a policy that is none.
    pub(crate) fn dismiss(&mut self, why: &str) {
        let other = PolicyKind::default().build(0);
        tracing::error!("the policy `{}` {why}: the run goes on with `{}`", self.policy_name, other.name());
        (self.policy_name, self.policy) = (other.name(), other);
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Promoted { device, task, ticket, time, failure } => {
                self.promoted(device, task, ticket, time);
                // The shard task comes to nothing then, and says so next.
                self.devices[device.0].not_promoted = failure.map(|error| (ticket, error));
            }
            Event::Loaded { task, loaded } => self.models[task.0].loaded(loaded),
            Event::Started { device, ticket } => self.started(device, ticket),
            Event::ShardDone { device, ticket, time, stalled_s, result, lost } => {
                let cause = self.devices[device.0].not_promoted.take_if(|(of, _)| *of == ticket);
                let cause = |error| cause.map_or(error, |(_, cause)| cause);
                let result = result.map_err(|error| self.named(device, lost, cause(error)));
                self.shard_done(device, ticket, time, stalled_s, result);
                if lost {
                    self.lose(device);
                }
            }
            Event::OutputDown { device, task, ticket, of, time, result } => {
                self.copied(device, task, Work::TakeDown, of, time);
                self.observer.output_down(task, of.0, time.end_s);
                match result {
                    Ok(output) => self.models[task.0].output_arrived(ticket, output),
                    Err(error) => self.output_lost(task.0, of.1, error),
                }
            }
            Event::GradientsDown { device, task, of, time, failure } => {
                self.taking_down -= 1;
                self.models[task.0].coming_down -= 1;
                self.copied(device, task, Work::TakeDown, of, time);
                if let Some(error) = failure {
                    self.gradients_lost(task.0, of.1, error);
                }
            }
            Event::Stepped { task, image, step, time } => {
                self.models[task.0].stepped(image, step, time);
                self.span(Track::Optimizer, task, Work::Step, image, step, time);
            }
            Event::HostFailed { task, error } => self.fail(task.0, error),
            Event::Restored { task } => {
                let model = &mut self.models[task.0];
                model.asked = false;
                // One that is to stop only now is kept first, before its test.
                model.cursor.waited(model.cut_short);
            }
            Event::Kept { task, result, time } => self.kept(task, result, time),
            Event::Written { task, result } => self.written(task.0, result),
        }
    }

    fn promoted(&mut self, device: DeviceId, task: TaskId, ticket: Ticket, time: Time) {
        let state = &self.devices[device.0];
        let mut claims = state.next.iter().map(|next| &next.claim).chain(&state.active);
        let of = claims.find(|claim| claim.ticket == ticket).map(|claim| (claim.what.shard, claim.what.step));
        if of.is_some_and(|(shard, _)| shard == 0) {
            self.models[task.0].waits.promote_s = time.seconds();
        }
        self.copied(device, task, Work::Promote, of.unwrap_or_default(), time);
    }

    fn started(&mut self, device: DeviceId, ticket: Ticket) {
        let state = &mut self.devices[device.0];
        let Some(next) = state.next.take_if(|next| next.claim.ticket == ticket) else { return };
        let task = next.claim.task;
        self.models[task.0].started(&next.claim, device);
        state.active = Some(next.claim);
        self.devices.iter_mut().filter(|other| other.last == Some(task)).for_each(|other| other.last = None);
        self.devices[device.0].last = Some(task);
    }

    fn copied(&mut self, device: DeviceId, task: TaskId, work: Work, of: (usize, usize), time: Time) {
        self.devices[device.0].copy_s += time.seconds();
        self.span(Track::Copy(device), task, work, of.0, of.1, time);
    }

    fn span(&mut self, track: Track, task: TaskId, work: Work, shard: usize, step: usize, time: Time) {
        let span = Span { track, task, work, shard, step, start_s: time.start_s, end_s: time.end_s };
        self.observer.observe(&RunEvent::Span(span));
    }

    fn shard_done(
        &mut self,
        device: DeviceId,
        ticket: Ticket,
        time: Time,
        stalled_s: f64,
        result: Result<Option<Made>, EngineError>,
    ) {
        let state = &mut self.devices[device.0];
        // A claim that could not start has ended in the double buffer.
        let ended = state.active.take_if(|claim| claim.ticket == ticket);
        let had_begun = ended.is_some();
        let ended = ended.or_else(|| state.next.take_if(|n| n.claim.ticket == ticket).map(|n| n.claim));
        let Some(claim) = ended else { return };
        let made = match result {
            Ok(Some(made)) => made,
            Ok(None) => return self.models[claim.task.0].dropped(),
            Err(error) => {
                self.models[claim.task.0].failed(had_begun);
                return self.shard_failed(&claim, error);
            }
        };
        state.ended_s = Some(time.end_s);
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
        if self.models[claim.task.0].gives_up_on(&claim) {
            return self.models[claim.task.0].dropped();
        }
        let mut made = self.hand_over(device, &claim, made);
        let model = &mut self.models[claim.task.0];
        let progress = model.finished(&claim, made.computed.measured.take(), time);
        let (ticket, task, shard) = (claim.ticket, claim.task, claim.what.shard);
        let stays = model.placement.on_device();
        let job =
            TakeDownJob { ticket, task, chain: model.chain().clone(), at: claim.at, made, shard, stays };
        match progress {
            Ok(progress) => {
                self.taking_down += 1;
                self.models[task.0].coming_down += 1;
                let _ = self.threads.devices[device.0].take_down.send(job);
                self.tell(claim.task, progress, time);
            }
            Err(error) => self.failed_in(claim.task.0, claim.what.step, error),
        }
    }

    /// Keeps of the output what is needed on the host: nothing if the shard task that follows on the same
    /// device takes it there and no other will.
    fn hand_over(&mut self, device: DeviceId, claim: &Claim, mut made: Made) -> Made {
        let next = self.devices[device.0].next.as_ref().map(|next| &next.claim);
        let handed = next.is_some_and(|next| next.task == claim.task && next.from_handoff);
        let model = &mut self.models[claim.task.0];
        if !model.needs_output(claim, handed) {
            made.computed.output = Output::None;
        }
        if !matches!(made.computed.output, Output::None) {
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
            Progress::Evaluating { kind, batch, batches, units } => {
                self.observer.observe(&RunEvent::Evaluating { task, kind, batch, batches, units, at_s });
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
                let state = match (&model.results.failure, model.cut_short) {
                    (Some(_), _) => TaskState::Failed,
                    (None, true) => TaskState::Stopped,
                    (None, false) => TaskState::Done,
                };
                match written.not_kept {
                    Some(error) => self.keep_failed(index, &error),
                    // One that was stopped has an earlier one.
                    None if state == TaskState::Done => self.models[index].results.checkpoint_error = None,
                    None => {}
                }
                self.end(index, state);
            }
            Err(error) => {
                let error = self.with_checkpoint(index, error);
                self.fail(index, error);
            }
        }
    }

    pub(crate) fn end(&mut self, index: usize, state: TaskState) {
        let model = &mut self.models[index];
        model.ended = Some(state);
        model.release();
        model.waiting = None;
        let task = model.id;
        let _ = self.threads.host.send(HostJob::Forget { task });
        let images = (0..model.chain().images().len()).map(|image| ImageId::new(task, image));
        self.to_discard.extend(images.flat_map(|id| [id, id.snapshot()]));
        self.discard();
        self.disk.release(task);
        let error = self.models[index].results.failure.as_deref().map(|error| with_causes(error));
        let at_s = self.clock.now();
        self.observer.observe(&RunEvent::Ended { task, state, error: error.as_deref(), at_s });
    }

    /// Gives up the images of tasks that have ended. One that a worker still reads or writes is tried again when
    /// something else has happened.
    fn discard(&mut self) {
        let busy = |id: &ImageId| matches!(self.store.discard(*id), Err(SpillError::ImageBusy { .. }));
        self.to_discard.retain(busy);
    }
}
