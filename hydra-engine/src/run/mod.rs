//! The run: one thread that receives events and decides what happens next, over one closed enum of events.
//!
//! May touch: everything below, through the channels of its threads.
//! Never: computes, copies, reads or writes anything itself, or waits for anything but events.

mod checkpoints;
mod claiming;
mod commands;
mod costs;
mod devices;
mod events;
mod first_evaluations;
mod forecast;
mod initial_weights;
mod journal;
mod memory;
mod preparing;
mod queue;
mod rates;
mod record;
mod setup;
mod shared_evaluation;
mod summary;
mod threads;

pub use forecast::{Forecast, ForecastTask, LinkRate};
pub use setup::AdmittedRun;
pub(crate) use setup::{PolicyChoice, RunSettings};

use crate::admission::Skipped;
use crate::ahead_of_time::AheadOfTimeInit;
use crate::checkpoint::CheckpointEvery;
use crate::device::GradientPart;
use crate::error::{EngineError, with_causes};
use crate::io::loader::LoadJob;
use crate::io::writer::{WriterJob, WriterStores};
use crate::observer::RunEvent;
use crate::optimizer::HostJob;
use crate::protocol::TaskState;
use crate::protocol::{Clock, Event, LoadedWeights, Reporter, StopFlag};
use crate::report::RunReport;
use crate::task::{Change, Costs, Fate, LiveTask, Phase, Rest, TaskInfo, ThreadRequest};
use checkpoints::{Saveable, mark_due};
use claiming::{ClaimContext, Claiming, Jobs};
use commands::PendingCommands;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use devices::{DeviceState, abandon};
use first_evaluations::FirstEvaluations;
use hydra_core::{DeviceId, TaskId};
use hydra_partition::PartitionPlan;
use hydra_sched::CostError;
use hydra_spill::{ParamBufferKind, SpillError, TierStore};
use initial_weights::InitialWeights;
use journal::Journal;
use memory::RunMemory;
use queue::StartQueue;
use record::Recorder;
use std::sync::Arc;
use std::time::Duration;
use threads::{DeviceThreads, Threads};

/// The interval at which the loop checks the stop flag while no events arrive.
const TICK: Duration = Duration::from_millis(50);

/// The state of a run.
pub(crate) struct Run {
    tasks: Vec<LiveTask>,
    /// Shapes that added tasks may have.
    shapes: Vec<TaskInfo>,
    devices: Vec<DeviceState>,
    threads: Threads,
    memory: RunMemory,
    queue: StartQueue,
    claiming: Claiming,
    first_evaluations: FirstEvaluations,
    every: CheckpointEvery,
    stop: StopFlag,
    stopping: bool,
    commands: Option<PendingCommands>,
    journal: Journal,
    /// Skipped tasks, for the report.
    skipped: Vec<Skipped>,
}

/// Trains the admitted tasks.
fn run(admitted: AdmittedRun) -> Result<RunReport, EngineError> {
    let (events, inbox) = unbounded();
    let clock = Clock::start();
    let seed = admitted.settings.seed;
    let kind = match &admitted.settings.policy {
        PolicyChoice::Kind(kind) => Some(*kind),
        PolicyChoice::Own(_) => None,
    };
    let mut run = Run::start(admitted, events, clock)?;
    run.report_memory(clock.now());
    run.work(&inbox);
    run.report_memory(clock.now());
    let mut report = summary::report(&run);
    report.workload = run.journal.recorder.workload();
    let from_the_start = report.tasks.iter().all(|task| task.checkpoints.resumed_at.is_none());
    let queued = run.queue.is_queued();
    let controlled = run.commands.as_ref().is_some_and(PendingCommands::was_used);
    let comparable = !queued
        && !controlled
        && from_the_start
        && report.all_done()
        && run.journal.recorder.is_as_simulated();
    let whole = report.workload.as_ref().filter(|_| comparable);
    let replay_s = |(workload, kind)| run.journal.recorder.replay_s(workload, kind, seed);
    report.replay_s = whole.zip(kind).and_then(replay_s);
    let reading = run.tasks.iter().any(|task| task.reader.reads());
    run.threads.join(reading);
    Ok(report)
}

