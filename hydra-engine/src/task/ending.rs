//! Resuming from a checkpoint, coming to rest, stopping and failing.

use super::checkpoint_clock::CheckpointClock;
use super::live::{Claim, LiveTask, ThreadRequest};
use super::phase::{Change, Phase};
use super::results::Results;
use crate::checkpoint::{Checkpoint, Position, SCHEMA, TaskAtRest};
use crate::error::EngineError;
use crate::io::writer::{CheckpointJob, WriteJob};
use crate::protocol::{Ticket, Written};
use hydra_sched::ShardTaskKind;
use hydra_sched::program::{Cursor, EvaluationKind, ShardTask, Stage};
use std::path::{Path, PathBuf};

/// The next action for a task at rest: one with nothing in flight.
pub(crate) enum Rest {
    /// None: the task continues, or waits.
    Nothing,
    /// Write its checkpoint.
    Checkpoint(CheckpointJob),
    /// Release its host memory for other tasks.
    Leave,
    /// Restore its best weights.
    Restore,
    /// Hash and write its model.
    Write(WriteJob),
    /// End it: it failed, and there is nothing to write.
    Over,
}

/// The effect of a failure on its task.
pub(crate) enum Fate {
    /// None yet: an earlier failure counts, or the task ends when its shard tasks in flight have ended.
    GoesOn,
    /// Its claims are cancelled; its best weights are written.
    GivesUp,
    /// It ends as failed; nothing is written.
    Fails(EngineError),
}

impl LiveTask {
    /// Moves to the position in the task's checkpoint; returns false if the task has none.
    pub(crate) fn resume(&mut self, at_s: f64) -> bool {
        let Some(state) = self.info.task.start.state().map(Checkpoint::state) else { return false };
        let TaskAtRest { step, position, results, .. } = state.clone();
        self.results = Results::of(results, self.info.chain());
        let stage = match position {
            Position::Finished { .. } if !self.info.task.is_finished() => Stage::Write,
            _ => position.stage(),
        };
        match position {
            Position::Evaluate { batch, sums, .. } => {
                (self.results.underway.evaluation, self.results.underway.known) = (sums, batch);
            }
            Position::Finished { sha256, dir } if stage == Stage::Finished => {
                // The model may have been moved to the directory that the task would write to now.
                let here = self.info.task.output_dir().filter(|here| dir.is_some() && here.is_dir());
                self.results.dir = here.map(Path::to_owned).or(dir);
                self.results.sha256 = Some(sha256);
                self.phase.change(Change::Written);
            }
            _ => {}
        }
        self.cursor = Cursor::resumed(self.cursor.program().clone(), step, stage);
        if self.cursor.is_in_rounds() {
            self.results.underway.known = 0;
        }
        self.checkpoint = CheckpointClock::new(&self.cursor, at_s, self.info.admitted.storage.master_bytes);
        // Frozen buffers are always up to date.
        self.versions.iter_mut().filter(|version| **version == 0).for_each(|version| *version = step);
        true
    }

    fn go_to(&mut self, step: usize, stage: Stage) {
        self.cursor.go_to(step, stage);
    }

    /// The state of the task at rest, for a checkpoint.
    fn state(&self) -> Option<Box<TaskAtRest>> {
        let position = match self.cursor.saved_stage() {
            Stage::Evaluate { kind, batch, .. } => {
                Position::Evaluate { kind, batch, sums: self.results.underway.evaluation.clone() }
            }
            Stage::Restore => Position::Restore,
            Stage::Write => Position::Write,
            _ => Position::Train,
        };
        Some(Box::new(TaskAtRest {
            schema: SCHEMA,
            identity: self.info.identity.clone()?,
            step: self.cursor.step(),
            steps: self.cursor.program().steps,
            position,
            results: self.results.saved(),
            frozen: self.frozen.clone(),
        }))
    }

    /// Returns whether the task has a checkpoint file and unsaved progress.
    pub(crate) fn wants_checkpoint(&self) -> bool {
        let behind = self.checkpoint.is_behind(&self.cursor) && !self.phase.gave_up();
        behind && self.info.task.checkpoint.is_some()
    }

