//! The facts of a task that do not change while it runs.

use crate::admission::{AdmittedTask, Placement, stored_bytes};
use crate::checkpoint::Identity;
use crate::stages::{EvaluationKind, Program};
use crate::train_task::TrainTask;
use hydra_core::{Chain, Dataset, TaskId};
use hydra_partition::PartitionPlan;
use hydra_spill::ImageId;
use std::ops::Range;
use std::sync::Arc;

/// A task as it was submitted and admitted.
pub(crate) struct Facts {
    pub id: TaskId,
    pub task: TrainTask,
    pub plan: Arc<PartitionPlan>,
    pub placement: Placement,
    /// The layers of each shard.
    pub shards: Vec<Range<usize>>,
    /// The images that each shard reads.
    images: Vec<Vec<usize>>,
    /// True for each image on the disk; empty if none is.
    on_disk: Vec<bool>,
    /// Bytes of masters in host memory, and on the disk.
    pub memory_bytes: u64,
    pub disk_bytes: u64,
    /// Host bytes of the batches of a minibatch.
    pub batch_bytes: u64,
    /// Host bytes while it is within a minibatch.
    pub active_bytes: u64,
    /// The identity that its checkpoints have, if it has any.
    pub identity: Option<Identity>,
}

impl Facts {
    pub(crate) fn new(
        id: TaskId,
        task: TrainTask,
        admitted: &AdmittedTask,
        identity: Option<Identity>,
    ) -> Self {
        let shards = admitted.plan.shards();
        Self {
            id,
            images: shards.iter().map(|range| task.chain.images_of(range.clone())).collect(),
            shards,
            plan: admitted.plan.clone(),
            placement: admitted.optimizer.clone(),
            on_disk: admitted.on_disk.clone(),
            memory_bytes: admitted.master_bytes - admitted.disk_bytes,
            disk_bytes: admitted.disk_bytes,
            batch_bytes: admitted.batch_bytes,
            active_bytes: admitted.active_bytes,
            identity,
            task,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.task.name
    }

    pub(crate) fn chain(&self) -> &Arc<Chain> {
        &self.task.chain
    }

    pub(crate) fn program(&self) -> Program {
        self.task.program(&self.shards, self.chain().first_trained())
    }

    pub(crate) fn images_of_shard(&self, shard: usize) -> &[usize] {
        &self.images[shard]
    }

    /// Returns whether an image's masters live on the disk.
    pub(crate) fn lives_on_disk(&self, image: usize) -> bool {
        self.on_disk.get(image).copied().unwrap_or(false)
    }

    /// The bytes of what the store holds of an image.
    pub(crate) fn stored_bytes(&self, image: usize) -> u64 {
        stored_bytes(&self.chain().images()[image], &self.task.spec)
    }

    /// The bytes of its largest image on the disk, if any lives there.
    pub(crate) fn largest_on_disk(&self) -> Option<u64> {
        let images = 0..self.on_disk.len();
        images.filter(|image| self.on_disk[*image]).map(|image| self.stored_bytes(image)).max()
    }

    /// All that the store has of the task: masters, and the copies of the best ones.
    pub(crate) fn stored_images(&self) -> impl Iterator<Item = ImageId> {
        let id = self.id;
        (0..self.chain().images().len())
            .map(move |image| ImageId::new(id, image))
            .flat_map(|id| [id, id.snapshot()])
    }

    /// The data that an evaluation reads.
    pub(crate) fn evaluation_data(&self, kind: EvaluationKind) -> &Arc<dyn Dataset> {
        let task = &self.task;
        let data = if kind == EvaluationKind::Test { &task.test } else { &task.validation };
        data.as_ref().unwrap_or(&task.train)
    }
}