impl Run {
    fn start(admitted: AdmittedRun, events: Sender<Event>, clock: Clock) -> Result<Self, EngineError> {
        let AdmittedRun {
            tasks,
            shapes,
            admission,
            devices,
            store,
            device_resident,
            disk,
            identities,
            ahead_of_time,
            settings,
            returns_freed,
        } = admitted;
        let RunSettings { policy, prefetch, every, seed, stop, control, grows, observer } = settings;
        let tiers: Arc<dyn TierStore> = store.clone();
        let recorder = Recorder::new(observer, prefetch, &devices);
        let mut journal = Journal::new(recorder, clock);
        journal.observe(&RunEvent::Admitted(&admission));
        let mut memory = RunMemory::new(&admission, disk, store, device_resident)?;
        let mut live = Vec::new();
        let submitted = tasks.into_iter().zip(admission.tasks).zip(identities);
        for (i, ((task, admitted), identity)) in submitted.enumerate() {
            let costs = costs_of(&admitted.plan, &live)?;
            let mut task = LiveTask::new(TaskInfo::new(TaskId(i), task, admitted, identity), costs);
            resume(&mut task, &mut journal);
            live.push(task);
        }
        memory.share_on_disk(live.iter().map(|task: &LiveTask| &*task.info));
        // Memory that pilot passes left in a device's pools is freed for resident masters and promotions.
        devices.iter().for_each(|device| device.probe.reset_peak(device.measured_as()));
        let stores = WriterStores {
            shared: memory.store.clone(),
            device_resident: memory.device_resident.clone(),
            disk: memory.disk.store.clone(),
            read_bytes: memory.disk.writing,
        };
        let threads = Threads::start(devices, live.len(), &tiers, stores, &Reporter::new(events, clock))?;
        let policy = match policy {
            PolicyChoice::Kind(kind) => kind.build(seed),
            PolicyChoice::Own(policy) => policy,
        };
        // Added tasks start when they fit.
        let queued = admission.max_concurrent.or(grows.then_some(usize::MAX));
        let mut run = Self {
            queue: StartQueue::new(queued, threads.devices.len()),
            claiming: Claiming::new(policy, prefetch)?,
            first_evaluations: FirstEvaluations::default(),
            devices: threads.devices.iter().map(|_| DeviceState::default()).collect(),
            tasks: live,
            shapes,
            threads,
            memory,
            every,
            stop,
            stopping: false,
            commands: control.map(PendingCommands::new),
            journal,
            skipped: admission.skipped,
        };
        run.start_first_tasks(&ahead_of_time);
        drop(returns_freed);
        run.prepare_promotions()?;
        Ok(run)
    }

    /// Stores the initial weights of the tasks that fit, before anything else runs.
    fn start_first_tasks(&mut self, ahead_of_time: &Arc<AheadOfTimeInit>) {
        while let Some(mut masters) = self.next_to_start(|_| true) {
            let task = masters.info.id;
            masters.ahead_of_time = ahead_of_time.clone();
            self.begun(task, masters.put());
        }
    }

    /// Sends the initial weights of every queued task that now fits to the thread that stores them.
    fn start_queued_tasks(&mut self) {
        let is_idle = |tasks: &[LiveTask]| !tasks.iter().any(LiveTask::has_begun);
        while let Some(masters) = self.next_to_start(is_idle) {
            self.tasks[masters.info.id.0].request = Some(ThreadRequest::InitialWeights);
            // The channel closes only with the run.
            let _ = self.threads.masters.send(masters);
        }
    }

