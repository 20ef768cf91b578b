//! Handles each event of the run's workers.

use super::Run;
use super::devices::{abandon, start};
use crate::device::{DownloadJob, GradientPart};
use crate::error::{EngineError, with_causes};
use crate::observer::{RunEvent, Track, Work};
use crate::optimizer::HostJob;
use crate::protocol::TaskState;
use crate::protocol::{Event, Made, Ticket, Time, Written};
use crate::task::{Claim, Progress, ThreadRequest};
use hydra_core::{DeviceId, TaskId};
use hydra_sched::program::Stage;
use hydra_spill::{ParamBufferId, ParamBufferKind};

impl Run {
    pub(super) fn handle(&mut self, event: Event) {
        match event {
            Event::WeightsLoaded { task, result } => self.begun(task, result),
            Event::Promoted { device, task, ticket, time, failure } => {
                let claim = self.devices[device.0].promoted(ticket, failure);
                let claim = claim.map(|claim| ((claim.what.shard, claim.what.step), claim.parameters));
                if let Some(((shard, _), parameters)) = claim {
                    if shard == 0 && parameters.cached == 0 {
                        self.tasks[task.0].waits.promote_s = time.seconds();
                    }
                    self.journal.recorder.promoted(device, (task, shard), parameters, time);
                }
                self.copied(device, task, Work::Promote, claim.unwrap_or_default().0, time);
            }
            Event::Loaded { task, loaded } => self.tasks[task.0].loaded(loaded),
            Event::Started { device, ticket, at_s } => {
                self.devices[device.0].started_s = Some(at_s);
                if let Some(claim) = start(&mut self.devices, device, ticket) {
                    self.tasks[claim.task.0].in_flight.start(claim.replica);
                }
            }
            Event::ShardDone { device, ticket, time, stalled_s, result, lost } => {
                let result = self.devices[device.0].with_cause(ticket, result);
                let result = result.map_err(|error| self.with_device_name(device, lost, error));
                self.shard_done(device, ticket, time, stalled_s, result);
                if lost {
                    self.mark_lost(device);
                }
            }
            Event::OutputDown { device, task, ticket, of, time, result } => {
                self.copied(device, task, Work::TakeDown, of, time);
                self.journal.recorder.output_down(device, (task, of.0), time);
                match result {
                    Ok(output) => self.tasks[task.0].microbatch_pass.output_arrived(ticket, output),
                    Err(error) => {
                        let next = self.claiming.tickets;
                        let fate = self.tasks[task.0].output_lost(ticket, of.1, next, error);
                        self.apply_fate(task.0, fate);
                    }
                }
            }
            Event::GradientsDown { device, task, of, bytes, time, failure } => {
                self.tasks[task.0].memory.downloads -= 1;
                self.journal.recorder.gradients_down((task, of.0, of.1), bytes, time);
                self.copied(device, task, Work::TakeDown, of, time);
                if let Some(error) = failure {
                    let fate = self.tasks[task.0].gradients_lost(of.1, error);
                    self.apply_fate(task.0, fate);
                }
            }
            Event::Added { task, buffer, microbatches } => self.tasks[task.0].added(buffer, microbatches),
            Event::Stepped { task, buffer, step, time } => {
                self.forget_copies(|id| *id == ParamBufferId::new(task, buffer));
                self.tasks[task.0].stepped(buffer, step, time);
                self.journal.span(Track::Optimizer, task, Work::Step, (buffer, step), time);
            }
            Event::HostFailed { task, error } => self.fail(task.0, error),
            Event::Restored { task } => {
                self.forget_copies(|id| id.task == task && id.kind != ParamBufferKind::Shared);
                self.tasks[task.0].restored();
            }
            Event::Checkpointed { task, result, time } => self.checkpointed(task, result, time),
            Event::Written { task, result } => self.written(task, result),
        }
    }

    /// Drops the cached copies that match, on every device.
    pub(super) fn forget_copies(&self, is_one: impl Fn(&ParamBufferId) -> bool) {
        self.threads.devices.iter().for_each(|threads| threads.device.manager.forget_copies(&is_one));
    }

    /// Adds the device's name to the error of a shard task if the device is lost.
    fn with_device_name(&self, device: DeviceId, lost: bool, source: EngineError) -> EngineError {
        match lost {
            true => EngineError::DeviceLost { device: self.device_name(device), source: Box::new(source) },
            false => source,
        }
    }

    fn device_name(&self, device: DeviceId) -> String {
        self.threads.devices[device.0].device.spec.name.clone()
    }

    /// Takes a failed device out of the run.
    fn mark_lost(&mut self, device: DeviceId) {
        if !std::mem::replace(&mut self.devices[device.0].lost, true) {
            self.threads.devices[device.0].device.manager.forget_copies(|_| true);
            let name = self.device_name(device);
            tracing::error!("device `{name}` has failed: the run goes on without it");
        }
    }

    fn copied(&mut self, device: DeviceId, task: TaskId, work: Work, of: (usize, usize), time: Time) {
        self.devices[device.0].copy_s += time.seconds();
        self.journal.span(Track::Copy(device), task, work, of, time);
    }

