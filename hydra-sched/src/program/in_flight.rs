//! The shard tasks of a task that devices have claimed or compute, and the replica that a device continues with: what
//! an engine and a simulator decide alike.
//!
//! It knows the cursor and nothing of readiness: whether weights, inputs and memory are there is asked of the caller.

use super::{Cursor, ShardTask};

/// A shard task that a device has claimed or computes. `D` identifies a device, and `C` is what the caller knows of the
/// claim.
#[derive(Clone, Copy, Debug)]
pub struct UnderWay<D, C> {
    /// The device.
    pub device: D,
    /// The shard task.
    pub task: ShardTask,
    /// What the caller knows of the claim.
    pub claim: C,
}

/// The claim of a replica that waits to start, and the shard task that runs.
#[derive(Clone, Copy, Debug)]
struct InReplica<D, C> {
    claimed: Option<UnderWay<D, C>>,
    running: Option<UnderWay<D, C>>,
}

impl<D: Copy + Eq, C: Copy> InReplica<D, C> {
    fn under_way(&self) -> impl Iterator<Item = &UnderWay<D, C>> {
        self.claimed.iter().chain(&self.running)
    }

    fn is_idle(&self) -> bool {
        self.claimed.is_none() && self.running.is_none()
    }

    /// Returns whether its shard task runs on the device and its next one is unclaimed.
    fn continues_on(&self, device: D) -> bool {
        self.claimed.is_none() && self.running.is_some_and(|running| running.device == device)
    }
}

/// The claimed and the running shard task of each replica of a task.
#[derive(Clone, Debug)]
pub struct InFlight<D, C = ()> {
    replicas: Vec<InReplica<D, C>>,
    last_device: Option<D>,
}

impl<D: Copy + Eq, C: Copy> InFlight<D, C> {
    /// Nothing in flight, in `replicas` replicas.
    pub fn new(replicas: usize) -> Self {
        Self { replicas: vec![InReplica { claimed: None, running: None }; replicas], last_device: None }
    }

    fn under_way(&self) -> impl Iterator<Item = &UnderWay<D, C>> {
        self.replicas.iter().flat_map(InReplica::under_way)
    }

    /// The device that claimed a shard task last.
    pub fn last_device(&self) -> Option<D> {
        self.last_device
    }

    /// Returns true if nothing runs or is claimed.
    pub fn is_idle(&self) -> bool {
        self.replicas.iter().all(InReplica::is_idle)
    }

    /// Returns true if nothing of a replica runs or is claimed.
    pub fn is_replica_idle(&self, replica: usize) -> bool {
        self.replicas[replica].is_idle()
    }

    /// Returns true if a shard task of the replica is claimed and has not started.
    pub fn is_claimed(&self, replica: usize) -> bool {
        self.replicas[replica].claimed.is_some()
    }

    /// Returns true if any shard task is claimed and has not started.
    pub fn has_claims(&self) -> bool {
        self.replicas.iter().any(|replica| replica.claimed.is_some())
    }

    /// The running shard task of a replica.
    pub fn running(&self, replica: usize) -> Option<&UnderWay<D, C>> {
        self.replicas[replica].running.as_ref()
    }

    /// The devices that compute a shard task.
    pub fn computing(&self) -> impl Iterator<Item = D> {
        self.replicas.iter().filter_map(|replica| replica.running.map(|running| running.device))
    }

    /// Returns true if a running or claimed shard task satisfies `is_one`.
    pub fn has(&self, is_one: impl Fn(&ShardTask) -> bool) -> bool {
        self.under_way().any(|under_way| is_one(&under_way.task))
    }

    /// Returns true if the device runs or has claimed a shard task.
    pub fn is_on(&self, device: D) -> bool {
        self.under_way().any(|under_way| under_way.device == device)
    }

    /// Returns true if a device other than this one runs or has claimed a shard task.
    pub fn is_elsewhere(&self, device: D) -> bool {
        self.under_way().any(|under_way| under_way.device != device)
    }

    /// Returns true if another device claimed last, and this one neither runs nor has claimed a shard task.
    pub fn ran_elsewhere(&self, device: D) -> bool {
        self.last_device.is_some_and(|last| last != device) && !self.is_on(device)
    }

    /// The replica whose shard task runs on the device and whose next one is unclaimed.
    pub fn replica_on(&self, device: D) -> Option<usize> {
        self.replicas.iter().position(|replica| replica.continues_on(device))
    }

    /// The replica whose next shard task a device takes, and that shard task, if one is `ready`; `None` stands for a
    /// device that does not compute the task. The order of preference is: the successor of the one that the device
    /// computes, then microbatch groups that have started, then one that starts, but not in a second replica on the
    /// same device. A replica starts no minibatch or evaluation before the others have finished the previous one.
    pub fn claimable(
        &self,
        cursor: &Cursor,
        device: Option<D>,
        ready: impl Fn(usize, &ShardTask) -> bool,
    ) -> Option<(usize, ShardTask)> {
        let is_begun = |replica: &usize| cursor.is_in_group(*replica);
        let is_free = |replica: &usize| self.is_replica_idle(*replica);
        let own = device.and_then(|device| self.replica_on(device));
        let (goes_on, begins) = (own.filter(is_begun), own.filter(|replica| !is_begun(replica)));
        let begun = cursor.replicas_in_group().into_iter().filter(is_free);
        let free = (0..self.replicas.len()).find(|replica| is_free(replica) && !is_begun(replica));
        let free = free.filter(|_| device.is_none_or(|device| !self.is_on(device)));
        let mut replicas = goes_on.into_iter().chain(begun).chain(begins).chain(free);
        replicas.find_map(|replica| {
            let next = cursor.peek_in(replica)?;
            let may_begin = is_begun(&replica) || !self.is_behind(replica, &next);
            (may_begin && ready(replica, &next)).then_some((replica, next))
        })
    }