    /// The next task that starts: its initial weights with reserved memory. `is_idle` returns whether nothing uses
    /// the disk.
    fn next_to_start(&mut self, is_idle: impl Fn(&[LiveTask]) -> bool) -> Option<InitialWeights> {
        let idle = is_idle(&self.tasks);
        // A task that gave up its memory starts again only after its old buffers are gone.
        let is_gone = |task: &LiveTask| self.memory.to_discard.iter().all(|buffer| buffer.task != task.id());
        let mut waiting = self.queue.may_begin(&self.tasks, &self.memory);
        waiting.retain(|task| is_gone(task));
        let id = match self.queue.is_queued() {
            true => self.claiming.choose_next(self.devices.len(), &waiting)?,
            false => waiting.first()?.id(),
        };
        let task = &mut self.tasks[id.0];
        let memory = self.memory.for_masters(&task.info, idle)?;
        task.phase.change(Change::Begin);
        let link = self.threads.devices[0].device.manager.link().clone();
        let (info, store) = (task.info.clone(), self.memory.store.clone());
        let working = self.memory.disk.working.clone();
        Some(InitialWeights { info, store, link, memory, working, ahead_of_time: Arc::default() })
    }

    /// Handles the end of storing a task's initial weights. After an error the task fails.
    fn begun(&mut self, id: TaskId, result: Result<LoadedWeights, EngineError>) {
        let begun = result.and_then(|begun| self.register(id, begun.best).map(|()| begun));
        self.tasks[id.0].request = None;
        match begun {
            Ok(LoadedWeights { weights, frozen, .. }) => {
                self.tasks[id.0].frozen = frozen;
                self.first_evaluations.join(&self.tasks[id.0], weights);
                let at_s = self.journal.clock.now();
                self.journal.observe(&RunEvent::Began { task: id, at_s });
            }
            Err(error) => self.fail(id.0, error),
        }
    }

    fn register(&mut self, id: TaskId, best: bool) -> Result<(), EngineError> {
        let task = &mut self.tasks[id.0];
        let (chain, spec) = (task.info.chain().clone(), task.info.task.spec.clone());
        let program = task.cursor.program();
        let (steps, together) =
            (program.steps, task.info.admitted.memory.gradient_window.has_all(program.microbatches.each));
        let _ = self.threads.host.send(HostJob::Register { task: id, chain, spec, steps, best, together });
        if task.info.has_resident() {
            // Reserves device memory for pending gradients.
            let bytes = task.info.admitted.storage.resident.pending;
            let reservation = self.memory.device_resident.reserve(bytes, task.info.name());
            task.memory.waiting = Some(reservation.map_err(SpillError::from)?);
        }
        Ok(())
    }

    /// Prepares the links for promotions of tasks that are not device-resident.
    fn prepare_promotions(&self) -> Result<(), EngineError> {
        let all = self.tasks.iter().map(|task| &*task.info).chain(&self.shapes);
        let spilled = all.filter(|info| !info.on_device());
        let promotion = spilled.map(|info| info.admitted.plan.promotion_bytes()).max().unwrap_or(0);
        for DeviceThreads { device, .. } in &self.threads.devices {
            device.manager.link().prepare(promotion).map_err(SpillError::from)?;
            device.probe.reset_peak(device.measured_as());
        }
        Ok(())
    }

