//! The host memory of microbatch groups: their batches, and the tensors passed between their shard tasks.

use super::Claim;
use crate::protocol::{Gradient, Inputs, Loaded, Output, Ticket};
use hydra_core::{Batch, HostTensor, Sampler, TrainSpec};
use hydra_sched::ShardTaskKind;
use hydra_sched::program::{self, ShardTask, Stage};
use std::ops::Range;

/// An input that is the output of another shard task.
#[derive(Debug)]
struct Slot<T> {
    maker: Ticket,
    value: Option<T>,
}

/// The tensors passed between the shard tasks of one microbatch pass.
#[derive(Debug)]
struct MicrobatchPass {
    /// The boundary activation that each shard reads.
    boundaries: Vec<Option<Slot<Vec<HostTensor>>>>,
    /// The gradient with respect to the output of a shard.
    upstream: Option<(usize, Slot<Gradient<HostTensor>>)>,
}

impl MicrobatchPass {
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

/// The host tensors of a microbatch group.
#[derive(Debug, Default)]
struct GroupBuffers {
    /// The microbatches or batches of the microbatch group.
    microbatch_group: Range<usize>,
    /// The batches of a microbatch group of an evaluation.
    batches: Vec<Batch>,
    /// One for each of `microbatch_group`.
    microbatch_passes: Vec<MicrobatchPass>,
}

impl GroupBuffers {
    /// The index of a microbatch pass in the microbatch group.
    fn index_of(&self, task: &ShardTask) -> Option<usize> {
        let (group, microbatch_pass) = (&self.microbatch_group, task.stage.microbatch_pass());
        group.contains(&microbatch_pass).then(|| microbatch_pass - group.start)
    }

    fn microbatch_pass(&self, task: &ShardTask) -> Option<&MicrobatchPass> {
        self.microbatch_passes.get(self.index_of(task)?)
    }
}

/// The host tensors of the microbatch groups in flight, by replica.
#[derive(Debug)]
pub(crate) struct PassBuffers {
    shards: usize,
    /// The first shard that reads targets, and the first one in rounds.
    targets_from: [usize; 2],
    /// The minibatch or evaluation of the microbatch group that started last.
    of: Option<program::MicrobatchPass>,
    /// The batches of the minibatch, one for each microbatch.
    minibatch: Vec<Batch>,
    /// The objective's statistic of the minibatch, once it is known.
    pub statistic: Option<f64>,
    replicas: Vec<GroupBuffers>,
}

impl PassBuffers {
    /// Empty buffers of a model with these shards whose layers read targets from `targets_from` on, in passes other than
    /// rounds and in rounds, in `replicas` replicas.
    pub(crate) fn new(shards: &[Range<usize>], targets_from: [usize; 2], replicas: usize) -> Self {
        let replicas = (0..replicas).map(|_| GroupBuffers::default()).collect();
        let targets_from =
            targets_from.map(|layer| shards.iter().take_while(|shard| shard.end <= layer).count());
        Self {
            shards: shards.len(),
            targets_from,
            of: None,
            minibatch: Vec::new(),
            statistic: None,
            replicas,
        }
    }

    /// Prepares for the outputs of a microbatch group that a replica starts; `next` is its first shard task. Drops
    /// the outputs of the replica's previous microbatch group, and everything of another minibatch or evaluation.
    pub(crate) fn begin(&mut self, replica: usize, next: &ShardTask, microbatch_group: Range<usize>) {
        let of = program::MicrobatchPass::of(next);
        if self.of.replace(of).is_none_or(|before| !before.same_minibatch(&of)) {
            self.release();
        }
        let microbatch_passes = microbatch_group.clone().map(|_| MicrobatchPass::of(self.shards)).collect();
        self.replicas[replica] = GroupBuffers { microbatch_group, batches: Vec::new(), microbatch_passes };
    }

    /// Stores the batches of a whole minibatch, or of the evaluation's microbatch group that a replica has started.
    pub(crate) fn read(&mut self, replica: usize, stage: Stage, batches: Vec<Batch>) {
        match stage {
            Stage::Measure { .. } | Stage::Train { .. } => self.minibatch = batches,
            _ => self.replicas[replica].batches = batches,
        }
    }

    /// The batches of the current minibatch.
    pub(crate) fn minibatch(&self) -> &[Batch] {
        &self.minibatch
    }

    /// Drops all batches and tensors.
    pub(crate) fn release(&mut self) {
        self.minibatch.clear();
        self.statistic = None;
        self.replicas.iter_mut().for_each(|replica| *replica = GroupBuffers::default());
    }

    /// The batch of a replica's shard task, and the loss targets of its whole minibatch.
    pub(crate) fn batch(&self, replica: usize, next: &ShardTask) -> (&Batch, usize) {
        let of = &self.replicas[replica];
        let (batches, place) = match next.stage {
            Stage::Measure { microbatch } | Stage::Train { microbatch } => (&self.minibatch, microbatch),
            stage => (&of.batches, stage.microbatch_pass() - of.microbatch_group.start),
        };
        (&batches[place], batches.iter().map(|batch| batch.loss_targets).sum())
    }

    /// Returns whether the inputs of a replica's shard task are on the host, or come from the one that it `follows`
    /// on its device.
    pub(crate) fn has_inputs(&self, replica: usize, next: &ShardTask, follows: Option<&ShardTask>) -> bool {
        let microbatch_pass = self.replicas[replica].microbatch_pass(next);
        let activation = next.shard == 0
            || microbatch_pass.is_some_and(|microbatch_pass| microbatch_pass.boundary(next.shard).is_some())
            || follows.is_some_and(|running| hands_activation(running, next));
        let upstream = !self.needs_upstream(next)
            || microbatch_pass.is_some_and(|microbatch_pass| microbatch_pass.upstream(next.shard).is_some())
            || follows.is_some_and(|running| hands_gradient(running, next));
        activation && upstream
    }

