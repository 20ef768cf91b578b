//! The ends of a task's life: beginning from a checkpoint, resting, stopping, failing.

use super::checkpoint_clock::CheckpointClock;
use super::live::{Claim, LiveTask, Request};
use super::phase::{Change, Phase};
use super::results::Results;
use crate::checkpoint::{Checkpoint, Position, SCHEMA, State};
use crate::error::EngineError;
use crate::io::writer::{CheckpointJob, WriteJob};
use crate::protocol::{Ticket, Written};
use crate::stages::{Cursor, EvaluationKind, ShardTask, Stage};
use hydra_sched::ShardTaskKind;
use std::path::{Path, PathBuf};

/// The next thing to do with a task that has come to rest.
pub(crate) enum Rest {
    /// Nothing: it goes on, or waits.
    Nothing,
    /// Its checkpoint is to be written.
    Checkpoint(CheckpointJob),
    /// Its masters make room for others.
    Leave,
    /// Its best masters are to be put back.
    Restore,
    /// Its model is to be hashed and written.
    Write(WriteJob),
    /// It is over: it has failed, and there is nothing to write.
    Over,
}

/// The meaning of a failure for its task.
pub(crate) enum Fate {
    /// Nothing that was not said before, or not yet: it ends when what is under way has ended.
    GoesOn,
    /// Its claims come to nothing; what it has trained is written.
    GivesUp,
    /// It is set aside.
    Fails(EngineError),
}

impl LiveTask {
    /// Goes to where the task's checkpoint says; returns whether it has one.
    pub(crate) fn resume(&mut self, at_s: f64) -> bool {
        let Some(state) = self.info.task.resume.as_ref().map(Checkpoint::state) else { return false };
        let State { step, position, results, .. } = state.clone();
        self.results = Results::of(results, self.info.chain());
        let stage = match position {
            Position::Finished { .. } if !self.info.task.is_finished() => Stage::Write,
            _ => position.stage(),
        };
        match position {
            Position::Evaluate { batch, sums, .. } => {
                (self.underway.evaluation, self.underway.known) = (sums, batch);
            }
            Position::Finished { sha256, dir } if stage == Stage::Finished => {
                // Its model may have been moved to where the task would write it now.
                let here = self.info.task.output_dir().filter(|here| dir.is_some() && here.is_dir());
                self.results.dir = here.map(Path::to_owned).or(dir);
                self.results.sha256 = Some(sha256);
                self.phase.change(Change::Written);
            }
            _ => {}
        }
        self.cursor = Cursor::resumed(self.cursor.program().clone(), step, stage);
        self.checkpoint = CheckpointClock::new(&self.cursor, at_s, self.info.admitted.master_bytes);
        // Frozen buffers are always up to date.
        self.versions.iter_mut().filter(|version| **version == 0).for_each(|version| *version = step);
        true
    }

    fn go_to(&mut self, step: usize, stage: Stage) {
        self.cursor.go_to(step, stage);
    }

    /// The state of the task at rest, for a checkpoint.
    fn state(&self) -> Option<Box<State>> {
        let position = match self.cursor.saved_stage() {
            Stage::Evaluate { kind, batch } => {
                Position::Evaluate { kind, batch, sums: self.underway.evaluation.clone() }
            }
            Stage::Restore => Position::Restore,
            Stage::Write => Position::Write,
            _ => Position::Train,
        };
        Some(Box::new(State {
            schema: SCHEMA,
            identity: self.info.identity.clone()?,
            step: self.cursor.step(),
            steps: self.cursor.program().steps,
            position,
            results: self.results.saved(),
            frozen: self.frozen.clone(),
        }))
    }

    /// Returns whether there is a file for its checkpoint, and something to save that was not saved before.
    pub(crate) fn wants_checkpoint(&self) -> bool {
        let behind = self.checkpoint.is_behind(&self.cursor) && !self.phase.gave_up();
        behind && self.info.task.checkpoint.is_some()
    }

    /// Moves a task on that waits for no shard task: releases what a finished microbatch pass held, and says what is next.
    /// `may_save` if the writer would take its checkpoint now.
    pub(crate) fn settle(&mut self, may_save: bool) -> Rest {
        // What is on its way down of a task that failed may be stepped yet.
        let fails = self.phase.gave_up() || matches!(self.phase, Phase::Failing { .. });
        let stepped = !fails || self.in_flight.downloading == 0;
        if !self.has_begun() || self.request.is_some() || !self.is_at_rest() || !stepped {
            return Rest::Nothing;
        }
        if self.memory.active.is_some() {
            self.release();
        }
        let stage = self.cursor.stage();
        let due = std::mem::take(&mut self.checkpoint.due) && (self.phase.ends_at_rest() || may_save);
        if !matches!(stage, Stage::Write | Stage::Finished)
            && due
            && let Some(job) = self.checkpoint_job()
        {
            self.request = Some(Request::Checkpoint);
            return Rest::Checkpoint(job);
        }
        if !self.phase.ends_at_rest()
            && let Some(job) = self.save_here().and_then(|file| self.job_into(file))
        {
            self.request = Some(Request::Save);
            return Rest::Checkpoint(job);
        }
        if self.may_leave() {
            return Rest::Leave;
        }
        self.stop_here();
        match self.cursor.stage() {
            Stage::Restore => {
                self.request = Some(Request::Restore);
                Rest::Restore
            }
            Stage::Write => {
                self.request = Some(Request::Write);
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

    /// Ends a task at rest that cannot go on or is to stop.
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
                // Before the test the best masters are there already.
                let tests = matches!(stage, Stage::Evaluate { kind: EvaluationKind::Test, .. });
                self.cursor.stop(self.results.best.is_some() && !tests);
                self.phase.change(Change::Close { trained: true });
            }
            _ => {}
        }
    }

