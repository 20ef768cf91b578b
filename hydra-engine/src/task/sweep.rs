//! The host memory of visits: the batches of their sweeps, and the tensors that their shard tasks hand to each other.

use super::Claim;
use crate::protocol::{Gradient, Inputs, Loaded, Output, Ticket};
use crate::stages::{self, ShardTask, Stage};
use hydra_core::{Batch, HostTensor};
use hydra_sched::ShardTaskKind;
use std::ops::Range;

/// An input that a shard task of a sweep makes.
#[derive(Debug)]
struct Slot<T> {
    maker: Ticket,
    value: Option<T>,
}

/// What the shard tasks of one sweep hand to each other.
#[derive(Debug)]
struct Sweep {
    /// The boundary activation in front of each shard.
    boundaries: Vec<Option<Slot<Vec<HostTensor>>>>,
    /// The gradient of the output of a shard.
    upstream: Option<(usize, Slot<Gradient<HostTensor>>)>,
}

impl Sweep {
    fn of(shards: usize) -> Self {
        Self { boundaries: (0..shards).map(|_| None).collect(), upstream: None }
    }

    fn boundary(&self, shard: usize) -> Option<&Vec<HostTensor>> {
        self.boundaries[shard].as_ref()?.value.as_ref()
    }

    fn upstream(&self, shard: usize) -> Option<&Gradient<HostTensor>> {
        let (of, slot) = self.upstream.as_ref()?;
        (*of == shard).then_some(())?;
        slot.value.as_ref()
    }
}

/// The host side of a visit.
#[derive(Debug, Default)]
struct VisitBuffers {
    /// The microbatches or batches of the visit.
    visit: Range<usize>,
    /// The batches of an evaluation's.
    batches: Vec<Batch>,
    /// One for each of them.
    sweeps: Vec<Sweep>,
}

impl VisitBuffers {
    /// The place of a sweep in the visit.
    fn place(&self, task: &ShardTask) -> Option<usize> {
        let sweep = task.stage.sweep();
        self.visit.contains(&sweep).then(|| sweep - self.visit.start)
    }

    fn sweep(&self, task: &ShardTask) -> Option<&Sweep> {
        self.sweeps.get(self.place(task)?)
    }
}

/// The host side of the visits that are under way, by lane.
#[derive(Debug)]
pub(crate) struct SweepBuffers {
    shards: usize,
    /// The first shard that reads targets.
    targets_from: usize,
    /// The minibatch or evaluation, by the visit of it that began last.
    of: Option<stages::Sweep>,
    /// The batches of the minibatch, one a microbatch.
    minibatch: Vec<Batch>,
    lanes: Vec<VisitBuffers>,
}

impl SweepBuffers {
    /// Nothing yet, of a model cut into these ranges of layers, the first of which that reads targets is told, in so many lanes.
    pub(crate) fn new(shards: &[Range<usize>], targets_from: usize, lanes: usize) -> Self {
        let lanes = (0..lanes).map(|_| VisitBuffers::default()).collect();
        let targets_from = shards.iter().take_while(|shard| shard.end <= targets_from).count();
        Self { shards: shards.len(), targets_from, of: None, minibatch: Vec::new(), lanes }
    }

    /// Makes room for what the shard tasks of a visit will make, with which a lane begins: `next` is the first of them. What
    /// those of the lane's last visit made goes, and all that is of another minibatch or evaluation.
    pub(crate) fn begin(&mut self, lane: usize, next: &ShardTask, visit: Range<usize>) {
        let of = stages::Sweep::of(next);
        if self.of.replace(of).is_none_or(|before| !before.is_beside(&of)) {
            self.release();
        }
        let sweeps = visit.clone().map(|_| Sweep::of(self.shards)).collect();
        self.lanes[lane] = VisitBuffers { visit, batches: Vec::new(), sweeps };
    }

    /// Has the batches of a whole minibatch, or of the evaluation's visit with which a lane has begun.
    pub(crate) fn read(&mut self, lane: usize, stage: Stage, batches: Vec<Batch>) {
        match stage {
            Stage::Train { .. } => self.minibatch = batches,
            _ => self.lanes[lane].batches = batches,
        }
    }

    /// Lets go of everything.
    pub(crate) fn release(&mut self) {
        self.minibatch.clear();
        self.lanes.iter_mut().for_each(|lane| *lane = VisitBuffers::default());
    }

    /// The batch of a lane's shard task, and the loss terms of its whole minibatch.
    pub(crate) fn batch(&self, lane: usize, next: &ShardTask) -> (&Batch, usize) {
        let of = &self.lanes[lane];
        let (batches, place) = match next.stage {
            Stage::Train { microbatch } => (&self.minibatch, microbatch),
            stage => (&of.batches, stage.sweep() - of.visit.start),
        };
        (&batches[place], batches.iter().map(|batch| batch.terms).sum())
    }

    /// Returns whether the inputs of a lane's shard task are on the host, or come from the one that it `follows` on its
    /// device.
    pub(crate) fn has_inputs(&self, lane: usize, next: &ShardTask, follows: Option<&ShardTask>) -> bool {
        let sweep = self.lanes[lane].sweep(next);
        let activation = next.shard == 0
            || sweep.is_some_and(|sweep| sweep.boundary(next.shard).is_some())
            || follows.is_some_and(|running| hands_activation(running, next));
        let upstream = !self.needs_upstream(next)
            || sweep.is_some_and(|sweep| sweep.upstream(next.shard).is_some())
            || follows.is_some_and(|running| hands_gradient(running, next));
        activation && upstream
    }