    fn shard_done(
        &mut self,
        device: DeviceId,
        ticket: Ticket,
        time: Time,
        stalled_s: f64,
        result: Result<Option<Made>, EngineError>,
    ) {
        let Some(claim) = self.devices[device.0].take(ticket) else { return };
        let task = &mut self.tasks[claim.task.0];
        let made = match result {
            Ok(Some(made)) => made,
            Ok(None) => return task.end_claim(&claim),
            Err(error) => {
                task.end_claim(&claim);
                let fate = task.fails_at(&claim.what, claim.ticket, error);
                self.apply_fate(claim.task.0, fate);
                return abandon(&self.devices, claim.task);
            }
        };
        self.devices[device.0].count(time, stalled_s);
        self.journal.computed(device, &claim, time);
        match task.gives_up_on(&claim) {
            true => task.end_claim(&claim),
            false => self.finished(device, &claim, made, time),
        }
    }

    /// Handles a shard task that succeeded: its output and gradients are downloaded.
    fn finished(&mut self, device: DeviceId, claim: &Claim, mut made: Made, time: Time) {
        let handed = self.devices[device.0].takes_over(claim);
        let sums_taken = self.devices[device.0].adds_to(claim);
        let task = &mut self.tasks[claim.task.0];
        task.keep_host_copy(claim, handed, &mut made.computed.output);
        let progress = match task.finished(claim, made.computed.measured.take(), time) {
            Ok(progress) => progress,
            Err(error) => {
                let fate = match claim.what.stage {
                    // Nothing of the minibatch has been trained.
                    Stage::Measure { .. } => task.fails_at(&claim.what, claim.ticket, error),
                    _ => task.fails_in(claim.what.step, error),
                };
                return self.apply_fate(claim.task.0, fate);
            }
        };
        let waits = self.devices[device.0].next.is_none() && task.may_add_to(claim);
        let part = if sums_taken || waits { GradientPart::Others } else { GradientPart::All };
        if part == GradientPart::Others {
            let sums = made.take_sums(task.info.chain());
            self.devices[device.0].sums = waits.then(|| (claim.clone(), sums));
        }
        self.download(device, claim, made, part);
        if let Progress::Evaluated { best: true, .. } = progress {
            let _ = self.threads.host.send(HostJob::Snapshot { task: claim.task });
        }
        let ends_something = !matches!(progress, Progress::Nothing);
        let progress = self.first_evaluations.record(&self.tasks[claim.task.0], progress);
        self.journal.progress(&self.tasks[claim.task.0], progress, time.end_s);
        if ends_something && self.journal.memory_is_due(time.end_s) {
            self.report_memory(time.end_s);
        }
    }

    /// Queues the download of a shard task's output and the given part of its gradients.
    pub(super) fn download(&mut self, device: DeviceId, claim: &Claim, made: Made, part: GradientPart) {
        let task = &mut self.tasks[claim.task.0];
        task.memory.downloads += 1;
        let job = DownloadJob {
            ticket: claim.ticket,
            task: claim.task,
            chain: task.info.chain().clone(),
            resident: task.info.resident.clone(),
            at: claim.at,
            made,
            adding: claim.adding,
            part,
            shard: claim.what.shard,
        };
        // A worker's channel closes only with the run.
        let _ = self.threads.devices[device.0].download.send(job);
    }

    /// Handles a checkpoint that was written or failed.
    fn checkpointed(&mut self, id: TaskId, result: Result<u64, EngineError>, time: Time) {
        let task = &mut self.tasks[id.0];
        if task.phase.is_over() {
            return;
        }
        if task.request.take() == Some(ThreadRequest::Save) {
            return self.saved(id, result);
        }
        task.checkpoint.saved(&task.cursor, time);
        match result {
            Ok(bytes) => {
                task.results.checkpoint_error = None;
                let (step, seconds, at_s) = (task.cursor.step(), time.seconds(), time.end_s);
                self.journal.observe(&RunEvent::Checkpointed { task: id, step, bytes, seconds, at_s });
            }
            Err(error) => self.checkpoint_failed(id, &error),
        }
    }

    /// Reports that a checkpoint could not be written; the task goes on.
    fn checkpoint_failed(&mut self, id: TaskId, error: &EngineError) {
        let (task, error, at_s) = (&mut self.tasks[id.0], with_causes(error), self.journal.clock.now());
        task.results.checkpoint_error = Some(error.clone());
        let step = task.cursor.step();
        self.journal.observe(&RunEvent::CheckpointFailed { task: id, step, error: &error, at_s });
    }

    fn written(&mut self, id: TaskId, result: Result<Written, EngineError>) {
        let task = &mut self.tasks[id.0];
        if task.phase.is_over() {
            return;
        }
        let mut written = match result {
            Ok(written) => written,
            Err(error) => {
                let error = task.with_checkpoint(error);
                return self.fail(id.0, error);
            }
        };
        let unsaved = written.unsaved.take();
        task.written(written);
        match unsaved {
            Some(error) => self.checkpoint_failed(id, &error),
            // A task that was stopped keeps its last checkpoint.
            None if task.phase.state() == Some(TaskState::Done) => task.results.checkpoint_error = None,
            None => {}
        }
        self.end(id.0);
    }
}