    /// The stage of a task that failed: the best masters are put back, if there are any, and what there is is written.
    fn last_stage(&self) -> Stage {
        if self.results.best.is_some() { Stage::Restore } else { Stage::Write }
    }

    /// The best masters are in place again.
    pub(crate) fn restored(&mut self) {
        self.request = None;
        // One that is to stop only now is saved first, before its test.
        self.cursor.waited(self.phase.is_closing());
    }

    /// The model was hashed and written.
    pub(crate) fn written(&mut self, written: Written) {
        self.request = None;
        self.results.sha256 = Some(written.sha256);
        self.results.dir = written.dir;
        self.cursor.waited(false);
        self.phase.change(Change::Written);
    }

    /// Says where the weights are of a task whose model could not be written, if they were saved before.
    pub(crate) fn with_checkpoint(&self, error: EngineError) -> EngineError {
        let EngineError::NotWritten { checkpoint: checkpoint @ (None | Some(Err(_))), source } = error else {
            return error;
        };
        // Of a task that diverged other weights were to be written than those that were saved last.
        let saved_before = || {
            let file = self.info.task.checkpoint.clone().filter(|_| self.phase.failure().is_none())?;
            let is_this = |saved: Checkpoint| saved.step() == self.cursor.step();
            Checkpoint::open(&file).is_ok_and(is_this).then_some(file)
        };
        EngineError::NotWritten { checkpoint: saved_before().map(Ok).or(checkpoint), source }
    }

    /// The task cannot go on with this shard task, which was claimed with this ticket, or would be. Where no backward of
    /// the minibatch has begun, it ends before the minibatch, with all that it has trained.
    pub(crate) fn fails_at(&mut self, next: &ShardTask, ticket: Ticket, error: EngineError) -> Fate {
        // Of two that fail the earlier one counts.
        if self.phase.gave_up() || self.phase.failing_before().is_some_and(|before| before <= ticket) {
            return Fate::GoesOn;
        }
        // Then the masters are those before its minibatch, now and later.
        let stepped_nothing =
            next.kind != ShardTaskKind::Backward || next.shard + 1 == self.info.shards.len();
        if !stepped_nothing {
            // It ends before this minibatch, of which another microbatch has failed.
            let ends_before = matches!(self.phase, Phase::Failing { .. }) && self.cursor.step() == next.step;
            return if ends_before { Fate::GoesOn } else { self.fails_in(next.step, error) };
        }
        let stage = match next.stage {
            Stage::Train { .. } => Stage::Train { microbatch: 0 },
            Stage::Evaluate { kind, batch } => {
                Stage::Evaluate { kind, batch: self.first_unknown(kind, batch, next.step) }
            }
            stage => stage,
        };
        self.go_to(next.step, stage);
        self.phase.change(Change::MarkFailed { error, before: Some(ticket) });
        Fate::GoesOn
    }

    /// The first batch of an evaluation whose sums are not known, if this batch of it fails after `step` minibatches.
    fn first_unknown(&self, kind: EvaluationKind, batch: usize, step: usize) -> usize {
        match self.cursor.program().shares(kind) {
            true => batch,
            false if self.cursor.is_evaluating(kind, step) => self.cursor.evaluated(),
            false => self.underway.known,
        }
    }

    /// The task failed in the middle of a minibatch, or its loss is no number: it is over when its best masters so far, if
    /// there are any, are written as its model.
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

    /// The output of the shard task `maker` of minibatch `step` could not be taken down; `ticket` is the next one that is
    /// given out.
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

    /// Gradients of minibatch `step` could not be taken down. Where the task ends before that minibatch, nobody waits for
    /// them.
    pub(crate) fn gradients_lost(&mut self, step: usize, error: EngineError) -> Fate {
        match self.phase.failing_before().is_none() || step < self.cursor.step() {
            true => self.fails_in(step, error),
            false => Fate::GoesOn,
        }
    }

    /// Its data cannot be read. It ends when what is under way has ended; microbatch groups of an evaluation are not gone on with.
    pub(crate) fn mark_failed(&mut self, error: EngineError) {
        if !self.cursor.is_between_groups() {
            self.go_to(self.cursor.step(), self.cursor.saved_stage());
        }
        self.phase.change(Change::MarkFailed { error, before: None });
    }

    /// Returns whether nothing of it is under way or asked for: it could only be claimed.
    pub(crate) fn awaits_nothing(&self) -> bool {
        let ends = matches!(self.phase, Phase::Failing { .. });
        let asked = self.request.is_some() || self.ahead.reads() || ends;
        self.in_flight.is_idle() && self.is_settled() && !asked && !self.awaits_steps()
    }

    /// No device is left for the task. What it has claimed fails by itself.
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

    /// Returns whether what this claim makes is of no use any more.
    pub(crate) fn gives_up_on(&self, claim: &Claim) -> bool {
        self.phase.gave_up() || self.phase.failing_before().is_some_and(|ticket| claim.ticket > ticket)
    }

    /// Gives up what a microbatch pass holds.
    pub(crate) fn release(&mut self) {
        self.microbatch_pass.release();
        // Of a minibatch that failed there are gradients at the optimizer, until the task has ended.
        let failing = self.phase.gave_up() || matches!(self.phase, Phase::Failing { .. });
        if self.phase.is_over() || !failing {
            self.memory.active = None;
        }
        if self.phase.is_over() {
            self.ahead.release();
            self.memory.waiting = None;
        }
    }
}
