//! The facts of a task that do not change while it runs.

use crate::admission::{AdmittedTask, SharedImage, stepped_bytes, stored_bytes};
use crate::checkpoint::Identity;
use crate::stages::{EvaluationKind, Program};
use crate::train_task::TrainTask;
use hydra_core::{Chain, Dataset, TaskId};
use hydra_spill::ImageId;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A task as it was submitted and admitted.
#[derive(Clone)]
pub(crate) struct Facts {
    pub id: TaskId,
    pub task: TrainTask,
    pub admitted: AdmittedTask,
    /// The layers of each shard.
    pub shards: Vec<Range<usize>>,
    /// The images that each shard reads, and the shards that read each image.
    pub images: Vec<Vec<usize>>,
    pub readers: Vec<Vec<usize>>,
    /// The images of its chain that it has in common with others.
    by_shared: BTreeMap<ImageId, usize>,
    /// The identity that its checkpoints have, if it has any.
    pub identity: Option<Identity>,
}

impl Facts {
    pub(crate) fn new(
        id: TaskId,
        task: TrainTask,
        admitted: AdmittedTask,
        identity: Option<Identity>,
    ) -> Self {
        let shards = admitted.plan.shards();
        let images: Vec<Vec<usize>> =
            shards.iter().map(|range| task.chain.images_of(range.clone())).collect();
        let mut readers = vec![Vec::new(); task.chain.images().len()];
        for (shard, images) in images.iter().enumerate() {
            images.iter().for_each(|image| readers[*image].push(shard));
        }
        let by_shared = admitted.shared().map(|(image, shared, _)| (shared.id, image)).collect();
        Self { id, images, readers, shards, admitted, by_shared, identity, task }
    }

    pub(crate) fn name(&self) -> &str {
        &self.task.name
    }

    pub(crate) fn chain(&self) -> &Arc<Chain> {
        &self.task.chain
    }

    pub(crate) fn program(&self) -> Program {
        let visit = self.admitted.visit;
        let program = self.task.program(&self.shards, self.chain().first_trained(), visit);
        Program { lanes: self.admitted.lanes, shared: self.admitted.first_evaluation.is_some(), ..program }
    }

    /// Returns whether its masters are device-homed.
    pub(crate) fn on_device(&self) -> bool {
        self.admitted.optimizer.on_device()
    }

    /// Returns whether an image's masters live on the disk.
    pub(crate) fn lives_on_disk(&self, image: usize) -> bool {
        self.admitted.on_disk[image]
    }

    /// The bytes of what the store holds of an image.
    pub(crate) fn stored_bytes(&self, image: usize) -> u64 {
        stored_bytes(&self.chain().images()[image], &self.task.spec)
    }

    /// The bytes of host memory that an image takes on its way to the disk: its first parameters, and a piece of masters.
    pub(crate) fn passing_bytes(&self, image: usize) -> u64 {
        let layout = &self.chain().images()[image];
        layout.master_bytes() + stepped_bytes(layout, &self.task.spec)
    }

    /// The most of them for its images on the disk, if any lives there.
    pub(crate) fn most_passing(&self) -> Option<u64> {
        let images = 0..self.chain().images().len();
        images.filter(|image| self.lives_on_disk(*image)).map(|image| self.passing_bytes(image)).max()
    }

    /// The bytes of the masters in host memory that are its own.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.admitted.memory_bytes()
    }

    /// The masters in host memory that it has in common with others.
    pub(crate) fn shared_in_memory(&self) -> impl Iterator<Item = SharedImage> {
        self.admitted.shared().filter(|(.., on_disk)| !on_disk).map(|(_, shared, _)| shared)
    }

    /// The name under which it reads each image that it has in common with others.
    pub(crate) fn shared_names(&self) -> impl Iterator<Item = (ImageId, SharedImage)> {
        self.admitted.shared().map(|(image, shared, _)| (ImageId::new(self.id, image), shared))
    }

    /// The image in its chain that it has in common with others under this name.
    pub(crate) fn image_of(&self, shared: ImageId) -> Option<usize> {
        self.by_shared.get(&shared).copied()
    }

    /// All that the store has of the task alone: masters, and the copies of the best ones.
    pub(crate) fn stored_images(&self) -> impl Iterator<Item = ImageId> {
        let shared = self.admitted.shared.iter().enumerate();
        let own = shared.filter(|(_, shared)| shared.is_none());
        own.map(|(image, _)| ImageId::new(self.id, image)).flat_map(|id| [id, id.snapshot()])
    }

    /// The data that an evaluation reads.
    pub(crate) fn evaluation_data(&self, kind: EvaluationKind) -> &Arc<dyn Dataset> {
        let task = &self.task;
        let data = if kind == EvaluationKind::Test { &task.test } else { &task.validation };
        data.as_ref().unwrap_or(&task.train)
    }
}