    /// The inputs of a replica's shard task that are on the host, and whether another one comes from the previous
    /// shard task on the device.
    pub(crate) fn inputs(&self, replica: usize, next: &ShardTask) -> (Inputs<HostTensor>, bool) {
        let ((batch, _), microbatch_pass) =
            (self.batch(replica, next), self.replicas[replica].microbatch_pass(next));
        let rounds = matches!(next.stage, Stage::Evaluate { rounds: true, .. });
        let compares = next.shard >= self.targets_from[usize::from(rounds)];
        let upstream = microbatch_pass.and_then(|microbatch_pass| microbatch_pass.upstream(next.shard));
        let inputs = Inputs {
            activation: match next.shard {
                0 => Some(batch.inputs.parts.clone()),
                shard => microbatch_pass.and_then(|microbatch_pass| microbatch_pass.boundary(shard)).cloned(),
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

    /// Returns whether the output of `claim` is needed on the host. `handed` is true if the next shard task of the
    /// microbatch pass takes it on the device.
    pub(crate) fn needs_output(&self, claim: &Claim, handed: bool) -> bool {
        let checkpoint = claim.what.kind == ShardTaskKind::Forward && claim.what.shard + 2 < self.shards;
        !handed || checkpoint
    }

    /// Reserves a slot for the output of `claim`.
    pub(crate) fn expect_output(&mut self, claim: &Claim) {
        let replica = &mut self.replicas[claim.replica];
        let place = replica.index_of(&claim.what);
        let Some(microbatch_pass) = place.and_then(|place| replica.microbatch_passes.get_mut(place)) else {
            return;
        };
        match claim.what.kind {
            ShardTaskKind::Backward => {
                if let Some(shard) = claim.what.shard.checked_sub(1) {
                    microbatch_pass.upstream = Some((shard, Slot { maker: claim.ticket, value: None }));
                }
            }
            ShardTaskKind::Forward | ShardTaskKind::Evaluate => {
                if let Some(slot) = microbatch_pass.boundaries.get_mut(claim.what.shard + 1) {
                    *slot = Some(Slot { maker: claim.ticket, value: None });
                }
            }
        }
    }

    /// The replica whose microbatch group waits for the output of the shard task `maker`.
    pub(crate) fn replica_awaiting(&self, maker: Ticket) -> Option<usize> {
        let awaits = |microbatch_pass: &MicrobatchPass| {
            let mut boundaries = microbatch_pass.boundaries.iter().flatten();
            boundaries.any(|slot| slot.maker == maker)
                || microbatch_pass.upstream.as_ref().is_some_and(|(_, slot)| slot.maker == maker)
        };
        self.replicas.iter().position(|replica| replica.microbatch_passes.iter().any(awaits))
    }

    /// Stores the output of the shard task `maker`; drops that of an earlier microbatch pass.
    pub(crate) fn output_arrived(&mut self, maker: Ticket, output: Output<HostTensor>) {
        let microbatch_passes = self.replicas.iter_mut().flat_map(|replica| &mut replica.microbatch_passes);
        match output {
            Output::None => {}
            Output::Activation(value) => {
                let mut slots =
                    microbatch_passes.flat_map(|microbatch_pass| &mut microbatch_pass.boundaries).flatten();
                if let Some(slot) = slots.find(|slot| slot.maker == maker) {
                    slot.value = Some(value);
                }
            }
            Output::Gradient(value) => {
                let mut slots =
                    microbatch_passes.filter_map(|microbatch_pass| microbatch_pass.upstream.as_mut());
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

/// The reading of a task's batches: the order of its training items, and the batches that are read ahead, for at most
/// one microbatch group at a time.
pub(crate) struct BatchReader {
    pub(super) sampler: Sampler,
    loading: Option<program::MicrobatchPass>,
    loaded: Option<Loaded>,
}

impl BatchReader {
    /// Reads `items` training items in the order of `spec`.
    pub(super) fn new(items: usize, spec: &TrainSpec) -> Self {
        let sampler = Sampler::new(items, spec.batch, spec.seed, spec.shuffle);
        Self { sampler, loading: None, loaded: None }
    }

    /// Returns whether batches are being read. They have their own memory, and the end of the task does not wait for
    /// them.
    pub(crate) fn reads(&self) -> bool {
        self.loading.is_some()
    }

    /// Returns whether the batches of this microbatch pass are being read.
    pub(crate) fn reads_for(&self, microbatch_pass: program::MicrobatchPass) -> bool {
        self.loading == Some(microbatch_pass)
    }

    /// Returns whether the batches of this microbatch pass, which starts next, are not loaded. Drops loaded batches
    /// of another microbatch pass.
    pub(crate) fn is_free_for(&mut self, microbatch_pass: program::MicrobatchPass) -> bool {
        self.loaded.take_if(|loaded| loaded.of != microbatch_pass);
        self.loaded.is_none()
    }

    pub(crate) fn begin(&mut self, microbatch_pass: program::MicrobatchPass) {
        self.loading = Some(microbatch_pass);
    }

    /// Stores batches that were read ahead, or the error, unless the task is over.
    pub(crate) fn arrived(&mut self, loaded: Loaded, wanted: bool) {
        self.loading = None;
        self.loaded = Some(loaded).filter(|_| wanted);
    }

    /// The batches that were read ahead for this microbatch pass.
    pub(crate) fn take(&mut self, microbatch_pass: program::MicrobatchPass) -> Option<Loaded> {
        self.loaded.take().filter(|loaded| loaded.of == microbatch_pass)
    }

    pub(crate) fn release(&mut self) {
        self.loaded = None;
    }
}