    /// Releases the memory of a finished microbatch pass of a task at rest, and returns the next action. `may_save`
    /// is true if the writer is free to write its checkpoint now.
    pub(crate) fn settle(&mut self, may_save: bool) -> Rest {
        // Gradients of a failed task that are being downloaded may still be stepped.
        let fails = self.phase.gave_up() || matches!(self.phase, Phase::Failing { .. });
        let stepped = !fails || self.memory.downloads == 0;
        if !self.has_begun() || self.request.is_some() || !self.is_at_rest() || !stepped {
            return Rest::Nothing;
        }
        // Between rounds, their data keeps what earlier ones have computed.
        let keeps = self.cursor.is_in_rounds() && !fails && !self.phase.ends_at_rest();
        if self.memory.active.is_some() && !keeps {
            self.release();
        }
        let stage = self.cursor.stage();
        let due = std::mem::take(&mut self.checkpoint.due) && (self.phase.ends_at_rest() || may_save);
        if !matches!(stage, Stage::Write | Stage::Finished)
            && due
            && let Some(job) = self.checkpoint_job()
        {
            self.request = Some(ThreadRequest::Checkpoint);
            return Rest::Checkpoint(job);
        }
        if !self.phase.ends_at_rest()
            && let Some(job) = self.save_here().and_then(|file| self.job_into(file))
        {
            self.request = Some(ThreadRequest::Save);
            return Rest::Checkpoint(job);
        }
        if self.may_leave() {
            return Rest::Leave;
        }
        self.stop_here();
        match self.cursor.stage() {
            Stage::Restore => {
                self.request = Some(ThreadRequest::Restore);
                Rest::Restore
            }
            Stage::Write => {
                self.request = Some(ThreadRequest::Write);
                Rest::Write(self.write_job())
            }
            _ if self.phase.is_over() => Rest::Over,
            _ => Rest::Nothing,
        }
    }

    fn checkpoint_job(&self) -> Option<CheckpointJob> {
        self.job_into(self.info.task.checkpoint.clone().filter(|_| self.wants_checkpoint())?)
    }

    fn job_into(&self, file: PathBuf) -> Option<CheckpointJob> {
        let (task, chain) = (self.id(), self.info.chain().clone());
        Some(CheckpointJob { task, chain, file, state: self.state()? })
    }

    fn write_job(&self) -> WriteJob {
        let (task, chain) = (self.id(), self.info.chain().clone());
        let file = self.info.task.checkpoint.clone().filter(|_| !self.phase.is_closing());
        let finished = file.and_then(|file: PathBuf| Some((file, self.state()?)));
        WriteJob { task, chain, output: self.info.task.output.clone(), finished }
    }

    /// Ends a task at rest that is failing or stopping.
    fn stop_here(&mut self) {
        let (step, stage) = (self.cursor.step(), self.cursor.stage());
        let training = !matches!(stage, Stage::Restore | Stage::Write | Stage::Finished);
        match self.phase {
            Phase::Failing { .. } => {
                self.phase.change(Change::Close { trained: step > 0 });
                if step > 0 {
                    self.go_to(step, self.last_stage());
                }
            }
            Phase::Stopping if training => {
                // The best weights were restored before the test.
                let tests = matches!(stage, Stage::Evaluate { kind: EvaluationKind::Test, .. });
                self.cursor.stop(self.results.best.is_some() && !tests);
                self.phase.change(Change::Close { trained: true });
            }
            _ => {}
        }
    }

    /// The last stage of a failed task: restore the best weights if there are any, otherwise write the model.
    fn last_stage(&self) -> Stage {
        if self.results.best.is_some() { Stage::Restore } else { Stage::Write }
    }

    /// Records that the best weights are restored.
    pub(crate) fn restored(&mut self) {
        self.request = None;
        // A task that receives a stop request after this is saved first, before its test.
        self.cursor.waited(self.phase.is_closing());
    }

    /// Records that the model was hashed and written.
    pub(crate) fn written(&mut self, written: Written) {
        self.request = None;
        self.results.sha256 = Some(written.sha256);
        self.results.dir = written.dir;
        self.cursor.waited(false);
        self.phase.change(Change::Written);
    }

    /// Adds the checkpoint file to the error of a task whose model could not be written, if it holds the final
    /// weights.
    pub(crate) fn with_checkpoint(&self, error: EngineError) -> EngineError {
        let EngineError::NotWritten { checkpoint: checkpoint @ (None | Some(Err(_))), source } = error else {
            return error;
        };
        // A diverged task would have written its best weights, not those that were saved last.
        let saved_before = || {
            let file = self.info.task.checkpoint.clone().filter(|_| self.phase.failure().is_none())?;
            let is_this = |saved: Checkpoint| saved.step() == self.cursor.step();
            Checkpoint::open(&file).is_ok_and(is_this).then_some(file)
        };
        EngineError::NotWritten { checkpoint: saved_before().map(Ok).or(checkpoint), source }
    }

    /// Handles a failure of the shard task `next`, which was or would be claimed with `ticket`. If no backward pass
    /// of its minibatch has started, the task ends before that minibatch and keeps all earlier training.
    pub(crate) fn fails_at(&mut self, next: &ShardTask, ticket: Ticket, error: EngineError) -> Fate {
        // The earlier of two failures counts.
        if self.phase.gave_up() || self.phase.failing_before().is_some_and(|before| before <= ticket) {
            return Fate::GoesOn;
        }
        // No buffer has been stepped for this minibatch, and none will be.
        let stepped_nothing =
            next.kind != ShardTaskKind::Backward || next.shard + 1 == self.info.shards.len();
        if !stepped_nothing {
            // The task already ends before this minibatch, because of another microbatch.
            let ends_before = matches!(self.phase, Phase::Failing { .. }) && self.cursor.step() == next.step;
            return if ends_before { Fate::GoesOn } else { self.fails_in(next.step, error) };
        }
        let stage = match next.stage {
            Stage::Measure { .. } | Stage::Train { .. } => Stage::Train { microbatch: 0 },
            Stage::Evaluate { kind, rounds: true, .. } => Stage::Evaluate { kind, batch: 0, rounds: true },
            Stage::Evaluate { kind, batch, rounds } => {
                Stage::Evaluate { kind, batch: self.first_unknown(kind, batch, next.step), rounds }
            }
            stage => stage,
        };
        self.go_to(next.step, stage);
        self.phase.change(Change::MarkFailed { error, before: Some(ticket) });
        Fate::GoesOn
    }

