//! What becomes of a task that fails.

use super::model::{Claim, Model};
use crate::error::EngineError;
use crate::protocol::Ticket;
use crate::stages::{Cursor, ShardTask, Stage};
use hydra_sched::ShardTaskKind;
use std::sync::Arc;

impl Model {
    /// The task has failed in minibatch `step`: what is left to do is to put back its best masters, if there are any, and
    /// to write what there is.
    pub(crate) fn give_up(&mut self, step: usize, error: EngineError) {
        let stage = if self.results.best.is_some() { Stage::Restore } else { Stage::Write };
        self.results.failure = Some(Arc::new(error));
        self.cursor = Cursor::resumed(self.cursor.program().clone(), step, stage);
        self.cut_short = true;
    }

    /// Whether what shard tasks make is of no use any more.
    pub(crate) fn gives_up(&self) -> bool {
        self.ended.is_some() || self.results.failure.is_some()
    }

    /// Whether the task fails, or has.
    pub(crate) fn is_failing(&self) -> bool {
        self.gives_up() || self.cannot_go_on.is_some()
    }

    /// Whether what this claim makes is of no use any more.
    pub(crate) fn gives_up_on(&self, claim: &Claim) -> bool {
        self.gives_up() || self.ends_before.is_some_and(|ticket| claim.ticket > ticket)
    }

    /// A shard task came to nothing.
    pub(crate) fn dropped(&mut self) {
        (self.running, self.running_task, self.claimed) = (None, None, None);
    }

    /// Whether the masters are those before its minibatch, now and later, if this shard task does not end well.
    pub(crate) fn has_stepped_nothing_before(&self, task: &ShardTask) -> bool {
        task.kind != ShardTaskKind::Backward || task.shard + 1 == self.shards.len()
    }

    /// Goes back to the beginning of the minibatch, or the batch of an evaluation, of this shard task, which failed.
    pub(crate) fn go_back_to(&mut self, task: &ShardTask, ticket: Ticket) {
        self.ends_before = Some(ticket);
        let stage = match task.stage {
            Stage::Train { .. } => Stage::Train { microbatch: 0 },
            stage => stage,
        };
        self.cursor = Cursor::resumed(self.cursor.program().clone(), task.step, stage);
    }

    /// A shard task failed, which had begun or was still claimed.
    pub(crate) fn failed(&mut self, had_begun: bool) {
        match had_begun {
            true => (self.running, self.running_task) = (None, None),
            false => self.claimed = None,
        }
    }
}
