//! The properties of a task that do not change while it runs.

use crate::admission::{
    AdmittedTask, Place, SharedBuffer, initial_bytes, is_narrowed, stepped_bytes, stored_bytes,
};
use crate::checkpoint::{Checkpoint, Identity};
use crate::train_task::TrainTask;
use hydra_core::{Chain, Dataset, FileVersion, TaskId};
use hydra_sched::program::{EvaluationKind, Program, Stage};
use hydra_spill::{Files, ParamBufferId};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A task as it was submitted and admitted.
#[derive(Clone)]
pub(crate) struct TaskInfo {
    pub id: TaskId,
    pub task: TrainTask,
    pub admitted: AdmittedTask,
    /// The layers of each shard.
    pub shards: Vec<Range<usize>>,
    /// The buffers that each shard reads, and the shards that read each buffer.
    pub buffers: Vec<Vec<usize>>,
    pub readers: Vec<Vec<usize>>,
    /// For each buffer, whether its master weights and their optimizer state are resident on the device.
    pub resident: Arc<[bool]>,
    /// The buffers of its chain that other tasks share.
    by_shared: BTreeMap<ParamBufferId, usize>,
    /// The identity in its checkpoints; `None` if it writes none.
    pub identity: Option<Identity>,
    /// Minibatches trained in the checkpoint that the task was resumed from.
    pub resumed_at: Option<usize>,
}

impl TaskInfo {
    pub(crate) fn new(
        id: TaskId,
        task: TrainTask,
        admitted: AdmittedTask,
        identity: Option<Identity>,
    ) -> Self {
        let shards = admitted.plan.shards();
        let buffers: Vec<Vec<usize>> =
            shards.iter().map(|range| task.chain.buffers_of(range.clone())).collect();
        let mut readers = vec![Vec::new(); task.chain.buffers().len()];
        for (shard, buffers) in buffers.iter().enumerate() {
            buffers.iter().for_each(|buffer| readers[*buffer].push(shard));
        }
        let by_shared = admitted.storage.shared().map(|(buffer, shared)| (shared.id, buffer)).collect();
        let resident = (0..task.chain.buffers().len()).map(|buffer| admitted.optimizer.is_resident(buffer));
        let resident = resident.collect();
        let resumed_at = task.start.state().map(Checkpoint::step);
        Self { id, buffers, readers, shards, admitted, resident, by_shared, identity, resumed_at, task }
    }

    pub(crate) fn name(&self) -> &str {
        &self.task.name
    }

    pub(crate) fn chain(&self) -> &Arc<Chain> {
        &self.task.chain
    }

    pub(crate) fn program(&self) -> Program {
        let microbatch_group = self.admitted.microbatch_group;
        let program = self.task.program(&self.shards, self.chain().first_trained(), microbatch_group);
        Program {
            replicas: self.admitted.replicas,
            shared: self.admitted.first_evaluation.is_some(),
            ..program
        }
    }

    /// Returns whether all of its master weights and its optimizer state are resident on the device.
    pub(crate) fn on_device(&self) -> bool {
        self.admitted.optimizer.on_device()
    }

    /// Returns whether the master weights of a buffer and their optimizer state are resident on the device.
    pub(crate) fn is_resident(&self, buffer: usize) -> bool {
        self.resident[buffer]
    }

    /// Returns whether any buffer is resident on the device.
    pub(crate) fn has_resident(&self) -> bool {
        self.admitted.optimizer.on != Place::Host
    }

    /// Returns whether a buffer's master weights are on the disk.
    pub(crate) fn lives_on_disk(&self, buffer: usize) -> bool {
        self.admitted.storage.on_disk[buffer]
    }

    /// Returns whether a buffer is read in place.
    pub(crate) fn is_in_place(&self, buffer: usize) -> bool {
        self.admitted.storage.in_place[buffer]
    }

    /// The bytes of a buffer in the store.
    pub(crate) fn stored_bytes(&self, buffer: usize) -> u64 {
        match self.is_in_place(buffer) {
            true => 0,
            false => stored_bytes(&self.chain().buffers()[buffer], &self.task.spec),
        }
    }

