//! The host memory of a visit: the batches of its sweeps, and the tensors that their shard tasks hand to each other.

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
#[derive(Debug)]
pub(crate) struct SweepBuffers {
    /// The batches of the minibatch, one a microbatch, or of the evaluation's visit.
    pub batches: Vec<Batch>,
    shards: usize,
    /// The microbatches or batches of the visit.
    visit: Range<usize>,
    /// One for each of them.
    sweeps: Vec<Sweep>,
}

impl SweepBuffers {
    /// Nothing yet, of a model of so many shards.
    pub(crate) fn new(shards: usize) -> Self {
        Self { batches: Vec::new(), shards, visit: 0..0, sweeps: Vec::new() }
    }

    /// Lets go of what shard tasks made, and makes room for what those of this visit will.
    pub(crate) fn begin(&mut self, visit: Range<usize>) {
        self.sweeps = visit.clone().map(|_| Sweep::of(self.shards)).collect();
        self.visit = visit;
    }

    /// Lets go of everything.
    pub(crate) fn release(&mut self) {
        self.begin(0..0);
        self.batches.clear();
    }

    /// The sweep of a shard task of the visit.
    fn sweep(&self, next: &ShardTask) -> Option<&Sweep> {
        self.sweeps.get(next.stage.sweep().checked_sub(self.visit.start)?)
    }

    /// The first sweep of the visit that has this one, which is its own where that visit has not begun.
    pub(crate) fn visit_of(&self, sweep: usize) -> usize {
        if self.visit.contains(&sweep) { self.visit.start } else { sweep }
    }

    /// The batch of a shard task, and the loss terms of its whole minibatch.
    pub(crate) fn batch(&self, next: &ShardTask) -> (&Batch, usize) {
        let index = match next.stage {
            Stage::Train { microbatch } => microbatch,
            stage => stage.sweep() - self.visit.start,
        };
        (&self.batches[index], self.batches.iter().map(|batch| batch.terms).sum())
    }

    /// Tokens (or items) in an item.
    pub(crate) fn units_per_item(&self) -> usize {
        self.batches.first().map_or(1, |batch| batch.units / batch.items.max(1))
    }

    /// Returns whether the inputs of a shard task are on the host, or come from the one that it `follows` on its device.
    pub(crate) fn has_inputs(&self, next: &ShardTask, follows: Option<&ShardTask>) -> bool {
        let sweep = self.sweep(next);
        let activation = next.shard == 0
            || sweep.is_some_and(|sweep| sweep.boundary(next.shard).is_some())
            || follows.is_some_and(|running| hands_activation(running, next));
        let upstream = !self.needs_upstream(next)
            || sweep.is_some_and(|sweep| sweep.upstream(next.shard).is_some())
            || follows.is_some_and(|running| hands_gradient(running, next));
        activation && upstream
    }

    /// The inputs of a shard task that are on the host, and whether another one comes from the shard task before it on
    /// the device.
    pub(crate) fn inputs(&self, next: &ShardTask) -> (Inputs<HostTensor>, bool) {
        let ((batch, _), sweep) = (self.batch(next), self.sweep(next));
        let last = next.shard + 1 == self.shards;
        let upstream = sweep.and_then(|sweep| sweep.upstream(next.shard));
        let inputs = Inputs {
            activation: match next.shard {
                0 => Some(batch.inputs.parts.clone()),
                shard => sweep.and_then(|sweep| sweep.boundary(shard)).cloned(),
            },
            targets: if last { batch.targets.parts.clone() } else { Vec::new() },
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
        let index = claim.what.stage.sweep().checked_sub(self.visit.start);
        let Some(sweep) = index.and_then(|index| self.sweeps.get_mut(index)) else { return };
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

    /// The output of the shard task `maker` has arrived. One of an earlier sweep is dropped.
    pub(crate) fn output_arrived(&mut self, maker: Ticket, output: Output<HostTensor>) {
        match output {
            Output::None => {}
            Output::Activation(value) => {
                let mut slots = self.sweeps.iter_mut().flat_map(|sweep| &mut sweep.boundaries).flatten();
                if let Some(slot) = slots.find(|slot| slot.maker == maker) {
                    slot.value = Some(value);
                }
            }
            Output::Gradient(value) => {
                let mut slots = self.sweeps.iter_mut().filter_map(|sweep| sweep.upstream.as_mut());
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