    /// Returns true if another replica is still in a stage or minibatch other than that of `next`.
    fn is_behind(&self, replica: usize, next: &ShardTask) -> bool {
        let others = self.replicas.iter().enumerate().filter(|(other, _)| *other != replica);
        let mut under_way = others.flat_map(|(_, other)| other.under_way());
        under_way.any(|other| !other.task.same_minibatch(next))
    }

    /// Records that a device claimed the next shard task of a replica.
    pub fn claim(&mut self, replica: usize, claimed: UnderWay<D, C>) {
        self.last_device = Some(claimed.device);
        self.replicas[replica].claimed = Some(claimed);
    }

    /// Records that the claimed shard task of a replica started to compute.
    pub fn start(&mut self, replica: usize) {
        let of = &mut self.replicas[replica];
        of.running = of.claimed.take();
    }

    /// Records that a shard task of a replica ended, failed or was cancelled.
    pub fn end(&mut self, replica: usize, is_it: impl Fn(&UnderWay<D, C>) -> bool) {
        let InReplica { claimed, running } = &mut self.replicas[replica];
        for under_way in [claimed, running] {
            under_way.take_if(|under_way| is_it(under_way));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{EvaluationPoints, MicrobatchGroup, Microbatches, Program};
    use super::*;

    fn cursor(steps: usize) -> Cursor {
        Cursor::new(Program {
            shards: 2,
            first_trained: 0,
            steps,
            microbatches: Microbatches { each: 3, last: 3, epoch: 1 },
            reads_statistic: false,
            microbatch_group: MicrobatchGroup::ONE,
            validation: 0,
            test: 0,
            rounds: None,
            initial_validation: false,
            replicas: 2,
            shared: false,
            evaluations: EvaluationPoints::default(),
        })
    }

    /// Claims and starts what the device takes; returns its replica, microbatch and shard.
    fn take(in_flight: &mut InFlight<usize>, cursor: &mut Cursor, device: usize) -> Option<[usize; 3]> {
        let (replica, task) = in_flight.claimable(cursor, Some(device), |_, _| true)?;
        cursor.advance(replica);
        in_flight.claim(replica, UnderWay { device, task, claim: () });
        assert!(in_flight.is_claimed(replica) && in_flight.last_device() == Some(device));
        in_flight.start(replica);
        Some([replica, task.microbatch_pass(), task.shard])
    }

    #[test]
    fn a_device_goes_on_with_its_replica_before_it_begins_another() {
        let (mut in_flight, mut cursor) = (InFlight::new(2), cursor(1));
        assert_eq!(take(&mut in_flight, &mut cursor, 0), Some([0, 0, 0]));
        assert_eq!(take(&mut in_flight, &mut cursor, 0), Some([0, 0, 1]), "the successor");
        let beginning = in_flight.claimable(&cursor, None, |_, _| true).unwrap();
        assert_eq!((beginning.0, beginning.1.microbatch_pass()), (1, 1), "for a device without a shard task");
        assert_eq!(take(&mut in_flight, &mut cursor, 1), Some([1, 1, 0]));
        in_flight.end(1, |_| true);
        assert!(in_flight.is_replica_idle(1) && in_flight.is_on(0) && in_flight.is_elsewhere(1));
        assert!(in_flight.ran_elsewhere(2) && !in_flight.ran_elsewhere(0));
        assert_eq!(
            take(&mut in_flight, &mut cursor, 2),
            Some([1, 1, 1]),
            "a microbatch group that has started"
        );
        let ready = |replica, _: &ShardTask| replica != 0;
        assert_eq!(in_flight.claimable(&cursor, Some(0), ready), None, "no second replica on one device");
    }

    #[test]
    fn a_minibatch_begins_after_the_previous_one() {
        let (mut in_flight, mut cursor) = (InFlight::new(2), cursor(2));
        while cursor.step() == 0 {
            let device = cursor.first_in_group().unwrap_or(0);
            take(&mut in_flight, &mut cursor, device);
        }
        // The last shard task of the minibatch still runs, in one of two replicas.
        let running = (0..2).find(|replica| in_flight.running(*replica).is_some()).unwrap();
        assert_eq!(in_flight.claimable(&cursor, None, |_, _| true), None);
        in_flight.end(running, |_| true);
        in_flight.end(1 - running, |_| true);
        assert!(in_flight.is_idle() && in_flight.claimable(&cursor, None, |_, _| true).is_some());
    }
}
