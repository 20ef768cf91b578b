//! The shard tasks of a task that are in flight: what the engine knows of each beyond the state machine.

use crate::device::Adding;
use crate::protocol::Ticket;
use hydra_core::DeviceId;
use hydra_sched::program::{self, ShardTask};

/// A shard task that a device can claim, and the replica of its microbatch group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Next {
    pub replica: usize,
    pub what: ShardTask,
}

/// What a task knows of a claim in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claimed {
    pub ticket: Ticket,
    pub adding: Adding,
}

/// The claimed and the running shard task of each replica.
pub(crate) type InFlight = program::InFlight<DeviceId, Claimed>;