    fn work(&mut self, inbox: &Receiver<Event>) {
        while self.tasks.iter().any(|task| !task.phase.is_over()) {
            self.check_stop();
            self.handle_commands();
            self.stop_at_end_steps();
            self.discard();
            self.end_without_devices();
            self.start_queued_tasks();
            if self.discard_shared() {
                // Leaving tasks may have freed memory.
                self.start_queued_tasks();
            }
            self.ask_for_memory();
            self.share_first_evaluations();
            mark_due(&mut self.tasks, self.every, self.journal.clock.now());
            (0..self.tasks.len()).for_each(|index| self.settle(index));
            // Ended tasks return their batches of shared evaluations.
            self.share_first_evaluations();
            self.read_ahead();
            self.claim(Claiming::claim_all);
            match inbox.recv_timeout(TICK) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => self.check_progress(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
            while let Ok(event) = inbox.try_recv() {
                self.handle(event);
            }
        }
        self.discard_shared();
        // Failed tasks may still have claims in flight; their events must not outlive the loop's bookkeeping.
        while !self.devices.iter().all(DeviceState::is_idle) {
            match inbox.recv_timeout(TICK) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Reports the reserved memory of each tier.
    fn report_memory(&mut self, at_s: f64) {
        let devices = self.threads.devices.iter().map(|threads| threads.device.manager.budget());
        self.journal.memory(&self.memory.tiers(devices), at_s);
    }

    fn check_stop(&mut self) {
        let asked = self.stop.is_stopped() && !self.stopping;
        if asked {
            self.stopping = true;
            self.journal.observe(&RunEvent::Stopping);
        }
        for index in 0..self.tasks.len() {
            if asked || self.tasks[index].info.task.control.stop.is_stopped() {
                self.stop(index);
            }
        }
    }

    /// Stops a task.
    fn stop(&mut self, index: usize) {
        let phase = &mut self.tasks[index].phase;
        let waited = phase.is_waiting();
        phase.change(Change::Stop);
        if waited {
            self.end(index);
        }
    }

    /// Ends every task with its state so far if all devices are lost.
    fn end_without_devices(&mut self) {
        if !self.devices.iter().all(|device| device.lost) {
            return;
        }
        for index in 0..self.tasks.len() {
            let fate = self.tasks[index].without_device(self.claiming.tickets);
            self.apply_fate(index, fate);
        }
    }

    /// Starts the next action of a task that is at rest.
    fn settle(&mut self, index: usize) {
        let id = TaskId(index);
        self.report_pause(index);
        let may_save = self.tasks[index].checkpoint.due && Saveable::next(&self.tasks).allows(id);
        // The channels close only with the run.
        match self.tasks[index].settle(may_save) {
            Rest::Nothing => {}
            Rest::Checkpoint(job) => drop(self.threads.host.send(HostJob::Checkpoint(job))),
            Rest::Leave => self.free_memory_of_paused(index),
            Rest::Restore => drop(self.threads.host.send(HostJob::Restore { task: id })),
            Rest::Write(job) => drop(self.threads.writer.send(WriterJob::Model(job))),
            Rest::Over => self.end(index),
        }
    }

    /// Reads the batches of the minibatches that follow those in flight.
    fn read_ahead(&mut self) {
        for task in &mut self.tasks {
            let Some(next) = task.next_to_read() else { continue };
            let bytes = task.info.admitted.memory.batch_bytes;
            let Some(reservation) = self.memory.host.try_ahead(bytes, task.info.name()) else { continue };
            let Some((of, reading)) = task.read_ahead(&next) else { continue };
            self.threads.load(LoadJob { task: task.id(), of, reading, memory: reservation });
        }
    }

    /// Claims shard tasks and sends their jobs to the workers.
    fn claim(
        &mut self,
        claim: impl FnOnce(&mut Claiming, &mut ClaimContext<'_>) -> Vec<Result<Jobs, (usize, EngineError)>>,
    ) {
        let context = &mut ClaimContext {
            tasks: &mut self.tasks,
            devices: &mut self.devices,
            threads: &self.threads.devices,
            host: &self.memory.host,
        };
        for claimed in claim(&mut self.claiming, context) {
            match claimed {
                Ok(Jobs { device, promote, compute, sums }) => {
                    let threads = &self.threads.devices[device];
                    let _ = threads.promote.send(promote);
                    let _ = threads.compute.send(compute);
                    for (device, claim, made) in sums {
                        self.download(DeviceId(device), &claim, made, GradientPart::Sums);
                    }
                }
                Err((index, error)) => self.fail(index, error),
            }
        }
    }

    /// Detects a stall: if nothing runs, nothing is awaited and nothing can be claimed, the open tasks fail with the
    /// memory that they lack.
    fn check_progress(&mut self) {
        let open = || self.tasks.iter().filter(|task| !task.phase.is_over());
        let downloading = self.tasks.iter().any(|task| task.memory.downloads > 0);
        let idle = self.devices.iter().all(DeviceState::is_idle) && self.memory.to_discard.is_empty();
        if !idle || downloading || !open().all(LiveTask::awaits_nothing) {
            return;
        }
        let stopping = open().any(|task| matches!(task.phase, Phase::Stopping));
        let indices: Vec<usize> = open().map(|task| task.id().0).collect();
        let mut claimable = false;
        self.claim(|claiming, context| {
            claimable = context.has_claimable(claiming.prefetch);
            if claimable { claiming.claim_or_replace_policy(context) } else { Vec::new() }
        });
        if claimable || stopping || self.awaits_commands() {
            return;
        }
        for index in indices {
            let needed = self.tasks[index].info.admitted.memory.active_bytes;
            let available = self.memory.host.available();
            self.fail(index, EngineError::NoProgress { available, needed });
        }
    }

    /// Applies the consequence of a failure to its task.
    fn apply_fate(&mut self, index: usize, fate: Fate) {
        match fate {
            Fate::GoesOn => {}
            Fate::GivesUp => abandon(&self.devices, TaskId(index)),
            Fate::Fails(error) => self.fail(index, error),
        }
    }

    /// Marks a task as failed; the run goes on.
    fn fail(&mut self, index: usize, error: EngineError) {
        if !self.tasks[index].phase.is_over() {
            self.tasks[index].phase.change(Change::Fail(error));
            self.end(index);
        }
    }

    /// Ends a task: frees its memory and reports it.
    fn end(&mut self, index: usize) {
        let task = &mut self.tasks[index];
        task.release();
        abandon(&self.devices, task.id());
        self.release_buffers(index);
        drop(self.memory.disk.take_space(TaskId(index)));
        self.leave_unsaved(TaskId(index));
        report_end(&self.tasks[index], &mut self.journal);
    }

    /// Gives up the buffers of a task that has ended or leaves its memory to others.
    fn release_buffers(&mut self, index: usize) {
        self.forget_copies(|id| id.task == TaskId(index) && id.kind != ParamBufferKind::Shared);
        for device in &mut self.devices {
            device.sums.take_if(|(claim, _)| claim.task == TaskId(index));
        }
        let _ = self.threads.host.send(HostJob::Forget { task: TaskId(index) });
        let info = &self.tasks[index].info;
        self.memory.to_discard.extend(info.stored_buffers());
        self.memory.shared_to_discard.extend(info.shared_names().map(|(name, _)| name));
        self.discard();
    }

    /// Discards the buffers of ended tasks. A buffer that a worker still uses is tried again after the next event.
    fn discard(&mut self) {
        let RunMemory { store, to_discard, .. } = &mut self.memory;
        if to_discard.is_empty() {
            return;
        }
        to_discard.retain(|id| matches!(store.discard(*id), Err(SpillError::BufferBusy { .. })));
        // The same id may later hold other values.
        self.forget_copies(|id| id.kind == ParamBufferKind::Shared && !self.memory.store.has_names(*id));
    }

    /// Gives up shared buffers of ended tasks that no queued task has taken over. Returns whether there were any.
    fn discard_shared(&mut self) -> bool {
        let RunMemory { to_discard, shared_to_discard, .. } = &mut self.memory;
        let any = !shared_to_discard.is_empty();
        to_discard.append(shared_to_discard);
        self.discard();
        any
    }
}

/// The costs of a plan, taken from a task with the same plan if there is one.
fn costs_of(plan: &Arc<PartitionPlan>, tasks: &[LiveTask]) -> Result<Costs, CostError> {
    let alike = tasks.iter().find(|task| Arc::ptr_eq(&task.info.admitted.plan, plan));
    alike.map_or_else(|| Costs::of(plan), |alike| Ok(alike.costs.clone()))
}

/// Resumes from the task's checkpoint, if it has one.
fn resume(task: &mut LiveTask, journal: &mut Journal) {
    let at_s = journal.clock.now();
    if task.resume(at_s) {
        let (step, steps) = (task.cursor.step(), task.cursor.program().steps);
        journal.observe(&RunEvent::Resumed { task: task.id(), step, steps, at_s });
        if task.phase.is_over() {
            report_end(task, journal);
        }
    }
}

fn report_end(task: &LiveTask, journal: &mut Journal) {
    let (id, at_s) = (task.id(), journal.clock.now());
    let state = task.phase.state().unwrap_or(TaskState::Failed);
    let error = task.phase.failure().map(|error| with_causes(error.as_ref()));
    let (error, results) = (error.as_deref(), &task.results);
    let written = (results.sha256.as_deref(), results.dir.as_deref());
    journal.observe(&RunEvent::Ended { task: id, state, error, written, at_s });
}