    /// The inputs of a lane's shard task that are on the host, and whether another one comes from the shard task before it
    /// on the device.
    pub(crate) fn inputs(&self, lane: usize, next: &ShardTask) -> (Inputs<HostTensor>, bool) {
        let ((batch, _), sweep) = (self.batch(lane, next), self.lanes[lane].sweep(next));
        let compares = next.shard >= self.targets_from;
        let upstream = sweep.and_then(|sweep| sweep.upstream(next.shard));
        let inputs = Inputs {
            activation: match next.shard {
                0 => Some(batch.inputs.parts.clone()),
                shard => sweep.and_then(|sweep| sweep.boundary(shard)).cloned(),
            },
            targets: if compares { batch.targets.parts.clone() } else { Vec::new() },
            upstream: upstream.filter(|_| self.needs_upstream(next)).cloned(),
        };
        let follows = inputs.activation.is_none() || self.needs_upstream(next) && inputs.upstream.is_none();
        (inputs, follows)
    }

    fn needs_upstream(&self, next: &ShardTask) -> bool {
        next.kind == ShardTaskKind::Backward && next.shard + 1 < self.shards
    }

    /// Returns whether the output of `claim` is needed on the host, if `handed` tells that the next shard task of the sweep
    /// takes it on the device.
    pub(crate) fn needs_output(&self, claim: &Claim, handed: bool) -> bool {
        let checkpoint = claim.what.kind == ShardTaskKind::Forward && claim.what.shard + 2 < self.shards;
        !handed || checkpoint
    }

    /// Announces that the output of `claim` will arrive.
    pub(crate) fn expect_output(&mut self, claim: &Claim) {
        let lane = &mut self.lanes[claim.lane];
        let place = lane.place(&claim.what);
        let Some(sweep) = place.and_then(|place| lane.sweeps.get_mut(place)) else { return };
        match claim.what.kind {
            ShardTaskKind::Backward => {
                if let Some(shard) = claim.what.shard.checked_sub(1) {
                    sweep.upstream = Some((shard, Slot { maker: claim.ticket, value: None }));
                }
            }
            ShardTaskKind::Forward | ShardTaskKind::Evaluate => {
                if let Some(slot) = sweep.boundaries.get_mut(claim.what.shard + 1) {
                    *slot = Some(Slot { maker: claim.ticket, value: None });
                }
            }
        }
    }

    /// The lane whose visit waits for the output of the shard task `maker`.
    pub(crate) fn lane_awaiting(&self, maker: Ticket) -> Option<usize> {
        let awaits = |sweep: &Sweep| {
            let mut boundaries = sweep.boundaries.iter().flatten();
            boundaries.any(|slot| slot.maker == maker)
                || sweep.upstream.as_ref().is_some_and(|(_, slot)| slot.maker == maker)
        };
        self.lanes.iter().position(|lane| lane.sweeps.iter().any(awaits))
    }

    /// The output of the shard task `maker` has arrived. One of an earlier sweep is dropped.
    pub(crate) fn output_arrived(&mut self, maker: Ticket, output: Output<HostTensor>) {
        let sweeps = self.lanes.iter_mut().flat_map(|lane| &mut lane.sweeps);
        match output {
            Output::None => {}
            Output::Activation(value) => {
                let mut slots = sweeps.flat_map(|sweep| &mut sweep.boundaries).flatten();
                if let Some(slot) = slots.find(|slot| slot.maker == maker) {
                    slot.value = Some(value);
                }
            }
            Output::Gradient(value) => {
                let mut slots = sweeps.filter_map(|sweep| sweep.upstream.as_mut());
                if let Some((_, slot)) = slots.find(|(_, slot)| slot.maker == maker) {
                    slot.value = Some(value);
                }
            }
        }
    }
}

fn hands_activation(running: &ShardTask, next: &ShardTask) -> bool {
    running.kind != ShardTaskKind::Backward && running.stage == next.stage && running.shard + 1 == next.shard
}

fn hands_gradient(running: &ShardTask, next: &ShardTask) -> bool {
    running.kind == ShardTaskKind::Backward && running.stage == next.stage && running.shard == next.shard + 1
}

/// The batches of a task that are read ahead, for at most one sweep at a time.
#[derive(Default)]
pub(crate) struct ReadAhead {
    loading: Option<stages::Sweep>,
    loaded: Option<Loaded>,
}

impl ReadAhead {
    /// Returns whether batches are being read. They have memory of their own, and whatever else becomes of the task does
    /// not wait for them.
    pub(crate) fn reads(&self) -> bool {
        self.loading.is_some()
    }

    /// Returns whether the batches of this sweep are being read.
    pub(crate) fn reads_for(&self, sweep: stages::Sweep) -> bool {
        self.loading == Some(sweep)
    }

    /// Returns whether the batches of this sweep, which begins next, are neither there nor being read. Those of another
    /// sweep nobody wants any more.
    pub(crate) fn is_free_for(&mut self, sweep: stages::Sweep) -> bool {
        self.loaded.take_if(|loaded| loaded.of != sweep);
        self.loaded.is_none()
    }

    pub(crate) fn begin(&mut self, sweep: stages::Sweep) {
        self.loading = Some(sweep);
    }

    /// Batches were read ahead, or could not be; nobody wants them of a task that is over.
    pub(crate) fn arrived(&mut self, loaded: Loaded, wanted: bool) {
        self.loading = None;
        self.loaded = Some(loaded).filter(|_| wanted);
    }

    /// The batches that were read ahead for this sweep.
    pub(crate) fn take(&mut self, sweep: stages::Sweep) -> Option<Loaded> {
        self.loaded.take().filter(|loaded| loaded.of == sweep)
    }

    pub(crate) fn release(&mut self) {
        self.loaded = None;
    }
}