    /// The bytes of host memory in which a buffer's initial parameters are compared with stored ones.
    pub(crate) fn compared_bytes(&self, buffer: usize) -> u64 {
        if self.is_in_place(buffer) { 0 } else { initial_bytes(self.chain(), buffer) }
    }

    /// The bytes of host memory that a buffer takes on its way to the disk: its initial parameters and a block of
    /// master weights.
    pub(crate) fn passing_bytes(&self, buffer: usize) -> u64 {
        let layout = &self.chain().buffers()[buffer];
        initial_bytes(self.chain(), buffer) + stepped_bytes(layout, &self.task.spec)
    }

    /// Returns whether a buffer's initial values pass through host memory that its master weights do not take: it is
    /// stored on the disk, or rounded as a whole.
    pub(crate) fn passes(&self, buffer: usize) -> bool {
        self.lives_on_disk(buffer) || !self.is_in_place(buffer) && is_narrowed(self.chain(), buffer)
    }

    /// Returns whether master weights of the task are on the disk.
    pub(crate) fn uses_disk(&self) -> bool {
        self.admitted.storage.on_disk.contains(&true)
    }

    /// The largest [`passing_bytes`](Self::passing_bytes) of the buffers that pass and for which `is_read` is true, if any do.
    pub(crate) fn most_passing(&self, is_read: impl Fn(usize) -> bool) -> Option<u64> {
        let buffers = (0..self.chain().buffers().len()).filter(|buffer| is_read(*buffer));
        buffers.filter(|buffer| self.passes(*buffer)).map(|buffer| self.passing_bytes(buffer)).max()
    }

    /// The files from which a shared buffer is read, if they are as they were; `None` if not, and for other buffers.
    pub(crate) fn files(&self, buffer: usize) -> Files {
        self.admitted.storage.shared[buffer]?;
        let chain = self.chain();
        let files = chain.source().files_of(chain, buffer)?;
        files.iter().all(FileVersion::is_current).then_some(files)
    }

    /// Its own id and the shared id of each buffer that it shares with other tasks.
    pub(crate) fn shared_names(&self) -> impl Iterator<Item = (ParamBufferId, SharedBuffer)> {
        self.admitted.storage.shared().map(|(buffer, shared)| (ParamBufferId::new(self.id, buffer), shared))
    }

    /// The index in its chain of the buffer with this shared id.
    pub(crate) fn buffer_of(&self, shared: ParamBufferId) -> Option<usize> {
        self.by_shared.get(&shared).copied()
    }

    /// All buffers in the store that only this task uses: master weights and snapshots of the best ones.
    pub(crate) fn stored_buffers(&self) -> impl Iterator<Item = ParamBufferId> {
        let shared = self.admitted.storage.shared.iter().enumerate();
        let own = shared.filter(|(_, shared)| shared.is_none());
        own.map(|(buffer, _)| ParamBufferId::new(self.id, buffer)).flat_map(|id| [id, id.snapshot()])
    }

    /// The dataset of an evaluation, or of its rounds.
    pub(crate) fn evaluation_data(&self, kind: EvaluationKind, rounds: bool) -> Arc<dyn Dataset> {
        let task = &self.task;
        if let Some(of) = task.rounds.as_ref().filter(|_| rounds) {
            return of.data.clone();
        }
        let data = if kind == EvaluationKind::Test { &task.test } else { &task.validation };
        data.as_ref().unwrap_or(&task.train).clone()
    }

    /// The chain that computes the shard tasks of a stage.
    pub(crate) fn chain_of(&self, stage: Stage) -> &Arc<Chain> {
        match (&self.task.rounds, stage) {
            (Some(of), Stage::Evaluate { rounds: true, .. }) => &of.chain,
            _ => self.chain(),
        }
    }

    /// The first layer that reads targets, in the chain and in the one of rounds.
    pub(crate) fn targets_from(&self) -> [usize; 2] {
        let own = self.chain().targets_from();
        [own, self.task.rounds.as_ref().map_or(own, |of| of.chain.targets_from())]
    }
}