    /// The first batch of an evaluation without a known result, if `batch` fails after `step` minibatches.
    fn first_unknown(&self, kind: EvaluationKind, batch: usize, step: usize) -> usize {
        match self.cursor.program().shares(kind) {
            true => batch,
            false if self.cursor.is_evaluating(kind, step) => self.cursor.evaluated(),
            false => self.results.underway.known,
        }
    }

    /// Handles a failure within a minibatch, or a loss that is not finite. The best weights so far, if any, are
    /// written as the model before the task ends.
    pub(crate) fn fails_in(&mut self, step: usize, error: EngineError) -> Fate {
        if self.phase.gave_up() {
            return Fate::GoesOn;
        }
        if self.results.best.is_none() {
            return Fate::Fails(error);
        }
        self.phase.change(Change::GiveUp(error));
        self.go_to(step, self.last_stage());
        Fate::GivesUp
    }

    /// Handles a failed download of the output of the shard task `maker` of minibatch `step`; `ticket` is the next
    /// unused one.
    pub(crate) fn output_lost(
        &mut self,
        maker: Ticket,
        step: usize,
        ticket: Ticket,
        error: EngineError,
    ) -> Fate {
        if self.phase.failing_before().is_some() {
            return Fate::GoesOn;
        }
        let next = match self.microbatch_pass.replica_awaiting(maker) {
            Some(replica) => self.cursor.peek_in(replica).filter(|_| self.in_flight.is_replica_idle(replica)),
            None => self.cursor.peek().filter(|_| self.in_flight.is_idle()),
        };
        match next {
            Some(next) => self.fails_at(&next, ticket, error),
            None => self.fails_in(step, error),
        }
    }

    /// Handles a failed download of gradients of minibatch `step`, which has no effect if the task ends before that
    /// minibatch.
    pub(crate) fn gradients_lost(&mut self, step: usize, error: EngineError) -> Fate {
        match self.phase.failing_before().is_none() || step < self.cursor.step() {
            true => self.fails_in(step, error),
            false => Fate::GoesOn,
        }
    }

    /// Handles data that cannot be read. The task ends when its shard tasks in flight have ended; microbatch groups
    /// of an evaluation are not continued.
    pub(crate) fn mark_failed(&mut self, error: EngineError) {
        if !self.cursor.is_between_groups() {
            self.go_to(self.cursor.step(), self.cursor.saved_stage());
        }
        self.phase.change(Change::MarkFailed { error, before: None });
    }

    /// Returns whether nothing of the task is in flight or requested: it can only be claimed.
    pub(crate) fn awaits_nothing(&self) -> bool {
        let ends = matches!(self.phase, Phase::Failing { .. });
        let asked = self.request.is_some() || self.reader.reads() || ends;
        self.in_flight.is_idle() && self.is_settled() && !asked && !self.awaits_steps()
    }

    /// Fails a task for which no device is left. Shard tasks that it has claimed fail by themselves.
    pub(crate) fn without_device(&mut self, ticket: Ticket) -> Fate {
        let waits = !self.phase.gave_up() && self.request.is_none() && self.in_flight.is_idle();
        let next = self.cursor.peek();
        if !waits || next.is_none() && self.cursor.stage() != Stage::Shared {
            return Fate::GoesOn;
        }
        match next {
            _ if self.phase.is_waiting() => Fate::Fails(EngineError::NoDeviceLeft),
            Some(next) => self.fails_at(&next, ticket, EngineError::NoDeviceLeft),
            None => {
                self.mark_failed(EngineError::NoDeviceLeft);
                Fate::GoesOn
            }
        }
    }

    /// Returns whether the result of this claim is no longer used.
    pub(crate) fn gives_up_on(&self, claim: &Claim) -> bool {
        self.phase.gave_up() || self.phase.failing_before().is_some_and(|ticket| claim.ticket > ticket)
    }

    /// Releases the memory of a microbatch pass.
    pub(crate) fn release(&mut self) {
        self.microbatch_pass.release();
        self.info.task.rounds.iter().for_each(|of| of.data.release());
        // The optimizer holds gradients of the failed minibatch until the task has ended.
        let failing = self.phase.gave_up() || matches!(self.phase, Phase::Failing { .. });
        if self.phase.is_over() || !failing {
            self.memory.active = None;
        }
        if self.phase.is_over() {
            self.reader.release();
            self.memory.waiting = None;
        }
    }
}
