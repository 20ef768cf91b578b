//! The shard tasks of a task that are in flight, by replica.

use super::Claim;
use crate::device::Adding;
use crate::protocol::Ticket;
use hydra_core::DeviceId;
use hydra_sched::program::ShardTask;

/// A shard task that a device can claim, and the replica of its microbatch group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Next {
    pub replica: usize,
    pub what: ShardTask,
}

/// The claimed and the running shard task of each replica, and the number of pending downloads.
#[derive(Debug)]
pub(crate) struct InFlight {
    replicas: Vec<ReplicaInFlight>,
    /// Finished shard tasks with a download that may still be pending.
    pub downloading: usize,
    /// The device that claimed a shard task last.
    pub ran_on: Option<DeviceId>,
}

/// The claim that waits to start, and the running shard task.
#[derive(Clone, Copy, Debug, Default)]
struct ReplicaInFlight {
    claimed: Option<UnderWay>,
    running: Option<UnderWay>,
}

/// A shard task that a device has claimed or computes.
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
    /// Nothing in flight, in `replicas` replicas.
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

    /// Returns whether a shard task of the replica is claimed and has not started.
    pub(crate) fn is_claimed(&self, replica: usize) -> bool {
        self.replicas[replica].claimed.is_some()
    }

    /// Returns whether any shard task is claimed and has not started.
    pub(crate) fn has_claims(&self) -> bool {
        self.replicas.iter().any(|replica| replica.claimed.is_some())
    }

    /// Returns whether a shard task runs.
    pub(crate) fn runs(&self) -> bool {
        self.replicas.iter().any(|replica| replica.running.is_some())
    }

    /// Returns whether the device runs a shard task.
    pub(crate) fn runs_on(&self, device: DeviceId) -> bool {
        let mut running = self.replicas.iter().filter_map(|replica| replica.running);
        running.any(|running| running.device == device)
    }

    /// Returns whether a running or claimed shard task satisfies `is_one`.
    pub(crate) fn has(&self, is_one: impl Fn(&ShardTask) -> bool) -> bool {
        self.under_way().any(|under_way| is_one(&under_way.what))
    }

    /// Returns whether another device claimed last and this one neither runs nor has claimed a shard task.
    pub(crate) fn ran_elsewhere(&self, device: DeviceId) -> bool {
        self.ran_on.is_some_and(|on| on != device) && !self.is_on(device)
    }

    /// Returns whether a device other than this one runs or has claimed a shard task.
    pub(crate) fn is_elsewhere(&self, device: DeviceId) -> bool {
        self.under_way().any(|under_way| under_way.device != device)
    }

    /// The replica whose shard task runs on the device and whose next one is unclaimed.
    pub(crate) fn replica_on(&self, device: DeviceId) -> Option<usize> {
        let runs_here =
            |replica: &ReplicaInFlight| replica.running.is_some_and(|running| running.device == device);
        self.replicas.iter().position(|replica| replica.claimed.is_none() && runs_here(replica))
    }

    /// Returns whether the device runs or has claimed a shard task.
    pub(crate) fn is_on(&self, device: DeviceId) -> bool {
        self.under_way().any(|under_way| under_way.device == device)
    }

    /// The running shard task that the next one of the replica would follow on `device`; `None` if none runs. `Err`
    /// if the replica has nothing claimable there now.
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

    /// Returns whether another replica is still in a stage or minibatch other than that of `next`.
    pub(crate) fn is_behind(&self, replica: usize, next: &ShardTask) -> bool {
        let others = self.replicas.iter().enumerate().filter(|(other, _)| *other != replica);
        let mut under_way = others.flat_map(|(_, other)| other.under_way());
        under_way.any(|other| !other.what.same_minibatch(next))
    }

    /// Returns whether the running shard task of the replica belongs to the microbatch before `next` and accumulates
    /// its gradients on the device. `next` can then be claimed only on that device.
    pub(crate) fn may_add_to(&self, replica: usize, next: &ShardTask) -> bool {
        self.replicas[replica].running.is_some_and(|running| {
            running.adding != Adding::Nothing && running.what.is_microbatch_before(next)
        })
    }

    pub(crate) fn claim(&mut self, claim: &Claim, device: DeviceId) {
        self.replicas[claim.replica].claimed = Some(UnderWay::of(claim, device));
        self.ran_on = Some(device);
    }

    /// Records that a claim started to compute.
    pub(crate) fn start(&mut self, claim: &Claim, device: DeviceId) {
        self.replicas[claim.replica] =
            ReplicaInFlight { claimed: None, running: Some(UnderWay::of(claim, device)) };
    }

    /// Records that a shard task ended, failed or was cancelled.
    pub(crate) fn end(&mut self, claim: &Claim) {
        let ReplicaInFlight { claimed, running } = &mut self.replicas[claim.replica];
        for under_way in [claimed, running] {
            under_way.take_if(|under_way| under_way.ticket == claim.ticket);
        }
    }
}
