//! The shard tasks of a task that are under way.

use super::Claim;
use crate::device::Adding;
use crate::protocol::Ticket;
use crate::stages::ShardTask;
use hydra_core::DeviceId;

/// A claim that waits to start, a shard task that computes, and what is on its way down.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    /// The device that has claimed the next shard task.
    claimed: Option<DeviceId>,
    running: Option<Running>,
    /// Shard tasks that are done, of which something may still be on its way down.
    pub downloading: usize,
}

/// A shard task that computes.
#[derive(Clone, Copy, Debug)]
struct Running {
    device: DeviceId,
    ticket: Ticket,
    what: ShardTask,
    adding: Adding,
}

impl Flight {
    /// Returns whether nothing runs or is claimed.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_none() && self.claimed.is_none()
    }

    /// Returns whether a device has claimed a shard task that has not started.
    pub(crate) fn is_claimed(&self) -> bool {
        self.claimed.is_some()
    }

    /// The shard task that computes.
    pub(crate) fn running(&self) -> Option<ShardTask> {
        self.running.map(|running| running.what)
    }

    /// The shard task that one on `device` would follow; nothing where none computes. `Err` if none can be claimed there
    /// now.
    pub(crate) fn followed_on(&self, device: DeviceId, prefetch: bool) -> Result<Option<ShardTask>, ()> {
        match self.running {
            _ if self.claimed.is_some() => Err(()),
            None => Ok(None),
            Some(running) if prefetch && running.device == device => Ok(Some(running.what)),
            Some(_) => Err(()),
        }
    }

    /// Returns whether the gradients of the shard task that computes are those of the microbatch before, and can be added to
    /// on its device, where alone this one can be claimed now.
    pub(crate) fn may_add_to(&self, next: &ShardTask) -> bool {
        self.running.is_some_and(|running| {
            running.adding != Adding::Nothing && running.what.is_microbatch_before(next)
        })
    }

    pub(crate) fn claim(&mut self, device: DeviceId) {
        self.claimed = Some(device);
    }

    /// A claim has started to compute.
    pub(crate) fn start(&mut self, claim: &Claim, device: DeviceId) {
        self.claimed = None;
        let Claim { ticket, what, adding, .. } = *claim;
        self.running = Some(Running { device, ticket, what, adding });
    }

    /// The shard task that computed has ended well.
    pub(crate) fn finish(&mut self, ticket: Ticket) {
        debug_assert!(self.running.is_none_or(|running| running.ticket == ticket));
        self.running = None;
    }

    /// The shard tasks that ran or were claimed come to nothing.
    pub(crate) fn drop_all(&mut self) {
        (self.running, self.claimed) = (None, None);
    }

    /// A shard task failed, which had begun or was still claimed.
    pub(crate) fn fail(&mut self, had_begun: bool) {
        match had_begun {
            true => self.running = None,
            false => self.claimed = None,
        }
    }
}
