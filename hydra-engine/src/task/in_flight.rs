//! The shard tasks of a task that are under way, by the replicas in which its microbatch groups go on.

use super::Claim;
use crate::device::Adding;
use crate::protocol::Ticket;
use crate::stages::{MicrobatchPass, ShardTask};
use hydra_core::DeviceId;

/// What of each replica is claimed and computes, and what is on its way down.
#[derive(Debug)]
pub(crate) struct InFlight {
    replicas: Vec<ReplicaInFlight>,
    /// Shard tasks that are done, of which something may still be on its way down.
    pub downloading: usize,
    /// The device that claimed one last.
    pub ran_on: Option<DeviceId>,
}

/// A claim that waits to start, and a shard task that computes.
#[derive(Clone, Copy, Debug, Default)]
struct ReplicaInFlight {
    claimed: Option<UnderWay>,
    running: Option<UnderWay>,
}

/// A shard task that a device has claimed, or computes.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    device: DeviceId,
    ticket: Ticket,
    what: ShardTask,
    adding: Adding,
}

impl UnderWay {
    fn of(claim: &Claim, device: DeviceId) -> Self {
        let Claim { ticket, what, adding, .. } = *claim;
        Self { device, ticket, what, adding }
    }
}

impl ReplicaInFlight {
    fn under_way(&self) -> impl Iterator<Item = &UnderWay> {
        self.claimed.iter().chain(&self.running)
    }
}

impl InFlight {
    /// Nothing yet, in so many replicas.
    pub(crate) fn new(replicas: usize) -> Self {
        Self { replicas: vec![ReplicaInFlight::default(); replicas], downloading: 0, ran_on: None }
    }

    fn under_way(&self) -> impl Iterator<Item = &UnderWay> {
        self.replicas.iter().flat_map(ReplicaInFlight::under_way)
    }

    /// Returns whether nothing runs or is claimed.
    pub(crate) fn is_idle(&self) -> bool {
        self.under_way().next().is_none()
    }

    /// Returns whether nothing of a replica runs or is claimed.
    pub(crate) fn is_replica_idle(&self, replica: usize) -> bool {
        self.replicas[replica].under_way().next().is_none()
    }

    /// Returns whether a device has claimed a shard task of the replica that has not started.
    pub(crate) fn is_claimed(&self, replica: usize) -> bool {
        self.replicas[replica].claimed.is_some()
    }

    /// Returns whether a device has claimed a shard task that has not started.
    pub(crate) fn has_claims(&self) -> bool {
        self.replicas.iter().any(|replica| replica.claimed.is_some())
    }

    /// Returns whether a shard task computes.
    pub(crate) fn runs(&self) -> bool {
        self.replicas.iter().any(|replica| replica.running.is_some())
    }

    /// Returns whether the device computes a shard task.
    pub(crate) fn runs_on(&self, device: DeviceId) -> bool {
        let mut running = self.replicas.iter().filter_map(|replica| replica.running);
        running.any(|running| running.device == device)
    }

    /// Returns whether one of the shard tasks that compute or are claimed is such a one.
    pub(crate) fn has(&self, is_one: impl Fn(&ShardTask) -> bool) -> bool {
        self.under_way().any(|under_way| is_one(&under_way.what))
    }

    /// Returns whether another device claimed a shard task last, and this one computes or has claimed none beside that.
    pub(crate) fn ran_elsewhere(&self, device: DeviceId) -> bool {
        self.ran_on.is_some_and(|on| on != device) && !self.is_on(device)
    }

    /// Returns whether a device beside this one computes a shard task, or has claimed one.
    pub(crate) fn is_elsewhere(&self, device: DeviceId) -> bool {
        self.under_way().any(|under_way| under_way.device != device)
    }

    /// The replica of which the device computes a shard task and no device has claimed the next one.
    pub(crate) fn replica_on(&self, device: DeviceId) -> Option<usize> {
        let runs_here =
            |replica: &ReplicaInFlight| replica.running.is_some_and(|running| running.device == device);
        self.replicas.iter().position(|replica| replica.claimed.is_none() && runs_here(replica))
    }

    /// Returns whether the device computes a shard task, or has claimed one.
    pub(crate) fn is_on(&self, device: DeviceId) -> bool {
        self.under_way().any(|under_way| under_way.device == device)
    }

    /// The shard task that one of the replica on `device` would follow; nothing where none computes. `Err` if none can be
    /// claimed there now.
    pub(crate) fn followed_on(
        &self,
        replica: usize,
        device: DeviceId,
        prefetch: bool,
    ) -> Result<Option<ShardTask>, ()> {
        let ReplicaInFlight { claimed, running } = self.replicas[replica];
        match running {
            _ if claimed.is_some() => Err(()),
            None => Ok(None),
            Some(running) if prefetch && running.device == device => Ok(Some(running.what)),
            Some(_) => Err(()),
        }
    }

    /// Returns whether another replica is not done yet with a stage, or a minibatch, other than that of `next`.
    pub(crate) fn is_behind(&self, replica: usize, next: &ShardTask) -> bool {
        let others = self.replicas.iter().enumerate().filter(|(other, _)| *other != replica);
        let mut under_way = others.flat_map(|(_, other)| other.under_way());
        under_way.any(|other| !MicrobatchPass::of(&other.what).is_beside(&MicrobatchPass::of(next)))
    }

    /// Returns whether the gradients of the shard task that the replica computes are those of the microbatch before, and can be
    /// added to on its device, where alone this one can be claimed now.
    pub(crate) fn may_add_to(&self, replica: usize, next: &ShardTask) -> bool {
        self.replicas[replica].running.is_some_and(|running| {
            running.adding != Adding::Nothing && running.what.is_microbatch_before(next)
        })
    }

    pub(crate) fn claim(&mut self, claim: &Claim, device: DeviceId) {
        self.replicas[claim.replica].claimed = Some(UnderWay::of(claim, device));
        self.ran_on = Some(device);
    }

    /// A claim has started to compute.
    pub(crate) fn start(&mut self, claim: &Claim, device: DeviceId) {
        self.replicas[claim.replica] =
            ReplicaInFlight { claimed: None, running: Some(UnderWay::of(claim, device)) };
    }

    /// A shard task has ended, well or not, or comes to nothing.
    pub(crate) fn end(&mut self, claim: &Claim) {
        let ReplicaInFlight { claimed, running } = &mut self.replicas[claim.replica];
        for under_way in [claimed, running] {
            under_way.take_if(|under_way| under_way.ticket == claim.ticket);
        }
    }
}
